"""Ranks of real trainings that are stopped by SIGSTOP: every run ends within one deadline and names the rank, and goes
on from what was saved as if nothing had been. All cases: tests/long/hangs."""
import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

import megashard
from megashard import LAYERS, NO_DROPOUT, RUN, environment, launch, network, write_documents

DEADLINE = 60  # seconds; the least that --distributed-timeout-minutes takes
ENDED = DEADLINE + 15  # for a machine that does other things, too
RANKS, VICTIM = 4, 2
STEPS = 20
TRAINING = (f"{RUN} {' '.join(NO_DROPOUT)} --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --seed 5 "
            f"--distributed-timeout-minutes 1 --train-iters {STEPS} --save-interval 5 --split 90,10,0")
DENSE = network(layers=3, hidden=64, length=32)
WRITES_A_LOT = network(layers=3, hidden=512, length=32)  # so that a save lasts
LAYOUTS = {
    "fsdp": (DENSE, LAYERS),
    "hsdp": (DENSE, LAYERS + "sharding_size: 2\n"),
    "context_parallel": (DENSE + "--context-parallel-size 2", LAYERS),
    "expert_parallel": ("--expert-model-parallel-size 2 --seq-length 32 --from-scratch", LAYERS),
}


class Run:
    """One training in its own folder, with its output."""

    def __init__(self, folder, layout, *flags, big=False):
        self.folder = folder
        self.layout, self.flags = layout, [*flags, *(WRITES_A_LOT.split() if big else [])]
        folder.mkdir(parents=True, exist_ok=True)
        write_documents(folder / "data", [[(7 * i + j) % 59 for j in range(40)] for i in range(60)])
        (folder / "fsdp2.yaml").write_text(LAYOUTS[layout][1])
        if layout == "expert_parallel":
            (folder / "moe").mkdir(exist_ok=True)
            (folder / "moe" / "config.json").write_text(json.dumps(MOE))

    def command(self, save):
        model = ["--hf-model", self.folder / "moe"] if self.layout == "expert_parallel" else []
        flags = megashard.with_defaults(self.flags, f"{LAYOUTS[self.layout][0]} {TRAINING}")
        return [str(word) for word in launch(
            RANKS, "pretrain", *model, *flags, "--data-path", self.folder / "data", "--fsdp2-config-path",
            self.folder / "fsdp2.yaml", "--save", save, "--load", save, "--metrics-file", f"{save}.jsonl")]

    @contextlib.contextmanager
    def started(self, save="save"):
        out = open(self.folder / "out", "w+")
        process = subprocess.Popen(self.command(self.folder / save), stdout=out, stderr=subprocess.STDOUT,
                                   env=environment())
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            out.close()

    def printed(self):
        return (self.folder / "out").read_text()

    def steps(self, save="save"):
        """The numbers of each step, as they were written: bits."""
        path = self.folder / f"{save}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return {step["step"]: (step["loss"], step["grad_norm"], step.get("validation_loss"))
                for step in map(json.loads, lines)}


MOE = dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", vocab_size=64, hidden_size=64,
           intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
           num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1,
           mlp_only_layers=[], norm_topk_prob=True, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=64,
           tie_word_embeddings=False, hidden_act="silu", attention_bias=False, initializer_range=0.02,
           router_aux_loss_coef=0.001, output_router_logits=False)


