"""megashard convert: Hugging Face models, torch_dcp folders and files of torch.save, into each other."""

import argparse
import collections
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from test_torch_dist import random_states

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("MEGASHARD_BUILD", ROOT / "build"))


def convert(*words):
    done = subprocess.run([BUILD / "launch" / "megashard", "convert", *map(str, words)], capture_output=True, text=True,
                          timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return done


def small_model(folder, **options):
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, **options)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="6KB")
    return model


def test_there_and_back(tmp_path):
    model = small_model(tmp_path / "hf", tie_word_embeddings=False)
    done = convert("hf_to_dcp", "--hf_dir", tmp_path / "hf", "--dcp-dir", tmp_path / "dcp")
    assert done.returncode == 0, done.stderr
    release = tmp_path / "dcp" / "release"
    assert (tmp_path / "dcp" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert len(list(release.glob("*.distcp"))) == len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(release.stat().st_mode) == stat.S_IMODE(release.parent.stat().st_mode) == 0o777 & ~umask
    dcp_to_torch_save(str(release), str(tmp_path / "whole.pt"))
    state = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert state["checkpoint_version"] == 3.0
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in model.state_dict().items())
    for size, files in (("5GB", 1), ("6KB", 2)):
        save = tmp_path / f"back_{size}"
        done = convert("dcp_to_hf", "--load-dir", release, "--save-dir", save, "--model-assets-dir", tmp_path / "hf",
                       "--max-shard-size", size)
        assert done.returncode == 0, done.stderr
        assert len(list(save.glob("*.safetensors"))) >= files
        back = AutoModelForCausalLM.from_pretrained(save, dtype=torch.bfloat16).state_dict()
        assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())


def test_tied_weights(tmp_path):
    model = small_model(tmp_path / "hf", tie_word_embeddings=True)
    done = convert("hf_to_dcp", "--hf-dir", tmp_path / "hf", "--dcp-dir", tmp_path / "dcp")
    assert done.returncode == 0, done.stderr
    done = convert("hf_to_dcp", "--hf-dir", tmp_path / "hf", "--dcp-dir", tmp_path / "untied",
                   "--tie-weight-mapping", "lm_head.weight=model.embed_tokens.weight")
    assert done.returncode == 0, done.stderr
    for name, present in (("dcp", False), ("untied", True)):
        dcp_to_torch_save(str(tmp_path / name / "release"), str(tmp_path / "whole.pt"))
        weights = torch.load(tmp_path / "whole.pt", weights_only=False)["model"]
        assert ("lm_head.weight" in weights) == present
        save = tmp_path / f"back_{name}"
        done = convert("dcp_to_hf", "--load-dir", tmp_path / name / "release", "--save-dir", save,
                       "--model-assets-dir", tmp_path / "hf")
        assert done.returncode == 0, done.stderr
        back = AutoModelForCausalLM.from_pretrained(save, dtype=torch.bfloat16)
        assert json.loads((save / "config.json").read_text())["tie_word_embeddings"]
        assert torch.equal(back.lm_head.weight, model.lm_head.weight)


# Of the largest process below it, in KiB, beginning in a small process of its own (test_start_memory.py).
PEAK = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def convert_peak(*words):
    """Of the converter, in bytes."""
    done = subprocess.run([sys.executable, "-S", "-c", PEAK, BUILD / "launch" / "megashard", "convert", *map(str, words)],
                          capture_output=True, text=True, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return int(done.stdout) * 1024


def ok(*words):
    done = convert(*words)
    assert done.returncode == 0, done.stderr


SAFETENSORS_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
                      torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
                      torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.uint16, torch.uint32, torch.uint64,
                      torch.complex64)


def random_bits(dtype, *sizes):
    """Every bit pattern may occur, NaNs included; of bool only 0 and 1."""
    numel = torch.Size(sizes).numel()
    if dtype == torch.bool:
        return (torch.randint(0, 2, (numel,)) == 1).view(sizes)
    return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(sizes)


def same_bits(a, b):
    bits = (lambda t: t.contiguous().view(-1).view(torch.uint8))
    return a.dtype == b.dtype and a.shape == b.shape and (a.numel() == 0 or torch.equal(bits(a), bits(b)))


