#!/usr/bin/env python3
"""sbatch, srun, scontrol and mpirun of a machine that has none of them: links of those names lead here.

All nodes of a job are this machine, by the addresses 127.0.0.1, 127.0.0.2, ... Only what launch/examples needs is here.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

WITH_NEXT = {"-n", "-H", "-x", "--bind-to"}  # the next word is their value


def split(words):
    """(options, the command after them)"""
    options = []
    while words and words[0].startswith("-"):
        with_next = words[0] in WITH_NEXT
        options.append(tuple(words[:2]) if with_next else words[0].partition("=")[::2])
        words = words[2 if with_next else 1:]
    return options, words


def sbatch(words):
    """Runs the script at once, from a copy, as Slurm does."""
    options, command = split(words)
    script = pathlib.Path(command[0]).read_text()
    asked = dict(split(re.findall(r"^#SBATCH (\S+)$", script, re.MULTILINE))[0] + options)
    assert set(asked) <= {"--job-name", "--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--time",
                          "--signal", "--requeue"}, asked
    nodes, tasks = int(asked["--nodes"]), int(asked["--ntasks-per-node"])
    job = {"JOB_ID": 4711, "JOB_NUM_NODES": nodes, "NTASKS": nodes * tasks, "NTASKS_PER_NODE": tasks,
           "TASKS_PER_NODE": f"{tasks}(x{nodes})", "CPUS_PER_TASK": asked["--cpus-per-task"],
           "JOB_NODELIST": f"127.0.0.[1-{nodes}]"}
    with tempfile.TemporaryDirectory() as spool:
        copy = shutil.copy(command[0], f"{spool}/slurm_script")
        return subprocess.call([copy, *command[1:]], env=os.environ | {f"SLURM_{k}": str(v) for k, v in job.items()})


def scontrol(words):
    assert words[:2] == ["show", "hostnames"]
    head, first, last = re.fullmatch(r"(.*)\[(\d+)-(\d+)\]", words[2]).groups()
    print("\n".join(f"{head}{number}" for number in range(int(first), int(last) + 1)))
    return 0


def all_of(command, environments):
    """Runs it once with each; the first failure ends the others."""
    tasks = [subprocess.Popen(command, env=os.environ | {name: str(value) for name, value in each.items()})
             for each in environments]
    while True:
        codes = [task.poll() for task in tasks]
        failed = next(filter(None, codes), None)
        if failed is not None:
            for task in tasks:
                task.terminate()
            return max(failed, 1)
        if None not in codes:
            return 0
        time.sleep(0.01)


def srun(words):
    command = split(words)[1]
    ranks, local = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
    step = {"SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
            "SLURM_STEP_TASKS_PER_NODE": os.environ["SLURM_TASKS_PER_NODE"], "PMI_SIZE": ranks}
    return all_of(command, [{**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank % local,
                             "SLURM_NODEID": rank // local, "PMI_RANK": rank} for rank in range(ranks)])


def mpirun(words):
    options, command = split(words)
    ranks = int(dict(options)["-n"])
    given = dict(value.split("=", 1) for name, value in options if name == "-x")
    return all_of(command, [{**given, **{f"OMPI_COMM_WORLD_{name}": value for name, value in {
        "RANK": rank, "SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_SIZE": ranks}.items()}} for rank in range(ranks)])


if __name__ == "__main__":
    programs = {"sbatch": sbatch, "srun": srun, "scontrol": scontrol, "mpirun": mpirun}
    sys.exit(programs[pathlib.Path(sys.argv[0]).name](sys.argv[1:]))
