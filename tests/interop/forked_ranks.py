"""Ranks of Gloo groups, forked from a process that has imported torch once for all of them: that takes most of the
time.

A test file that uses it runs itself as a script: pytest's own process may have threads, which do not survive a fork.
"""

import datetime
import multiprocessing
import os
import traceback
import uuid
from pathlib import Path

import torch._dynamo  # noqa: F401: torch would do so in each rank, when it first uses a DTensor
import torch.distributed as dist
import torch.distributed.checkpoint  # noqa: F401

DEADLINE = 60  # seconds; the ranks of one task


def run_rank(task, arguments, rank, world, store):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world,
                                timeout=datetime.timedelta(seconds=DEADLINE))
        task(*arguments)
        dist.destroy_process_group()
    except BaseException:
        Path(f"{store}.{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")


def failure_in_ranks(world, folder, task, *arguments):
    """Runs task(*arguments) in each rank of a new world. Returns their errors; empty if there are none."""
    store = str(Path(folder) / f"store_{uuid.uuid4().hex}")
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(task, arguments, rank, world, store)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(2 * DEADLINE)
        process.kill()
        process.join()
    codes = [process.exitcode for process in ranks]
    texts = [path.read_text() for path in map(Path, (f"{store}.{rank}" for rank in range(world))) if path.exists()]
    return "\n".join(texts) or ("" if not any(codes) else f"exit codes {codes}")
