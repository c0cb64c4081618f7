"""The same models in PyTorch: FSDP2 on one GPU, eager and compiled, with fused AdamW, and ours beside them."""

import os
import pathlib
import sys

from lines import Line
from mfu import STEPS, train
from models import sized
from training import folder_name, read_steps, speed

PEER = pathlib.Path(__file__).with_name("torch_peer.py")


class Peers:
    def __init__(self, machine, training, scratch):
        self.machine, self.training, self.scratch = machine, training, scratch
        self.speeds = {}  # by line name

    def groups(self):
        for size in ("0.5 B",) if self.machine.dry_run else ("0.5 B", "1.5 B", "3 B"):  # all are as tiny in a dry run
            peers = {f"{size}, torch eager": [], f"{size}, torch compiled": ["--compile", self.backend()]}
            ours = train(self.training, f"{size}, megashard", size, limit=50, judge=self.beside(list(peers)))
            workers = 2 if self.machine.dry_run else 1  # which is what takes time in a dry run
            yield workers, [self.peer(name, size, flags, ours.obstacle) for name, flags in peers.items()]
            yield 1, [ours]

    def backend(self):
        return "eager" if self.machine.dry_run else "inductor"  # of a dry run only the tracing

    def peer(self, name, size, flags, obstacle):
        folder, model = self.scratch / folder_name(name), sized(size, self.machine)
        metrics = folder / "metrics.jsonl"
        device = "cpu" if self.machine.dry_run else "cuda"
        command = [sys.executable, PEER, "--device", device, "--config", folder / "config.json",
                   "--seq-length", model.sequence, "--micro-batch-size", model.micro_batch,
                   "--global-batch-size", model.global_batch, "--train-iters", STEPS, "--metrics-file", metrics, *flags]

        def judge(_output):
            self.speeds[name] = speed(read_steps(metrics))
            return self.speeds[name]

        environment = {**os.environ, **({"OMP_NUM_THREADS": "1"} if self.machine.dry_run else {})}
        limit = 85 if "--compile" in flags else 40
        return Line(name, command, limit, environment, judge, obstacle, lambda: model.write(folder))

    def beside(self, peers):
        """A judge: our speed, and how many times that of each peer it is."""

        def judge(steps, _output):
            figures = speed(steps)
            for peer in peers:
                if peer in self.speeds:
                    words = "x " + peer.partition(", ")[2]
                    figures[words] = figures["tokens/s"] / self.speeds[peer]["tokens/s"]
                    figures[f"memory {words}"] = figures["peak memory (GiB)"] / self.speeds[peer]["peak memory (GiB)"]
            return figures

        return judge
