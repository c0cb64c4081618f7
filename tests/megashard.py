"""What the Python tests share: where things lie, how the programs are run, and the files that they are given.

Standard library only: every test and script of this folder can import it, whatever Python runs it.
"""
import array
import itertools
import json
import os
import pathlib
import re
import socket
import struct
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = ROOT / os.environ.get("MEGASHARD_BUILD", "build")
PROGRAM = BUILD / "launch" / "megashard"
INTEROP = BUILD / "tests" / "interop"  # the programs of that folder
PREPROCESS = ROOT / "launch" / "preprocess"  # whose modules pytest finds by their names

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TRACKER = "latest_checkpointed_iteration.txt"
FAILURE, USAGE = 1, 2  # exit codes
LAYERS = "sub_modules_to_wrap: ['model.layers.{*}']\n"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0".split()
RUN = "--use-torch-fsdp2 --ckpt-format torch_dcp --eval-iters 0"  # flags of most trainings in tests


def environment(**variables):
    """This process's without a launcher's variables; a rank has one thread, and scripts find this module."""
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests"), **variables}


def run(*command, expect=0, timeout=120, env=None, **options):
    """Runs a command to its end. expect: the required exit code, None: any."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=timeout,
                          stdin=subprocess.DEVNULL, env=env or environment(), **options)
    assert expect in (None, done.returncode), f"exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-4000:]}"
    return done


def launch(ranks, *words):
    """The command of `megashard WORDS...` at that many ranks."""
    return [PROGRAM, *(["launch", "-n", ranks, "--"] if ranks > 1 else []), *words]


def convert(*words, expect=0, **options):
    return run(PROGRAM, "convert", *words, expect=expect, **options)


def network(layers=2, hidden=16, heads=2, length=16, vocabulary=60):
    """Flags of a small GPT."""
    return (f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length {length} "
            f"--max-position-embeddings {length} --tokenizer-type NullTokenizer --vocab-size {vocabulary} ")


def with_defaults(flags, defaults):
    """The flags, and those of `defaults` ("--a 1 --b") that are not among them."""
    given = [str(flag) for flag in flags]
    options = [option.split() for option in re.split(r"\s+(?=--)", defaults.strip())]
    return [word for option in options if option and option[0] not in given for word in option] + given


def pretrain(folder, *flags, ranks=1, defaults=RUN, config=LAYERS, expect=0, **options):
    """Trains in `folder`. config: the FSDP2 file's text, None: no file. Returns the metrics, one dict a step, and the
    output."""
    file = []
    if config is not None:
        (folder / "fsdp2.yaml").write_text(config)
        file = ["--fsdp2-config-path", folder / "fsdp2.yaml"]
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)  # a resumed run appends
    done = run(*launch(ranks, "pretrain", *with_defaults(flags, defaults), *file, "--metrics-file", metrics),
               expect=expect, **options)
    lines = metrics.read_text().splitlines() if metrics.exists() else []  # none: it did not train
    return [json.loads(line) for line in lines], done.stdout + done.stderr


def train_dump(jobs, device="cpu"):
    """Our side of the comparisons: runs train_dump on that job file."""
    run(INTEROP / "train_dump", jobs, timeout=900, env=environment(MEGASHARD_TEST_DEVICE=device))


def fsdp2_reference(jobs):
    """PyTorch's side of them."""
    run(sys.executable, ROOT / "tests" / "interop" / "fsdp2_reference.py", jobs, timeout=900)


def losses(steps):
    return [step["loss"] for step in steps]


HELD = []  # sockets whose ports nobody else is given; a TCPStore sets SO_REUSEADDR, and so may still listen there


def free_port():
    """A port of the loopback interface for a run's first rank."""
    HELD.append(socket.socket())
    HELD[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    HELD[-1].bind(("127.0.0.1", 0))
    return str(HELD[-1].getsockname()[1])


def token_index(lengths, code=8, bounds=None):
    """The content of Megatron's .idx for sequences of those lengths; code: of the tokens' type, 8 is uint16, 4 int32.

    bounds: of the documents among the sequences; None if each sequence is one."""
    size = {4: 4, 8: 2}[code]
    bounds = range(len(lengths) + 1) if bounds is None else bounds
    places = [0, *itertools.accumulate(size * length for length in lengths)][:len(lengths)]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
    return head + b"".join(array.array(kind, values).tobytes()
                           for kind, values in zip("iqq", (lengths, places, bounds)))


def write_documents(prefix, documents, code=8):
    """PREFIX.bin and PREFIX.idx in Megatron's format, with a document for each sequence of tokens."""
    tokens = b"".join(array.array({4: "i", 8: "H"}[code], map(int, document)).tobytes() for document in documents)
    pathlib.Path(f"{prefix}.bin").write_bytes(tokens)
    pathlib.Path(f"{prefix}.idx").write_bytes(token_index([len(document) for document in documents], code))


def mock_samples(folder, count, length, vocabulary, end):
    """[count, length + 1] of --mock-data's samples, as a torch tensor."""
    import torch

    data = dict(mock_data=True, seq_length=length, seed=1234, vocab_size=vocabulary, eod_id=end, samples=[count, 0, 0])
    (folder / "data.json").write_text(json.dumps([data]))
    run(INTEROP / "dump_samples", folder / "data.json", folder / "data")
    numbers = torch.frombuffer(bytearray((folder / "data").read_bytes()), dtype=torch.int64)
    return numbers[1:1 + count * (length + 1)].view(count, length + 1)


def by_expert(weights):
    """Weights of a layer's experts, as we and transformers have them in memory, under the names of separate experts."""
    split = {}
    for name, weight in weights.items():
        stem, _, projection = name.rpartition(".experts.")
        if not stem or projection not in ("gate_up_proj", "down_proj"):
            split[name] = weight
            continue
        for i, expert in enumerate(weight):
            halves = zip(("gate", "up"), expert if expert.dim() == 3 else expert.chunk(2))
            parts = dict(halves) if projection == "gate_up_proj" else {"down": expert}
            split |= {f"{stem}.experts.{i}.{part}_proj.weight": matrix for part, matrix in parts.items()}
    return split


# Peak of the largest process below it, in KiB. A small process of its own, because a child's peak begins with that of
# the process that it is forked from, and pytest's is large.
PEAK = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def peak_bytes(*command, **options):
    """Resident memory of the command's largest process."""
    return int(run(sys.executable, "-S", "-c", PEAK, *command, **options).stdout) * 1024
