"""`megashard plan --measure`: the numbers of this machine, which a plan and a dry run take."""
import re
import time

import pytest

from megashard import LAYERS, NO_DROPOUT, PROGRAM, launch, network, pretrain, run

FLAGS = (network(layers=2, hidden=64, heads=4, length=64, vocabulary=500) + "--micro-batch-size 2 --lr 1e-3 "
         "--use-torch-fsdp2").split() + NO_DROPOUT


def test_a_machine_is_measured_and_planned(folder):
    begin = time.monotonic()
    said = run(*launch(2, "plan", "--measure", folder / "here.yaml")).stdout
    assert time.monotonic() - begin < 60
    assert said.count(f"wrote {folder}/here.yaml: ") == 1  # by one of the ranks
    text = (folder / "here.yaml").read_text()
    assert text.startswith("# Measured by `megashard plan --measure` with 2 rank(s), 1 thread(s) each.")
    products = {tuple(map(int, row[:4])): float(row[4]) for row in re.findall(
        r"bits: (\d+), m: (\d+), n: (\d+), k: (\d+), flops: (\S+)}", text)}
    assert len(products) == 2 * 27
    assert products[32, 1024, 1024, 1024] > products[32, 32, 32, 32]
    assert re.search(r"^node_devices: 2$", text, re.M)
    assert 100e6 < int(re.search(r"^program_memory: (\d+)$", text, re.M)[1]) < 400e6  # LibTorch alone has 90 MB
    planned = run(PROGRAM, "plan", *FLAGS, "--world-size", 2, "--device", folder / "here.yaml").stdout
    assert float(re.search(r"^step: ([\d.]+) ms", planned, re.M)[1]) > 0
    assert "free, kept for reuse" in planned and "program and libraries" in planned
    said = run(PROGRAM, "pretrain", *FLAGS, "--mock-data", "--train-iters", 2, "--dry-run", "--machine",
               folder / "here.yaml").stdout
    assert "the whole training: " in said


def test_a_plan_has_what_a_training_has_resident(folder):
    """Memory of one rank, in fp32. Holes in the heaps are about 10 MB, half of the tolerance."""
    run(PROGRAM, "plan", "--measure", folder / "alone.yaml")
    flags = (network(layers=4, hidden=512, heads=8, length=128, vocabulary=8000) + "--micro-batch-size 2 --lr 1e-3 "
             "--use-torch-fsdp2").split() + NO_DROPOUT
    (folder / "fsdp2.yaml").write_text(LAYERS)
    planned = run(PROGRAM, "plan", *flags, "--fsdp2-config-path", folder / "fsdp2.yaml", "--device",
                  folder / "alone.yaml").stdout
    peak = int(re.search(r"peak memory of rank 0: .* \((\d+) bytes\)", planned)[1])
    held = bytearray(b"1") * (3 * peak)  # memory of the parent process does not count
    steps, _ = pretrain(folder, *flags, "--mock-data", "--eval-iters", 0, "--train-iters", 3,
                        "--init-model-with-meta-device", config=LAYERS)
    assert len(held) > peak
    assert peak == pytest.approx(steps[-1]["peak_memory_bytes"], rel=0.05)


def test_a_file_that_cannot_be_written_is_told(folder):
    done = run(PROGRAM, "plan", "--measure", folder / "none" / "here.yaml", expect=None)
    assert done.returncode != 0 and "--measure" in done.stdout + done.stderr
