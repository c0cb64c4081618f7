"""tests/planted_faults: takes ordering, lifetime and arithmetic out of the product, one place at a time, and sees who
notices.

Each fault of tests/planted leaves out or moves one wait, event, stream scope, held buffer or free, or computes
something wrong. Its tests then run on the simulated device or the CPU; it is caught if the device finds something or a
test fails. The tree must be built. The last line is `N planted, N caught`; exit code 1 if one is missed or no longer
fits its file. docs/planted_faults.md says how it works. """

import argparse
import concurrent.futures
import fnmatch
import os
import pathlib
import subprocess
import sys

import places
from build import BUILD, build
from fault import ROOT
from tables import FAULTS, SAMPLE

SECONDS = 120  # of one run
TREES = "160"  # random ones, of tests/differential
# The device's names of findings, and ours.
KINDS = {
    "race: ": "race",
    "memory was handed out again too early": "memory handed out too early",
    "the host touches pinned memory": "the host beside a copy",
    "in another legal order": "random order",
    "the host touched memory of the simulated GPU": "the host on device memory",
    "collective ": "collectives that differ",
    "a collective is not matched": "collectives that differ",
}


def parse():
    parser = argparse.ArgumentParser(prog="tests/planted_faults", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="these faults only (with * and ?), or files")
    parser.add_argument("--sample", action="store_true", help="some faults of every kind, for CI")
    parser.add_argument("--list", action="store_true", help="names alone")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side (2)")
    parser.add_argument("--table", action="store_true", help="also a table of the faults and what caught each")
    return parser.parse_args()


def chosen(arguments):
    """(number, fault): a fault's number stays its own whatever is chosen."""
    numbered = list(enumerate(FAULTS, 1))
    if arguments.sample:
        return [(number, fault) for number, fault in numbered if fault.name in SAMPLE]
    if not arguments.names:
        return numbered
    fits = lambda fault, name: any(fnmatch.fnmatch(text, f"*{name}*") for text in (fault.name, fault.file))
    for name in arguments.names:
        if not any(fits(fault, name) for fault in FAULTS):
            raise SystemExit(f"no fault and no file of faults is called {name}; --list has the names")
    return [(number, fault) for number, fault in numbered if any(fits(fault, name) for name in arguments.names)]


def run(tests, number, library):
    """(whether all passed, first failure); number 0: no fault is active."""
    environment = {**os.environ, "MEGASHARD_TEST_DEVICE": tests.device, "MEGASHARD_SIM": tests.sim,
                   "OMP_NUM_THREADS": "1", "MEGASHARD_PLANTED": str(number), "MEGASHARD_TREE_CASES": TREES,
                   "LD_PRELOAD": str(library)}
    program = BUILD / "tests" / tests.room / f"{tests.room}_tests"
    if not program.exists():
        return False, f"{program} is not built"
    try:
        done = subprocess.run([program, f"--gtest_filter={tests.names}", "--gtest_fail_fast"], capture_output=True,
                              text=True, errors="replace", cwd=ROOT, timeout=SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return False, f"no end: {tests} did not end in {SECONDS} s"
    lines = (done.stdout + done.stderr).splitlines()
    if done.returncode == 0:
        ran = sum(line.startswith("[       OK ]") for line in lines)
        return ran > 0, f"{ran} tests passed" if ran else f"{tests}: no such test ran"
    for beginning, kind in KINDS.items():
        for line in lines:
            if beginning in line:
                return False, f"{kind}: {line[line.index(beginning):].removeprefix('race: ').strip()}"
    failed = [line for line in lines if line.startswith("[  FAILED  ]")]
    if failed:
        return False, "a test: " + failed[0].split("]")[1].strip().split(" (")[0]
    if done.returncode < 0:
        return False, f"a crash: signal {-done.returncode}"
    raise SystemExit(f"{program} does not run:\n" + "\n".join(lines[-5:]))


def try_fault(number, fault, library):
    """(whether it was caught, details)."""
    for tests in fault.tests:
        passed, what = run(tests, number, library)
        if not passed:
            return True, what
    return False, "MISSED by " + "; ".join(map(str, fault.tests))


def run_asleep(numbered, library, jobs):
    """Runs every test that will be used without a fault; returns the failures."""
    used = sorted({tests for _, fault in numbered for tests in fault.tests}, key=str)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda tests: run(tests, 0, library), used))
    return [f"{tests}: {what}" for tests, (passed, what) in zip(used, results) if not passed]


def main():
    arguments = parse()
    numbered = chosen(arguments)
    if arguments.list:
        print("\n".join(f"{fault.file}: {fault.name}" for _, fault in numbered))
        return 0
    wrong = places.changed(FAULTS) + places.unplanted(FAULTS)
    print("\n".join(wrong) if wrong else "every place of ordering has a fault or a reason why it has none", flush=True)
    fits = [(number, fault) for number, fault in numbered if fault.places() is not None]
    if not fits:
        print("0 planted, 0 caught")
        return 1
    library = build([fault for _, fault in fits], dict(enumerate(FAULTS, 1)))
    asleep = run_asleep(fits, library, arguments.jobs)
    if asleep:
        print("\n".join(f"fails with no fault awake: {line}" for line in asleep))
        print(f"{len(fits)} planted, 0 caught")
        return 1
    caught, rows = 0, []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        runs = pool.map(lambda each: try_fault(*each, library), fits)
        for (_, fault), (is_caught, what) in zip(fits, runs):
            caught += is_caught
            rows.append((fault, what))
            print(f"{'caught by ' if is_caught else ''}{what[:200]} | {fault.name}", flush=True)
    if arguments.table:
        print_table(rows)
    print(f"{len(numbered)} planted, {caught} caught")
    return int(caught < len(numbered) or bool(wrong))


def print_table(rows):
    print("\n| file | fault | caught by |\n|---|---|---|")
    for fault, what in rows:
        print(f"| {pathlib.Path(fault.file).name} | {fault.name} | {what.split(':')[0]} |")
    print()


if __name__ == "__main__":
    sys.exit(main())
