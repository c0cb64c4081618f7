"""launch/examples/ray_train.py on a real Ray of two simulated nodes: one is lost, and the training goes on."""
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch

import megashard
from megashard import PROGRAM, ROOT, launch, network, run

pytestmark = pytest.mark.slow  # up to four minutes on two busy cores

RANKS = 2
STEPS = 30
TRAINING = (network() + megashard.RUN + " --mock-data --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 "
            f"--train-iters {STEPS} --save-interval 5").split()  # with dropout


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, of which the first is the head."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "MEGASHARD_BIN": str(PROGRAM),
                   "PYTHONPATH": str(ROOT / "launch" / "python"),
                   "RAY_worker_niceness": "0"}
    from ray.cluster_utils import Cluster

    node = dict(num_cpus=RANKS, object_store_memory=80 << 20)
    cluster = Cluster(initialize_head=True, head_node_args=dict(include_dashboard=False, **node))
    cluster.second = cluster.add_node(**node)
    yield cluster
    cluster.shutdown()


def steps_in(file):
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def start(cluster, folder, *flags):
    words = [sys.executable, ROOT / "launch" / "examples" / "ray_train.py", "--ranks", RANKS, "--strategy", "SPREAD",
             "--", *flags]
    environment = megashard.environment(PYTHONPATH=os.environ["PYTHONPATH"], RAY_ADDRESS=cluster.address)
    with open(folder / "out", "w") as out:
        return subprocess.Popen([str(word) for word in words], cwd=folder, stdout=out, stderr=out, env=environment)


def tensors(step):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(step)
    state = {key: torch.empty(stored.size, dtype=stored.properties.dtype)
             for key, stored in reader.read_metadata().state_dict_metadata.items()
             if isinstance(stored, TensorStorageMetadata)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def stop_ranks(folder):
    """By SIGSTOP, so that the training is where it is when its node is lost."""
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            words = (process / "cmdline").read_bytes().split(b"\0")
            if words[:2] == [str(PROGRAM).encode(), b"pretrain"] and str(folder / "save").encode() in words:
                os.kill(int(process.name), signal.SIGSTOP)


def test_a_training_goes_on_when_a_node_is_lost(folder, cluster):
    """With the bits of a run of the command line that nothing interrupts."""
    run(*launch(RANKS, "pretrain"), *TRAINING, "--save", "whole", cwd=folder)
    driver = start(cluster, folder, *TRAINING, "--load", folder / "save", "--save", folder / "save", "--metrics-file",
                   folder / "metrics.jsonl")
    deadline = time.monotonic() + 300
    while len(steps_in(folder / "metrics.jsonl")) < 7:
        assert driver.poll() is None and time.monotonic() < deadline, (folder / "out").read_text()
        time.sleep(0.01)
    stop_ranks(folder)
    assert 7 <= len(steps_in(folder / "metrics.jsonl")) < STEPS
    cluster.remove_node(cluster.second, allow_graceful=False)
    assert driver.wait(300) == 0, (folder / "out").read_text()
    out = (folder / "out").read_text()
    assert out.count("restarts are left") == 1 and "successfully loaded checkpoint from" in out, out
    assert steps_in(folder / "metrics.jsonl") == list(range(1, STEPS + 1))
    ours, whole = tensors(folder / "save" / f"iter_{STEPS:07d}"), tensors(folder / "whole" / f"iter_{STEPS:07d}")
    assert ours.keys() == whole.keys() and all(torch.equal(ours[key], whole[key]) for key in whole)


def test_wrong_flags_are_not_tried_again(folder, cluster):
    driver = start(cluster, folder, *TRAINING, "--lr", "-1")
    assert driver.wait(300) == 2 and "restarts are left" not in (folder / "out").read_text()
