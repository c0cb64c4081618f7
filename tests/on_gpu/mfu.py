"""Speed of models of 0.5 to 7 B parameters and of saves, and the time of a microbatch by kernel."""

import gzip
import re
import shutil

from kernel_trace import ON_DEVICE, device_figures
from lines import Failure
from models import SEQUENCE, filling, largest, sized
from training import folder_name, speed

BF16 = "param_dtype: bf16\nreduce_dtype: fp32\n"
KEPT = "reshard_after_forward: false\n"  # where there is room for weights in bf16, too
STEPS = 8
TRACED, TRACED_MICROBATCHES = ("0.5 B", "3 B"), 2
SAVE_TIME = re.compile(r"save-checkpoint \.*: \(([\d.]+), ([\d.]+)\)")


def train(training, name, size, model=None, *, sharding=BF16, flags=(), obstacle="", **more):
    """A line that trains the model of that size as a user would, with fresh weights made on the device."""
    machine = training.machine
    model = model or sized(size, machine)
    if not machine.dry_run and model.needed_gib > machine.memory_gib:
        obstacle = f"needs {model.needed_gib:.0f} GiB of GPU memory"
    return training.line(name, model, sharding=sharding, flags=["--init-model-with-meta-device", *flags],
                         keep_files=False, obstacle=obstacle, **{"steps": STEPS, "judge": speed, **more})


class Mfu:
    def __init__(self, machine, training, scratch):
        self.machine, self.training, self.scratch = machine, training, scratch
        self.traced = {}  # traces by line name

    def groups(self):
        yield 1, [*self.sizes(1024), *self.traces(), self.small_moments(), *self.sizes(4096), *self.recomputed(),
                  *self.saves()]

    def sizes(self, sequence):
        """As in the forecast of docs/benchmarks.md."""
        for size, microbatches in (("0.5 B", 2), ("1.5 B", 4), ("3 B", 8), ("7 B", 1)):
            model = filling(size, self.machine, sequence, microbatches)
            yield train(self.training, f"{size}, sequences of {sequence}", size, model, limit=90, steps=6,
                        sharding=BF16 if size == "7 B" else BF16 + KEPT)

    def small_moments(self):
        """With room for gradients of earlier micro batches, so that the optimizer's share is smaller."""
        model = filling("7 B", self.machine, SEQUENCE, 6)
        flags = ["--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]
        return train(self.training, "7 B, moments in bf16", "7 B", model, flags=flags, limit=100, steps=5)

    def recomputed(self):
        size = largest(self.machine)
        sharding = BF16 + "recompute_modules: ['model.layers.{*}']\n"
        more = {"sharding": sharding, "limit": 70}
        yield train(self.training, f"{size}, recompute", size, **more)
        yield train(self.training, f"{size}, recompute, expandable segments", size, **more,
                    environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})

    def saves(self):
        """Twice the whole state; the disk must hold both for a moment."""
        free = shutil.disk_usage(self.scratch).free / 2**30
        size = next((size for size in ("1.5 B", "0.5 B") if 2.1 * sized(size, self.machine).state_gib() < free), None)
        obstacle = "" if size else f"the disk has only {free:.0f} GiB free"
        size = size or "0.5 B"
        for words, more_flags in {"saved": [], "saved while training": ["--async-save"]}.items():
            name = f"{size}, {words}"
            flags = ["--save", self.training.folder(name) / "save", "--save-interval", STEPS // 2, "--most-recent-k", 1,
                     "--timing-log-level", 1, *more_flags]
            yield train(self.training, name, size, flags=flags, limit=80, obstacle=obstacle,
                        judge=save_speed(sized(size, self.machine)))

    def traces(self):
        """A step of a few micro batches by LibTorch's profiler; the traces are kept."""
        for size in TRACED:
            model = filling(size, self.machine, SEQUENCE, TRACED_MICROBATCHES)
            name = f"{size}, traced"
            folder = self.training.folder(f"{name}, trace")
            flags = ["--profile", "--profile-step-start", STEPS // 2 - 1, "--profile-step-end", STEPS // 2,
                     "--profile-save-path", folder]
            self.traced[name] = folder / "rank_0.pt.trace.json"
            yield train(self.training, name, size, model, steps=STEPS // 2, flags=flags, limit=60, sharding=BF16 + KEPT,
                        judge=self.judge_trace(self.traced[name]))

    def judge_trace(self, path):
        categories = {"cpu_op"} if self.machine.dry_run else ON_DEVICE

        def judge(steps, _output):
            step_ms = 1e3 * steps[-2]["step_s"]  # the one before: the profiler takes time itself
            return {"step (ms)": step_ms, **device_figures(path.read_text(), categories)}

        return judge

    def finish(self, output):
        for name, path in self.traced.items():
            if path.exists():
                with gzip.open(output / f"{folder_name(name)}.json.gz", "wb") as kept:
                    kept.write(path.read_bytes())


def save_speed(model):
    """A judge: how long training stood still for a save, the first and the later ones."""

    def judge(steps, output):
        saves = [float(most) / 1000 for _, most in SAVE_TIME.findall(output)]
        if not saves:
            raise Failure("the log tells of no save")
        times = {"first save (s)": saves[0], "last save (s)": saves[-1]}
        return {**speed(steps), "state (GiB)": model.state_gib(), **times}

    return judge
