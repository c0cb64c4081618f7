"""Does all that needs a GPU work? Kernels, every test of its own, a CPU's losses, races, saves, NCCL."""

import dataclasses

import gtests
from lines import Failure, Line
from machine import BUILD, find_tool, program_environment
from models import SMALL, TINY

KERNEL_TESTS = {"parallel": "CudaKernels.*", "models": "CudaRowKernels.*"}  # by layer
FP32, BF16 = 1e-4, 2e-2  # relative: other kernels, other orders of sums
AGAIN_FP32, AGAIN_BF16 = 1e-5, 5e-3  # the same kernels again: atomics add in any order
STEPS, SAVED_STEP = 6, 3
ON_CPU = ", on a CPU"


@dataclasses.dataclass(frozen=True)
class Strategy:
    name: str
    sharding: str = ""  # of the FSDP2 file
    microbatches: int = 1
    tolerance: float = FP32
    reference: str = ""  # strategy that a CPU computes the same numbers with; empty: this one


PLAIN = Strategy("fp32")
BF16_SUMS = Strategy("bf16, reduced in bf16, 4 microbatches", "param_dtype: bf16\n", 4, BF16)
OFFLOAD = Strategy("offload_to_cpu", "offload_to_cpu: true\n", reference="fp32")
STRATEGIES = [
    PLAIN,
    Strategy("bf16, reduced in fp32", "param_dtype: bf16\nreduce_dtype: fp32\n", tolerance=BF16),
    BF16_SUMS,
    OFFLOAD,
    Strategy("recompute", "recompute_modules: ['model.layers.{*}']\n", reference="fp32"),
    Strategy("activation offload", "offload_modules: ['model.layers.{*}']\nmin_offloaded_tensor_size: 1\n",
             reference="fp32"),
]
# With either, memory that was freed or read too early has other values.
RACE_PROBES = {"launches block": "CUDA_LAUNCH_BLOCKING", "no cached memory": "PYTORCH_NO_CUDA_MEMORY_CACHING"}
SAVES = {", saved": [], ", saved while training": ["--async-save"]}  # flags by suffix


def when_printed(text, judge):
    """A judge of outputs that must hold the text."""

    def both(output):
        if text not in output:
            raise Failure(f"it printed no '{text}'")
        return judge(output)

    return both


class Smoke:
    def __init__(self, machine, training, scratch):
        self.machine, self.training, self.scratch = machine, training, scratch

    def groups(self):
        """(workers, lines): tests that measure overlap have the GPU for themselves; the others only compare numbers."""
        together = min(2, self.machine.cores)
        tests = list(gtests.lines(self.scratch, self.machine.device))
        yield together, [self.train(each, on_cpu=True) for each in STRATEGIES if not each.reference]
        yield min(4, self.machine.cores), [line for line in tests if "Overlap" not in line.name]
        yield 1, [line for line in tests if "Overlap" in line.name]
        yield together, [self.train(each, same_as=(each.reference or each.name) + ON_CPU, tolerance=each.tolerance)
                         for each in STRATEGIES]
        yield together, [*self.repeats(), *self.saves()]
        yield together, list(self.resumes())
        yield 1, list(self.sanitizers())

    def train(self, strategy, suffix="", *, on_cpu=False, same_as="", tolerance=0, flags=(), environment=None):
        """A line of that strategy, compared with the line `same_as`; on the CPU, the reference of others."""
        model = TINY if self.machine.dry_run else SMALL
        model = dataclasses.replace(model, global_batch=model.micro_batch * strategy.microbatches)
        judge = (lambda steps, _: {"loss": steps[-1]["loss"]}) if on_cpu else self.training.same_as(same_as, tolerance)
        threads = {}
        if on_cpu and not self.machine.dry_run:
            threads = {"OMP_NUM_THREADS": str(max(1, self.machine.cores // 2))}
        return self.training.line(strategy.name + (ON_CPU if on_cpu else suffix), model, judge=judge, steps=STEPS,
                                  device="cpu" if on_cpu else None, sharding=strategy.sharding, flags=flags,
                                  environment={**threads, **(environment or {})})

    def repeats(self):
        for strategy in (BF16_SUMS, OFFLOAD):
            tolerance = AGAIN_BF16 if strategy.tolerance == BF16 else AGAIN_FP32
            for words, variable in RACE_PROBES.items():
                yield self.train(strategy, f", {words}", same_as=strategy.name, tolerance=tolerance,
                                 environment={variable: "1"})
        nccl = self.train(PLAIN, ", NCCL on one rank", same_as=PLAIN.name, tolerance=AGAIN_FP32,
                          environment={"MEGASHARD_NCCL_SINGLE": "1", "NCCL_DEBUG": "VERSION"})
        if self.machine.device == "cuda":
            nccl.judge = when_printed("NCCL version", nccl.judge)
        yield nccl

    def save_folder(self, suffix):
        return self.training.folder(PLAIN.name + suffix) / "save"

    def saves(self):
        for suffix, more in SAVES.items():
            flags = ["--save", self.save_folder(suffix), "--save-interval", SAVED_STEP, *more]
            yield self.train(PLAIN, suffix, same_as=PLAIN.name, tolerance=AGAIN_FP32, flags=flags)

    def resumes(self):
        for suffix in SAVES:
            flags = ["--load", self.save_folder(suffix), "--ckpt-step", SAVED_STEP]
            yield self.train(PLAIN, f"{suffix}, resumed", same_as=PLAIN.name + suffix, tolerance=AGAIN_FP32,
                             flags=flags)

    def sanitizers(self):
        tool = find_tool("compute-sanitizer")
        obstacle = "" if tool else "compute-sanitizer is not installed"
        for layer, cases in KERNEL_TESTS.items():
            tests = BUILD / "tests" / layer / f"{layer}_tests"
            for check in ("memcheck", "racecheck"):
                command = [tool or "compute-sanitizer", "--tool", check, "--error-exitcode", 9, tests,
                           f"--gtest_filter={cases}"]
                yield Line(f"kernels of {layer} under {check}", command, 90, program_environment(), obstacle=obstacle)

    def finish(self, output):
        gtests.write_results(self.scratch, output / "smoke.xml")
