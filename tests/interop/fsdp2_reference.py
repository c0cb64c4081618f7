"""Trains transformers' models under PyTorch FSDP2, DDP or FSDP1 on CPU and writes what megashard must reproduce.

    fsdp2_reference.py JOB.json

JOB.json is a list of cases; train_dump (the C++ twin) reads the same file. Fields of a case:
  output       safetensors file to write
  model        Hugging Face directory (config.json, model.safetensors)
  batches      safetensors file with `tokens` [steps, world * micro_batch, T + 1] int64
  conversations, rows   instead: PREFIX of PREFIX.vision.safetensors, and how many of it a step takes, in the order of
               framework/data/conversation_dataset.h; for a vision-language model (here on one rank)
  micro_batches      a rank takes its rows in so many parts, of whose gradients the mean is taken; 1 if absent (only
               here, of batches)
  eager        true: attention and experts by transformers' plainest code, not by sdpa and grouped products (only here)
  mesh         [shard ranks] or [replicas, shard ranks]
  steps        optimizer steps
  optimizer    "adam" (AdamW) or "sgd" (momentum 0.9)
  lr, weight_decay, clip (0: only measured)
  param_dtype, reduce_dtype   "float32", "bfloat16" or null
  reshard      reshard_after_forward: true, false or null
  wrapper      "fsdp2", "ddp", "fsdp1" or "none" (only here; the last three take a 1-D mesh and fp32, "none" one rank)
  save, save_after   folder for a DCP step of model and optimizer after so many steps (optional, only here)
  loss_scale         {"initial": N, "window": N, "overflows": [STEP, ...]}: of torch's GradScaler (optional); in these
               steps a gradient is infinite on the last of the ranks that shard it, in every replica
  fp8          {"recipe": "tensorwise", "mxfp8" or "nvfp4", "gradients": "e4m3fn" or "e5m2"}: linear layers (optional)
  count_memory       path of live_memory.so: bytes of tensors are counted, and no tensors written (optional)
  process_group      "fake": one rank, whose collectives do nothing (optional)
Written: loss [steps] (mean over ranks; of conversations over the tokens to learn), grad_norm [steps] (before clipping;
1 where it is no number), with a loss scale what it is after each step, loss_scale [steps],
grad.NAME (step 1, whole, before clipping), weight.NAME (after the last step, whole); or loss, grad_norm, peak_bytes and
kept_bytes [steps] (rank 0's tensors, at most in each step and after it).

Ranks are forks of one process that has imported torch and transformers: many cases cost one import.
"""

import ctypes
import datetime
import json
import os
import sys
import tempfile
import traceback
from contextlib import nullcontext

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForImageTextToText

from float8_products import use_float8
from transformers_twin import model_class


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def plain_name(name):
    """A parameter's name without the prefixes of DDP and FSDP1."""
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
    for layer in getattr(model.model, "language_model", model.model).layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def wrap(model, case):
    """The module to call: under FSDP2 and alone the model itself."""
    if case["wrapper"] == "none":
        return model
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


class Scaling:
    """Scales losses by torch's GradScaler, if there is one."""

    def __init__(self, case):
        given = case.get("loss_scale")
        self.overflows = given["overflows"] if given else []
        self.scaler = torch.amp.GradScaler("cpu", init_scale=given["initial"], growth_interval=given["window"],
                                           enabled=True) if given else None
        self.scales = []
        self.shards = case["mesh"][-1]

    def backward(self, loss, step, wrapped):
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        if step in self.overflows and dist.get_rank() % self.shards == self.shards - 1:
            gradient = next(wrapped.parameters()).grad
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).fill_(float("inf"))

    def unscale(self, optimizer):
        if self.scaler:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer):
        if self.scaler is None:
            return optimizer.step()
        self.scaler.step(optimizer)
        self.scaler.update()
        self.scales.append(self.scaler.get_scale())


