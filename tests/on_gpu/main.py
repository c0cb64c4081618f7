"""tests/gpu: finds out on a machine with a GPU whether all works and how fast, in minutes.

Each of --smoke, --mfu, --peers and --all ends within --seconds (nine minutes), whatever happens: every line runs in a
process of its own, under its own limit, and a failure ends nothing. Results lie in the output folder: MODE.json,
MODE.md (a table for docs/benchmarks.md) and MODE.log. The last line is `N passed, N failed, N skipped`.
"""

import argparse
import os
import pathlib
import re
import sys
import tempfile
import time

import machine
import pack
from lines import Line, Runner
from mfu import Mfu
from peers import Peers
from report import Report
from smoke import Smoke
from training import Training

SECONDS = 530  # of a mode or of --all; the rest of the nine minutes is for start and end
# With their shares of SECONDS under --all; unused time goes to the next mode.
MODES = {
    "smoke": (Smoke, 230, "does all work? kernels, tests, a CPU's losses, races, saves, NCCL"),
    "mfu": (Mfu, 140, "models of 0.5 to 7 B parameters, saves"),
    "peers": (Peers, 160, "the same models in PyTorch and here"),
}


def parse():
    parser = argparse.ArgumentParser(prog="tests/gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    for mode, (_, _, words) in MODES.items():
        what.add_argument(f"--{mode}", action="store_const", const=mode, dest="mode", help=words)
    what.add_argument("--all", action="store_const", const=None, dest="mode",
                      help="the three, the most important lines of each (default)")
    what.add_argument("--pack", type=pathlib.Path, metavar="DIR", help="lays all that is needed into DIR")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: every line with tiny sizes")
    parser.add_argument("--device", choices=["sim", "cpu"], default="sim", help="of a dry run (sim, the simulated one)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for the lines ({SECONDS})")
    parser.add_argument("--lines", type=re.compile, default=re.compile(""), metavar="REGEX",
                        help="only those in whose names it is found")
    parser.add_argument("--output", type=pathlib.Path, default=machine.ROOT / "run" / "results_gpu", help="for results")
    parser.add_argument("--scratch", type=pathlib.Path, help="for checkpoints, which are removed; unset: TMPDIR")
    return parser.parse_args()


def first_line(on):
    """Torch itself on the device. Where all is cold, its gigabytes are read from the disk here, not in others' time."""
    device = "cuda" if on.device == "cuda" else "cpu"
    code = f"import torch; x = torch.ones(512, 512, device='{device}'); assert (x @ x).sum().item() == 512**3"
    return Line("torch computes here", [sys.executable, "-c", code], 120, dict(os.environ))


def run_mode(mode, wanted, on, output, scratch, deadline, first):
    """Runs a mode's wanted lines, after the line `first` if there is one; returns (passed, failed, skipped)."""
    print(f"==> {mode}", flush=True)
    report = Report(mode, on, output)
    log = output / f"{mode}.log"
    log.write_text("")
    stage = MODES[mode][0](on, Training(on, scratch), scratch)
    if first:
        Runner(deadline, log, report.add).run(first)
    for workers, lines in stage.groups():
        Runner(deadline, log, report.add, workers).run_together(line for line in lines if wanted.search(line.name))
    if hasattr(stage, "finish"):
        stage.finish(output)
    return report.counts()


def main():
    begin = time.monotonic()
    args = parse()
    if not args.pack and not args.dry_run and machine.first_gpu() is None:
        print("tests/gpu: skipped: no NVIDIA GPU on this machine (nvidia-smi finds none); --dry-run tries the lines")
        print("0 passed, 0 failed, 1 skipped")
        return
    wrong = list(machine.mistakes())
    if wrong:
        sys.exit("\n".join(f"tests/gpu: {message}" for message in wrong))
    if args.pack:
        pack.lay(args.pack)
        return
    on = machine.look_at(args.device if args.dry_run else None)
    print(f"{on.gpu}, torch {on.torch}, device {on.device}, results in {args.output}", flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    if args.scratch:
        args.scratch.mkdir(parents=True, exist_ok=True)
    modes = [args.mode] if args.mode else list(MODES)
    deadline, counts, first = begin, [], first_line(on)
    for mode in modes:
        share = 1 if len(modes) == 1 else MODES[mode][1] / SECONDS
        deadline += share * args.seconds
        with tempfile.TemporaryDirectory(prefix="megashard_gpu_", dir=args.scratch) as scratch:
            counts.append(run_mode(mode, args.lines, on, args.output, pathlib.Path(scratch), deadline, first))
        first = None
    passed, failed, skipped = map(sum, zip(*counts))
    print(f"{passed} passed, {failed} failed, {skipped} skipped, in {time.monotonic() - begin:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
