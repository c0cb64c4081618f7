#!/usr/bin/env python3
"""Unpacks the archives of tests/fuzz/corpus, one a target, or packs folders into them; the same files give the same
bytes.

usage: corpus.py unpack | pack FOLDER TARGET...    a target's inputs are in FOLDER/TARGET
"""
import pathlib
import shutil
import sys
import tarfile

ARCHIVES = pathlib.Path(__file__).resolve().parent / "corpus"


def unpack(folder, target):
    shutil.rmtree(folder / target, ignore_errors=True)
    (folder / target).mkdir(parents=True)
    if (ARCHIVES / f"{target}.tar.xz").exists():  # a new target has none
        with tarfile.open(ARCHIVES / f"{target}.tar.xz") as archive:
            archive.extractall(folder / target)


def pack(folder, target):
    with tarfile.open(ARCHIVES / f"{target}.tar.xz", "w:xz", format=tarfile.USTAR_FORMAT, preset=9) as archive:
        for path in sorted((folder / target).iterdir()):
            entry = tarfile.TarInfo(path.name)  # whose time is 0 and whose owner is nobody
            entry.size = path.stat().st_size
            with path.open("rb") as content:
                archive.addfile(entry, content)


if __name__ == "__main__":
    for name in sys.argv[3:]:
        {"unpack": unpack, "pack": pack}[sys.argv[1]](pathlib.Path(sys.argv[2]), name)
