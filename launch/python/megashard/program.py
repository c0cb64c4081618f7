"""The program: where it is, what arguments it takes, and what it says when it fails."""
import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

PACKAGE = pathlib.Path(__file__).resolve().parent
ERROR = "megashard: error: "
USAGE = 2  # exit code for mistakes in arguments, files or the environment


class MegashardError(RuntimeError):
    """A training or a command failed. `code`: its exit code, 128 + signal if a signal ended it; `log`: its output."""

    def __init__(self, message, code=1, log=""):
        super().__init__(message)
        self.code, self.log = code, log


class UsageError(MegashardError, ValueError):
    """A mistake in arguments, files or the environment: nothing was trained."""

    def __init__(self, message, code=USAGE, log=""):
        super().__init__(message, code, log)


def program():
    """The path of the program `megashard`: $MEGASHARD_BIN, the wheel's, or the source tree's build."""
    named = os.environ.get("MEGASHARD_BIN")
    places = [pathlib.Path(named)] if named else [
        PACKAGE / "bin" / "megashard", PACKAGE.parents[2] / "build" / "launch" / "megashard"]
    for path in places:
        if os.access(path, os.X_OK) and path.is_file():
            return str(path)
    raise UsageError(f"there is no program {places[0]}; " +
                     ("MEGASHARD_BIN must name it." if named else "install the wheel, or set MEGASHARD_BIN to it."))


def torch_folder():
    """The torch of this Python, found without importing it. Refuses one of another minor version than the wheel's."""
    minor = ".".join((PACKAGE / "share" / "torch_version").read_text().split(".")[:2])
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise UsageError(f"{sys.executable} has no package torch; install it: pip install 'torch=={minor}.*'")
    folder = pathlib.Path(found.origin).parent
    there = re.search(r"__version__ = '([^']+)'", (folder / "version.py").read_text())[1]
    other = ".".join(there.split(".")[:2])
    if other != minor:
        raise UsageError(f"this megashard was built for torch {minor}, but {folder} is torch {there}; "
                         f"run pip install 'torch=={minor}.*', or install megashard's wheel for torch {other}")
    return folder


def library_variables():
    """The wheel's programs look for LibTorch in the folder beside the wheel's. If torch is elsewhere, the loader is
    told."""
    if not (PACKAGE / "bin").exists():  # a source tree: the build names its LibTorch
        return {}
    torch, beside = torch_folder(), PACKAGE.parent / "torch"
    if beside.exists() and beside.samefile(torch):
        return {}
    return {"LD_LIBRARY_PATH": ":".join(filter(None, [str(torch / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]))}


def error_of(output, code):
    """The exception for a failed program: its last message, of the rank that failed first."""
    at = output.rfind("\n" + ERROR)
    message = output[at + 1:].removeprefix(ERROR) if at >= 0 or output.startswith(ERROR) else output[-2000:]
    kind = UsageError if code == USAGE else MegashardError
    return kind(message.strip() or f"megashard ended with exit code {code} and said nothing", code, output)


def variables(more):
    """The environment of a program."""
    return {**os.environ, **library_variables(), **(more or {})}


def run(*words, environment=None):
    """Standard output of a command of the program. Raises what error_of makes of a failure."""
    done = subprocess.run([program(), *words], capture_output=True, text=True, errors="replace",
                          stdin=subprocess.DEVNULL, env=variables(environment))
    if done.returncode != 0:
        raise error_of(done.stderr, done.returncode)
    return done.stdout


@functools.cache
def flags():
    """The table of `megashard completion json`."""
    return json.loads(run("completion", "json"))


def key(spelling):
    return spelling.lstrip("-").replace("-", "_")


@functools.cache
def rows():
    """{spelling in snake case: row}; a row may have several."""
    found = {}
    for row in flags()["arguments"]:
        for spelling in (row["flag"], *row["aliases"], row["name"]):
            found.setdefault(key(spelling), row)
    return found


def arguments(words=""):
    """{name: row} of the arguments that have each of the words in their name or explanation.

    A row says type, default, choices, range, help and status ("used", "without effect", "refused" with a reason)."""
    asked = words.lower().split()
    return {key(row["flag"]): row for row in flags()["arguments"]
            if all(word in f"{key(row['flag'])} {row['name']} {row['help']}".lower() for word in asked)}


TYPES = {"switch": (bool, "True or False"), "integer": (int, "a whole number"), "number": ((int, float), "a number"),
         "text": ((str, os.PathLike, int, float), "text"), "integers": (int, "whole numbers"),
         "texts": ((str, os.PathLike, int, float), "text")}


def words_of(subcommand, given):
    """The command line of keyword arguments. Raises UsageError for names and types that do not fit the table."""
    own = {key(each["flag"]): each for each in flags()["programs"][subcommand]}
    words = []
    for name, value in given.items():
        row = rows().get(name)
        if row is None and name not in own:
            try:  # the program knows the nearest name, and names of other trainers
                run(subcommand, "--help", "--" + name.replace("_", "-"))
            except UsageError as error:
                raise UsageError(f"{name} is no argument" + str(error).partition("there is no such flag")[2]) from None
            raise UsageError(f"{name} is no argument of {subcommand}")
        if value is None:
            continue
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if row is None:
            is_switch, flag = not own[name]["takes_value"], own[name]["flag"]
        else:
            kind, flag = row["type"], row["flag"]
            is_switch = row["values"] == 0
            expected, text = TYPES.get("switch" if is_switch else kind, (object, ""))
            if not all(isinstance(each, expected) and (is_switch or not isinstance(each, bool)) for each in values):
                raise UsageError(f"{name} takes {text}, got {value!r}")
            # Megatron's name of a switch that turns something off is its opposite.
            if is_switch and name == row["name"] != key(flag) and not row["switch_value"]:
                values = [not each for each in values]
        if is_switch:
            words.append(flag if values[0] else flag + "=false")
        elif values:
            words += [f"{flag}={os.fspath(values[0]) if isinstance(values[0], os.PathLike) else values[0]}",
                      *(str(each) for each in values[1:])]
    return words


def plan(config=None, *, environment=None, **arguments):
    """The figures of `megashard plan` as a dict: whether a training fits, in how many bytes, seconds of a step, MFU,
    collectives, checkpoint (docs/plan.md).

    config: a YAML file. arguments: those of the training, and world_size, device, device_memory, fit."""
    words = [] if config is None else [os.fspath(config)]
    return json.loads(run("plan", *words, *words_of("plan", {**arguments, "json": True}), environment=environment))
