"""Writes docs/upstream_files.md: which of upstream's files of the model families that are here run.

    export PYTHONPATH=tests:launch/preprocess
    python tests/interop/upstream_table.py            # all of them, some minutes
    python tests/interop/upstream_table.py qwen3vl    # those with that in their names; the others' lines stay
"""
import collections
import pathlib
import re
import sys
import tempfile
import textwrap

import megashard

PAGE = megashard.ROOT / "docs" / "upstream_files.md"
WIDTH = 120
MOST_REASONS, LONGEST_REASON = 3, 260
TITLES = {"Ascend/MindSpeed-MM": "scripts and configurations of FSDP2, legacy and native",
          "alibaba/ROLL": "workers of fsdp2_train and fsdp2_infer", "NVIDIA/Megatron-LM": "tests of torch FSDP2",
          "pytorch/torchtitan": "Llama, by the meaning of its keys (`tests/interop/upstream_titan.py`)"}
HEAD = """\
# Upstream's own files

Read this to see whether a launch script or configuration of MindSpeed-MM, ROLL, Megatron-LM or torchtitan runs here
unchanged.

Each file was run with a scaled-down model: two CPU ranks, two iterations, fewer layers, smaller widths, batches and
lengths, other paths. All other flags, keys and values are upstream's; `tests/golden/upstream_files.json` has them
(`make_upstream_list.py` reads them from clones). A file runs, or it is refused with the messages below, which its user
sees. A request that this program cannot fulfil is an error; a key that changes no numbers is listed in a notice of the
run. If data must be prepared first, the program's message has the command; the run then followed it. The files of other
model families are refused; the second table says why.

`PYTHONPATH=tests:launch/preprocess python tests/interop/upstream_table.py` runs the files and writes this page;
`tests/interop/test_paste.py` checks some of its lines.
"""


# What is missing for the families that are not here, by MindSpeed-MM's names of models or a part of the file's name.
SPEAKS, HEARS = "speaks; there are no decoders of sound", "hears; there are no towers for sound"
SEES = "its tower for pictures is not here"
OTHERS = {"bagel": "draws pictures by a diffusion model that is not here",
          "cosyvoice3_lm": SPEAKS, "moss_tts_delay": SPEAKS, "qwen3_tts": SPEAKS, "funasr": HEARS, "mimo_v25": HEARS,
          "kimi_k3": SEES}


def wrapped(text):
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def line_of(name, result, reasons):
    if result == "runs":
        return wrapped(f"- `{name}`: runs")
    shown = [each if len(each) <= LONGEST_REASON else each[:LONGEST_REASON - 4].rsplit(" ", 1)[0] + " ..."
             for each in reasons[:MOST_REASONS]]
    more = [f"({len(reasons) - MOST_REASONS} more)"] if len(reasons) > MOST_REASONS else []
    return wrapped(f"- `{name}`: refused. " + " ".join([*shown, *more]).replace("<", "\\<"))


def lines_of_page(text):
    """{repository: {name: its line, wrapped}}"""
    sections = collections.defaultdict(dict)
    repository = ""
    for block in re.split(r"\n(?=- `|## )", text):
        if block.startswith("## "):
            repository = block[3:].split("\n")[0].split(",")[0]
        elif block.startswith("- `") and repository in TITLES:
            sections[repository][re.match(r"- `([^`]*)`", block)[1]] = block.rstrip("\n")
    return sections


def share(done, of):
    return f"{done} of {of} ({100 * done // of}%)" if of else "none"


def counts(entries, revisions, lines, title, is_here):
    """The table at the head."""
    rows = ["", "| project | files | of families that are here | of these run |", "|---|---|---|---|"]
    for name in [*revisions, "all"]:
        some = [entry for entry in entries if name in ("all", entry["repository"])]
        ours = [": runs" in lines[entry["repository"]][title(entry)] for entry in some if is_here(entry)]
        rows.append(f"| {name} | {len(some)} | {len(ours)} | {share(sum(ours), len(ours))} |")
    return "\n".join(rows) + "\n"


def others(entries, is_here, family_of):
    """The table of families that are not here."""
    found = collections.Counter()
    for entry in entries:
        if not is_here(entry):
            family = family_of(entry.get("model") or entry["file"].get("model"))
            found[family if family in OTHERS else next(mark for mark in OTHERS if mark in entry["name"])] += 1
    rows = ["", "| family that is not here | files | why they are refused |", "|---|---|---|"]
    rows += [f"| {family} | {number} | {OTHERS[family]} |"
             for family, number in sorted(found.items(), key=lambda each: (-each[1], each[0]))]
    return "\n".join(rows) + "\n"


def written(listed, lines):
    from upstream_runs import family_of, is_here, title

    entries, revisions = listed["entries"], listed["revisions"]
    text = HEAD + counts(entries, revisions, lines, title, is_here) + others(entries, is_here, family_of)
    for repository, revision in revisions.items():
        text += f"\n## {repository}, {revision[:8]}: {TITLES[repository]}\n\n"
        text += "\n".join(lines[repository][title(entry)] for entry in entries
                          if entry["repository"] == repository and is_here(entry))
        text += "\n"
    return text


def main():
    from upstream_models import Workshop
    from upstream_runs import is_here, run_entry, title, upstream_list

    wanted = sys.argv[1:]
    listed = upstream_list()
    lines = lines_of_page(PAGE.read_text()) if PAGE.exists() and wanted else collections.defaultdict(dict)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        workshop = Workshop(folder / "made")
        for number, entry in enumerate(listed["entries"]):
            if not is_here(entry) or (wanted and not any(word in title(entry) for word in wanted)):
                continue
            result, reasons, _ = run_entry(entry, folder / str(number), workshop)
            lines[entry["repository"]][title(entry)] = line_of(title(entry), result, reasons)
            print(lines[entry["repository"]][title(entry)], flush=True)
    PAGE.write_text(written(listed, lines))


if __name__ == "__main__":
    main()
