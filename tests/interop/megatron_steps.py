"""megatron-core's side of test_torch_dist.py: it loads the steps that dcp_tool saved, and saves its own, at 1 to 4
ranks.

megatron-core takes long to import: one process of this file does it once and forks the ranks of all worlds. Its answers
are a file, of which each test looks at its part. It also saves what a training of ours has reached, with the keys of
Megatron's several optimizers, for a training to go on from.

usage: megatron_steps.py FOLDER
"""

import argparse
import datetime
import json
import os
import pickle
import random
import shutil
import sys
import traceback
import uuid
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from megashard import TRACKER
from test_dcp import STEP, counting, same

WORLDS = (1, 2, 3, 4)
LAYERS = 3
TRAINED = ("plain", "chained", "buckets")  # kinds of optimizer_parts


def weights():
    """Tensors by torch_dist's keys, with whole stacks; the same as in dcp_tool's save_dist."""
    tensors = {
        "embed.weight": counting(torch.float32, (8, 3), 0),
        "few.weight": counting(torch.float16, (5, 2), 1),  # of four ranks the last has none
        "head.weight": counting(torch.float8_e4m3fn, (5, 4), 0),
        "ids": counting(torch.int64, (6,), 3),
        "decoder.layers.mlp.weight": torch.stack([counting(torch.bfloat16, (12, 2), 100 * i) for i in range(LAYERS)]),
        "decoder.layers.norm.weight": torch.stack([counting(torch.float32, (4,), 10 * i) for i in range(LAYERS)]),
        "blocks.layers.0.weight": counting(torch.float32, (2, 3), 0),  # another size than the next: not stacked
        "blocks.layers.1.weight": counting(torch.float32, (3, 3), 0),
    }
    for number, buffer in enumerate(("exp_avg", "exp_avg_sq", "fp32_param")):
        tensors[f"optimizer.state.{buffer}.decoder.layers.mlp.weight"] = torch.stack(
            [counting(torch.float32, (12, 2), 1000 * number + 100 * i) for i in range(LAYERS)])
    return tensors


def is_stack(key):
    return "decoder.layers." in key


def our_common():
    return {
        "args": argparse.Namespace(hidden_size=8, params_dtype=torch.bfloat16, name="größe"),
        "iteration": 10,
        "checkpoint_version": 3.0,
        "optimizer": {"param_groups": [{"lr": 0.001, "betas": (0.9, 0.95)}],
                      "state": {"common_step": torch.tensor(7.0)}},
        "large": 1 << 40,
        "nothing": None,
        "param_group_names": [["a.weight", "b.bias"]],
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }


