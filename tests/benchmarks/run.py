"""megashard and PyTorch FSDP2 side by side: speed, memory, start and host cost, as ratios.

    run.py [--repeats 3] [--steps 20] [--hf-model DIR] [--only train|steps|host] [--bf16-params] [--pictures DIR]
           [--peers compiled fsdp1]
    run.py --against BUILD [...]

Both sides run by turns on the same machine, data and weights, one thread a rank; every figure is a ratio megashard /
PyTorch, as its median with the smallest and largest of the repeats. Time and memory are taken from outside, by the
same means for both: the clock when a step's line appears in the metrics file, and VmHWM of the largest process. Exits
with 1 when a bar is missed. --hf-model replaces the 8 M model; a folder of config.json alone gets random weights, as
those of networks/. MEGASHARD_BUILD names another build folder. --only steps leaves out the runs that time a first
step. --peers trains further ones: FSDP2 with compiled layers, FSDP1, transformers' eager attention or experts.
--pictures also trains the curve of the losses and counts the bytes of a step, writes DIR/figures.json and draws
(pictures.py). --against puts an older build of megashard (its folder) in PyTorch's place: nothing may be more than 3 %
worse. Processor time is that of all processes between the same steps; other programs disturb it less than the clock.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import pictures  # noqa: E402
from megashard import BUILD, INTEROP, fsdp2_reference, train_dump, write_documents  # noqa: E402

RANKS, POLL_S, WARM_UP = 2, 0.005, 3
PROCESSOR = "processor time a step"
FIRST, FIRST_COLD = "time to first step", "the same, behind another program"
# measure: (bar, whether more is better)
BARS = {"tokens/s": (1.0, True), PROCESSOR: (1.0, False), "resident memory": (0.6, False), FIRST: (0.1, False),
        FIRST_COLD: (0.5, False), "host cost of a unit": (0.2, False), "clip + AdamW, 128 tensors": (0.2, False),
        "tensors of a step": (1.0, False)}
LARGER_FIRST = 0.3  # of a model of whose first step more is the step
NOT_WORSE = {measure: (0.97 if more else 1.03, more) for measure, (_, more) in BARS.items()}  # --against
CURVE_STEPS, CURVE_ROWS, CURVE_LENGTH, CURVE_WORDS = 200, 4, 64, 512


def draw_weights(config, folder):
    import torch
    import transformers

    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def make_model(folder, vocabulary=4096, hidden=256, inner=688, layers=8):
    """8.3 M parameters of Llama's architecture, random."""
    import transformers

    draw_weights(transformers.LlamaConfig(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner,
                                          num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8,
                                          max_position_embeddings=1024, tie_word_embeddings=False, bos_token_id=None,
                                          eos_token_id=None), folder)


def model_folder(given, work):
    """That of a model with weights: made of the one that is given, if this is none, or has none."""
    import transformers

    if given and list(given.glob("*.safetensors")):
        return given
    if given:
        draw_weights(transformers.AutoConfig.from_pretrained(given), work / "model")
    else:
        make_model(work / "model")
    return work / "model"


def make_data(prefix, vocabulary, count=400_000, document=1000):
    """A Megatron .bin/.idx of uint16 tokens in equal documents."""
    import numpy

    write_documents(prefix, (numpy.random.default_rng(1).zipf(1.3, count) % vocabulary).reshape(-1, document))


def descendants(pid):
    found = [pid]
    for parent in found:
        for task in pathlib.Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:
                pass
    return found


def peak_bytes(pid):
    """VmHWM of the process's largest descendant."""
    peaks = [0]
    for each in descendants(pid):
        try:
            status = pathlib.Path(f"/proc/{each}/status").read_text()
        except OSError:
            continue
        peaks += [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")]
    return max(peaks)


def processor_seconds(pid):
    """Of the process and its descendants, on all cores."""
    ticks = 0
    for each in descendants(pid):
        try:
            fields = pathlib.Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def watch(command, metrics, log):
    """Runs a command; returns the moments at which its steps ended, seconds after exec, the processor time until then,
    and its peak memory."""
    metrics.unlink(missing_ok=True)
    with open(log, "w") as output:
        start = time.perf_counter()
        process = subprocess.Popen([str(word) for word in command], stdout=output, stderr=subprocess.STDOUT,
                                   env=os.environ | {"OMP_NUM_THREADS": "1"})
        ends, processor, memory, next_look = [], [], 0, 0.0
        while process.poll() is None:
            now = time.perf_counter() - start
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if lines > len(ends):
                processor += [processor_seconds(process.pid)] * (lines - len(ends))
                ends += [now] * (lines - len(ends))
            if now > next_look:
                memory = max(memory, peak_bytes(process.pid))
                next_look = now + 0.1
            time.sleep(POLL_S)
    if process.returncode != 0 or not ends:
        raise SystemExit(f"failed: {' '.join(map(str, command))}\n{pathlib.Path(log).read_text()[-3000:]}")
    return ends, processor, memory


def training_commands(args, work, metrics, steps):
    shape = {"--seq-length": args.seq_length, "--micro-batch-size": 1, "--train-iters": steps,
             "--metrics-file": metrics, "--hf-model": args.hf_model}
    shape = [word for pair in shape.items() for word in pair]
    flags = ["launch", "-n", RANKS, "--", "pretrain", *shape,
             "--data-path", work / "tokens", "--global-batch-size", RANKS, "--lr", 1e-4, "--lr-decay-style", "constant",
             "--weight-decay", 0.1, "--clip-grad", 1.0, "--split", "100,0,0", "--eval-iters", 0,
             "--use-torch-fsdp2", "--fsdp2-config-path", work / "fsdp2_config.yaml"]
    ours = [BUILD / "launch/megashard", *flags]
    if args.against:
        return {"ours": ours, "theirs": [args.against / "launch/megashard", *flags]}
    theirs = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
              HERE / "fsdp2_train.py", *shape, "--bin", work / "tokens.bin"]
    theirs += ["--bf16-params"] if args.bf16_params else []
    return {"ours": ours, "theirs": theirs} | {peer: [*theirs, "--wrapper", peer] for peer in args.peers}


