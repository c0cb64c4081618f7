"""Reads the weights that --publish-weights writes (docs/reinforcement_learning.md): what an inference engine needs.

    weights = read_step("RUN/broadcasts/step_12")   # {name: tensor}

A folder holds whole weights, or the values that have changed since the step before. Run as a program it prints a
step's tensors and checks their checksums.
"""
import json
import pathlib
import sys

import numpy
import torch
from safetensors import safe_open


def read_files(folder, pattern):
    """The tensors of the files, and their metadata."""
    tensors, metadata = {}, {}
    for path in sorted(folder.glob(pattern)):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            tensors.update({name: file.get_tensor(name) for name in file.keys()})
    return tensors, metadata


def apply_changes(weights, folder):
    """Writes the changes of a step's folder into the weights of the step before."""
    for path in sorted(folder.glob("delta-*.safetensors")):
        changes, _ = read_files(folder, path.name)
        for name in {name.removesuffix(".idx").removesuffix(".val") for name in changes}:
            weights[name].view(-1)[changes[name + ".idx"].long()] = changes[name + ".val"]


def checksum(tensor):
    """The sum over the elements of (bits + 1) * (position * 0x9E3779B97F4A7C15 | 1), modulo 2^64."""
    width = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[tensor.element_size()]
    bits = tensor.contiguous().view(-1).view(width).numpy().astype(numpy.uint64)
    places = numpy.arange(len(bits), dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15) | numpy.uint64(1)
    return int(((bits + numpy.uint64(1)) * places).sum(dtype=numpy.uint64))


def read_step(folder, checks=True):
    """The weights of a step's folder, from the last whole one before it on."""
    folder = pathlib.Path(folder)
    weights, _ = read_files(folder, "[!d]*.safetensors")
    if not weights:
        _, metadata = read_files(folder, "delta-*.safetensors")
        weights = read_step(folder.parent / f"step_{metadata['base_step']}", checks=False)
        apply_changes(weights, folder)
    sums = json.loads((folder / "checksums.json").read_text())["tensors"]
    for name, expected in sums.items() if checks else ():
        if checksum(weights[name]) != expected:
            raise ValueError(f"{folder}: {name} has another checksum than checksums.json")
    return weights


if __name__ == "__main__":
    for name, tensor in read_step(sys.argv[1]).items():
        print(name, tuple(tensor.shape), tensor.dtype)
