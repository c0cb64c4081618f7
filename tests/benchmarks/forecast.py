"""What a training step on one GPU should take, from FLOPs, bytes and launches; standard library only, no GPU.

    forecast.py [--gpu H200|H100] [--sequence 4096] [--micro-batches N]

Qwen2.5's shapes (tests/on_gpu/models.py), bf16 compute, weights, gradients and AdamW's moments in fp32, FSDP2 of one
rank, no recompute. A kernel takes max(FLOPs / rate, bytes / bandwidth) and its start; a step the sum over its kernels,
or what the host needs to launch them if that is more. Prints steps and MFU, also with LibTorch's operators instead of
fused kernels; the time by class; the memory by class.
"""

import argparse
import collections
import dataclasses
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "on_gpu"))
from models import SIZES, Model  # noqa: E402

# Data sheets; both have 132 multiprocessors. bf16 is dense, as in framework/training/flops.cpp. `products` is the share
# of it that the best of all shapes have in training, where 700 W hold the clock at 1.4 to 1.65 of 1.98 GHz: measured on
# an H200, and taken for an H100 with the same cores and power, which for a moment has 0.80 (794.5 TFLOP/s,
# stas00/ml-engineering, compute/accelerator).
MACHINES = {"H200": {"flops": 989.4e12, "bandwidth": 4.8e12, "memory": 141e9, "products": 0.74},
            "H100": {"flops": 989.4e12, "bandwidth": 3.35e12, "memory": 80e9, "products": 0.74}}
SHARES = {
    "bandwidth": 0.85,  # of long passes; 0.77 to 0.92 of our kernels were measured on an H200
    # Channels: forward and backward of endless causal sequences, by cuDNN, which torch 2.11 takes on sm_90; from traces
    # of an H200 at 1,024 keys.
    "attention": {64: (0.41, 0.31), 128: (0.56, 0.38)},
}
MULTIPROCESSORS = 132
TILES = {(128, 256): 1.0, (256, 128): 1.0, (128, 128): 0.9}  # of products, and their relative rate; assumed
PIECES = (1, 2, 4, 8)  # that a product's depth may be split into
TILE_START = 256  # depth that beginning and ending a tile costs; assumed
ATTENTION_START = 512  # keys, in the same way; assumed
KERNEL_START_S = 1.5e-6  # between two kernels of a stream; assumed
HOST_LAUNCH_S = 6e-6  # operator, autograd node, allocation and launch, in C++; assumed

# bf16: bytes an element, forward and backward, and launches likewise. Fused: each in one pass; else the operators of
# models/kernels/fused_ops.cpp. Left out: a norm's statistics and the sums of its weight, tables of angles (0.2%).
FUSED = {"norm": (4, 6, 1, 3), "rotation": (4, 4, 1, 1), "SwiGLU": (6, 12, 1, 1), "loss": (2, 4, 1, 1)}
UNFUSED = {"norm": (4, 10, 1, 3), "rotation": (18, 38, 7, 15), "SwiGLU": (10, 18, 2, 3), "loss": (30, 36, 10, 9)}
UNFUSED_CHUNK = 1 << 25  # logits that the operators turn to fp32 at a time
LOGITS_AT_ONCE = 1 << 28  # that exist, of a head in parts


@dataclasses.dataclass(frozen=True)
class Run:
    """Micro batches are the model's tokens_at_once."""

    size: str
    micro_batches: int
    goal: float  # MFU
    kept: bool = True  # reshard_after_forward: false
    moment_bytes: int = 4


RUNS = {"0.5 B": Run("0.5 B", 2, 0.47), "1.5 B": Run("1.5 B", 4, 0.57),
        "3 B": Run("3 B", 8, 0.60),
        "7 B, moments in bf16": Run("7 B", 6, 0.60, kept=False, moment_bytes=2),
        "7 B": Run("7 B", 1, 0.60, kept=False)}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """`count` equal kernels of that many launches each."""

    kind: str
    flops: float = 0.0
    bytes: float = 0.0
    share: float = 1.0  # of the peak that its FLOPs reach
    launches: float = 1
    count: float = 1

    def seconds(self, machine: dict) -> float:
        moved = self.bytes / (machine["bandwidth"] * SHARES["bandwidth"])
        rate = machine["flops"] * self.share * (machine["products"] if self.kind == "products" else 1)
        return self.count * (max(self.flops / rate, moved) + self.launches * KERNEL_START_S)


def widths(model: Model) -> tuple[int, int]:
    """Widths of queries and of keys."""
    return model.hidden, model.hidden // model.heads * model.kv_heads


