"""Writes the lists at the end of docs/from_megatron.md: what becomes of each flag of Megatron-LM, by --help.

    PYTHONPATH=tests python tests/interop/megatron_page.py
"""
import re
import textwrap

from megashard import PROGRAM, ROOT, run

PAGE = ROOT / "docs" / "from_megatron.md"
MARK = "## Every flag\n"
IGNORED, REFUSED = "accepted, without effect here", "known, but refused"
TITLES = {"works": "These work", IGNORED: "These have no effect", REFUSED: "These are refused"}
INTRODUCTION = """
The flags of Megatron-LM core_v0.16.1, with the groups and texts of `megashard pretrain --help`:
{works} work, {ignored} have no effect, {refused} are refused. `tests/interop/megatron_page.py` writes this list.
"""


def megatron_flags():
    """All spellings of each flag."""
    lines = [line for line in (ROOT / "tests/golden/megatron_flags.txt").read_text().splitlines() if line[:1] != "#"]
    return [line.split()[3].split(",") for line in lines]


def normal(flag):
    return flag.replace("_", "-")


def flags_in(text):
    return [normal(flag) for flag in re.findall(r"--[a-z0-9][\w-]*", text)]


def help_entries():
    """(group, line of flags, description) for each entry of `megashard pretrain --help`."""
    group = ""
    for title, flags, below in re.findall(r"^(?:([a-z][^.\n]*):|((?:  \S.*\n)+)((?:      .*\n)+))", run(
            PROGRAM, "pretrain", "--help").stdout, re.MULTILINE):
        group = title or group
        if flags:
            yield group, " ".join(flags.split()), " ".join(below.split())


def quoted(flags):
    return ", ".join(f"`{flag}`" for flag in flags)


def item(text):
    return textwrap.fill(f"- {text}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def lists():
    """The text after the mark."""
    entries = list(help_entries())
    known = {IGNORED: {}, REFUSED: {}, "works": {}}  # by kind: text of a flag, by its spellings
    for group, flags, below in entries:
        kind = group if group in known else "works"
        for flag in flags_in(flags):
            known[kind].setdefault(flag, group if kind == "works" else below)
    said, counts = {kind: {} for kind in TITLES}, dict.fromkeys(TITLES, 0)
    for spellings in megatron_flags():
        names = [normal(flag) for flag in spellings]
        kind, flag = next((kind, flag) for kind in (IGNORED, "works", REFUSED) for flag in names if flag in known[kind])
        said[kind].setdefault(known[kind][flag], []).append(spellings[0])
        counts[kind] += 1
    parts = [INTRODUCTION.format(works=counts["works"], ignored=counts[IGNORED], refused=counts[REFUSED])]
    for kind, title in TITLES.items():
        parts += [f"\n### {title}\n"]
        parts += [item(f"{why}: {quoted(flags)}" if kind == "works" else f"{quoted(flags)}: {why}") + "\n"
                  for why, flags in said[kind].items()]
    parts += ["\n### Values that are refused\nOf flags that work otherwise:\n\n"]
    theirs = {normal(flag) for spellings in megatron_flags() for flag in spellings}
    for group, flags, below in entries:
        named = [each.strip() for each in flags.split(",")]
        if group == REFUSED and set(flags_in(flags)) & set(known["works"]) & theirs:
            parts.append(item(f"{quoted(named)}: {below}") + "\n")
    return "".join(parts)


if __name__ == "__main__":
    head = PAGE.read_text().split(MARK)[0]
    PAGE.write_text(head + MARK + lists())
