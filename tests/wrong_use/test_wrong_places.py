"""Places to write to that cannot be written, or that another run has."""
import fcntl
import json
import os
import shutil
import subprocess

import pytest

import megashard
from megashard import FAILURE, PROGRAM, ROOT, TRACKER, USAGE
from wrong_use import (CONVERT, INFER, MODEL, PRETRAIN, RATE, SAVE, SAVED, TRAIN, another, check, only_line, run,
                       run_with_permissions, steps_of)

# Nothing is trained: the message comes before the first step.
PLACES = {}
for flags, name, follows in [
    ([*TRAIN, *SAVE], "--save", "give a folder that can be written"),
    ([*MODEL, "--save-hf"], "--save-hf", "give a folder that can be written"),
    ([*TRAIN, "--load", SAVED, *CONVERT], "--ckpt-convert-save", "give a folder that can be written"),
    ([*TRAIN, "--fsdp-schedule-trace"], "--fsdp-schedule-trace", "give a folder that can be written"),
    ([*TRAIN, "--metrics-file"], "--metrics-file", "give a file that can be written"),
    ([*INFER, "--load", SAVED, "--log-probs"], "--log-probs", "give a file that can be written"),
    ([*INFER, "--load", SAVED, "--generate", "1", "--generated"], "--generated", "give a file that can be written"),
]:
    PLACES |= {
        f"{name} below a file": (
            [*flags, "{here}/file/below"], USAGE,
            f"{name} {{here}}/file/below cannot be written: {{here}}/file is no folder; {follows}"),
        f"{name} is a link to nothing": (
            [*flags, "{here}/dangling"], USAGE,
            f"{name} {{here}}/dangling cannot be written: {{here}}/dangling is a link to "),
        f"{name} in /proc": ([*flags, "/proc/below/it"], USAGE, f"{name} /proc/below/it cannot be written: "),
    }
    is_file = follows == "give a file that can be written"
    PLACES[f"{name} is a " + ("folder" if is_file else "file")] = (
        [*flags, "{here}/empty" if is_file else "{here}/file"], USAGE, "is a folder" if is_file
        else "file is no folder")
PLACES |= {
    "--save of two ranks below a file": (["launch", "-n", "2", "--", *TRAIN, *SAVE, "{here}/file/below"], USAGE,
                                         "file is no folder"),
    "--save-hf of two ranks is a file": (["launch", "-n", "2", "--", *MODEL, "--save-hf",
                                          "{here}/file"], USAGE, "file is no folder"),
    "--fsdp-schedule-trace of two ranks is a file": (["launch", "-n", "2", "--", *TRAIN, "--fsdp-schedule-trace",
                                                      "{here}/file"],
                                                     USAGE, "file is no folder"),
    "--save with a name that is too long": ([*TRAIN, *SAVE, "{here}/" + "x" * 300], USAGE, "File name too long"),
    "--save without data": ([*PRETRAIN, *RATE, "--data-path", "{folder}/none", *SAVE, "{here}/file"], USAGE,
                            "there is no file"),
    "--save of another run": ([*TRAIN, *SAVE, SAVED], USAGE,
                              "--save {here}/saved holds steps of an earlier run (iter_0000001 to iter_0000002), and "
                              "this run does not go "
                              "on from them: give --load {here}/saved to go on, an empty folder to start anew, or "
                              "--overwrite-run"),
    "--save of another run, on two ranks": (["launch", "-n", "2", "--", *TRAIN, *SAVE, SAVED], USAGE,
                                            "holds steps of an earlier run"),
    "--save of one step": ([*TRAIN, *SAVE, "{here}/alone"], USAGE, "steps of an earlier run (iter_0000002), and"),
    "--save of another run than --load's": ([*TRAIN, "--load", "{here}/alone", *SAVE, SAVED], USAGE,
                                            "holds steps of an earlier run"),
    "--save of another run, tuned from elsewhere": ([*TRAIN, "--load", "{here}/alone", "--finetune", *SAVE, SAVED],
                                                    USAGE, "holds steps of an earlier run"),
    "--save of another run than the first checkpoint's": ([*TRAIN, "--pretrained-checkpoint", "{here}/alone", *SAVE,
                                                           SAVED], USAGE,
                                                          "holds steps of an earlier run"),
}


