"""Megatron-core's GPTModel on a checkpoint that megashard converted, for test_convert_megatron.py.

megatron_gpt.py CASE...: each a folder with hf/config.json and ours/release. Leaves logits.pt, and theirs/iter_0000005,
the same weights as megatron-core saves them.
"""

import argparse
import contextlib
import json
import sys
import types
from pathlib import Path

import torch
from torch.nn.functional import silu

TOKENS = torch.tensor([[5, 1, 44, 17, 17, 3, 49, 0, 9]])
DIVISOR = 16


def gpt_model(config):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    qk_norm = config["model_type"] == "qwen3"
    network = TransformerConfig(
        num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"], num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"], kv_channels=config["head_dim"], use_cpu_initialization=True,
        gated_linear_unit=True, activation_func=silu, normalization="RMSNorm", add_bias_linear=False,
        add_qkv_bias=config["model_type"] == "qwen2", qk_layernorm=qk_norm, layernorm_epsilon=config["rms_norm_eps"],
        attention_dropout=0.0, hidden_dropout=0.0, bias_activation_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False)
    padded = -(-config["vocab_size"] // DIVISOR) * DIVISOR
    return GPTModel(network, get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_norm), vocab_size=padded,
                    max_sequence_length=64, position_embedding_type="rope", rotary_base=10000,
                    share_embeddings_and_output_weights=config["tie_word_embeddings"])


def buckets():
    """The state as DistributedOptimizer saves it without --dist-ckpt-optim-fully-reshardable."""
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    group = "optimizer.distributed.dp_group_idx_0"
    bucket = f"{group}.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.exp_avg"
    return {"bucket": ShardedTensor.from_rank_offsets(bucket, torch.arange(64.0)),
            "numel": ShardedObject(f"{group}.per_bucket_numel", [64], (1,), (0,))}


def run(case):
    from megatron.core import dist_checkpointing

    config = json.loads((case / "hf" / "config.json").read_text())
    model = gpt_model(config)
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(case / "ours" / "release"))
    model.load_state_dict(loaded["model"])
    length = TOKENS.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits = model(TOKENS, torch.arange(length)[None], mask)
    args = vars(loaded["args"])
    torch.save({"logits": logits[..., :config["vocab_size"]], "args": args, "iteration": loaded["iteration"]},
               case / "logits.pt")
    (case / "theirs" / "iter_0000005").mkdir(parents=True)
    state = {"model": model.sharded_state_dict(), "iteration": 5, "args": argparse.Namespace(**args), **buckets()}
    dist_checkpointing.save(state, str(case / "theirs" / "iter_0000005"))


def without_gpu():
    """Sets up one rank. Replaces megatron-core's queries for a GPU that no computation needs."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda: None
    ones = torch.ones
    torch.ones = lambda *sizes, device=None, **more: ones(*sizes, **more)  # masks of windows are made on a GPU
    tensor_parallel.get_cuda_rng_tracker = lambda: types.SimpleNamespace(fork=contextlib.nullcontext)


def main():
    without_gpu()
    for case in sys.argv[1:]:
        run(Path(case))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