def training_flops(model: Model, tokens: int) -> float:
    """As Megatron's log line counts them (framework/training/flops.cpp): 6 a token and weight of a product, and 6 a
    token, query channel and key of which half is seen, so attention's backward counts twice its forward."""
    q, kv = widths(model)
    layer = 2 * model.hidden * q + 2 * model.hidden * kv + 3 * model.hidden * model.ffn + q * model.sequence
    return 6.0 * tokens * (model.layers * layer + model.hidden * model.vocabulary)


def product_share(m: int, n: int, k: int) -> float:
    """Share of the peak for [m, k] x [k, n]: the best tile and split of the depth, with partial waves."""
    best = 0.0
    for (rows, columns), rate in TILES.items():
        for pieces in PIECES:
            waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) * pieces / MULTIPROCESSORS)
            busy = m * n * pieces / (rows * columns * waves * MULTIPROCESSORS)
            best = max(best, rate * busy * k / pieces / (k / pieces + TILE_START))
    return best


def linear(tokens: int, inputs: int, outputs: int) -> list[Kernel]:
    """A product of forward, and those of backward: of the input and of the weight."""
    shapes = [(tokens, outputs, inputs), (tokens, inputs, outputs), (outputs, inputs, tokens)]
    return [Kernel("products", 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n), product_share(m, n, k))
            for m, n, k in shapes]


