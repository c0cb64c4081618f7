"""Copies the files of tests/gpu to a folder for another machine: programs, scripts and kernels' sources."""

import json
import re
import shutil
import subprocess
import sys

import gtests
from machine import BUILD, CARRIED, ROOT, optimization_of_build, program_environment, torch_place

LARGEST_MIB = 60
PROGRAMS = ["launch/megashard", "launch/libmegashard_programs.so", "libmegashard.so", "libmegashard_sim.so"]
# Where this build has them.
MODULES = ["libmegashard_cuda.so", "tests/parallel/libtest_cuda_graph.so"]
SOURCES = ["tests/gpu", "tests/on_gpu/*.py", "launch/torch_probe.py", "docs/on_gpu.md", "parallel/cuda/*",
           "parallel/**/*.h", "models/kernels/gpu/*"]
# Of every Linux that torch runs on, and tied to it.
EVERYWHERE = re.compile(r"(ld-linux.*|lib(c|m|dl|rt|util|pthread|stdc\+\+|gcc_s))\.so.*")


def needed_libraries(program):
    """(name, path) of the shared libraries that a program loads; the path is empty where one is missing."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True, env=program_environment())
    return re.findall(r"^\s*(\S+) => (/.+?|not found)(?: \(0x\w+\))?$", listed.stdout, re.MULTILINE)


def copy_stripped(relative, folder):
    place = folder / "build" / relative
    place.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["strip", "-o", place, BUILD / relative], check=True)
    forget_run_path(place)
    return place


def forget_run_path(program):
    """Makes the folders of this build that a program names an empty text: elsewhere they may be another build's."""
    listed = subprocess.run(["readelf", "-dW", program], capture_output=True, text=True, check=True).stdout
    for text in re.findall(r"\(R(?:UN)?PATH\).*\[(.*)\]", listed):
        path = text.encode() + b"\0"
        content = program.read_bytes()
        if content.count(path) != 1:
            sys.exit(f"tests/gpu --pack: {program} shares its run path with other text; link it anew")
        program.write_bytes(content.replace(path, b"\0" * len(path)))


def carry_libraries(programs, folder):
    """Libraries that they load which are neither megashard's nor torch's nor on every machine."""
    torch_folders = torch_place()[0].parent
    for program in programs:
        for name, path in needed_libraries(program):
            if path == "not found":
                sys.exit(f"tests/gpu --pack: {program} needs {name}, which this machine has not: install it")
            ours = path.startswith((str(BUILD), str(folder))) or path.startswith(str(torch_folders))
            place = folder / CARRIED.relative_to(ROOT) / name
            if not ours and not EVERYWHERE.fullmatch(name) and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["strip", "-o", place, path], check=True)


def copy_sources(folder):
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                place = folder / path.relative_to(ROOT)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, place)


def lay(folder):
    tests = [str(program.relative_to(BUILD)) for program in gtests.programs() if gtests.names_in(program)]
    missing = [each for each in PROGRAMS if not (BUILD / each).exists()] + ([] if tests else ["tests/*/*_tests"])
    if missing:
        sys.exit(f"tests/gpu --pack: {', '.join(missing)} missing in {BUILD}: build with launch/setup --tests")
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"tests/gpu --pack: {folder} is not empty: name a new folder")
    folder = folder.resolve()
    modules = [each for each in MODULES if (BUILD / each).exists()]
    programs = [copy_stripped(each, folder) for each in PROGRAMS + tests + modules]
    carry_libraries([BUILD / path.relative_to(folder / "build") for path in programs], folder)
    copy_sources(folder)
    facts = {"torch": torch_place()[1], "optimization": optimization_of_build()}
    (folder / "pack.json").write_text(json.dumps(facts) + "\n")
    mebibytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
    print(f"{folder}: {mebibytes:.1f} MiB; there: {folder}/tests/gpu --smoke, --mfu, --peers or --all")
    if "libmegashard_cuda.so" not in modules:
        print("this build has no CUDA (libmegashard_cuda.so): on a GPU nothing of it will run")
    if facts["optimization"] in ("0", "g"):
        print("this build is not optimised (-Doptimization=2): the figures of --mfu and --peers would be too low")
    if mebibytes > LARGEST_MIB:
        sys.exit(f"tests/gpu --pack: that is more than {LARGEST_MIB} MiB: configure with -Doptimization=2")
