"""Lines that train: `megashard pretrain` on generated tokens, and their metrics files."""

import json
import re
import shutil
import statistics

from lines import Failure, Line
from machine import PROGRAM, program_environment

WARM_UP = 3  # steps that no speed is taken from
GRAD_NORM_SLACK = 10  # tolerance of a norm / tolerance of a loss


def folder_name(name):
    return re.sub(r"[^A-Za-z0-9.]+", "_", name)


class Training:
    """Makes such lines for one machine, and keeps the steps of those that ended, by name."""

    def __init__(self, machine, scratch):
        self.machine, self.scratch = machine, scratch
        self.steps = {}

    def folder(self, name):
        return self.scratch / folder_name(name)

    def line(self, name, model, *, judge, device=None, sharding="", flags=(), steps=8, limit=60, environment=None,
             obstacle="", keep_files=True):
        """`judge` makes figures of the steps and the output; `sharding` is of the FSDP2 file."""
        folder = self.folder(name)
        metrics = folder / "metrics.jsonl"
        command = [
            PROGRAM, "pretrain", "--device", device or self.machine.device, "--hf-model", folder / "model",
            "--from-scratch", "--mock-data", "--tokenizer-type", "NullTokenizer", "--seq-length", model.sequence,
            "--micro-batch-size", model.micro_batch, "--global-batch-size", model.global_batch,
            "--train-iters", steps, "--lr", 1e-4, "--lr-decay-style", "constant", "--eval-iters", 0,
            "--log-interval", 1, "--use-torch-fsdp2", "--fsdp2-config-path", folder / "fsdp2.yaml",
            "--metrics-file", metrics, *flags]

        def prepare():
            model.write(folder / "model")
            (folder / "fsdp2.yaml").write_text("sub_modules_to_wrap: ['model.layers.{*}']\n" + sharding)

        def read(output):
            self.steps[name] = read_steps(metrics)
            return judge(self.steps[name], output)

        def clean():
            if not keep_files:
                shutil.rmtree(folder, ignore_errors=True)

        threads = {"OMP_NUM_THREADS": "1"} if self.machine.dry_run else {}
        surroundings = program_environment(**{**threads, **(environment or {})})
        return Line(name, command, limit, surroundings, read, obstacle, prepare, clean)

    def same_as(self, other, tolerance):
        """A judge: the steps that both have are those of the line `other`, to within a relative tolerance."""

        def judge(steps, _output):
            if other not in self.steps:
                raise Failure(f"nothing to compare with: '{other}' did not train")
            difference = largest_difference(steps, self.steps[other])
            if not difference <= tolerance:  # not a number, too
                raise Failure(f"differs from '{other}' by {difference:.2g}, and {tolerance:.0e} is allowed")
            return {"loss": steps[-1]["loss"], "difference": difference}

        return judge


def read_steps(metrics):
    steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if not steps:
        raise Failure("no step was trained")
    if any(step[key] is None for step in steps for key in ("loss", "grad_norm")):
        raise Failure("a loss or a gradient norm is not a number")
    return steps


def largest_difference(steps, others):
    """Largest relative difference of losses, and of gradient norms with a separate scale, over the common steps."""
    by_step = {each["step"]: each for each in others}
    both = [(step, by_step[step["step"]]) for step in steps if step["step"] in by_step]
    if not both:
        raise Failure("no step in common with the line to compare with")
    slack = {"loss": 1, "grad_norm": GRAD_NORM_SLACK}
    return max(abs(a[key] / b[key] - 1) / slack[key] for a, b in both for key in slack)


def speed(steps, _output=""):
    """Medians of the steps after the warm-up, and the peak of all."""
    steady = steps[WARM_UP:] or steps
    figures = {"tokens/s": statistics.median(step["tokens_per_s"] for step in steady)}
    if steady[0].get("mfu") is not None:
        figures["MFU"] = statistics.median(step["mfu"] for step in steady)
    figures["peak memory (GiB)"] = max(step["peak_memory_bytes"] for step in steps) / 2**30
    return figures
