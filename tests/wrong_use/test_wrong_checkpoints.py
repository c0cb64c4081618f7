"""Checkpoints to load that are damaged, missing or of another run, and places to write to that cannot be written."""
import json
import os
import shutil
import subprocess

import pytest

import megashard
from megashard import FAILURE, PROGRAM, ROOT, TRACKER, USAGE
from wrong_use import ALL_TRAINING, LOOP, MOCK, NETWORK, PRETRAIN, RATE, check, only_line, run

TRAIN = [*PRETRAIN, *RATE, *MOCK]
EVALUATE = [*TRAIN, "--skip-train"]
INFER = ["infer", *NETWORK, "--ckpt-format", "torch_dcp", "--data-path", "{folder}/good"]
LOG_PROBS = ["--log-probs", "{here}/log_probs.npy"]
MODEL = ["pretrain", *LOOP, *RATE, "--data-path", "{folder}/good", *ALL_TRAINING, "--seq-length", "16", "--hf-model",
         "{folder}/model", "--from-scratch"]
RESUME = ["pretrain", "--role", "actor", "--hf-model", "{folder}/model", "--from-scratch", "--train-iters", "1",
          "--data-path", "{folder}/good", *ALL_TRAINING, "--config"]
CONVERT = ["--ckpt-convert-format", "torch_dist", "--ckpt-convert-save"]
SAVED = "{here}/saved"
SAVE = ["--save-interval", "1", "--save"]


