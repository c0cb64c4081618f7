#!/usr/bin/env python3
"""Ask a model in text, and read its answers as text: `megashard infer` computes, the model's tokenizer translates.

usage: launch/ask.py MODEL_DIR TEXT... [--raw] [--new-tokens N] [-- FLAGS of megashard infer]
       launch/ask.py MODEL_DIR --answers FILE.npy      # of `megashard infer --generated FILE.npy`
The wheel calls it megashard-ask.

MODEL_DIR is a model of Hugging Face's with its tokenizer; other weights come by FLAGS, such as --load runs/a. A TEXT is
a user's question to a model with a chat template; --raw goes on from it as it stands. Prints an answer for each.
"""
import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent / "preprocess"))
HERE = Path(__file__).resolve().parents[1]
PROGRAMS = HERE / "bin" / "megashard", HERE / "build" / "launch" / "megashard"  # in the wheel, in the tree


def tokens_of(text, tokenizer, raw):
    if raw or tokenizer.chat_template is None:
        return tokenizer(text).input_ids
    said = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True).input_ids


def infer(arguments, prompts):
    """[prompts, new tokens]"""
    import numpy
    from preprocess_data import Writer

    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(f"{folder}/prompts", "i")
        for prompt in prompts:
            writer.add(numpy.array(prompt, numpy.int32).tobytes(), [[len(prompt)]])
        writer.finish()
        command = [arguments.program, "infer", "--hf-model", arguments.model, "--data-path", f"{folder}/prompts",
                   "--seq-length", max(map(len, prompts)), "--micro-batch-size", len(prompts), "--generate",
                   arguments.new_tokens, "--generated", f"{folder}/answers.npy", *arguments.flags]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr.strip())
        return numpy.load(f"{folder}/answers.npy")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL_DIR")
    parser.add_argument("texts", nargs="*", metavar="TEXT")
    parser.add_argument("--answers", metavar="FILE.npy")
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--program", default=PROGRAMS[not PROGRAMS[0].exists()],
                        help="default: the wheel's, or build/launch/megashard of this tree")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:end])
    arguments.flags = words[end + 1:]
    if bool(arguments.texts) == bool(arguments.answers):
        parser.error("give TEXT, or --answers FILE.npy")
    if not Path(arguments.model, "tokenizer_config.json").exists():
        parser.error(f"{arguments.model} has no tokenizer_config.json; give the folder of a model with its tokenizer")

    try:
        import numpy
        from transformers import AutoTokenizer
    except ImportError as error:
        parser.error(f"Python has no package {error.name}; install it: pip install {error.name}")

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    if arguments.answers:
        answers = numpy.load(arguments.answers)
    else:
        answers = infer(arguments, [tokens_of(text, tokenizer, arguments.raw) for text in arguments.texts])
    for answer in answers:
        print(tokenizer.decode(answer, skip_special_tokens=True))


main()