def rows_of(length, rank, world):
    size = -(-length // world)
    return min(rank * size, length), min((rank + 1) * size, length)


def sharded(rank, world, fill):
    """As Megatron's FSDP2 declares weights whose rows divide evenly; others as chunks without a grid, which its own
    models never make. `fill`: with the data, otherwise with zeros."""
    from megatron.core.dist_checkpointing import ShardedTensor

    state = {}
    for key, whole in weights().items():
        whole = whole if fill else torch.zeros_like(whole)
        for layer in range(LAYERS) if is_stack(key) else [None]:
            data = whole if layer is None else whole[layer]
            begin, end = rows_of(len(data), rank, world)
            local, name = data[begin:end].clone(), key if layer is None else f"{key}.{layer}"
            if len(data) % world == 0 and layer is not None:
                state[name] = ShardedTensor.from_rank_offsets(key, local, (0, layer, LAYERS), (1, rank, world),
                                                              prepend_axis_num=1)
            elif len(data) % world == 0:
                state[name] = ShardedTensor.from_rank_offsets(key, local, (0, rank, world))
            else:
                first = () if layer is None else (layer,)
                local = local if layer is None else local[None]
                offset = first + (begin,) + (0,) * (data.dim() - 1)
                state[name] = ShardedTensor(key, local, local.dtype, tuple(local.shape), tuple(whole.shape), offset,
                                            None)
    return state


def load_ours(folder, rank, world, saved):
    """The differences as text; empty if megatron-core loads everything."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject

    step = str(folder / f"ours_{saved}" / STEP)
    expected = sharded(rank, world, fill=True)
    mine = range(rank, saved, world)
    state = {"model": sharded(rank, world, fill=False),
             "rng_state": {each: ShardedObject("rng_state", None, (saved,), (each,)) for each in mine}}
    loaded = dist_checkpointing.load(state, step)
    for name, tensor in expected.items():
        assert same(loaded["model"][name], tensor.data), name
    assert loaded.get("rng_state", {}) == {each: {"torch": b"\x00\x80\xff" + str(each).encode()} for each in mine}
    common = {key: loaded[key] for key in our_common()}
    assert same(common, our_common()), common
    if world == 1:
        load_plain_tensors(step)


def random_states(rank):
    """Megatron's entry for a rank's state."""
    random.seed(rank)
    numpy.random.seed(rank)
    torch.manual_seed(rank)
    return {"random_rng_state": random.getstate(), "np_rng_state": numpy.random.get_state(),
            "torch_rng_state": torch.get_rng_state(), "cuda_rng_state": torch.arange(16, dtype=torch.uint8),
            "rng_tracker_states": {"model-parallel-rng": torch.arange(16, dtype=torch.uint8)}}


def their_common():
    return {  # an enum as Megatron's attention_backend is, of a module that is light to import
        "args": argparse.Namespace(hidden_size=8, params_dtype=torch.bfloat16, attention_backend=uuid.SafeUUID.unknown,
                                   data_path=["a", "b"], world_size=4, consumed_train_samples=160),
        "iteration": 10,
        "checkpoint_version": 3.0,
        "opt_param_scheduler": {"max_lr": 0.001, "num_steps": 160},
        "num_floating_point_operations_so_far": 2.5e15,
    }


def save_theirs(folder, rank, world):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject

    step = folder / f"theirs_{world}"
    step.mkdir(exist_ok=True)
    dist.barrier()
    state = {
        **their_common(), "model": sharded(rank, world, fill=True),
        # as Float16OptimizerWithFloat16Params nests it, with the tensor that torch's AdamW counts in
        "optimizer": {"optimizer": {"state": {"common_step": torch.tensor(7.0)},
                                    "param_groups": [{"lr": 0.001, "betas": (0.9, 0.95)}]}},
        "rng_state": ShardedObject("rng_state", [random_states(r) for r in range(2)], (1, 1), (0, 0), replica_id=rank),
        "extra": ShardedObject("decoder.layers.mlp._extra_state", None, (1,), (0,), replica_id=rank),
    }
    dist_checkpointing.save(state, str(step), content_metadata={"singleton_local_shards": False})


def as_torch_keeps_them(states):
    """Megatron's entry for a rank, with the generator state that torch itself gives back."""
    torch.set_rng_state(torch.frombuffer(bytearray(states["torch_rng_state"]), dtype=torch.uint8))
    kept = torch.get_rng_state()
    return random_states(rank=0) | {"torch_rng_state": kept}


def optimizer_parts(optimizer, kind):
    """What goes under "optimizer" of Megatron's state dict, and what is sharded, of torch's state by names. "plain": as
    FP32Optimizer has it; "chained": as two of a ChainedOptimizer, with half of the weights each; "buckets": as
    DistributedOptimizer does without --dist-ckpt-optim-fully-reshardable, alone and in a chain."""
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    sharded = {}

    def add(key, tensor):
        sharded[key] = ShardedTensor.from_rank_offsets(key, tensor)

    if kind == "buckets":
        for prefix in ("", "chained_1."):
            group = f"{prefix}optimizer.distributed.dp_group_idx_0"
            for buffer in ("param", "exp_avg", "exp_avg_sq"):
                add(f"{group}.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.{buffer}",
                    torch.arange(64.0))
            for key, value in (("per_bucket_numel", [{"float32": [64]}]),
                               ("optimizer", {"param_groups": [{"step": 2}]})):
                sharded[f"{group}.{key}"] = ShardedObject(f"{group}.{key}", value, (1,), (0,))
        return None, sharded
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer["param_groups"]]
    steps = {float(buffers["step"]) for buffers in optimizer["state"].values()}
    assert len(steps) == 1
    common = {"state": {"common_step": torch.tensor(steps.pop())}, "param_groups": groups}
    for number, (name, buffers) in enumerate(optimizer["state"].items()):
        for buffer in ("exp_avg", "exp_avg_sq"):
            prefix = f"chained_{number % 2}." if kind == "chained" else ""
            add(f"{prefix}optimizer.state.{buffer}.{name}", buffers[buffer])
    return {0: common, 1: common} if kind == "chained" else common, sharded


