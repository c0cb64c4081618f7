#!/usr/bin/env python3
"""Trains a small Qwen3 from scratch on text, on 2 ranks with FSDP2, and completes a prompt with it: a first run that
needs Python, its own documentation as text, and megashard.

usage: megashard quickstart [--text FILE] [--prompt TEXT] [--steps N] [--output DIR]
"""
import argparse
import json
import os
import pathlib
import pydoc_data.topics
import shlex
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
WHEEL = HERE.parent  # this file lies in its folder tools, or in launch/first_run of the tree
TREE = HERE.parents[1]
PROGRAM = WHEEL / "bin" / "megashard"
COMMAND, CONFIG = "megashard", WHEEL / "share" / "fsdp2_config.yaml"
if not PROGRAM.exists():
    PROGRAM = TREE / "build" / "launch" / "megashard"
    COMMAND, CONFIG = "build/launch/megashard", TREE / "fsdp2_config.yaml"
sys.path[:0] = [str(HERE / "preprocess"), str(TREE / "launch" / "preprocess")]

RANKS, BATCH, SEQUENCE, NEW_TOKENS = 2, 8, 128, 120
END = 256  # the token after the 256 bytes
END_OF_TEXT = "<|endoftext|>"


def fail(message, code=1):
    print(f"quickstart: {message}", file=sys.stderr)
    sys.exit(code)


def byte_letters():
    """The letter that stands for each byte in a tokenizer.json of bytes, as in GPT-2's."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def write_model(folder):
    """config.json of a small Qwen3, and a tokenizer whose tokens are the bytes of the text; no weights."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": END + 1,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "eos_token_id": END,
        "torch_dtype": "float32",
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": END, "content": END_OF_TEXT, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True}],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {letter: byte for byte, letter in enumerate(byte_letters())}, "merges": []},
    }
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT,
                        "model_max_length": config["max_position_embeddings"]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"config": config, "tokenizer": tokenizer, "tokenizer_config": tokenizer_config}.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def write_tokens(prefix, documents):
    """Megatron's .bin and .idx of byte strings."""
    import array

    from preprocess_data import Writer

    writer = Writer(str(prefix), "H")
    for document in documents:
        writer.add(array.array("H", document).tobytes(), [[len(document)]])
    writer.finish()


def paragraphs(text):
    return [[*part.encode(), END] for part in text.split("\n\n") if part.strip()]


class Steps:
    """Commands and functions, each with its line and its seconds; what they print goes to a file."""

    def __init__(self, folder):
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def run(self, message, *command, shown=False):
        begin = time.monotonic()
        print(f"==> {message}" + ("" if shown else " ... "), end="\n" if shown else "", flush=True)
        words = [str(word) for word in command]
        log = self.logs / f"{message.split()[0]}.log"
        log.write_text(f"$ {shlex.join(words)}\n")
        with log.open("a") as file:
            output = {} if shown else {"stdout": file, "stderr": subprocess.STDOUT}
            code = subprocess.run(words, stdin=subprocess.DEVNULL, **output).returncode
        if code == 130:
            raise KeyboardInterrupt
        if code != 0 and not shown:
            print("failed\n" + "\n".join(log.read_text().splitlines()[-30:]), file=sys.stderr)
        if code != 0:
            fail(f"'{message}' failed with exit code {code}; its command is in {log}")
        print((f"==> {message}: took " if shown else "") + f"{time.monotonic() - begin:.1f} s")


