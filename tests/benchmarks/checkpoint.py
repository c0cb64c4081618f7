"""Checkpoints of megashard and torch.distributed.checkpoint side by side: bandwidth, stall and slow-down.

    checkpoint.py [--build-dir build] [--repeats 7] [--mebibytes 1024] [--folder DIR] [--against BUILD]

One process each, with one thread of ATen, takes turns with the other on one disk (of DIR; unset: beside the build), and
with `dd bs=16M oflag=direct conv=fsync` of the same size. Every save is synced. Loads are of the folder that DCP wrote,
cold (evicted from the page cache) and cached; resuming is from the step that megashard wrote, whose checksums it
compares first, while DCP, which has none, only loads it. Figures are medians of the repeats, ratios are those of the
pairs, as their median with the smallest and the largest. Exits with 1 when a bar is missed. --against puts an older
build of megashard (its folder) in DCP's place: nothing may be more than 5 % slower.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


class Side:
    """A process that measures on command."""

    def __init__(self, command):
        self.process = subprocess.Popen([str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True, env=ONE_THREAD)

    def __call__(self, command, folder):
        self.process.stdin.write(f"{command} {folder}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args} ended while it was to {command}")
        return json.loads(line)

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def dd(path, mebibytes):
    return ["dd", "if=/dev/zero", f"of={path}", "bs=16M", f"count={mebibytes // 16}", "oflag=direct", "conv=fsync"]


def seconds_of_dd(path, mebibytes):
    start = time.perf_counter()
    subprocess.run(dd(path, mebibytes), check=True, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def slowdown_by_dd(side, path, mebibytes):
    """How much any writer to this disk slows a step."""
    before = side("steps", path)["step"]
    writer = subprocess.Popen(dd(path, 4 * mebibytes), stderr=subprocess.DEVNULL)
    during = side("steps", path)["step"]
    writer.terminate()
    writer.wait()
    path.unlink()
    return during / before


def evict(folder):
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rested(work, folder):
    """A measurement that begins with an empty folder and no writes of others under way."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    return work(folder)


def measure(args, work):
    program = "tests/benchmarks/checkpoint_speed"
    theirs = [args.against / program] if args.against else [sys.executable, HERE / "dcp_speed.py"]
    sides = {"ours": Side([args.build_dir / program, args.mebibytes]), "theirs": Side([*theirs, args.mebibytes])}
    step = work / "steps" / "iter_0000001"
    kept = work / "theirs" / step.name if args.against else work / "dcp"
    sides["theirs"]("save", kept.parent if args.against else kept)
    sides["ours"]("save", step.parent)
    resume = {name: lambda side=side: side("resume", step.parent) for name, side in sides.items()}
    if not args.against:
        resume["theirs"] = lambda: sides["theirs"]("load", step)
    for name, side in sides.items():  # the first of each pays for memory and modules
        rested(lambda folder: side("async", folder), work / "warm_up")
        for load in (lambda: side("load", kept), resume[name]):
            side("clear", kept)
            load()
            assert side("check", kept)["equal"]
    rows = []
    for repeat in range(args.repeats):
        row = {"dd": rested(lambda path: seconds_of_dd(path, args.mebibytes), work / "zeros"),
               "steps beside dd": rested(lambda path: slowdown_by_dd(sides["ours"], path, args.mebibytes),
                                         work / "zeros")}
        for name in list(sides) if repeat % 2 else reversed(sides):
            side = sides[name]
            row["save", name] = rested(lambda folder: side("save", folder), work / "saved")["seconds"]
            evict(kept)
            row["load, cold", name] = side("load", kept)["seconds"]
            row["load, cached", name] = side("load", kept)["seconds"]
            evict(step)
            row["resume, cold", name] = resume[name]()["seconds"]
            row["resume, cached", name] = resume[name]()["seconds"]
            row["async", name] = rested(lambda folder: side("async", folder), work / "saved")
        rows.append(row)
    for side in sides.values():
        side.end()
    return rows


