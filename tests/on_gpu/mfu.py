"""How fast is it? Models of 0.5 to 7 B parameters, saves, and where the time of a microbatch goes."""

import collections
import csv
import dataclasses
import re
import shutil

from lines import Failure
from machine import find_tool
from models import largest, sized
from training import speed

BF16 = "param_dtype: bf16\nreduce_dtype: fp32\n"
STEPS = 8
SHOWN_KERNELS = 12
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

    def groups(self):
        sizes = [train(self.training, size, size, limit=55) for size in ("0.5 B", "1.5 B", "3 B")]
        yield 1, [*sizes, *self.recomputed(), *self.saves(), self.kernel_times()]

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

    def kernel_times(self):
        """One microbatch under NVIDIA's profiler."""
        model = sized("0.5 B", self.machine)
        name = "0.5 B, kernels of a microbatch"
        model = dataclasses.replace(model, global_batch=model.micro_batch)
        line = train(self.training, name, "0.5 B", model, steps=1, limit=60)
        tool, table = find_tool("ncu"), self.training.folder(name) / "kernels.csv"
        line.obstacle = line.obstacle or ("" if tool else "ncu is not installed")
        line.command = [tool or "ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none",
                        "--metrics", "gpu__time_duration.sum", "--log-file", table, *line.command]
        line.judge = lambda _: kernel_figures(table.read_text())
        return line


def save_speed(model):
    """A judge: how long training stood still for a save, the first and the later ones."""

    def judge(steps, output):
        saves = [float(most) / 1000 for _, most in SAVE_TIME.findall(output)]
        if not saves:
            raise Failure("the log tells of no save")
        times = {"first save (s)": saves[0], "last save (s)": saves[-1]}
        return {**speed(steps), "state (GiB)": model.state_gib(), **times}

    return judge


def kernel_figures(text):
    """Of ncu's raw page in nanoseconds: a head, a row of units, a row a kernel; its notices begin with ==."""
    rows = list(csv.DictReader(line for line in text.splitlines() if line.startswith('"')))
    times, counts = collections.Counter(), collections.Counter()
    for row in rows[1:]:
        name = row["Kernel Name"].partition("(")[0][:80]
        times[name] += float(row["gpu__time_duration.sum"].replace(",", "")) / 1e6
        counts[name] += 1
    if not times:
        raise Failure("ncu saw no kernel")
    return {"kernels": sum(counts.values()), "kernels (ms)": sum(times.values()),
            "longest": [{"kernel": name, "launches": counts[name], "ms": round(ms, 3)}
                        for name, ms in times.most_common(SHOWN_KERNELS)]}
