"""launch/preprocess_data.py: what megatron-core reads of it, and what it says about wrong input."""

import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from tiny_vision import AGAIN, ASKED, IMAGE, WORDS, make_processors, make_vision_model, said

BUILD = Path(os.environ.get("MEGASHARD_BUILD", Path(__file__).resolve().parents[2] / "build"))
PRETRAIN = os.environ.get("MEGASHARD", str(BUILD / "launch" / "megashard"))
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


def test_conversations_with_pictures_are_prepared_and_trained(tmp_path):
    """Tokens, mask, grids and pixels as the model's own processors give them, and the first loss of a run on two ranks, one
    of which has no picture, is transformers'."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoImageProcessor
    make_processors(tmp_path)
    model = make_vision_model(tmp_path)
    conversations = [[ASKED, said("sat"), AGAIN, said("the mat")], [{"role": "user", "content": "on"}, said("the cat")]]
    done = run(tmp_path, "--input-format", "conversations", "--workers", "2", tokenizer=False,
               lines=[json.dumps({"messages": messages}) for messages in conversations])
    assert done.returncode == 0, done.stderr
    ours = load_file(tmp_path / "out.vision.safetensors")
    wanted = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")(
        images=[Image.open(tmp_path / name) for name in ("a.png", "b.png")], return_tensors="pt")
    assert torch.equal(ours["pixel_values"], wanted["pixel_values"])
    assert torch.equal(ours["image_grid_thw"], wanted["image_grid_thw"])
    turns = ("<|im_start|> user <|vision_start|> {} <|vision_end|> the cat <|im_end|> <|im_start|> assistant sat! <|im_end|>! "
             "<|im_start|> user on <|vision_start|> {} <|vision_end|> <|im_end|> <|im_start|> assistant the! mat! <|im_end|>! "
             "<|im_start|> user on <|im_end|> <|im_start|> assistant the! cat! <|im_end|>!")
    counts = wanted["image_grid_thw"].prod(1) // 4
    text = turns.format(*(" ".join(["<|image_pad|>"] * int(count)) for count in counts)).split()
    assert ours["tokens"].tolist() == [WORDS.index(word.rstrip("!")) for word in text]
    assert ours["loss_mask"].tolist() == [int(word.endswith("!")) for word in text]

    losses = []
    ends = [0, *ours["sample_ends"].tolist()]
    for i in range(2):
        tokens, mask = ours["tokens"][ends[i]:ends[i + 1]].long()[None], ours["loss_mask"][ends[i]:ends[i + 1]].bool()
        pictures = dict(pixel_values=ours["pixel_values"], image_grid_thw=ours["image_grid_thw"]) if i == 0 else {}
        with torch.no_grad():
            logits = model(tokens, mm_token_type_ids=(tokens == IMAGE).int(), **pictures).logits
        losses.append(torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:].where(mask[1:], -100), reduction="sum"))
    metrics = tmp_path / "metrics.jsonl"

    def train(*flags):
        metrics.unlink(missing_ok=True)
        done = subprocess.run([str(word) for word in [
            PRETRAIN, "launch", "-n", "2", "--", "pretrain", "--hf-model", tmp_path, "--data-path", tmp_path / "out", "--split", "1,0,0",
            "--seq-length", 48, "--micro-batch-size", 1, "--global-batch-size", 2, "--train-iters", 3, "--lr", "1e-2", "--eval-iters",
            0, "--use-torch-fsdp2", "--metrics-file", metrics, "--peak-tflops", 1, *flags]], capture_output=True, text=True,
            timeout=120, stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]

    seen = train()
    # The log has the mean over all tokens; 2e-6: sums over two ranks.
    assert seen[0] == pytest.approx(float(sum(losses)) / int(ours["loss_mask"].sum()), rel=2e-6) and seen[2] < seen[0]
    assert train("--context-parallel-size", 2) == pytest.approx(seen, rel=2e-6)  # each conversation on both ranks


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """In this process: one import of transformers for all that is wrong."""
    folder = tmp_path_factory.mktemp("vision")
    make_processors(folder)
    (folder / "cut.png").write_bytes((folder / "a.png").read_bytes()[:300])
    header = bytearray((folder / "a.png").read_bytes())
    header[16:24] = struct.pack(">II", 60000, 60000)  # no OSError in Pillow
    header[29:33] = struct.pack(">I", zlib.crc32(header[12:29]))
    (folder / "huge.png").write_bytes(header)
    Image.new("RGB", (1, 300)).save(folder / "thin.png")
    sys.path.insert(0, str(PROGRAM.parent))
    from preprocess_conversations import Encoder
    yield Encoder(folder), folder
    sys.path.remove(str(PROGRAM.parent))


@pytest.mark.parametrize("messages, sentence", [
    ([{"role": "user", "content": [{"type": "image", "image": "none.png"}]}, said("sat")],
     "none.png: No such file or directory; correct the path or the file, or delete the line"),
    ([{"role": "user", "content": [{"type": "image", "image": "tokenizer.json"}]}, said("sat")], "cannot read the image"),
    ([{"role": "user", "content": [{"type": "image", "image": "cut.png"}]}, said("sat")], "cut.png: image file is truncated"),
    ([{"role": "user", "content": [{"type": "image", "image": "huge.png"}]}, said("sat")], "huge.png: Image size (3600000000 pixels) exceeds"),
    ([{"role": "user", "content": [{"type": "image", "image": "thin.png"}]}, said("sat")], "the image processor refuses a picture"),
    ([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}, said("sat")], "content of type 'video' is not supported"),
    ([{"role": "user", "content": "<|image_pad|>"}, said("sat")], "the text contains <|image_pad|>"),
    ([ASKED], "must begin with a question and end with an answer"),
    ([], "has no list \"messages\""),
    ([{"role": "robot", "content": "the"}], "a message must have a role of system, user, assistant, tool"),
], ids=["missing", "not an image", "cut", "huge", "thin", "video", "placeholder", "unanswered", "empty", "role"])
def test_wrong_conversations_are_named(encoder, messages, sentence):
    encode, folder = encoder[0].encode, encoder[1]
    from preprocess_input import InputError
    with pytest.raises(InputError) as refused:
        encode(("in.jsonl, line 2,", json.dumps({"messages": messages}), str(folder)))
    assert sentence in str(refused.value) and str(refused.value).startswith("in.jsonl, line 2,")
