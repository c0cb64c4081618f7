"""`megashard rl` in the place of prime-rl's trainer: its losses from its files, and the weights that it publishes."""
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import megashard
import prime_rollouts
from conversations import write_conversation_set

sys.path.append(str(megashard.ROOT / "launch" / "examples"))
from published_weights import read_step  # noqa: E402

WORDS, STEPS, LR = 40, 4, 3e-3
TRAINING = (f"--hf-model {{folder}}/base --seq-length 48 --train-iters {STEPS} --lr {LR} --min-lr {LR} "
            "--lr-decay-style constant --weight-decay 0 --clip-grad 1 --log-interval 1 --peak-tflops 1 "
            "--tokenizer-type NullTokenizer --vocab-size 39 " + megashard.RUN)


def network(seed=1):
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.4))


@pytest.fixture(scope="module")
def steps():
    """[steps][ranks][micro batches] for two ranks, of unequal lengths, with all streams in some."""
    draw = torch.Generator().manual_seed(3)
    number = lambda low, high: int(torch.randint(low, high, (1,), generator=draw))
    rand = lambda count: torch.rand(count, generator=draw).tolist()

    def sample():
        prompt, answer = number(2, 6), number(3, 9)
        count = prompt + answer
        engine = [-3 * value for value in rand(count)]
        return (torch.randint(0, WORDS, (count,), generator=draw).tolist(), [False] * prompt + [True] * answer,
                rand(1)[0] * 4 - 2, engine, [1.0, 0.7, 1.3][number(0, 3)])

    def micro_batch(kind):
        samples = [sample() for _ in range(number(1, 4))]
        mask = [each for one in samples for each in one[1]]
        if kind == 0:
            return prime_rollouts.packed(samples)
        chosen = [value if value > 0.3 else 0.0 for value in rand(len(mask))]
        stream = [value if each else 0.0 for value, each in zip(chosen, mask)]
        if kind == 1:
            ce = [0.0 if mask[i] or i == 0 else 1.5 for i in range(len(mask))]
            begins = [sum(len(one[0]) for one in samples[:i]) for i in range(len(samples))]
            for begin in begins:
                ce[begin] = 0.0
            return prime_rollouts.packed(samples, ce_weights=ce, rl_weights=stream)
        reference = [-3.0 - value for value in rand(len(mask))]
        return prime_rollouts.packed(samples, ref_logprobs=reference, ref_kl_weights=stream,
                                     rl_weights=[0.0] * len(mask))

    return [[[micro_batch((step + rank + each) % 3) for each in range(2)] for rank in range(2)]
            for step in range(STEPS)]


def by_pytorch(steps, **options):
    """(loss, gradient norm) of each step."""
    model, seen = network(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0)
    for of_ranks in steps:
        parts = [prime_rollouts.losses(model, batch, **options) for of_rank in of_ranks for batch in of_rank]
        counts = torch.stack([count for _, count in parts]).sum(0).clamp_min(1)
        loss = (torch.stack([sums for sums, _ in parts]).sum(0) / counts).sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append((float(loss.detach()), float(norm)))
    return seen


def train(folder, run, *flags, ranks=1, expect=0, **options):
    """The metrics of each step, and the output."""
    metrics = run / "metrics.jsonl"
    done = megashard.run(*megashard.launch(ranks, "rl", run),
                         *megashard.with_defaults(flags, TRAINING.format(folder=folder)), "--metrics-file", metrics,
                         expect=expect, timeout=240, **options)
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [json.loads(line) for line in lines], done.stdout + done.stderr


def expect_same(ours, theirs):
    assert [step["loss"] for step in ours] == pytest.approx([loss for loss, _ in theirs], abs=1e-5)
    assert [step["grad_norm"] for step in ours] == pytest.approx([norm for _, norm in theirs], rel=1e-4)


@pytest.fixture(scope="module")
def base(folder):
    network().save_pretrained(folder / "base")
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["default", "ipo"])
def test_losses_of_prime_rl(base, tmp_path, steps, ranks, kind):
    for number, of_ranks in enumerate(steps, 1):
        of_one = [[batch for of_rank in of_ranks for batch in of_rank]]
        prime_rollouts.write_step(tmp_path, number, of_ranks if ranks == 2 else of_one)
    ours, _ = train(base, tmp_path, "--prime-loss", kind, ranks=ranks)
    assert sum(step["is_masked"] for step in ours) > 0.2, "no token is beyond the bounds"
    expect_same(ours, by_pytorch(steps, ipo=kind == "ipo"))
    weights = load_file(tmp_path / "broadcasts" / f"step_{STEPS}" / "model.safetensors")
    assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
    assert (tmp_path / "broadcasts" / f"step_{STEPS}" / "STABLE").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path / "broadcasts" / f"step_{STEPS}")