def rank_process(launcher, rank):
    """The process of that rank once it runs the program; None before."""
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if entry.name.isdigit() and int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == launcher:
                variables = (entry / "environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in variables:
                    return int(entry.name)
    return None


def has_open(process, pattern):
    with contextlib.suppress(OSError):
        return any(re.search(pattern, os.readlink(entry)) for entry in pathlib.Path(f"/proc/{process}/fd").iterdir())
    return False


def wait_until(true, process, what):
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end and process.poll() is None, f"no {what}"
        time.sleep(0.0005)


# --- where a rank is stopped: each takes the run, the launcher and the rank's process, and returns at that moment

def in_rendezvous(run, launcher, process):
    pass  # it has just begun


def in_load(run, launcher, process):
    wait_until(lambda: has_open(process, r"iter_\d+/.*distcp"), launcher, "load")


def in_save(run, launcher, process):
    wait_until(lambda: has_open(process, r"\.iter_\d+\.tmp/"), launcher, "save")


def in_evaluation(run, launcher, process):
    wait_until(lambda: len(run.steps()) >= 4, launcher, "step")
    time.sleep(0.2)  # between the steps there is only evaluation


def in_a_step(after):
    def wait(run, launcher, process):
        wait_until(lambda: len(run.steps()) >= 6, launcher, "step")
        time.sleep(after)
    return wait


EVALUATES = ["--eval-interval", "1", "--eval-iters", "400"]
LONG = ["--train-iters", "100000", "--lr-decay-iters", "100000"]
CASES = {
    "rendezvous": ("fsdp", in_rendezvous, [], r"rank 2"),
    "load": ("fsdp", in_load, [], r"rank 2.*step to load|rank 2.*load of step"),
    "evaluation": ("fsdp", in_evaluation, EVALUATES, r"rank 2.*evaluation after step"),
    "save": ("fsdp", in_save, [], r"rank 2.*save of"),
    "async_save": ("fsdp", in_save, ["--async-save"], r"rank 2.*(save of iteration|training step)"),
    "hsdp_save": ("hsdp", in_save, [], r"rank 2.*save of"),
    **{f"{layout}_step_{after}": (layout, in_a_step(after / 1000), LONG, r"rank 2.*training step")
       for layout in LAYOUTS for after in (0, 7, 13, 29)},
}
AT_A_TIME = 4
SAMPLE = ["async_save", "hsdp_step_7"]  # of each run of the tests; at the same time, since they wait


class Hang:
    def __init__(self, name, folder):
        self.name = name
        self.layout, self.moment, flags, self.told = CASES[name]
        self.run = Run(folder, self.layout, *flags, big="save" in name or name == "load")

    def hang(self):
        """Trains until the rank is stopped, and then until the run has ended. Seconds that it took."""
        if self.name == "load":
            with self.run.started() as launcher:
                assert launcher.wait(timeout=DEADLINE * 2) == 0, self.run.printed()
        with self.run.started() as launcher:
            found = []
            wait_until(lambda: found.append(rank_process(launcher.pid, VICTIM)) or found[-1], launcher, "rank")
            victim = found[-1]
            self.moment(self.run, launcher, victim)
            os.kill(victim, signal.SIGSTOP)
            begin = time.monotonic()
            code = launcher.wait(timeout=4 * DEADLINE)
            seconds = time.monotonic() - begin
        printed = self.run.printed()
        assert code == megashard.FAILURE, f"exit code {code}\n{printed}"
        assert seconds < ENDED, f"{seconds:.0f} s\n{printed}"
        error = [line for line in printed.splitlines() if line.startswith("megashard: error: ")]
        assert len(error) == 1 and re.search(self.told, error[0]), printed
        assert "rank 2 was stopped by signal 19" in printed
        if self.name != "rendezvous":  # which has its own lines from the third second on
            assert re.search(r"has waited 30 s for rank 2[:,]|which waits for rank 2:", printed), printed
        return seconds, error[0]

    def resume(self):
        """The same command resumes with the bits of an undisturbed run."""
        before = self.run.steps()
        if self.run.flags[:2] == LONG[:2]:  # until some steps after the hang
            self.run.flags += ["--exit-interval", str((max(before) // 5 + 2) * 5)]
        for save in ("save", "undisturbed"):
            with self.run.started(save) as launcher:
                assert launcher.wait(timeout=4 * DEADLINE) == 0, self.run.printed()
        resumed, undisturbed = self.run.steps(), self.run.steps("undisturbed")
        assert resumed == undisturbed and len(resumed) >= min(STEPS, len(before))


def outcome(name, folder):
    """Seconds from the stop to the end, and the message; or the fault."""
    try:
        hang = Hang(name, folder / name)
        seconds, error = hang.hang()
        hang.resume()
        return f"{seconds:.1f} s: {error.removeprefix('megashard: error: ')}", True
    except AssertionError as error:
        return str(error), False


def outcomes(names, folder):
    """Runs the cases at the same time, because they mostly wait."""
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(lambda name: outcome(name, folder), names)))


def test_a_stopped_rank_ends_the_run_within_one_deadline(tmp_path):
    for name, (what, is_right) in outcomes(SAMPLE, tmp_path).items():
        assert is_right, f"{name}: {what}"


def main():
    import tempfile
    names = [name for name in CASES if len(sys.argv) < 2 or sys.argv[1] in name]
    failed = 0
    for begin in range(0, len(names), AT_A_TIME):
        with tempfile.TemporaryDirectory() as folder:
            for name, (what, is_right) in outcomes(names[begin:begin + AT_A_TIME], pathlib.Path(folder)).items():
                print(f"{name}: {what}", flush=True)
                failed += not is_right
    print(f"{len(names) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
