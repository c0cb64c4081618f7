"""Runs the programs as a user does who gets something wrong, and what the cases of test_wrong_*.py share."""
import json
import os
import pathlib
import struct
import subprocess
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("MEGASHARD_BUILD", ROOT / "build"))
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
USAGE, FAILURE = 2, 1


def clean_environment(**environment):
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    return {**clean, "OMP_NUM_THREADS": "1", **environment}


def run(*arguments, **environment):
    return subprocess.run([BUILD / "launch" / "megashard", *map(str, arguments)], env=clean_environment(**environment), cwd=ROOT,
                          capture_output=True, text=True, timeout=60)


def only_line(done):
    """What the user sees: one line on stderr, no stack."""
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("megashard: error: "), done.stderr
    return lines[0]


def check(case, **places):
    """A case: the words (with {places}), the exit code, and a part of the one sentence."""
    arguments, code, sentence = case
    done = run(*[each.format(**places) for each in arguments])
    assert sentence in only_line(done)
    assert done.returncode == code


NETWORK = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 --seq-length 16 "
    "--tokenizer-type NullTokenizer --vocab-size 60"
).split()
LOOP = (
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 2 --eval-iters 0 --use-torch-fsdp2 "
    "--ckpt-format torch_dcp"
).split()
PRETRAIN = ["pretrain", *NETWORK, *LOOP]
ON_TWO_RANKS = ["launch", "-n", "2", "--", *PRETRAIN]
RATE, MOCK, ALL_TRAINING = ["--lr", "1e-3"], ["--mock-data"], ["--split", "100,0,0"]


FROM_MODEL = ["pretrain", *LOOP, *RATE, *MOCK, "--seq-length", "16", "--hf-model"]


def write_tokens(prefix, token, documents=10):
    """A data set of 40 tokens a document in Megatron's format; all documents but one are all `token`."""
    lengths = np.full(documents, 40, np.int32)
    tokens = np.tile(np.arange(40, dtype=np.int32), (documents, 1))
    tokens[1:] = token
    tokens.tofile(f"{prefix}.bin")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, documents, documents + 1)
    pointers = np.arange(documents, dtype=np.int64) * 160
    bounds = np.arange(documents + 1, dtype=np.int64)
    pathlib.Path(f"{prefix}.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + bounds.tobytes())


def write_conversations(prefix, tokens=(3, 50, 50, 4, 1, 2), grid=(1, 2, 4), width=24):
    """A set of two alike: a question with places (50) for a picture of zeros, and an answer."""
    sys.path.insert(0, str(ROOT / "launch" / "preprocess"))
    from preprocess_conversations import Pictures, Sample, Writer
    sys.path.pop(0)
    writer = Writer(str(prefix))
    for _ in range(2):
        writer.add(Sample(tokens, bytes([0, 0, 0, 0, 1, 1]), Pictures([grid], bytes(4 * width * int(np.prod(grid))), width)))
    writer.finish()


VISION = {
    "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "image_token_id": 50, "video_token_id": 51,
    "text_config": {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "vocab_size": 60,
                    "num_key_value_heads": 3, "max_position_embeddings": 64,
                    "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 2, "out_hidden_size": 24,
                      "window_size": 8, "fullatt_block_indexes": [0]}}