def attention(model: Model, tokens: int) -> list[Kernel]:
    """Half of the scores; backward is 2.5 times forward, and adds the gradients of queries up in fp32."""
    q, kv = widths(model)
    start = model.sequence / (model.sequence + ATTENTION_START)
    forward, backward = (share * start for share in SHARES["attention"][q // model.heads])
    flops = 2.0 * tokens * model.sequence * q
    return [Kernel("attention", flops, 2.0 * tokens * (2 * q + 2 * kv), forward),
            Kernel("attention", 2.5 * flops, tokens * (2.0 * (4 * q + 4 * kv) + 8 * q), backward, launches=3)]


def elementwise(table: dict, kind: str, elements: float, chunks: float = 1) -> list[Kernel]:
    ahead, back, launches_ahead, launches_back = table[kind]
    return [Kernel(kind, bytes=ahead * elements, launches=launches_ahead * chunks),
            Kernel(kind, bytes=back * elements, launches=launches_back * chunks)]


def layer(model: Model, tokens: int, table: dict) -> list[Kernel]:
    """Forward and backward of one layer, without FSDP's work."""
    h, f, (q, kv) = model.hidden, model.ffn, widths(model)
    kernels = attention(model, tokens)
    joint = ((h, q + 2 * kv), (h, 2 * f)) if table is FUSED else ((h, q), (h, kv), (h, kv), (h, f), (h, f))
    for inputs, outputs in (*joint, (q, h), (f, h)):
        kernels += linear(tokens, inputs, outputs)
    for kind, width in (("norm", h), ("norm", h), ("rotation", q), ("rotation", kv), ("SwiGLU", f)):
        kernels += elementwise(table, kind, tokens * width)
    # Residuals: two in forward. Gradients that meet: at both residuals; unfused, at the input of q, k, v and gate, up.
    kernels.append(Kernel("sums", bytes=6.0 * tokens * h, count=2 + 2 + (0 if table is FUSED else 2 + 1)))
    kernels += [Kernel("sums", bytes=2.0 * tokens * width) for width in (q, kv, kv)]  # gradients of biases
    return kernels


def micro_batch(model: Model, tokens: int, table: dict, is_first: bool, kept: bool) -> list[Kernel]:
    h, logits = model.hidden, float(tokens * model.vocabulary)
    kernels = [dataclasses.replace(kernel, count=kernel.count * model.layers) for kernel in layer(model, tokens, table)]
    chunks = 1 if table is FUSED else math.ceil(logits / UNFUSED_CHUNK)
    kernels += elementwise(table, "norm", tokens * h) + elementwise(table, "loss", logits, chunks)
    kernels += linear(tokens, h, model.vocabulary)
    # Backward of the embedding: zeros, sorted tokens, rows; a tied weight's two gradients are added up.
    weight = 2.0 * model.vocabulary * h
    kernels += [Kernel("embedding", bytes=4.0 * tokens * h),
                Kernel("embedding", bytes=weight * (4 if model.tied else 1) + 4.0 * tokens * h, launches=13)]
    # fp32 rows to bf16: kept, once a step; else for forward, and all but the root's again for backward. bf16 gradients
    # to fp32, or added to earlier ones as they are.
    units, of_unit = model.layers + 1, model.parameters() / (model.layers + 1)
    gathers = int(is_first) * units if kept else 2 * units - 1
    cast = Kernel("gradients", bytes=6 * of_unit, count=units)
    added = Kernel("gradients", bytes=10 * of_unit, launches=12, count=units)
    return [*kernels, Kernel("gathers", bytes=6 * of_unit, count=gathers), cast if is_first else added]


def step(model: Model, run: Run, table: dict) -> list[Kernel]:
    """Micro batches; norm and AdamW, which clips (reads weight, gradient and two moments, writes all but the gradient),
    each two launches."""
    parameters = model.parameters()
    adamw = 12 + 4 * run.moment_bytes
    kernels = [Kernel("optimizer", bytes=float(each) * parameters, launches=2) for each in (4, adamw)]
    for index in range(run.micro_batches):
        kernels += micro_batch(model, model.tokens_at_once, table, is_first=index == 0, kept=run.kept)
    return kernels


def memory(model: Model, run: Run) -> dict[str, float]:
    """Bytes at the peak, by class, without fragmentation."""
    tokens = model.tokens_at_once
    h, f, (q, kv) = model.hidden, model.ffn, widths(model)
    parameters, root = model.parameters(), (1 if model.tied else 2) * model.vocabulary * model.hidden
    kept = 2 * (4 * h + 2 * q + 2 * kv + 2 * f)  # norms' inputs and outputs; q, k, v, mixed; gate and up
    logits = 2 * min(tokens * model.vocabulary, LOGITS_AT_ONCE)
    activations = tokens * (model.layers * kept + 4 * h + 6 * f) + logits  # and three of ffn's width
    unit = (parameters - root) // model.layers
    weights = parameters if run.kept else root + 2 * unit
    gathered = 2 * weights + 2 * (root + 2 * unit)  # bf16: weights; gradients of the root and of two layers
    earlier = 4 * parameters if run.micro_batches > 1 else 0
    now = activations if earlier else max(activations, 4 * parameters)  # as gradients come, activations go
    state = (4 + 2 * run.moment_bytes) * parameters
    return {"weights, moments": state, "gradients of earlier micro batches": earlier,
            "activations and logits, or gradients": now, "gathered": gathered}


def forecast(name: str, run: Run, machine: dict, sequence: int) -> list[dict[str, str]]:
    """Rows of the tables: the step, shares of its time, memory."""
    model = dataclasses.replace(SIZES[run.size], sequence=sequence)
    tokens = model.tokens_at_once * run.micro_batches
    classes: collections.Counter = collections.Counter()
    seconds, host = [], []
    for table in (FUSED, UNFUSED):
        kernels = step(model, run, table)
        host.append(HOST_LAUNCH_S * sum(kernel.launches * kernel.count for kernel in kernels))
        seconds.append(max(host[-1], sum(kernel.seconds(machine) for kernel in kernels)))
        for kernel in kernels if table is FUSED else []:
            classes[kernel.kind] += kernel.seconds(machine)
    fused, unfused = (training_flops(model, tokens) / (machine["flops"] * each) for each in seconds)
    held = memory(model, run)
    return [{"size": name, "tokens a step": f"{run.micro_batches} x {model.tokens_at_once}",
             "step (ms)": f"{seconds[0] * 1e3:.0f}", "host (ms)": f"{host[0] * 1e3:.0f}",
             "tokens/s": f"{tokens / seconds[0]:.0f}", "MFU": f"{fused:.1%}", "goal": f"{run.goal:.0%}",
             "MFU unfused": f"{unfused:.1%}",
             "memory (GB)": f"{sum(held.values()) / 1e9:.0f} of {machine['memory'] / 1e9:.0f}"},
            {"time": name, **{kind: f"{each / classes.total():.1%}" for kind, each in classes.most_common()}},
            {"GB": name, **{kind: f"{each / 1e9:.1f}" for kind, each in held.items()}}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=MACHINES, default="H200")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens; a micro batch keeps its number of them")
    parser.add_argument("--micro-batches", type=int, help="of a step; unset: 2, 4, 8, 6 and 1")
    given = parser.parse_args()
    print(f"{given.gpu}, sequences of {given.sequence}")
    runs = RUNS if given.micro_batches is None else {
        name: dataclasses.replace(run, micro_batches=given.micro_batches) for name, run in RUNS.items()}
    rows = [forecast(name, run, MACHINES[given.gpu], given.sequence) for name, run in runs.items()]
    for table in zip(*rows):
        names = list(table[0])  # of the first row's order
        print()
        print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
        for row in table:
            print("| " + " | ".join(row[name] for name in names) + " |")


if __name__ == "__main__":
    main()
