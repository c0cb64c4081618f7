"""Trainings on this machine's CPU beside their plans: resident memory and seconds of a step.

usage: tests/benchmarks/plan_on_cpu.py [--machine FILE] [--only NAME]

Without --machine the machine is measured before each training, with as many ranks: how fast a virtual one is changes
from minute to minute. Prints a row for each training, and what docs/plan.md says of them.
"""
import argparse
import pathlib
import re
import statistics
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from megashard import LAYERS, NO_DROPOUT, PROGRAM, launch, pretrain, run  # noqa: E402

MIXED = LAYERS + "param_dtype: bf16\nreduce_dtype: fp32\n"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()


def network(layers, hidden, length, vocabulary):
    return (f"--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {hidden * 8 // 3 // 8 * 8} "
            f"--num-attention-heads {hidden // 64} --seq-length {length} --max-position-embeddings {length} "
            f"--vocab-size {vocabulary - 1} --make-vocab-size-divisible-by 1 --tokenizer-type NullTokenizer --swiglu "
            "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --lr 1e-4 "
            "--untie-embeddings-and-output-weights --use-torch-fsdp2").split() + NO_DROPOUT


SMALL, WIDE, DEEP, WORDS = (network(4, 512, 256, 8000), network(3, 1024, 256, 8000), network(12, 384, 256, 8000),
                            network(2, 512, 256, 50000))
# Name: ranks, network, sequences of a micro batch, micro batches, FSDP2 file, flags.
TRAININGS = {f"{name}, {ranks} ranks": (ranks, *rest) for ranks in (1, 2, 4) for name, rest in {
    "small": (SMALL, 2, 1, LAYERS, []),
    "wide": (WIDE, 2, 1, LAYERS, []),
    "deep": (DEEP, 2, 1, LAYERS, []),
    "large vocabulary": (WORDS, 2, 1, LAYERS, []),
    "recompute": (SMALL, 4, 1, LAYERS, RECOMPUTE),
    "kept": (SMALL, 2, 2, LAYERS + "reshard_after_forward: false\n", []),
    "bf16": (SMALL, 2, 1, MIXED, []),
}.items() if (name, ranks) != ("bf16", 4)}


def planned(folder, ranks, model, micro_batch, batches, config, flags, machine):
    (folder / "fsdp2.yaml").write_text(config)
    return run(PROGRAM, "plan", "--world-size", ranks, *model, "--micro-batch-size", micro_batch,
               "--global-batch-size", ranks * micro_batch * batches, "--fsdp2-config-path", folder / "fsdp2.yaml",
               "--device", machine, *flags, timeout=300).stdout


def trained(folder, ranks, model, micro_batch, batches, config, flags, steps=8):
    metrics, _ = pretrain(folder, *model, "--micro-batch-size", micro_batch, "--global-batch-size",
                            ranks * micro_batch * batches, "--mock-data", "--eval-iters", 0, "--train-iters", steps,
                            "--init-model-with-meta-device", *flags, ranks=ranks, config=config, timeout=600)
    return metrics


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--machine", help="a file of `megashard plan --measure`")
    parser.add_argument("--only", default="", help="trainings whose names hold this")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for title, (ranks, *training) in TRAININGS.items():
            if arguments.only not in title:
                continue
            machine = arguments.machine or folder / "machine.yaml"
            if not arguments.machine:
                run(*launch(ranks, "plan", "--measure", machine))
            said = planned(folder, ranks, *training, machine)
            metrics = trained(folder, ranks, *training)
            peak = int(re.search(r"peak memory of rank 0: .* \((\d+) bytes\)", said)[1])
            resident = metrics[-1]["peak_memory_bytes"]
            seconds = float(re.search(r"^step: ([\d.]+) ms", said, re.M)[1]) / 1e3
            took = statistics.median(step["step_s"] for step in metrics[2:])
            print(f"{title:27} resident {resident / 2**20:7.1f} MiB, planned {peak / 2**20:7.1f}, "
                  f"{peak / resident:.2f}; step {1e3 * took:7.1f} ms, planned {1e3 * seconds:7.1f}, "
                  f"{seconds / took:.2f}", flush=True)


if __name__ == "__main__":
    main()