def write_fsdp2_config(path, bf16):
    precision = "param_dtype: bf16\nreduce_dtype: fp32\n" if bf16 else ""
    path.write_text("sub_modules_to_wrap:\n  - model.layers.{*}\n" + precision)


def measure_training(args, work):
    """Figures of one interleaved series by side, and of megashard's runs the share of the rate of matrix products that
    each rank measures at its start. The first step is that of two short runs behind the long one, of which the second
    counts: files are in the cache then, and the memory that it takes is the one that the first gave back."""
    metrics = work / "metrics.jsonl"
    write_fsdp2_config(work / "fsdp2_config.yaml", args.bf16_params)
    figures, shares = {}, []
    for _ in range(args.repeats):
        short = training_commands(args, work, metrics, 1)
        for side, command in training_commands(args, work, metrics, args.steps).items():
            ends, processor, memory = watch(command, metrics, work / f"{side}.log")
            if side == "ours":
                shares.append(statistics.mean(json.loads(line)["mfu"]
                                              for line in metrics.read_text().splitlines()[WARM_UP:]))
            steps = [b - a for a, b in zip(ends[WARM_UP:], ends[WARM_UP + 1:])]
            tokens = RANKS * args.seq_length
            figures.setdefault(side, []).append({"tokens/s": tokens * len(steps) / sum(steps),
                                                 PROCESSOR: (processor[-1] - processor[WARM_UP]) / len(steps),
                                                 "resident memory": memory})
            if args.only != "steps":
                first = [watch(short[side], metrics, work / f"{side}.log")[0][0] for _ in range(2)]
                figures[side][-1] |= {FIRST: first[-1], FIRST_COLD: ends[0]}
    return figures, shares


def measure_host(args):
    commands = {"ours": [BUILD / "tests/benchmarks/unit_cost"],
                "theirs": [args.against / "tests/benchmarks/unit_cost"] if args.against else
                          [sys.executable, HERE / "fsdp2_unit_cost.py"]}
    figures = {"ours": [], "theirs": []}
    for _ in range(args.repeats):
        for side, command in commands.items():
            output = subprocess.run(command, check=True, capture_output=True, text=True,
                                    env=os.environ | {"OMP_NUM_THREADS": "1"}).stdout
            line = json.loads(output.splitlines()[-1])
            figures[side].append({"host cost of a unit": line["unit_us"],
                                  "clip + AdamW, 128 tensors": line["clip_adamw_us"]})
    return figures


def train_both(work, model, tokens, **more):
    """Runs one job on both sides (tests/interop); returns their results."""
    from safetensors.torch import load_file, save_file

    save_file({"tokens": tokens}, work / "batches")
    written = {}
    for side, train in (("ours", train_dump), ("theirs", fsdp2_reference)):
        job = dict(model=str(model), batches=str(work / "batches"), output=str(work / side), mesh=[RANKS],
                   wrapper="fsdp2", steps=len(tokens), optimizer="adam", lr=1e-3, weight_decay=0.1, clip=1.0,
                   param_dtype=None, reduce_dtype=None, reshard=None, **more)
        (work / f"{side}.json").write_text(json.dumps([job]))
        train(work / f"{side}.json")
        written[side] = load_file(work / side)
    return written


