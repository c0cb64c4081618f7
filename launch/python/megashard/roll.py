"""ROLL's training strategy on `megashard serve` (docs/serving_losses.md): strategy_name: megashard_train.

Importing this module lets ROLL's factory, which has no registry, make the strategy."""
import contextlib
import math
import sys

import torch
import torch.distributed as dist
from roll.distributed.strategy import factory
from roll.distributed.strategy.strategy import TrainStrategy
from roll.utils.functionals import append_to_dict

from .engine import Server, leaves_of, weights_by
from .program import UsageError

NAME = "megashard_train"
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}


def arguments_of(worker):
    """The options of `megashard serve` of ROLL's configuration; strategy_config has more, in snake case."""
    config, pipeline = worker.worker_config, worker.pipeline_config
    given, training = dict(config.strategy_args.strategy_config or {}), config.training_args
    decay = SCHEDULES.get(str(getattr(training.lr_scheduler_type, "value", training.lr_scheduler_type)))
    if decay is None:
        raise UsageError(f"ROLL's lr_scheduler_type {training.lr_scheduler_type} is not served; choose one of "
                         f"{', '.join(SCHEDULES)}")
    steps = max(training.max_steps // dist.get_world_size(), 1)
    warmup = training.warmup_steps or math.ceil(steps * (training.warmup_ratio or 0))
    sharing = given.get("context_parallel_size", 1) * given.get("tensor_model_parallel_size", 1)
    return sharing, dict(
        hf_model=config.model_args.model_name_or_path, use_torch_fsdp2=True, ckpt_format="torch_dcp",
        seq_length=pipeline.sequence_length, lr=training.learning_rate, weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1, adam_beta2=training.adam_beta2, adam_eps=training.adam_epsilon,
        clip_grad=pipeline.max_grad_norm, param_group_overrides=["*:wd_mult=1"],  # torch's AdamW decays all
        lr_decay_style=decay, train_iters=steps, lr_warmup_iters=warmup, seed=pipeline.seed) | given


class Output:
    """What ROLL's losses get in place of logits. They hand it to op_compute_log_probs() and op_compute_entropy(), which
    know what is in it; nothing else can be done with it."""

    def __init__(self, strategy, batch, keep):
        self.strategy, self.keep = strategy, keep
        self.mask = batch["attention_mask"].bool()
        self.lengths = self.mask.sum(1).cpu().numpy()
        self.tokens = batch["input_ids"][self.mask].cpu().numpy()
        self.leaves = {}
        self.ask()

    def ask(self):
        asks = self.strategy.asks_entropies[self.keep]
        found = self.strategy.server.client.forward(self.tokens, self.lengths, keep=self.keep, entropies=asks,
                                                    base=not self.strategy.uses_adapters)
        self.leaves = leaves_of(found, self.mask.device, self.keep) | self.leaves

    def entropies(self):
        """A loss that wants them says so after the first forward, which is then repeated; later ones know."""
        if "entropies" not in self.leaves:
            self.strategy.asks_entropies[self.keep] = True
            self.ask()
        return self.rows("entropies")

    def rows(self, name):
        """[B, T - 1]: column t is about token t + 1; 0 where there is none."""
        whole = torch.zeros(self.mask.shape, device=self.mask.device).masked_scatter(self.mask, self.leaves[name])
        return whole[:, :-1] * self.mask[:, 1:]


class Schedule:
    """The part of torch's schedulers that ROLL's workers use."""

    def __init__(self, client):
        self.client = client

    def get_last_lr(self):
        return [self.client.lr]


class Adapters:
    """The part of PEFT's models that ROLL's workers use."""

    def __init__(self, strategy):
        self.strategy = strategy

    @contextlib.contextmanager
    def disable_adapter(self):
        self.strategy.uses_adapters = False
        try:
            yield
        finally:
            self.strategy.uses_adapters = True


class MegashardStrategy(TrainStrategy):
    """Each of ROLL's training workers starts a rank of the server; its loss functions run here, on log-probabilities.
    Losses that take logits themselves (the critic's, distillation) are not served."""

    strategy_name = NAME

    def initialize(self, model_provider=None):
        sharing, arguments = arguments_of(self.worker)
        if sharing > 1:
            raise UsageError("ROLL's workers have data of their own each; leave context_parallel_size and "
                             "tensor_model_parallel_size out of strategy_config")
        self.server = Server(arguments)
        self.worker.rank_info.dp_rank, self.worker.rank_info.dp_size = dist.get_rank(), dist.get_world_size()
        self.model, self.scheduler = Adapters(self), Schedule(self.server.client)
        self.uses_adapters = True
        self.asks_entropies = {False: False, True: False}  # of forwards without and with gradients

    def get_data_input(self, batch):
        return batch  # each rank is a data-parallel one

    def unwrap_model(self):
        return self.model

    def op_compute_log_probs(self, logits, input_ids, attention_mask):
        return logits.rows("log_probs")

    def op_compute_entropy(self, logits, attention_mask):
        return logits.entropies()

    def op_compute_language_loss(self, logits, labels):
        """The sum of -log p of the labels that are not -100, which are the next tokens, by their number."""
        wanted = labels[:, 1:] != -100
        return -(logits.rows("log_probs") * wanted).sum() / wanted.sum().clamp_min(1)

    def forward_step(self, batch, forward_func):
        found = []
        for part in chunks_of(batch, batch.meta_info["micro_batch_size"]):
            found.append(forward_func(part, Output(self, part.batch, keep=False))[1])
        return {name: torch.cat([each[name] for each in found]) for name in found[0]}

    def train_step(self, batch, loss_func):
        """One optimizer step. The loss is scaled as by ROLL's FSDP2 strategy (apply_loss_scale)."""
        training = self.worker.worker_config.training_args
        self._count(batch)
        parts = chunks_of(batch, training.per_device_train_batch_size)
        metrics = {}
        for part in parts:
            output = Output(self, part.batch, keep=True)
            loss, found = loss_func(part, output)
            append_to_dict(metrics, found)
            if batch.meta_info.get("apply_loss_scale", True):
                loss = loss * len(parts) * dist.get_world_size()
            (loss / training.gradient_accumulation_steps).backward()
            self.server.client.backward(**weights_by(output.leaves), aux=1 / len(parts))
        stepped = self.server.client.step()
        metrics[f"{self.worker.cluster_name}/grad_norm"] = stepped["grad_norm"]
        return metrics

    def _count(self, batch):
        """How many tokens each mask of the loss has over all ranks, and how many rows; losses divide by them."""
        tokens, rows = {}, {}
        for key in batch.meta_info.get("loss_mask_keys", []):
            mask = batch.batch[key][:, 1:]
            counts = torch.stack([mask.sum(), (mask.sum(1) > 0).sum()]).double()
            dist.all_reduce(counts)
            tokens[key], rows[key] = counts.clamp_min(1).tolist()
        batch.meta_info["batch_num_tokens"], batch.meta_info["global_valid_samples"] = tokens, rows

    def save_checkpoint(self, save_dir, global_step, ckpt_id, tag="checkpoint", local_state_path=None, **kwargs):
        self.server.client.save(save_dir)
        return {}

    def load_checkpoint(self, load_dir, tag="checkpoint", **kwargs):
        self.server.client.load(load_dir)

    def load_states(self, include=None, non_blocking=False):
        """The server's memory stays where it is."""

    offload_states = load_states

    def setup_model_update(self, infer_cluster, model_update_name):
        raise UsageError("megashard_train does not send weights to ROLL's inference workers; server.weights() has "
                         "them, and --publish-weights writes them after each step")


def chunks_of(batch, size):
    return batch.chunk(chunks=max(len(batch) // size, 1))


def install():
    """Wraps the factory's function, also where workers' modules have imported it already."""
    made = factory.create_strategy

    def create_strategy(worker, *given, **named):
        is_ours = worker.worker_config.strategy_args.strategy_name == NAME
        return MegashardStrategy(worker) if is_ours else made(worker, *given, **named)

    for module in list(sys.modules.values()):
        if getattr(module, "create_strategy", None) is made:
            module.create_strategy = create_strategy


install()
