#!/usr/bin/env python3
"""Write docs/strategies.md: which family was trained under which strategy.

usage: strategies_table.py [--output FILE] RESULT.xml...
RESULT.xml: JUnit files of tests/run (run/results/*.xml) or of pytest --junit-xml=FILE on test_strategies.py.
"""
import argparse
import pathlib
import re
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEAD = """# Families and strategies

Each cell: ten steps of a small random model on 2 or 4 CPU ranks. Every loss is within 4e-6 of its value (bf16: 2e-3,
fp16: 5e-4) of one rank's run, and of transformers trained by PyTorch. The vision-language families (vl) learn
conversations with pictures. `python3 tests/interop/strategies_table.py RESULT.xml...` writes this page from the results
of `tests/interop/test_strategies.py`, which has the settings of each strategy at its top. Columns of a strategy and a
dtype are slow tests, which `tests/run --slow` runs.

"""


def cells(paths):
    """{(family, strategy): state}"""
    found = {}
    for path in paths:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            cell = re.fullmatch(r"test_cell\[(.+?)-(.+)\]", case.get("name", ""))
            if cell:
                failed = case.find("failure") is not None or case.find("error") is not None
                skipped = case.find("skipped")
                found[cell.groups()] = "failing" if failed else "passed" if skipped is None else skipped.get("message")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "docs" / "strategies.md")
    parser.add_argument("results", nargs="+")
    args = parser.parse_args()
    found = cells(args.results)
    if not found:
        raise SystemExit("no results of test_strategies.py in these files")
    families, strategies = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    lines = ["| family | " + " | ".join(strategies) + " |", "|---" * (len(strategies) + 1) + "|"]
    for family in families:
        lines.append(f"| {family} | " + " | ".join(found.get((family, strategy), "-") for strategy in strategies) +
                     " |")
    args.output.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
