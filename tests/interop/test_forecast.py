"""The forecast for a GPU (docs/benchmarks.md) runs, and its counts equal those by hand."""
import collections
import dataclasses
import sys

import pytest

from megashard import ROOT, run

sys.path.append(str(ROOT / "tests" / "benchmarks"))
import forecast  # noqa: E402

# Queries are 128 wide, keys 64. Two sequences of 32 tokens.
TOKENS = 64
SMALL = forecast.Model(hidden=128, ffn=256, layers=1, heads=2, kv_heads=1, vocabulary=1000, sequence=32,
                       tokens_at_once=TOKENS)
RUN = forecast.Run("small", micro_batches=1, goal=0, kept=False)
PRODUCTS = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256 + 1000 * 128  # q and o; k and v; MLP; head
WEIGHTS = PRODUCTS + (128 + 64 + 64) + 3 * 128  # biases, norms; the head is the embedding
SCORES = 2 * (2 * 2 * 32 * 32 * 128) // 2  # sequences: scores, then values, of which half is seen


def test_flops_and_bytes_of_a_small_model():
    flops, moved = collections.Counter(), collections.Counter()
    for kernel in forecast.step(SMALL, RUN, forecast.FUSED):
        flops[kernel.kind] += kernel.flops * kernel.count
        moved[kernel.kind] += kernel.bytes * kernel.count
    assert flops["products"] == 3 * 2 * TOKENS * PRODUCTS
    assert flops["attention"] == 3.5 * SCORES
    assert forecast.training_flops(SMALL, TOKENS) == 6 * TOKENS * PRODUCTS + 3 * SCORES
    row = TOKENS * 128 * 2  # bytes of a hidden state
    assert SMALL.parameters() == WEIGHTS == 276096
    assert moved["norm"] == 3 * (2 + 3) * row
    assert moved["rotation"] == (2 + 2) * (row + row // 2)
    assert moved["SwiGLU"] == (3 + 6) * TOKENS * 256 * 2
    assert moved["loss"] == (1 + 2) * TOKENS * 1000 * 2
    assert moved["sums"] == 4 * 3 * row + 2 * row  # of residuals and gradients; of biases, as wide as two rows
    assert moved["gathers"] == pytest.approx(1.5 * (4 + 2) * WEIGHTS)  # two of half each; the root once
    assert moved["gradients"] == pytest.approx((2 + 4) * WEIGHTS)
    assert moved["optimizer"] == (4 + 28) * WEIGHTS
    held = forecast.memory(SMALL, dataclasses.replace(RUN, micro_batches=2))
    assert held["weights, moments"] + held["gradients of earlier micro batches"] == 16 * WEIGHTS


def test_kernels_take_the_longer_of_computing_and_moving():
    machine = {"flops": 1e12, "bandwidth": 1e12}
    start = forecast.KERNEL_START_S
    computes = forecast.Kernel("", flops=1e12, bytes=1e9, share=0.5, count=3)
    assert computes.seconds(machine) == pytest.approx(3 * (2 + start))
    moves = forecast.Kernel("", flops=1e9, bytes=1e12, launches=2)
    assert moves.seconds(machine) == pytest.approx(1 / forecast.SHARES["bandwidth"] + 2 * start)
    full = 132 * 128 * 256 // 128  # columns of a wave of tiles of 128 rows
    assert forecast.product_share(128, full, 768) == pytest.approx(768 / (768 + 256))
    assert forecast.product_share(128, full + 1, 768) < 0.6  # another wave


def test_the_tables_are_those_of_the_docs():
    printed = run(sys.executable, forecast.__file__).stdout
    assert printed.count("\n| 7 B |") == 3
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert not [line for line in printed.splitlines() if line.startswith("| ") and line not in page.splitlines()]
