"""docs/conformance.md and tests/conformance/upstream.json name the same tests, and they exist."""
import re

import table
from megashard import ROOT

ROW = re.compile(r"^\| ([^|\s]*) ?\| ([^|\s]*) ?\| (.*?) ?\| (.*) \|$|^- (\S+) \((\S+)\): ", re.MULTILINE)


def page():
    """[upstream name, mark, our tests, state] of every row; of what is not applicable, no test and no state."""
    rows = []
    for name, mark, ours, state, out, its_mark in ROW.findall((ROOT / "docs" / "conformance.md").read_text()):
        if out:
            rows.append([out, its_mark, [], ""])
        elif "test_" in name:
            rows.append([name, mark, [each.replace("+", name) for each in ours.split(", ") if each], state])
        elif not name and rows:  # more tests of the row above
            rows[-1][2].append(ours.replace("+", rows[-1][0]))
    return rows


def test_page_is_of_this_list():
    expected = [[test["name"], test["mark"], [] if "reason" in test else test["ours"]] for test in table.upstream()]
    assert expected and sorted(row[:3] for row in page()) == sorted(expected), "run tests/conformance/table.py"


def test_what_the_page_claims_exists():
    written = table.written()
    claimed = [name for _, _, ours, state in page() if not state.startswith("not written") for name in ours]
    assert not [name for name in claimed if name not in written]


def test_tests_with_upstreams_names_are_in_the_list():
    listed = {name for test in table.upstream() for name in test["ours"]}
    suites = {name.split(".")[0] for name in listed if not name.startswith("test_")}
    assert not [name for name in sorted(table.written())
                if name.split(".")[0] in suites and name.split(".")[1].startswith("test_") and name not in listed]


def test_every_c_has_its_reason():
    assert not [test["name"] for test in table.upstream() if test["mark"][0] == "C" and not test.get("reason")]
