"""Compiles patched copies of the product's sources into a library that programs load before libmegashard.

All faults of a file are in one copy, asleep: MEGASHARD_PLANTED wakes one of them by its number. The library's functions
stand before those of the same names in libmegashard, so programs need no other build. One block of sources a room,
as the tree's own unity builds.
"""

import concurrent.futures
import json
import os
import pathlib
import shlex
import subprocess

from fault import ROOT

BUILD = ROOT / os.environ.get("MEGASHARD_BUILD", "build")
FOLDER = BUILD / "planted"
LIBRARY = FOLDER / "libmegashard_planted.so"

SWITCH = """#pragma once
#include <cstdlib>
namespace {
[[maybe_unused]] bool planted(int fault) {
  static const char* const chosen = std::getenv("MEGASHARD_PLANTED");
  return chosen != nullptr && std::atoi(chosen) == fault;
}
}  // namespace
"""


def patched(file, faults):
    """The file's text with its faults, which are (number, fault)."""
    text = (ROOT / file).read_text()
    for number, fault in faults:
        for before, after in fault.changes():
            assert text.count(before) == 1, f"'{fault.name}' has {text.count(before)} places in {file}: {before}"
            text = text.replace(before, after.replace("PLANTED", f"planted({number})"))
    head = "#pragma once\n" if file.endswith(".h") else ""
    return f'{head}#include "{FOLDER}/switch.h"\n#line 1 "{ROOT / file}"\n{text}'


def command_of(room):
    """Compiler command of the layer's sources, without source and output."""
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        if f"libmegashard_{room}.a.p" not in entry["output"]:
            continue
        words = shlex.split(entry["command"])
        for option in ("-o", "-c", "-MF", "-MQ"):
            at = words.index(option)
            del words[at : at + 2]
        return [words[0], *words[1:2], f"-I{FOLDER}", *[word for word in words[2:] if word not in ("-MD", "-Werror")],
                "-w"]
    raise SystemExit(f"{BUILD} has no library of {room}/: build the tree first")


def write_if_new(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def compile_room(room, files):
    source, output = FOLDER / f"{room}.cpp", FOLDER / f"{room}.o"
    write_if_new(source, "".join(f'#include "{FOLDER / file}"\n' for file in files))
    done = subprocess.run([*command_of(room), "-fPIC", "-o", output, "-c", source], cwd=BUILD, capture_output=True,
                          text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error:" in line]
        raise SystemExit("\n".join([f"the faults of {room}/ do not compile:", *errors[:20]]))
    return output


def build(chosen, faults):
    """The library with the files of the chosen faults; `faults`: all there are, by their numbers."""
    write_if_new(FOLDER / "switch.h", SWITCH)
    rooms = {}
    for file in sorted({file for fault in chosen for file in (fault.file, *fault.users)}):
        of_file = [(number, fault) for number, fault in faults.items() if fault.file == file and fault.places()]
        write_if_new(FOLDER / file, patched(file, of_file))
        if file.endswith(".cpp"):
            rooms.setdefault(pathlib.Path(file).parts[0], []).append(file)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda room: compile_room(room, rooms[room]), rooms))
    subprocess.run(["c++", "-shared", "-fPIC", "-o", LIBRARY, *objects], check=True)
    return LIBRARY
