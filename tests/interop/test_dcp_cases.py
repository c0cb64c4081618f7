"""Cases of torch.distributed.checkpoint beyond test_dcp.py's: what PyTorch writes is read bit for bit, and what is written
here goes strictly into FSDP2 models and optimizers of another world size.

The comparing is `megashard inspect --diff` with one file of torch.save that holds the whole tensors.
"""

import argparse
import collections
import enum
import json
import os
import pathlib
import pickle
import random
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from forked_ranks import failure_in_ranks

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("MEGASHARD_BUILD", ROOT / "build"))


class Outer:
    class Colour(enum.Enum):
        RED = 1

    class Plain:
        def __init__(self, x):
            self.x = x

        def __eq__(self, other):
            return type(self) is type(other) and self.x == other.x


def unusual_values():
    np.random.seed(3)
    return {
        "args": argparse.Namespace(dtype=torch.bfloat16, path=pathlib.PurePosixPath("a/b"), colour=Outer.Colour.RED,
                                   plain=Outer.Plain(2), betas=(0.9, 0.95), activation=torch.nn.functional.gelu),
        "rng_state": {"0": {"numpy": np.random.get_state(), "python": random.Random(2).getstate(), "scalar": np.float64(0.5)}},
        "ordered": {"a": collections.OrderedDict(b=1, c=[2, 3])},
        "numbers": [1 << 40, -(1 << 70), -0.0, float("inf"), None, True],
        "bytes": b"\x00\xff" * 5,
        "array": bytearray(b"abc"),
        "size": torch.Size([2, 3]),
        "set": {1, 2},
        "text": "größe",
        "empty": [],
    }


def tensors(count=9):
    generator = torch.Generator().manual_seed(1)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64, torch.uint16)
    state = {f"t{i}": torch.randint(0, 2, (i, 3), generator=generator).to(dtypes[i % len(dtypes)]) for i in range(count)}
    state["transposed"] = torch.arange(12.0).view(3, 4).t()
    state["expanded"] = torch.ones(1, 3).expand(4, 3)
    state["slice"] = torch.arange(20.0)[5:9]
    state["scalar"] = torch.tensor(2.5)
    state["nan"] = torch.tensor([float("nan"), float("-inf")])
    return state


