"""Cases of torch.distributed.checkpoint beyond test_dcp.py's: what PyTorch writes is read bit for bit, and what is
written here goes strictly into FSDP2 models and optimizers of another world size.

The comparing is `megashard inspect --diff` with one file of torch.save that holds the whole tensors.
"""

import argparse
import collections
import enum
import json
import pathlib
import pickle
import random
import resource
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

import megashard
from forked_ranks import failure_in_ranks
from megashard import PROGRAM, run
from test_dcp import tool



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
        "rng_state": {"0": {"numpy": np.random.get_state(), "python": random.Random(2).getstate(),
                            "scalar": np.float64(0.5)}},
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
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool,
              torch.complex64, torch.uint16)
    state = {f"t{i}": torch.randint(0, 2, (i, 3), generator=generator).to(dtypes[i % len(dtypes)])
             for i in range(count)}
    state["transposed"] = torch.arange(12.0).view(3, 4).t()
    state["expanded"] = torch.ones(1, 3).expand(4, 3)
    state["slice"] = torch.arange(20.0)[5:9]
    state["scalar"] = torch.tensor(2.5)
    state["nan"] = torch.tensor([float("nan"), float("-inf")])
    return state


def inspect(*arguments, code=0, open_files=None):
    def limit():  # which the program may raise
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    return run(PROGRAM, "inspect", *arguments, expect=code, preexec_fn=limit if open_files else None).stdout


def copy_by_us(source, ranks, target):
    tool("copy", source, ranks, target)


def test_many_threads_and_unusual_tensors(tmp_path):
    state = {"model": tensors(60)}
    writer = dcp.FileSystemWriter(tmp_path / "dcp", thread_count=50, sync_files=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 50
    torch.save(state, tmp_path / "whole.pt")
    inspect("--diff", tmp_path / "dcp", tmp_path / "whole.pt", open_files=40)  # fewer than are needed
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
    assert rng["numpy"][0] == "MT19937" and (rng["numpy"][1] == wanted["numpy"][1]).all() and rng["numpy"][
        2:] == wanted["numpy"][2:]


def test_what_inspect_shows_and_finds(tmp_path):
    state = {"model": {"a": torch.arange(6.0).view(2, 3)}, "args": argparse.Namespace(hidden_size=8), "iteration": 4,
             "rng": np.arange(3, dtype=np.uint32), "evil": Outer.Plain("\x1b[31m")}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    shown = json.loads(inspect("--json", tmp_path / "dcp"))
    assert shown["format"] == "torch_dcp"
    assert [(each["name"], each["dtype"], each["shape"])
            for each in shown["tensors"]] == [("model.a", "float32", [2, 3])]
    values = {each["name"]: each["value"] for each in shown["values"]}
    assert values["iteration"] == 4 and values["args"]["state"] == {"hidden_size": 8}
    text = inspect("--all", tmp_path / "dcp")
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
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer),
             "iteration": 10}
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
    dcp.load({"model": model_state, "optimizer": optimizer_state},
             checkpoint_id=str(Path(folder) / "ours" / "iter_0000010"))
    set_model_state_dict(model, model_state, options=StateDictOptions(strict=True))
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=StateDictOptions(strict=True))
    save_whole(model, optimizer, Path(folder) / "loaded.pt")


def in_python(task, folder):
    """Runs in a separate process."""
    run(sys.executable, __file__, task.__name__, folder, timeout=300)


def there_and_back(folder):
    failure = failure_in_ranks(4, folder, save_strided, folder)
    assert not failure, failure
    copy_by_us(folder / "theirs", 3, folder / "ours")
    failure = failure_in_ranks(2, folder, load_strictly, folder)
    assert not failure, failure


def test_two_dimensional_shards_with_optimizer_state_go_both_ways(tmp_path):
    in_python(there_and_back, tmp_path)
    inspect("--verify", tmp_path / "theirs")
    for name in ("theirs", "ours", "loaded.pt"):
        inspect("--diff", tmp_path / name, tmp_path / "whole.pt")


