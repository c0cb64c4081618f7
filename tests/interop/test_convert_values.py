"""megashard convert: what a step holds beside weights stays as it is, in files of torch.save, torch_dcp and
torch_dist."""

import argparse
import collections
import os

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from megashard import convert
from megatron_steps import random_states
from values import SAFETENSORS_DTYPES, assert_same, random_bits


def training_state():
    torch.manual_seed(4)
    base = torch.randn(6, 4)
    dtypes = {str(dtype): random_bits(dtype, 2, 3) for dtype in (*SAFETENSORS_DTYPES, torch.complex128,
                                                                 torch.float8_e8m0fnu)}
    return {"model": collections.OrderedDict(whole=base, tied=base, column=base.t(), part=base[1:5:2, ::3],
                                             scalar=torch.tensor(7), empty=torch.empty(0, 3),
                                             parameter=torch.nn.Parameter(torch.ones(2)), **dtypes),
            "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2)}},
                          "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0]}]},
            "list": [torch.arange(3), base[0]], "deep": {"cuda": [[torch.arange(2)], torch.ones(1)],
                                                         "plain": [[1], "x"]},
            "scheduler": {"milestones": collections.Counter({3: 1, 6: 2}), "none": collections.Counter(),
                          "groups": collections.defaultdict(list, {0: [1], 1: [{"lr": 0.1}]}),
                          "empty": collections.defaultdict(int)},
            "keys": {True: 1, None: 2, 0.5: 3, 1e-7: 4, 1e16: 5, 123456.75: 6, float("inf"): 7, -1: torch.ones(2)},
             "tuple": (torch.ones(2), "x"), "iteration": 12, "none": None, "text": "gr\u00f6\u00dfe"}


def test_torch_file_there_and_back(tmp_path):
    """Results equal those of torch's torch_save_to_dcp and dcp_to_torch_save, views and nested tensors included."""
    torch.save(training_state(), tmp_path / "state.pt")
    torch_save_to_dcp(tmp_path / "state.pt", tmp_path / "theirs")
    convert("torch_to_dcp", "--torch-save-path", tmp_path / "state.pt", "--dcp-checkpoint-dir", tmp_path / "ours")
    assert sorted(os.listdir(tmp_path / "ours")) == [".metadata", "__0_0.distcp"]
    for name in ("theirs", "ours"):
        dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
    expected = torch.load(tmp_path / "theirs.pt", weights_only=False)
    assert_same(torch.load(tmp_path / "ours.pt", weights_only=False), expected)
    ours, theirs = (dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "theirs"))
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    assert ours.planner_data == theirs.planner_data
    targets = {}
    for name in ("theirs", "ours"):
        target = targets[name] = training_state()
        target["model"].update({key: torch.zeros_like(target["model"][key]) for key in ("whole", "column", "part")})
        target["deep"]["cuda"][0][0], target["keys"][-1] = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
        dcp.load(target, checkpoint_id=tmp_path / name)
    assert_same(targets["ours"], targets["theirs"])
    assert_same(targets["ours"]["deep"], training_state()["deep"])

    for name in ("theirs", "ours"):
        convert("dcp_to_torch", "--dcp_checkpoint_dir", tmp_path / name, "--torch_save_path",
                tmp_path / f"{name}_back.pt")
        for weights_only in (False, True):
            assert_same(torch.load(tmp_path / f"{name}_back.pt", weights_only=weights_only), expected)
    mapped = torch.load(tmp_path / "ours_back.pt", mmap=True)
    assert_same(mapped["model"], expected["model"])


def ordered(value):
    """Sorts the keys of all dicts, whose order is that of the files."""
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value)}
    return [ordered(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("form", ["list", "dict"])
def test_values_of_a_step_stay_as_they_are(tmp_path, form):
    """Through a torch file, and through torch_dist: numpy arrays, an args Namespace, random states as Megatron keeps
    them (a list over ranks, whose tensors torch_dcp stores apart) and by rank."""
    states = [random_states(seed) for seed in range(2)]
    model = {"a.weight": torch.randn(4, 3), "b.bias": torch.randn(4)}
    state = {
        "model": model, "iteration": 7, "checkpoint_version": 3.0,
        "rng_state": states if form == "list" else {str(rank): each for rank, each in enumerate(states)},
        "args": argparse.Namespace(params_dtype=torch.bfloat16, data_path=["a", "b"], consumed_train_samples=160,
                                   lr=1e-4, name="gr\u00f6\u00dfe", table=numpy.arange(6.0).reshape(2, 3)),
        "array": numpy.arange(5, dtype=numpy.int16), "number": numpy.float64(0.5), "big": 1 << 70,
        "fortran": numpy.asfortranarray(numpy.arange(6).reshape(2, 3)), "size": torch.Size([2, 3]),
        "optimizer": {"state": {name: {"exp_avg": torch.randn_like(tensor), "step": torch.tensor(7.0)}
                                for name, tensor in model.items()},
                      "param_groups": [{"lr": torch.tensor(0.1), "params": list(model)}]}}
    step = tmp_path / "dcp" / "iter_0000007"
    dcp.save(state, checkpoint_id=step, no_dist=True)
    convert("dcp_to_torch", "--dcp-checkpoint-dir", step, "--torch-save-path", tmp_path / "whole.pt")
    convert("torch_to_dcp", "--torch-save-path", tmp_path / "whole.pt", "--dcp-checkpoint-dir", tmp_path / "from_torch")
    convert("dcp_to_torch_dist", "--load-dir", step, "--save-dir", tmp_path / "dist")
    convert("torch_dist_to_dcp", "--load-dir", tmp_path / "dist" / step.name, "--save-dir", tmp_path / "back")
    kept = {"rng_state/shard_0.0_1.1"} if form == "list" else {"rng_state/shard_0_2", "rng_state/shard_1_2"}
    stored = dcp.FileSystemReader(tmp_path / "dist" / step.name).read_metadata().state_dict_metadata
    assert {key for key in stored if key.startswith("rng_state")} == kept
    for name in ("from_torch", f"back/{step.name}"):
        dcp_to_torch_save(tmp_path / name, tmp_path / "back.pt")
        assert_same(ordered(torch.load(tmp_path / "back.pt", weights_only=False)), ordered(state))


def test_values_of_a_gpu_are_read_without_one(tmp_path, monkeypatch):
    """Megatron keeps random states of CUDA in common.pt, on whatever device they were."""
    dcp.save({"model": {"w": torch.ones(2)}, "iteration": 7}, checkpoint_id=tmp_path / "dcp" / "iter_0000007",
             no_dist=True)
    convert("dcp_to_torch_dist", "--load-dir", tmp_path / "dcp" / "iter_0000007", "--save-dir", tmp_path / "dist")
    step = tmp_path / "dist" / "iter_0000007"
    state = {"iteration": 7, "of_gpu": (torch.arange(3), "x"), "alone": torch.ones(2)}
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    torch.save(state, step / "common.pt")
    monkeypatch.undo()
    (step / "manifest.json").unlink()
    convert("torch_dist_to_dcp", "--load-dir", step, "--save-dir", tmp_path / "back")
    dcp_to_torch_save(tmp_path / "back" / step.name, tmp_path / "whole.pt")
    back = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert_same(back, {key: (state | {"model": {"w": torch.ones(2)}})[key] for key in back})
    assert back.keys() >= state.keys()