class Batches:
    """Rows of one file. loss() is the mean over tokens, and what is trained."""

    def __init__(self, case):
        self.tokens = load_file(case["batches"])["tokens"]

    def loss(self, model, step, rank, world):
        micro_batch = self.tokens.shape[1] // world
        rows = self.tokens[step, rank * micro_batch:(rank + 1) * micro_batch]
        out = model(input_ids=rows[:, :-1].contiguous(), use_cache=False)
        loss = torch.nn.functional.cross_entropy(out.logits.float().flatten(0, 1), rows[:, 1:].flatten())
        balance = out.get("aux_loss")  # of routers
        return loss, loss if balance is None else loss + model.config.router_aux_loss_coef * balance


def pictures_of(model, pictures, marks):
    """As the model takes them. marks: the tokens that are of pictures."""
    from tiny_vision import row_by_row, whole_images

    if not len(pictures["pixel_values"]):
        return {}
    if model.config.model_type.startswith("qwen3_omni"):
        return pictures
    if model.config.model_type == "mistral3":
        return whole_images(**pictures)
    if model.config.model_type == "internvl":
        return dict(pixel_values=whole_images(**pictures)["pixel_values"])
    if model.config.model_type == "kimi_k25":
        return row_by_row(**pictures)
    if model.config.model_type == "gemma3":
        return dict(pixel_values=whole_images(**pictures)["pixel_values"], token_type_ids=marks)
    return pictures | dict(mm_token_type_ids=marks)


def sounds_of(model, frames, lengths):
    """Clips as the model takes them."""
    from tiny_audio import spectra_of

    if not len(lengths):
        return {}
    spectra, heard = spectra_of(frames, lengths)
    name = "input_features_mask" if model.config.model_type == "qwen3_asr" else "feature_attention_mask"
    return {"input_features": spectra, name: heard}


class Conversations:
    """Conversations with their pictures and clips of sound; one rank has all of a step."""

    def __init__(self, case):
        self.set, self.rows = load_file(f"{case['conversations']}.vision.safetensors"), case["rows"]
        count, random, order = len(self.set["sample_ends"]), numpy.random.RandomState(1234), []
        while len(order) < self.rows * case["steps"]:
            epoch = numpy.arange(count)
            random.shuffle(epoch)
            order += epoch.tolist()
        self.order = order

    def sample(self, number):
        def between(name, ends, index):
            return self.set[name][0 if index == 0 else int(ends[index - 1]):int(ends[index])]

        patch_ends = self.set["image_grid_thw"].prod(1).cumsum(0)
        images = between("image_grid_thw", self.set["image_ends"], number)
        last = int(self.set["image_ends"][number])
        pixels = [between("pixel_values", patch_ends, image) for image in range(last - len(images), last)]
        ends = self.set["sample_ends"]
        sounds = [between(f"items.{name}", self.set[f"item_ends.{name}"], number)
                  for name in ("input_features", "audio_feature_lengths") if f"items.{name}" in self.set]
        return (between("tokens", ends, number).long(), between("loss_mask", ends, number).bool(), images, pixels,
                sounds)

    def loss(self, model, step, rank, world):
        samples = [self.sample(number) for number in self.order[step * self.rows:(step + 1) * self.rows]]
        tokens, masks = (torch.nn.utils.rnn.pad_sequence(each, batch_first=True) for each in list(zip(*samples))[:2])
        inputs, labels = tokens[:, :-1], tokens[:, 1:].where(masks[:, 1:], -100)
        pictures = dict(pixel_values=torch.cat([self.set["pixel_values"][:0],
                                                *(pixels for each in samples for pixels in each[3])]),
                        image_grid_thw=torch.cat([each[2] for each in samples]))
        marks = (inputs == getattr(model.config, "image_token_id", -1)).int()
        more = pictures_of(model, pictures, marks)
        if samples[0][4]:
            more |= sounds_of(model, *(torch.cat(each) for each in zip(*(each[4] for each in samples))))
            kept = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each[0]) for each in samples], batch_first=True)
            more["attention_mask"] = kept[:, :-1]
        logits = model(input_ids=inputs, use_cache=False, **more).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss, loss


