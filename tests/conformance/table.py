#!/usr/bin/env python3
"""Write the table of PyTorch's own FSDP2 tests with the results of our tests of the same names, or docs/conformance.md,
which sums it up.

usage: table.py [--output FILE] [--record-gpu] RESULT.xml...
FILE: gets the whole table; without it docs/conformance.md is written.
RESULT.xml: JUnit files of tests/run (run/results/*.xml) or of a test program's --gtest_output=xml:FILE.
--record-gpu: the results are from a machine with a GPU; what passed is kept, with its date, in gpu_results.json.

upstream.json lists upstream's tests. A mark is A (required), B (wanted) or C (out: Python only); a dagger says that
torch 2.11 itself does not pass. Our test of test_x in a file with suite S is S.test_x, unless the entry says "ours".
A GPU variant of a test is an instantiation whose prefix begins with Cuda. Suites whose names have "sim" ran on the
simulated device (docs/simulated_device.md).
"""
import argparse
import collections
import json
import pathlib
import re
import textwrap
import xml.etree.ElementTree as ElementTree

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GPU_RESULTS = HERE / "gpu_results.json"
TEST = re.compile(r"\bTEST(?:_F|_P)?\(\s*(\w+)\s*,\s*(\w+)\s*\)")
PYTHON_TEST = re.compile(r"^def (test_\w+)", re.MULTILINE)
WIDTH = 120
WORST_FIRST = ["failing", "not run", "passed"]


def upstream():
    """The list: one dict a test, with its file and the names of our tests."""
    tests = []
    for file in json.loads((HERE / "upstream.json").read_text())["files"]:
        for test in file["tests"]:
            name = test["name"]
            ours = test.get("ours", [name if "." in name else f"{file['suite']}.{name}"])
            tests.append({**test, "file": file["file"], "ours": ours})
    return tests


def written():
    """Names of all tests in the tree: Suite.name of gtest, and module.name of pytest."""
    names = set()
    for path in (ROOT / "tests").rglob("*_test.cpp"):
        names |= {f"{suite}.{name}" for suite, name in TEST.findall(path.read_text())}
    for path in (ROOT / "tests" / "interop").glob("test_*.py"):
        names |= {f"{path.stem}.{name}" for name in PYTHON_TEST.findall(path.read_text())}
    return names


def instances(paths):
    """(our test's name, a GPU variant, on the simulated device, state, date) of every case in the JUnit files."""
    for path in paths:
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):
            for case in suite.findall("testcase"):
                prefix, _, class_name = case.get("classname", "").rpartition("/")
                name = re.split(r"[/\[]", case.get("name"))[0]
                state = "passed"
                if case.find("failure") is not None or case.find("error") is not None:
                    state = "failing"
                elif case.find("skipped") is not None or case.get("status") == "notrun":
                    state = "not run"
                date = (case.get("timestamp") or suite.get("timestamp") or "")[:10]
                simulated = "_sim" in suite.get("name", "")
                yield f"{class_name.split('.')[-1]}.{name}", prefix.split(".")[-1].startswith(
                    "Cuda"), simulated, state, date


def worst(test, results):
    """A test counts as run if one of its variants ran."""
    states = []
    for name in test["ours"]:
        found = results.get(name, ["not run"])
        ran = [state for state in found if state != "not run"]
        states.append(min(ran or found, key=WORST_FIRST.index))
    return min(states, key=WORST_FIRST.index)


def states_of(test, exists, results, gpu):
    """On a CPU, on the simulated device, on a GPU."""
    if "reason" in test:
        return ["not applicable"] * 3
    if not all(name in exists for name in test["ours"]):
        return ["not written yet"] * 3
    dates = [gpu[name] for name in test["ours"] if name in gpu]
    on_gpu = f"passed ({min(dates)})" if dates else "not run"
    return [worst(test, results["cpu"]), worst(test, results["sim"]), on_gpu]


def whole_state(states):
    """For the counts: the worse of those places where it ran."""
    ran = [state for state in states if state != "not run"] or ["not run"]
    return min((state.split(" (")[0] for state in ran), key=lambda state: state != "failing")


def counts(rows):
    """Lines of the table at the top: how many tests of each mark are in each state."""
    kinds = ["passed", "not run", "failing", "not written yet", "not applicable"]
    table = collections.defaultdict(collections.Counter)
    for test, states in rows:
        table[test["mark"]][whole_state(states)] += 1
    yield "| mark | tests | " + " | ".join(kinds) + " |"
    yield "|---|" + "---|" * (len(kinds) + 1)
    for mark in sorted(table):
        of = table[mark]
        yield f"| {mark} | {sum(of.values())} | " + " | ".join(str(of[kind]) for kind in kinds) + " |"