def train(steps, folder, iterations):
    files = [folder / "hf", folder / "data"]
    steps.run(
        f"training on {RANKS} ranks, {iterations} steps of {BATCH} x {SEQUENCE} tokens", PROGRAM, "launch", "-n", RANKS,
        "--", "pretrain", "--from-scratch", "--hf-model", files[0], "--data-path", files[1], "--split", "100,0,0",
        "--use-torch-fsdp2", "--fsdp2-config-path", CONFIG, "--ckpt-format", "torch_dcp", "--eval-iters", 0,
        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", files[0],
        "--seq-length", SEQUENCE, "--micro-batch-size", BATCH // RANKS, "--global-batch-size", BATCH,
        "--train-iters", iterations, "--lr", "3e-3", "--min-lr", "3e-4", "--lr-decay-style", "cosine",
        "--lr-warmup-iters", iterations // 10, "--weight-decay", 0.1, "--clip-grad", 1.0,
        "--save", folder / "save", "--save-interval", iterations, "--metrics-file", folder / "metrics.jsonl",
        "--log-interval", max(iterations // 10, 1), "--log-throughput", "--log-tokens-per-second", "--log-memory",
        shown=True)


def complete(steps, folder, prompt):
    """The text with which the trained model goes on."""
    import numpy

    tokens = list(prompt.encode())
    write_tokens(folder / "prompt", [tokens])
    steps.run("completing a prompt", PROGRAM, "infer", "--hf-model", folder / "trained", "--data-path",
              folder / "prompt", "--seq-length", len(tokens), "--micro-batch-size", 1,
              "--generate", NEW_TOKENS, "--generated", folder / "completion.npy")
    new = [int(token) for token in numpy.load(folder / "completion.npy")[0]]
    new = new[:new.index(END)] if END in new else new
    return bytes(tokens + new).decode(errors="replace")


def quickstart(arguments):
    begin = time.monotonic()
    folder = arguments.output
    text = arguments.text.read_text(errors="replace") if arguments.text else "\n\n".join(
        pydoc_data.topics.topics.values())
    documents = paragraphs(text)
    if sum(map(len, documents)) < 10 * BATCH * SEQUENCE:
        fail(f"--text {arguments.text}: too short; give a text of at least {10 * BATCH * SEQUENCE:,} bytes", 2)
    steps = Steps(folder)
    for name in ("save", "metrics.jsonl"):  # of a run before
        if (folder / name).exists():
            steps.run(f"taking away {folder / name} of the run before", "rm", "-r", folder / name)
    write_model(folder / "hf")
    write_tokens(folder / "data", documents)
    print(f"==> text: {len(text.encode()):,} bytes, each a token, in {len(documents):,} documents")
    train(steps, folder, arguments.steps)
    steps.run("converting the trained checkpoint to Hugging Face safetensors", PROGRAM, "convert", "dcp_to_hf",
              "--load-dir", folder / "save" / f"iter_{arguments.steps:07}", "--save-dir", folder / "trained",
              "--overwrite", "--model-assets-dir", folder / "hf")
    steps.run("drawing the run", PROGRAM, "report", folder)
    completion = complete(steps, folder, arguments.prompt)
    print(f"\n{completion}\n\n"
          f"loss curve:    {folder}/report.html\n"
          f"checkpoint:    {folder}/save; look into it by {COMMAND} inspect {folder}/save\n"
          f"Hugging Face:  {folder}/trained\n"
          f"command:       {steps.logs}/training.log has the training's\n"
          f"done in {time.monotonic() - begin:.1f} s")


def main():
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text", type=pathlib.Path, metavar="FILE",
                        help="train on this text, documents divided by blank lines (default: Python's documentation)")
    parser.add_argument("--prompt", metavar="TEXT", default="The statement", help="the text to go on from")
    parser.add_argument("--steps", type=int, default=500, metavar="N", help="steps to train")
    parser.add_argument("--output", type=pathlib.Path, metavar="DIR", default=pathlib.Path("run/tiny"),
                        help="folder of the results")
    arguments = parser.parse_args()
    if arguments.steps < 1 or not arguments.prompt:
        parser.error("--steps takes a number of at least 1, and --prompt a text")
    if not PROGRAM.exists():
        fail(f"there is no {PROGRAM}; run launch/setup, which builds it")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        quickstart(arguments)
    except OSError as error:
        fail(f"{error.filename or arguments.output}: {error.strerror}")
    except KeyboardInterrupt:
        fail(f"interrupted; run it again, and it begins from the start in {arguments.output}", 130)


if __name__ == "__main__":
    main()
