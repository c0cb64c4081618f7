"""The test programs' cases that need a GPU, each as a line of its own."""

import subprocess
import xml.etree.ElementTree as ElementTree

from lines import Failure, Line
from machine import BUILD, program_environment

FILTER = "*Cuda*:*Nccl*"
LIMIT = 45  # seconds of one


def programs():
    return sorted(BUILD.glob("tests/*/*_tests"))


def names_in(program):
    """Names of the cases; None if the program cannot list them."""
    try:
        listed = subprocess.run(listing(program), capture_output=True, text=True, timeout=LIMIT,
                                env=program_environment())
    except subprocess.TimeoutExpired:
        return None
    return list(names(listed.stdout)) if listed.returncode == 0 else None


def listing(program):
    return [program, "--gtest_list_tests", f"--gtest_filter={FILTER}"]


def names(listed):
    """Suite names are not indented, test names are."""
    suite = ""
    for line in listed.splitlines():
        name = line.partition("#")[0].strip()
        if line.startswith(" "):
            yield suite + name
        elif name.endswith("."):
            suite = name


def lines(scratch, device):
    """Tests of all programs; on `device` sim they run on the simulated one, on cpu they skip themselves."""
    environment = {"OMP_NUM_THREADS": "1", **({"MEGASHARD_TEST_DEVICE": "sim"} if device == "sim" else {})}
    for program in programs():
        found = names_in(program)
        if found is None:
            yield Line(f"list of {program.name}", listing(program), LIMIT, program_environment())
        for name in found or []:
            yield line(program, name, scratch, environment, has_gpu=device != "cpu")


def line(program, name, scratch, environment, has_gpu):
    result = scratch / f"{name.replace('/', '_')}.gtest.xml"
    command = [program, f"--gtest_filter={name}", f"--gtest_output=xml:{result}"]
    return Line(name, command, LIMIT, program_environment(**environment), lambda _: seen(result, has_gpu))


def seen(result, has_gpu):
    """Figures of a test that did not fail: none, or why it was skipped. A skip because no GPU was found is a fault."""
    cases = list(ElementTree.parse(result).getroot().iter("testcase"))
    if not cases:
        raise Failure("no such test in this program")
    skip = cases[0].find("skipped")
    if skip is None:
        return {}
    why = ((skip.get("message") or skip.text or "").strip() or "skipped itself").splitlines()[-1]
    if has_gpu and "no GPU" in why:
        raise Failure(f"the test does not see the GPU: {why}")
    return {"skipped": why}


def write_results(scratch, path):
    """One file of all results, for tests/conformance/table.py."""
    suites = ElementTree.Element("testsuites")
    for each in sorted(scratch.glob("*.gtest.xml")):
        suites.extend(ElementTree.parse(each).getroot())
    ElementTree.ElementTree(suites).write(path)
