"""`megashard pretrain` as a user runs it: the same losses whatever way a run takes to them."""
import json

import pytest

import megashard
from megashard import LAYERS, NO_DROPOUT, TRACKER, losses

TRAINING = megashard.network(hidden=32, heads=4) + (
    "--mock-data --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --weight-decay 0.1 --log-interval 5 " +
    megashard.RUN)


def pretrain(folder, *flags, ranks=2, **options):
    return megashard.pretrain(folder, *flags, ranks=ranks, defaults=TRAINING, **options)


@pytest.fixture(scope="module")
def straight(folder):
    """20 steps without a stop, dropout on."""
    return pretrain(folder, "--train-iters", "20")[0]


def test_loss_falls(straight):
    assert len(straight) == 20
    assert straight[0]["loss"] == pytest.approx(4.85, abs=0.2)  # log(128), the padded vocabulary: before training
    assert straight[-1]["loss"] < straight[0]["loss"] - 0.15
    assert [step["step"] for step in straight] == list(range(1, 21))
    assert straight[-1]["consumed_samples"] == 160
    for step in straight:
        assert step["grad_norm"] > 0 and step["tokens_per_s"] > 0 and step["peak_memory_bytes"] > 1e6


RECOMPUTE = LAYERS + "recompute_modules: ['model.layers.{*}']\n"


@pytest.mark.parametrize("reentrant", ["true", "false"])
def test_a_stopped_and_resumed_run_has_the_straight_runs_losses(folder, reentrant):
    config = RECOMPUTE + f"use_reentrant: {reentrant}\n"
    whole, _ = pretrain(folder, "--train-iters", "20", config=config)
    save = folder / f"save_{reentrant}"
    first, _ = pretrain(folder, "--train-iters", "20", "--exit-interval", "10", "--save", str(save),
                        "--save-interval", "100", config=config)
    assert (save / TRACKER).read_text() == "10"
    second, out = pretrain(folder, "--train-iters", "20", "--load", str(save), config=config)
    assert [step["step"] for step in first + second] == list(range(1, 21))
    assert losses(first + second) == losses(whole)
    assert [step["lr"] for step in first + second] == [step["lr"] for step in whole]
    assert [step["grad_norm"] for step in first + second] == [step["grad_norm"] for step in whole]


def test_saves_beside_the_training_change_nothing_and_resume_alike(folder, straight):
    save = folder / "save_async"
    flags = ["--train-iters", "20", "--save", str(save), "--save-interval", "4", "--async-save"]
    first, out = pretrain(folder, *flags, "--exit-interval", "10")
    assert (save / TRACKER).read_text() == "10"
    assert [line.split()[5] for line in out.splitlines() if "successfully saved" in line] == ["4", "8", "10"]
    second, _ = pretrain(folder, *flags, "--load", str(save))
    assert losses(first + second) == losses(straight)
    assert (save / TRACKER).read_text() == "20"


def test_a_save_that_fails_beside_the_training_ends_it_where_one_may_not(folder):
    (folder / "fails" / TRACKER).mkdir(parents=True)  # where the tracker is to be
    steps, out = pretrain(folder, "--train-iters", "2000", "--save", str(folder / "fails"),
                          "--save-interval", "1001", "--async-save", "--max-failed-saves", "1", expect=1)
    assert "the checkpoint of iteration 1001 was not saved: rank 0: cannot rename" in out
    assert "successfully saved" not in out
    assert 1001 <= len(steps) < 2000  # at a next step: no other save is due


