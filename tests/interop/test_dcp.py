"""torch_dcp checkpoints: PyTorch reads ours and we read PyTorch's, at other world sizes.

The tensors are known to both sides (dcp_tool.cpp): uneven rows, shards without rows, every kind of dtype.
"""

import argparse
import json
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from forked_ranks import failure_in_ranks
from megashard import INTEROP, run

STEP = "iter_0000010"
WORLDS = (1, 2, 3, 4)
SAVED = {"w1": (1, 1), "w2": (2, 1), "w3": (3, 1), "h4": (4, 2)}  # ranks, replicas


def counting(dtype, sizes, first):
    numel = torch.Size(sizes).numel()
    return torch.arange(first, first + numel, dtype=torch.float32).view(sizes).to(dtype)


def known_tensors():
    return {
        "model.a.weight": counting(torch.float32, (5, 3), 0),
        "model.b.bias": counting(torch.bfloat16, (2,), 1),
        "model.c.weight": counting(torch.float16, (7, 2, 2), 2),
        "model.d.weight": counting(torch.float8_e4m3fn, (4, 4), 0),
        "model.e.weight": counting(torch.int64, (6,), 3),
        "optimizer.state.a.weight.exp_avg": counting(torch.float32, (5, 3), 100),
        "optimizer.state.a.weight.step": torch.tensor(7.0),
    }


def known_values(ranks):
    return {
        "args": argparse.Namespace(hidden_size=8, params_dtype=torch.bfloat16, name="größe"),
        "iteration": 10,
        "checkpoint_version": 3.0,
        "optimizer": {"param_groups": [{"lr": 0.001, "betas": (0.9, 0.95), "params": ["a.weight", "b.bias"]}]},
        "rng_state": {str(rank): {"torch": b"\x00\x80\xff" + str(rank).encode()} for rank in range(ranks)},
        "large": 1 << 40,
        "nothing": None,
    }


def nested_state(tensors, values):
    state = {"model": {key[6:]: tensor for key, tensor in tensors.items() if key.startswith("model.")}, **values}
    state["optimizer"] = {
        "state": {"a.weight": {name: tensors[f"optimizer.state.a.weight.{name}"] for name in ("exp_avg", "step")}},
        **values["optimizer"],
    }
    return state


def same(a, b):
    """Equal, bit for bit, dtypes and classes too."""
    if isinstance(a, torch.Tensor):
        same_kind = a.dtype == b.dtype and a.shape == b.shape
        return same_kind and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and not all(isinstance(item, (str, int)) for item in a):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def tool(*arguments):
    run(INTEROP / "dcp_tool", *arguments)


def placed(tensor, mesh):
    if tensor.dim() == 0:
        return tensor
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)  # Gloo does not send fp8


def mesh_of(world):
    return init_device_mesh("cpu", (2, 2) if world == 4 else (world,))


def load_ours(folder):
    mesh = mesh_of(dist.get_world_size())
    expected = known_tensors()
    loaded = {key: placed(torch.zeros_like(tensor), mesh) for key, tensor in expected.items()}
    values = known_values(0)
    state = nested_state(loaded, {**values, "iteration": 0, "args": None})
    del state["rng_state"]
    for saved in SAVED:
        dcp.load(state, checkpoint_id=str(Path(folder) / saved / STEP))
        for key, tensor in expected.items():
            local, wanted = loaded[key], placed(tensor, mesh)
            if local.dim():
                local, wanted = local.to_local(), wanted.to_local()
            assert same(local, wanted), (saved, key)
            local.zero_()
        assert state["args"] == values["args"] and state["iteration"] == 10, saved


def save_theirs(folder):
    world = dist.get_world_size()
    tensors = {key: placed(tensor, mesh_of(world)) for key, tensor in known_tensors().items()}
    dcp.save(nested_state(tensors, known_values(2)), checkpoint_id=str(Path(folder) / f"theirs_{world}"))


def tensor_parallel_tensors():
    return {"model.column": counting(torch.float32, (10, 3), 1), "model.row": counting(torch.float32, (6, 4), 1),
            "model.bias": counting(torch.float32, (5,), 1)}


