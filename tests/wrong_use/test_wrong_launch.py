"""Subcommands, `megashard launch` and ranks that are started wrong or die."""
import os
import pathlib
import re
import signal
import socket
import subprocess

import pytest

from megashard import FAILURE, PROGRAM, ROOT, USAGE, environment, free_port
from wrong_use import MOCK, ON_TWO_RANKS, PRETRAIN, RATE, check, only_line, run


TRAIN = [*PRETRAIN, *RATE, *MOCK]

MEET = ["--distributed-init-method"]
CASES = {
    "unknown subcommand": (["train"], USAGE, "unknown subcommand 'train'; did you mean pretrain?"),
    "unknown subcommand on every rank": (["launch", "-n", "3", "--", "train"], USAGE, "unknown subcommand 'train'"),
    "launch without a number": (["launch", "--", "pretrain"], USAGE, "--processes is required"),
    "launch without a subcommand": (["launch", "-n", "2"], USAGE, "no subcommand to start"),
    "launch of no ranks": (["launch", "-n", "0", "--", "pretrain"], USAGE, "0 not in range 1 to 4096"),
    "launch with a flag twice": (["launch", "-n", "2", "-n", "2", "--", "pretrain"], USAGE, "At Most 1 required"),
    "a padding to multiples of nothing": (
        ["convert", "hf_to_torch_dist", "--hf-dir", "{folder}/model", "--save-dir", "{folder}/y", "--megatron-layout",
         "--make-vocab-size-divisible-by", "0"],
        USAGE, "--make-vocab-size-divisible-by is 0; it must be at least 1."),
    "launch with an unknown flag": (["launch", "--nodes", "2", "-n", "2", "--", "pretrain"], USAGE,
                                    "unknown flag --nodes; usage: megashard launch"),
    "launch with a flag misspelt": (["launch", "--master-prot", "29500", "-n", "2", "--", "pretrain"], USAGE,
                                    "unknown flag --master-prot; did you mean --master-port? usage:"),
    "launch with torchrun's flag": (["launch", "--nproc-per-node", "2", "--", "pretrain"], USAGE,
                                    "unknown flag --nproc-per-node; did you mean -n?"),
    "launch of ranks in words": (["launch", "-n", "two", "--", "pretrain"], USAGE, "usage: megashard launch -n N"),
    "launch of fewer than no ranks": (["launch", "-n", "-1", "--", "pretrain"], USAGE, "usage: megashard launch -n N"),
    "launch of too many ranks": (["launch", "-n", "5000", "--", "pretrain"], USAGE, "5000 not in range 1 to 4096"),
    "ranks that meet by an unknown protocol": (["launch", "-n", "2", "--", *TRAIN, *MEET, "udp://x"], USAGE,
                                               "unknown init method 'udp://x'; give env://, tcp://HOST:PORT"),
    "ranks that meet at no port": (["launch", "-n", "2", "--", *TRAIN, *MEET, "tcp://here"], USAGE,
                                   "init method 'tcp://here' should read tcp://HOST:PORT"),
    "launch on a port beyond the last": (["launch", "-n", "2", "--master-port", "70000", "--", "pretrain"], USAGE,
                                         "70000 not in range 1 to 65535"),
    "launch on a port in words": (["launch", "-n", "2", "--master-port", "http", "--", "pretrain"], USAGE,
                                  "--master-port"),
    "launch of launch": (["launch", "-n", "2", "--", "launch", "-n", "2", "--", "pretrain"], USAGE, "name it once"),
    "launch of a program that is not there": (["launch", "-n", "1", "--", "./train.sh"], USAGE,
                                              "launch: there is no program ./train.sh."),
    "launch of a text": (["launch", "-n", "1", "--", "./README.md"], USAGE,
                         "launch: ./README.md may not be executed; chmod +x ./README.md allows it."),
    "launch of a program without its path": (
        ["launch", "-n", "1", "--", "README.md"], USAGE,
        "unknown subcommand 'README.md'; launch starts a program of yours by its path: ./README.md"),
}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
# changed variables (None: unset), a part of the message
ENVIRONMENTS = {
    "a rank without a world": ({"WORLD_SIZE": None}, "RANK is set but WORLD_SIZE is not"),
    "a world without ranks": ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0: a world has at least one rank"),
    "a world in words": ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', which is no whole number"),
    "a rank beyond the last": ({"RANK": "2"}, "RANK is 2 but WORLD_SIZE is 2: ranks run from 0 to 1"),
    "a local rank beyond the world": ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2 but WORLD_SIZE is 2"),
    "no address": ({"MASTER_ADDR": None}, "RANK is set but MASTER_ADDR is not"),
    "no port": ({"MASTER_PORT": None}, "RANK is set but MASTER_PORT is not"),
    "an address with its port": ({"MASTER_ADDR": "gpu1:29500"}, "give the host alone, and the port in MASTER_PORT"),
    "an address as a browser has it": ({"MASTER_ADDR": "http://gpu1"},
                                       "MASTER_ADDR is 'http://gpu1', which is no name or address"),
    "a port that is none": ({"MASTER_PORT": "0"}, "MASTER_PORT is 0: ports run from 1 to 65535"),
    "a port with its address": ({"MASTER_PORT": "gpu1:29500"}, "MASTER_PORT is 'gpu1:29500', which is no whole number"),
}
LIBRARY = next(path for path in map(pathlib.Path, ("/lib/x86_64-linux-gnu/libm.so.6",
                                                   "/lib/aarch64-linux-gnu/libm.so.6", "/lib64/libm.so.6"))
               if path.exists())
