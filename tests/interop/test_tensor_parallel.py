"""--tensor-model-parallel-size: pieces of layers, sharded by FSDP2 over the other ranks, train as one rank does."""
import json
import re

import numpy
import pytest
import torch
from safetensors.torch import load_file

import megashard
from test_ignored_modules import EXPERTS, agree

GPT = megashard.network(heads=4) + "--make-vocab-size-divisible-by 4 "  # LayerNorm, learned positions, biases, tied
LOOP = ("--micro-batch-size 1 --global-batch-size 8 --train-iters 4 --lr 1e-2 --clip-grad 0.5 --mock-data "
        f"--attention-dropout 0 --hidden-dropout 0 --log-tps --log-interval 1 {megashard.RUN}")
MOE = EXPERTS | {"num_hidden_layers": 2, "num_attention_heads": 4, "output_router_logits": True,
                 "router_aux_loss_coef": 0.01}
TP = ["--tensor-model-parallel-size", "2"]
SP = [*TP, "--sequence-parallel"]
AUTO, REPLICAS = megashard.LAYERS, megashard.LAYERS + "sharding_size: 1\n"
# network, ranks, FSDP2 file, flags
WAYS = {
    "pieces": ("gpt", 2, AUTO, TP),
    "pieces of a sequence": ("gpt", 2, AUTO, SP),
    "four pieces": ("gpt", 4, AUTO, ["--tensor-model-parallel-size", "4", "--sequence-parallel"]),
    "sharded": ("gpt", 4, AUTO, SP),
    "replicas": ("gpt", 4, REPLICAS, TP),
    "sequences on two ranks": ("gpt", 4, AUTO, [*SP, "--context-parallel-size", "2"]),
    "a ring of two ranks": ("gpt", 4, AUTO, [*SP, *"--context-parallel-size 2 --context-parallel-algo "
                                                   "megatron_cp_algo".split()]),
    "experts on two ranks, and a ring": ("moe", 4, AUTO, "--context-parallel-size 2 --expert-model-parallel-size 2 "
                                                         "--context-parallel-algo megatron_cp_algo".split()),
    "a mean over all tokens": ("gpt", 4, AUTO, [*TP, "--calculate-per-token-loss"]),
    "recomputed": ("gpt", 2, AUTO, [*SP, *"--recompute-granularity full --recompute-method uniform "
                                           "--recompute-num-layers 1".split()]),
    "on the meta device": ("gpt", 4, AUTO, [*TP, "--init-model-with-meta-device"]),
    "tiles": ("gpt", 2, AUTO, [*TP, "--apply-tiled-mlp"]),
    "experts": ("moe", 2, AUTO, SP),
    "experts on two ranks": ("moe", 4, AUTO, [*TP, "--expert-model-parallel-size", "2"]),
}


@pytest.fixture(scope="module")
def networks(folder):
    (folder / "config.json").write_text(json.dumps(MOE))
    return {"gpt": GPT, "moe": f"--hf-model {folder} --from-scratch --seq-length 16 "}


def train(folder, network, ranks, config, *flags):
    """Losses and norms; a sample has as many tokens at any number of ranks."""
    steps, out = megashard.pretrain(folder, *flags, ranks=ranks, defaults=network + LOOP, config=config)
    assert set(re.findall(r"tokens per sample: (\S+)", out)) == {"1.600000E+01"}, out
    return [(step["loss"], step["grad_norm"]) for step in steps]


@pytest.fixture(scope="module")
def one_rank(folder, networks):
    found = {(name, ()): train(folder, network, 1, AUTO) for name, network in networks.items()}
    per_token = ("--calculate-per-token-loss",)
    found["gpt", per_token] = train(folder, GPT, 1, AUTO, *per_token)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_it_trains_as_one_rank(tmp_path, networks, one_rank, way):
    network, ranks, config, flags = WAYS[way]
    mine = train(tmp_path, networks[network], ranks, config, *flags)
    agree(one_rank[network, tuple(each for each in flags if each == "--calculate-per-token-loss")], mine)


@pytest.mark.parametrize("checkpoint_format", ["torch_dcp", "torch_dist"])
@pytest.mark.parametrize("network", ["gpt", "moe"])
def test_a_run_goes_on_in_other_pieces(tmp_path, networks, one_rank, network, checkpoint_format):
    flags = ["--ckpt-format", checkpoint_format]
    save = [*flags, "--save", tmp_path / "saved", "--save-interval", "2"]
    train(tmp_path, networks[network], 4, AUTO, *TP, *save)
    (tmp_path / "saved" / megashard.TRACKER).write_text("2")
    for ranks, pieces in ((1, []), (2, SP)):
        mine = train(tmp_path, networks[network], ranks, AUTO, *flags, *pieces, "--load", tmp_path / "saved")
        agree(one_rank[network, ()][2:], mine)


def test_hugging_face_files_are_those_of_one_rank(tmp_path, networks):
    """Saved by pieces, and read by them: infer's log-probabilities."""
    def weights(name, ranks, *flags):
        train(tmp_path, networks["moe"], ranks, AUTO, *flags, "--save-hf", tmp_path / name)
        return load_file(tmp_path / name / "model.safetensors")

    one, pieces = weights("one", 1), weights("pieces", 4, *TP)
    assert one.keys() == pieces.keys()
    for name, weight in one.items():
        torch.testing.assert_close(pieces[name], weight, rtol=0, atol=1e-5, msg=name)  # 4 steps of AdamW, lr 1e-2

    config = json.loads((tmp_path / "pieces" / "config.json").read_text())
    (tmp_path / "pieces" / "config.json").write_text(json.dumps(config | {"output_router_logits": False}))
    megashard.write_documents(tmp_path / "data", [range(3, 3 + length) for length in (9, 13, 2)])
    read = {}
    for ranks, flags in ((1, []), (4, TP)):
        megashard.run(*megashard.launch(ranks, "infer", "--hf-model", tmp_path / "pieces", "--data-path",
                                        tmp_path / "data", "--seq-length", 13, "--use-torch-fsdp2", *flags,
                                        "--log-probs", tmp_path / "log_probs.npy", "--generated",
                                        tmp_path / "generated.npy", "--generate", 3))
        read[ranks] = [numpy.load(tmp_path / f"{name}.npy") for name in ("log_probs", "generated")]
    numpy.testing.assert_allclose(read[4][0], read[1][0], atol=1e-5)
    assert (read[4][1] == read[1][1]).all()


def test_bf16_is_as_near_as_bf16_is(tmp_path, networks):
    """Partial sums are rounded once more where they meet: 8 bits of mantissa on losses of 4."""
    config = AUTO + "param_dtype: bf16\nreduce_dtype: fp32\n"
    one, pieces = (train(tmp_path, GPT, ranks, config, *flags) for ranks, flags in ((1, []), (2, SP)))
    for (loss, _), (other, _) in zip(one, pieces):
        assert other == pytest.approx(loss, abs=2e-2)
