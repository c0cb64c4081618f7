"""Writes the seeds among the archives of tests/fuzz/corpus: small files as torch, numpy and Megatron's tools write
them.

The other files there, which have numbers for names, are those that `tests/fuzz/run --merge` adds.

usage: PYTHONPATH=tests tests/fuzz/make_corpus.py    (the environment of the tests; the archives are committed)
"""

import argparse
import collections
import io
import json
import pathlib
import pickle
import random
import re
import struct
import sys
import tempfile
import types
import uuid
import zipfile
import zlib

import msgspec
import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from corpus import pack, unpack
from megashard import ROOT, token_index

SEEDS = collections.defaultdict(dict)  # by target, then by name


def seed(target, name, content):
    SEEDS[target][name] = content if isinstance(content, bytes) else content.encode()


def values():
    np.random.seed(1)
    state = np.random.get_state()
    return {
        "args": argparse.Namespace(hidden_size=8, params_dtype=torch.bfloat16, betas=(0.9, 0.95),
                                   path=pathlib.PurePosixPath("a/b")),
        "iteration": 10,
        "large": [1 << 40, -1, 1 << 70, 1.5, float("nan"), None, True],
        "ordered": collections.OrderedDict(a=b"x\xff", b=bytearray(b"y")),
        "size": torch.Size([2, 3]),
        "set": {1, 2},
        "numpy": (state[0], state[1][:3], np.float64(0.5), np.asfortranarray(np.ones((2, 2), np.int16))),
        "rng": random.Random(1).getstate()[1][:4],
        "text": "größe",
        "safe": uuid.SafeUUID.unknown,
    }


def pickles():
    for protocol in (0, 2, 4, 5):
        for name, value in values().items():
            seed("pickle", f"{name}{protocol}", pickle.dumps(value, protocol))


def torch_files():
    for name, value in {
        "tensor": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
        "parameter": torch.nn.Linear(2, 3).weight,
        "state": {"model": {"a": torch.ones(2)}, "args": argparse.Namespace(a=1), "step": torch.tensor(1.0)},
        "untyped": torch.ones(3, dtype=torch.uint16),
    }.items():
        stream = io.BytesIO()
        torch.save(value, stream)
        for target in ("torch_file", "stored_value"):
            seed(target, name, small_archive(stream.getvalue()))


def small_archive(archive):
    """Without the records about the writer, and without the padding in front of tensors."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as source, zipfile.ZipFile(stream, "w") as target:
        for entry in source.infolist():
            name = entry.filename.partition("/")[2]
            if name == "data.pkl" or name.startswith("data/"):
                target.writestr(zipfile.ZipInfo("a/" + name), source.read(entry))
    return stream.getvalue()


def as_megatron_0_15(metadata):
    """Pickle of a class that exists in Megatron's environment."""
    name = "megatron.core.dist_checkpointing.strategies.torch"
    root = type("MCoreMetadata", (), {"__module__": name})
    sys.modules[name] = types.SimpleNamespace(MCoreMetadata=root)
    pickled = root()
    pickled.__dict__.update(metadata.__dict__, mcore_data={"a": {"nd_reformulated_orig_global_shape": (2, 2)}})
    try:
        return pickle.dumps(pickled, 4)
    finally:
        del sys.modules[name]