def strided_there_and_back(folder):
    """PyTorch's FSDP over tensor parallelism loads our step and saves it again."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_coordinate()
    whole = tensor_parallel_tensors()
    column, row, bias = whole.values()
    locals_ = {"model.column": column.chunk(2)[tp].chunk(2)[dp], "model.row": row.chunk(2, 1)[tp].chunk(2)[dp],
               "model.bias": bias.chunk(2)[dp]}
    placements = {"model.column": [_StridedShard(0, split_factor=2), Shard(0)], "model.row": [Shard(0), Shard(1)],
                  "model.bias": [Shard(0), Replicate()]}
    loaded = {key: DTensor.from_local(torch.zeros_like(local).contiguous(), mesh, placements[key], run_check=False,
                                      shape=whole[key].shape, stride=whole[key].stride())
              for key, local in locals_.items()}
    state = {"model": {key[6:]: tensor for key, tensor in loaded.items()}}
    dcp.load(state, checkpoint_id=str(Path(folder) / "tp" / STEP))
    for key, local in locals_.items():
        assert same(loaded[key].to_local(), local), key
    dcp.save(state, checkpoint_id=str(Path(folder) / "theirs_tp"))


def pytorch(folder):
    """PyTorch's side of all tests, in a process of its own: what its ranks threw, by task."""
    failures = {}
    for world in WORLDS:
        failures[f"load_{world}"] = failure_in_ranks(world, folder, load_ours, folder)
        failures[f"save_{world}"] = failure_in_ranks(world, folder, save_theirs, folder)
    failures["tp"] = failure_in_ranks(4, folder, strided_there_and_back, folder)
    (Path(folder) / "failures.json").write_text(json.dumps(failures))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dcp")
    for name, (ranks, replicas) in SAVED.items():
        tool("save", folder / name, ranks, replicas)
    tool("save_tp", folder / "tp", 8, 2)  # four ranks of FSDP: 5 rows are cut into 2, 2, 1 and none
    run(sys.executable, __file__, folder, timeout=300)
    return folder


@pytest.fixture(scope="module")
def failures(folder):
    return json.loads((folder / "failures.json").read_text())


@pytest.mark.parametrize("saved, ranks", [(name, ranks) for name, (ranks, _) in SAVED.items()])
def test_pytorch_turns_ours_into_one_file(folder, saved, ranks):
    dcp_to_torch_save(str(folder / saved / STEP), str(folder / "whole.pt"))
    state = torch.load(folder / "whole.pt", weights_only=False)
    assert same(state, nested_state(known_tensors(), known_values(ranks)))


def test_replicas_are_written_once_and_spread(folder):
    sizes = [(folder / "h4" / STEP / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert min(sizes) > 4000, sizes


@pytest.mark.parametrize("world", WORLDS)
def test_pytorch_loads_ours_at_another_world_size(failures, world):
    assert not failures[f"load_{world}"]


@pytest.mark.parametrize("world", WORLDS)
def test_we_load_what_pytorch_saved(folder, failures, world):
    assert not failures[f"save_{world}"]
    for ranks in (each for each in WORLDS if each != world):
        out = folder / f"out_{world}_{ranks}"
        out.mkdir()
        tool("load", folder / f"theirs_{world}", ranks, out)
        shards = [safetensors.torch.load_file(out / f"rank{rank}.safetensors") for rank in range(ranks)]
        for key, expected in known_tensors().items():
            parts = [shard[key] for shard in shards]
            whole = torch.cat([part.view(torch.uint8)
                               for part in parts]).view(expected.dtype) if expected.dim() else parts[0]
            assert same(whole, expected), (key, ranks)
        values = torch.load(out / "values.pt", weights_only=False)
        assert same(values, known_values(2))


def test_shards_of_fsdp_over_tensor_parallelism_go_both_ways(folder, failures):
    dcp_to_torch_save(str(folder / "tp" / STEP), str(folder / "whole_tp.pt"))
    state = torch.load(folder / "whole_tp.pt", weights_only=False)
    expected = tensor_parallel_tensors()
    assert same(state["model"], {key[6:]: tensor for key, tensor in expected.items()})
    assert not failures["tp"]
    out = folder / "out_tp"
    out.mkdir()
    tool("load", folder / "theirs_tp", 2, out)
    shards = [safetensors.torch.load_file(out / f"rank{rank}.safetensors") for rank in range(2)]
    assert all(same(torch.cat([shard[key] for shard in shards]), expected[key]) for key in expected)


if __name__ == "__main__":
    torch.set_num_threads(1)
    pytorch(sys.argv[1])
