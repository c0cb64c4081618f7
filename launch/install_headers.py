#!/usr/bin/env python3
"""Run by `meson install`: the public headers go to PREFIX/include/megashard, and include each other there."""
import os
import pathlib
import re

ROOMS = ("parallel", "checkpoint", "framework", "models")
PRIVATE = ("detail", "sim", "cuda", "gpu")  # folders of private headers, which no other header includes

source = pathlib.Path(os.environ["MESON_SOURCE_ROOT"])
target = pathlib.Path(os.environ["MESON_INSTALL_DESTDIR_PREFIX"]) / "include" / "megashard"
for room in ROOMS:
    for header in sorted((source / room).rglob("*.h")):
        path = header.relative_to(source)
        if set(PRIVATE) & set(path.parts):
            continue
        place = target / (path.name if path.parent.name == "megashard" else path)
        place.parent.mkdir(parents=True, exist_ok=True)
        text = re.sub(rf'#include "((?:{"|".join(ROOMS)})/)', r'#include "megashard/\1', header.read_text())
        place.write_text(text)
