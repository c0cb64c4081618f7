"""What a unit, and clipping with AdamW over 128 tensors, cost the host: instructions and requests for memory.

Times are for benchmarks/run.py; counts do not depend on what else runs. valgrind shows every program the same CPU, and
the calls have heaps of their own, so they do not depend on the machine either.
"""
import json
import re

from megashard import BUILD, run

CALLS, UNITS = 10, 8
# Of a call, with LibTorch 2.11 and GCC 12. Fewer: write the new number here. More: find out why.
INSTRUCTIONS = {"unit": 191_300, "clip_adamw": 867_700}
ALLOCATIONS = {"unit": 163, "clip_adamw": 55}


def test_instructions_and_allocations_are_not_more_than_they_were(tmp_path):
    profile = tmp_path / "callgrind"
    done = run("valgrind", "--tool=callgrind", "--toggle-collect=*megashard::counted<*",
               f"--callgrind-out-file={profile}", BUILD / "tests/benchmarks/unit_cost", "--count", CALLS, timeout=600)
    listed = run("callgrind_annotate", "--inclusive=yes", profile).stdout
    found = {chr(int(what)): int(count.replace(",", "")) / CALLS
             for count, what in reversed(re.findall(r"^ *([\d,]+) .*megashard::counted<\(char\)(\d+)>", listed, re.M))}
    instructions = {"unit": (found["u"] - found["p"]) / UNITS, "clip_adamw": found["c"]}
    for name, count in instructions.items():
        assert count < 1.02 * INSTRUCTIONS[name], f"{name}: {count:,.0f} instructions, {INSTRUCTIONS[name]:,} before"
    for name, count in json.loads(done.stdout).items():
        assert count <= ALLOCATIONS[name], f"{name}: {count} allocations, {ALLOCATIONS[name]} before"
