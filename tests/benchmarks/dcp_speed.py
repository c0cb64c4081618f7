"""Saves and loads of one process by torch.distributed.checkpoint: the twin of checkpoint_speed.cpp.

    dcp_speed.py MEBIBYTES      commands line by line on stdin, each answered by one JSON line

save FOLDER: seconds until the state is on the disk. load FOLDER: seconds until it is back in place. clear FOLDER:
forgets the state. check FOLDER: whether it is what was saved. async FOLDER: stall, the seconds until the save has
returned; the median step before and while it writes; and beside them, how long a plain copy of the state takes. """

import json
import statistics
import sys
import time

import torch
import torch.distributed.checkpoint as dcp


def seconds_of(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Step:
    """One thread: products of a small batch, then a pass over 32 MiB as an optimizer makes."""

    def __init__(self):
        self.x, self.w, self.y = torch.rand(256, 1024), torch.rand(1024, 1024), torch.empty(256, 1024)
        self.p, self.g = torch.rand(8 << 20), torch.rand(8 << 20)

    def __call__(self):
        for _ in range(6):
            torch.mm(self.x, self.w, out=self.y)
        self.p.add_(self.g, alpha=1e-6)


def async_save(state, memory, step, folder):
    def copy():
        for target, source in zip(memory, state["model"].values()):
            target.copy_(source)

    memcpy = seconds_of(copy)
    before = [seconds_of(step) for _ in range(15)]
    start = time.perf_counter()
    future = dcp.async_save(state, checkpoint_id=folder)
    stall = time.perf_counter() - start
    during = []
    while not future.done():
        during.append(seconds_of(step))
    future.result()
    return {"memcpy": memcpy, "stall": stall, "step_before": statistics.median(before),
            "step_during": statistics.median(during or [0]), "steps_during": len(during)}


def main():
    torch.set_num_threads(1)
    # async_save asks for a group with a backend for the CPU
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    state = {"model": {f"w{i}": torch.full((2048, 2048), float(i)) for i in range(int(sys.argv[1]) // 16)},
             "iteration": 1}
    tensors = {"model": state["model"]}
    memory = [torch.ones_like(each) for each in state["model"].values()]
    step = Step()
    for line in sys.stdin:
        command, folder = line.split()
        if command == "save":
            answer = {"seconds": seconds_of(lambda: dcp.save(state, checkpoint_id=folder))}
        elif command == "load":
            answer = {"seconds": seconds_of(lambda: dcp.load(tensors, checkpoint_id=folder))}
        elif command == "clear":
            for each in state["model"].values():
                each.zero_()
            answer = {}
        elif command == "check":
            answer = {"equal": all(bool((each == i).all()) for i, each in enumerate(state["model"].values()))}
        else:
            answer = async_save(state, memory, step, folder)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
