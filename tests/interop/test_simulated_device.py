"""`megashard pretrain --device sim` takes the CPU's steps, bit for bit, and finds nothing.

By hand: tests/long/simulated_device SECONDS [SEED] trains random networks so; SmolLM2-135M's with --smollm2.
"""
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import pytest

from megashard import LAYERS, environment, pretrain

# Clipped; without dropout, for which each device has a generator of its own.
TRAINING = (
    "--mock-data --tokenizer-type NullTokenizer --init-model-with-meta-device --hidden-dropout 0 --attention-dropout 0 "
    "--norm-epsilon 1e-5 --global-batch-size 4 --train-iters 3 --lr 1e-3 --weight-decay 0.1 --clip-grad 0.5 "
    "--eval-iters 0 "
    "--use-torch-fsdp2 --group-query-attention"
)
LLAMA = ("--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
         "--rotary-base 100000").split()


def network(layers, heads, groups, head_dim, ffn, vocabulary, length, micro_batch):
    # CUDA's attention pads heads to a multiple of 8, which is another sum.
    assert head_dim % 8 == 0
    sizes = {"num-layers": layers, "hidden-size": heads * head_dim, "ffn-hidden-size": ffn,
             "num-attention-heads": heads, "num-query-groups": groups, "vocab-size": vocabulary, "seq-length": length,
             "max-position-embeddings": length, "micro-batch-size": micro_batch}
    return [word for name, value in sizes.items() for word in (f"--{name}", str(value))]


SMALL = network(layers=2, heads=3, groups=1, head_dim=16, ffn=96, vocabulary=300, length=32, micro_batch=1) + LLAMA
SMOLLM2 = network(layers=30, heads=9, groups=3, head_dim=64, ffn=1536, vocabulary=49151, length=64,
                  micro_batch=1) + LLAMA


def steps(folder, device, ranks, flags, config=LAYERS, timeout=120):
    """Loss and norm of each step, and the program's output."""
    # A CPU's own attention and row kernels are other sums than those of GPUs.
    as_gpu = environment(MEGASHARD_CPU_ATTENTION="libtorch", MEGASHARD_CPU_ROW_KERNELS="gpu")
    taken, said = pretrain(folder, "--device", device, *flags, ranks=ranks, defaults=TRAINING, config=config,
                           timeout=timeout, env=as_gpu)
    return [(step["loss"], step["grad_norm"]) for step in taken], said


def check(folder, *run, **options):
    """Trains on the CPU and on the simulated device; returns the steps."""
    on_cpu, _ = steps(folder, "cpu", *run, **options)
    on_sim, said = steps(folder, "sim", *run, **options)
    assert "the device checked " in said  # and would have failed by what it found
    assert len(on_cpu) == 3
    assert on_sim == on_cpu, f"loss and norm of each step: {on_sim} on the simulated device, {on_cpu} on the CPU"
    return on_cpu


@pytest.mark.parametrize("flags", [[], ["--bf16"]], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_are_the_cpus(tmp_path, ranks, flags):
    assert all(norm > 0.5 for _, norm in check(tmp_path, ranks, SMALL + flags))  # clipped


@pytest.mark.parametrize("saves", [["torch_dcp"], ["torch_dcp", "--async-save"], ["torch_dist", "--async-save"]],
                         ids=" ".join)
def test_a_saved_run_goes_on(tmp_path, saves):
    wanted, _ = steps(tmp_path, "cpu", 2, SMALL)
    save = ["--ckpt-format", *saves, "--save", str(tmp_path), "--save-interval", "2", "--exit-interval", "2"]
    begun, _ = steps(tmp_path, "sim", 2, SMALL + save)
    rest, _ = steps(tmp_path, "sim", 2, SMALL + ["--ckpt-format", saves[0], "--load", str(tmp_path)])
    assert begun + rest == wanted


def random_run(dice):
    groups = dice.choice([1, 2])
    flags = network(layers=dice.choice([1, 2, 3]), heads=groups * dice.choice([1, 2, 3]), groups=groups,
                    head_dim=dice.choice([8, 16, 24, 64]), ffn=dice.choice([40, 96, 250]),
                    vocabulary=dice.choice([100, 300, 1000]), length=dice.choice([16, 33, 128]),
                    micro_batch=dice.choice([1, 2]))
    flags += dice.choice([LLAMA, LLAMA, ["--normalization", "LayerNorm", "--position-embedding-type", "rope"]])
    flags += dice.choice([[], ["--untie-embeddings-and-output-weights"]]) + dice.choice([[], [],
                                                                                         ["--optimizer", "sgd"]])
    flags += dice.choice([[], [], ["--calculate-per-token-loss"]])
    config = LAYERS + dice.choice(["", "", "reshard_after_forward: false\n"])
    precision = dice.choice(["fp32", "--bf16", "param_dtype"])
    if precision == "--bf16":
        flags += ["--bf16"]
    elif precision == "param_dtype":
        config += "param_dtype: bf16\nreduce_dtype: fp32\n"
    config += dice.choice(["", "", "recompute_modules: ['model.layers.{*}']\nuse_reentrant: false\n",
                           "offload_modules: ['model.layers.{*}']\nmin_offloaded_tensor_size: 1024\n"])
    config += dice.choice(["", "", "offload_to_cpu: true\n"])
    # One rank that offloads gathers, and has q, k and v in one product; one rank of a CPU has nothing to gather, and
    # adds three.
    ranks = 2 if "offload_to_cpu" in config else dice.choice([1, 2])
    return ranks, flags, config


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if sys.argv[1] == "--smollm2":
            for ranks in (1, 2):
                for flags in ([], ["--bf16"]):
                    start = time.monotonic()
                    taken = check(folder, ranks, SMOLLM2 + flags, timeout=3600)
                    print(f"{ranks} rank(s) {' '.join(flags)}: loss and norm {taken}, {time.monotonic() - start:.0f} s",
                          flush=True)
            print("4 passed, 0 failed")
            return
        seconds = float(sys.argv[1])
        seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1 << 30)
        dice = random.Random(seed)
        end, passed = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            run = random_run(dice)
            try:
                check(folder, *run)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                print(f"run {passed + 1} of seed {seed}, {run}: {error}")
                print(f"repeat: tests/long/simulated_device {seconds:g} {seed}")
                print(f"{passed} passed, 1 failed")
                sys.exit(1)
            passed += 1
        print(f"{passed} random trainings, seed {seed}")
        print(f"{passed} passed, 0 failed")


if __name__ == "__main__":
    main()
