"""launch/preprocess_data.py: what megatron-core reads of it, and what it says about wrong input."""

import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

PROGRAM = Path(__file__).resolve().parents[2] / "launch" / "preprocess_data.py"
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
    return subprocess.run([*map(str, command), *map(str, flags)], capture_output=True, text=True, timeout=60)


def expected_bytes(folder, name, dtype, documents):
    """The same set by megatron-core's own builder."""
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


@pytest.mark.parametrize("lines, flags, said", [
    (['{"text": "a"}', '{"text": '], [], "line 2, is not JSON"),
    (['{"text": "a"}', '["a"]'], [], "line 2, is not a JSON object"),
    (['{"body": "a"}'], [], "line 1, has no key 'text' (it has body); set --json-keys"),
    (['{"text": 3}'], [], "line 1: the value of 'text' is no text"),
    ([""], [], "holds no text at all"),
    (['{"text": "a"}'], ["--input", "missing.jsonl"], "there is no input file missing.jsonl"),
    (['{"text": "a"}'], ["--tokenizer-model", "missing"], "there is no tokenizer at missing"),
    (['{"text": "a"}'], ["--tokenizer-type", "GPT2BPETokenizer"], "is not supported; use Hugging"),
    (['{"text": "a"}'], ["--append-eod", "--eod-token", "<no>"], "has no token '<no>'"),
    (['{"text": "a"}'], ["--output-prefix", "/missing/out"], "/missing of --output-prefix does not"),
])
def test_wrong_input_is_one_sentence(tmp_path, lines, flags, said):
    done = run(tmp_path, *flags, lines=lines)
    assert done.returncode == 1
    assert said in done.stderr and done.stderr.startswith("preprocess_data: ")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("out*"))


def test_end_of_document_must_be_known(tmp_path):
    make_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert "--eod-token" in run(tmp_path, "--append-eod", lines=['{"text": "a"}']).stderr
    (tmp_path / "config.json").write_text('{"eos_token_id": [4, 5]}')
    assert run(tmp_path, "--append-eod").returncode == 0
    assert read(tmp_path)[0] == [[7, 4]]
