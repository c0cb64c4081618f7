"""ROLL's strategy on `megashard serve`. ROLL is not on PyPI: stand-ins have what its workers call and give."""
import importlib
import sys
import types

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

import megashard
import test_serve  # which loads the package under the name "door"

ROWS, LENGTH, STEPS, LR, WORDS = 4, 12, 3, 2e-3, 60


class DataProto:
    """Rows of tensors, and words about them."""

    def __init__(self, batch, meta_info):
        self.batch, self.meta_info = batch, meta_info

    def __len__(self):
        return len(self.batch["input_ids"])

    def chunk(self, chunks):
        parts = {name: each.chunk(chunks) for name, each in self.batch.items()}
        return [DataProto({name: each[i] for name, each in parts.items()}, self.meta_info) for i in range(chunks)]


class TrainStrategy:
    def __init__(self, worker):
        self.worker = worker


def append_to_dict(into, found):
    for name, value in found.items():
        into.setdefault(name, []).append(value)


@pytest.fixture(scope="module")
def roll():
    """The module, with ROLL's own by stand-ins; its factory knows no strategy of ours."""
    def create_strategy(worker):
        raise ValueError(worker.worker_config.strategy_args.strategy_name)

    stand_ins = {"roll.distributed.strategy.factory": {"create_strategy": create_strategy},
                 "roll.distributed.strategy.strategy": {"TrainStrategy": TrainStrategy},
                 "roll.utils.functionals": {"append_to_dict": append_to_dict},
                 "roll.pipeline.base_worker": {"create_strategy": create_strategy}}
    with pytest.MonkeyPatch.context() as patch:
        for path, content in stand_ins.items():
            names = path.split(".")
            for end in range(1, len(names)):
                package = sys.modules.get(".".join(names[:end])) or types.ModuleType(".".join(names[:end]))
                package.__path__ = []
                patch.setitem(sys.modules, ".".join(names[:end]), package)
            module = types.ModuleType(path)
            vars(module).update(content)
            patch.setitem(sys.modules, path, module)
            setattr(sys.modules[path.rpartition(".")[0]], names[-1], module)
        patch.setenv("MEGASHARD_BIN", str(megashard.PROGRAM))
        yield importlib.import_module("door.roll")


def worker(folder, name):
    space = types.SimpleNamespace
    return space(
        cluster_name="actor_train", rank_info=space(dp_rank=None, dp_size=None),
        pipeline_config=space(sequence_length=LENGTH, max_grad_norm=0.5, seed=1),
        worker_config=space(
            strategy_args=space(strategy_name=name, strategy_config={"neat_packing": True, "seq_length": 64}),
            model_args=space(model_name_or_path=str(folder / "model")),
            training_args=space(learning_rate=LR, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8,
                                lr_scheduler_type="constant", warmup_steps=0, warmup_ratio=None, max_steps=STEPS,
                                per_device_train_batch_size=2, gradient_accumulation_steps=2)))


def batch(step):
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(5, LENGTH + 1, (ROWS, 1), generator=draw)
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": torch.randint(1, WORDS, (ROWS, LENGTH), generator=draw) * mask, "attention_mask": mask,
            "response_mask": mask * (torch.arange(LENGTH) >= 3),
            "old_log_probs": -torch.rand(ROWS, LENGTH - 1, generator=draw) * 6,
            "advantages": torch.randn(ROWS, LENGTH - 1, generator=draw)}


def loss_of(rows, log_probs, entropies, tokens):
    """PPO with an entropy bonus, over all of the step's tokens."""
    mask = rows["response_mask"][:, 1:]
    ratio = (log_probs - rows["old_log_probs"]).exp()
    policy = -torch.min(ratio * rows["advantages"], ratio.clamp(0.8, 1.2) * rows["advantages"])
    return ((policy - 0.01 * entropies) * mask).sum() / tokens


@pytest.fixture(scope="module")
def strategy(folder, roll):
    torch.manual_seed(1)
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        initializer_range=0.3)).save_pretrained(folder / "model")
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
    try:
        made = roll.factory.create_strategy(worker(folder, "megashard_train"))
        made.initialize()
        yield made
        made.server.stop()
    finally:
        dist.destroy_process_group()


def test_the_factory_makes_ours_and_its_own(folder, roll, strategy):
    assert isinstance(strategy, TrainStrategy) and strategy.worker.rank_info.dp_size == 1
    assert sys.modules["roll.pipeline.base_worker"].create_strategy is roll.factory.create_strategy
    with pytest.raises(ValueError, match="fsdp2_train"):
        roll.factory.create_strategy(worker(folder, "fsdp2_train"))
    with pytest.raises(test_serve.server.MegashardError, match="does not send weights"):
        strategy.setup_model_update(None, "")


def test_what_the_server_refuses_is_raised(folder, roll, strategy):
    wrong = roll.factory.create_strategy(worker(folder, "megashard_train"))
    wrong.worker.worker_config.strategy_args.strategy_config["rollouts"] = "here"
    with pytest.raises(test_serve.server.MegashardError, match="--rollouts is for pretrain; with serve the client"):
        wrong.initialize()


def test_steps_are_those_of_transformers(folder, strategy):
    def loss_func(data, output):
        given = data.batch["input_ids"], data.batch["attention_mask"]
        tokens = data.meta_info["batch_num_tokens"]["response_mask"]
        loss = loss_of(data.batch, strategy.op_compute_log_probs(output, *given),
                       strategy.op_compute_entropy(output, given[1]), tokens)
        return loss, {"loss": loss.item()}

    def log_probs_of(data, output):
        return None, {"log_probs": strategy.op_compute_log_probs(output, None, None)}

    model = Qwen3ForCausalLM.from_pretrained(folder / "model").float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    for step in range(STEPS):
        rows = batch(step)
        every = model(rows["input_ids"], attention_mask=rows["attention_mask"]).logits[:, :-1].log_softmax(-1)
        now = every.gather(2, rows["input_ids"][:, 1:, None])[..., 0]
        seen = strategy.forward_step(DataProto(rows, {"micro_batch_size": 2}), log_probs_of)["log_probs"]
        mask = rows["attention_mask"][:, 1:]
        torch.testing.assert_close(seen, (now * mask).detach(), atol=5e-5, rtol=0)
        metrics = strategy.train_step(DataProto(rows, {"loss_mask_keys": ["response_mask"]}), loss_func)
        loss = loss_of(rows, now, -(every.exp() * every).sum(-1), rows["response_mask"][:, 1:].sum())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert sum(metrics["loss"]) == pytest.approx(loss.item(), abs=2e-6)
        assert metrics["actor_train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert strategy.scheduler.get_last_lr() == [LR]


def test_a_checkpoint_brings_the_weights_back(folder, strategy):
    ask = lambda: strategy.server.client.forward([3, 4, 5], [3])["log_probs"].tolist()
    strategy.save_checkpoint(str(folder / "saved"), global_step=3, ckpt_id="3")
    before = ask()
    strategy.server.client.forward_backward([3, 4, 5], [3], [1, 1, 1])
    strategy.server.client.step()
    assert ask() != before
    strategy.load_checkpoint(str(folder / "saved"))
    assert ask() == before
    weights = dict(strategy.server.weights())
    assert weights["model.norm.weight"].shape == (32,)
