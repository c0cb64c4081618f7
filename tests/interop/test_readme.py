"""README.md says of Megatron's flags what the program does with them, and its links lead somewhere."""
import re

from megashard import PROGRAM, ROOT, run

README = (ROOT / "README.md").read_text()
LISTS = {"| Megatron-LM ": "megatron_flags.txt", "| MindSpeed-MM's own ": "mindspeed_flags.txt"}


def flags_in(text):
    """Of a part of --help; explanations stand further to the right."""
    return set(re.findall(r"--[a-z0-9][\w-]*", " ".join(re.findall(r"^  -.*", text, re.MULTILINE))))


def test_the_counts_of_flags():
    """Of the lists in tests/golden, a line of which begins with who has the flag and names its spellings fourth."""
    text = run(PROGRAM, "pretrain", "--help").stdout
    used, ignored, refused = map(flags_in, re.split("accepted, without effect here:|known, but refused:", text))
    refused -= used  # of which some values are refused
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
