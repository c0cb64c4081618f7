"""Checkpoints to load that are damaged, missing or of another run."""
import shutil

import pytest

from megashard import FAILURE, TRACKER, USAGE
from wrong_use import (ALL_TRAINING, CONVERT, INFER, MODEL, SAVE, SAVED, TRAIN, another, check, only_line, run,
                       run_with_permissions, steps_of)

EVALUATE = [*TRAIN, "--skip-train"]
LOG_PROBS = ["--log-probs", "{here}/log_probs.npy"]
RESUME = ["pretrain", "--role", "actor", "--hf-model", "{folder}/model", "--from-scratch", "--train-iters", "1",
          "--data-path", "{folder}/good", *ALL_TRAINING, "--config"]
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


@pytest.mark.parametrize("name", LOADS)
def test_what_cannot_be_loaded(folder, here, name):
    words, code, message = LOADS[name]
    check((words, code, message.format(here=here)), folder=folder, here=here)


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
