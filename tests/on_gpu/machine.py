"""Where megashard's programs and torch's libraries are, and what this machine has.

A tree that is built and a folder that --pack laid have the same paths. The programs find torch by LD_LIBRARY_PATH, so
it may lie anywhere.
"""

import dataclasses
import functools
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
PROGRAM = BUILD / "launch" / "megashard"
CARRIED = BUILD / "carried"  # shared libraries that are neither torch's nor everywhere; only in a pack
PACK_FACTS = ROOT / "pack.json"
TOOL_FOLDERS = ["/usr/local/cuda/bin", "/opt/cuda/bin"]


@dataclasses.dataclass(frozen=True)
class Machine:
    device: str  # of --device: cuda, or in a dry run sim or cpu
    dry_run: bool  # tiny sizes: every line is run, no figure means anything
    gpu: str = "none"
    memory_gib: float = 0.0
    driver: str = ""
    torch: str = ""
    cores: int = 1
    optimization: str = "unknown"  # of the build

    def facts(self):
        return {**dataclasses.asdict(self), "processor": platform.machine(), "python": platform.python_version()}


@functools.cache
def torch_place():
    """(folder, version) of the torch that this Python has."""
    lines = subprocess.run([sys.executable, str(ROOT / "launch" / "torch_probe.py")], capture_output=True, text=True,
                           check=True).stdout.splitlines()
    return pathlib.Path(lines[0]), lines[1].partition("+")[0]


def program_environment(**more):
    """Library path for megashard's programs; torch's libraries find CUDA's by their run path."""
    folders = [BUILD, BUILD / "launch", CARRIED, torch_place()[0] / "lib"]
    own = [path for path in [os.environ.get("LD_LIBRARY_PATH", "")] if path]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join([*map(str, folders), *own]), **more}


def first_gpu():
    """(name, memory in GiB, driver) of the first GPU; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True)
    if found.returncode != 0 or not found.stdout.strip():
        return None
    name, mebibytes, driver = found.stdout.splitlines()[0].split(", ")
    return name, float(mebibytes) / 1024, driver


def optimization_of_build():
    if PACK_FACTS.exists():
        return json.loads(PACK_FACTS.read_text())["optimization"]
    options = BUILD / "meson-info" / "intro-buildoptions.json"
    if not options.exists():
        return "unknown"
    return next(str(each["value"]) for each in json.loads(options.read_text()) if each["name"] == "optimization")


def look_at(dry_run_on=None):
    """The machine; `dry_run_on` is the device of a dry run."""
    same = {"torch": torch_place()[1], "cores": len(os.sched_getaffinity(0)), "optimization": optimization_of_build()}
    if dry_run_on:
        return Machine(device=dry_run_on, dry_run=True, **same)
    name, memory, driver = first_gpu()
    return Machine(device="cuda", dry_run=False, gpu=name, memory_gib=round(memory, 1), driver=driver, **same)


def find_tool(name):
    """Path of one of NVIDIA's tools, which are often not on the PATH; None if it is not installed."""
    candidates = [path for folder in TOOL_FOLDERS for path in sorted(pathlib.Path(folder).rglob(name))]
    installed = (str(path) for path in candidates if path.is_file() and os.access(path, os.X_OK))
    return shutil.which(name) or next(installed, None)


def mistakes():
    """Messages about missing requirements."""
    if not PROGRAM.exists():
        yield f"{PROGRAM} is missing: build it with launch/setup --tests"
    if PACK_FACTS.exists():
        built, here = json.loads(PACK_FACTS.read_text())["torch"], torch_place()[1]
        if built != here:
            yield f"these programs were built on torch {built}, and {sys.executable} has {here}: install {built}"
