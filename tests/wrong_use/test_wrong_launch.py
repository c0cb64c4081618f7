"""Subcommands, `megashard launch` and ranks that are started wrong or die."""
import os
import pathlib
import signal
import socket
import subprocess

import pytest

from wrong_use import BUILD, FAILURE, MOCK, ON_TWO_RANKS, RATE, ROOT, USAGE, check, clean_environment, run

CASES = {
    "unknown subcommand": (["train"], USAGE, "unknown subcommand 'train': known are"),
    "unknown subcommand on every rank": (["launch", "-n", "3", "--", "train"], USAGE, "unknown subcommand 'train'"),
    "launch without a number": (["launch", "--", "pretrain"], USAGE, "--processes is required"),
    "launch without a subcommand": (["launch", "-n", "2"], USAGE, "no subcommand to start"),
    "launch of no ranks": (["launch", "-n", "0", "--", "pretrain"], USAGE, "0 not in range 1 to 4096"),
    "launch with a flag twice": (["launch", "-n", "2", "-n", "2", "--", "pretrain"], USAGE, "At Most 1 required"),
    "a padding to multiples of nothing": (
        ["convert", "hf_to_torch_dist", "--hf-dir", "x", "--save-dir", "y", "--megatron-layout", "--make-vocab-size-divisible-by", "0"],
        USAGE, "--make-vocab-size-divisible-by is 0; it must be at least 1."),
    "launch with an unknown flag": (["launch", "--nodes", "2", "-n", "2", "--", "pretrain"], USAGE,
                                    "unknown flag --nodes"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_sentence(name):
    check(CASES[name])


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
    group = subprocess.Popen([BUILD / "launch" / "megashard", *flags], env=clean_environment(), cwd=ROOT,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
