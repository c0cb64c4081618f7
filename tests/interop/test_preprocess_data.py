"""launch/preprocess/preprocess_data.py: megatron-core reads its files; errors for wrong input."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from tokenizers import Tokenizer, models, pre_tokenizers

import megashard
from megashard import PREPROCESS, USAGE, launch, network

PROGRAM = PREPROCESS / "preprocess_data.py"
TEXTS = ["the cat sat on the mat", "", "a dog", "the dog sat"] * 50


def make_tokenizer(folder, vocab_size=None):
    words = ["<unk>", "<eos>", "the", "cat", "sat", "on", "mat", "a", "dog"]
    words += [f"word{number}" for number in range((vocab_size or 9) - 9)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)  # a limit that must not cut documents
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    return tokenizer


def run(folder, *flags, lines=None, tokenizer=True):
    if tokenizer and not (folder / "tokenizer.json").exists():
        make_tokenizer(folder)
    if lines is not None:
        (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    command = [sys.executable, PROGRAM, "--output-prefix", folder / "out"]
    command += ["--input", folder / "in.jsonl"] if "--input" not in flags else []
    command += ["--tokenizer-model", folder] if "--tokenizer-model" not in flags else []
    return megashard.run(*command, *flags, expect=None)


def expected_bytes(folder, name, dtype, documents):
    """The same set, written by megatron-core's builder."""
    builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=dtype)
    for sequences in documents:
        builder.add_document([token for ids in sequences for token in ids], [len(ids) for ids in sequences])
    builder.finalize(str(folder / f"{name}.idx"))
    return [(folder / f"{name}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def read(folder, key="text"):
    """Sequences and document bounds as megatron-core reads them; copied, for its views die with it."""
    dataset = IndexedDataset(str(folder / f"out_{key}_document"))
    return [dataset[i].tolist() for i in range(len(dataset))], dataset.document_indices.tolist()


@pytest.mark.parametrize("workers", [1, 2])
def test_is_byte_for_byte_megatrons(tmp_path, workers):
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.no_truncation()
    done = run(tmp_path, "--append-eod", "--workers", workers, "--partitions", 2,
               lines=[json.dumps({"text": text}) for text in TEXTS])
    assert done.returncode == 0, done.stderr
    documents = [[tokenizer.encode(text).ids + [1]] if text else [] for text in TEXTS]
    ours = [(tmp_path / f"out_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")]
    assert ours == expected_bytes(tmp_path, "theirs", numpy.uint16, documents)
    sequences, bounds = read(tmp_path)
    assert len(sequences) == 150 and sequences[1] == [7, 8, 1]
    assert len(bounds) == len(TEXTS) + 1
    assert not list(tmp_path.glob("*.partial"))


def test_keys_and_lists(tmp_path):
    done = run(tmp_path, "--json-keys", "body", "title", lines=[
        json.dumps({"title": "a cat", "body": ["the mat", "", "a dog"]}),
        "", json.dumps({"title": "the dog", "body": "sat"})])
    assert done.returncode == 0, done.stderr
    assert read(tmp_path, "body") == ([[2, 6], [7, 8], [4]], [0, 2, 3])
    assert read(tmp_path, "title") == ([[7, 3], [2, 8]], [0, 1, 2])


def test_large_vocabulary_takes_int32(tmp_path):
    make_tokenizer(tmp_path, 65500)
    done = run(tmp_path, lines=[json.dumps({"text": "word65490 the"})])
    assert done.returncode == 0, done.stderr
    assert read(tmp_path)[0] == [[65499, 2]]
    assert (tmp_path / "out_text_document.idx").read_bytes()[17] == 4


def test_plain_text(tmp_path):
    lines = ["the cat", "sat", "", "", "a dog"]
    assert run(tmp_path, "--input-format", "text", lines=lines).returncode == 0
    assert read(tmp_path)[0] == [[2, 3, 4], [7, 8]]
    assert run(tmp_path, "--input-format", "text", "--lines-per-document", 1).returncode == 0
    assert read(tmp_path)[0] == [[2, 3], [4], [7, 8]]


def test_packed_files_and_arrays(tmp_path):
    """The content of a file decides, not its name; blank lines, a byte order mark and indented arrays are read."""
    texts = ["the cat", "sat", "a dog"]
    lines = "".join(json.dumps({"text": text}) + "\n\n" for text in texts)
    contents = {"in.jsonl.gz": gzip.compress(lines.encode()), "marked.jsonl": b"\xef\xbb\xbf" + lines.encode(),
                "array.json": json.dumps([{"text": text} for text in texts], indent=2).encode(),
                "arrays.json": b'[{"text": "the cat"}, {"text": "sat"}]\n[\n{"text": "a dog"}\n]\n',
                "appended.json": b'[{"text": "the cat"}]\n{"text": "sat"}\n{"text": "a dog"}\n',
                "array.json.gz": gzip.compress(json.dumps([{"text": text} for text in texts]).encode()),
                "empty.json": b"[ ]"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        done = run(tmp_path, "--input", tmp_path / name)
        if name == "empty.json":
            assert "holds no text at all" in done.stderr
            continue
        assert done.returncode == 0, done.stderr
        assert read(tmp_path)[0] == [[2, 3], [4], [7, 8]], name
    (tmp_path / "in.txt.gz").write_bytes(gzip.compress("the cat\n\nsat\n\na dog\n".encode()))
    assert run(tmp_path, "--input", tmp_path / "in.txt.gz", "--input-format", "text").returncode == 0
    assert read(tmp_path)[0] == [[2, 3], [4], [7, 8]]


def test_bad_records_are_left_out_where_a_flag_says_so(tmp_path):
    lines = ['{"text": "the cat"}', '{"text": ', '{"text": 3}', '["a"]', '{"body": "a"}', '{"text": "\\ud83d"}',
             '{"text": "sat"}']
    assert "line 2, is not JSON" in run(tmp_path, lines=lines).stderr
    done = run(tmp_path, "--skip-bad-records")
    assert done.returncode == 0 and read(tmp_path)[0] == [[2, 3], [4]]
    told = done.stderr.splitlines()
    assert told[0] == "preprocess_data: notice: 5 bad records left out; the first 3" and len(told) == 4
    assert ["line 2, is not JSON" in told[1], "line 3: the value of 'text' is no text" in told[2],
            "line 4, is not a JSON object" in told[3]] == [True] * 3
    done = run(tmp_path, "--skip-bad-records", lines=lines[1:-1])
    assert done.returncode == 1 and "holds no text at all" in done.stderr


def test_end_of_document_must_be_known(tmp_path):
    make_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert "--eod-token" in run(tmp_path, "--append-eod", lines=['{"text": "a"}']).stderr
    (tmp_path / "config.json").write_text('{"eos_token_id": [4, 5]}')
    assert run(tmp_path, "--append-eod").returncode == 0
    assert read(tmp_path)[0] == [[7, 4]]


def test_training_knows_the_end_of_document_that_was_written(tmp_path):
    """The tokenizer's eos, where the model's config.json has another one first."""
    make_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": [4, 5]}')
    lines = ['{"text": "a a a"}'] * 40  # [7, 7, 7, 1] each
    assert run(tmp_path, "--append-eod", lines=lines).returncode == 0
    flags = (f"{network(layers=1, vocabulary=9)} --micro-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 "
             f"--split 100,0,0 --log-interval 1 --log-tps --eod-mask-loss --data-path {tmp_path / 'out_text_document'} "
             f"--tokenizer-model {tmp_path}").replace("NullTokenizer", "HuggingFaceTokenizer").split()

    def train(expect):
        return megashard.run(*launch(1, "pretrain", *flags), expect=expect)

    assert "tokens per sample: 1.200000E+01" in train(expect=0).stdout  # three of four inputs
    for name in ("tokenizer_config.json", "config.json"):
        (tmp_path / name).unlink()
    assert "nothing names it; give a --tokenizer-model folder" in train(expect=USAGE).stderr


@pytest.mark.parametrize("victim", ["worker", "parent"])
def test_a_killed_process_leaves_none_waiting(tmp_path, victim):
    make_tokenizer(tmp_path)
    (tmp_path / "in.jsonl").write_text((json.dumps({"text": TEXTS[0] * 20}) + "\n") * 40000)
    program = subprocess.Popen([sys.executable, PROGRAM, "--output-prefix", tmp_path / "out", "--input",
                                tmp_path / "in.jsonl", "--tokenizer-model", tmp_path, "--workers", "2",
                                "--log-interval", "1000000"],
                               stderr=subprocess.PIPE, text=True)
    children, end = Path(f"/proc/{program.pid}/task/{program.pid}/children"), time.monotonic() + 30
    try:
        while len(workers := children.read_text().split()) < 2 or (
            tmp_path / "out_text_document.bin.partial").stat().st_size == 0:
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(int(workers[0]) if victim == "worker" else program.pid, signal.SIGKILL)
        said = program.communicate(timeout=30)[1]  # until the last of them has closed it
    finally:
        program.kill()
    if victim == "worker":
        assert said.startswith(
            "preprocess_data: a worker process has ended before its work") and program.returncode == 1
        assert not list(tmp_path.glob("out*"))
