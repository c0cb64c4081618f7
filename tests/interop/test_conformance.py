"""docs/conformance.md and tests/conformance/upstream.json name the same tests, and they exist."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "conformance"))
import table  # noqa: E402

ROW = re.compile(r"^\| (\S+) \| (\S+) \| (.*?) ?\| (.*) \|$", re.MULTILINE)


def page():
    """(upstream name, mark, our tests, state) of every row."""
    rows = ROW.findall((ROOT / "docs" / "conformance.md").read_text())
    return [row for row in rows if row[0].startswith("test") or ".test" in row[0]]


def test_page_is_of_this_list():
    expected = [(test["name"], test["mark"], "" if "reason" in test else ", ".join(test["ours"]))
                for test in table.upstream()]
    assert expected and [row[:3] for row in page()] == expected, "run tests/conformance/table.py (see its --help)"


def test_what_the_page_claims_exists():
    written = table.written()
    claimed = [name for _, _, ours, state in page() if ours and not state.startswith("not written") for name in ours.split(", ")]
    assert not [name for name in claimed if name not in written]


def test_tests_with_upstreams_names_are_in_the_list():
    listed = {name for test in table.upstream() for name in test["ours"]}
    suites = {name.split(".")[0] for name in listed if not name.startswith("test_")}
    assert not [name for name in sorted(table.written())
                if name.split(".")[0] in suites and name.split(".")[1].startswith("test_") and name not in listed]


def test_every_c_has_its_reason():
    assert not [test["name"] for test in table.upstream() if test["mark"][0] == "C" and not test.get("reason")]
