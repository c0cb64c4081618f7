"""The PyTorch side of run.py: a Hugging Face model under FSDP2 (its layers compiled or not) or FSDP1, with fused AdamW,
started by torchrun.

One JSON line a step is appended to --metrics-file by rank 0, as `megashard pretrain` does. Tokens come from the
.bin of a Megatron data set, row after row.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy,
                                    fully_shard)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

BF16 = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard_by_fsdp2(model, compiles, dtypes):
    mesh, policy = init_device_mesh("cpu", (dist.get_world_size(),)), MixedPrecisionPolicy(**dtypes)
    for layer in model.model.layers:
        if compiles:  # as torchtitan does
            layer.compile(fullgraph=True)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def shard_by_fsdp1(model, dtypes):
    return FullyShardedDataParallel(model, sharding_strategy=ShardingStrategy.FULL_SHARD, use_orig_params=True,
                                    auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
                                    mixed_precision=MixedPrecision(**dtypes) if dtypes else None,
                                    device_id=torch.device("cpu"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hf-model", required=True)
    parser.add_argument("--bin", required=True, help="uint16 tokens")
    parser.add_argument("--seq-length", type=int, required=True)
    parser.add_argument("--micro-batch-size", type=int, required=True)
    parser.add_argument("--train-iters", type=int, required=True)
    parser.add_argument("--bf16-params", action="store_true", help="bf16 compute, fp32 storage and reduction")
    parser.add_argument("--metrics-file", required=True)
    parser.add_argument("--wrapper", default="fsdp2",
                        choices=["fsdp2", "compiled", "fsdp1", "eager-experts", "eager-attention"])
    args = parser.parse_args()

    from transformers import AutoModelForCausalLM  # after parsing: --help is quick

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    # Of transformers an eager expert is a loop over experts; its default is one grouped product.
    experts = {"experts_implementation": "eager"} if args.wrapper == "eager-experts" else {}
    attention = "eager" if args.wrapper == "eager-attention" else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(args.hf_model, dtype=torch.float32, attn_implementation=attention,
                                                 **experts)
    model.train()
    dtypes = BF16 if args.bf16_params else {}
    if args.wrapper == "fsdp1":
        model = shard_by_fsdp1(model, dtypes)
    else:
        model = shard_by_fsdp2(model, args.wrapper == "compiled", dtypes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    tokens = torch.from_file(args.bin, size=os.path.getsize(args.bin) // 2, dtype=torch.uint16)
    row = args.seq_length + 1
    rows = args.micro_batch_size * row
    for step in range(args.train_iters):
        start = ((step * world + rank) * rows) % (len(tokens) - rows)
        batch = tokens[start:start + rows].long().view(args.micro_batch_size, row)
        logits = model(input_ids=batch[:, :-1].contiguous(), use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        if args.wrapper == "fsdp1":
            norm = model.clip_grad_norm_(1.0)
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        if rank == 0:
            with open(args.metrics_file, "a") as metrics:
                metrics.write(json.dumps({"step": step + 1, "loss": mean.item() / world, "grad_norm": norm.item()}) +
                              "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # a thread of Gloo that still drops a tensor while Python ends would abort the process
