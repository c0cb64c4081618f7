"""What a new user gets wrong ends in one sentence on one rank that says what to do, and in the right exit code."""
import os
import pathlib
import socket
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("MEGASHARD_BUILD", ROOT / "build"))
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
USAGE, FAILURE = 2, 1


def run(*arguments, **environment):
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    return subprocess.run([BUILD / "launch" / "megashard", *arguments], env={**clean, **environment}, cwd=ROOT,
                          capture_output=True, text=True, timeout=60)


CASES = {
    "unknown subcommand": (["train"], USAGE, "unknown subcommand 'train': known are"),
    "unknown subcommand on every rank": (["launch", "-n", "3", "--", "train"], USAGE, "unknown subcommand 'train'"),
    "launch without a number": (["launch", "--", "pretrain"], USAGE, "--processes is required"),
    "launch without a subcommand": (["launch", "-n", "2"], USAGE, "no subcommand to start"),
    "launch of no ranks": (["launch", "-n", "0", "--", "pretrain"], USAGE, "0 not in range 1 to 4096"),
    "launch with a flag twice": (["launch", "-n", "2", "-n", "2", "--", "pretrain"], USAGE, "At Most 1 required"),
    "launch with an unknown flag": (["launch", "--nodes", "2", "-n", "2", "--", "pretrain"], USAGE,
                                    "unknown flag --nodes"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_sentence(name):
    arguments, code, sentence = CASES[name]
    done = run(*arguments)
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("megashard: error: ") and sentence in lines[0], done.stderr
    assert done.returncode == code


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
