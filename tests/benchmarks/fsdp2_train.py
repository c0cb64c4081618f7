"""The PyTorch side of run.py: a Hugging Face model under FSDP2 with fused AdamW, started by torchrun.

One JSON line a step is appended to --metrics-file by rank 0, as `megashard pretrain` does. Tokens come from the
.bin of a Megatron data set, row after row.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hf-model", required=True)
    parser.add_argument("--bin", required=True, help="uint16 tokens")
    parser.add_argument("--seq-length", type=int, required=True)
    parser.add_argument("--micro-batch-size", type=int, required=True)
    parser.add_argument("--train-iters", type=int, required=True)
    parser.add_argument("--bf16-params", action="store_true", help="bf16 compute, fp32 storage and reduction")
    parser.add_argument("--metrics-file", required=True)
    args = parser.parse_args()

    from transformers import AutoModelForCausalLM  # after parsing: --help is quick

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(args.hf_model, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    policy = MixedPrecisionPolicy()
    if args.bf16_params:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
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
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        norm = norm.full_tensor()
        if rank == 0:
            with open(args.metrics_file, "a") as metrics:
                metrics.write(json.dumps({"step": step + 1, "loss": mean.item() / world, "grad_norm": norm.item()}) +
                              "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # a thread of Gloo that still drops a tensor while Python ends would abort the process
