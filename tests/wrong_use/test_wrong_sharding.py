"""FSDP2 files that are wrong, contradict themselves, or have keys without effect."""
import pytest

from megashard import USAGE
from wrong_use import ALL_TRAINING, FROM_MODEL, LOOP, MOCK, PRETRAIN, RATE, only_line, run

TRAIN = [*PRETRAIN, *RATE, *MOCK]
LAYERS = "recompute_modules:\n  - model.layers.{*}\n"
# by name: the file, a part of the one message
REFUSED = {
    "a dtype that is none": ("param_dtype: bfloat",
                             'f.yaml:1: param_dtype takes one of fp16, bf16, fp32, fp64, got "bfloat"'),
    "a dtype of whole numbers": ("reduce_dtype: int32",
                                 'reduce_dtype takes one of fp16, bf16, fp32, fp64, got "int32"'),
    "a dtype that is a list": ("param_dtype: [bf16]", "param_dtype takes one of fp16, bf16, fp32, fp64, got a list"),
    "gradients of whole numbers": ("grad_dtype: int8", "grad_dtype takes one of fp16, bf16, fp32, fp64"),
    "buffers of whole numbers": ("buffer_dtype: int8", "buffer_dtype takes one of fp16, bf16, fp32, fp64"),
    "a placement in a word": ("shard_placement: last", 'takes "auto", or dimensions by patterns of modules as in'),
    "a placement of what is not there": ("shard_placement:\n  layers.{*}: 1",
                                         'needs a list of modules, but the model has no submodule "layers"'),
    "a third way with unused parameters": ("unused_parameters: skip", "takes one of zero_fill, error, got"),
    "a scale of fp8 that is none": ("fp8_all_gather: blockwise",
                                       "takes one of false, true, amax, power_of_two, rowwise, got"),
    "no reduction in flight": ("reduce_scatter_max_input_buffers: 0", "takes a whole number of at least 1"),
    "buffers of a memory that is none": ("communication_memory: shared", "takes one of registered, symmetric, got"),
    "outputs in a dtype of their own": (
        "output_dtype: bf16", "makes model.layers.0 return bf16, but model.norm behind it computes in fp32; set "
        "param_dtype: bf16"),
    "outputs of more bits than what follows": (
        "param_dtype: bf16\noutput_dtype: fp32",
        "model.norm behind it computes in bf16; wrap that too (sub_modules_to_wrap)"),
    "outputs of another kind of 16 bits": ("param_dtype: bf16\noutput_dtype: fp16", "makes model.layers.0 return fp16"),
    "no ranks to shard over": ("sharding_size: 0", 'sharding_size takes "auto", a number of ranks, or null, got "0"'),
    "ranks below zero": ("sharding_size: -2", 'got "-2"'),
    "ranks in a word": ("sharding_size: all", 'got "all"'),
    "half a rank": ("sharding_size: 0.5", 'got "0.5"'),
    "more ranks than there are": ("sharding_size: 4", "World size 1 must be divisible by sharding_size 4"),
    "resharding to no rank": ("reshard_after_forward: 0",
                              "reshard_after_forward takes true, false or a number of ranks"),
    "resharding to more than share": ("reshard_after_forward: 4",
                                      "reshard_after_forward: 4 in the FSDP2 file does not divide the 1 ranks"),
    "a switch that is no switch": ("offload_to_cpu: maybe", 'offload_to_cpu takes true or false, got "maybe"'),
    "a prefetch below zero": ("num_to_forward_prefetch: -1",
                              "num_to_forward_prefetch takes a whole number of at least 0"),
    "a prefetch in a word": ("num_to_backward_prefetch: all",
                             'num_to_backward_prefetch takes a whole number of at least 0, got "all"'),
    "one pattern where a list belongs": ("sub_modules_to_wrap: model.layers.{*}",
                                         "takes a list of module paths, one a line"),
    "patterns without quotes in a line": ("sub_modules_to_wrap: [model.layers.{*}]",
                                          'need quotes, as in ["model.layers.{*}"]'),
    "braces that do not match": ('sub_modules_to_wrap: ["model.layers.{0"]', "has braces that do not match"),
    "indices of what is not there": ('sub_modules_to_wrap: ["layers.{*}"]',
                                     'needs a list of modules, but the model has no submodule "layers"'),
    "operators kept without recompute": ('recompute_save_ops: ["aten::mm"]',
                                         "recompute_save_ops in the FSDP2 file needs recompute_modules"),
    "operators kept by reentrant recompute": (
        LAYERS + 'use_reentrant: true\nrecompute_save_ops: ["aten::mm"]',
        "recompute_save_ops needs use_reentrant: false"),
    "a key twice": ("sharding_size: 1\nsharding_size: 1", "f.yaml:2: sharding_size is given twice; keep one"),
    "a list of keys": ("- sharding_size: 1", "the file must hold `key: value` lines"),
    "a replication that is no switch": ("ignored_modules_replicated: often",
                                        "ignored_modules_replicated takes true or false"),
    "no ranks for experts": ("expert_parallel_size: 0", "expert_parallel_size takes a whole number of at least 1"),
    "a size that MindSpeed's plan cannot set": ("parallel:\n  tensor_parallel_size: 2",
                                                "give --tensor-model-parallel-size 2 instead"),
    "a pattern of a plan that matches nothing": ("fsdp_plan:\n  apply_modules: [model.layer.0]", "model.layer.0"),
    "a misspelt key of a plan": ("fsdp_plan:\n  aply_modules: [a]",
                                 'unknown key "fsdp_plan.aply_modules"; did you mean apply_modules?'),
}
WITH_FLAGS = {
    "recompute in the file and by flags": (
        LAYERS, ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
        "--recompute-granularity and recompute_modules in the FSDP2 file exclude each other; keep one"),
    "a strict file with a path that is not there": (
        "sub_modules_to_wrap: [model.layer]", ["--fsdp2-config-strict"], 'Module not found at path "model.layer"'),
}
CUT_UNEVENLY = ("shard_placement:\n  model.layers.0.mlp: 1",
                "shard_placement in the FSDP2 file cuts model.layers.0.mlp.",
                ", which the 3 ranks that share it do not divide; choose another dimension, or auto")