class LiveMemory:
    """Tensor bytes of this process, counted by live_memory.h."""

    def __init__(self, library):
        self.library = ctypes.CDLL(library)
        for function in (self.library.live_memory_now, self.library.live_memory_peak):
            function.restype = ctypes.c_int64
        self.library.live_memory_start()
        self.peaks, self.kept = [], []

    def end_step(self):
        self.peaks.append(self.library.live_memory_peak())
        self.kept.append(self.library.live_memory_now())
        self.library.live_memory_restart_peak()

    def results(self):
        return {"peak_bytes": torch.tensor(self.peaks), "kept_bytes": torch.tensor(self.kept)}


def class_of(config, sees):
    if hasattr(config, "audio_config"):
        return getattr(transformers, config.architectures[0])
    return AutoModelForImageTextToText if sees else model_class(config.model_type)


def train(case):
    rank, world = dist.get_rank(), dist.get_world_size()
    memory = LiveMemory(case["count_memory"]) if case.get("count_memory") else None
    sees = "conversations" in case
    family = class_of(AutoConfig.from_pretrained(case["model"]), sees)
    plain = dict(attn_implementation="eager", experts_implementation="eager")
    model = family.from_pretrained(case["model"], dtype=torch.float32,
                                   **plain if case.get("eager") else dict(attn_implementation="sdpa"))
    model.train()
    if "fp8" in case:
        use_float8(model, **case["fp8"])
    undecayed = undecayed_names(model)
    model = wrap(model, case)
    optimizer = make_optimizer(model, undecayed, case)
    data = Conversations(case) if sees else Batches(case)
    scaling = Scaling(case)
    results = {}
    losses, norms = [], []
    for step in range(case["steps"]):
        parts = case.get("micro_batches", 1)
        loss = 0
        for part in range(parts):
            mean, trained = data.loss(model, step, rank * parts + part, world * parts)
            scaling.backward(trained, step, model)
            loss = loss + mean.detach().double() / parts
        if parts > 1:  # divided as FSDP2 does, behind the backward pass
            for parameter in model.parameters():
                parameter.grad.div_(parts)
        if step == 0 and memory is None:
            results |= {f"grad.{name}": grad for name, _, grad in names_and_tensors(model)}
        scaling.unscale(optimizer)
        norm = clip(model, case["clip"] or float("inf"))
        scaling.step(optimizer)
        optimizer.zero_grad()
        dist.all_reduce(loss)
        losses.append(loss / world)
        norm = whole(norm).double()
        norms.append(norm if norm.isfinite() else torch.ones_like(norm))
        if memory is not None:
            memory.end_step()
        if step + 1 == case.get("save_after"):
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
            dcp.save(state, checkpoint_id=case["save"])
    if memory is None:
        results |= {f"weight.{name}": weight for name, weight, _ in names_and_tensors(model)}
    else:
        results |= memory.results()
    results["loss"] = torch.stack(losses)
    results["grad_norm"] = torch.stack(norms)
    if scaling.scales:
        results["loss_scale"] = torch.tensor(scaling.scales)
    if rank == 0:
        save_file({key: value.contiguous() for key, value in results.items()}, case["output"])


def run_rank(case, rank, world, store):
    torch.set_num_threads(1)
    if case.get("process_group") == "fake":
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    else:
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
        for rank in range(1 if case.get("process_group") == "fake" else world):
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
        raise SystemExit(f"{len(failed)} of {len(children)} ranks failed in the case that writes {case['output']}")


if __name__ == "__main__":
    with open(sys.argv[1]) as job:
        cases = json.load(job)
    for each in cases:
        run_case(each)
