"""The CUDA kernels keep their numbers in registers, no more than docs/kernels.md says.

cuobjdump reads the machine code in libmegashard_cuda.so. LibTorch's wheel for CUDA brings one, with Triton.
"""
import importlib.util
import pathlib
import re
import shutil

import pytest

from megashard import BUILD, ROOT, run

MODULE = BUILD / "libmegashard_cuda.so"
KERNELS = {  # names in docs/kernels.md: pattern of the function's mangled name
    "copies": "copy_kernel",
    "fp8: largest magnitude": "amax_kernel",
    "fp8: quantise": "15quantise_kernel",
    "fp8: quantise rows": "20quantise_rows_kernel",
    "fp8: rebuild": "17dequantise_kernel",
    "AdamW": "adamw_kernel",
    "sum of squares": "14squares_kernel",
    "its tiles' sum": "squares_total_kernel",
    "RMSNorm": "14RmsNormThreads",
    "its backward": "18RmsNormGradThreads",
    "norm of heads, rotated": "15HeadNormThreads",
    "norm's and rotation's backward": "19HeadNormGradThreads",
    "its weight's sums": "column_sums_kernel",
    "SwiGLU": "swiglu_kernel.*14SwigluElements",
    "SwiGLU's backward": "swiglu_kernel.*18SwigluGradElements",
    "rotation": "rotate_kernel",
    "cross-entropy": "19CrossEntropyThreads",
    "cross-entropy's backward": "cross_entropy_grad_kernel",
}


def cuobjdump():
    found = shutil.which("cuobjdump")
    triton = importlib.util.find_spec("triton")
    if not found and triton:
        bundled = pathlib.Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        found = bundled if bundled.exists() else None
    if not found:
        pytest.skip("this machine has no cuobjdump")
    return found


@pytest.fixture(scope="module")
def resources():
    """(architecture, mangled name, {"REG": 32, "STACK": 0, ...}) of each kernel."""
    if not MODULE.exists():
        pytest.skip("this build has no CUDA")
    listed = run(cuobjdump(), "--dump-resource-usage", MODULE).stdout
    found, architecture, name = [], "", ""
    for line in listed.splitlines():
        if line.startswith("arch = "):
            architecture = line.split()[2]
        elif line.startswith(" Function "):
            name = line.split()[1]
        elif line.startswith("  REG:"):
            used = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
            found.append((architecture, name, used))
    assert {architecture for architecture, _, _ in found} == {"sm_80", "sm_90"}
    return found


def test_no_kernel_spills(resources):
    """Spilled registers, and arrays that are indexed at run time, are on a thread's stack."""
    assert not [(architecture, name, used) for architecture, name, used in resources
                if used["STACK"] or used["LOCAL"]]


def test_the_table_of_registers(resources):
    """No variant of a kernel takes more than it says."""
    page = (ROOT / "docs" / "kernels.md").read_text()
    known = set()
    for kernel, pattern in KERNELS.items():
        variants = [each for each in resources if re.search(pattern, each[1])]
        known |= {name for _, name, _ in variants}
        most = [max(used["REG"] for where, _, used in variants if where == architecture)
                for architecture in ("sm_80", "sm_90")]
        said = re.search(rf"^\| {re.escape(kernel)} \|.*\| (\d+), (\d+) \|$", page, re.MULTILINE)
        assert said and all(used <= int(bound) for used, bound in zip(most, said.groups())), f"{kernel}: {most}"
    assert known == {name for _, name, _ in resources}  # none is left out
