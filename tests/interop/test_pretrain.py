"""`megashard pretrain` as a user runs it: the same losses whatever way a run takes to them."""
import json
import os
import pathlib
import struct
import subprocess

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("MEGASHARD", str(ROOT / "build" / "launch" / "megashard"))
NETWORK = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 --seq-length 16 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 60 --micro-batch-size 2 --global-batch-size 8 "
    "--lr 1e-3 --weight-decay 0.1 --log-interval 5 --use-torch-fsdp2"
).split()


def pretrain(folder, name, *flags, ranks=2, config=None, expect=0):
    """Runs it and returns the metrics, one dict a step."""
    file = folder / "fsdp2_config.yaml"
    file.write_text(config or "sub_modules_to_wrap: ['model.layers.{*}']\n")
    metrics = folder / f"{name}.jsonl"
    metrics.unlink(missing_ok=True)  # a resumed run appends
    command = [PROGRAM, "launch", "-n", str(ranks), "--", "pretrain", *NETWORK, "--fsdp2-config-path", str(file),
               "--metrics-file", str(metrics), *([] if "--eval-iters" in flags else ["--eval-iters", "0"]),
               *([] if "--ckpt-format" in flags else ["--ckpt-format", "torch_dcp"]), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == expect, result.stdout[-2000:] + result.stderr[-4000:]
    lines = metrics.read_text().splitlines() if metrics.exists() else []  # none: it did not train
    return [json.loads(line) for line in lines], result.stdout + result.stderr


def losses(metrics):
    return [step["loss"] for step in metrics]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pretrain")


@pytest.fixture(scope="module")
def straight(folder):
    """20 steps without a stop, dropout on."""
    return pretrain(folder, "straight", "--train-iters", "20")[0]


def test_loss_falls(straight):
    assert len(straight) == 20
    assert straight[0]["loss"] == pytest.approx(4.85, abs=0.2)  # log(128), the padded vocabulary: nothing is known yet
    assert straight[-1]["loss"] < straight[0]["loss"] - 0.15
    assert [step["step"] for step in straight] == list(range(1, 21))
    assert straight[-1]["consumed_samples"] == 160
    for step in straight:
        assert step["grad_norm"] > 0 and step["tokens_per_s"] > 0 and step["peak_memory_bytes"] > 1e6


RECOMPUTE = "sub_modules_to_wrap: ['model.layers.{*}']\nrecompute_modules: ['model.layers.{*}']\n"


@pytest.mark.parametrize("reentrant", ["true", "false"])
def test_a_stopped_and_resumed_run_has_the_straight_runs_losses(folder, reentrant):
    config = RECOMPUTE + f"use_reentrant: {reentrant}\n"
    whole, _ = pretrain(folder, "whole", "--train-iters", "20", config=config)
    save = folder / f"save_{reentrant}"
    first, _ = pretrain(folder, "first", "--train-iters", "20", "--exit-interval", "10", "--save", str(save),
                        "--save-interval", "100", config=config)
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "10"
    second, out = pretrain(folder, "second", "--train-iters", "20", "--load", str(save), config=config)
    assert [step["step"] for step in first + second] == list(range(1, 21))
    assert losses(first + second) == losses(whole)
    assert [step["lr"] for step in first + second] == [step["lr"] for step in whole]
    assert [step["grad_norm"] for step in first + second] == [step["grad_norm"] for step in whole]


def test_saves_beside_the_training_change_nothing_and_resume_alike(folder, straight):
    save = folder / "save_async"
    flags = ["--train-iters", "20", "--save", str(save), "--save-interval", "4", "--async-save"]
    first, out = pretrain(folder, "first", *flags, "--exit-interval", "10")
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert [line.split()[5] for line in out.splitlines() if "successfully saved" in line] == ["4", "8", "10"]
    second, _ = pretrain(folder, "second", *flags, "--load", str(save))
    assert losses(first + second) == losses(straight)
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "20"


def test_a_save_that_fails_beside_the_training_ends_it(folder):
    (folder / "fails" / "latest_checkpointed_iteration.txt").mkdir(parents=True)  # where the tracker is to be
    steps, out = pretrain(folder, "fails", "--train-iters", "400", "--save", str(folder / "fails"),
                          "--save-interval", "201", "--async-save", expect=1)
    assert "the checkpoint of iteration 201 was not saved: rank 0: cannot rename" in out
    assert "successfully saved" not in out
    assert 201 <= len(steps) < 400  # at a next step: no other save is due


def test_recompute_changes_nothing(folder, straight):
    traces = folder / "traces"
    recomputed, _ = pretrain(folder, "recompute", "--train-iters", "20", "--fsdp-schedule-trace", str(traces),
                             config=RECOMPUTE)
    assert losses(recomputed) == losses(straight)
    for rank in range(2):  # and the schedule of the first steps was written
        events = json.loads((traces / f"rank_{rank}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        opened, closed = ([event["name"] for event in events if event["ph"] == phase] for phase in "be")
        assert opened and sorted(opened) == sorted(closed)
        assert any(event["name"].startswith("reduce ") for event in events)


def test_a_start_on_meta_changes_nothing(folder, straight):
    deferred, _ = pretrain(folder, "meta", "--train-iters", "5", "--lr-decay-iters", "20",
                           "--init-model-with-meta-device")
    assert losses(deferred) == losses(straight)[:5]


def test_prefetch_and_resharding_change_nothing(folder, straight):
    config = ("sub_modules_to_wrap: ['model.layers.{*}']\nreshard_after_forward: false\n"
              "num_to_forward_prefetch: 1\nnum_to_backward_prefetch: 1\n")
    other, _ = pretrain(folder, "prefetch", "--train-iters", "5", "--lr-decay-iters", "20", config=config)
    assert losses(other) == losses(straight)[:5]


def test_megatrons_format_and_a_conversion_change_nothing(folder, straight):
    save, converted = folder / "save_dist", folder / "converted"
    flags = ["--train-iters", "6", "--lr-decay-iters", "20"]
    dist = ["--ckpt-format", "torch_dist"]
    first, _ = pretrain(folder, "first", *flags, *dist, "--exit-interval", "3", "--save", str(save), "--save-interval", "100")
    assert (save / "iter_0000003" / "metadata.json").exists()
    second, _ = pretrain(folder, "second", *flags, *dist, "--load", str(save))
    assert losses(first + second) == losses(straight)[:6]
    pretrain(folder, "wrong", *flags, "--load", str(save), expect=1)  # its --ckpt-format is torch_dcp
    none, out = pretrain(folder, "convert", *flags, "--load", str(save), "--auto-detect-ckpt-format", "--ckpt-convert-format",
                         "torch_dcp", "--ckpt-convert-save", str(converted))
    assert not none and "-> torch_dcp." in out
    third, _ = pretrain(folder, "third", *flags, "--load", str(converted / "torch_dcp"))
    assert losses(third) == losses(second)


def test_a_checkpoint_goes_on_at_another_number_of_ranks(folder):
    save = folder / "save_elastic"
    flags = ["--train-iters", "6", "--attention-dropout", "0", "--hidden-dropout", "0"]
    whole, _ = pretrain(folder, "whole", *flags)
    pretrain(folder, "first", *flags, "--exit-interval", "3", "--save", str(save), "--save-interval", "100")
    second, _ = pretrain(folder, "second", *flags, "--load", str(save), ranks=4)
    for here, there in zip(losses(second), losses(whole)[3:], strict=True):
        assert here == pytest.approx(there, rel=1e-6)  # the sums run over 4 shares instead of 2


def test_evaluation_and_the_log_line(folder):
    _, out = pretrain(folder, "log", "--train-iters", "10", "--eval-interval", "5", "--eval-iters", "2")
    lines = [line for line in out.splitlines() if " iteration " in line and "lm loss" in line and "|" in line]
    trained = [line for line in lines if "elapsed time per iteration (ms):" in line]
    assert len(trained) == 3  # the first, and each --log-interval
    assert "iteration        5/      10" in trained[1]
    assert any("validation loss at iteration 5" in line for line in out.splitlines())


def test_optional_fields_of_the_log_line_do_not_depend_on_sharding(folder):
    """Zeros among gradients (rows of tokens that never came) and norms are sums over all ranks' rows, each once."""
    flags = ["--train-iters", "5", "--attention-dropout", "0", "--hidden-dropout", "0",
             "--untie-embeddings-and-output-weights", "--log-params-norm", "--log-num-zeros-in-grad", "--log-tps"]
    found = []
    for ranks, config in ((1, None), (2, None), (2, "sharding_size: 1\n")):
        _, out = pretrain(folder, f"fields{ranks}", *flags, ranks=ranks, config=config)
        _, line = [line for line in out.splitlines() if "params norm:" in line]  # of the first and the last step
        fields = dict(field.rsplit(":", 1) for field in line.split("|") if ":" in field)
        fields = {name.strip(): value for name, value in fields.items()}
        found.append([float(fields[name]) for name in ("num zeros", "params norm", "tokens per sample")])
    assert found[0][0] > 0 and found[0][1] > 0 and found[0][2] == 16
    assert found[1] == found[0] and found[2] == found[0]


def test_replicas_and_tiled_mlps_have_the_losses_of_shards(folder):
    flags = ["--train-iters", "5", "--attention-dropout", "0", "--hidden-dropout", "0"]
    sharded, _ = pretrain(folder, "sharded", *flags, ranks=4)
    replicated, _ = pretrain(folder, "replicated", *flags, ranks=4,
                             config="sharding_size: 2\nsub_modules_to_wrap: ['model.layers.{*}']\n")
    tiled, _ = pretrain(folder, "tiled", *flags, "--apply-tiled-mlp", "--tiled-num-shards", "3", ranks=4,
                        config="sharding_size: 2\nsub_modules_to_wrap: ['model.layers.{*}', 'model.layers.{*}.mlp']\n")
    for other in (replicated, tiled):
        for here, there in zip(losses(other), losses(sharded), strict=True):
            assert here == pytest.approx(there, rel=1e-6)  # sums of sums, in another order


def test_ranks_that_share_a_sequence_have_the_losses_of_one(folder):
    flags = ["--train-iters", "10", "--attention-dropout", "0", "--hidden-dropout", "0", "--reset-attention-mask", "--eval-iters",
             "1", "--eval-interval", "10", "--calculate-per-token-loss"]
    alone = pretrain(folder, "alone", *flags, ranks=1)
    ulysses = ["--context-parallel-size", "2"]
    for ranks, config in ((2, None), (4, None), (4, "sub_modules_to_wrap: ['model.layers.{*}']\nsharding_size: 2\n")):
        shared = pretrain(folder, "shared", *flags, *ulysses, ranks=ranks, config=config)
        assert losses(shared[0]) == pytest.approx(losses(alone[0]), abs=2e-6)
        norms = [[step["grad_norm"] for step in run[0]] for run in (shared, alone)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        values = [float(run[1].split("lm loss value: ")[1].split()[0]) for run in (shared, alone)]
        assert values[0] == pytest.approx(values[1], abs=3e-6)  # printed with six places
    means = [losses(pretrain(folder, "means", *flags[:-1], *more, ranks=2)[0]) for more in (ulysses, [])]
    assert means[0] == pytest.approx(means[1], abs=2e-6)  # means of microbatches
    _, out = pretrain(folder, "refused", *flags, "--context-parallel-size", "3", ranks=3, expect=1)
    assert "GPTModel has 4 attention heads, which 3 ranks of a sequence cannot share evenly" in out

ROLL = """
exp_name: tiny
pretrain: ${folder}/tiny
folder: FOLDER
sequence_length: 16
save_steps: 2
logging_steps: 5
actor_train:
  model_args: {disable_gradient_checkpointing: false, dtype: bf16, freeze_module_prefix: "model.embed_tokens,model.layers.0."}
  training_args: {learning_rate: 1.0e-2, weight_decay: 0.1, per_device_train_batch_size: 1, gradient_accumulation_steps: 2,
                  warmup_steps: 1, num_train_epochs: 1.5, lr_scheduler_type: cosine}
  data_args: {template: qwen3}
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config: {fsdp_size: 1, param_dtype: float32, reduce_dtype: float32, async_save_ckpt: false, SYNC
                      wrap_policy: {transformer_layer_cls_to_wrap: [Qwen3Attention, Qwen3MLP], wrap_lm_output: true}}
  device_mapping: list(range(0,2))
"""
TINY = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "head_dim": 8,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu", "eos_token_id": 1,
        "tie_word_embeddings": False}


def test_a_configuration_of_roll_is_a_run_of_flags(folder):
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(TINY))
    tokens = [[(7 * i + j * j) % 64 for j in range(40)] for i in range(10)]  # a .bin/.idx pair of 400 tokens
    (folder / "data.bin").write_bytes(b"".join(struct.pack("<40H", *each) for each in tokens))
    (folder / "data.idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 10, 11) + struct.pack("<10i", *[40] * 10) +
        struct.pack("<10q", *[80 * i for i in range(10)]) + struct.pack("<11q", *range(11)))
    metrics = folder / "roll.jsonl"

    def run(*flags):
        metrics.unlink(missing_ok=True)
        done = subprocess.run([PROGRAM, "launch", "-n", "2", "--", "pretrain", "--metrics-file", metrics, "--from-scratch",
                               "--data-path", folder / "data", "--split", "1,0,0", "--eval-iters", "0", *flags],
                              capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()], done.stdout

    config = folder / "roll.yaml"
    config.write_text(ROLL.replace("FOLDER", str(folder)).replace("SYNC", ""))
    by_roll, out = run("--config", config, "--role", "actor_train", "--save", folder / "roll")
    assert "num_train_epochs 1.5 of 24 sequences, 4 an iteration, are 9 iterations" in out
    assert "* 2 ranks are a global batch of 4" in out
    assert "wrap_policy: Qwen3Attention -> 2 modules" in out and "wrap_policy: Linear -> 1 module (lm_head)" in out
    assert "ROLL: not used here: actor_train.data_args, exp_name, folder" in out
    assert len(by_roll) == 9 and by_roll[-1] < by_roll[0] - 0.1

    file = folder / "flags.yaml"
    file.write_text("sub_modules_to_wrap: ['model.layers.{*}']\nreduce_dtype: fp32\n")
    by_flags, _ = run("--hf-model", folder / "tiny", "--seq-length", "16", "--micro-batch-size", "1", "--global-batch-size", "4",
                      "--lr", "1e-2", "--weight-decay", "0.1", "--lr-warmup-iters", "1", "--lr-decay-style", "cosine",
                      "--train-iters", "9", "--seed", "42", "--use-torch-fsdp2", "--fsdp2-config-path", file,
                      "--attention-dropout", "0", "--hidden-dropout", "0",
                      "--freeze-module-prefix", "model.embed_tokens", "model.layers.0.")
    # Only the order of sums may differ: groups lie elsewhere in the buffers that are reduced, and the norm's parts too.
    assert by_roll == pytest.approx(by_flags, abs=1e-6)

    config.write_text(ROLL.replace("FOLDER", str(folder)).replace("SYNC", "reduce_scatter_during_grad_accumulation: false,"))
    late, _ = run("--config", config, "--role", "actor_train")
    assert late == pytest.approx(by_roll, abs=1e-6)  # gradients are summed before they are reduced, not after
    meta, _ = run("--config", config, "--role", "actor_train", "--init-model-with-meta-device")
    assert meta == late

    def saved(step):
        whole = folder / "roll.pt"
        dcp_to_torch_save(str(folder / "roll" / f"iter_{step:07d}"), str(whole))
        return torch.load(whole, weights_only=False)

    first, last = saved(2), saved(9)
    for name, value in first["model"].items():
        frozen = name.startswith(("model.embed_tokens", "model.layers.0."))
        assert torch.equal(value, last["model"][name]) == frozen, name
        assert (name in last["optimizer"]["state"]) == (not frozen), name