def assert_same(a, b):
    """Nested dicts, lists, tuples and Namespaces; tensors bit by bit, numpy's arrays with their layout."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor) and same_bits(a.detach(), b.detach())
    elif isinstance(a, numpy.ndarray):
        assert a.dtype == b.dtype and a.strides == b.strides and numpy.array_equal(a, b)
    elif isinstance(a, argparse.Namespace):
        assert type(b) is argparse.Namespace
        assert_same(vars(a), vars(b))
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b) and len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    else:
        assert type(a) is type(b) and a == b


def test_every_dtype_of_safetensors_there_and_back(tmp_path):
    torch.manual_seed(3)
    weights = {f"w.{dtype}": random_bits(dtype, 3, 5) for dtype in SAFETENSORS_DTYPES}
    weights |= {f"scalar.{dtype}": random_bits(dtype) for dtype in SAFETENSORS_DTYPES}
    weights |= {f"empty.{dtype}": random_bits(dtype, 0, 4) for dtype in SAFETENSORS_DTYPES}
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    ok("hf_to_dcp", "--hf-dir", tmp_path / "hf", "--dcp-dir", tmp_path / "dcp")
    dcp_to_torch_save(str(tmp_path / "dcp" / "release"), str(tmp_path / "whole.pt"))
    stored = torch.load(tmp_path / "whole.pt", weights_only=False)["model"]
    assert all(same_bits(stored[name], weight) for name, weight in weights.items())
    for size in ("5GB", "200B"):
        save = tmp_path / f"back_{size}"
        ok("dcp_to_hf", "--load-dir", tmp_path / "dcp" / "release", "--save-dir", save, "--model-assets-dir", tmp_path / "hf",
           "--max-shard-size", size)
        files = sorted(save.glob("*.safetensors"))
        assert (len(files) == 1) == (size == "5GB")
        back = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert back.keys() == weights.keys()
        assert all(same_bits(back[name], weight) for name, weight in weights.items())

    # and by way of torch_dist, straight and through torch_dcp
    ok("hf_to_torch_dist", "--hf-dir", tmp_path / "hf", "--save-dir", tmp_path / "dist")
    ok("torch_dist_to_dcp", "--load-dir", tmp_path / "dist" / "release", "--save-dir", tmp_path / "dcp_of_dist")
    ok("dcp_to_torch_dist", "--load-dir", tmp_path / "dcp_of_dist" / "release", "--save-dir", tmp_path / "dist_of_dcp")
    for name in ("dist", "dist_of_dcp"):
        save = tmp_path / f"back_of_{name}"
        ok("torch_dist_to_hf", "--load-dir", tmp_path / name / "release", "--save-dir", save, "--model-assets-dir",
           tmp_path / "hf")
        back = load_file(save / "model.safetensors")
        assert back.keys() == weights.keys()
        assert all(same_bits(back[name], weight) for name, weight in weights.items())


def test_prefixes_and_stacked_experts(tmp_path):
    """What MindSpeed-MM's GenericDCPConverter makes of the names and sizes, under its own arguments."""
    weights = {"thinker.model.layers.0.mlp.experts.gate_up_proj": torch.randn(4, 6, 5),
               "thinker.model.layers.0.mlp.down_proj.weight": torch.randn(8, 5), "talker.w": torch.randn(3)}
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "hf" / "config.json").write_text('{"thinker_config": {"text_config": {"num_experts": 4}}}')
    names = ("--dcp_prefix", "inner.", "--hf_prefix", "thinker.", "--fused_linear_names", '["gate_up_proj", "down_proj"]')
    ok("GenericDCPConverter", "hf_to_dcp", "--hf_dir", tmp_path / "hf", "--dcp_dir", tmp_path / "dcp", *names,
       "--tie_weight_mapping", '{"thinker.head": "talker.w"}', "--to_bf16", "false")
    dcp_to_torch_save(str(tmp_path / "dcp" / "release"), str(tmp_path / "whole.pt"))
    stored = torch.load(tmp_path / "whole.pt", weights_only=False)["model"]
    expected = {"inner.model.layers.0.mlp.experts.gate_up_proj": torch.Size((24, 5)), "talker.w": torch.Size((3,)),
                "inner.model.layers.0.mlp.down_proj.weight": torch.Size((8, 5)), "inner.head": torch.Size((3,))}
    assert {name: tensor.shape for name, tensor in stored.items()} == expected
    ok("dcp_to_hf", "--load_dir", tmp_path / "dcp" / "release", "--save_dir", tmp_path / "back", "--model_assets_dir",
       tmp_path / "hf", *names, "--trust_remote_code", "True")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(back.pop("thinker.head"), weights["talker.w"])
    assert back.keys() == weights.keys() and all(torch.equal(back[name], weight) for name, weight in weights.items())


