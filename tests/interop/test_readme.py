"""README.md describes Megatron's flags as the program treats them, and its links exist."""
import re

import pytest

from megashard import PROGRAM, ROOT, run

README = (ROOT / "README.md").read_text()
LISTS = {"| Megatron-LM ": "megatron_flags.txt", "| MindSpeed-MM's own ": "mindspeed_flags.txt"}


def flags_in(text):
    """The flags in a part of --help; explanations are further to the right."""
    return set(re.findall(r"--[a-z0-9][\w-]*", " ".join(re.findall(r"^  -.*", text, re.MULTILINE))))


@pytest.fixture(scope="module")
def kinds():
    """Flags by the README's words for them: works, ignored, refused."""
    text = run(PROGRAM, "pretrain", "--help").stdout
    used, ignored, refused = map(flags_in, re.split("accepted, without effect here:|known, but refused:", text))
    return {"works": used, "ignored": ignored, "refused": refused - used}  # of used ones some values are refused


def test_the_table_of_what_works(kinds):
    rows = re.findall(r"^\| ([^|]*`--[^|]*) \| (works|ignored|refused) \|", README, re.MULTILINE)
    wrong, count = [], 0
    for cell, kind in rows:
        for flag in re.findall(r"`(--[\w*-]+)[^`]*`", cell):
            beginning = flag.rstrip("*")
            fits = any(known.startswith(beginning) for known in kinds[kind]) if "*" in flag else flag in kinds[kind]
            wrong += [] if fits else [f"{flag} is not among what {kind}"]
            count += 1
    assert count > 15 and not wrong


def test_the_counts_of_flags(kinds):
    """Flags of the lists in tests/golden. A line's first word is the owner of the flag, its fourth the spellings."""
    _, ignored, refused = kinds.values()
    total = {}
    for row, name in LISTS.items():
        lines = [line for line in (ROOT / "tests" / "golden" / name).read_text().splitlines() if line[:1] != "#"]
        first = [set(line.split()[3].replace("_", "-").split(",")) for line in lines]
        counts = [sum(bool(flags & kind) for flags in first) for kind in (ignored, refused)]
        total[name] = len(lines)
        assert f"{row}| {len(lines) - sum(counts)} | {counts[0]} | {counts[1]} |" in README
    assert f"core_v0.16.1 ({total['megatron_flags.txt']}) and of MindSpeed-MM ({total['mindspeed_flags.txt']} more)" \
        in README


def test_links_lead_to_files():
    pages = [ROOT / "README.md", ROOT / "tests" / "README.md", *(ROOT / "docs").rglob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([\w./-]+)(?:#[^)]*)?\)", page.read_text())]
    assert len(links) > 50
    assert not [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()]