def inspect(*arguments, code=0):
    done = subprocess.run([BUILD / "launch" / "megashard", "inspect", *map(str, arguments)], capture_output=True, text=True,
                          timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


def copy_by_us(source, ranks, target):
    program = BUILD / "tests" / "interop" / "dcp_tool"
    done = subprocess.run([program, "copy", str(source), str(ranks), str(target)], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]


def test_many_threads_and_unusual_tensors(tmp_path):
    state = {"model": tensors()}
    writer = dcp.FileSystemWriter(tmp_path / "dcp", thread_count=3, sync_files=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 3
    torch.save(state, tmp_path / "whole.pt")
    inspect("--diff", tmp_path / "dcp", tmp_path / "whole.pt")
    inspect("--verify", tmp_path / "dcp")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_protocols(tmp_path, monkeypatch, protocol):
    def dump(value, file):
        return pickle.dump(value, file, protocol)

    def save(value, file, **_):
        return real_save(value, file, pickle_protocol=protocol)

    real_save = torch.save
    monkeypatch.setattr(filesystem, "pickle", types.SimpleNamespace(**{**vars(pickle), "dump": dump}))
    monkeypatch.setattr(torch, "save", save)
    state = {"model": tensors(4), **unusual_values()}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    monkeypatch.undo()
    torch.save(state, tmp_path / "whole.pt")
    inspect("--filter", "model.*", "--diff", tmp_path / "dcp", tmp_path / "whole.pt")
    # Other classes are kept as they are: PyTorch gets them back from what is written here.
    copy_by_us(tmp_path / "dcp", 1, tmp_path / "copy")
    dcp_to_torch_save(str(tmp_path / "copy" / "iter_0000010"), str(tmp_path / "copy.pt"))
    loaded = torch.load(tmp_path / "copy.pt", weights_only=False)
    expected = unusual_values()
    for name in ("args", "numbers", "bytes", "array", "size", "set", "text", "empty"):
        assert type(loaded[name]) is type(expected[name]) and loaded[name] == expected[name], name
    rng, wanted = loaded["rng_state"]["0"], expected["rng_state"]["0"]
    assert rng["python"] == wanted["python"] and rng["scalar"] == wanted["scalar"]
    assert rng["numpy"][0] == "MT19937" and (rng["numpy"][1] == wanted["numpy"][1]).all() and rng["numpy"][2:] == wanted["numpy"][2:]


def test_what_inspect_shows_and_finds(tmp_path):
    state = {"model": {"a": torch.arange(6.0).view(2, 3)}, "args": argparse.Namespace(hidden_size=8), "iteration": 4,
             "rng": np.arange(3, dtype=np.uint32), "evil": Outer.Plain("\x1b[31m")}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    shown = json.loads(inspect("--json", tmp_path / "dcp"))
    assert shown["format"] == "torch_dcp"
    assert [(each["name"], each["dtype"], each["shape"]) for each in shown["tensors"]] == [("model.a", "float32", [2, 3])]
    values = {each["name"]: each["value"] for each in shown["values"]}
    assert values["iteration"] == 4 and values["args"]["state"] == {"hidden_size": 8}
    text = inspect(tmp_path / "dcp")
    assert "numpy uint32[3]" in text and "hidden_size" in text and "\x1b" not in text
    data = next((tmp_path / "dcp").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[content.index(torch.arange(6.0).numpy().tobytes()) + 2] ^= 1
    data.write_bytes(content)
    assert data.name in inspect("--verify", tmp_path / "dcp", code=1)


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = torch.nn.Linear(width, 10)
        self.down = torch.nn.Linear(10, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def trained(mesh, with_tp):
    """A model with optimizer state on these ranks: 3 and 10 rows over 2 or 4 ranks, so uneven and empty shards."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(3), Block(3))
    if with_tp:
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))
    for step in range(2):
        model(torch.arange(6.0).view(2, 3) + step).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_whole(model, optimizer, path):
    options = StateDictOptions(full_state_dict=True)
    whole = {"model": get_model_state_dict(model, options=options),
             "optimizer": get_optimizer_state_dict(model, optimizer, options=options), "iteration": 10}
    if dist.get_rank() == 0:
        torch.save(whole, path)


def save_strided(folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, optimizer = trained(mesh, with_tp=True)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer), "iteration": 10}
    dcp.save(state, checkpoint_id=str(Path(folder) / "theirs"))
    save_whole(model, optimizer, Path(folder) / "whole.pt")


def load_strictly(folder):
    """Into a model of another layout, whose own training has left other numbers in it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model, optimizer = trained(mesh, with_tp=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model_state, optimizer_state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(Path(folder) / "ours" / "iter_0000010"))
    set_model_state_dict(model, model_state, options=StateDictOptions(strict=True))
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=StateDictOptions(strict=True))
    save_whole(model, optimizer, Path(folder) / "loaded.pt")


def there_and_back(folder):
    """In a process of its own."""
    failure = failure_in_ranks(4, folder, save_strided, folder)
    assert not failure, failure
    copy_by_us(folder / "theirs", 3, folder / "ours")
    failure = failure_in_ranks(2, folder, load_strictly, folder)
    assert not failure, failure


def test_two_dimensional_shards_with_optimizer_state_go_both_ways(tmp_path):
    done = subprocess.run([sys.executable, __file__, tmp_path], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    inspect("--verify", tmp_path / "theirs")
    for name in ("theirs", "ours", "loaded.pt"):
        inspect("--diff", tmp_path / name, tmp_path / "whole.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    there_and_back(Path(sys.argv[1]))
