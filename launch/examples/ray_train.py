#!/usr/bin/env python3
"""Trains on a Ray cluster, one actor a rank: launch/examples/ray_train.py --ranks 16 [--cpus N] [--gpus N] -- FLAGS

FLAGS are those of `megashard pretrain`. If a rank fails or its node is lost, all ranks start again on the nodes that
are there, from the last step in --save: give --load and --save as one folder that every node sees. Every node needs
megashard's wheel, or MEGASHARD_BIN and the package in PYTHONPATH. Run it on a node of the cluster, or as a Ray job.
"""
import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

USAGE = 2  # the exit code for mistakes in the flags, which no restart corrects
PR_SET_PDEATHSIG = 1


@ray.remote
class Rank:
    def place(self):
        """The node, its address, and a port that is free there."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), free.getsockname()[1]

    def train(self, flags, variables):
        """The exit code. Ray shows the rank's output at the driver."""
        from megashard.program import program, variables as environment

        libc = ctypes.CDLL(None)
        return subprocess.run([program(), "pretrain", *flags], env=environment(variables),
                              preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)).returncode


def variables_of(places):
    """The variables of each actor. The ranks of a node are neighbours, and rank 0 is the first actor."""
    nodes = list(dict.fromkeys(node for node, _, _ in places))
    order = sorted(range(len(places)), key=lambda index: (nodes.index(places[index][0]), index))
    local = {index: sum(places[other][0] == places[index][0] for other in order[:rank])
             for rank, index in enumerate(order)}
    return [{"RANK": str(order.index(index)), "WORLD_SIZE": str(len(places)), "LOCAL_RANK": str(local[index]),
             "LOCAL_WORLD_SIZE": str(sum(other[0] == node for other in places)), "MASTER_ADDR": places[0][1],
             "MASTER_PORT": str(places[0][2]), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            for index, (node, _, _) in enumerate(places)]


def train_once(options, flags):
    """None if all ranks have done their work; otherwise the first failure."""
    bundle = {name: number for name, number in (("CPU", options.cpus), ("GPU", options.gpus)) if number}
    group = placement_group([bundle] * options.ranks, strategy=options.strategy)
    actors = []
    try:
        ray.get(group.ready())  # waits while the cluster has no room
        actors = [Rank.options(num_cpus=options.cpus, num_gpus=options.gpus,
                               scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
                  for index in range(options.ranks)]
        places = ray.get([actor.place.remote() for actor in actors])
        running = {actor.train.remote(flags, variables): variables["RANK"]
                   for actor, variables in zip(actors, variables_of(places))}
        while running:
            done, _ = ray.wait(list(running))
            rank, code = running.pop(done[0]), ray.get(done[0])
            if code == USAGE:
                sys.exit(USAGE)
            if code != 0:
                return f"rank {rank} ended with exit code {code}"
        return None
    except ray.exceptions.RayActorError as error:
        return str(error).strip().splitlines()[0]
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--cpus", type=float, default=1, help="of a rank; default: 1")
    parser.add_argument("--gpus", type=float, default=0, help="of a rank; default: 0")
    parser.add_argument("--strategy", default="PACK", help="of the placement group; default: PACK")
    parser.add_argument("--max-failures", type=int, default=3, help="restarts; default: 3")
    parser.add_argument("flags", nargs="+", metavar="FLAGS", help="of megashard pretrain, after --")
    options = parser.parse_args()
    ray.init(address="auto")
    for failures in range(options.max_failures + 1):
        failure = train_once(options, options.flags)
        if failure is None:
            return
        print(f"ray_train: {failure}; {options.max_failures - failures} restarts are left", flush=True)
        time.sleep(1)  # until Ray knows which nodes are there
    sys.exit(1)


if __name__ == "__main__":
    main()
