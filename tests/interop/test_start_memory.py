"""Memory of processes: a start on the meta device, where each of 4 ranks needs at most 0.4 of the whole model; and a
long sequence that needs two ranks."""
import resource

import megashard
from megashard import LAYERS, launch, network

WORLD, DEPTH, HIDDEN, VOCABULARY = 4, 16, 512, 1023  # NullTokenizer adds one token: 1024 rows
FLAGS = f"--lr 1e-3 --mock-data --micro-batch-size 1 --train-iters 1 {megashard.RUN} --fsdp2-config-path ".split()


def peak_bytes(folder, hidden, *flags):
    """Peak memory of the largest rank, which starts but trains no step; its optimizer has no state."""
    (folder / "fsdp2.yaml").write_text(LAYERS)
    sizes = network(DEPTH, hidden, heads=8, vocabulary=VOCABULARY).split()
    stateless = ["--skip-train", "--optimizer", "sgd", "--sgd-momentum", 0]
    return megashard.peak_bytes(*launch(WORLD, "pretrain", *sizes, *stateless, "--global-batch-size", WORLD, *flags,
                                        *FLAGS, folder / "fsdp2.yaml"))


def test_deferred_start(tmp_path):
    width = 4 * HIDDEN
    # biases and norms: < 0.2%
    parameters = DEPTH * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * width) + (VOCABULARY + 1) * HIDDEN
    model = 4 * parameters
    assert model > 200e6  # much more than the variation of one process, a few MB
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
    (tmp_path / "fsdp2.yaml").write_text(LAYERS)
    llama = ("--ffn-hidden-size 128 --swiglu --normalization RMSNorm --position-embedding-type rope "
             "--disable-bias-linear "
             "--attention-dropout 0 --hidden-dropout 0 --log-interval 1")
    sizes = f"{network(layers=8, hidden=64, heads=4, length=2048, vocabulary=32767)} {llama}".split()

    def run(*flags):
        return megashard.run(*launch(2, "pretrain", *sizes, *flags, *FLAGS, tmp_path / "fsdp2.yaml"), expect=None,
                             preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)))

    alone = run()
    assert alone.returncode == 1 and "out of memory" in alone.stderr and "--context-parallel-size" in alone.stderr
    together = run("--context-parallel-size", "2")
    assert together.returncode == 0, together.stderr
    assert "iteration        1/       1" in together.stdout
