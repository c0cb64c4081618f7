"""launch/examples/linear in PyTorch: the same seeds, FSDP2 on Gloo. Started by torchrun."""
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(128, 10)
features, classes = torch.randn(250, 128), torch.randint(10, (250,))
fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
sampler = DistributedSampler(features, world, rank, seed=7)
for epoch in range(3):
    sampler.set_epoch(epoch)
    samples = list(sampler)
    if rank == 0:
        print(f"epoch {epoch} samples {' '.join(map(str, samples))}", flush=True)
    total = torch.zeros(1, dtype=torch.double)
    for batch in torch.tensor(samples).split(16):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(features[batch]), classes[batch])
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(batch)
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch} loss {total.item() / (len(samples) * world):.9f}", flush=True)
dist.destroy_process_group()
os._exit(0)  # a thread of Gloo that still drops a tensor while Python ends would abort the process
