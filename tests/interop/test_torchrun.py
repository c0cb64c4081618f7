"""`torchrun --no-python ... megashard pretrain`: it trains, and what fails ends in one sentence and a failed group."""
import json
import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("MEGASHARD", str(ROOT / "build" / "launch" / "megashard"))
TORCHRUN = str(pathlib.Path(sys.executable).parent / "torchrun")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PRETRAIN = (
    "pretrain --num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 --seq-length 16 "
    "--tokenizer-type NullTokenizer --vocab-size 60 --micro-batch-size 1 --global-batch-size 2 --train-iters 3 "
    "--eval-iters 0 --use-torch-fsdp2 --ckpt-format torch_dcp --lr 1e-3"
).split()


def torchrun(*arguments):
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    return subprocess.run([TORCHRUN, "--no-python", "--nproc-per-node", "2", *arguments], capture_output=True, text=True,
                          env={**clean, "OMP_NUM_THREADS": "1"}, timeout=120)


def test_it_trains(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    done = torchrun("--master-port", port, PROGRAM, *PRETRAIN, "--mock-data", "--metrics-file", str(tmp_path / "m.jsonl"))
    assert done.returncode == 0, done.stderr
    assert "over 2 ranks" in done.stdout
    assert [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_it_fails():
    done = torchrun("--standalone", PROGRAM, *PRETRAIN)
    sentences = [line for line in done.stderr.splitlines() if line.startswith("megashard: error: ")]
    assert len(sentences) == 1 and "give --data-path PREFIX of .bin/.idx files" in sentences[0], done.stderr
    assert "Traceback" not in done.stdout
    assert done.returncode != 0
