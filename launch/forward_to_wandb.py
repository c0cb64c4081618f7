"""Sends the lines of a --metrics-file to Weights & Biases, a run there for a run here.

    pip install wandb
    python launch/forward_to_wandb.py metrics.jsonl --project P [--name N] [--follow]

It needs nothing of megashard and may run on another machine. WANDB_MODE=offline writes the run to ./wandb instead, for
`wandb sync` later. A line of a step that was sent already, as a resumed run writes it, is not sent again.
"""
import argparse
import json
import pathlib
import time

POLL_S = 1


def whole_lines(path, follow):
    """The file's lines as they come; a resumed run cuts it back, and then it is read again from its start."""
    pending, position = "", 0
    while True:
        if path.exists():
            if path.stat().st_size < position:
                pending, position = "", 0
            with path.open() as file:
                file.seek(position)
                pending += file.read()
                position = file.tell()
            *lines, pending = pending.split("\n")
            yield from lines
        if not follow:
            return
        time.sleep(POLL_S)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=pathlib.Path)
    parser.add_argument("--project", required=True)
    parser.add_argument("--name")
    parser.add_argument("--follow", action="store_true", help="until it is interrupted")
    args = parser.parse_args()
    if not args.follow and not args.metrics.exists():
        parser.error(f"{args.metrics} does not exist; give the file of --metrics-file, or --follow to wait for it")
    try:
        import wandb
    except ImportError:
        parser.error("Python has no package wandb; install it: pip install wandb")

    sent = 0
    with wandb.init(project=args.project, name=args.name) as run:
        try:
            for line in whole_lines(args.metrics, args.follow):
                numbers = json.loads(line)
                step = numbers.pop("step")
                if step > sent:
                    run.log(numbers, step=step)
                    sent = step
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
