"""Two network namespaces as two nodes with a cable between them: they train as one node does, and a cable that is
pulled ends both."""
import collections
import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

import pytest

from megashard import NO_DROPOUT, PROGRAM, RUN, environment, losses, network, pretrain, run

TORCHRUN = pathlib.Path(sys.executable).parent / "torchrun"
TRAINING = (f"{network()} --mock-data --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3 {RUN} "
            f"{' '.join(NO_DROPOUT)}")
DEADLINE = 60  # seconds; the least that --distributed-timeout-minutes takes
PORT = "29500"  # their network has no other process
HEAD, ADDRESS = "head", "10.77.0.1"  # of the first node
CABLE = "eth0"  # in either node
# A network namespace, and a file for its /etc/hosts.
Node = collections.namedtuple("Node", "name hosts")


@pytest.fixture
def nodes(tmp_path):
    """Two of them. As on a fresh Debian a node's own name is 127.0.1.1 there."""
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
            for address in (f"10.77.0.{number + 1}/24", f"fd77::{number + 1}/64"):
                run("ip", "-n", name, "address", "add", address, "dev", CABLE, "nodad")
            for device in ("lo", CABLE):
                run("ip", "-n", name, "link", "set", device, "up")
        own = f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}"
        for name, text in zip(names, (f"{own} {HEAD}\n", f"{own}\n{ADDRESS} {HEAD}\n")):
            (tmp_path / name).write_text(text)
        yield [Node(name, tmp_path / name) for name in names]


@contextlib.contextmanager
def started(node, *command, output=subprocess.DEVNULL, **variables):
    """Runs a command on the node with separate process ids. Ranks that see each other exchange memory, not messages."""
    inside = ["ip", "netns", "exec", node.name, "unshare", "--pid", "--fork", "--mount-proc", "--kill-child",
              "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', node.hosts]
    process = subprocess.Popen([*map(str, inside), *map(str, command)], stdout=output, stderr=subprocess.PIPE,
                               text=True, env=environment(**variables))
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The losses of one node."""
    steps, _ = pretrain(tmp_path_factory.mktemp("one_node"), ranks=4, defaults=TRAINING, config=None)
    assert len(steps) == 4
    return losses(steps)


@pytest.mark.parametrize("address, variables", [(HEAD, {}), ("fd77::1", {}),
                                                (ADDRESS, {"GLOO_SOCKET_IFNAME": CABLE})])
def test_they_have_the_losses_of_one_node(nodes, expected, tmp_path, address, variables):
    metrics = tmp_path / "two.jsonl"
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(started(
            node, TORCHRUN, "--no-python", "--nnodes", 2, "--node-rank", number, "--nproc-per-node", 2,
            "--master-addr", address, "--master-port", PORT, "--local-addr", f"10.77.0.{number + 1}",
            PROGRAM, "pretrain", *TRAINING.split(), "--metrics-file", metrics, **variables))
            for number, node in enumerate(nodes)]
        for agent in agents:
            errors = agent.communicate(timeout=100)[1]
            assert agent.returncode == 0, errors
    assert losses(map(json.loads, metrics.read_text().splitlines())) == expected


@contextlib.contextmanager
def training(nodes, *flags, **variables):
    """A rank on either node."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(started(
            node, PROGRAM, "pretrain", *TRAINING.split(), "--train-iters", 1000000, "--distributed-timeout-minutes",
            DEADLINE // 60, *flags, RANK=str(number), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
            MASTER_ADDR=ADDRESS, MASTER_PORT=PORT, **variables)) for number, node in enumerate(nodes)]


def pull_cable(nodes):
    run("ip", "-n", nodes[0].name, "link", "set", CABLE, "down")


@pytest.mark.slow
def test_a_pulled_cable_ends_both(nodes, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    with training(nodes, "--metrics-file", metrics) as ranks:
        end = time.monotonic() + DEADLINE
        while not metrics.exists() or metrics.read_text().count("\n") < 5:
            assert time.monotonic() < end and not any(rank.poll() for rank in ranks), "it does not train"
            time.sleep(0.05)
        pull_cable(nodes)
        pulled = time.monotonic()
        for number, rank in enumerate(ranks):
            errors = rank.communicate(timeout=DEADLINE + 20)[1].splitlines()
            message = [line for line in errors if "given twice" not in line]
            assert rank.returncode == 1 and len(message) == 1, errors
            assert message[0].startswith(f"megashard: error: rank {number}: ")
            assert f"failed on rank {number} after waiting 60." in message[0]
            assert f"for rank {1 - number}: a rank died or ran a different number of collectives" in message[0]
        assert time.monotonic() - pulled > DEADLINE - 5  # it was the cable


@pytest.mark.slow
@pytest.mark.parametrize("pulled", [True, False])
def test_connections_in_vain_end_both_whether_or_not_the_cable_is_pulled(nodes, pulled):
    lonely = "lonely"  # a network of each node's own, in which it does not reach the other
    for number, node in enumerate(nodes):
        ip = ["ip", "-n", node.name]
        run(*ip, "link", "add", lonely, "type", "veth", "peer", "name", "end")
        run(*ip, "address", "add", f"10.78.0.{number + 1}/24", "dev", lonely)
        for device in (lonely, "end"):
            run(*ip, "link", "set", device, "up")
        run(*ip, "neighbour", "add", f"10.78.0.{2 - number}", "lladdr", "02:00:00:00:00:01", "dev", lonely)
    with training(nodes, output=subprocess.PIPE, GLOO_SOCKET_IFNAME=lonely) as ranks:
        assert any(line.startswith("Waiting for the connections of all ranks") for line in ranks[1].stdout)
        if pulled:
            pull_cable(nodes)
        for number, rank in enumerate(ranks):
            message = rank.communicate(timeout=DEADLINE + 5)[1].splitlines()[-1]
            assert rank.returncode == 1
            assert f"error: rank {number}: connecting to the other ranks in group 'world' failed on rank" in message
            store = f"[the store at {ADDRESS}:{PORT} gave no answer for "
            assert (store in message) == (pulled and number == 1)
