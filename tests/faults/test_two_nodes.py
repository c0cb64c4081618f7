"""Two network namespaces as two nodes with a cable between them: they train as one node does, and a cable that is
pulled ends both."""
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

from megashard import NO_DROPOUT, PROGRAM, RUN, environment, losses, network, pretrain, run

TORCHRUN = pathlib.Path(sys.executable).parent / "torchrun"
TRAINING = (f"{network()} --mock-data --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3 {RUN} "
            f"{' '.join(NO_DROPOUT)}")
DEADLINE = 60  # seconds; the least that --distributed-timeout-minutes takes
ADDRESS, PORT = "10.77.0.1", "29500"  # of the first node; nobody else is in its network
CABLE = "eth0"  # in either node


@pytest.fixture
def nodes():
    """The names of two network namespaces."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("network namespaces need root, ip and unshare")
    names = [f"megashard_{os.getpid()}_{number}" for number in range(2)]
    with contextlib.ExitStack() as stack:
        for name in names:
            if run("ip", "netns", "add", name, expect=None).returncode != 0:
                pytest.skip("this machine makes no network namespaces")
            stack.callback(run, "ip", "netns", "delete", name)
        cable = run("ip", "link", "add", CABLE, "netns", names[0], "type", "veth", "peer", "name", CABLE, "netns",
                    names[1], expect=None)
        if cable.returncode != 0:
            pytest.skip(f"this machine connects no network namespaces: {cable.stderr.strip()}")
        for number, name in enumerate(names):
            run("ip", "-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", CABLE)
            for device in ("lo", CABLE):
                run("ip", "-n", name, "link", "set", device, "up")
        yield names


@contextlib.contextmanager
def started(node, *command, **variables):
    """With process ids of its own: ranks that see each other's exchange memory, not messages."""
    inside = ["ip", "netns", "exec", node, "unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    process = subprocess.Popen([*inside, *map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               text=True, env=environment(GLOO_SOCKET_IFNAME=CABLE, **variables))
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_they_have_the_losses_of_one_node(nodes, tmp_path):
    metrics = tmp_path / "two.jsonl"
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(started(
            name, TORCHRUN, "--no-python", "--nnodes", 2, "--node-rank", number, "--nproc-per-node", 2,
            "--master-addr", ADDRESS, "--master-port", PORT, "--local-addr", f"10.77.0.{number + 1}",
            PROGRAM, "pretrain", *TRAINING.split(), "--metrics-file", metrics)) for number, name in enumerate(nodes)]
        for agent in agents:
            errors = agent.communicate(timeout=100)[1]
            assert agent.returncode == 0, errors
    expected, _ = pretrain(tmp_path, ranks=4, defaults=TRAINING, config=None)
    assert len(expected) == 4
    assert losses(map(json.loads, metrics.read_text().splitlines())) == losses(expected)


@pytest.mark.slow
def test_a_pulled_cable_ends_both(nodes, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(started(
            name, PROGRAM, "pretrain", *TRAINING.split(), "--train-iters", 1000000, "--distributed-timeout-minutes",
            DEADLINE // 60, "--metrics-file", metrics, RANK=str(number), WORLD_SIZE="2", LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1", MASTER_ADDR=ADDRESS, MASTER_PORT=PORT)) for number, name in enumerate(nodes)]
        end = time.monotonic() + DEADLINE
        while not metrics.exists() or metrics.read_text().count("\n") < 5:
            assert time.monotonic() < end and not any(rank.poll() for rank in ranks), "it does not train"
            time.sleep(0.05)
        run("ip", "-n", nodes[0], "link", "set", CABLE, "down")
        pulled = time.monotonic()
        for number, rank in enumerate(ranks):
            errors = rank.communicate(timeout=DEADLINE + 20)[1].splitlines()
            message = [line for line in errors if "given twice" not in line]
            assert rank.returncode == 1 and len(message) == 1, errors
            assert message[0].startswith(f"megashard: error: rank {number}: ")
            assert f"failed on rank {number} of 2 after waiting 60." in message[0]
            assert f"for rank {1 - number}: a rank died or ran a different number of collectives" in message[0]
        assert time.monotonic() - pulled > DEADLINE - 5  # it was the cable
