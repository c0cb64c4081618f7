"""Faults around a run of real processes: files and folders that go, sockets that others reach, memory that is short."""
import os
import pathlib
import shutil
import signal
import subprocess
import time

import pytest

import megashard
from megashard import FAILURE, TRACKER, environment, launch, write_documents

TRAINING = megashard.network() + ("--micro-batch-size 1 --lr 1e-3 --train-iters 1000000 --log-interval 100000 " +
                                  megashard.RUN)
DEADLINE = 60


class Training:
    """A run of that many ranks, ended at the latest with the test."""

    def __init__(self, *flags, ranks=2, **options):
        words = launch(ranks, "pretrain", *TRAINING.split(), *flags)
        self.process = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        text=True, env=environment(), **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def wait_until(self, there):
        end = time.monotonic() + DEADLINE
        while not there():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < end
            time.sleep(0.01)

    def ranks(self):
        pid = self.process.pid
        return list(map(int, pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    def send(self, number):
        for rank in self.ranks():
            os.kill(rank, number)

    def end(self):
        """Returns exit code and output."""
        out = self.process.communicate(timeout=DEADLINE)[0]
        return self.process.returncode, out


def test_a_second_run_in_a_folder_that_was_removed_keeps_the_first_one_out(tmp_path):
    save = tmp_path / "save"
    flags = ["--mock-data", "--save", save, "--save-interval", "50"]
    with Training(*flags) as first:
        first.wait_until((save / TRACKER).exists)
        first.send(signal.SIGSTOP)
        shutil.rmtree(save)
        with Training(*flags) as second:
            second.wait_until((save / TRACKER).exists)
            first.send(signal.SIGCONT)
            code, out = first.end()
            assert code == FAILURE
            assert f"--save {save} is in use by another run (process " in out.splitlines()[-1]
            steps = len(list(save.glob("iter_*")))
            second.wait_until(lambda: len(list(save.glob("iter_*"))) > steps)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_data_file_that_is_cut_under_a_run_is_named(tmp_path, ranks):
    write_documents(tmp_path / "data", [[1] * 4000] * 50)
    metrics = tmp_path / "metrics.jsonl"
    with Training("--data-path", tmp_path / "data", "--split", "100,0,0", "--metrics-file", metrics,
                  ranks=ranks) as training:
        training.wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0)
        (tmp_path / "data.bin").write_bytes(b"")
        code, out = training.end()
    assert code == FAILURE
    errors = [line for line in out.splitlines() if "error: " in line]
    assert len(errors) == 1 and errors[0].startswith("megashard: error: " + ("rank " if ranks > 1 else str(tmp_path)))
    assert f"{tmp_path}/data.bin was made shorter while it is read: it has 0 bytes, and had 400000; " in errors[0]


def sockets_of(pids):
    """(kind, local address in the kernel's format) of the sockets of these processes that others can reach."""
    inodes = set()
    for pid in pids:
        for link in pathlib.Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = str(link.readlink())
            except OSError:  # closed since
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for what, listens in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in pathlib.Path(f"/proc/net/{what}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == listens and words[9] in inodes:
                found.add((what, words[1].split(":")[0]))
    return found


def test_on_one_machine_nobody_outside_reaches_a_run(tmp_path):
    seen = set()
    metrics = tmp_path / "metrics.jsonl"
    with Training("--mock-data", "--metrics-file", metrics, "--save", tmp_path / "save", "--save-interval", "20",
                  "--async-save", ranks=2) as training:
        def look():
            seen.update(sockets_of([training.process.pid, *training.ranks()]))
            return (tmp_path / "save" / TRACKER).exists()

        training.wait_until(look)
    assert seen == {("tcp", "0100007F")}  # 127.0.0.1: rank 0's store, and Gloo's