@pytest.fixture(scope="session")
def here(folder, saved, tmp_path_factory):
    """The run's step 2 in `saved`, and what is like it and wrong."""
    path = tmp_path_factory.mktemp("checkpoints")
    done = run(*TRAIN, *SAVE, path / "saved")  # steps 1 and 2
    assert done.returncode == 0, done.stderr

    def copied(name):
        shutil.copytree(saved, path / name)
        return path / name / "iter_0000002"

    for name in ("empty", "iter_0000005"):
        (path / name).mkdir()
    (path / "file").write_text("text\n")
    (path / "dangling").symlink_to(path / "gone")
    shutil.copytree(saved / "iter_0000002", path / "renamed")
    shutil.copytree(saved / "iter_0000002", path / "moved" / "best_step")
    (path / "trackers_step_is_gone").mkdir()
    (path / "trackers_step_is_gone" / TRACKER).write_text("7")
    (path / "torn_tracker").mkdir()
    (path / "torn_tracker" / TRACKER).write_text("\x00\x00")
    (path / "legacy" / "iter_0000002" / "mp_rank_00").mkdir(parents=True)
    (path / "legacy" / TRACKER).write_text("2")
    shutil.copytree(saved / "iter_0000002", path / "roll" / "dcp")
    shutil.copytree(saved, path / "runs" / "a")
    (path / "weights").mkdir()
    (path / "weights" / "model.safetensors").write_bytes(bytes(8))
    for name in ("nowhere", "empty", "roll"):
        (path / f"from_{name}.yaml").write_text(
            f"sequence_length: 16\nresume_from_checkpoint: {path / name}\n"
            "actor: {strategy_args: {strategy_name: fsdp2_train}, training_args: {per_device_train_batch_size: 1}}\n")
    for name, text in {"zarr": '{"sharded_backend": "zarr", "sharded_backend_version": 1}', "not_json": "{",
                       "version": '{"sharded_backend": "torch_dist", "sharded_backend_version": 9}'}.items():
        (path / name / "iter_0000002").mkdir(parents=True)
        (path / name / "iter_0000002" / "metadata.json").write_text(text)
        (path / name / TRACKER).write_text("2")
    (copied("no_metadata") / ".metadata").unlink()
    os.truncate(copied("cut_metadata") / ".metadata", 100)
    (copied("no_data") / "__0_0.distcp").unlink()
    (copied("torn_manifest") / "manifest.json").write_text("{")
    step = copied("changed_manifest")
    (step / "manifest.json").write_text((step / "manifest.json").read_text().replace('"iteration": 2',
                                                                                     '"iteration": 3'))
    (copied("newer_manifest") / "manifest.json").write_text('{"format_version": 9, "crc32": "00000000", "files": {}}')
    step = copied("flipped")
    data = bytearray((step / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (step / "__0_0.distcp").write_bytes(data)
    shutil.copytree(path / "saved", path / "both_damaged")
    for step in ("iter_0000001", "iter_0000002"):
        (path / "both_damaged" / step / "__0_0.distcp").write_bytes(b"")
    copied("alone")
    return path


def another(flag, value, words=TRAIN):
    """The words with another value of the flag."""
    return [(value if before == flag else each) for before, each in zip(["", *words], words)]


LOADS = {
    "infer from nowhere": ([*INFER, *LOG_PROBS, "--load", "{here}/nowhere"], USAGE,
                           "nowhere/latest_checkpointed_iteration.txt does not exist, so there is nothing to load"),
    "infer from an empty folder": ([*INFER, *LOG_PROBS, "--load", "{here}/empty"], USAGE, "there is nothing to load"),
    "infer from a file": ([*INFER, *LOG_PROBS, "--load", "{here}/file"], USAGE, "file: it is a file; give the folder"),
    "infer from a model's folder": ([*INFER, *LOG_PROBS, "--load", "{folder}/model"], USAGE,
                                    "there is nothing to load"),
    "infer with a model and from nowhere": (
        ["infer", "--hf-model", "{folder}/model", "--from-scratch", "--seq-length", "16", "--data-path",
         "{folder}/good", *LOG_PROBS, "--load", "{here}/nowhere"], USAGE, "there is nothing to load"),
    "evaluate from nowhere": ([*EVALUATE, "--load", "{here}/nowhere"], USAGE,
                              "so there is nothing to load, and nothing is trained: give the folder of the checkpoint"),
    "evaluate from an empty folder": ([*EVALUATE, "--load", "{here}/empty"], USAGE, "there is nothing to load"),
    "evaluate from nowhere, with a model": (
        [*MODEL, "--skip-train", "--load", "{here}/nowhere"], USAGE, "there is nothing to load"),
    "evaluate from nowhere, with another to fall back on": (
        [*EVALUATE, "--load", "{here}/nowhere", "--pretrained-checkpoint", SAVED], USAGE, "there is nothing to load"),
    "convert from nowhere": ([*TRAIN, "--load", "{here}/nowhere", *CONVERT, "{here}/converted"], USAGE,
                             "--ckpt-convert-format: "),
    "a step's folder that is not there": ([*TRAIN, "--load", SAVED + "/iter_0000009"], USAGE, "there is no step"),
    "evaluate a step that is not there": ([*EVALUATE, "--load", SAVED + "/iter_0000009"], USAGE, "there is no step"),
    "an empty folder named as a step": ([*TRAIN, "--load", "{here}/iter_0000005"], FAILURE,
                                        "iter_0000005 has no .metadata"),
    "a step's folder and another step": ([*TRAIN, "--load", SAVED + "/iter_0000002", "--ckpt-step", "1"], USAGE,
                                         "is itself the step 2, and --ckpt-step asks for 1"),
    "a step's folder of another name": ([*TRAIN, "--load", "{here}/renamed"], USAGE,
                                        "renamed is a step, but its name does not say of which iteration"),
    "a step's folder of another name, deeper": ([*EVALUATE, "--load", "{here}/moved/best_step"], USAGE,
                                                "best_step is a step, but its name does not say"),
    "infer from a step of another name": ([*INFER, *LOG_PROBS, "--load", "{here}/renamed"], USAGE,
                                          "give its parent by --load, with --ckpt-step"),
    "convert a step of another name": ([*TRAIN, "--load", "{here}/renamed", *CONVERT, "{here}/converted"], USAGE,
                                       "its name does not say"),
    "arguments of a step of another name": ([*TRAIN, "--load", "{here}/renamed", "--use-checkpoint-args"], USAGE,
                                            "its name does not say"),
    "a first checkpoint of another name": ([*TRAIN, "--pretrained-checkpoint", "{here}/renamed"], USAGE,
                                           "its name does not say"),
    "a first checkpoint from nowhere": ([*TRAIN, "--pretrained-checkpoint", "{here}/nowhere"], USAGE,
                                        "--pretrained-checkpoint {here}/nowhere holds no checkpoint"),
    "a step that is not there": ([*TRAIN, "--load", SAVED, "--ckpt-step", "7"], USAGE,
                                 "it has iter_0000001, iter_0000002"),
    "a step of nowhere": ([*TRAIN, "--load", "{here}/nowhere", "--ckpt-step", "7"], USAGE, "nor is its parent"),
    "a tracker without its step": ([*TRAIN, "--load", "{here}/trackers_step_is_gone"], FAILURE,
                                   "iter_0000007, which the tracker names, nor a step before it"),
    "a torn tracker without steps": ([*TRAIN, "--load", "{here}/torn_tracker"], FAILURE,
                                     "should hold an iteration or the word release"),
    "Megatron's legacy format": ([*TRAIN, "--load", "{here}/legacy"], FAILURE, "iter_0000002 has no .metadata"),
    "Megatron's legacy step": ([*TRAIN, "--load", "{here}/legacy/iter_0000002"], FAILURE,
                               "iter_0000002 has no .metadata"),
    "a format that only says so": ([*TRAIN, "--load", "{here}/zarr", "--auto-detect-ckpt-format"], FAILURE,
                                   "iter_0000002 has no .metadata"),
    "a format that is no JSON": ([*TRAIN, "--load", "{here}/not_json", "--auto-detect-ckpt-format"], FAILURE,
                                 "has no .metadata"),
    "the other format": ([*another("--ckpt-format", "torch_dist"), "--load", SAVED], FAILURE,
                         "is a torch_dcp checkpoint, not torch_dist; give --ckpt-format torch_dcp"),
    "a step without .metadata": ([*TRAIN, "--load", "{here}/no_metadata"], FAILURE, ".metadata is missing"),
    "a step with half of .metadata": ([*TRAIN, "--load", "{here}/cut_metadata"], FAILURE,
                                      ".metadata has 100 bytes instead of"),
    "a step without its data": ([*TRAIN, "--load", "{here}/no_data"], FAILURE, "__0_0.distcp is missing"),
    "a torn manifest": ([*TRAIN, "--load", "{here}/torn_manifest"], FAILURE,
                        "torn_manifest/iter_0000002/manifest.json"),
    "a changed manifest": ([*TRAIN, "--load", "{here}/changed_manifest"], FAILURE, "does not have its own checksum"),
    "a newer program's manifest": ([*TRAIN, "--load", "{here}/newer_manifest"], FAILURE,
                                   "load it with the newer program"),
    "a flipped bit": ([*TRAIN, "--load", "{here}/flipped"], FAILURE, "__0_0.distcp has the checksum"),
    "two damaged steps": ([*TRAIN, "--load", "{here}/both_damaged"], FAILURE, "has no whole step to use instead"),
    "a step below zero": ([*TRAIN, "--load", SAVED, "--ckpt-step", "-2"], USAGE, "--ckpt-step"),
    "a path below a file": ([*EVALUATE, "--load", "{here}/file/below"], USAGE, "there is nothing to load"),
    "more layers": ([*another("--num-layers", "2"), "--load", SAVED], USAGE, "has num_layers 1, and this run has 2"),
    "other heads": ([*another("--num-attention-heads", "4"), "--kv-channels", "8", "--load", SAVED], USAGE,
                    "has num_attention_heads 2, and this run has 4"),
    "another vocabulary": ([*another("--vocab-size", "600"), "--load", SAVED], USAGE,
                           "has padded_vocab_size 128, and this run has 640"),
    "another norm": ([*TRAIN, "--load", SAVED, "--normalization", "RMSNorm"], USAGE, "has normalization LayerNorm"),
    "another activation": ([*TRAIN, "--load", SAVED, "--squared-relu"], USAGE,
                           "has squared_relu False, and this run has True"),
    "weights that are not tied": ([*TRAIN, "--load", SAVED, "--untie-embeddings-and-output-weights"], USAGE,
                                  "untie_embeddings_and_output_weights"),
    "another optimizer": ([*TRAIN, "--load", SAVED, "--optimizer", "sgd"], USAGE, "--no-load-optim"),
    "another schedule": ([*TRAIN, "--load", SAVED, "--min-lr", "1e-4"], USAGE,
                         "min_lr is 0.0001 by the flags, but 0.0 in the checkpoint"),
    "ROLL's folder": ([*TRAIN, "--load", "{here}/roll"], USAGE,
                      "--load {here}/roll: there is neither a tracker file nor a folder iter_0000010 in it, but "
                      "{here}/roll/dcp looks like a step (.metadata): move it to DIR/iter_0000010"),
    "a folder of runs": ([*TRAIN, "--load", "{here}/runs"], USAGE,
                         "there is no checkpoint in it, but there are some in {here}/runs/a; give that"),
    "a folder of runs, with another to fall back on": (
        [*TRAIN, "--load", "{here}/runs", "--pretrained-checkpoint", SAVED], USAGE, "some in {here}/runs/a; give that"),
    "a folder of weights": ([*TRAIN, "--load", "{here}/weights"], USAGE,
                            "it holds weights (model.safetensors), and no checkpoint of a training; give them by"),
    "a file": ([*TRAIN, "--load", "{here}/file"], USAGE, "--load {here}/file: it is a file; give the folder"),
    "ROLL's key that names nothing": ([*RESUME, "{here}/from_nowhere.yaml"], USAGE,
                                      "resume_from_checkpoint {here}/nowhere: {here}/nowhere/" + TRACKER +
                                      " does not exist, so there is nothing to load; give the folder of the"),
    "ROLL's key that names nothing, on two ranks": (
        ["launch", "-n", "2", "--", *RESUME, "{here}/from_nowhere.yaml"], USAGE, "resume_from_checkpoint {here}/no"),
    "ROLL's key that names an empty folder": ([*RESUME, "{here}/from_empty.yaml"], USAGE,
                                              "resume_from_checkpoint {here}/empty: "),
    "ROLL's key that names ROLL's folder": ([*RESUME, "{here}/from_roll.yaml"], USAGE,
                                            "resume_from_checkpoint {here}/roll: there is neither a tracker"),
    "a model that never was a step's": ([*MODEL, "--load", SAVED], USAGE,
                                        "it was trained from another model"),
}

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


@pytest.mark.parametrize("name", LOADS)
def test_what_cannot_be_loaded(folder, here, name):
    words, code, message = LOADS[name]
    check((words, code, message.format(here=here)), folder=folder, here=here)


@pytest.mark.parametrize("name", PLACES)
def test_what_cannot_be_written(folder, here, name):
    words, code, message = PLACES[name]
    before = sorted(here.rglob("*"))
    check((words, code, message.format(here=here)), folder=folder, here=here)
    assert sorted(here.rglob("*")) == before


def run_with_permissions(*arguments):
    """As a user whom permissions stop, which root is not."""
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search"]
    return megashard.run(*(drop if os.geteuid() == 0 else []), PROGRAM, *arguments, expect=None, cwd=ROOT)


@pytest.mark.parametrize("name", ["iter_0000002/__0_0.distcp", "iter_0000002/.metadata", "iter_0000002/manifest.json",
                                  "iter_0000002", TRACKER, "."])
def test_what_cannot_be_read_now_is_not_passed_over(here, tmp_path, name):
    shutil.copytree(here / "saved", tmp_path / "saved")
    (tmp_path / "saved" / name).chmod(0)
    done = run_with_permissions(*TRAIN, "--load", tmp_path / "saved")
    (tmp_path / "saved" / name).chmod(0o700)
    assert "Permission denied" in only_line(
        done) and "it may be whole, so nothing else is loaded instead" in done.stderr
    assert done.returncode == FAILURE and " iteration " not in done.stdout


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
    """Of 64 KiB, less the lock."""
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


def steps_of(path):
    return sorted(each.name for each in path.iterdir() if each.name != TRACKER)


def test_a_steps_folder_is_taken(here, tmp_path):
    shutil.copytree(here / "saved", tmp_path / "saved")
    done = run(*TRAIN, "--load", tmp_path / "saved" / "iter_0000001", *SAVE, tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    assert f"successfully loaded checkpoint from {tmp_path}/saved [ t 1/1, p 1/1 ] at iteration 1" in done.stdout
    assert steps_of(tmp_path / "saved") == ["iter_0000001", "iter_0000002"]
    same = run(*TRAIN, "--load", tmp_path / "saved" / "iter_0000001/", "--ckpt-step", "1", "--use-checkpoint-args")
    assert same.returncode == 0 and "at iteration 1" in same.stdout, same.stderr
    first = run(*TRAIN, "--pretrained-checkpoint", tmp_path / "saved" / "iter_0000001")
    assert first.returncode == 0 and f"loaded checkpoint from {tmp_path}/saved " in first.stdout, first.stderr


def test_where_the_weights_come_from_is_said(folder, here):
    done = run(*TRAIN, "--load", here / "nowhere")
    assert done.returncode == 0 and "will start from random" in done.stdout, done.stderr
    (here / "traces" / "logs").mkdir(parents=True)  # of a run that ended before its first step
    for name in (".run", "metrics.jsonl", "logs/events.out"):
        (here / "traces" / name).write_text("x")
    words = [*RESUME, here / "from_nowhere.yaml", "--load", here / "traces"]  # a flag wins over the file's key
    done = run(*[str(word).format(folder=folder) for word in words])
    assert done.returncode == 0 and "will start from random" in done.stdout, done.stderr
    done = run(*TRAIN, "--load", here / "nowhere", "--pretrained-checkpoint", here / "saved")
    assert done.returncode == 0 and "will start from random" not in done.stdout, done.stderr
    assert ("will not load any checkpoints from there; the weights come from --pretrained-checkpoint "
            f"{here}/saved") in done.stdout


def test_a_run_in_use(here, tmp_path):
    """The lock of another process, and of one that is gone."""
    import fcntl
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


def test_a_run_that_is_tuned_where_it_was_loaded(here, tmp_path):
    """Its steps stay apart: a later start never walks back into the earlier run, and nothing of that is removed."""
    used = tmp_path / "used"
    shutil.copytree(here / "saved", used)
    shutil.move(used / "iter_0000001", used / "iter_0000000")  # of the earlier run, before the new one's first step
    done = run(*another("--train-iters", "1"), "--load", used, "--finetune", *SAVE, used, "--most-recent-k", "1")
    assert done.returncode == 0 and steps_of(used) == ["iter_0000000", "iter_0000001", "iter_0000002"], done.stderr
    (used / "iter_0000001" / "__0_0.distcp").write_bytes(b"")
    done = run(*TRAIN, "--load", used)
    assert "iter_0000000 is of another run" in only_line(done) and done.returncode == FAILURE


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
