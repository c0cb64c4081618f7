"""Two ranks of verl's TrainingWorker on megashard's engine, on a CPU: three steps of verl's policy loss, and what
transformers and AdamW find on the rows of all ranks. FOLDER/found.json has both.

usage: verl_engine.py MODEL FOLDER
"""
import functools
import json
import pathlib
import sys
import types

import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from forked_ranks import failure_in_ranks

for name in ("uvicorn", "fastapi"):  # of rollout servers, which the worker's module imports and does not start
    stand_in = sys.modules.setdefault(name, types.ModuleType(name))
    stand_in.Server = stand_in.Config = stand_in.FastAPI = object

from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.utils import tensordict_utils as tu
from verl.workers import engine as engines  # noqa: F401: the worker would import it in each rank
from verl.workers import engine_workers
from verl.workers.config import (ActorConfig, CriticConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig,
                                 PolicyLossConfig, TrainingWorkerConfig)
from verl.workers.utils.losses import ppo_loss, value_loss
from verl.workers.utils.padding import left_right_2_no_padding

ROWS, PROMPT, ANSWER, STEPS, WORDS = 8, 6, 7, 3, 60
OPTIMIZER = dict(lr=2e-3, weight_decay=0.1, total_training_steps=10, lr_warmup_steps=2, clip_grad=0.5)


class Cpu(PlatformCUDA):
    """What verl asks of a device, of a CPU."""
    device_name = "cpu"
    device_module = types.SimpleNamespace(max_memory_allocated=lambda: 0, max_memory_reserved=lambda: 0)

    def current_device(self):
        return "cpu"

    def communication_backend_name(self):
        return "gloo"


def batch(step):
    """The rows of all ranks, padded as verl's rollouts are."""
    draw = torch.Generator().manual_seed(step)
    whole = lambda low, high, size: torch.randint(low, high, size, generator=draw)
    before = torch.arange(PROMPT) >= PROMPT - whole(2, PROMPT + 1, (ROWS, 1))
    behind = torch.arange(ANSWER) < whole(2, ANSWER + 1, (ROWS, 1))
    prompts, responses = (whole(1, WORDS, mask.shape) * mask for mask in (before, behind))
    attention = torch.cat([before, behind], 1).long()
    return TensorDict({
        "prompts": prompts, "responses": responses, "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention, "position_ids": (attention.cumsum(1) - 1).clamp_min(0),
        "response_mask": behind.long(), "old_log_probs": -torch.rand(ROWS, ANSWER, generator=draw) * 6,
        "advantages": torch.randn(ROWS, ANSWER, generator=draw)}, [ROWS])


def prepared(data):
    data = left_right_2_no_padding(data)
    tu.assign_non_tensor(data, temperature=0.8, calculate_entropy=True, global_batch_size=ROWS, use_dynamic_bsz=False,
                         micro_batch_size_per_gpu=2, update_lr_scheduler=True)
    return data


def worker(model, model_type="language_model"):
    return engine_workers.TrainingWorker(TrainingWorkerConfig(
        model_type=model_type,
        model_config=HFModelConfig(path=model, load_tokenizer=False, use_remove_padding=True,
                                   enable_gradient_checkpointing=False),
        engine_config=FSDPEngineConfig(strategy="fsdp2", dtype="float32", max_token_len_per_gpu=64,
                                       micro_batch_size_per_gpu=2, use_dynamic_bsz=False),
        optimizer_config=FSDPOptimizerConfig(**OPTIMIZER)))


def twin(model, loss):
    """Loss and gradient norm of each step, with all rows in one batch on one rank."""
    network = AutoModelForCausalLM.from_pretrained(model).float()
    optimizer = torch.optim.AdamW(network.parameters(), lr=OPTIMIZER["lr"], weight_decay=OPTIMIZER["weight_decay"])
    steps = []
    for step in range(STEPS):
        data = prepared(batch(step))
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(data["loss_mask"].sum()))
        rows = data["input_ids"].unbind()
        every = [(network(row[None]).logits[0] / 0.8).log_softmax(-1) for row in rows]
        now = torch.cat([each.gather(1, row.roll(-1)[:, None])[:, 0] for each, row in zip(every, rows)])
        entropy = torch.cat([-(each.exp() * each).sum(-1) for each in every])
        nested = lambda flat: torch.nested.nested_tensor_from_jagged(flat, data["input_ids"].offsets())
        found, _ = loss(model_output={"log_probs": nested(now), "entropy": nested(entropy)}, data=data)
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER["lr"] * min(1, step / OPTIMIZER["lr_warmup_steps"])
        optimizer.zero_grad()
        found.backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), OPTIMIZER["clip_grad"])
        optimizer.step()
        steps.append({"loss": found.item(), "grad_norm": norm.item()})
    return network, steps


def train(model, folder):
    platform_manager.set_platform(Cpu())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    import megashard.verl  # model.external_lib

    loss = functools.partial(ppo_loss, config=ActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2, entropy_coeff=0.01,
        policy_loss=PolicyLossConfig(loss_mode="vanilla")))
    ours = worker(model)
    ours.reset()
    ours.set_loss_fn(loss)
    steps = []
    mine = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    for step in range(STEPS):
        metrics = tu.get(ours.train_batch(prepared(batch(step)[mine])), "metrics")
        steps.append({name: metrics[name] for name in ("loss", "grad_norm", "lr")})
    ours.save_checkpoint(f"{folder}/saved")
    weights = dict(ours.engine.get_per_tensor_param()[0])
    data = prepared(batch(9)[mine])
    before = tu.get(ours.infer_batch(data), "log_probs")
    ours.train_batch(prepared(batch(4)[mine]))
    ours.load_checkpoint(f"{folder}/saved")
    after = tu.get(ours.infer_batch(prepared(batch(9)[mine])), "log_probs")
    found = {"steps": steps, "again": torch.equal(before.values(), after.values())}
    if rank == 0:
        network, found["twin"] = twin(model, loss)
        found["weights"] = max(float((weights[name] - each.detach()).abs().max())
                               for name, each in network.named_parameters())
    dist.barrier()
    ours.engine.server.stop()
    critic = worker(model, "value_model")
    critic.reset()
    critic.set_loss_fn(functools.partial(value_loss, config=CriticConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2)))
    data = prepared(batch(0)[mine])
    tu.assign_non_tensor(data, calculate_entropy=False)
    data["values"], data["returns"] = data["old_log_probs"], data["advantages"]
    found["critic"] = tu.get(critic.train_batch(data), "metrics")["grad_norm"]
    critic.engine.server.stop()
    if rank == 0:
        pathlib.Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(failure_in_ranks(2, sys.argv[2], train, *sys.argv[1:]) or None)
