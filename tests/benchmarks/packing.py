"""Conversations of mixed lengths, one to a row and packed (--neat-packing): tokens/s, steps of an epoch, memory.

    packing.py [--repeats 3] [--steps 100] [--seq-length 1024]

Both train the 8 M model of run.py on one rank in fp32, by turns: four rows of one conversation a step, or one packed
row. Tokens are those of conversations, without what rows are filled up with.
"""

import argparse
import pathlib
import re
import statistics
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from megashard import pretrain  # noqa: E402
from run import WARM_UP, make_model  # noqa: E402

ROWS = {"one to a row": 4, "packed": 1}  # of a step


def make_conversations(prefix, longest, count=400, vocabulary=4096):
    """Lengths drawn from a log-normal distribution around 200 tokens; the last half of each is learnt."""
    import numpy
    import torch
    from safetensors.torch import save_file

    random = numpy.random.default_rng(1)
    lengths = numpy.clip(numpy.exp(random.normal(numpy.log(200), 0.8, count)), 16, longest).astype("int64")
    total, nothing = int(lengths.sum()), torch.zeros(count, dtype=torch.int64)
    save_file({"tokens": torch.from_numpy((random.zipf(1.3, total) % vocabulary).astype("int32")),
               "loss_mask": torch.cat([torch.arange(length) >= length // 2 for length in lengths]).to(torch.uint8),
               "sample_ends": torch.from_numpy(lengths.cumsum()), "image_ends": nothing,
               "image_grid_thw": torch.zeros(0, 3, dtype=torch.int64), "pixel_values": torch.zeros(0, 1)},
              f"{prefix}.vision.safetensors")
    return total


def measure(args, folder, name, tokens):
    steps, out = pretrain(folder, *(["--neat-packing"] if name == "packed" else []), config=None, defaults=(
        f"--hf-model {folder} --from-scratch --data-path {folder / 'chats'} --split 1,0,0 --eval-iters 0 "
        f"--seq-length {args.seq_length} --micro-batch-size {ROWS[name]} --global-batch-size {ROWS[name]} "
        f"--train-iters {args.steps} --lr 1e-4 --lr-decay-style constant --peak-tflops 1"))
    epochs = float(re.search(r"samples, ([\d.]+) epochs", out).group(1))
    measured = steps[WARM_UP:]
    return {"tokens/s": tokens * epochs * len(measured) / len(steps) / sum(step["step_s"] for step in measured),
            "steps of an epoch": len(steps) / epochs,
            "peak MiB": max(step["peak_memory_bytes"] for step in steps) / 2**20}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default in {"--repeats": 3, "--steps": 100, "--seq-length": 1024}.items():
        parser.add_argument(flag, type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = pathlib.Path(work)
        make_model(folder)
        tokens = make_conversations(folder / "chats", args.seq_length)
        runs = {name: [] for name in ROWS}
        for _ in range(args.repeats):
            for name, figures in runs.items():
                figures.append(measure(args, folder, name, tokens))
    print("| | " + " | ".join(runs) + " | ratio (spread) |\n|---|---|---|---|")
    for what in ("tokens/s", "steps of an epoch", "peak MiB"):
        plain, packed = ([figures[what] for figures in runs[name]] for name in ROWS)
        ratios = sorted(after / before for before, after in zip(plain, packed))
        print(f"| {what} | {statistics.median(plain):.0f} | {statistics.median(packed):.0f} | "
              f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} .. {ratios[-1]:.2f}) |")


if __name__ == "__main__":
    main()