def load_what_was_trained(folder):
    """Steps of `megashard pretrain` into FSDP2 models and optimizers of the same names."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, kind in OPTIMIZERS.items():
        step = Path(folder) / name / "iter_0000002"
        shapes = {key[6:]: entry.size
                  for key, entry in dcp.FileSystemReader(step).read_metadata().state_dict_metadata.items()
                  if key.startswith("model.")}
        model = torch.nn.Module()
        for path, shape in shapes.items():
            module = model
            *parents, last = path.split(".")
            for parent in parents:
                if not hasattr(module, parent):
                    module.add_module(parent, torch.nn.Module())
                module = getattr(module, parent)
            module.register_parameter(last, torch.nn.Parameter(torch.zeros(shape)))
        assert "lm_head.weight" in shapes  # tied: PyTorch asks for it by both names
        model.lm_head.weight = model.model.embed_tokens.weight
        fully_shard(model, mesh=mesh)
        parameters = dict(model.named_parameters())
        decayed = [parameter for parameter in parameters.values() if parameter.dim() > 1]
        plain = [parameter for parameter in parameters.values() if parameter.dim() <= 1]
        optimizer = kind([{"params": decayed}, {"params": plain}])
        model_state, optimizer_state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(step))
        set_model_state_dict(model, model_state, options=StateDictOptions(strict=True))
        set_optimizer_state_dict(model, optimizer, optimizer_state, options=StateDictOptions(strict=True))
        save_whole(model, optimizer, Path(folder) / f"{name}.pt")


def into_pytorch(folder):
    failure = failure_in_ranks(2, folder, load_what_was_trained, folder)
    assert not failure, failure


OPTIMIZERS = {"adam": torch.optim.AdamW, "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.5)}
TRAINING = megashard.network(length=8) + (
    "--mock-data --micro-batch-size 1 --global-batch-size 6 --train-iters 2 --save-interval 2 "
    "--lr 0.01 --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.95 --sgd-momentum 0.8 " + megashard.RUN)


def test_pytorch_takes_model_and_optimizer_of_a_training(tmp_path):
    """Strictly, tied weights by each of their names, and its optimizer then is as one that PyTorch made with these
    options."""
    for name in OPTIMIZERS:
        megashard.pretrain(tmp_path, "--optimizer", name, "--save", tmp_path / name, ranks=3, defaults=TRAINING,
                           config=None)
    in_python(into_pytorch, tmp_path)
    weights = [torch.nn.Parameter(torch.zeros(1))]
    options = {"adam": torch.optim.AdamW(weights, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
               "sgd": torch.optim.SGD(weights, lr=0.01, momentum=0.8, weight_decay=0.1)}
    for name, theirs in options.items():
        dcp_to_torch_save(str(tmp_path / name / "iter_0000002"), str(tmp_path / "ours.pt"))
        ours = torch.load(tmp_path / "ours.pt", weights_only=False)
        loaded = torch.load(tmp_path / f"{name}.pt", weights_only=False)
        assert loaded["model"].keys() == ours["model"].keys()
        assert all(loaded["model"][key].equal(tensor) for key, tensor in ours["model"].items())
        assert loaded["optimizer"]["state"].keys() == ours["optimizer"]["state"].keys()
        for key, state in ours["optimizer"]["state"].items():
            assert loaded["optimizer"]["state"][key].keys() == state.keys()
            assert all(loaded["optimizer"]["state"][key][buffer].equal(tensor) for buffer, tensor in state.items()), key
        wanted = {key: value for key, value in theirs.param_groups[0].items() if key != "params"}
        groups = loaded["optimizer"]["param_groups"]
        assert [len(group["params"]) for group in groups] == [len(group["params"])
                                                              for group in ours["optimizer"]["param_groups"]]
        for group, decay in zip(groups, (0.1, 0.0), strict=True):
            assert {key: group[key] for key in wanted} == wanted | {"weight_decay": decay}
            assert {key: type(group[key]) for key in wanted} == {key: type(value) for key, value in wanted.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"there_and_back": there_and_back, "into_pytorch": into_pytorch}[sys.argv[1]](Path(sys.argv[2]))