def test_a_sequence_over_two_ranks(base, tmp_path, steps):
    for number, of_ranks in enumerate(steps, 1):
        prime_rollouts.write_step(tmp_path, number, [[batch for of_rank in of_ranks for batch in of_rank]])
    ours, _ = train(base, tmp_path, "--context-parallel-size", 2, "--cp-comm-type", "a2a", ranks=2)
    expect_same(ours, by_pytorch(steps))


@pytest.mark.parametrize("more", [(), ("--publish-full-interval", 3),
                                  ("--lora-r", 2, "--lora-target-modules", "all-linear")])
def test_on_the_simulated_device(base, tmp_path, steps, more):
    """The same steps and weights; the device finds no race of the copies beside training."""
    losses, weights = [], []
    for device in ("cpu", "sim"):
        run = tmp_path / device
        for number, of_ranks in enumerate(steps, 1):
            prime_rollouts.write_step(run, number, of_ranks)
        ours, _ = train(base, run, "--device", device, *more, ranks=2)
        losses.append([step["loss"] for step in ours])
        weights.append(read_step(run / "broadcasts" / f"step_{STEPS}"))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        assert torch.allclose(weight.float(), weights[1][name].float(), atol=1e-4, rtol=1e-2), name  # a bf16 step


def test_published_changes(base, tmp_path, steps):
    """Each step's folder, whole or changes, gives the same weights and checksums; older ones go."""
    for number, of_ranks in enumerate(steps, 1):
        prime_rollouts.write_step(tmp_path, number, of_ranks)
    train(base, tmp_path, "--publish-full-interval", 3, ranks=2)
    broadcasts = tmp_path / "broadcasts"
    assert sorted(path.name for path in broadcasts.iterdir()) == ["step_3", "step_4"]
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "rollouts").symlink_to(tmp_path / "rollouts")
    train(base, whole, ranks=2)
    expected = load_file(whole / "broadcasts" / "step_4" / "model.safetensors")
    found = read_step(broadcasts / "step_4")
    assert list(broadcasts.glob("step_4/delta-*")) and found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    checksums = [(each / "broadcasts" / "step_4" / "checksums.json").read_text() for each in (tmp_path, whole)]
    assert checksums[0] == checksums[1]
    damaged = next(broadcasts.glob("step_4/delta-00001*"))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        read_step(broadcasts / "step_4")


def test_a_set_of_conversations_for_each_step(base, tmp_path, steps):
    """rollouts.vision.safetensors, whose last micro batch one rank lacks: as the same answers in prime-rl's files."""
    sets, files = tmp_path / "sets", tmp_path / "files"
    for number, of_ranks in enumerate(steps, 1):
        rows = []
        for batch in [batch for of_rank in of_ranks for batch in of_rank]:
            begin = 0
            for length in batch.seq_lens:
                rows.append([field[begin:begin + length] for field in (
                    batch.input_ids, batch.loss_mask, batch.advantages, batch.inference_logprobs)])
                begin += length
        rows = rows[:len(rows) - 1 + len(rows) % 2]  # an odd number
        samples = [(tokens, mask, advantages[0], engine, 1.0) for tokens, mask, advantages, engine in rows]
        prime_rollouts.write_step(files, number, [[prime_rollouts.packed([sample]) for sample in samples]])
        (sets / "rollouts" / f"step_{number}").mkdir(parents=True)
        column = lambda field: torch.tensor([value for row in rows for value in row[field]], dtype=torch.float)
        write_conversation_set(sets / "rollouts" / f"step_{number}" / "rollouts", [row[0] for row in rows],
                               [row[1] for row in rows], advantages=column(2), infer_logprobs=column(3))
    by_sets, _ = train(base, sets, ranks=2)
    by_files, _ = train(base, files)
    assert [step["loss"] for step in by_sets] == pytest.approx([step["loss"] for step in by_files], abs=1e-5)


