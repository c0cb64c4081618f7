"""verl's training engine on `megashard serve` (docs/serving_losses.md): model.external_lib=megashard.verl."""
import contextlib
import json
import os
import shutil

import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import detach_tree, postprocess_batch_func, prepare_micro_batches

from .engine import Server, leaves_of, weights_by
from .program import UsageError

DEVICE = "megashard"  # VERL_ENGINE_DEVICE, by which verl's strategies fsdp and fsdp2 take this engine
STATE = "megashard_verl.json"
DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "float32": None, "fp32": None}
KEYS = {"log_probs": "log_probs", "entropies": "entropy", "values": "values"}  # ours, and verl's


def arguments_of(model, engine, optimizer, sharing):
    """The options of `megashard serve`, and the FSDP2 file, of verl's configurations."""
    longest = [each for each in (engine.max_token_len_per_gpu, engine.infer_max_token_len_per_gpu) if each]
    arguments = dict(
        hf_model=model.local_path, use_torch_fsdp2=True, ckpt_format="torch_dcp", seed=engine.seed,
        seq_length=max(longest) * sharing if longest else model.hf_config.max_position_embeddings,
        neat_packing=bool(model.use_remove_padding), lr_decay_style="constant", train_iters=1 << 30, lr=1.0)
    if sharing > 1:
        arguments |= dict(context_parallel_size=sharing)
    if model.model_type == "value_model":
        arguments |= dict(objective="value")
    if optimizer is not None:
        if getattr(optimizer, "optimizer", "AdamW") != "AdamW":
            raise UsageError(f"verl's optimizer {optimizer.optimizer} is not served; choose AdamW")
        arguments |= dict(weight_decay=optimizer.weight_decay, adam_beta1=optimizer.betas[0],
                          adam_beta2=optimizer.betas[1], clip_grad=optimizer.clip_grad,
                          param_group_overrides=["*:wd_mult=1"])  # torch's AdamW decays all
    if model.lora_rank > 0:
        targets = model.target_modules
        arguments |= dict(lora_r=model.lora_rank, lora_alpha=model.lora_alpha,
                          lora_target_modules=[targets] if isinstance(targets, str) else list(targets))
    if model.enable_gradient_checkpointing:
        arguments |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    precision = getattr(engine, "mixed_precision", None) or {}
    computed = DTYPES[str(precision.get("param_dtype", engine.dtype)).removeprefix("torch.")]
    file = {"reshard_after_forward": bool(getattr(engine, "reshard_after_forward", True)),
            "offload_to_cpu": bool(getattr(engine, "offload_policy", False))}
    if computed:
        file |= {"param_dtype": computed, "reduce_dtype": "fp32"}
    return arguments, file


def schedule_of(optimizer):
    """verl's schedule of the learning rate, on an optimizer that steps nothing."""
    stepped = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=optimizer.lr)
    warmup = optimizer.lr_warmup_steps or 0
    if warmup <= 0:
        warmup = int(optimizer.lr_warmup_steps_ratio * optimizer.total_training_steps)
    if getattr(optimizer, "lr_scheduler_type", "constant") == "constant":
        return get_constant_schedule_with_warmup(optimizer=stepped, num_warmup_steps=warmup)
    return get_cosine_schedule_with_warmup(
        optimizer=stepped, num_warmup_steps=warmup, num_training_steps=optimizer.total_training_steps,
        min_lr_ratio=optimizer.min_lr_ratio, num_cycles=optimizer.num_cycles,
        zero_indexed_step=optimizer.zero_indexed_step)


