#!/usr/bin/env python3
"""Print where LibTorch is, one fact a line, without importing torch (which takes seconds).

usage: torch_probe.py [LIBTORCH_DIR]
lines: root folder, version, "cuda" or "cpu", CUDA and NCCL include folders joined by ':', LibTorch's include folder
without symbolic links (so that a compiler cache knows it again), nvcc
"""
import importlib.util
import pathlib
import re
import sys


def fail(message):
    sys.exit(f"torch_probe: {message}")


def find_root(argument):
    if argument:
        return pathlib.Path(argument).resolve()
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        fail(f"{sys.executable} has no torch package; run launch/setup, or configure with -Dlibtorch=DIR")
    return pathlib.Path(list(spec.submodule_search_locations)[0])


def find_version(root):
    for name in ("version.py", "build-version", "include/torch/version.h"):
        path = root / name
        if path.exists():
            text = path.read_text()
            found = re.search(r"(?:TORCH_VERSION|__version__\s*=\s*)\D*(\d+\.\d+\.\d+[^\s'\"]*)", text) or re.search(
                r"(\d+\.\d+\.\d+\S*)", text
            )
            if found:
                return found.group(1)
    fail(f"{root} has neither version.py nor build-version: is it a LibTorch folder?")


def find_cuda_includes(root):
    """Folders with CUDA's and NCCL's headers: the wheels beside LibTorch's own, else a toolkit's; empty if one is
    missing."""
    nvidia = root.parent / "nvidia"
    toolkits = [pathlib.Path(folder) / "include" for folder in ("/usr/local/cuda", "/opt/cuda")]
    folders = [*sorted(nvidia.glob("cu*/include")), nvidia / "nccl" / "include", *toolkits,
               pathlib.Path("/usr/include")]
    found = []
    for header in ("cuda_runtime_api.h", "cublas_v2.h", "nccl.h"):
        folder = next((folder for folder in folders if (folder / header).exists()), None)
        if folder is None:
            return []
        if folder not in found and folder != pathlib.Path("/usr/include"):  # g++ searches there by default
            found.append(folder)
    return [str(folder) for folder in found]


def find_nvcc(includes):
    """CUDA's compiler, of the same toolkit or folder of wheels as CUDA's headers; empty if it is missing."""
    roots = [pathlib.Path(includes[0]).parent if includes else None, pathlib.Path("/usr")]
    found = [root / "bin" / "nvcc" for root in roots if root and (root / "bin" / "nvcc").exists()]
    return str(found[0]) if found else ""


def main():
    root = find_root(sys.argv[1] if len(sys.argv) > 1 else "")
    if not (root / "include" / "ATen").is_dir() or not (root / "lib" / "libtorch_cpu.so").exists():
        fail(f"{root} is no LibTorch: include/ATen or lib/libtorch_cpu.so is missing")
    cuda = (root / "lib" / "libtorch_cuda.so").exists() and (root / "lib" / "libc10_cuda.so").exists()
    includes = find_cuda_includes(root) if cuda else []
    nvcc = find_nvcc(includes)
    cuda = cuda and len(includes) > 0 and nvcc != ""
    print(root)
    print(find_version(root))
    print("cuda" if cuda else "cpu")
    print(":".join(includes))
    print((root / "include").resolve())
    print(nvcc)


main()
