"""Hugging Face models as torch_dist checkpoints in Megatron's layout: megatron-core's own GPTModel loads them and
computes the same logits as transformers, and what it saves comes back bit by bit."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import (AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM,
                          Qwen3Config, Qwen3ForCausalLM)

from megashard import convert, run
from megatron_gpt import DIVISOR, TOKENS
from values import assert_same, same_bits

SIZES = dict(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, rms_norm_eps=1e-6, max_position_embeddings=64)
MODELS = {"llama": (LlamaForCausalLM, LlamaConfig(**SIZES, head_dim=4, tie_word_embeddings=False)),
          "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, head_dim=4, tie_word_embeddings=True)),
          "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=6, tie_word_embeddings=False))}
LAYOUT = ("--megatron-layout", "--make-vocab-size-divisible-by", DIVISOR)


def weights_in(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """A folder for each family: hf, ours/release, and what megatron_gpt.py makes of it."""
    root = tmp_path_factory.mktemp("megatron")
    for name, (family, config) in MODELS.items():
        torch.manual_seed(7)
        model = family(config)
        for parameter in model.parameters():  # norms and biases too, so that none may be left out
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
        model.save_pretrained(root / name / "hf", max_shard_size="6KB")
        convert("hf_to_torch_dist", "--hf-dir", root / name / "hf", "--save-dir", root / name / "ours", *LAYOUT)
    script = Path(__file__).with_name("megatron_gpt.py")
    run(sys.executable, script, *(root / name for name in MODELS), timeout=300)
    return root


@pytest.mark.parametrize("name", MODELS)
def test_gpt_model_computes_the_same(cases, name):
    model = AutoModelForCausalLM.from_pretrained(cases / name / "hf", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = model(TOKENS).logits
    result = torch.load(cases / name / "logits.pt", weights_only=False)
    # fp32 sums in another order, over rows of at most 24 elements and 2 layers; a wrong head is off by about 1.
    torch.testing.assert_close(result["logits"], expected, rtol=1e-4, atol=1e-4)
    assert result["iteration"] == 0
    args = result["args"]
    assert (args["num_query_groups"], args["kv_channels"], args["padded_vocab_size"]) == (2, MODELS[name][1].head_dim,
                                                                                          64)
    assert args["tensor_model_parallel_size"] == 1 and args["untie_embeddings_and_output_weights"] == (name != "qwen2")


@pytest.mark.parametrize("name", MODELS)
def test_back_to_hugging_face(cases, tmp_path, name):
    expected = weights_in(cases / name / "hf")
    for step in ("ours/release", "theirs/iter_0000005"):
        save = tmp_path / step.split("/")[0]
        convert("torch_dist_to_hf", "--load-dir", cases / name / step, "--save-dir", save, "--model-assets-dir",
                cases / name / "hf", *LAYOUT)
        back = weights_in(save)
        assert back.keys() == expected.keys()
        assert all(same_bits(back[key], tensor) for key, tensor in expected.items()), step


def test_buckets_of_the_optimizer_are_left_out(cases, tmp_path):
    """Buckets are flattened from Megatron's weights in order: in another layout they mean nothing."""
    done = convert("torch_dist_to_dcp", "--load-dir", cases / "llama" / "theirs" / "iter_0000005", "--save-dir",
                   tmp_path, "--model-assets-dir", cases / "llama" / "hf", *LAYOUT)
    assert "the optimizer's state is left out: buckets of Megatron's DistributedOptimizer" in done.stdout
    dcp_to_torch_save(tmp_path / "iter_0000005", tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert state["model"].keys() == weights_in(cases / "llama" / "hf").keys()
    assert not any(key.startswith("optimizer") for key in state)


def test_chunks_are_layers(cases):
    """Weights as megatron-core stores them: stacks of layers in chunks of one, norms under the next linear layer."""
    ours = FileSystemReader(cases / "llama" / "ours" / "release").read_metadata().state_dict_metadata
    theirs = FileSystemReader(cases / "llama" / "theirs" / "iter_0000005").read_metadata().state_dict_metadata
    sizes = (lambda state: {key: tuple(entry.size) for key, entry in state.items()
                            if hasattr(entry, "size") and not key.startswith("optimizer.")})
    assert sizes(ours) == sizes(theirs)
    assert {key for key in theirs if "_extra_state" in key} <= ours.keys()
    qkv = ours["decoder.layers.self_attention.linear_qkv.weight"]
    assert [tuple(chunk.sizes) for chunk in qkv.chunks] == [(1, 32, 16)] * 2


def test_a_training_there_and_back(tmp_path):
    """Weights, optimizer buffers, steps, groups and values of a step, to torch_dist in Megatron's layout and back."""
    family, config = MODELS["qwen3"]
    torch.manual_seed(8)
    model = family(config)
    (tmp_path / "assets").mkdir()
    config.save_pretrained(tmp_path / "assets")
    (tmp_path / "assets" / "config.json").write_text(json.dumps({**config.to_dict(),
                                                                 "architectures": ["Qwen3ForCausalLM"]}))
    names = list(model.state_dict())
    buffers = {name: {"exp_avg": torch.randn_like(tensor), "exp_avg_sq": torch.rand_like(tensor).bfloat16(),
                      "step": torch.tensor(6.0)} for name, tensor in model.state_dict().items()}
    flat = [name for name in names if name.endswith("norm.weight")]
    state = {"model": dict(model.state_dict()), "iteration": 6, "checkpoint_version": 3.0,
             "args": argparse.Namespace(num_layers=2, lr=0.5), "opt_param_scheduler": {"num_steps": 48},
             "optimizer": {"state": buffers, "param_groups": [
                 {"lr": 0.5, "params": [name for name in names if name not in flat]},
                 {"lr": 0.5, "wd_mult": 0.0, "params": flat}]}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp" / "iter_0000006", no_dist=True)
    convert("dcp_to_torch_dist", "--load-dir", tmp_path / "dcp" / "iter_0000006", "--save-dir", tmp_path / "dist",
       "--model-assets-dir", tmp_path / "assets", *LAYOUT)
    assert (tmp_path / "dist" / "latest_checkpointed_iteration.txt").read_text() == "6"
    stored = FileSystemReader(tmp_path / "dist" / "iter_0000006").read_metadata().state_dict_metadata
    assert tuple(stored["optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"].size) == (2, 48, 16)
    convert("torch_dist_to_dcp", "--load-dir", tmp_path / "dist" / "iter_0000006", "--save-dir", tmp_path / "back",
       "--model-assets-dir", tmp_path / "assets", *LAYOUT)
    dcp_to_torch_save(tmp_path / "back" / "iter_0000006", tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=False)
    assert back["model"].keys() == state["model"].keys()
    assert all(same_bits(back["model"][name], state["model"][name]) for name in names)
    for name in names:
        assert back["optimizer"]["state"][name].keys() == buffers[name].keys()
        assert all(same_bits(back["optimizer"]["state"][name][key], tensor)
                   for key, tensor in buffers[name].items()), name
    for ours, theirs in zip(back["optimizer"]["param_groups"], state["optimizer"]["param_groups"], strict=True):
        assert {**ours, "params": sorted(ours["params"])} == {**theirs, "params": sorted(theirs["params"])}
    assert back["args"].lr == 0.5 and back["args"].num_query_groups == 2
    for key in ("iteration", "checkpoint_version", "opt_param_scheduler"):
        assert_same(back[key], state[key])


def test_names_stay_without_the_layout(cases, tmp_path):
    hf = cases / "llama" / "hf"
    convert("hf_to_torch_dist", "--hf-dir", hf, "--save-dir", tmp_path / "dist")
    release = tmp_path / "dist" / "release"
    convert("torch_dist_to_hf", "--load-dir", release, "--save-dir", tmp_path / "hf", "--model-assets-dir", hf)
    convert("torch_dist_to_dcp", "--load-dir", release, "--save-dir", tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp" / "release", tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=False)
    expected = weights_in(hf)
    back = weights_in(tmp_path / "hf")
    assert back.keys() == expected.keys() == state["model"].keys()
    assert all(same_bits(back[key], tensor) and same_bits(state["model"][key], tensor)
               for key, tensor in expected.items())


def test_wrong_use(cases, tmp_path):
    hf, ours = cases / "llama" / "hf", cases / "llama" / "ours" / "release"
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    for words, part in (
            (("torch_dist_to_dcp", "--load-dir", ours, "--save-dir", tmp_path / "x", "--megatron-layout"),
             "needs --model-assets-dir"),
            (("torch_dist_to_hf", "--load-dir", ours, "--save-dir", tmp_path / "x", "--model-assets-dir",
              cases / "qwen3" / "hf", *LAYOUT), "config.json that belongs to it"),
            (("torch_dist_to_hf", "--load-dir", ours, "--save-dir", tmp_path / "x", "--model-assets-dir",
              tmp_path / "gpt2", *LAYOUT),
             "no Megatron layout for architecture gpt2"),
            (("torch_dist_to_hf", "--load-dir", ours, "--save-dir", tmp_path / "x", "--model-assets-dir", tmp_path,
              *LAYOUT),
             "there is no"),
            (("dcp_to_hf", "--load-dir", ours, "--save-dir", tmp_path / "x", "--model-assets-dir", hf),
             "is a torch_dist checkpoint"),
            (("hf_to_torch_dist", "--hf-dir", hf, "--save-dir", tmp_path / "x", "--megatron-layout",
              "--make-vocab-size-divisible-by", "0"), "must be at least 1")):
        done = convert(*words, expect=None)
        assert done.returncode != 0 and part in done.stderr and len(done.stderr.splitlines()) == 1, (words, done.stderr)
    assert not (tmp_path / "x").exists()