class Mode(BaseEngineCtx):
    """verl's context of training or evaluation; the server's modes come with the commands."""

    def __exit__(self, kind, error, trace):
        if self.mode == "train" and self.zero_grad_on_exit and kind is None:
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, error, trace)


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=DEVICE)
@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device=DEVICE)
class MegashardEngine(BaseEngine):
    """Each of verl's ranks starts a rank of the server; its loss functions run here, on what the server gives."""

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        super().__init__()
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode, self.server, self.uses_adapters = None, None, True
        self.sharing = getattr(engine_config, "ulysses_sequence_parallel_size", 1)
        self._data_ranks = dist.group.WORLD
        if self.sharing > 1:  # those with the same place among the ranks of a sequence
            for place in range(self.sharing):
                ranks = list(range(place, dist.get_world_size(), self.sharing))
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    self._data_ranks = group

    def initialize(self):
        trained = None if self.engine_config.forward_only else self.optimizer_config
        if self.server is not None:
            self.server.stop()
        arguments, file = arguments_of(self.model_config, self.engine_config, trained, self.sharing)
        self.server = Server(arguments, fsdp2=file, sharing=self.sharing)
        self.schedule = None if trained is None else schedule_of(trained)
        self._saved = []

    @property
    def is_param_offload_enabled(self):
        return False

    @property
    def is_optimizer_offload_enabled(self):
        return False

    def to(self, device, model=True, optimizer=True, grad=True):
        """The server's memory stays where it is."""

    def train_mode(self, **kwargs):
        return Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs):
        return Mode(self, "eval", **kwargs)

    def get_data_parallel_rank(self):
        return dist.get_rank() // self.sharing

    def get_data_parallel_size(self):
        return dist.get_world_size() // self.sharing

    def get_data_parallel_group(self):
        return self._data_ranks

    def is_mp_src_rank_with_outputs(self):
        return dist.get_rank() % self.sharing == 0

    @contextlib.contextmanager
    def disable_adapter(self):
        self.uses_adapters = False
        try:
            yield
        finally:
            self.uses_adapters = True

    def _ask(self, command, *given, **named):
        """A command, if this rank is the one that talks for those which share its data."""
        return getattr(self.server.client, command)(*given, **named) if self.server.client else None

    def optimizer_zero_grad(self):
        self._ask("zero_grad")

    def optimizer_step(self):
        stepped = self._ask("step", lr=self.schedule.get_last_lr()[0])
        if stepped is not None and stepped["skipped"]:
            print(f"WARN: grad_norm is not finite: {stepped['grad_norm']}")
        return None if stepped is None else stepped["grad_norm"]

    def lr_scheduler_step(self):
        self.schedule.optimizer.step()  # torch wants it before
        self.schedule.step()
        return self.schedule.get_last_lr()[0]

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        tu.assign_non_tensor(data, sp_size=self.sharing)
        count = data["loss_mask"].sum()
        dist.all_reduce(count, group=self._data_ranks)
        tu.assign_non_tensor(data, batch_num_tokens=count.item(), dp_size=self.get_data_parallel_size())
        keeps_output = forward_only or tu.get_non_tensor_data(data=data, key="return_model_output", default=False)
        parts, indices = prepare_micro_batches(data=data, dp_group=self._data_ranks, same_micro_num_in_dp=True)
        outputs = []
        if self.is_mp_src_rank_with_outputs():
            for part in parts:
                outputs.append(self._micro_batch(part, loss_function, forward_only, 1 / len(parts)))
                if not keeps_output:
                    outputs[-1].pop("model_output")
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def _micro_batch(self, part, loss_function, forward_only, share):
        for key in ("calculate_sum_pi_squared", "distillation_use_topk"):
            if tu.get_non_tensor_data(data=part, key=key, default=False):
                raise UsageError(f"verl's {key} needs logits, which the server keeps; leave it out")
        if len(part.get("multi_modal_inputs", [])) > 0 and any(part["multi_modal_inputs"]):
            raise UsageError("the server takes no pictures from verl; train a text model")
        tokens = part["input_ids"]
        offsets = tokens.offsets()
        lengths = offsets.diff()
        temperature = torch.as_tensor(part["temperature"], dtype=torch.float32).cpu().reshape(-1)
        temperatures = None
        if (temperature != 1).any():
            temperatures = temperature.expand(len(lengths)).repeat_interleave(lengths.cpu())
        found = self.server.client.forward(
            tokens.values(), lengths, temperatures=temperatures, keep=not forward_only, base=not self.uses_adapters,
            entropies=bool(tu.get_non_tensor_data(data=part, key="calculate_entropy", default=False)))
        leaves = leaves_of(found, offsets.device, not forward_only)
        output = {KEYS[name]: torch.nested.nested_tensor_from_jagged(each, offsets) for name, each in leaves.items()}
        loss, metrics = torch.tensor(1.0), {}
        if loss_function is not None:
            loss, metrics = loss_function(model_output=output, data=part, dp_group=self._data_ranks)
        if not forward_only:
            loss.backward()
            self.server.client.backward(**weights_by(leaves), aux=share)
        return {"model_output": detach_tree(output), "loss": loss.detach().item(), "metrics": metrics}

    def get_per_tensor_param(self, **kwargs):
        """The whole weights, adapters merged, by files."""
        return self.server.weights(), None

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None, **kwargs):
        self._ask("save", local_path)
        if dist.get_rank() == 0:
            with open(os.path.join(local_path, STATE), "w") as file:
                json.dump({"schedule": self.schedule.last_epoch}, file)
            self._saved = [each for each in self._saved if each != local_path] + [local_path]
            while max_ckpt_to_keep and len(self._saved) > max_ckpt_to_keep:
                shutil.rmtree(self._saved.pop(0), ignore_errors=True)
        dist.barrier()

    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=True, **kwargs):
        self._ask("load", local_path)
        with open(os.path.join(local_path, STATE)) as file:
            steps = json.load(file)["schedule"]
        self.schedule = schedule_of(self.optimizer_config)
        for _ in range(steps):
            self.lr_scheduler_step()
        dist.barrier()
