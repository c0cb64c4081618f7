"""A training that stops and goes on: at the same ranks, at others, from others' checkpoints, and with every option."""
import json
import os
import pathlib
import subprocess

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("MEGASHARD", str(ROOT / "build" / "launch" / "megashard"))
NETWORK = ("--num-layers 2 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 8 --seq-length 8 "
           "--tokenizer-type NullTokenizer --vocab-size 60").split()
LOOP = ("--mock-data --micro-batch-size 1 --global-batch-size 12 --lr 1e-2 --weight-decay 0.1 --log-interval 1 "
        "--eval-iters 0 --ckpt-format torch_dcp --use-torch-fsdp2").split()
SCHEDULE = "--lr-decay-iters 20 --lr-warmup-iters 2".split()
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0".split()
UNITS = "sub_modules_to_wrap: ['model.layers.{*}']\n"
USAGE = 2


def pretrain(folder, *flags, ranks=1, sharding=None, network=NETWORK, schedule=SCHEDULE, expect=0):
    """Runs it; the metrics, one dict a step, and what it printed."""
    config = folder / f"fsdp2_{sharding}.yaml"
    config.write_text(UNITS + (f"sharding_size: {sharding}\n" if sharding else ""))
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    launcher = ["launch", "-n", str(ranks), "--"] if ranks > 1 else []
    command = [PROGRAM, *launcher, "pretrain", *network, *LOOP, *schedule, "--fsdp2-config-path", str(config),
               "--peak-tflops", "1", "--metrics-file", str(metrics), *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == expect, done.stdout[-2000:] + done.stderr[-4000:]
    steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return steps, done.stdout + done.stderr


def numbers(steps):
    return [(step["step"], step["loss"], step["grad_norm"], step["lr"], step["consumed_samples"]) for step in steps]


def losses(steps):
    return [step["loss"] for step in steps]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def saved(folder):
    """Six steps with dropout, saved after 2, 4 and 6: the folder and the steps."""
    save = folder / "saved"
    return save, pretrain(folder, "--train-iters", 6, "--save", save, "--save-interval", 2)[0]


@pytest.fixture(scope="module")
def plain(folder):
    """Twelve steps without dropout at two ranks, saved after 2 and more."""
    save = folder / "plain"
    return save, pretrain(folder, *NO_DROPOUT, "--train-iters", 12, "--save", save, "--save-interval", 2, ranks=2)[0]


@pytest.mark.parametrize("ranks, sharding, flags", [(3, None, ["--optimizer", "sgd"]), (4, 2, ["--bf16"])])
def test_the_same_ranks_go_on_bit_for_bit(folder, ranks, sharding, flags):
    """Weights, optimizer, schedule, data and dropout, after a step that is asked for."""
    save = folder / f"same_{ranks}"
    straight, _ = pretrain(folder, "--train-iters", 6, "--save", save, "--save-interval", 4, *flags, ranks=ranks,
                           sharding=sharding)
    resumed, out = pretrain(folder, "--train-iters", 6, "--load", save, "--ckpt-step", 4, *flags, ranks=ranks,
                            sharding=sharding)
    assert numbers(resumed) == numbers(straight[4:])
    assert "dropout goes on" not in out and "checkpoint's differ" not in out


def test_other_ranks_and_shapes_go_on_within_rounding(folder, plain):
    """2 ranks, 1, 3, 2x2, 4 and 2 again: two steps each, from the step that the shape before saved."""
    load, straight = plain
    steps, step = straight[:2], 2
    for ranks, sharding in [(1, None), (3, None), (4, 2), (4, None), (2, None)]:
        save = folder / f"elastic_{step}"
        more, out = pretrain(folder, *NO_DROPOUT, "--train-iters", 12, "--load", load, "--ckpt-step", step, "--save",
                             save, "--save-interval", 2, "--exit-interval", 2, ranks=ranks, sharding=sharding)
        from_two_by_two = (ranks, sharding) == (4, None)
        assert ("ranks, and there are" in out) == (not from_two_by_two), out
        steps += more
        load, step = save, step + 2
    assert [step["consumed_samples"] for step in steps] == [step["consumed_samples"] for step in straight]
    assert [step["lr"] for step in steps] == [step["lr"] for step in straight]
    for here, there in zip(steps, straight, strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-6)  # sums run over other shares


def test_fresh_parts(folder, saved):
    """Each option leaves out its part and nothing else."""
    save, straight = saved
    load = ["--load", save, "--ckpt-step", 4]
    tuned, _ = pretrain(folder, "--train-iters", 1, *load, "--finetune")
    assert [step["step"] for step in tuned] == [1]
    assert tuned[0]["consumed_samples"] == 12 and tuned[0]["lr"] == straight[0]["lr"]
    assert tuned[0]["loss"] < straight[0]["loss"]
    fresh, _ = pretrain(folder, "--train-iters", 6, *load, "--no-load-optim")
    assert [step["step"] for step in fresh] == [5, 6]
    assert fresh[0]["loss"] == straight[4]["loss"]  # weights, data and dropout
    assert fresh[0]["lr"] == straight[0]["lr"] and fresh[1]["loss"] != straight[5]["loss"]
    other, out = pretrain(folder, "--train-iters", 6, *load, "--no-load-rng")
    assert losses(other)[0] != straight[4]["loss"] and other[0]["lr"] == straight[4]["lr"]
    assert "dropout goes on" not in out


def test_parts_that_were_not_saved(folder):
    save = folder / "weights"
    pretrain(folder, "--train-iters", 2, "--save", save, "--save-interval", 2, "--no-save-optim", "--no-save-rng")
    _, out = pretrain(folder, "--train-iters", 3, "--load", save, expect=USAGE)
    assert "missing keys" in out and "--no-load-optim starts with a fresh optimizer" in out
    resumed, out = pretrain(folder, "--train-iters", 3, "--load", save, "--no-load-optim")
    assert [step["consumed_samples"] for step in resumed] == [36]
    assert "no random states for these devices: dropout goes on from seed, iteration and rank" in out


def test_another_network_is_refused(folder, saved):
    save, straight = saved
    deeper = [*NETWORK]
    deeper[1] = "3"
    _, out = pretrain(folder, "--train-iters", 8, "--load", save, network=deeper, expect=USAGE)
    assert "has num_layers 2, and this run has 3: give --num-layers 2, or --use-checkpoint-args" in out
    wider = [*NETWORK]
    wider[3] = "32"
    _, out = pretrain(folder, "--train-iters", 8, "--load", save, "--finetune", network=wider, expect=1)
    assert "has sizes [128, 16] in" in out and "and [128, 32] here" in out
    taken, out = pretrain(folder, "--train-iters", 6, "--load", save, "--ckpt-step", 4, "--use-checkpoint-args",
                          network=[])
    assert "num_layers 2" in out
    assert numbers(taken) == numbers(straight[4:])


def test_partial_loads(folder, saved):
    """Another head: its weight is missing, and is only left at its first values when that is asked for."""
    save, _ = saved
    flags = ["--train-iters", 1, "--load", save, "--finetune", "--untie-embeddings-and-output-weights"]
    _, out = pretrain(folder, *flags, expect=USAGE)
    assert "missing keys (1): model.lm_head.weight" in out and "--dist-ckpt-strictness log_all" in out
    steps, out = pretrain(folder, *flags, "--dist-ckpt-strictness", "log_all")
    assert "WARNING: missing keys (1): model.lm_head.weight: they keep their first values" in out
    assert 3.5 < steps[0]["loss"] < 6  # first values, not whatever the memory held


def test_the_schedule(folder, saved):
    save, straight = saved
    load = ["--train-iters", 6, "--load", save, "--ckpt-step", 4, "--min-lr", "1e-3"]
    _, out = pretrain(folder, *load, expect=USAGE)  # before a weight is read
    assert "min_lr is 0.001 by the flags, but 0.0 in the checkpoint" in out
    kept, _ = pretrain(folder, *load, "--use-checkpoint-opt_param-scheduler")
    assert numbers(kept) == numbers(straight[4:])
    new, out = pretrain(folder, *load, "--override-opt_param-scheduler")
    assert new[0]["lr"] > straight[4]["lr"]
    assert "the flags of this run count where the checkpoint's differ: min_lr 0.0 -> 0.001" in out


def test_a_batch_that_does_not_divide_is_refused_before_loading(folder, saved):
    save, _ = saved
    _, out = pretrain(folder, "--train-iters", 8, "--load", save, ranks=5, expect=USAGE)
    assert "global batch size 12 is not divisible by 5" in out and "number of ranks" in out and "loading" not in out


def test_a_ramp_goes_on_at_more_ranks(folder):
    """Batches of 2, 2, 4, 6, 8 and then 12: a step is saved before each larger one, as Megatron does."""
    save = folder / "ramp"
    flags = [*NO_DROPOUT, "--rampup-batch-size", 2, 2, 20, "--train-samples", 60]
    samples = ["--lr-decay-samples", "200"]
    straight, _ = pretrain(folder, *flags, "--save", save, "--save-interval", 100, schedule=samples)
    assert [step["global_batch_size"] for step in straight] == [2, 2, 4, 6, 8, 12, 12, 12]
    assert sorted(int(path.name[5:]) for path in save.glob("iter_*")) == [2, 3, 4, 5, 8]
    load = [*flags, "--load", save, "--ckpt-step"]
    _, out = pretrain(folder, *load, 2, ranks=4, schedule=samples, expect=USAGE)
    assert "global batch size 6 is not divisible by 4" in out
    resumed, _ = pretrain(folder, *load, 4, ranks=4, schedule=samples)
    assert [step["consumed_samples"] for step in resumed] == [step["consumed_samples"] for step in straight[4:]]
    assert losses(resumed) == pytest.approx(losses(straight[4:]), rel=1e-6)  # sums run over other shares


def test_steps_of_others(folder, plain):
    """What PyTorch's DCP wrote without Megatron's entries, and a release of weights as converters write it."""
    save, straight = plain
    whole = folder / "whole.pt"
    dcp_to_torch_save(str(save / "iter_0000002"), str(whole))
    state = torch.load(whole, weights_only=False)
    theirs = folder / "pytorch"
    dcp.save({"model": state["model"], "optimizer": state["optimizer"]}, checkpoint_id=theirs / "iter_0000002",
             no_dist=True)
    (theirs / "latest_checkpointed_iteration.txt").write_text("2")
    resumed, out = pretrain(folder, *NO_DROPOUT, "--train-iters", 4, "--load", theirs, ranks=2)
    assert numbers(resumed) == numbers(straight[2:4])
    assert "2 steps of these flags' batch are 24" in out and "the checkpoint has no schedule: it goes on from 24" in out

    release = folder / "release"
    dcp.save({"model": state["model"], "checkpoint_version": 3.0}, checkpoint_id=release / "release", no_dist=True)
    (release / "latest_checkpointed_iteration.txt").write_text("release")
    first, out = pretrain(folder, *NO_DROPOUT, "--train-iters", 1, "--load", release)
    tuned, _ = pretrain(folder, *NO_DROPOUT, "--train-iters", 1, "--load", save, "--ckpt-step", 2, "--finetune")
    assert numbers(first) == numbers(tuned) and "loading release checkpoint from" in out


def test_a_missing_checkpoint(folder):
    empty = folder / "empty"
    empty.mkdir()
    _, out = pretrain(folder, "--train-iters", 1, "--load", empty)
    assert "will not load any checkpoints and will start from random" in out
    _, out = pretrain(folder, "--train-iters", 1, "--load", empty, "--exit-on-missing-checkpoint", expect=USAGE)
    assert "--exit-on-missing-checkpoint" in out and "nothing to load" in out