def metadata():
    nested = {"model": {"weight": torch.ones(4, 2)}, "optimizer": {"param_groups": [{"lr": 0.1}]}, "iteration": 3}
    layers = {"decoder.layers.w": torch.ones(2, 4), "optimizer.state.exp_avg.decoder.layers.w": torch.zeros(2, 4)}
    objects = {"rng_state/shard_0_2": io.BytesIO(b"x"), "decoder.layers.0.core/shard_0_1": io.BytesIO(b"y"),
               "a": torch.ones(3)}
    for target, states in {"metadata": (nested,), "torch_dist": (layers, objects)}.items():
        for number, state in enumerate(states):
            with tempfile.TemporaryDirectory() as folder:
                dcp.save(state, checkpoint_id=folder, no_dist=True)
                loaded = pickle.loads((pathlib.Path(folder) / ".metadata").read_bytes())
            loaded.storage_meta = None
            for protocol in (2, 4):
                seed(target, f"state{number}_{protocol}", pickle.dumps(loaded, protocol))
            if target == "metadata":
                seed(target, "megatron_0_15", as_megatron_0_15(loaded))
    for name, state in {
        "nested": {**nested, "rng": [{"state": torch.arange(3, dtype=torch.uint8)}]},
        "chunks": {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.tensor(1.5)},
    }.items():
        with tempfile.TemporaryDirectory() as folder:
            dcp.save(state, checkpoint_id=folder, no_dist=True)
            data, stored = bytearray(), pickle.loads((pathlib.Path(folder) / ".metadata").read_bytes())
            written = (pathlib.Path(folder) / "__0_0.distcp").read_bytes()
            for info in stored.storage_data.values():
                item = written[info.offset : info.offset + info.length]
                if zipfile.is_zipfile(io.BytesIO(item)):
                    item = small_archive(item)
                info.offset, info.length = len(data), len(item)
                data += item
        described = pickle.dumps(stored, 4)
        seed("dcp_reader", name, bytes(data) + described + struct.pack("<I", len(described)))
    group = {"lr": 0.1, "step": 3, "params": [0]}
    for name, common in {
        "plain": {"iteration": 3, "args": argparse.Namespace(a=1), "optimizer": {"param_groups": [group], "state": {}}},
        "nested": {"optimizer": {"optimizer": {"state": {"common_step": 3}, "param_groups": [group]},
                                 "grad_scaler": {"scale": 1.0}}},
        "names": {"optimizer": {"param_groups": [group]}, "param_group_names": [["decoder.layers.0.mlp.weight"]]},
    }.items():
        seed("torch_dist_common", name, pickle.dumps(common, 2))
    for name, config in {
        "torch_dist": {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"},
        "zarr": {"sharded_backend": "zarr", "sharded_backend_version": 2},
    }.items():
        seed("torch_dist_config", name, json.dumps(config))


def hugging_face():
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16), "none": torch.zeros(0, 2)}
    seed("safetensors", "three", safetensors.torch.save(tensors, {"format": "pt"}))
    seed("safetensors", "fp8", safetensors.torch.save({"f": torch.ones(3).to(torch.float8_e4m3fn)}))
    pictures = {"tokens": torch.arange(5, dtype=torch.int32), "loss_mask": torch.ones(5, dtype=torch.uint8),
                "sample_ends": torch.tensor([2, 5]), "image_ends": torch.tensor([0, 1]),
                "image_grid_thw": torch.tensor([[1, 2, 2]]), "pixel_values": torch.ones(4, 3)}
    seed("picture_set", "two", safetensors.torch.save(pictures))
    videos = {"video_ends": torch.tensor([1, 1]), "video_grid_thw": torch.tensor([[2, 1, 2]]),
              "pixel_values_videos": torch.ones(4, 3), "second_per_grid_ts": torch.tensor([0.5])}
    seed("picture_set", "videos", safetensors.torch.save({**pictures, **videos}))
    names = {"model.a.weight": "model-00001-of-00002.safetensors", "lm_head.weight": "model-00002-of-00002.safetensors"}
    seed("index", "two", json.dumps({"metadata": {"total_size": 48}, "weight_map": names}))
    seed("index", "elsewhere", json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    common = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
              "num_attention_heads": 4, "max_position_embeddings": 32, "rms_norm_eps": 1e-6, "eos_token_id": 2,
              "tie_word_embeddings": True}
    for family, more in {
        "llama": {"num_key_value_heads": 2, "hidden_act": "silu",
                  "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                   "high_freq_factor": 4.0, "original_max_position_embeddings": 16}},
        "qwen3": {"num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rope_theta": 1e6},
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "activation_function": "gelu_new"},
    }.items():
        seed("hf_config", family, json.dumps({"model_type": family, **common, **more}))