TRAINED_APART = ("ignored_modules: [model.layers.0.mlp, model.norm]",
                 " more), so each of the 2 ranks would train its own copy; give " "ignored_modules_replicated: true")
# by name: the file, the key without effect
MUTE_NO_MORE = {
    "offload without a GPU": ("offload_to_cpu: true", "offload_to_cpu"),
    "pinned memory without offload": ("pin_memory: false", "pin_memory"),
    "casts without a dtype": ("cast_forward_inputs: false", "cast_forward_inputs"),
    "offloaded sizes without offload": ("min_offloaded_tensor_size: 10", "min_offloaded_tensor_size"),
    "a kind of recompute without recompute": ("use_reentrant: false", "use_reentrant"),
    "memory of NCCL without a GPU": ("communication_memory: registered", "communication_memory"),
    "modules of fp8 without fp8": ("fp8_all_gather_modules: [model.layers.0]", "fp8_all_gather_modules"),
    "replication of nothing": ("ignored_modules_replicated: true", "ignored_modules_replicated"),
    "rows of experts without experts": ("expert_fully_shard_parallel_size: 1", "expert_fully_shard_parallel_size"),
    "experts without experts": ("moe_modules: [model.layers.0.mlp]", "moe_modules"),
}


def with_file(folder, text, *arguments):
    (folder / "f.yaml").write_text(text + "\n")
    return run(*arguments, "--fsdp2-config-path", folder / "f.yaml")


def refused(done, message):
    assert message in only_line(done)
    assert done.returncode == USAGE


@pytest.mark.parametrize("name", REFUSED)
def test_ends_in_one_message(tmp_path, name):
    text, message = REFUSED[name]
    refused(with_file(tmp_path, text, *TRAIN), message)


@pytest.mark.parametrize("name", WITH_FLAGS)
def test_a_flag_beside_it_does_not_fit(tmp_path, name):
    text, flags, message = WITH_FLAGS[name]
    refused(with_file(tmp_path, text, *TRAIN, *flags), message)


def test_modules_that_each_rank_would_train_for_itself(tmp_path):
    text, message = TRAINED_APART
    refused(with_file(tmp_path, text, "launch", "-n", "2", "--", *TRAIN), message)
    frozen = ["--freeze-module-prefix", "model.layers.0.mlp", "model.norm"]
    assert with_file(tmp_path, text, "launch", "-n", "2", "--", *TRAIN, *frozen).returncode == 0
    assert with_file(tmp_path, text, "launch", "-n", "2", "--", *PRETRAIN, *MOCK, "--skip-train").returncode == 0


def test_a_dimension_that_the_ranks_do_not_divide(tmp_path):
    text, *parts = CUT_UNEVENLY
    done = with_file(tmp_path, text, "launch", "-n", "3", "--", *TRAIN, "--global-batch-size", "3")
    for part in parts:
        refused(done, part)


def test_experts_that_are_spread_are_not_ignored(folder, tmp_path):
    text = "expert_fully_shard_parallel_size: 1\nignored_modules: [model.layers.0.mlp.experts]"
    refused(with_file(tmp_path, text, *FROM_MODEL, folder / "experts", "--from-scratch"),
            "ignored_modules names model.layers.0.mlp.experts.gate_up_proj")


@pytest.mark.parametrize("model, ours", [("model", "model"), ("sees", "model.language_model")])
def test_modules_of_megatrons_layout_are_ours(folder, tmp_path, model, ours):
    text = ('sub_modules_to_wrap: ["decoder.layers.{*}", text_decoder.embedding, output_layer]\n'
            'recompute_modules: ["text_decoder.decoder.layers.0"]')
    data = [*ALL_TRAINING, "--data-path", folder / "chats"] if model == "sees" else MOCK
    done = with_file(tmp_path, text, "pretrain", *LOOP, *RATE, *data, "--seq-length", "16", "--hf-model",
                     folder / model, "--from-scratch")
    assert done.returncode == 0, done.stderr
    for theirs, name in {"decoder.layers.{*}": "layers.{*}", "text_decoder.embedding": "embed_tokens"}.items():
        assert f"FSDP2: sub_modules_to_wrap: {theirs} is {ours}.{name} in this model" in done.stdout
    assert f"FSDP2: sub_modules_to_wrap: {ours}.layers.{{*}} -> 1 module ({ours}.layers.0)" in done.stdout


@pytest.mark.parametrize("name", MUTE_NO_MORE)
def test_a_key_without_effect_is_told(tmp_path, name):
    text, key = MUTE_NO_MORE[name]
    done = with_file(tmp_path, text, *TRAIN)
    assert done.returncode == 0, done.stderr
    assert f"WARNING: FSDP2: {key} has no effect: " in done.stdout


def test_ignored_modules_keep_their_dtype(tmp_path):
    done = with_file(tmp_path, "param_dtype: bf16\nignored_modules: [lm_head]", *TRAIN)
    assert "WARNING: FSDP2: ignored_modules keep the dtype of their parameters, which is not param_dtype" in done.stdout
