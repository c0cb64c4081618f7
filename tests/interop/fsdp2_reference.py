"""Trains transformers' models under PyTorch FSDP2, DDP or FSDP1 on CPU and writes what megashard must reproduce.

    fsdp2_reference.py JOB.json

JOB.json is a list of cases; train_dump (the C++ twin) reads the same file. Fields of a case:
  output       safetensors file to write
  model        Hugging Face directory (config.json, model.safetensors)
  batches      safetensors file with `tokens` [steps, world * micro_batch, T + 1] int64
  mesh         [shard ranks] or [replicas, shard ranks]
  steps        optimizer steps
  optimizer    "adam" (AdamW) or "sgd" (momentum 0.9)
  lr, weight_decay, clip (0: only measured)
  param_dtype, reduce_dtype   "float32", "bfloat16" or null
  reshard      reshard_after_forward: true, false or null
  wrapper      "fsdp2", "ddp" or "fsdp1" (only here; the last two take a 1-D mesh and fp32)
  save, save_after   folder for a DCP step of model and optimizer after so many steps (optional, only here)
Written: loss [steps] (mean over ranks), grad_norm [steps] (before clipping), grad.NAME (step 1, whole, before
clipping), weight.NAME (after the last step, whole).

Ranks are forks of one process that has imported torch and transformers: many cases cost one import.
"""

import datetime
import json
import os
import sys
import tempfile
import traceback
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def plain_name(name):
    """A parameter's name without what DDP and FSDP1 add to it."""
    return name.removeprefix("module.").replace("_fsdp_wrapped_module.", "")


def undecayed_names(model):
    """Megatron's groups: biases and 1-D parameters are not decayed. Asked before FSDP1 makes all of them 1-D."""
    return {name for name, parameter in model.named_parameters() if parameter.ndim == 1 or name.endswith(".bias")}


def make_optimizer(model, undecayed, case):
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        (plain if plain_name(name) in undecayed else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": case["weight_decay"]}, {"params": plain, "weight_decay": 0.0}]
    if case["optimizer"] == "sgd":
        return torch.optim.SGD(groups, lr=case["lr"], momentum=0.9)
    return torch.optim.AdamW(groups, lr=case["lr"], fused=True)


def shard(model, case):
    sizes = case["mesh"]
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("replicate", "shard")[-len(sizes):])
    dtype = lambda key: getattr(torch, case[key]) if case.get(key) else None
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype("param_dtype"), reduce_dtype=dtype("reduce_dtype")),
    }
    if case.get("reshard") is not None:
        options["reshard_after_forward"] = case["reshard"]
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def wrap(model, case):
    """The module to call: under FSDP2 the model itself."""
    if case["wrapper"] == "ddp":
        return DistributedDataParallel(model)
    if case["wrapper"] == "fsdp1":
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
                                        device_id=torch.device("cpu"), use_orig_params=True)
    shard(model, case)
    return model


def names_and_tensors(wrapped):
    """(name, parameter, gradient), all whole, of a model under any wrapper."""
    flat = isinstance(wrapped, FullyShardedDataParallel)
    context = FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True) if flat else nullcontext()
    with context:
        for name, parameter in wrapped.named_parameters():
            yield plain_name(name), whole(parameter), None if parameter.grad is None else whole(parameter.grad)


def clip(wrapped, limit):
    """The norm before clipping; FSDP1's parameters do not know that they are pieces."""
    if isinstance(wrapped, FullyShardedDataParallel):
        return wrapped.clip_grad_norm_(limit)
    return torch.nn.utils.clip_grad_norm_(wrapped.parameters(), limit)


def train(case):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    undecayed = undecayed_names(model)
    model = wrap(model, case)
    optimizer = make_optimizer(model, undecayed, case)
    tokens = load_file(case["batches"])["tokens"]
    micro_batch = tokens.shape[1] // world
    results = {}
    losses, norms = [], []
    for step in range(case["steps"]):
        rows = tokens[step, rank * micro_batch:(rank + 1) * micro_batch]
        logits = model(input_ids=rows[:, :-1].contiguous(), use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        if step == 0:
            results |= {f"grad.{name}": grad for name, _, grad in names_and_tensors(model)}
        norm = clip(model, case["clip"] or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean / world)
        norms.append(whole(norm).double())
        if step + 1 == case.get("save_after"):
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
            dcp.save(state, checkpoint_id=case["save"])
    results |= {f"weight.{name}": weight for name, weight, _ in names_and_tensors(model)}
    results["loss"] = torch.stack(losses)
    results["grad_norm"] = torch.stack(norms)
    if rank == 0:
        save_file({key: value.contiguous() for key, value in results.items()}, case["output"])


def run_rank(case, rank, world, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world,
                            timeout=datetime.timedelta(seconds=60))
    train(case)
    dist.barrier()
    dist.destroy_process_group()


def run_case(case):
    world = 1
    for size in case["mesh"]:
        world *= size
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    run_rank(case, rank, world, os.path.join(folder, "store"))
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            children.append(child)
        failed = [child for child in children if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0]
    if failed:
        raise SystemExit(f"{len(failed)} of {world} ranks failed in the case that writes {case['output']}")


if __name__ == "__main__":
    with open(sys.argv[1]) as job:
        cases = json.load(job)
    for each in cases:
        run_case(each)
