"""`megashard pretrain` with damaged checkpoints: it goes on from a whole one and names the damage, in one line; so does
`megashard inspect`. And with a disk that takes no more: it ends, and says which file and why."""

import json
import os
import resource
import shutil
import signal

import pytest

import megashard
from megashard import FAILURE, PROGRAM, TRACKER

TRAINING = megashard.network(hidden=32, heads=4) + (
    "--mock-data --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --eval-iters 0 --use-torch-fsdp2 --train-iters 5 "
    "--most-recent-k 3")


def pretrain(folder, *flags, largest_file=None, expect=0):
    """Returns the trained steps and the output."""
    def limit():  # an error of write, not a signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    interval = " --save-interval 1" if "--save" in flags else ""
    steps, out = megashard.pretrain(folder, *flags, ranks=2, defaults=TRAINING + interval, config=None, expect=expect,
                                    preexec_fn=limit if largest_file else None)
    return [step["step"] for step in steps], out


def inspect(*arguments, expect=0):
    return megashard.run(PROGRAM, "inspect", *arguments, expect=expect)


@pytest.fixture(scope="module", params=["torch_dcp", "torch_dist"])
def form(request):
    return request.param


@pytest.fixture(scope="module")
def saved(tmp_path_factory, form):
    """Steps 2, 3 and 4 of 5; the first was removed."""
    folder = tmp_path_factory.mktemp("damaged")
    pretrain(folder, "--ckpt-format", form, "--exit-interval", "4", "--save", folder / "save")
    names = sorted(path.name for path in (folder / "save").iterdir())
    assert names == ["iter_0000002", "iter_0000003", "iter_0000004", TRACKER]
    return folder / "save"


def truncate(save):
    os.truncate(save / "iter_0000004/__1_0.distcp", 1000)


def flip_a_bit(save):
    path = save / "iter_0000004/__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def remove_a_shard(save):
    (save / "iter_0000004/__0_0.distcp").unlink()


def truncate_the_arguments(save):  # torch_dcp has them in a data file
    os.truncate(save / "iter_0000004/common.pt", 100)


def remove_what_is_written_last(save):
    (save / "iter_0000004/metadata.json").unlink()


def tear_the_tracker(save):
    (save / TRACKER).write_text("")


@pytest.mark.parametrize(
    "damage, flags, said, goes_on_from",
    [
        (truncate, [], "iter_0000004/__1_0.distcp has 1000 bytes instead of", 3),
        (flip_a_bit, [], "iter_0000004/__0_0.distcp has the checksum", 3),
        (remove_a_shard, [], "iter_0000004/__0_0.distcp is missing", 3),
        (truncate_the_arguments, [], "iter_0000004/common.pt has 100 bytes instead of", 3),
        (remove_what_is_written_last, [], "iter_0000004/metadata.json is missing", 3),
        (tear_the_tracker, [], f"{TRACKER} should hold an iteration", 4),
    ],
)
def test_training_goes_on_from_a_whole_step(saved, form, tmp_path, damage, flags, said, goes_on_from):
    if form == "torch_dcp" and damage in (truncate_the_arguments, remove_what_is_written_last):
        pytest.skip("only torch_dist has this file")
    save = tmp_path / "save"
    shutil.copytree(saved, save)
    damage(save)
    steps, out = pretrain(tmp_path, "--ckpt-format", form, "--load", save, "--save", save, *flags)
    warnings = [line for line in out.splitlines() if said in line]
    assert len(warnings) == 1 and warnings[0].startswith("WARNING: ")
    assert warnings[0].endswith(f"{save}/iter_000000{goes_on_from} is used instead")
    assert steps == list(range(goes_on_from + 1, 6))
    _, out = pretrain(tmp_path, "--ckpt-format", form, "--load", save)
    assert "is used instead" not in out  # the damaged one was saved again


def test_a_step_that_was_asked_for_is_refused(saved, form, tmp_path):
    save = tmp_path / "save"
    shutil.copytree(saved, save)
    remove_a_shard(save)
    steps, out = pretrain(tmp_path, "--ckpt-format", form, "--load", save, "--ckpt-step", "4", expect=FAILURE)
    assert not steps and "--ckpt-step 4: " in out and "__0_0.distcp is missing" in out


def test_inspect_shows_the_step_that_would_be_loaded(saved, form, tmp_path):
    save = tmp_path / "save"
    shutil.copytree(saved, save)
    inspect("--verify", save)
    truncate(save)
    shown = inspect("--json", save)
    assert json.loads(shown.stdout)["iteration"] == 3
    damage = f"{save}/iter_0000004/__1_0.distcp has 1000 bytes instead of "
    assert shown.stderr.startswith(f"WARNING: {damage}")
    assert shown.stderr.endswith(f"{save}/iter_0000003 is used instead\n")
    verified = inspect("--verify", save, expect=FAILURE)
    assert verified.stdout.startswith(f"damaged: {damage}")
    assert verified.stdout.endswith("; 1 faults\n")
    inspect("--verify", "--ckpt-step", "4", save, expect=FAILURE)


@pytest.mark.parametrize("how", [[], ["--async-save"]], ids=["sync", "async"])
def test_a_run_whose_disk_takes_no_more_says_so_and_ends(saved, form, how, tmp_path):
    save = tmp_path / "save"
    shutil.copytree(saved, save)
    files = [path for path in (save / "iter_0000004").iterdir() if path.suffix == ".distcp"]
    flags = ["--ckpt-format", form, "--load", save, "--save", save, *how]
    half = max(path.stat().st_size for path in files) // 2
    _, out = pretrain(tmp_path, *flags, largest_file=half, expect=FAILURE)
    assert f"writing {save}/.iter_0000005.tmp/__0_0.distcp failed: File too large" in out
    assert sorted(path.name for path in save.iterdir()) == ["iter_0000002", "iter_0000003", "iter_0000004", TRACKER]
    inspect("--verify", save)
    assert pretrain(tmp_path, *flags)[0] == [5]  # there is room again