# change of a library's bytes, a part of the message
PLUGINS = {
    "no plugin": (lambda data: data, "is no plugin: it does not export megashard_model_plugin()"),
    "a plugin that is cut off": (lambda data: data[:20000],
                                 "it has 20000 bytes, fewer than its own head says, so it is cut off"),
    "a plugin with half a head": (lambda data: data[:40], "it has 40 bytes, fewer than the head of a library"),
    "an empty plugin": (lambda data: b"", "it is empty; build it again"),
    "a plugin in C++": (lambda data: b"#include <megashard>\n", "it is no shared library (it does not begin as one)"),
    "a plugin for another processor": (lambda data: data[:18] + b"\x08\x00" + data[20:],
                                       "it was built for another processor"),
    "a plugin of 32 bits": (lambda data: data[:4] + b"\x01" + data[5:], "it was built for another processor"),
    "an object file": (lambda data: data[:16] + b"\x01\x00" + data[18:], "it is an object file; link it with -shared"),
    "a program that is no library": (lambda data: data[:16] + b"\x02\x00" + data[18:],
                                     "it is a program, not a shared library"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_message(folder, name):
    check(CASES[name], folder=folder)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_rank_that_is_started_by_hand(name):
    changes, message = ENVIRONMENTS[name]
    done = run(*TRAIN, **{variable: value for variable, value in (BY_HAND | changes).items() if value is not None})
    assert message in only_line(done)
    assert done.returncode == USAGE


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_that_cannot_be_loaded(tmp_path, name):
    change, message = PLUGINS[name]
    (tmp_path / "plugin.so").write_bytes(change(LIBRARY.read_bytes()))
    done = run(*TRAIN, "--model-plugin", tmp_path / "plugin.so", "--model", "mine")
    assert message in only_line(done)
    assert done.returncode == USAGE


def test_a_library_without_callbacks():
    done = run(*TRAIN, "--callback-plugin", LIBRARY)
    assert "registers no callback: it has no RegisterCallback" in only_line(done)
    assert done.returncode == USAGE


def start(*words, **variables):
    return subprocess.Popen([PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                            env=environment(**variables))


def start_by_hand(port, **variables):
    flags = [*TRAIN]
    flags[flags.index("--global-batch-size") + 1] = "6"  # for two ranks and for three
    return start(*flags, **(BY_HAND | {"MASTER_PORT": port} | variables))


def ends_of(processes):
    try:
        return [(process.communicate(timeout=30)[1], process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_ranks_by_hand_need_no_local_rank():
    port = free_port()
    assert ends_of([start_by_hand(port, RANK=str(rank)) for rank in range(2)]) == [("", 0), ("", 0)]


def test_worlds_of_different_sizes():
    port = free_port()
    for errors, code in ends_of([start_by_hand(port), start_by_hand(port, RANK="1", WORLD_SIZE="3")]):
        assert "rank 1 was started for a world of 3, rank 0 for one of 2: give every rank the same WORLD_SIZE" in errors
        assert (len(errors.splitlines()), code) == (1, FAILURE)


def test_two_processes_of_one_rank():
    port = free_port()
    for errors, code in ends_of([start_by_hand(port, RANK=rank, WORLD_SIZE="3") for rank in "011"]):
        assert "two processes are rank 1: give each its own RANK" in errors
        assert (len(errors.splitlines()), code) == (1, FAILURE)


def test_rank_0s_port_is_in_use():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (errors, code), = ends_of([start_by_hand(str(listener.getsockname()[1]))])
    assert "it is in use by another program or by an earlier run that has not ended" in errors
    assert (len(errors.splitlines()), code) == (1, FAILURE)


def test_who_waits_says_so():
    """After 3 s, and long before the deadline."""
    port = free_port()
    alone = start_by_hand(port, RANK="1")
    try:
        said = next(line for line in alone.stdout if line.startswith("Waiting"))
        assert re.fullmatch(rf"Waiting for rank 0 at 127.0.0.1:{port} \(\d s\): nobody listens there\n", said), said
    finally:
        alone.kill()
        alone.communicate()


def test_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        done = run("launch", "-n", "2", "--master-port", port, "--", "pretrain")
    assert f"port {port} cannot be used: Address already in use; choose another" in done.stderr
    assert done.returncode == FAILURE


def test_help_and_version_need_no_rank():
    assert "launch" in run("--help").stdout
    assert run("--version").stdout.startswith("megashard ")
    assert "--master-port" in run("launch", "--help").stdout


def test_a_rank_that_is_killed_is_named():
    """The group ends at once, not at a collective's deadline."""
    flags = [*ON_TWO_RANKS, *RATE, *MOCK, "--log-interval", "1"]
    flags[flags.index("--train-iters") + 1] = "1000000"
    group = start(*flags)
    try:
        assert any(" iteration " in line for line in group.stdout), "the group ended before its first step"
        ranks = pathlib.Path(f"/proc/{group.pid}/task/{group.pid}/children").read_text().split()
        os.kill(int(ranks[1]), signal.SIGKILL)
        _, errors = group.communicate(timeout=30)
    finally:
        group.kill()
    assert errors.splitlines()[0].startswith("megashard: error: launch: rank 1 was ended by signal 9"), errors
    assert len(errors.splitlines()) == 1
    assert group.returncode == 128 + signal.SIGKILL
