"""tests/conformance/upstream.json names tests that exist, and docs/conformance.md sums it up."""
import re

import table
from megashard import ROOT

PAGE = (ROOT / "docs" / "conformance.md").read_text()


def test_page_is_of_this_list():
    files = {}
    for test in table.upstream():
        if "reason" not in test:
            files[test["file"]] = files.get(test["file"], 0) + 1
    rows = re.findall(r"^\| (\S+) \| (\d+) \| \d+ \| \d+ \| \d+ \|$", PAGE, re.MULTILINE)
    assert {file: int(tests) for file, tests in rows} == files, "run tests/conformance/table.py"
    out = re.findall(r"^- (\S+) \((\S+)\): ", PAGE, re.MULTILINE)
    assert out == [(test["name"], test["mark"]) for test in table.upstream() if "reason" in test]


def test_our_tests_exist():
    written = table.written()
    listed = [name for test in table.upstream() if "reason" not in test for name in test["ours"]]
    assert listed and not [name for name in listed if name not in written]


def test_tests_with_upstreams_names_are_in_the_list():
    listed = {name for test in table.upstream() for name in test["ours"]}
    suites = {name.split(".")[0] for name in listed if not name.startswith("test_")}
    assert not [name for name in sorted(table.written())
                if name.split(".")[0] in suites and name.split(".")[1].startswith("test_") and name not in listed]


def test_every_c_has_its_reason():
    assert not [test["name"] for test in table.upstream() if test["mark"][0] == "C" and not test.get("reason")]
