"""Host cost of PyTorch FSDP2, where no collective takes time: the twin of unit_cost.cpp, one JSON line.

unit_us: a unit of 10 parameters (5 x Linear 16 -> 16, batch 4), forward and backward, above the unwrapped module:
an eighth of what eight of them in a root cost.
clip_adamw_us: norm clipping and fused AdamW over 128 sharded tensors of 32 x 32 (16 rows here).
"""

import json
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

WORLD = 2
UNITS = 8


def best_us(work, calls, repeats=7):
    """Microseconds of a call: the fastest of several averages, which is the one that nothing disturbed."""
    for _ in range(calls):
        work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        times.append((time.perf_counter() - start) / calls)
    return min(times) * 1e6


def unit_us(mesh):
    def chain():
        return torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(5)])

    x = torch.randn(4, 16, requires_grad=True)
    gradient = torch.ones(4, 16)

    def step_of(module):
        parameters = list(module.parameters())

        def step():
            module(x).backward(gradient)
            x.grad = None
            for parameter in parameters:
                parameter.grad = None

        return step

    def model():
        return torch.nn.Sequential(*[chain() for _ in range(UNITS)])

    plain = best_us(step_of(model()), 30)
    wrapped = model()
    for unit in wrapped:
        fully_shard(unit, mesh=mesh)
    fully_shard(wrapped, mesh=mesh)  # the root has no parameters of its own
    return (best_us(step_of(wrapped), 30) - plain) / UNITS


def clip_adamw_us(mesh):
    module = torch.nn.Module()
    for index in range(128):
        module.register_parameter(f"w{index}", torch.nn.Parameter(torch.randn(32, 32)))
    fully_shard(module, mesh=mesh)
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=True)

    def step():
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return best_us(step, 20)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    print(json.dumps({"unit_us": unit_us(mesh), "clip_adamw_us": clip_adamw_us(mesh)}))
