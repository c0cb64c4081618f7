"""`megashard infer`: log-probabilities and greedy continuations of transformers, on one rank and sharded."""
import json
import os
import struct
import subprocess

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from test_models import BUILD
from tiny_vision import AGAIN, ASKED, IMAGE, asked, make_processors, make_vision_model, said, write_conversations

PROGRAM = os.environ.get("MEGASHARD", str(BUILD / "launch" / "megashard"))
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


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """A folder with a model and a data set, and what transformers makes of them."""
    folder = tmp_path_factory.mktemp("infer")
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, eos_token_id=96, pad_token_id=None)).eval()
    model.save_pretrained(folder / "model")
    texts = [torch.randint(0, 96, (length,)) for length in LENGTHS]
    pointers = np.cumsum([0, *(2 * length for length in LENGTHS)])[:-1]
    count = len(LENGTHS)
    (folder / "data.bin").write_bytes(b"".join(text.numpy().astype(np.uint16).tobytes() for text in texts))
    (folder / "data.idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, count + 1) + struct.pack(f"<{count}i", *LENGTHS) +
        struct.pack(f"<{count}q", *pointers) + struct.pack(f"<{count + 1}q", *range(count + 1)))
    log_probs, generated = torch.zeros(count, 23), torch.full((count, 8), 96)
    with torch.no_grad():
        for i, text in enumerate(texts):
            each = model(text[None]).logits[0].log_softmax(-1)
            log_probs[i, :len(text) - 1] = each[:-1].gather(1, text[1:, None])[:, 0]
            new = model.generate(text[None], max_new_tokens=8, do_sample=False, pad_token_id=96)[0, len(text):]
            generated[i, :len(new)] = new
    return folder, log_probs.numpy(), generated.numpy()


def infer(folder, ranks, *flags, expect=0):
    for name in ("log_probs.npy", "generated.npy"):
        (folder / name).unlink(missing_ok=True)
    command = [PROGRAM, "launch", "-n", ranks, "--", "infer", *([] if "--data-path" in flags else ["--data-path", folder / "data"]),
               *flags]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120, cwd=folder,
                          stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


BOTH = ("--log-probs", "log_probs.npy", "--generate", "8", "--generated", "generated.npy")


def check(wanted):
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


def test_a_worker_of_fsdp2_infer(wanted):
    folder = wanted[0]
    config = folder / "roll.yaml"
    config.write_text(ROLL.replace("FOLDER", str(folder)).replace("DTYPE", "float32"))
    out = infer(folder, 2, "--config", config, "--role", "reference", *BOTH)
    assert "parameters are sharded over 2 ranks" in out
    check(wanted)
    config.write_text(ROLL.replace("FOLDER", str(folder)).replace("DTYPE", "bf16"))
    infer(folder, 2, "--config", config, "--role", "reference", *BOTH[:2])
    assert np.abs(np.load(folder / "log_probs.npy") - wanted[1]).max() < 0.3  # three digits, over logits of about 10


def test_mistakes_are_sentences(wanted):
    folder = wanted[0]
    flags = ["--hf-model", folder / "model", "--seq-length", "23"]
    assert "there is nothing to do" in infer(folder, 1, *flags, expect=2)
    assert "belong together" in infer(folder, 1, *flags, "--generate", "3", expect=2)
    assert "document 2 of" in infer(folder, 1, "--hf-model", folder / "model", "--seq-length", "22", *BOTH[:2], expect=1)
    assert "Runs a model over each document" in infer(folder, 1, "--help")


@pytest.mark.parametrize("family, flags", [("qwen2_5_vl", [1, "--micro-batch-size", "2"]), ("qwen3_vl_moe", [2, "--use-torch-fsdp2"])])
def test_conversations_with_pictures(tmp_path, family, flags):
    """The second has a rank without a conversation in its last forward, and one without pictures before."""
    make_processors(tmp_path)
    model = make_vision_model(tmp_path, family).eval()
    write_conversations(tmp_path, [[asked("the mat"), said("sat on the mat")], [ASKED, said("sat"), AGAIN, said("the mat")],
                                   [AGAIN, said("cat")]], tmp_path / "chats")
    data = load_file(tmp_path / "chats.vision.safetensors")
    ends, images, patches = ([0, *each.tolist()] for each in (
        data["sample_ends"], data["image_ends"], data["image_grid_thw"].prod(1).cumsum(0)))
    wanted = torch.zeros(3, 40)
    with torch.no_grad():
        for i in range(3):
            tokens, grids = data["tokens"][None, ends[i]:ends[i + 1]].long(), data["image_grid_thw"][images[i]:images[i + 1]]
            pixels = data["pixel_values"][patches[images[i]]:patches[images[i + 1]]]
            seen = dict(pixel_values=pixels, image_grid_thw=grids) if len(grids) else {}
            each = model(tokens, mm_token_type_ids=(tokens == IMAGE).int(), **seen).logits[0].log_softmax(-1)
            wanted[i, :tokens.shape[1] - 1] = each[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    given = [*flags, "--hf-model", tmp_path, "--data-path", tmp_path / "chats", "--seq-length", "40"]
    assert "log-probabilities of 3 documents" in infer(tmp_path, *given, "--log-probs", "log_probs.npy")
    assert np.abs(np.load(tmp_path / "log_probs.npy") - wanted.numpy()).max() < 1e-5 * wanted.abs().max()
    if family == "qwen2_5_vl":
        out = infer(tmp_path, *given, "--generate", "2", "--generated", "generated.npy", expect=2)
        assert "chats holds conversations, which end with their answers" in out
        return
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["output_router_logits"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "output_router_logits in config.json" in infer(tmp_path, *given, "--log-probs", "log_probs.npy", expect=2)
