#!/usr/bin/env python3
"""Run by `meson install`: copy the headers of the library's rooms to PREFIX/include/megashard/ROOM."""
import os
import pathlib
import shutil

source = pathlib.Path(os.environ["MESON_SOURCE_ROOT"])
target = pathlib.Path(os.environ["MESON_INSTALL_DESTDIR_PREFIX"]) / "include" / "megashard"
for room in ("parallel", "checkpoint", "framework", "models"):
    for header in sorted((source / room).rglob("*.h")):
        place = target / header.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(header, place)