def training_state():
    torch.manual_seed(4)
    base = torch.randn(6, 4)
    dtypes = {str(dtype): random_bits(dtype, 2, 3) for dtype in (*SAFETENSORS_DTYPES, torch.complex128, torch.float8_e8m0fnu)}
    return {"model": collections.OrderedDict(whole=base, tied=base, column=base.t(), part=base[1:5:2, ::3], scalar=torch.tensor(7),
                                             empty=torch.empty(0, 3), parameter=torch.nn.Parameter(torch.ones(2)), **dtypes),
            "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2)}},
                          "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0]}]},
            "list": [torch.arange(3), base[0]], "deep": {"cuda": [[torch.arange(2)], torch.ones(1)], "plain": [[1], "x"]},
            "scheduler": {"milestones": collections.Counter({3: 1, 6: 2}), "none": collections.Counter(),
                          "groups": collections.defaultdict(list, {0: [1], 1: [{"lr": 0.1}]}), "empty": collections.defaultdict(int)},
            "keys": {True: 1, None: 2, 0.5: 3, 1e-7: 4, 1e16: 5, 123456.75: 6, float("inf"): 7, -1: torch.ones(2)},
             "tuple": (torch.ones(2), "x"), "iteration": 12, "none": None, "text": "gr\u00f6\u00dfe"}


def test_torch_file_there_and_back(tmp_path):
    """As torch's own torch_save_to_dcp and dcp_to_torch_save, tensors inside values and views included."""
    torch.save(training_state(), tmp_path / "state.pt")
    torch_save_to_dcp(tmp_path / "state.pt", tmp_path / "theirs")
    ok("torch_to_dcp", "--torch-save-path", tmp_path / "state.pt", "--dcp-checkpoint-dir", tmp_path / "ours")
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
        ok("dcp_to_torch", "--dcp_checkpoint_dir", tmp_path / name, "--torch_save_path", tmp_path / f"{name}_back.pt")
        for weights_only in (False, True):
            assert_same(torch.load(tmp_path / f"{name}_back.pt", weights_only=weights_only), expected)
    mapped = torch.load(tmp_path / "ours_back.pt", mmap=True)
    assert_same(mapped["model"], expected["model"])