def measure_loss(work):
    """A small Llama learns which words follow which: two do, one of them twice as often."""
    import torch

    make_model(work / "small", vocabulary=CURVE_WORDS, hidden=64, inner=128, layers=4)
    dice = torch.Generator().manual_seed(1)
    followers = torch.randint(0, CURVE_WORDS, (CURVE_WORDS, 3), generator=dice)
    followers[:, 2] = followers[:, 1]
    rows = [torch.randint(0, CURVE_WORDS, (CURVE_STEPS * CURVE_ROWS,), generator=dice)]
    for _ in range(CURVE_LENGTH):
        rows.append(followers[rows[-1], torch.randint(0, 3, rows[-1].shape, generator=dice)])
    written = train_both(work, work / "small", torch.stack(rows, 1).view(CURVE_STEPS, CURVE_ROWS, -1))
    return {side: [round(float(loss), 7) for loss in found["loss"]] for side, found in written.items()}


def measure_bytes(work, model, vocabulary):
    """Peak bytes of rank 0's tensors in a third step of four tokens."""
    import torch

    tokens = torch.randint(0, vocabulary, (3, RANKS, 5), generator=torch.Generator().manual_seed(1))
    written = train_both(work, model, tokens, count_memory=str(INTEROP / "live_memory.so"))
    return {side: [{"tensors of a step": int(found["peak_bytes"][2])}] for side, found in written.items()}


def report(figures, bars, peer="theirs"):
    """Prints the rows of a table; returns the measures that miss their bar."""
    missed = []
    for measure in figures["ours"][0]:
        ours, theirs = ([each[measure] for each in figures[side]] for side in ("ours", peer))
        ratios = [a / b for a, b in zip(ours, theirs)]
        bar, more_is_better = bars[measure]
        median = statistics.median(ratios)
        if (median < bar) if more_is_better else (median > bar):
            missed.append(measure)
        shown = [pictures.SHOWN[measure](statistics.median(values)) for values in (theirs, ours)]
        print(f"| {measure} | {shown[0]} | {shown[1]} | "
              f"{median:.2f} ({min(ratios):.2f} .. {max(ratios):.2f}) | {'>=' if more_is_better else '<='} {bar} |")
    return missed


def report_shares(figures, shares):
    rate = [each["tokens/s"] for each in figures["ours"]]
    for side, runs in figures.items():
        share = statistics.median(part * run["tokens/s"] / own for part, run, own in zip(shares, runs, rate))
        print(f"| share of the rate of matrix products, {pictures.NAMES[side]} | | {share:.2f} | | |")


def write_figures(folder, figures):
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    figures |= {"date": str(datetime.date.today()), "torch": torch.__version__,
                "machine": f"{os.cpu_count()} cores ({platform.machine()})"}
    text = json.dumps(figures, indent=1)
    for numbers in figures["loss"].values():  # several in a line
        rows = [", ".join(map(str, numbers[i:i + 10])) for i in range(0, len(numbers), 10)]
        text = text.replace(",\n   ".join(map(str, numbers)), ",\n   ".join(rows))
    (folder / "figures.json").write_text(text + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--hf-model", type=pathlib.Path)
    parser.add_argument("--only", choices=["train", "steps", "host"])
    parser.add_argument("--bf16-params", action="store_true", help="bf16 gather and compute, fp32 storage")
    parser.add_argument("--pictures", type=pathlib.Path, metavar="DIR", help="writes the figures and draws them there")
    parser.add_argument("--peers", nargs="*", default=[],
                        choices=["compiled", "fsdp1", "eager-experts", "eager-attention"])
    parser.add_argument("--against", type=pathlib.Path, metavar="BUILD", help="an older build in PyTorch's place")
    args = parser.parse_args()
    if args.against and (args.pictures or args.peers):
        parser.error("--pictures and --peers show PyTorch; leave out --against.")
    missed, figures = [], {}
    larger = {FIRST: (LARGER_FIRST, False)} if args.hf_model else {}
    bars = NOT_WORSE if args.against else BARS | larger
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        beside = args.against or "PyTorch FSDP2"
        print(f"| measure | {beside} | megashard | ratio (spread) | bar |\n|---|---|---|---|---|")
        if args.only != "host":
            args.hf_model = model_folder(args.hf_model, work)
            vocabulary = json.loads((args.hf_model / "config.json").read_text())["vocab_size"]
            make_data(work / "tokens", vocabulary)
            figures["training"], shares = measure_training(args, work)
            missed += report(figures["training"], bars)
            for peer in args.peers:
                print(f"| beside {pictures.NAMES[peer]}: | | | | |")
                missed += report(figures["training"], bars, peer)
            report_shares(figures["training"], shares)
        if args.only not in ("train", "steps"):
            figures["host"] = measure_host(args)
            missed += report(figures["host"], bars)
        if args.pictures:
            figures["bytes"] = measure_bytes(work, args.hf_model, vocabulary)
            missed += report(figures["bytes"], bars)
            figures["loss"] = measure_loss(work)
            write_figures(args.pictures, figures)
            pictures.draw(args.pictures)
    if missed:
        raise SystemExit("missed: " + ", ".join(missed))


if __name__ == "__main__":
    main()