def legend():
    return [
        "A: required. B: wanted. C: Python only. †: torch 2.11 itself lacks it. CPU, sim, GPU: the result on a CPU, on",
        "the simulated device and on a GPU. A test of what a device does is not run on a CPU; `tests/gpu` runs it on a",
        "GPU.",
    ]


def out_of(rows):
    """The tests that are not applicable, with their reasons."""
    for test, _ in rows:
        if "reason" in test:
            line = f"- {test['name']} ({test['mark']}): {test['reason']}"
            yield from textwrap.wrap(line, WIDTH, subsequent_indent="  ")


def whole_table(rows):
    head = "Each section is a file of PyTorch's. `+` stands for the name of its test."
    lines = ["# PyTorch's FSDP2 tests", "", head, "", *legend(), "", *counts(rows)]
    applicable = [row for row in rows if "reason" not in row[0]]
    for file in dict.fromkeys(test["file"] for test, _ in applicable):
        of_file = [row for row in applicable if row[0]["file"] == file]
        lines += ["", f"## {file}", "", "| test | mark | our test | CPU | sim | GPU |", "|---|---|---|---|---|---|"]
        lines += [row_of(test, states) for test, states in of_file]
    return "\n".join([*lines, "", "## Not applicable", "", *out_of(rows)]) + "\n"


def page(rows):
    lines = [
        "# Conformance",
        "",
        "Read this to see how much of PyTorch's own FSDP2 test suite, which defines `fully_shard`, passes here.",
        "`tests/conformance/upstream.json` lists PyTorch's tests and, for each, our test of the same property.",
        "`tests/run` writes the result of each test to `run/results/conformance.md`; `tests/conformance/table.py",
        "RESULT.xml...` writes this page. Do not edit it.",
        "",
        *legend(),
        "",
        *counts(rows),
        "",
        "## By file",
        "",
        "| file | tests | CPU | sim | GPU |",
        "|---|---|---|---|---|",
    ]
    applicable = [row for row in rows if "reason" not in row[0]]
    for file in dict.fromkeys(test["file"] for test, _ in applicable):
        states = [states for test, states in applicable if test["file"] == file]
        passed = [sum(each[place].startswith("passed") for each in states) for place in range(3)]
        lines.append(f"| {file} | {len(states)} | {' | '.join(map(str, passed))} |")
    lines += ["", "The last three columns are the number of tests that passed.", "", "## Not applicable", ""]
    lines += out_of(rows)
    return "\n".join(lines) + "\n"


def row_of(test, states):
    """If the line would be too long, our tests have lines of their own."""
    ours = [re.sub(rf"(^|\.){re.escape(test['name'])}$", r"\1+", name) for name in test["ours"]]
    line = f"| {test['name']} | {test['mark']} | {{}} | {' | '.join(states)} |"
    whole = line.format(", ".join(ours))
    return whole if len(whole) <= WIDTH else "\n".join([line.format(""), *(f"| | | {name} | | | |" for name in ours)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*")
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--record-gpu", action="store_true")
    args = parser.parse_args()

    tests, exists = upstream(), written()
    listed = {name for test in tests for name in test["ours"]}
    gpu = json.loads(GPU_RESULTS.read_text()) if GPU_RESULTS.exists() else {}
    results = {"cpu": collections.defaultdict(list), "sim": collections.defaultdict(list)}
    for name, on_gpu, simulated, state, date in instances(args.results):
        results["sim" if simulated else "cpu"][name].append(state)
        if args.record_gpu and on_gpu and not simulated and name in listed and state == "passed":
            gpu[name] = date
    if args.record_gpu:
        GPU_RESULTS.write_text(json.dumps(gpu, indent=2, sort_keys=True) + "\n")

    rows = [(test, states_of(test, exists, results, gpu)) for test in tests]
    output = args.output or ROOT / "docs" / "conformance.md"
    output.write_text(whole_table(rows) if args.output else page(rows))
    required = [whole_state(states) for test, states in rows if test["mark"][0] == "A" and "reason" not in test]
    passed = required.count("passed")
    print(f"conformance: {passed} of {len(required)} required tests of PyTorch's suite pass here; see {output}")


if __name__ == "__main__":
    main()