def test_recompute_changes_nothing(folder, straight):
    traces = folder / "traces"
    recomputed, _ = pretrain(folder, "--train-iters", "20", "--fsdp-schedule-trace", str(traces),
                             config=RECOMPUTE)
    assert losses(recomputed) == losses(straight)
    for rank in range(2):  # and the schedule of the first steps was written
        events = json.loads((traces / f"rank_{rank}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        opened, closed = ([event["name"] for event in events if event["ph"] == phase] for phase in "be")
        assert opened and sorted(opened) == sorted(closed)
        assert any(event["name"].startswith("reduce ") for event in events)


@pytest.mark.parametrize("more", [[], ["--no-initialization"]])  # MindSpeed-MM's scripts give both
def test_a_start_on_meta_changes_nothing(folder, straight, more):
    deferred, out = pretrain(folder, "--train-iters", "5", "--lr-decay-iters", "20", "--init-model-with-meta-device",
                             *more)
    assert losses(deferred) == losses(straight)[:5]
    assert "WARNING" not in out


def test_bytes_that_changed_are_noticed_unless_nobody_is_to_look(folder):
    save = folder / "save_verified"
    flags = ["--train-iters", "4", "--lr-decay-iters", "20"]
    whole, _ = pretrain(folder, *flags, "--save", str(save), "--save-interval", "2", "--exit-interval", "2")
    [*_, changed] = sorted((save / "iter_0000002").glob("*.distcp"))
    content = bytearray(changed.read_bytes())
    content[len(content) // 2] ^= 1
    changed.write_bytes(content)
    _, out = pretrain(folder, *flags, "--load", str(save), expect=1)
    assert changed.name in out
    steps, _ = pretrain(folder, *flags, "--load", str(save), "--no-verify-checkpoint")
    assert [step["step"] for step in steps] == [3, 4]


def test_prefetch_and_resharding_change_nothing(folder, straight):
    config = (LAYERS + "reshard_after_forward: false\n"
              "num_to_forward_prefetch: 1\nnum_to_backward_prefetch: 1\n")
    other, _ = pretrain(folder, "--train-iters", "5", "--lr-decay-iters", "20", config=config)
    assert losses(other) == losses(straight)[:5]


def test_a_plan_of_units_changes_nothing(folder, straight):
    flags = ["--lr-decay-iters", "20", "--train-iters"]
    save = folder / "planned"
    found, out = pretrain(folder, *flags, "12", "--fsdp2-plan", "auto", "--save", str(save),
                         "--save-interval", "100")
    assert losses(found) == losses(straight)[:12]
    assert "--fsdp2-plan auto: gathers take " in out  # and then whatever is faster
    (folder / "plan.yaml").write_text("units:\n  - [model.layers.0, model.layers.1]\nnum_to_forward_prefetch: 1\n")
    given, _ = pretrain(folder, *flags, "5", "--fsdp2-plan", folder / "plan.yaml", "--fsdp-schedule-trace",
                        folder / "planned_traces")
    assert losses(given) == losses(straight)[:5]
    events = json.loads((folder / "planned_traces" / "rank_0.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "b"} == {"model.layers.0", "GPTModel"}
    (folder / "plan.yaml").write_text("units:\n  - model.layers.7\n")
    _, out = pretrain(folder, *flags, "5", "--fsdp2-plan", folder / "plan.yaml", expect=2)
    assert "--fsdp2-plan: the plan names 'model.layers.7', and the model has no such module" in out


def test_megatrons_format_and_a_conversion_change_nothing(folder, straight):
    save, converted = folder / "save_dist", folder / "converted"
    flags = ["--train-iters", "6", "--lr-decay-iters", "20"]
    dist = ["--ckpt-format", "torch_dist"]
    first, _ = pretrain(folder, *flags, *dist, "--exit-interval", "3", "--save", str(save), "--save-interval", "100")
    assert (save / "iter_0000003" / "metadata.json").exists()
    second, _ = pretrain(folder, *flags, *dist, "--load", str(save))
    assert losses(first + second) == losses(straight)[:6]
    pretrain(folder, *flags, "--load", str(save), expect=1)  # its --ckpt-format is torch_dcp
    none, out = pretrain(folder, *flags, "--load", str(save), "--auto-detect-ckpt-format", "--ckpt-convert-format",
                         "torch_dcp", "--ckpt-convert-save", str(converted))
    assert not none and "-> torch_dcp." in out
    third, _ = pretrain(folder, *flags, "--load", str(converted / "torch_dcp"))
    assert losses(third) == losses(second)


def test_a_checkpoint_goes_on_at_another_number_of_ranks(folder):
    save = folder / "save_elastic"
    flags = ["--train-iters", "6", *NO_DROPOUT]
    whole, _ = pretrain(folder, *flags)
    pretrain(folder, *flags, "--exit-interval", "3", "--save", str(save), "--save-interval", "100")
    second, _ = pretrain(folder, *flags, "--load", str(save), ranks=4)
    for here, there in zip(losses(second), losses(whole)[3:], strict=True):
        assert here == pytest.approx(there, rel=1e-6)  # the sums run over 4 shares instead of 2


def test_evaluation_and_the_log_line(folder):
    _, out = pretrain(folder, "--train-iters", "10", "--eval-interval", "5", "--eval-iters", "2")
    lines = [line for line in out.splitlines() if " iteration " in line and "lm loss" in line and "|" in line]
    trained = [line for line in lines if "elapsed time per iteration (ms):" in line]
    assert len(trained) == 3  # the first, and each --log-interval
    assert "iteration        5/      10" in trained[1]
    assert any("validation loss at iteration 5" in line for line in out.splitlines())


def test_optional_fields_of_the_log_line_do_not_depend_on_sharding(folder):
    """Zeros among gradients (rows of tokens that never came) and norms are sums over all ranks' rows, each once."""
    flags = ["--train-iters", "5", *NO_DROPOUT,
             "--untie-embeddings-and-output-weights", "--log-params-norm", "--log-num-zeros-in-grad", "--log-tps"]
    found = []
    for ranks, config in ((1, LAYERS), (2, LAYERS), (2, "sharding_size: 1\n")):
        _, out = pretrain(folder, *flags, ranks=ranks, config=config)
        _, line = [line for line in out.splitlines() if "params norm:" in line]  # of the first and the last step
        fields = dict(field.rsplit(":", 1) for field in line.split("|") if ":" in field)
        fields = {name.strip(): value for name, value in fields.items()}
        found.append([float(fields[name]) for name in ("num zeros", "params norm", "tokens per sample")])
    assert found[0][0] > 0 and found[0][1] > 0 and found[0][2] == 16
    assert found[1] == found[0] and found[2] == found[0]


def test_replicas_and_tiled_mlps_have_the_losses_of_shards(folder):
    flags = ["--train-iters", "5", *NO_DROPOUT]
    sharded, _ = pretrain(folder, *flags, ranks=4)
    replicated, _ = pretrain(folder, *flags, ranks=4,
                             config="sharding_size: 2\nsub_modules_to_wrap: ['model.layers.{*}']\n")
    tiled, _ = pretrain(folder, *flags, "--apply-tiled-mlp", "--tiled-num-shards", "3", ranks=4,
                        config="sharding_size: 2\nsub_modules_to_wrap: ['model.layers.{*}', 'model.layers.{*}.mlp']\n")
    for other in (replicated, tiled):
        for here, there in zip(losses(other), losses(sharded), strict=True):
            assert here == pytest.approx(there, rel=1e-6)  # sums of sums, in another order


def test_ranks_that_share_a_sequence_have_the_losses_of_one(folder):
    flags = ["--train-iters", "10", *NO_DROPOUT, "--peak-tflops", "1", "--reset-attention-mask", "--eval-iters",
             "1", "--eval-interval", "10", "--calculate-per-token-loss"]
    alone = pretrain(folder, *flags, ranks=1)
    whole = pretrain(folder, *[flag for flag in flags if flag != "--reset-attention-mask"], ranks=1)

    def flops(run, ranks=1):
        return [step["mfu"] * step["step_s"] * ranks for step in run[0]]

    assert sum(flops(alone)) < 0.999 * sum(flops(whole))
    ulysses = ["--context-parallel-size", "2"]
    for ranks, config in ((2, LAYERS), (4, LAYERS), (4, LAYERS + "sharding_size: 2\n")):
        shared = pretrain(folder, *flags, *ulysses, ranks=ranks, config=config)
        assert losses(shared[0]) == pytest.approx(losses(alone[0]), abs=2e-6)
        assert flops(shared, ranks) == pytest.approx(flops(alone), rel=1e-9)
        norms = [[step["grad_norm"] for step in run[0]] for run in (shared, alone)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        values = [float(run[1].split("lm loss value: ")[1].split()[0]) for run in (shared, alone)]
        assert values[0] == pytest.approx(values[1], abs=3e-6)  # printed with six places
    means = [losses(pretrain(folder, *flags[:-1], *more, ranks=2)[0]) for more in (ulysses, [])]
    assert means[0] == pytest.approx(means[1], abs=2e-6)  # means of microbatches
    _, out = pretrain(folder, *flags, "--context-parallel-size", "3", ranks=3, expect=2)
    assert "GPTModel has 4 attention heads, which 3 ranks of a sequence cannot share evenly" in out


def test_a_ring_has_the_losses_of_one_rank(folder):
    """Rings of two and four places, with shared heads, combined with other wrappers of a layer."""
    flags = ["--train-iters", "6", *NO_DROPOUT, "--reset-attention-mask", "--reset-position-ids", "--eval-iters", "1",
             "--eval-interval", "6"]
    ring, hybrid = ["--cp-comm-type", "p2p"], ["--context-parallel-algo", "hybrid_cp_algo"]
    whole = pretrain(folder, *flags, ranks=1)
    value = [float(whole[1].split("lm loss value: ")[1].split()[0])]
    save = folder / "save_ring"
    saving = ["--save", str(save), "--save-interval", "3"]
    for ranks, size, config, more in (
            (2, 2, LAYERS, [*ring, *saving]),
            (4, 4, "sharding_size: 2\n" + LAYERS, [*hybrid, "--ulysses-degree-in-cp", "2"]),
            (4, 2, LAYERS + "reshard_after_forward: true\n", [*ring, "--recompute-activations"])):
        shared = pretrain(folder, *flags, "--context-parallel-size", str(size), *more, ranks=ranks, config=config)
        # sums over keys and ranks, in other orders
        assert losses(shared[0]) == pytest.approx(losses(whole[0]), abs=2e-6)
        assert [step["grad_norm"] for step in shared[0]] == pytest.approx([step["grad_norm"] for step in whole[0]],
                                                                          rel=1e-5)
        assert [float(shared[1].split("lm loss value: ")[1].split()[0])] == pytest.approx(value, abs=3e-6)
    on, out = pretrain(folder, *flags, "--load", str(save), "--ckpt-step", "3", "--context-parallel-size", "4",
                       "--cp-comm-type", "all_gather", ranks=4)
    assert losses(on) == pytest.approx(losses(whole[0])[3:], abs=2e-6) and "is done as megatron_cp_algo" in out