def tokens():
    seed("token_index", "uint16", token_index([3, 2]))
    seed("token_index", "modes", token_index([3, 2]) + b"\x00\x01")
    seed("token_index", "no_documents", token_index([3], bounds=[]))


def manifests():
    files = {"__0_0.distcp": {"bytes": 4096, "crc32": "0123abcd"}, ".metadata": {"bytes": 12, "crc32": "00000000"}}
    root = {"files": files, "format_version": 1, "iteration": 10}
    run = {"id": "0123456789abcdef", "before": [["", 5], ["fedcba9876543210", 7]]}
    for name, content in {"two": root, "of_a_run": {**root, "run": run}}.items():
        compact = json.dumps(content, sort_keys=True, separators=(",", ":"))
        seed("manifest", name, json.dumps({**content, "crc32": f"{zlib.crc32(compact.encode()):08x}"}))


def texts():
    for name, text in {"iteration": "10\n", "release": "release", "zeros": "0000007\r\n",
                       "beyond": "99999999999999999999"}.items():
        seed("tracker", name, text)
    seed("data_args", "blend", "0.3 a\n0.7\tb\n")
    seed("fsdp2_yaml", "sample", re.sub(r"\s*(#.*)?\n+", "\n", (ROOT / "fsdp2_config.yaml").read_text()))
    seed("fsdp2_yaml", "lists",
         "sharding_size: auto\nsub_modules_to_wrap: [model.layers.{*}, 'a.{0-3}']\nparam_dtype: bf16\n"
         "reshard_after_forward: 2\nignored_modules: &x [a]\nrecompute_modules: *x\n")
    seed("argument_file", "flat", "hidden_size: 64\nnum_layers: 2\nswiglu: true\nlr: 1e-3\ndata_path: [0.3, a, 0.7, "
         "b]\n")
    seed("argument_file", "section", "gpt_args:\n  seq_length: 128\n  untie_embeddings_and_output_weights: false\n")
    seed("roll_yaml", "train", "pretrain: /m\nrollout_batch_size: 4\nactor_train:\n  model_args: {dtype: bf16, "
         "ulysses_size: 2}\n"
         "  training_args:\n    learning_rate: 1.0e-6\n    per_device_train_batch_size: 1\n    max_steps: 4\n"
         "  data_args:\n    file_name: ${pretrain}\n  strategy_args:\n    strategy_name: fsdp2_train\n"
         "    strategy_config: {fsdp_size: 2, param_dtype: bf16, offload_policy: false}\n  device_mapping: "
         "list(range(0,2))\n")
    seed("roll_yaml", "twice", "actor_train: {}\nactor_train:\n  strategy_args: {strategy_name: fsdp2_train}\n")
    seed("command_line", "flags",
         "--num-layers\n2\n--hidden-size=64\n--swiglu\n--data-path\n0.5\na\n0.5\nb\n--adam-beta1\n0.9\n")
    seed("command_line", "folder", ".\n--role\nn")
    seed("command_line", "underscores", "--micro_batch_size\n4\n--no-load-optim\n--split\n98,1,1\n--lr\n1e-4\n")


def rollouts():
    fields = [[5, 6, 7], [False, True, True], [0.5] * 3, [-1.5] * 3, [0, 1, 2], [3], [1.0, 0.5, 2.0], ["a"] * 3, [1, 2]]
    seed("prime_rollouts", "short", msgspec.msgpack.encode([fields]))
    seed("prime_rollouts", "whole",
         msgspec.msgpack.encode([[*fields, [-2.0] * 3, None, None, None, [1.0] * 3, None, [0.0] * 3]] * 2))


def main():
    for write in (pickles, torch_files, metadata, manifests, hugging_face, tokens, rollouts, texts):
        write()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for target, seeds in SEEDS.items():
            unpack(folder, target)
            for each, content in seeds.items():
                (folder / target / each).write_bytes(content)
            pack(folder, target)
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    print(f"{len(sizes)} files, {sum(sizes)} bytes")


if __name__ == "__main__":
    main()
