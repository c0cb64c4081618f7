"""Steps of PyTorch's DCP whose keys are not Megatron's: dcp.save(model.state_dict()), what ROLL writes, and others.

Two FSDP2 ranks of PyTorch train, save in each form and train on: we go on from each with their losses, and convert each
into their weights. And they load what --ckpt-bare-names writes.
"""
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import megashard
from forked_ranks import failure_in_ranks
from megashard import FAILURE, TRACKER, USAGE, convert, losses, mock_samples, run

STEPS, STOP, BATCH, LENGTH, WORDS = 4, 2, 4, 16, 100
TRAINING = (f"--mock-data --seq-length {LENGTH} --micro-batch-size 1 --global-batch-size {BATCH} --lr 1e-3 "
            "--lr-decay-style constant --weight-decay 0 --clip-grad 0 --peak-tflops 1 " + megashard.RUN)
MODELS = {"untied": False, "tied": True}


def save_all_forms(folder, model, optimizer):
    weights, named = model.state_dict(), get_optimizer_state_dict(model, optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    random = {"cpu": torch.get_rng_state(), "numpy": (1, "a"), "random": (3, (1, 2), None)}
    forms = {
        "bare": weights,
        "roll": {**weights, "optimizer": optimizer, "scheduler": scheduler, "rng_state": random},
        "named": {**weights, "optimizer": named},
        "app": {"app": {"model": get_model_state_dict(model), "optim": named}},
        "numbered": {"model": weights, "optimizer": optimizer.state_dict()},
        "base": model.model.state_dict(),
    }
    for form, state in forms.items():
        dcp.save(state, checkpoint_id=str(folder / form / f"iter_{STOP:07d}"))


def train(folder, name):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(folder / name)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    told = []
    for step, batch in enumerate(load_file(folder / "batches")["tokens"]):
        if step == STOP:
            save_all_forms(folder / f"theirs_{name}", model, optimizer)
            whole = {key: value.full_tensor() for key, value in model.state_dict().items()}
            if rank == 0:
                save_file({key: value.clone() for key, value in whole.items()}, folder / f"weights_{name}")
        mine = batch.chunk(world)[rank]
        logits = model(mine[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        told.append(mean.item())
    if rank == 0:
        (folder / f"losses_{name}").write_text(json.dumps(told))


def load_ours(folder):
    """Loads strictly into other values, with the names of PyTorch's functions; compares with one file of them."""
    model = AutoModelForCausalLM.from_pretrained(folder / "untied")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    state = {**model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=str(folder / "ours" / f"iter_{STOP:07d}"))
    whole = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()
             if key != "optimizer"}
    moments = {key: value["exp_avg"].full_tensor() for key, value in state["optimizer"]["state"].items()}
    if dist.get_rank() == 0:
        save_file(whole, folder / "read_weights")
        save_file(moments, folder / "read_moments")


def pytorch(folder):
    failures = {name: failure_in_ranks(2, folder, train, folder, name) for name in MODELS}
    failures["ours"] = failure_in_ranks(2, folder, load_ours, folder)
    (folder / "failures").write_text(json.dumps(failures))


def pretrain(folder, name, *flags, **options):
    return megashard.pretrain(folder, "--hf-model", folder / name, *flags, defaults=TRAINING, **options)


@pytest.fixture(scope="module")
def trained(folder):
    for name, tied in MODELS.items():
        config = Qwen3Config(
            vocab_size=WORDS + 1, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=32, initializer_range=0.2, eos_token_id=WORDS,
            tie_word_embeddings=tied)
        torch.manual_seed(5)
        Qwen3ForCausalLM(config).save_pretrained(folder / name)
    tokens = mock_samples(folder, STEPS * BATCH, length=LENGTH, vocabulary=WORDS + 1, end=WORDS)
    save_file({"tokens": tokens.view(STEPS, BATCH, LENGTH + 1)}, folder / "batches")
    pretrain(folder, "untied", "--train-iters", STOP, "--save", folder / "ours", "--save-interval", STOP,
             "--save-hf", folder / "ours_hf", "--ckpt-bare-names", ranks=2)
    run(sys.executable, __file__, folder, timeout=300)
    for name in MODELS:
        for form in (folder / f"theirs_{name}").iterdir():
            (form / TRACKER).write_text(str(STOP))
    failures = json.loads((folder / "failures").read_text())
    assert not any(failures.values()), failures
    return folder


@pytest.mark.parametrize("name, form, ranks", [
    ("untied", "bare", 1), ("untied", "roll", 2), ("untied", "named", 1), ("untied", "app", 2),
    ("untied", "numbered", 1), ("tied", "roll", 1), ("tied", "base", 2)])
def test_a_training_goes_on_from_each(trained, name, form, ranks):
    has_optimizer = form not in ("bare", "base")
    last = STEPS if has_optimizer else STOP + 1  # fresh moments make other steps
    steps, out = pretrain(trained, name, "--train-iters", last, "--load", trained / f"theirs_{name}" / form,
                          *([] if has_optimizer else ["--no-load-optim"]), ranks=ranks)
    expected = json.loads((trained / f"losses_{name}").read_text())
    assert losses(steps) == pytest.approx(expected[STOP:last], rel=1e-6), out  # other kernels
    assert ("the step's keys are" in out) == (form != "numbered")


@pytest.mark.parametrize("name, form", [("untied", "bare"), ("untied", "roll"), ("untied", "app"), ("tied", "base")])
def test_each_becomes_a_model_of_hugging_face(trained, name, form):
    step = trained / f"theirs_{name}" / form / f"iter_{STOP:07d}"
    target = trained / f"hf_{name}_{form}"
    convert("dcp_to_hf", "--load-dir", step, "--save-dir", target, "--model-assets-dir", trained / name)
    written, wanted = load_file(target / "model.safetensors"), load_file(trained / f"weights_{name}")
    if name == "tied":
        del wanted["lm_head.weight"]
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[key], value) for key, value in wanted.items())


