"""Metrics beside the log: TensorBoard's event files, Prometheus' text, traces of LibTorch's profiler."""
import json
import math
import re

import pytest

from megashard import LAYERS, NO_DROPOUT, network, pretrain

FLAGS = network() + ("--micro-batch-size 1 --global-batch-size 2 --lr 1e-2 --train-iters 4 --mock-data --eval-iters 1 "
                     "--eval-interval 2 --use-torch-fsdp2 --ckpt-format torch_dcp " + " ".join(NO_DROPOUT))
# Megatron-LM core_v0.16.1: training_log and evaluate_and_print_results.
WITH_SAMPLES = ["learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm"]


def scalars(folder):
    """{tag: steps and values} that the tensorboard package reads from all event files of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_megatrons_tags(tmp_path):
    steps, _ = pretrain(tmp_path, "--tensorboard-dir", tmp_path / "events", ranks=2, defaults=FLAGS)
    found = scalars(tmp_path / "events")
    assert set(found) == {*WITH_SAMPLES, *(f"{tag} vs samples" for tag in WITH_SAMPLES), "lm loss validation",
                          "lm loss validation vs samples"}
    assert [step for step, _ in found["lm loss"]] == [1, 2, 3, 4]
    assert [step for step, _ in found["lm loss vs samples"]] == [2, 4, 6, 8]
    for tag, key in {"lm loss": "loss", "grad-norm": "grad_norm", "learning-rate": "lr"}.items():
        assert [value for _, value in found[tag]] == pytest.approx([step[key] for step in steps], rel=1e-6)
    evaluated = [step for step in steps if "validation_loss" in step]
    assert found["lm loss validation"] == [(step["step"], pytest.approx(step["validation_loss"], rel=1e-6))
                                           for step in evaluated]


def test_flags_choose_what_tensorboard_gets(tmp_path):
    pretrain(tmp_path, "--tensorboard-dir", tmp_path / "events", "--tensorboard-log-interval", 3, "--log-throughput",
             "--log-timers-to-tensorboard", "--log-validation-ppl-to-tensorboard", "--log-memory-to-tensorboard",
             "--log-world-size-to-tensorboard", "--no-log-loss-scale-to-tensorboard", defaults=FLAGS)
    found = scalars(tmp_path / "events")
    assert [step for step, _ in found["lm loss"]] == [3] and "loss-scale" not in found
    assert found["world-size"] == [(3, 1)] and found["throughput"][0][1] > 0 and found["iteration-time"][0][1] > 0
    assert found["mem-max-allocated-bytes"][0][1] > 1 << 20
    (_, loss), *_ = found["lm loss validation"]
    assert found["lm loss validation ppl"][0] == (2, pytest.approx(math.exp(loss), rel=1e-5))


def test_steps_that_a_resumed_run_takes_again_count_once(tmp_path):
    saving = ["--save", tmp_path / "steps", "--save-interval", 2, "--tensorboard-dir", tmp_path / "events"]
    pretrain(tmp_path, *saving, defaults=FLAGS)
    pretrain(tmp_path, *saving, "--load", tmp_path / "steps", "--ckpt-step", 2, defaults=FLAGS)
    assert len(list((tmp_path / "events").iterdir())) == 2
    assert [step for step, _ in scalars(tmp_path / "events")["lm loss"]] == [1, 2, 3, 4]


def test_prometheus_text_has_the_last_step(tmp_path):
    steps, _ = pretrain(tmp_path, "--prometheus-file", tmp_path / "megashard.prom", defaults=FLAGS)
    text = (tmp_path / "megashard.prom").read_text()
    values = dict(re.findall(r"^# TYPE megashard_(\w+) gauge\nmegashard_\1 (\S+)$", text, re.M))
    assert {key: float(value) for key, value in values.items()} == steps[-1]
    assert not list(tmp_path.glob("*.next"))


def test_a_profile_names_operators_and_units(tmp_path):
    _, out = pretrain(tmp_path, "--profile", "--profile-step-start", 1, "--profile-step-end", 3, "--profile-save-path",
                      tmp_path / "traces", ranks=2, defaults=FLAGS)
    trace = tmp_path / "traces/rank_0.pt.trace.json"
    assert f"wrote a profile that ends with iteration 3 to {trace}" in out
    assert list(trace.parent.iterdir()) == [trace]  # --profile-ranks is 0
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("FSDP::all_gather (model.layers.0)") >= 2 and any(name.startswith("aten::") for name in names)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_profile_has_memory_over_its_step(tmp_path, device):
    large = FLAGS.replace(network(), network(hidden=128, length=512))  # a CPU's tensors count from 128 KiB on
    pretrain(tmp_path, "--profile", "--profile-step-start", 2, "--profile-step-end", 3, "--profile-save-path", tmp_path,
             "--log-memory", "--device", device, ranks=2, config=LAYERS, defaults=large)
    events = json.loads((tmp_path / "rank_0.pt.trace.json").read_text())["traceEvents"]
    seen = [(event["ts"], event["args"]) for event in events if event["ph"] == "C" and event["name"] == "memory"]
    step = [event for event in events if event.get("cat") == "cpu_op"]
    begin, end = min(event["ts"] for event in step), max(event["ts"] + event["dur"] for event in step)
    another_clock = 5e3  # microseconds, of which a step takes 50,000
    assert all(begin - another_clock <= at <= end + another_clock for at, _ in seen)
    assert len({parts["sharded parameters"] for _, parts in seen}) == 1
    assert 2 * seen[0][1]["sharded parameters"] == pytest.approx(seen[0][1]["optimizer state"], rel=0.01)  # two moments
    backward = next(event["ts"] for event in step if "Backward" in event["name"])
    at_first = [parts["gradients"] for at, parts in seen if at < backward]
    assert set(at_first) == {0} and seen[-1][1]["gradients"] > 0
    gathered = [parts["unsharded parameters"] for _, parts in seen]
    assert max(gathered) > min(gathered)
    kept = [parts["activations and the rest"] for at, parts in seen]
    assert max(kept) > 1.5 * kept[-1] and kept.index(max(kept)) > 0


def test_a_profile_needs_a_folder_and_steps(tmp_path):
    _, out = pretrain(tmp_path, "--profile", defaults=FLAGS, expect=2)
    assert "--profile needs a folder for its traces; give --profile-save-path or --tensorboard-dir." in out
    _, out = pretrain(tmp_path, "--profile", "--profile-save-path", tmp_path, "--profile-step-end", 5, defaults=FLAGS,
                      expect=2)
    assert "--profile-step-end must be above --profile-step-start" in out
