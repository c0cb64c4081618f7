"""torch_dist checkpoints: megatron-core reads ours and we read megatron-core's (megatron_steps.py), at 1 to 4 ranks
each."""

import json
import sys
import uuid

import numpy
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import megatron_steps
from megashard import USAGE, convert, run
from megatron_steps import (LAYERS, WORLDS, as_torch_keeps_them, is_stack, our_common, random_states, their_common,
                            weights)
from test_dcp import STEP, same, tool
from test_resume import DIST, numbers, pretrain


def train(folder):
    """Four steps with dropout: losses and norms, and the state after the second step with Megatron's random states."""
    straight, _ = pretrain(folder, "--train-iters", 4, "--save", folder / "trained", "--save-interval", 2)
    (folder / "straight.json").write_text(json.dumps(numbers(straight)))
    dcp_to_torch_save(folder / "trained" / "iter_0000002", folder / "whole.pt")
    state = torch.load(folder / "whole.pt", weights_only=False)
    state["rng_state"] = [as_torch_keeps_them(state["rng_state"]["0"])]
    state["args"].attention_backend = uuid.SafeUUID.unknown
    torch.save(state, folder / "trained.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch_dist")
    for world in WORLDS:
        tool("save_dist", folder / f"ours_{world}", world, 1)
    train(folder)
    run(sys.executable, megatron_steps.__file__, folder, timeout=300)
    return folder


@pytest.fixture(scope="module")
def answers(folder):
    return json.loads((folder / "answers.json").read_text())


@pytest.mark.parametrize("loaded", WORLDS)
@pytest.mark.parametrize("saved", WORLDS)
def test_megatron_loads_ours(answers, saved, loaded):
    assert answers.get(f"load_{saved}_{loaded}") is None


def by_layer():
    """The weights by torch_dcp's keys."""
    tensors = {}
    for key, whole in weights().items():
        for layer in range(LAYERS) if is_stack(key) else [None]:
            name, tensor = key, whole
            if layer is not None:
                name, tensor = key.replace("layers.", f"layers.{layer}."), whole[layer]
            if name.startswith("optimizer.state."):
                buffer, name = name[len("optimizer.state."):].split(".", 1)
                tensors[f"optimizer.state.{name}.{buffer}"] = tensor
                tensors[f"optimizer.state.{name}.step"] = torch.tensor(7.0)
            else:
                tensors[f"model.{name}"] = tensor
    return tensors


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("saved", ["ours", "theirs"])
@pytest.mark.parametrize("world", WORLDS)
def test_we_load(folder, answers, saved, world, ranks):
    assert answers.get(f"save_{world}") is None
    out = folder / f"out_{saved}_{world}_{ranks}"
    out.mkdir()
    tool("load", folder / f"ours_{world}" / STEP if saved == "ours" else folder / f"theirs_{world}", ranks, out)
    shards = [safetensors.torch.load_file(out / f"rank{rank}.safetensors") for rank in range(ranks)]
    expected = by_layer()
    assert shards[0].keys() == expected.keys()
    for key, tensor in expected.items():
        parts = [shard[key] for shard in shards]
        whole = torch.cat([part.view(torch.uint8) for part in parts]).view(tensor.dtype) if tensor.dim() else parts[0]
        assert same(whole, tensor), key
    values = torch.load(out / "values.pt", weights_only=False)
    if saved == "ours":
        generators = {str(rank): {"torch": b"\x00\x80\xff" + str(rank).encode()} for rank in range(world)}
        wanted = {**our_common(), "rng_state": generators}
        wanted["optimizer"] = {"param_groups": [{"lr": 0.001, "betas": (0.9, 0.95), "params": ["a.weight", "b.bias"]}]}
        del wanted["param_group_names"]
        assert same(values, wanted)
        return
    states = values.pop("rng_state")
    assert values.pop("decoder.layers.mlp._extra_state/shard_0_1") is None
    wanted = {**their_common(), "optimizer": {"param_groups": [{"lr": 0.001, "betas": (0.9, 0.95)}]},
              "content_metadata": {"singleton_local_shards": False}}
    assert same(values, wanted)
    for rank in range(2):
        expected_state, state = random_states(rank), states[rank]
        for mine, theirs in zip(expected_state.pop("np_rng_state"), state.pop("np_rng_state"), strict=True):
            assert numpy.array_equal(mine, theirs) and type(mine) is type(theirs)
        assert same(state, expected_state), rank


def test_metadata_of_0_15(folder, answers):
    assert answers.get("as_of_0_15") is None
    out = folder / "out_0_15"
    out.mkdir()
    tool("load", folder / "ours_0_15", 1, out)
    loaded = safetensors.torch.load_file(out / "rank0.safetensors")
    assert loaded.keys() == by_layer().keys()
    assert all(same(loaded[key].view(tensor.dtype), tensor) for key, tensor in by_layer().items())


@pytest.mark.parametrize("kind", ["plain", "chained"])
def test_a_training_goes_on_from_megatrons_step(folder, answers, kind):
    """Bit for bit: weights, optimizer, schedule, samples and dropout, its args with an enum and numpy's random state
    beside."""
    assert answers.get(f"save_{kind}") is None
    resumed, out = pretrain(folder, "--train-iters", 4, "--load", folder / kind, *DIST)
    assert json.loads(json.dumps(numbers(resumed))) == json.loads((folder / "straight.json").read_text())[2:]
    assert "dropout goes on" not in out


def test_state_of_distributed_optimizer(folder, answers, tmp_path):
    """Buckets are not weights: they are recognised, omitted from a model, and kept by a copy."""
    assert answers.get("save_buckets") is None
    load = ("--train-iters", 4, "--load", folder / "buckets", *DIST)
    _, out = pretrain(folder, *load, expect=USAGE)
    assert "keeps the optimizer in buckets of Megatron's DistributedOptimizer" in out and "--no-load-optim" in out
    fresh, _ = pretrain(folder, *load, "--no-load-optim")
    plain, _ = pretrain(folder, "--train-iters", 4, "--load", folder / "plain", "--no-load-optim", *DIST)
    assert numbers(fresh) == numbers(plain)
    pretrain(folder, "--train-iters", 1, "--load", folder / "buckets", "--finetune", *DIST)

    step = folder / "buckets" / "iter_0000002"
    (tmp_path / "assets").mkdir()
    convert("torch_dist_to_hf", "--load-dir", step, "--save-dir", tmp_path / "hf", "--model-assets-dir",
            tmp_path / "assets")
    model = torch.load(folder / "trained.pt", weights_only=False)["model"]
    assert safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors").keys() == model.keys()
    convert("torch_dist_to_dcp", "--load-dir", step, "--save-dir", tmp_path / "dcp")
    convert("dcp_to_torch_dist", "--load-dir", tmp_path / "dcp" / step.name, "--save-dir", tmp_path / "dist")
    kept, back = (dcp.FileSystemReader(path).read_metadata().state_dict_metadata
                  for path in (step, tmp_path / "dist" / step.name))
    buckets = {key for key in kept if "gbuf_idx_0" in key}
    assert len(buckets) == 6 and buckets <= back.keys()