def test_a_bare_step_becomes_one_of_megatrons_format(trained):
    step = trained / "theirs_untied" / "named" / f"iter_{STOP:07d}"
    convert("dcp_to_torch_dist", "--load-dir", step, "--save-dir", trained / "dist")
    steps, _ = pretrain(trained, "untied", "--train-iters", STEPS, "--load", trained / "dist", "--ckpt-format",
                        "torch_dist")
    assert losses(steps) == pytest.approx(json.loads((trained / "losses_untied").read_text())[STOP:], rel=1e-6)
    done = convert("dcp_to_torch_dist", "--load-dir", trained / "theirs_untied" / "roll" / f"iter_{STOP:07d}",
                   "--save-dir", trained / "dist_of_numbers", expect=FAILURE)
    assert "numbers the optimizer's state" in done.stderr and "--ckpt-convert-format" in done.stderr


def test_pytorch_loads_what_is_written_with_bare_names(trained):
    read, wanted = load_file(trained / "read_weights"), load_file(trained / "ours_hf" / "model.safetensors")
    assert read.keys() == wanted.keys()
    assert all(torch.equal(read[key], value) for key, value in wanted.items())
    moments = load_file(trained / "read_moments")
    assert moments.keys() == wanted.keys() and all(each.abs().max() > 0 for each in moments.values())
    straight, _ = pretrain(trained, "untied", "--train-iters", STEPS)
    again, _ = pretrain(trained, "untied", "--train-iters", STEPS, "--load", trained / "ours",
                        "--override-opt_param-scheduler")
    assert losses(again) == pytest.approx(losses(straight)[STOP:], rel=1e-6)  # at one rank instead of two


def test_messages_have_the_keys_of_the_step(trained):
    """A model of three layers, and state with arbitrary values."""
    config = json.loads((trained / "untied" / "config.json").read_text())
    other = trained / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": None}))
    bare = trained / "theirs_untied" / "bare"
    _, out = pretrain(trained, "other", "--from-scratch", "--train-iters", 3, "--load", bare, "--no-load-optim",
                      expect=USAGE)
    assert "missing keys (11): model.layers.2.input_layernorm.weight, " in out and "model.model." not in out
    groups = trained / "groups" / f"iter_{STOP:07d}"
    weights = load_file(trained / "weights_untied")
    state = {number: {"exp_avg": torch.zeros_like(each)} for number, each in enumerate(weights.values())}
    dcp.save({**weights, "optimizer": {"state": state, "param_groups": [{"lr": 1.0}, {"lr": 2.0}]}},
             checkpoint_id=groups, no_dist=True)
    (trained / "groups" / TRACKER).write_text(str(STOP))
    _, out = pretrain(trained, "untied", "--train-iters", 3, "--load", trained / "groups", expect=FAILURE)
    assert "numbered over several groups" in out and "--no-load-optim" in out


if __name__ == "__main__":
    torch.set_num_threads(1)
    pytorch(Path(sys.argv[1]))