@pytest.mark.parametrize("name", PLACES)
def test_what_cannot_be_written(folder, here, name):
    words, code, message = PLACES[name]
    before = sorted(here.rglob("*"))
    check((words, code, message.format(here=here)), folder=folder, here=here)
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("flag", ["--save", "--save-hf", "--metrics-file", "--fsdp-schedule-trace"])
def test_a_folder_without_permission(folder, tmp_path, flag):
    (tmp_path / "closed").mkdir(mode=0o555)
    interval = ["--save-interval", "2"] if flag == "--save" else []
    done = run_with_permissions(*[each.format(folder=folder) for each in MODEL], *interval, flag,
                                tmp_path / "closed" / "below")
    assert f"{flag} {tmp_path}/closed/below cannot be written: " in only_line(
        done) and "Permission denied" in done.stderr
    assert done.returncode == USAGE and " iteration " not in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sets this")
def test_a_folder_that_nobody_may_change(tmp_path):
    (tmp_path / "fixed").mkdir()
    if subprocess.run(["chattr", "+i", tmp_path / "fixed"], capture_output=True).returncode != 0:
        pytest.skip("this file system has no such attribute")
    try:
        done = run(*TRAIN, *SAVE, tmp_path / "fixed")
    finally:
        subprocess.run(["chattr", "-i", tmp_path / "fixed"], check=True)
    assert "no folder can be made in" in only_line(
        done) and "Operation not permitted" in done.stderr and done.returncode == USAGE


def test_a_disk_that_is_too_small(tmp_path):
    """A file system of 64 KiB, less the lock."""
    def on_small_disk(*words):
        mount = 'mount -t tmpfs -o size=64k none "$0" && exec "$@"'
        return megashard.run("unshare", "-m", "sh", "-c", mount, tmp_path, *words, expect=None, cwd=ROOT)
    if on_small_disk("true").returncode != 0:
        pytest.skip("nothing can be mounted here")
    done = on_small_disk(PROGRAM, *TRAIN, *SAVE, tmp_path / "save")
    assert (f"WARNING: the disk of --save {tmp_path}/save has 60 KiB left, and a checkpoint of this run takes more "
            "than 65 KiB") in done.stdout
    assert "WARNING" not in on_small_disk(PROGRAM, *TRAIN, "--logging-level", "40", *SAVE, tmp_path / "save").stdout
    assert "No space left on device" in only_line(done) and done.returncode == FAILURE


def test_a_run_in_use(here, tmp_path):
    """The lock of another process, and of one that is gone."""
    used = tmp_path / "used"
    used.mkdir()
    with open(used / ".run", "w") as lock:
        lock.write("process 77 on elsewhere\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run(*TRAIN, *SAVE, used)
    assert f"--save {used} is in use by another run (process 77 on elsewhere): " in only_line(done)
    assert done.returncode == FAILURE and " iteration " not in done.stdout and steps_of(used) == [".run"]
    done = run(*TRAIN, *SAVE, used)
    assert done.returncode == 0 and steps_of(used) == ["iter_0000001", "iter_0000002"], done.stderr


def test_a_run_that_is_replaced(here, tmp_path):
    shutil.copytree(here / "saved", tmp_path / "used")
    flags = another("--train-iters", "1")
    done = run(*flags, *SAVE, tmp_path / "used", "--overwrite-run")
    assert done.returncode == 0, done.stderr
    assert (f"--overwrite-run: the steps of the earlier run in {tmp_path}/used (iter_0000001 to iter_0000002) are "
            "removed when this run's first step is complete") in done.stdout
    assert steps_of(tmp_path / "used") == ["iter_0000001"] and (tmp_path / "used" / TRACKER).read_text() == "1"


def test_nothing_is_left_of_a_start_that_fails(folder, tmp_path):
    done = run(*PRETRAIN, *RATE, "--data-path", folder / "large", "--split", "100,0,0", *SAVE, tmp_path / "a" / "b",
               "--metrics-file", tmp_path / "c" / "d", "--fsdp-schedule-trace", tmp_path / "e")
    assert done.returncode == FAILURE and "token 999" in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] in ([], ["c"])  # metrics begin with the first step


def test_metrics_of_another_run_are_kept(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    first = run(*TRAIN, "--metrics-file", metrics)
    assert first.returncode == 0, first.stderr
    lines = metrics.read_text()
    second = run(*TRAIN, "--metrics-file", metrics)
    kept = tmp_path / "metrics.jsonl.1"
    assert f"the steps of another run in --metrics-file {metrics} are kept as {kept}" in second.stdout
    assert kept.read_text() == lines and len(metrics.read_text().splitlines()) == len(lines.splitlines())


def test_metrics_are_cut_to_the_step_that_is_loaded(here, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step":1,"loss":4}\n{"step":2,"loss":3}\n{"step":3,"loss":2}\n{"step":2,"lo')
    done = run(*TRAIN, "--load", here / "saved", "--ckpt-step", "1", "--metrics-file", metrics)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and lines[0]["loss"] == 4 and lines[1]["loss"] != 3
