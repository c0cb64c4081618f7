"""`megashard pretrain` with damaged checkpoints: it goes on from a whole one and names the damage, in one line; so does
`megashard inspect`. And with a disk that takes no more: it ends, and says which file and why."""

import json
import os
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("MEGASHARD", str(ROOT / "build/launch/megashard"))
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 --seq-length 16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 60 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --eval-iters 0 "
    "--use-torch-fsdp2 --train-iters 5 --most-recent-k 3"
).split()
TRACKER = "latest_checkpointed_iteration.txt"


def pretrain(folder, *flags, largest_file=None):
    def limit():  # an error of write, not a signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    interval = ["--save-interval", "1"] if "--save" in flags else []
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    result = subprocess.run(
        [PROGRAM, "launch", "-n", "2", "--", "pretrain", *FLAGS, "--metrics-file", metrics, *flags, *interval],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=limit if largest_file else None,
    )
    steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return result, steps


def inspect(*arguments):
    return subprocess.run([PROGRAM, "inspect", *arguments], capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module", params=["torch_dcp", "torch_dist"])
def form(request):
    return request.param


@pytest.fixture(scope="module")
def saved(tmp_path_factory, form):
    """Steps 2, 3 and 4 of 5; the first was removed."""
    folder = tmp_path_factory.mktemp("damaged")
    result, _ = pretrain(folder, "--ckpt-format", form, "--exit-interval", "4", "--save", folder / "save")
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
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
    result, steps = pretrain(tmp_path, "--ckpt-format", form, "--load", save, "--save", save, *flags)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    warnings = [line for line in result.stdout.splitlines() if said in line]
    assert len(warnings) == 1 and warnings[0].startswith("WARNING: ")
    assert warnings[0].endswith(f"{save}/iter_000000{goes_on_from} is used instead")
    assert [step["step"] for step in steps] == list(range(goes_on_from + 1, 6))
    again, _ = pretrain(tmp_path, "--ckpt-format", form, "--load", save)
    assert again.returncode == 0 and "is used instead" not in again.stdout  # the damaged one was saved again


def test_a_step_that_was_asked_for_is_refused(saved, form, tmp_path):
    save = tmp_path / "save"
    shutil.copytree(saved, save)
    remove_a_shard(save)
    result, steps = pretrain(tmp_path, "--ckpt-format", form, "--load", save, "--ckpt-step", "4")
    assert result.returncode != 0 and not steps
    assert "--ckpt-step 4: " in result.stderr and "__0_0.distcp is missing" in result.stderr


def test_inspect_shows_the_step_that_would_be_loaded(saved, form, tmp_path):
    save = tmp_path / "save"
    shutil.copytree(saved, save)
    assert inspect("--verify", save).returncode == 0
    truncate(save)
    shown = inspect("--json", save)
    assert shown.returncode == 0 and json.loads(shown.stdout)["iteration"] == 3
    damage = f"{save}/iter_0000004/__1_0.distcp has 1000 bytes instead of "
    assert shown.stderr.startswith(f"WARNING: {damage}")
    assert shown.stderr.endswith(f"{save}/iter_0000003 is used instead\n")
    verified = inspect("--verify", save)
    assert verified.returncode == 1 and verified.stdout.startswith(f"damaged: {damage}")
    assert verified.stdout.endswith("; 1 faults\n")
    assert inspect("--verify", "--ckpt-step", "4", save).returncode == 1


@pytest.mark.parametrize("how", [[], ["--async-save"]], ids=["sync", "async"])
def test_a_run_whose_disk_takes_no_more_says_so_and_ends(saved, form, how, tmp_path):
    save = tmp_path / "save"
    shutil.copytree(saved, save)
    files = [path for path in (save / "iter_0000004").iterdir() if path.suffix == ".distcp"]
    flags = ["--ckpt-format", form, "--load", save, "--save", save, *how]
    result, _ = pretrain(tmp_path, *flags, largest_file=max(path.stat().st_size for path in files) // 2)
    assert result.returncode != 0
    assert f"writing {save}/.iter_0000005.tmp/__0_0.distcp failed: File too large" in result.stderr
    assert sorted(path.name for path in save.iterdir()) == ["iter_0000002", "iter_0000003", "iter_0000004", TRACKER]
    assert inspect("--verify", save).returncode == 0
    result, steps = pretrain(tmp_path, *flags)  # there is room again
    assert result.returncode == 0 and [step["step"] for step in steps] == [5]
