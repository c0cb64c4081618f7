"""`torchrun --no-python ... megashard pretrain`: it trains, and what fails ends in one sentence and a failed group."""
import json
import os
import pathlib
import subprocess
import sys

import pytest
from free_port import free_port

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("MEGASHARD_BUILD", ROOT / "build"))
PROGRAM = os.environ.get("MEGASHARD", str(ROOT / "build" / "launch" / "megashard"))
TORCHRUN = str(pathlib.Path(sys.executable).parent / "torchrun")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PRETRAIN = (
    "pretrain --num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 --seq-length 16 "
    "--tokenizer-type NullTokenizer --vocab-size 60 --micro-batch-size 1 --global-batch-size 2 --train-iters 3 "
    "--eval-iters 0 --use-torch-fsdp2 --ckpt-format torch_dcp --lr 1e-3"
).split()


def torchrun(*arguments, ranks=2, python=False):
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    command = [TORCHRUN, *([] if python else ["--no-python"]), "--nproc-per-node", str(ranks), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True,
                          env={**clean, "OMP_NUM_THREADS": "1"}, timeout=120)


def test_it_trains(tmp_path):
    done = torchrun("--master-port", free_port(), PROGRAM, *PRETRAIN, "--mock-data", "--metrics-file", str(tmp_path / "m.jsonl"))
    assert done.returncode == 0, done.stderr
    assert "over 2 ranks" in done.stdout
    assert [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_it_fails():
    """Whoever comes last: torchrun ends all ranks as soon as one has left."""
    first_rank_comes_last = ("sh", "-c", '[ "$LOCAL_RANK" = 1 ] || sleep 1; exec "$@"', "sh")
    done = torchrun("--standalone", *first_rank_comes_last, PROGRAM, *PRETRAIN)
    sentences = [line for line in done.stderr.splitlines() if line.startswith("megashard: error: ")]
    assert len(sentences) == 1 and "give --data-path PREFIX of .bin/.idx files" in sentences[0], done.stderr
    assert "Traceback" not in done.stdout
    assert done.returncode != 0


@pytest.fixture(scope="module")
def twin():
    """What the example prints, from PyTorch: samples by epoch, losses by epoch."""
    return printed(torchrun("--master-port", free_port(), ROOT / "tests" / "interop" / "linear_twin.py", ranks=4, python=True))


def printed(done):
    assert done.returncode == 0, done.stderr + done.stdout
    words = [line.split() for line in done.stdout.splitlines()]
    return [line[3:] for line in words if line[2] == "samples"], [float(line[3]) for line in words if line[2] == "loss"]


@pytest.mark.parametrize("method", ["env", "tcp", "file"])
def test_the_first_example_has_its_twins_losses(tmp_path, twin, method):
    ways = {"env": "env://", "tcp": f"tcp://127.0.0.1:{free_port()}", "file": f"file://{tmp_path}/store"}
    samples, losses = printed(torchrun("--master-port", free_port(), BUILD / "tests" / "interop" / "linear_example",
                                       ways[method], ranks=4))
    assert samples == twin[0] and len(samples) == 3
    assert losses == pytest.approx(twin[1], abs=1e-6)  # fp32: Gloo's order of sums may differ
    assert losses[2] < losses[0] - 0.2