def save_as_megatron(whole, step, kind="plain"):
    """Saves our state dict as a torch_dist step with megatron-core; layers keep their numbers."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    state = torch.load(whole, weights_only=False)
    common, sharded = optimizer_parts(state.pop("optimizer"), kind)
    sharded.update((key, ShardedTensor.from_rank_offsets(key, tensor)) for key, tensor in state.pop("model").items())
    if common is not None:
        state["optimizer"] = common
    state["rng_state"] = ShardedObject("rng_state", state["rng_state"], (1, 1), (0, 0), replica_id=0)
    dist_checkpointing.save({**state, "model": sharded}, str(step), content_metadata={"singleton_local_shards": False})


def save_trained(folder, kind):
    step = folder / kind / "iter_0000002"
    step.mkdir(parents=True)
    save_as_megatron(folder / "trained.pt", step, kind)
    (step.parent / TRACKER).write_text("2")


def as_of_0_15(step, copy):
    """The step with the .metadata that megatron-core 0.15 writes: of a class of its own, which has one field more."""
    from megatron.core.dist_checkpointing.strategies.torch import MCoreMetadata

    shutil.copytree(step, copy)
    stored = dcp.FileSystemReader(step).read_metadata()
    metadata = MCoreMetadata()
    metadata.__dict__.update(stored.__dict__,
                             mcore_data={"embed.weight": {"nd_reformulated_orig_global_shape": (8, 3)}})
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    load_plain_tensors(copy)


def load_plain_tensors(step):
    from megatron.core import dist_checkpointing

    plain = dist_checkpointing.load_plain_tensors(str(step))
    assert all(same(plain[key], tensor) for key, tensor in weights().items())


def run_rank(folder, rank, world, answers):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / f"store_{world}"), world), rank=rank,
                            world_size=world, timeout=datetime.timedelta(seconds=60))
    tasks = {f"save_{world}": lambda: save_theirs(folder, rank, world)}
    tasks.update({f"load_{saved}_{world}": lambda saved=saved: load_ours(folder, rank, world, saved)
                  for saved in WORLDS})
    if world == 1:
        tasks["as_of_0_15"] = lambda: as_of_0_15(folder / "ours_1" / STEP, folder / "ours_0_15")
        tasks.update({f"save_{kind}": lambda kind=kind: save_trained(folder, kind) for kind in TRAINED})
    for name, task in tasks.items():
        try:
            task()
        except Exception:
            answers.put((name, f"rank {rank}: {traceback.format_exc()}"))
        dist.barrier()


def without_gpu():
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"


def without_strides():
    """megatron-core 0.16.1 gives torch.empty all properties that a checkpoint's metadata has of a tensor: newer
    versions of torch have strides among them, which torch.empty does not take."""
    empty = torch.empty
    torch.empty = lambda *sizes, strides=None, **options: empty(*sizes, **options)


def megatron(folder):
    import multiprocessing
    import queue

    torch.set_num_threads(1)
    without_gpu()
    without_strides()
    from megatron.core import dist_checkpointing  # noqa: F401: the long import
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    filesystem_async._results_queue = queue.Queue()  # its own would import all of this again, in another process
    failures = {}
    for world in WORLDS:
        ranks = [context.Process(target=run_rank, args=(folder, rank, world, answers)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        if any(process.exitcode != 0 for process in ranks):
            failures[f"save_{world}"] = f"exit codes {[process.exitcode for process in ranks]}"
        while not answers.empty():
            name, text = answers.get()
            failures.setdefault(name, text)
    (folder / "answers.json").write_text(json.dumps(failures))


if __name__ == "__main__":
    megatron(Path(sys.argv[1]))
