"""Memory of processes: of a start, constructed on meta, where each of 4 ranks needs at most 0.4 of what the whole model
takes; and of a long sequence, which two ranks that share it can hold."""
import os
import pathlib
import resource
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("MEGASHARD", str(ROOT / "build" / "launch" / "megashard"))
WORLD, LAYERS, HIDDEN, VOCAB = 4, 16, 512, 1023  # NullTokenizer adds one token: 1024 rows
# Peak of the largest process below it, in KiB. A small process of its own, because a child's peak begins with that of
# the process that it is forked from, and pytest's is large.
MEASURE = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def peak_bytes(folder, hidden, *flags):
    """Of the largest rank, which starts and trains no step; its optimizer has no state."""
    (folder / "fsdp2.yaml").write_text("sub_modules_to_wrap: ['model.layers.{*}']\n")
    pretrain = [
        PROGRAM, "launch", "-n", str(WORLD), "--", "pretrain", "--num-layers", str(LAYERS), "--hidden-size", str(hidden),
        "--num-attention-heads", "8", "--max-position-embeddings", "16", "--seq-length", "16", "--vocab-size",
        str(VOCAB), "--tokenizer-type", "NullTokenizer", "--mock-data", "--micro-batch-size", "1",
        "--global-batch-size", str(WORLD), "--train-iters", "1", "--skip-train", "--eval-iters", "0", "--lr", "1e-3",
        "--optimizer", "sgd", "--sgd-momentum", "0",
        "--use-torch-fsdp2", "--fsdp2-config-path", str(folder / "fsdp2.yaml"), "--ckpt-format", "torch_dcp", *flags]
    done = subprocess.run([sys.executable, "-S", "-c", MEASURE, *pretrain], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return int(done.stdout) * 1024


def test_deferred_start(tmp_path):
    width = 4 * HIDDEN
    parameters = LAYERS * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * width) + (VOCAB + 1) * HIDDEN  # biases and norms: < 0.2%
    model = 4 * parameters
    assert model > 200e6  # much more than what the measurement of one process varies by, a few MB
    # The program itself takes as much again: the same start with a model of nothing is taken off.
    base = peak_bytes(tmp_path, 16, "--init-model-with-meta-device")
    deferred = (peak_bytes(tmp_path, HIDDEN, "--init-model-with-meta-device") - base) / model
    ordinary = (peak_bytes(tmp_path, HIDDEN) - base) / model
    assert ordinary > 0.95, "an ordinary start holds the whole model: the measurement does not see it"
    assert deferred <= 0.4, f"{deferred:.2f} of the model"
    assert deferred > 0.2, f"{deferred:.2f} of the model: less than a rank's part"


def test_a_sequence_that_fits_two_ranks(tmp_path):
    """2048 tokens and their 32768 logits each. A rank alone needs 440 to 500 MiB, one of two 270 to 320."""
    limit = 384 << 20  # bytes of data that a process may have
    (tmp_path / "fsdp2.yaml").write_text("sub_modules_to_wrap: ['model.layers.{*}']\n")
    command = (f"{PROGRAM} launch -n 2 -- pretrain --num-layers 8 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
               "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --attention-dropout 0 "
               "--hidden-dropout 0 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 32767 --tokenizer-type "
               "NullTokenizer --mock-data --micro-batch-size 1 --train-iters 1 --log-interval 1 --eval-iters 0 --lr 1e-3 --use-torch-fsdp2 "
               f"--fsdp2-config-path {tmp_path / 'fsdp2.yaml'} --ckpt-format torch_dcp").split()

    def run(*flags):
        return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)))

    alone = run()
    assert alone.returncode == 1 and "out of memory" in alone.stderr and "--context-parallel-size" in alone.stderr
    together = run("--context-parallel-size", "2")
    assert together.returncode == 0, together.stderr
    assert "iteration        1/       1" in together.stdout
