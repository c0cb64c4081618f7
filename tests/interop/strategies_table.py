#!/usr/bin/env python3
"""Write docs/strategies.md: which family was trained under which strategy.

usage: strategies_table.py [--output FILE] RESULT.xml...
RESULT.xml: JUnit files of tests/run (run/results/*.xml) or of pytest --junit-xml=FILE on test_strategies.py.
"""
import argparse
import collections
import pathlib
import re
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEAD = """# Families and strategies

Read this to see which model family the tests train under which strategy, and in which dtypes.

A cell names the dtypes that pass (all: fp32, bf16 and fp16). Each test trains a small random model for ten steps on 2
or 4 CPU ranks. Every loss must be within 4e-6 (bf16: 2e-3, fp16: 5e-4, relative) of a run on one rank, and of
transformers trained by PyTorch. The vision-language families (vl) train on conversations with pictures; their layers
are not divided over ranks, and they have no ring.

`tests/interop/test_strategies.py` has the settings of each strategy at its top, and trains on the simulated device,
too. CI runs fp32, and FSDP2 in all dtypes; `tests/run --slow` runs the rest. `python3
tests/interop/strategies_table.py RESULT.xml...` writes this page from the results.

"""


DTYPES = ("fp32", "bf16", "fp16")


def cells(paths):
    """{(family, strategy): {dtype: state}}"""
    found = collections.defaultdict(dict)
    for path in paths:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            cell = re.fullmatch(r"test_cell\[(.+?)-(.*?) ?(bf16|fp16)?\]", case.get("name", ""))
            if cell:
                failed = case.find("failure") is not None or case.find("error") is not None
                skipped = case.find("skipped")
                family, strategy, dtype = cell.groups()
                state = "failing" if failed else "" if skipped is None else skipped.get("message")
                found[family, strategy or "FSDP2"][dtype or "fp32"] = state
    return found


def shown(states):
    """"all": in every dtype."""
    if [states.get(dtype) for dtype in DTYPES] == ["", "", ""]:
        return "all"
    return " ".join(f"{dtype} {states[dtype]}".strip() for dtype in DTYPES if dtype in states) or "-"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "docs" / "strategies.md")
    parser.add_argument("results", nargs="+")
    args = parser.parse_args()
    found = cells(args.results)
    if not found:
        raise SystemExit("no results of test_strategies.py in these files")
    families, strategies = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    strategies = sorted(strategies, key=lambda each: (each.count(","), strategies.index(each)))
    lines = ["| strategy | " + " | ".join(families) + " |", "|---" * (len(families) + 1) + "|"]
    for strategy in strategies:
        lines.append(f"| {strategy} | " + " | ".join(shown(found.get((family, strategy), {})) for family in families) +
                     " |")
    args.output.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
