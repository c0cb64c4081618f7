"""Trainings in fp16: Megatron's loss scale, skipped steps, and their state in checkpoints."""
import pytest
import torch

import megashard
from megashard import LAYERS, NO_DROPOUT

NETWORK = megashard.network(length=8)
LOOP = ("--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --lr-decay-iters 40 --lr-warmup-iters 8 --log-interval 1 "
        "--mock-data --eval-iters 0 --use-torch-fsdp2 --ckpt-format torch_dcp --attention-dropout 0 --hidden-dropout 0 "
        "--initial-loss-scale 4194304 --loss-scale-window 3 --hysteresis 2 --min-loss-scale 64 ")
# by name: the FSDP2 file, flags
STORED = {"--fp16": (LAYERS, ["--fp16"]), "param_dtype": (LAYERS + "param_dtype: fp16\nreduce_dtype: fp32\n", [])}


def pretrain(folder, stored, *flags, **options):
    config, more = STORED[stored]
    return megashard.pretrain(folder, *flags, *more, defaults=NETWORK + LOOP, config=config, **options)


def numbers(steps):
    return [(step["step"], step["loss"], step["grad_norm"], step["lr"], step["loss_scale"], step["skipped"])
            for step in steps]


@pytest.fixture
def megatron(monkeypatch):
    """Its scaler, on the CPU."""
    from megatron.core.optimizer import grad_scaler

    tensor = torch.tensor
    monkeypatch.setattr(grad_scaler.torch, "tensor", lambda *args, device=None, **options: tensor(*args, **options))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, device=None: self)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return grad_scaler.DynamicGradScaler(initial_scale=4194304.0, min_scale=64.0, growth_factor=2.0,
                                         backoff_factor=0.5, growth_interval=3, hysteresis=2)


@pytest.mark.parametrize("stored", STORED)
def test_the_scale_is_megatrons(folder, megatron, stored):
    steps, out = pretrain(folder, stored, "--train-iters", 24, ranks=2)
    for step in steps:
        megatron.update(bool(step["skipped"]))
        assert step["loss_scale"] == megatron.scale.item(), step
        assert (step["grad_norm"] is None) == bool(step["skipped"])
    skipped = [step["skipped"] for step in steps]
    changes = {after["loss_scale"] / before["loss_scale"] for before, after in zip(steps, steps[1:])}
    assert skipped[0] and not all(skipped) and changes == {0.5, 1, 2}, "it falls, stays and grows"
    for before, after in zip(steps, steps[1:]):  # the rate waits for steps that are taken
        assert (after["lr"] == before["lr"]) == bool(before["skipped"])
    taken = [step["loss"] for step in steps if not step["skipped"]]
    assert taken[-1] < taken[0]
    assert "number of skipped iterations:   1 |" in out and f"loss scale: {steps[0]['loss_scale']:.1f} |" in out
    assert "skips the step and lowers the scale, as in Megatron" in out


@pytest.mark.parametrize("stored, checkpoint", [("--fp16", "torch_dist"), ("param_dtype", "torch_dcp")])
def test_a_run_goes_on_bit_for_bit(folder, megatron, stored, checkpoint):
    """After steps within the overflows of the start, and within the window after them."""
    save = folder / f"{stored}_{checkpoint}"
    flags = ["--train-iters", 16, "--ckpt-format", checkpoint]
    straight, _ = pretrain(folder, stored, *flags, "--save", save, "--save-interval", 1, ranks=2)
    trackers = set()
    for step in (3, 13):
        resumed, out = pretrain(folder, stored, *flags, "--load", save, "--ckpt-step", step, ranks=2)
        assert numbers(resumed) == numbers(straight[step:]), out
        if checkpoint == "torch_dist":  # Megatron reads it there
            common = torch.load(save / f"iter_{step:07d}" / "common.pt", weights_only=False)
            megatron.load_state_dict(common["optimizer"]["grad_scaler"])
            assert megatron.scale.item() == straight[step - 1]["loss_scale"] and megatron.scale.shape == (1,)
            trackers.add((megatron._growth_tracker, megatron._hysteresis_tracker))
    assert checkpoint == "torch_dcp" or len(trackers) == 2
    other, out = pretrain(folder, stored, *flags, "--load", save, "--ckpt-step", 13, "--loss-scale", 512, ranks=2)
    assert {step["loss_scale"] for step in other} == {512.0}
    assert "the checkpoint's dynamic loss scale is left, since this run has none" in out


def test_a_checkpoint_without_a_scale_starts_it_anew(folder):
    save = folder / "bf16"
    megashard.pretrain(folder, "--train-iters", 3, "--exit-interval", 2, "--save", save, "--save-interval", 2,
                       defaults=NETWORK + LOOP)
    steps, out = pretrain(folder, "param_dtype", "--train-iters", 3, "--load", save)
    assert "the checkpoint has no dynamic loss scale: it starts from its first value" in out
    assert steps[0]["loss_scale"] == 4194304.0  # and has used up one of its two overflows


@pytest.mark.parametrize("stored", STORED)
def test_the_simulated_device_skips_the_same_steps(folder, stored):
    flags = ["--train-iters", 16]
    on_cpu, _ = pretrain(folder, stored, *flags, ranks=2)
    on_sim, out = pretrain(folder, stored, *flags, "--device", "sim", ranks=2)
    assert [step["skipped"] for step in on_sim] == [step["skipped"] for step in on_cpu], out
    assert [step["loss_scale"] for step in on_sim] == [step["loss_scale"] for step in on_cpu]
    for mine, theirs in zip(on_sim, on_cpu):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-3)


def test_a_constant_scale_changes_nothing_in_fp32(folder):
    """A power of two: as Megatron's, in any precision."""
    flags = ["--train-iters", 3, *NO_DROPOUT]
    scaled, _ = megashard.pretrain(folder, *flags, "--loss-scale", 1024, defaults=NETWORK + LOOP)
    plain, out = megashard.pretrain(folder, *flags, defaults=NETWORK + LOOP)
    assert megashard.losses(scaled) == megashard.losses(plain)
    assert [step["grad_norm"] for step in scaled] == [step["grad_norm"] for step in plain]
    assert scaled[0]["loss_scale"] == 1024.0 and "loss_scale" not in plain[0]
    assert "--hysteresis has no effect: it is of a dynamic loss scale, and only fp16 has one" in out
