"""-Dlibtorch=DIR, on a copy of the wheel without CUDA: configures, builds, links and runs.

The copy is one of symbolic links, and a compiler cache (launch/setup installs one) knows all files again that the
absence of CUDA does not change.
"""
import importlib.util
import json
import os
import pathlib
import sys

import pytest

import megashard
from megashard import BUILD, ROOT

CACHE = {"CCACHE_NOHASHDIR": "1", "CCACHE_BASEDIR": str(ROOT)}  # as in launch/setup
WITHOUT = ("libtorch_cuda", "libc10_cuda", "libtorch_nvshmem", "libcaffe2_nvrtc")


def run(*command, timeout):
    return megashard.run(*command, cwd=ROOT, env={**os.environ, **CACHE}, timeout=timeout).stdout


def link_wheel(copy):
    """The wheel's torch/ and nvidia/, in which libtorch_cpu finds its libraries, without CUDA's part of torch."""
    wheel = pathlib.Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    links = {copy / "torch" / name: wheel / name for name in ("include", "version.py")}
    links |= {copy / "torch" / "lib" / path.name: path for path in (wheel / "lib").iterdir()
              if not path.name.startswith(WITHOUT)}
    links[copy / "nvidia"] = wheel.parent / "nvidia"
    for link, target in links.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        if target.exists():
            link.symlink_to(target)
    return copy / "torch"


@pytest.mark.slow  # builds everything once more
def test_a_libtorch_without_cuda():
    libtorch = link_wheel(ROOT / "run" / "libtorch_without_cuda")
    assert not (libtorch / "lib" / "libtorch_cuda.so").exists()
    options = json.loads((BUILD / "meson-info" / "intro-buildoptions.json").read_text())
    unity = next(option["value"] for option in options if option["name"] == "unity")
    build = ROOT / "build-no-cuda"  # beside build/: the same relative paths
    if not (build / "build.ninja").exists():
        run("meson", "setup", str(build), f"-Dlibtorch={libtorch}", f"-Dpython={sys.executable}", f"-Dunity={unity}",
            timeout=120)
    assert "CUDA    : False" in (build / "meson-logs" / "meson-log.txt").read_text()
    run("ninja", "-C", str(build), "launch/megashard", timeout=1200)
    needed = run("ldd", str(build / "launch" / "libmegashard_programs.so"), timeout=30)
    assert "libtorch_cpu.so" in needed and "libtorch_cuda" not in needed and "libc10_cuda" not in needed
    assert not list(build.glob("libmegashard_cuda*"))
    assert "launch" in run(str(build / "launch" / "megashard"), "--help", timeout=60)