def ordered(value):
    """With the keys of all dicts sorted: they come in the order of the files."""
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value)}
    return [ordered(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("form", ["list", "dict"])
def test_values_of_a_step_stay_as_they_are(tmp_path, form):
    """Through a torch file, and through torch_dist: numpy arrays, an args Namespace, random states as Megatron keeps them (a
    list over ranks, whose tensors torch_dcp stores apart) and by rank."""
    states = [random_states(seed) for seed in range(2)]
    model = {"a.weight": torch.randn(4, 3), "b.bias": torch.randn(4)}
    state = {
        "model": model, "iteration": 7, "checkpoint_version": 3.0,
        "rng_state": states if form == "list" else {str(rank): each for rank, each in enumerate(states)},
        "args": argparse.Namespace(params_dtype=torch.bfloat16, data_path=["a", "b"], consumed_train_samples=160, lr=1e-4,
                                   name="gr\u00f6\u00dfe", table=numpy.arange(6.0).reshape(2, 3)),
        "array": numpy.arange(5, dtype=numpy.int16), "number": numpy.float64(0.5), "big": 1 << 70,
        "fortran": numpy.asfortranarray(numpy.arange(6).reshape(2, 3)), "size": torch.Size([2, 3]),
        "optimizer": {"state": {name: {"exp_avg": torch.randn_like(tensor), "step": torch.tensor(7.0)} for name, tensor in model.items()},
                      "param_groups": [{"lr": torch.tensor(0.1), "params": list(model)}]}}
    step = tmp_path / "dcp" / "iter_0000007"
    dcp.save(state, checkpoint_id=step, no_dist=True)
    ok("dcp_to_torch", "--dcp-checkpoint-dir", step, "--torch-save-path", tmp_path / "whole.pt")
    ok("torch_to_dcp", "--torch-save-path", tmp_path / "whole.pt", "--dcp-checkpoint-dir", tmp_path / "from_torch")
    ok("dcp_to_torch_dist", "--load-dir", step, "--save-dir", tmp_path / "dist")
    ok("torch_dist_to_dcp", "--load-dir", tmp_path / "dist" / step.name, "--save-dir", tmp_path / "back")
    kept = {"rng_state/shard_0.0_1.1"} if form == "list" else {"rng_state/shard_0_2", "rng_state/shard_1_2"}
    stored = dcp.FileSystemReader(tmp_path / "dist" / step.name).read_metadata().state_dict_metadata
    assert {key for key in stored if key.startswith("rng_state")} == kept
    for name in ("from_torch", f"back/{step.name}"):
        dcp_to_torch_save(tmp_path / name, tmp_path / "back.pt")
        assert_same(ordered(torch.load(tmp_path / "back.pt", weights_only=False)), ordered(state))


def test_values_of_a_gpu_are_read_without_one(tmp_path, monkeypatch):
    """Megatron keeps random states of CUDA in common.pt, on whatever device they were."""
    dcp.save({"model": {"w": torch.ones(2)}, "iteration": 7}, checkpoint_id=tmp_path / "dcp" / "iter_0000007", no_dist=True)
    ok("dcp_to_torch_dist", "--load-dir", tmp_path / "dcp" / "iter_0000007", "--save-dir", tmp_path / "dist")
    step = tmp_path / "dist" / "iter_0000007"
    state = {"iteration": 7, "of_gpu": (torch.arange(3), "x"), "alone": torch.ones(2)}
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    torch.save(state, step / "common.pt")
    monkeypatch.undo()
    (step / "manifest.json").unlink()
    ok("torch_dist_to_dcp", "--load-dir", step, "--save-dir", tmp_path / "back")
    dcp_to_torch_save(tmp_path / "back" / step.name, tmp_path / "whole.pt")
    back = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert_same(back, {key: (state | {"model": {"w": torch.ones(2)}})[key] for key in back})
    assert back.keys() >= state.keys()


MIB = 1 << 20
BUFFERS = 4 * 8 * MIB  # of a file being written: blocks under way and the one that is filled (kMostBlocks of block_writer.cpp)


def llama_of(folder, layers, hidden):
    """Weights by hand, the largest of them [2 hidden, hidden], with a config.json; the bytes of that one."""
    sizes = {"embed_tokens": (2 * hidden, hidden), "norm": (hidden,)}
    for i in range(layers):
        sizes |= {f"layers.{i}.self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        sizes |= {f"layers.{i}.mlp.{name}_proj": (2 * hidden, hidden) for name in ("gate", "up")}
        sizes |= {f"layers.{i}.mlp.down_proj": (hidden, 2 * hidden)}
        sizes |= {f"layers.{i}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    folder.mkdir()
    save_file({f"model.{name}.weight": torch.full(size, 1.0) for name, size in sizes.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    LlamaConfig(vocab_size=2 * hidden, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
                num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True,
                architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return 2 * hidden * hidden * 4


def test_memory_is_that_of_one_tensor(tmp_path):
    """Of 128 MiB in weights of 8 MiB at most, each converter holds, beyond one of nothing and the buffers of a file, a
    weight as it is read, a weight as it is written, and one more; in Megatron's layout a written weight is two read ones."""
    llama_of(tmp_path / "small", 1, 8)
    weight = llama_of(tmp_path / "hf", 3, 1024)
    nothing = convert_peak("hf_to_dcp", "--hf-dir", tmp_path / "small", "--dcp-dir", tmp_path / "small_dcp")
    peaks = {}

    def run(name, *words, kind=""):
        peaks[name + kind] = convert_peak(name, *words) - nothing

    hf, dcp, file = tmp_path / "hf", tmp_path / "dcp" / "release", tmp_path / "whole.pt"
    assets = ("--model-assets-dir", hf)
    run("hf_to_dcp", "--hf-dir", hf, "--dcp-dir", dcp.parent)
    run("dcp_to_hf", "--load-dir", dcp, "--save-dir", tmp_path / "back", *assets)
    run("dcp_to_torch", "--dcp-dir", dcp, "--torch-save-path", file)
    run("torch_to_dcp", "--torch-save-path", file, "--dcp-dir", tmp_path / "again")
    for kind, layout in (("", ()), (", layout", ("--megatron-layout",))):
        dist, of_dcp = tmp_path / f"dist{kind}" / "release", tmp_path / f"of_dcp{kind}"
        run("hf_to_torch_dist", "--hf-dir", hf, "--save-dir", dist.parent, *layout, kind=kind)
        run("torch_dist_to_hf", "--load-dir", dist, "--save-dir", tmp_path / f"back{kind} of dist", *assets, *layout, kind=kind)
        run("torch_dist_to_dcp", "--load-dir", dist, "--save-dir", tmp_path / f"dcp{kind} again", *assets, *layout, kind=kind)
        run("dcp_to_torch_dist", "--load-dir", dcp, "--save-dir", of_dcp, *assets, *layout, kind=kind)
    most = {name: BUFFERS + weight * (5 if "layout" in name else 3) for name in peaks}
    assert all(peak < most[name] for name, peak in peaks.items()), {name: peak // MIB for name, peak in peaks.items()}


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def test_a_flipped_bit_is_not_converted(tmp_path):
    """By any converter that reads a step: the sentence names the file, and nothing is written."""
    small_model(tmp_path / "hf", tie_word_embeddings=False)
    ok("hf_to_dcp", "--hf-dir", tmp_path / "hf", "--dcp-dir", tmp_path / "dcp")
    ok("hf_to_torch_dist", "--hf-dir", tmp_path / "hf", "--save-dir", tmp_path / "dist")
    assets = ("--model-assets-dir", tmp_path / "hf")
    for kind, words in (("dcp", ("dcp_to_hf", "--save-dir", tmp_path / "x", *assets, "--load-dir")),
                        ("dcp", ("dcp_to_torch", "--torch-save-path", tmp_path / "x", "--dcp-checkpoint-dir")),
                        ("dcp", ("dcp_to_torch_dist", "--save-dir", tmp_path / "x", "--load-dir")),
                        ("dist", ("torch_dist_to_hf", "--save-dir", tmp_path / "x", *assets, "--load-dir")),
                        ("dist", ("torch_dist_to_dcp", "--save-dir", tmp_path / "x", "--load-dir"))):
        release = tmp_path / kind / "release"
        damaged = sorted(release.glob("*.distcp"))[-1]
        flip_a_bit(damaged)
        done = convert(*words, release)
        flip_a_bit(damaged)
        assert done.returncode != 0 and len(done.stderr.splitlines()) == 1, (words, done.stderr)
        assert f"{damaged} has the checksum" in done.stderr and "convert another step" in done.stderr
        assert not (tmp_path / "x").exists(), words


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_step_is_replaced_and_no_tracker_set_back(tmp_path):
    steps, tracker = tmp_path / "steps", tmp_path / "dist" / "latest_checkpointed_iteration.txt"
    for iteration in (7, 20):
        dcp.save({"model": {"w": torch.full((3,), float(iteration))}, "iteration": iteration}, no_dist=True,
                 checkpoint_id=steps / f"iter_{iteration:07d}")
    before = contents(steps)
    done = convert("dcp_to_torch_dist", "--load-dir", steps / "iter_0000007", "--save-dir", steps)
    assert done.returncode != 0 and "would replace the step" in done.stderr and len(done.stderr.splitlines()) == 1
    assert contents(steps) == before
    ok("dcp_to_torch_dist", "--load-dir", steps / "iter_0000020", "--save-dir", tmp_path / "dist")
    older = ("dcp_to_torch_dist", "--load-dir", steps / "iter_0000007", "--save-dir", tmp_path / "dist")
    done = convert(*older)
    assert done.returncode != 0 and "holds a run's steps (iter_0000020)" in done.stderr
    done = convert(*older, "--overwrite")
    assert done.returncode == 0 and f"iter_0000020 is newer and stays the step that a run loads; write 7 into {tracker}" in done.stdout
    assert tracker.read_text() == "20"
    small_model(tmp_path / "hf", tie_word_embeddings=False)
    to_release = ("hf_to_torch_dist", "--hf-dir", tmp_path / "hf", "--save-dir", tmp_path / "dist")
    done = convert(*to_release, "--overwrite")
    assert done.returncode == 0 and "write release into" in done.stdout and tracker.read_text() == "20"
    done = convert(*to_release)
    assert done.returncode != 0 and "holds a run's steps" in done.stderr
    assert sorted(os.listdir(tmp_path / "dist")) == ["iter_0000007", "iter_0000020", tracker.name, "release"]


def test_bf16_and_progress(tmp_path):
    """Floating weights become bfloat16, the others stay; the lines count the tensors and their bytes."""
    weights = {f"w{i}": torch.randn(3) for i in range(1001)} | {"ids": torch.arange(4)}
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    expected = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    back = ("dcp_to_hf", "--save-dir", tmp_path / "back", "--overwrite", "--model-assets-dir", tmp_path / "hf", "--load-dir")
    unknown = f"the weights are not compared with config.json: there is none in {tmp_path / 'hf'}"
    for name, flag in (("half", "true"), ("whole", "false")):
        done = convert("hf_to_dcp", "--hf_dir", tmp_path / "hf", "--dcp_dir", tmp_path / name, "--to_bf16", flag)
        assert done.returncode == 0, done.stderr
        release = tmp_path / name / "release"
        assert done.stdout.splitlines() == [unknown, "1000 of 1002 tensors, 0.00 GiB", "1002 of 1002 tensors, 0.00 GiB", f"written: {release}"]
        done = convert(*back, release, *(("--to_bf16", "true") if name == "whole" else ()))
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [unknown, f"checking the bytes of {release}", "1000 of 1002 tensors, 0.00 GiB",
                                            "1002 of 1002 tensors, 0.00 GiB", f"written: {tmp_path / 'back'}"]
        written = load_file(tmp_path / "back" / "model.safetensors")
        assert written.keys() == expected.keys() and all(same_bits(written[key], tensor) for key, tensor in expected.items())


def test_wrong_use_is_one_sentence(tmp_path):
    small_model(tmp_path / "hf", tie_word_embeddings=False)
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"w": torch.ones(2).to_sparse()}, tmp_path / "sparse.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "good.pt")
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "iter_0000007").mkdir()
    (tmp_path / "steps" / "latest_checkpointed_iteration.txt").write_text("7")
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "iter_0000100.bak", no_dist=True)
    for words, part in (
            (("dcp_to_torch_dist", "--load-dir", tmp_path / "iter_0000100.bak", "--save-dir", tmp_path / "x"), "is no step by its name"),
            (("torch_to_dcp", "--torch-save-path", tmp_path / "none.pt", "--dcp-dir", tmp_path / "x"), "cannot read"),
            (("torch_to_dcp", "--torch-save-path", tmp_path / "module.pt", "--dcp-dir", tmp_path / "x"), "not a state dict"),
            (("torch_to_dcp", "--torch-save-path", tmp_path / "old.pt", "--dcp-dir", tmp_path / "x"), "written anew by torch.save"),
            (("torch_to_dcp", "--torch-save-path", tmp_path / "sparse.pt", "--dcp-dir", tmp_path / "x"), "make it dense"),
            (("torch_to_dcp", "--torch-save-path", tmp_path / "good.pt", "--dcp-dir", tmp_path / "hf"), "holds weights"),
            (("dcp_to_torch", "--dcp-dir", tmp_path / "steps", "--torch-save-path", tmp_path / "y.pt"), "iter_0000007, the latest"),
            (("dcp_to_torch", "--dcp-dir", tmp_path / "none", "--torch-save-path", tmp_path / "y.pt"), "there is no directory"),
            (("dcp_to_torch", "--dcp-dir", tmp_path / "steps", "--torch-save-path", tmp_path / "good.pt"), "exists already"),
            (("hf_to_dcp", "--hf-dir", tmp_path / "hf", "--dcp-dir", tmp_path / "x", "--tie-weight-mapping", "a=b"), "has no weight b"),
            (("hf_to_dcp",), "--hf-dir is required"),
            (("hf_to_dcp", "--hf-dir", tmp_path, "--dcp-dir", tmp_path / "x"), "neither model.safetensors nor"),
            (("hf_to_dcp", "--hf-dir", tmp_path / "hf", "--dcp-dir", tmp_path / "x", "--hf-prefix", "zz"), "begins with --hf-prefix"),
            (("hf_to_dcp", "--hf-dir", tmp_path / "hf", "--dcp-dir", tmp_path / "x", "--tie-weight-mapping", "a"), "target=source"),
            (("dcp_to_hf", "--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "y", "--model-assets-dir", tmp_path / "hf"), "holds Hugging Face weights"),
            (("hf_to_dpc",), "convert")):
        done = convert(*words)
        assert done.returncode != 0 and part in done.stderr and len(done.stderr.splitlines()) == 1, (words, done.stderr)
    left = [name for name in ("x", "y.pt", "y.pt.tmp", ".x.tmp") if (tmp_path / name).exists()]
    assert not left, left
