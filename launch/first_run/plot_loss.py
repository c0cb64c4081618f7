#!/usr/bin/env python3
"""Draw the loss curve of a run as a PNG.

usage: plot_loss.py RUN.jsonl OUTPUT.png [--title TEXT]
"""
import argparse
import json
import sys


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics")
    parser.add_argument("output")
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    with open(args.metrics) as lines:
        steps = [json.loads(line) for line in lines]
    if not steps:
        sys.exit(f"plot_loss: {args.metrics} holds no steps")

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    x = [step["step"] for step in steps]
    y = [step["loss"] for step in steps]
    width = min(10, len(y))
    mean = [sum(y[max(0, i + 1 - width) : i + 1]) / min(width, i + 1) for i in range(len(y))]
    axes.plot(x, y, marker=".", linewidth=0.8, color="tab:blue", alpha=0.5, label="loss of the step")
    axes.plot(x, mean, linewidth=2.0, color="tab:blue", label=f"mean of the last {width}")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=args.title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.output)
    print(f"wrote {args.output}")


main()
