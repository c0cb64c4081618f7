"""`--save-best`: the checkpoint with the lowest validation loss stays, also when the run is resumed."""
import json
import re

import pytest

import megashard
from megashard import PROGRAM, USAGE, convert, run

TRAINING = megashard.network() + (
    "--mock-data --micro-batch-size 1 --global-batch-size 4 --use-torch-fsdp2 --ckpt-format torch_dcp --eval-iters 2 "
    "--eval-interval 2 --save-interval 5 --most-recent-k 1 --save-best --lr-decay-style constant --log-interval 1 ")


def steps_in(save):
    return sorted(int(path.name[5:]) for path in save.glob("iter_*"))


def best_of(save):
    mark = json.loads((save / "best_checkpoint.json").read_text())
    return mark["iteration"], mark["validation_loss"]


def lowest(metrics):
    """The lowest loss of the evaluations and its step; the first of equal ones."""
    return min((step["validation_loss"], step["step"]) for step in metrics if "validation_loss" in step)


def pretrain(folder, save, *flags, **options):
    return megashard.pretrain(folder, "--save", save, *flags, defaults=TRAINING, **options)


@pytest.fixture(scope="module")
def diverged(folder):
    """Six steps that learn, and six with a rate that is too large: the best step is neither the first nor the last."""
    save = folder / "run"
    first, _ = pretrain(folder, save, "--lr", "3e-3", "--train-iters", 6, ranks=2)
    assert best_of(save)[0] == lowest(first)[1]
    more, out = pretrain(folder, save, "--load", save, "--lr", "0.5", "--train-iters", 12,
                         "--override-opt_param-scheduler", "--no-check-for-nan-in-loss-and-grad", ranks=2)
    return save, first, more, out


def test_the_best_checkpoint_stays_when_a_resumed_run_is_worse(diverged):
    save, first, more, out = diverged
    loss, step = lowest(first)
    assert lowest(more)[0] > loss  # or this tests nothing
    assert best_of(save) == (step, loss)
    assert steps_in(save) == sorted({step, 12})
    assert "best checkpoint" not in out


def test_a_run_goes_on_from_the_best_one(folder, diverged):
    save = diverged[0]
    best = best_of(save)[0]
    assert best < max(steps_in(save))  # or this tests nothing
    for flags in ([], ["--use-checkpoint-args"]):
        _, out = pretrain(folder, folder / f"gone_on{len(flags)}", "--load", save / "best", "--lr", "3e-3",
                          "--train-iters", best + 1, "--override-opt_param-scheduler", *flags)
        assert f"successfully loaded checkpoint from {save}" in out and f"at iteration {best}\n" in out
        assert f" iteration {best + 1:8}/ {best + 1:7} |" in out
    words = megashard.with_defaults([], TRAINING + "--lr 1e-3 --train-iters 1")
    out = run(PROGRAM, "pretrain", *words, "--save", folder / "x", "--load", folder / "nothing" / "best", expect=None)
    assert out.returncode != 0 and "train with --save-best" in out.stderr


def test_a_better_one_takes_its_place(folder):
    save = folder / "better"
    metrics, out = pretrain(folder, save, "--lr", "3e-3", "--train-iters", 6)
    evaluated = {step["step"]: step["validation_loss"] for step in metrics if "validation_loss" in step}
    assert out.count("the best checkpoint so far is that of iteration") >= 2
    assert list(evaluated) == [2, 4, 6] and evaluated[2] > evaluated[4] > evaluated[6]  # or this tests nothing
    assert best_of(save) == (6, evaluated[6])
    assert steps_in(save) == [4, 6]  # the save that made 6 the best one has kept the one before it


def test_the_last_evaluation_counts_where_the_step_had_none(folder):
    save = folder / "last"
    _, out = pretrain(folder, save, "--lr", "3e-3", "--train-iters", 3, "--eval-interval", 100)
    last = float(re.findall(r"validation loss at iteration 3 on validation set \| lm loss value: (\S+)", out)[0])
    assert best_of(save) == (3, pytest.approx(last, rel=1e-5))  # it is printed with 7 digits


def test_asynchronous_saves_are_marked_when_they_are_whole(folder):
    save = folder / "beside"
    metrics, out = pretrain(folder, save, "--lr", "3e-3", "--train-iters", 6, "--async-save")
    assert best_of(save)[0] in steps_in(save)
    marked = out.index("the best checkpoint so far is that of iteration       2")
    assert out.index("successfully saved checkpoint from iteration       2") < marked


def test_a_run_of_its_own_begins_without_a_best_one(folder, diverged):
    save = diverged[0]
    before = best_of(save)
    _, out = pretrain(folder, save, "--overwrite-run", "--lr", "1e-9", "--train-iters", 2)
    assert "the best checkpoint so far is that of iteration       2" in out
    assert best_of(save)[1] > before[1]
    assert steps_in(save) == [2]


def test_converters_and_inspect_take_the_best_one_by_its_name(folder):
    save = folder / "better"
    convert("dcp_to_torch_dist", "--load-dir", save / "best", "--save-dir", folder / "converted")
    assert steps_in(folder / "converted") == [best_of(save)[0]]
    assert f"iter_{best_of(save)[0]:07}" in run(PROGRAM, "inspect", save / "best").stdout
    out = run(PROGRAM, "inspect", folder / "nothing" / "best", expect=None)
    assert out.returncode != 0 and "train with --save-best" in out.stderr


def test_wrong_flags_are_told(folder):
    for flags, message in ((["--eval-iters", 0, "--save", folder / "x"], "--save-best needs evaluations"),
                           ([], "--save-best needs --save")):
        words = ["pretrain", *megashard.with_defaults(flags, TRAINING + "--lr 1e-3 --train-iters 1")]
        assert message in run(PROGRAM, *words, expect=USAGE).stderr
