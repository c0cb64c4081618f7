"""`torchrun --no-python ... megashard pretrain`: training works, and a failure ends in one message and a failed
group."""
import json
import pathlib
import sys

import pytest

from megashard import INTEROP, PROGRAM, ROOT, RUN, free_port, network, run

TORCHRUN = pathlib.Path(sys.executable).parent / "torchrun"
PRETRAIN = (f"pretrain {network(layers=1)} --micro-batch-size 1 --global-batch-size 2 --train-iters 3 --lr 1e-3 "
            f"{RUN}").split()


def torchrun(*arguments, ranks=2, python=False):
    return run(TORCHRUN, *([] if python else ["--no-python"]), "--nproc-per-node", ranks, *arguments, expect=None)


def test_it_trains(tmp_path):
    done = torchrun("--master-port", free_port(), PROGRAM, *PRETRAIN, "--mock-data", "--metrics-file",
                    str(tmp_path / "m.jsonl"))
    assert done.returncode == 0, done.stderr
    assert "over 2 ranks" in done.stdout
    assert [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize("method", ["tcp", "file"])
def test_its_ranks_meet_where_they_are_told(tmp_path, method):
    place = {"tcp": f"tcp://127.0.0.1:{free_port()}", "file": f"file://{tmp_path}/store"}[method]
    done = torchrun("--master-port", free_port(), PROGRAM, *PRETRAIN, "--mock-data", "--distributed-init-method", place)
    assert done.returncode == 0 and "over 2 ranks" in done.stdout, done.stderr


def test_it_fails():
    """The last rank may fail: torchrun ends all ranks as soon as one exits."""
    first_rank_comes_last = ("sh", "-c", '[ "$LOCAL_RANK" = 1 ] || sleep 1; exec "$@"', "sh")
    done = torchrun("--standalone", *first_rank_comes_last, PROGRAM, *PRETRAIN)
    messages = [line for line in done.stderr.splitlines() if line.startswith("megashard: error: ")]
    assert len(messages) == 1 and "give --data-path PREFIX of .bin/.idx files" in messages[0], done.stderr
    assert "Traceback" not in done.stdout
    assert done.returncode != 0


@pytest.fixture(scope="module")
def twin():
    """The example's output, computed by PyTorch: samples by epoch, losses by epoch."""
    return printed(torchrun("--master-port", free_port(), ROOT / "tests" / "interop" / "linear_twin.py", ranks=4,
                            python=True))


def printed(done):
    assert done.returncode == 0, done.stderr + done.stdout
    words = [line.split() for line in done.stdout.splitlines()]
    return [line[3:] for line in words if line[2] == "samples"], [float(line[3]) for line in words if line[2] == "loss"]


@pytest.mark.parametrize("method", ["env", "tcp", "file"])
def test_the_first_example_has_its_twins_losses(tmp_path, twin, method):
    ways = {"env": "env://", "tcp": f"tcp://127.0.0.1:{free_port()}", "file": f"file://{tmp_path}/store"}
    samples, losses = printed(torchrun("--master-port", free_port(), INTEROP / "linear_example",
                                       ways[method], ranks=4))
    assert samples == twin[0] and len(samples) == 3
    assert losses == pytest.approx(twin[1], abs=1e-6)  # fp32: Gloo's order of sums may differ
    assert losses[2] < losses[0] - 0.2
