"""ignored_modules of the FSDP2 file: every rank holds them whole, and with ignored_modules_replicated they train as one
copy."""
import json

import pytest

import megashard

NETWORK = megashard.network(heads=4)
LOOP = ("--micro-batch-size 1 --global-batch-size 8 --train-iters 4 --lr 1e-2 --clip-grad 0.5 --mock-data "
        f"--attention-dropout 0 --hidden-dropout 0 {megashard.RUN}")
REPLICATED = "ignored_modules_replicated: true\nignored_modules:\n"
IGNORED = REPLICATED + "  - lm_head\n  - model.layers.0.mlp\n  - model.norm\n"
EXPERTS = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8, "head_dim": 8, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 60, "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False, "norm_topk_prob": True, "eos_token_id": 2}
# flags, FSDP2 file, numbers of ranks
WAYS = {
    "sharded": ([], IGNORED, (1, 2, 4)),
    "a mean over all tokens": (["--calculate-per-token-loss"], IGNORED, (2,)),
    "replicas": ([], IGNORED + "sharding_size: 2\n", (4,)),
    "sequences on two ranks": (["--context-parallel-size", "2"], IGNORED, (4,)),
    "first values on the meta device": (["--init-model-with-meta-device"], IGNORED, (2,)),
    "one reduction a step": (["--no-reduce-scatter-during-grad-accumulation"], IGNORED, (2,)),
}


def train(folder, ranks, config, *flags, network=NETWORK):
    steps, _ = megashard.pretrain(folder, *flags, ranks=ranks, defaults=network + LOOP, config=config)
    return [(step["loss"], step["grad_norm"]) for step in steps]


def agree(one, other):
    assert len(one) == len(other) > 1
    for (loss, norm), (other_loss, other_norm) in zip(one, other):
        assert other_loss == pytest.approx(loss, abs=1e-6)
        assert other_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_they_train_as_one_copy(tmp_path, way):
    flags, config, worlds = WAYS[way]
    sharded = train(tmp_path, worlds[0], "sharding_size: auto\n", *flags)  # without ignored modules
    for ranks in worlds:
        agree(sharded, train(tmp_path, ranks, config, *flags))


@pytest.mark.parametrize("config", ["sharding_size: 1\n", "sharding_size: 1\n" + IGNORED])
def test_copies_begin_equal(tmp_path, config):
    """Though each rank draws its own first values."""
    agree(train(tmp_path, 1, config), train(tmp_path, 2, config, "--data-parallel-random-init"))


def test_a_router_beside_experts_on_several_ranks(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    network = f"--hf-model {tmp_path} --from-scratch --seq-length 16 "
    router = REPLICATED + "  - model.layers.0.mlp.gate\n"
    one = train(tmp_path, 1, router, network=network)
    agree(one, train(tmp_path, 2, router, "--expert-model-parallel-size", "2", network=network))


def test_they_are_saved_whole_and_resumed_on_other_ranks(tmp_path):
    whole = train(tmp_path, 1, IGNORED)
    save = ["--save", tmp_path / "saved", "--save-interval", "2"]
    agree(whole, train(tmp_path, 2, IGNORED, *save))
    (tmp_path / "saved" / megashard.TRACKER).write_text("2")
    agree(whole[2:], train(tmp_path, 4, IGNORED, "--load", tmp_path / "saved"))
