"""Collectives in `megashard plan`: where parts begin, the latency of rings, and its effect on --fit."""
import re

import pytest

from megashard import ROOT
from test_plan import LLAMA_7B, SMALL, plan
from test_plan_time import forecast

LINE = 128  # bytes on which every rank's part of a buffer begins


def collectives(text):
    """Collectives of a step: {kind: (count, bytes, seconds)}."""
    rows = re.findall(r"^(all_gather|reduce_scatter|all_reduce) +(\d+) +(\d+) +([\d.]+)$", text, re.M)
    return {kind: (int(count), int(size), float(ms) / 1e3) for kind, count, size, ms in rows}


def test_parts_are_rounded_up_after_the_flags(folder):
    """A layer has nine parameters, the root three, and each a flag of four bytes beside its gradient."""
    world = 8
    _, moved, _ = collectives(plan(folder, LLAMA_7B, world))["reduce_scatter"]
    parts = [4 * (LLAMA_7B.unit // world + 9)] * LLAMA_7B.layers + [4 * (LLAMA_7B.root // world + 3)]
    assert any(part % 16 for part in parts)
    assert moved == world * sum((part + LINE - 1) // LINE * LINE for part in parts)


# By NCCL's cost model: 3.4 us a hop in a node of 8, 9.6 between nodes, and 8.4 to begin.
@pytest.mark.parametrize("world, latency", [(8, 7 * 3.4e-6), (64, 56 * 3.4e-6 + 7 * 9.6e-6),
                                            (512, 448 * 3.4e-6 + 63 * 9.6e-6)])
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_gathers_and_reductions_go_round_a_ring(folder, world, latency, device):
    said = collectives(plan(folder, SMALL, world, "--device", device, length=128))
    for kind in ("all_gather", "reduce_scatter"):
        count, moved, seconds = said[kind]
        assert seconds == pytest.approx(count * (latency + 8.4e-6) + moved * (world - 1) / world / 360e9, abs=1e-5)
    count, moved, seconds = said["all_reduce"]  # a chain in each node, a tree of nodes, there and back
    hops = 2 * (7 * 3.4e-6 + {8: 0, 64: 3, 512: 6}[world] * 9.6e-6)
    assert seconds == pytest.approx(count * (hops + 8.4e-6), abs=1e-5) and moved < 1e4


def test_small_micro_batches_on_many_nodes_shard_within_a_node(folder):
    """2 ms a collective take longer than the compute between two of them; an all-reduce has no ring."""
    said = plan(folder, LLAMA_7B, 512, "--device", "h100", "--fit", length=1024)
    fastest = re.search(r"^fastest that fits: .*$", said, re.M)[0]
    assert "sharding_size: 8" in fastest
    rows = re.findall(r"^ +1 +- +true +(all|8) .* ([\d.]+) +[\d.]+%$", said, re.M)
    times = {shards: float(ms) for shards, ms in rows}
    assert times["8"] < 0.85 * times["all"]


def test_the_shares_of_products_are_those_of_trainings():
    for name, machine in forecast.MACHINES.items():
        text = (ROOT / "launch" / "plan" / "devices" / f"{name.lower()}.yaml").read_text()
        assert float(re.search(r"^product_share: ([\d.]+)", text, re.M)[1]) == machine["products"] == 0.74