def ratios(rows, over, under):
    pairs = [over(row) / under(row) for row in rows]
    return statistics.median(pairs), min(pairs), max(pairs)


def report_against(rows, build):
    """As report() below, against an older build."""
    seconds = {"stall of an asynchronous save": lambda row, name: row["async", name]["stall"],
               "a step while it writes": lambda row, name: row["async", name]["step_during"]}
    for key in ("save", "load, cold", "load, cached", "resume, cold", "resume, cached"):
        seconds[key] = lambda row, name, key=key: row[key, name]
    missed = []
    print(f"| measure | {build} | megashard | ratio of times (spread) | bar |\n|---|---|---|---|---|")
    for measure, of in seconds.items():
        median, least, most = ratios(rows, lambda row: of(row, "ours"), lambda row: of(row, "theirs"))
        missed += [measure] if median > 1.05 else []
        middle = lambda name: f"{statistics.median(of(row, name) for row in rows) * 1e3:.0f} ms"
        print(f"| {measure} | {middle('theirs')} | {middle('ours')} | {median:.2f} ({least:.2f} .. {most:.2f}) | "
              "<= 1.05 |")
    return missed


def report(rows, mebibytes):
    """Prints the rows of a table; returns the measures that miss their bar."""
    gigabytes = mebibytes * 2**20 / 1e9
    speed = lambda values: f"{gigabytes / statistics.median(values):.2f} GB/s"
    stalls = lambda name, key: [row["async", name][key] for row in rows]
    slowdown = lambda row, name: row["async", name]["step_during"] / row["async", name]["step_before"]
    missed = []

    def line(measure, reference, ours, ratio, bar, more_is_better):
        median, least, most = ratio
        if (median < bar) if more_is_better else (median > bar):
            missed.append(measure)
        print(f"| {measure} | {reference} | {ours} | {median:.2f} ({least:.2f} .. {most:.2f}) | "
              f"{'>=' if more_is_better else '<='} {bar} |")

    def speeds(measure, key, reference, label, bar):
        of = (lambda row: row[reference]) if reference == "dd" else (lambda row: row[key, reference])
        line(measure, f"{label} {speed([of(row) for row in rows])}", speed([row[key, 'ours'] for row in rows]),
             ratios(rows, of, lambda row: row[key, "ours"]), bar, True)

    print("| measure | beside | megashard | ratio (spread) | bar |\n|---|---|---|---|---|")
    speeds("save", "save", "dd", "dd", 0.9)
    speeds("save", "save", "theirs", "DCP", 1.0)
    for measure in ("load, cold", "load, cached", "resume, cold", "resume, cached"):
        speeds(measure, measure, "theirs", "DCP", 1.0)
    shown = lambda name, key: f"{statistics.median(stalls(name, key)) * 1e3:.0f} ms"
    line("stall of an asynchronous save", f"memcpy {shown('ours', 'memcpy')}; DCP {shown('theirs', 'stall')}",
         shown("ours", "stall"), ratios(rows, lambda row: row["async", "ours"]["stall"],
                                        lambda row: row["async", "ours"]["memcpy"]), 1.2, False)
    theirs = statistics.median([slowdown(row, "theirs") for row in rows])
    machine = statistics.median([row["steps beside dd"] for row in rows])
    line("a step while it writes", f"before {shown('ours', 'step_before')}; DCP {theirs:.2f}, dd {machine:.2f}",
         shown("ours", "step_during"), ratios(rows, lambda row: slowdown(row, "ours"), lambda row: 1.0), 1.05, False)
    return missed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build-dir", type=pathlib.Path, default=HERE.parents[1] / "build")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--against", type=pathlib.Path, metavar="BUILD", help="an older build in DCP's place")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder or args.build_dir) as folder:
        rows = measure(args, pathlib.Path(folder))
        missed = report_against(rows, args.against) if args.against else report(rows, args.mebibytes)
    if missed:
        raise SystemExit("missed: " + ", ".join(missed))


if __name__ == "__main__":
    main()