def test_a_killed_run_goes_on(base, tmp_path, steps):
    """Killed while it waits for a step, and within one: the weights are those of a run that was not."""
    for number, of_ranks in enumerate(steps, 1):
        prime_rollouts.write_step(tmp_path / "whole", number, of_ranks)
    saves = ("--save-interval", 1, "--load")
    expected, _ = train(base, tmp_path / "whole", ranks=2)
    run = tmp_path / "killed"
    prime_rollouts.write_step(run, 1, steps[0])
    command = [*megashard.launch(2, "rl", run), *megashard.with_defaults(
        [*saves, run / "checkpoints", "--save", run / "checkpoints"], TRAINING.format(folder=base)),
               "--metrics-file", run / "metrics.jsonl"]
    for number in (1, 2):
        started = subprocess.Popen(list(map(str, command)), env=megashard.environment(), start_new_session=True,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not (run / "broadcasts" / f"step_{number}" / "STABLE").exists():
            assert started.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        if number == 1:  # it waits for step 2
            prime_rollouts.write_step(run, 2, steps[1])
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    for number in (3, 4):
        prime_rollouts.write_step(run, number, steps[number - 1])
    megashard.run(*command, timeout=120)
    for step in (3, 4):
        weights = [load_file(each / "broadcasts" / f"step_{step}" / "model.safetensors")
                   for each in (tmp_path / "whole", run)]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("damage, message", [
    (lambda data: data[:-9], "damaged"), (lambda data: b"\x93\x01\x02\x03", "not an array of prime-rl's fields"),
    (lambda data: b"\x91" * 100000, "not an array of prime-rl's fields")])
def test_a_damaged_file_is_named(base, tmp_path, steps, damage, message):
    prime_rollouts.write_step(tmp_path, 1, steps[0][:1])
    path = tmp_path / "rollouts" / "step_1" / "rank_0.bin"
    path.write_bytes(damage(path.read_bytes()))
    _, out = train(base, tmp_path, expect=megashard.FAILURE)
    assert str(path) in out and message in out


def test_ranks_need_as_many_micro_batches(base, tmp_path, steps):
    prime_rollouts.write_step(tmp_path, 1, [steps[0][0], steps[0][1][:1]])
    _, out = train(base, tmp_path, ranks=2, expect=None)
    assert "2 micro batches for rank 0 and 1 for rank 1" in out


def test_it_stops_while_it_waits(base, tmp_path, steps):
    """Ctrl-C ends a run that waits for rollouts, and the exit signal saves it."""
    prime_rollouts.write_step(tmp_path, 1, steps[0])
    command = [*megashard.launch(2, "rl", tmp_path), *megashard.with_defaults(
        ["--save", tmp_path / "checkpoints", "--save-interval", 100, "--exit-signal-handler"],
        TRAINING.format(folder=base))]
    started = subprocess.Popen(list(map(str, command)), env=megashard.environment(), start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "broadcasts" / "step_1" / "STABLE").exists():
        assert started.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(started.pid, signal.SIGTERM)
    out, _ = started.communicate(timeout=60)
    assert (tmp_path / "checkpoints" / megashard.TRACKER).read_text().strip() == "1", out[-2000:]


def test_a_rule_is_learnt(tmp_path):
    """An orchestrator samples a toy task with transformers; the trainer is killed three times, and the reward rises
    from chance to 0.9."""
    import prime_orchestrator

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=prime_orchestrator.WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=32))
    model.save_pretrained(tmp_path / "base")
    command = [*megashard.launch(2, "rl", tmp_path), *(
        f"--hf-model {tmp_path}/base --seq-length 1024 --train-iters 200 --lr 3e-3 --min-lr 3e-3 "
        f"--lr-decay-style constant --weight-decay 0 --save {tmp_path}/checkpoints --load {tmp_path}/checkpoints "
        "--save-interval 1 --tokenizer-type NullTokenizer --vocab-size 11 --prime-kl-tau 0 " + megashard.RUN).split()]
    start = lambda: subprocess.Popen(list(map(str, command)), env=megashard.environment(), start_new_session=True,
                                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    trainer, step, random = start(), 0, torch.Generator().manual_seed(1)
    orchestrator = prime_orchestrator.Orchestrator(tmp_path, model, ranks=2)
    try:
        while len(orchestrator.rewards) < 200 and (not orchestrator.rewards or orchestrator.rewards[-1] < 0.95):
            orchestrator.wait_for_weights(step)
            step += 1
            orchestrator.roll_out(step)
            if step in (5, 12, 20):  # somewhere within the step, or behind it
                time.sleep(float(torch.rand(1, generator=random)) * 0.3)
                os.killpg(trainer.pid, signal.SIGKILL)
                trainer.wait()
                trainer = start()
    finally:
        os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait()
    assert orchestrator.rewards[0] < 0.2 and orchestrator.rewards[-1] >= 0.9, orchestrator.rewards
    print(f"rewards from {orchestrator.rewards[0]:.2f} to {orchestrator.rewards[-1]:.2f} in {step} steps")


def test_the_example_learns_and_goes_on(tmp_path):
    def rewards(until):
        out = megashard.run(sys.executable, megashard.ROOT / "launch" / "examples" / "rl_arithmetic.py", tmp_path,
                            "--until", until, env=megashard.environment(MEGASHARD_BIN=str(megashard.PROGRAM))).stdout
        return [(int(line.split()[1][:-1]), float(line.split()[-1])) for line in out.splitlines()]

    first = rewards(0.15)
    assert first[0][1] < 0.13 and first[-1][1] >= 0.15
    second = rewards(0.2)
    assert second[0][0] == first[-1][0] + 1 and second[0][1] > 0.12 and second[-1][1] >= 0.2
