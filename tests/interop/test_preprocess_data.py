"""launch/preprocess/preprocess_data.py: what megatron-core reads of it, and what it says about wrong input."""

import gzip
import json
import os
import signal
import struct
import subprocess
import sys
import time
import wave
import zlib
from pathlib import Path

import numpy
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from tiny_vision import (AGAIN, ASKED, MIXED, SHOWN, asked, make_processors, make_videos, make_vision_model, said,
                         write_conversations, write_video)

BUILD = Path(os.environ.get("MEGASHARD_BUILD", Path(__file__).resolve().parents[2] / "build"))
PRETRAIN = os.environ.get("MEGASHARD", str(BUILD / "launch" / "megashard"))
PROGRAM = Path(__file__).resolve().parents[2] / "launch" / "preprocess" / "preprocess_data.py"
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


def test_packed_files_and_arrays(tmp_path):
    """What a file holds decides, not its name; blank lines, a byte order mark and pretty-printed arrays are read."""
    texts = ["the cat", "sat", "a dog"]
    lines = "".join(json.dumps({"text": text}) + "\n\n" for text in texts)
    contents = {"in.jsonl.gz": gzip.compress(lines.encode()), "marked.jsonl": b"\xef\xbb\xbf" + lines.encode(),
                "array.json": json.dumps([{"text": text} for text in texts], indent=2).encode(),
                "array.json.gz": gzip.compress(json.dumps([{"text": text} for text in texts]).encode()), "empty.json": b"[ ]"}
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
    flags = ("--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 "
             "--train-iters 1 --lr 1e-3 --eval-iters 0 --split 100,0,0 --log-interval 1 --log-tps --vocab-size 9 "
             "--tokenizer-type HuggingFaceTokenizer --eod-mask-loss").split()

    def train():
        return subprocess.run([PRETRAIN, "pretrain", *flags, "--tokenizer-model", tmp_path, "--data-path",
                               tmp_path / "out_text_document"], capture_output=True, text=True, timeout=60)
    assert "tokens per sample: 1.200000E+01" in train().stdout  # three of four inputs
    for name in ("tokenizer_config.json", "config.json"):
        (tmp_path / name).unlink()
    done = train()
    assert done.returncode == 2 and "nothing names it; give a --tokenizer-model folder" in done.stderr


def prepared_by_theirs(processor, folder, messages):
    """What transformers' own processor (torchvision) makes of a conversation."""
    from transformers.image_utils import load_image
    from transformers.video_utils import load_video
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    videos = [load_video(str(folder / part["video"]), sample_indices_fn=lambda metadata, **_: numpy.arange(metadata.total_num_frames))
              for part in parts if part["type"] == "video"]
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
    return processor(text=[text], images=[load_image(str(folder / part["image"])) for part in parts if part["type"] == "image"] or None,
                     videos=[frames for frames, _ in videos] or None, video_metadata=[data for _, data in videos] or None,
                     return_tensors="pt")


def losses_by_pytorch(model, samples):
    """Of three steps of SGD, each on all the samples: (tokens [1, T], labels [T - 1], what else the model takes)."""
    import torch
    losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        each = [torch.nn.functional.cross_entropy(model(tokens, **more).logits[0, :-1], labels, reduction="sum")
                for tokens, labels, more in samples]
        loss = sum(each) / sum(int((labels >= 0).sum()) for _, labels, _ in samples)
        losses.append(float(loss.detach()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


def train(folder, *flags):
    """The same steps by two ranks, on a set of four samples."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    done = subprocess.run([str(word) for word in [
        PRETRAIN, "launch", "-n", "2", "--", "pretrain", "--hf-model", folder, "--data-path", folder / "out", "--split", "1,0,0",
        "--seq-length", 128, "--micro-batch-size", 2, "--global-batch-size", 4, "--train-iters", 3, "--lr", "0.1", "--eval-iters", 0,
        "--optimizer", "sgd", "--sgd-momentum", 0, "--weight-decay", 0, "--lr-decay-style", "constant", "--calculate-per-token-loss",
        "--use-torch-fsdp2", "--metrics-file", metrics, "--peak-tflops", 1, *flags]], capture_output=True, text=True, timeout=120,
        stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_conversations_with_pictures_are_prepared_and_trained(tmp_path, family):
    """Tokens, grids and pixels as the model's own processor gives them, and the losses of a run on two ranks, where batches
    have images, videos, both or neither, are transformers'."""
    import torch
    from safetensors.torch import load_file
    make_processors(tmp_path)
    processor, model = make_videos(tmp_path, family), make_vision_model(tmp_path, family)
    conversations = [[ASKED, said("sat"), AGAIN, said("the mat")], [{"role": "user", "content": "on"}, said("the cat")],
                     [SHOWN, said("cat on")], [MIXED, said("the"), SHOWN, said("sat")]]
    if family == "qwen2_5_vl":
        done = run(tmp_path, "--input-format", "conversations", "--workers", "2", tokenizer=False,
                   lines=[json.dumps({"messages": messages}) for messages in conversations])
        assert done.returncode == 0, done.stderr
    else:
        write_conversations(tmp_path, conversations, tmp_path / "out")
    ours = load_file(tmp_path / "out.vision.safetensors")
    theirs = [prepared_by_theirs(processor, tmp_path, messages) for messages in conversations]
    levels = {"pixel_values": processor.image_processor, "pixel_values_videos": processor.video_processor}
    samples, ends = [], dict.fromkeys(("token", "image", "video", "pixel_values", "pixel_values_videos"), 0)

    def next_rows(name, rows, counter):
        ends[counter] += rows
        return ours[name][ends[counter] - rows:ends[counter]]

    answered = [["sat", "the mat"], ["the cat"], ["cat on"], ["the", "sat"]]
    for number, wanted in enumerate(theirs):
        tokens = next_rows("tokens", ours["sample_ends"][number] - ends["token"], "token").long()
        assert tokens.tolist() == wanted["input_ids"][0].tolist()
        mask = ours["loss_mask"][ends["token"] - len(tokens):ends["token"]].bool()
        learnt = processor.tokenizer.decode(tokens[mask]).replace("<|im_end|>", " <|im_end|> ").split()
        assert learnt == " ".join(f"{answer} <|im_end|>" for answer in answered[number]).split()
        pictures = {}
        for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if pixels not in wanted:
                assert ours[f"{kind}_ends"][number] == ends[kind]
                continue
            if kind == "video":
                pictures["second_per_grid_ts"] = ours["second_per_grid_ts"][ends[kind]:ours["video_ends"][number]]
            grids = next_rows(f"{kind}_grid_thw", ours[f"{kind}_ends"][number] - ends[kind], kind)
            assert torch.equal(grids, wanted[f"{kind}_grid_thw"])
            pictures |= {f"{kind}_grid_thw": grids, pixels: next_rows(pixels, int(grids.prod(1).sum()), pixels)}
            # Both round to whole grey levels when they resize, and may round differently.
            off = (pictures[pixels] - wanted[pixels]).abs().max()
            assert off <= 1.001 / 255 / min(levels[pixels].image_std)
        if "second_per_grid_ts" in wanted:
            assert torch.equal(pictures["second_per_grid_ts"], torch.tensor(wanted["second_per_grid_ts"]))
        if family == "qwen3_vl":
            pictures.pop("second_per_grid_ts", None)
        samples.append((tokens[None], tokens[1:].where(mask[1:], -100), pictures | {"mm_token_type_ids": wanted["mm_token_type_ids"]}))

    seen = train(tmp_path)
    assert seen == pytest.approx(losses_by_pytorch(model, samples), rel=2e-6)  # fp32, sums over two ranks
    assert seen[2] < seen[0]
    if family == "qwen2_5_vl":  # each conversation on both ranks
        assert train(tmp_path, "--context-parallel-size", 2) == pytest.approx(seen, rel=2e-6)


# As the published ones are written; {% generation %} is for transformers, to say which tokens are the assistant's.
TURN = ("{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}")
QWEN = ("{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
        "{% if tools %}{{ tools }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        + TURN + "{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
LLAMA = ("{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_start|>\n\n' }}"
         + TURN + "{% endfor %}"
         "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_start|>\n\n' }}{% endif %}")
CHATS = [[asked("Which one?"), said("The caf\u00e9 \u2603 on the mat.\n\nYes.")],
         [{"role": "system", "content": "Be brief."}, asked([{"type": "text", "text": "Who "}, {"type": "text", "text": "sat?"}]),
          said("The cat."), asked("Where?"), said("On the mat, where it sat.")],
         [asked("Sing."), said(" la la " * 9)], [asked(""), said("the")]]


def untagged(template):
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def make_chat_tokenizer(folder, template):
    from tokenizers import decoders, trainers
    from transformers import PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator(["the cat sat on the mat, where it sat. la la la user assistant system"] * 9, trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|begin|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|im_end|>",
                                        chat_template=template)
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("family, template", [("Qwen3", QWEN), ("Llama", LLAMA)], ids=["qwen3", "llama"])
def test_conversations_of_text_are_prepared_and_trained(tmp_path, family, template):
    """Tokens, and which of them are learnt, as transformers' chat template gives them, and transformers' losses; no picture anywhere."""
    import torch
    import transformers
    from safetensors.torch import load_file
    tokenizer = make_chat_tokenizer(tmp_path, untagged(template))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(
        vocab_size=300, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=128, initializer_range=0.1, bos_token_id=0, eos_token_id=2))
    model.save_pretrained(tmp_path)
    write_conversations(tmp_path, CHATS, tmp_path / "out")
    ours, samples, first = load_file(tmp_path / "out.vision.safetensors"), [], 0
    for messages, end in zip(CHATS, ours["sample_ends"].tolist()):
        whole = [{**message, "content": message["content"] if isinstance(message["content"], str) else
                  "".join(part["text"] for part in message["content"])} for message in messages]
        theirs = tokenizer.apply_chat_template(whole, chat_template=template, return_assistant_tokens_mask=True)
        assert ours["tokens"][first:end].tolist() == theirs["input_ids"]
        assert ours["loss_mask"][first:end].tolist() == theirs["assistant_masks"] and 0 < sum(theirs["assistant_masks"])
        tokens, learnt = torch.tensor(theirs["input_ids"]), torch.tensor(theirs["assistant_masks"]).bool()
        samples.append((tokens[None], tokens[1:].where(learnt[1:], -100), {}))
        first = end
    assert len(ours["tokens"]) == first and ours["image_grid_thw"].shape == (0, 3) and ours["pixel_values"].shape[0] == 0
    seen = train(tmp_path)
    if family == "Llama":
        subprocess.run([PRETRAIN, "infer", "--hf-model", tmp_path, "--data-path", tmp_path / "out", "--seq-length", "128", "--log-probs",
                        tmp_path / "log_probs.npy"], check=True, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"})
        for ours, (tokens, _, _) in zip(numpy.load(tmp_path / "log_probs.npy"), samples):
            wanted = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].detach().numpy()
            assert abs(ours[:len(wanted)] - wanted).max() < 1e-5 * abs(wanted).max()
    assert seen == pytest.approx(losses_by_pytorch(model, samples), rel=2e-6)  # fp32, sums over two ranks
    assert seen[2] < seen[0]


FORMS = {  # each the conversation of "messages"
    "sharegpt": {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Who sat?"},
                                   {"from": "gpt", "value": "The cat."}, {"from": "user", "value": "Where?"},
                                   {"from": "assistant", "value": "On the mat."}]},
    "sharegpt with a system of its own": {"system": "Be brief.", "conversations": [
        {"from": "human", "value": "Who sat?"}, {"from": "chatgpt", "value": "The cat."}, {"from": "human", "value": "Where?"},
        {"from": "gpt", "value": "On the mat."}]},
    "alpaca": {"system": "Be brief.", "history": [["Who sat?", "The cat."]], "instruction": "Where?", "input": "",
               "output": "On the mat."}}
SAID = [{"role": "system", "content": "Be brief."}, asked("Who sat?"), said("The cat."), asked("Where?"), said("On the mat.")]


@pytest.mark.parametrize("packed", [False, True])
def test_published_forms_are_the_same_conversation(tmp_path, monkeypatch, packed):
    """ShareGPT and Alpaca give the tokens and the mask that transformers' chat template gives for the messages."""
    from safetensors.torch import load_file
    tokenizer = make_chat_tokenizer(tmp_path, untagged(QWEN))
    theirs = tokenizer.apply_chat_template(SAID, chat_template=QWEN, return_assistant_tokens_mask=True)
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    import preprocess_data
    for name, record in {**FORMS, "messages": {"messages": SAID}}.items():
        text = json.dumps([record, record], indent=1) if packed else json.dumps(record) + "\n" + json.dumps(record)
        (tmp_path / "in.json").write_bytes(gzip.compress(text.encode()) if packed else text.encode())
        monkeypatch.setattr(sys, "argv", ["preprocess_data.py", "--input", str(tmp_path / "in.json"), "--input-format", "conversations",
                                          "--tokenizer-model", str(tmp_path), "--output-prefix", str(tmp_path / "out")])
        preprocess_data.main()
        ours = load_file(tmp_path / "out.vision.safetensors")
        assert ours["tokens"].tolist() == theirs["input_ids"] * 2, name
        assert ours["loss_mask"].tolist() == theirs["assistant_masks"] * 2, name
    from conversation_forms import messages_in
    given = {"instruction": "Say it in French.", "input": "a cat", "output": "un chat"}
    assert messages_in("", given, "alpaca")[0] == [asked("Say it in French.\na cat"), said("un chat")]


THINKING = ("{% set last = namespace(question=0) %}"  # drops the reasoning of answers before the last question, as Qwen3's
            "{% for m in messages %}{% if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor %}"
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
            "{% if loop.index0 > last.question %}{{ '<think>\n' + m.get('reasoning_content', '') + '\n</think>\n' }}{% endif %}"
            "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
THOUGHT = [asked("Who sat?"), {**said("The cat."), "reasoning_content": "Cats sit."}, asked("Where?"), said("On the mat.")]


def test_answers_are_learnt_as_the_template_writes_them(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    from preprocess_conversations import Encoder
    from preprocess_input import InputError

    def encode(template, line, **options):
        tokenizer = make_chat_tokenizer(tmp_path, template)
        sample = Encoder(tmp_path, **options).encode(("in.jsonl, line 2,", line, str(tmp_path)))
        return tokenizer, sample, tokenizer.decode([token for token, learnt in zip(sample.tokens, sample.mask) if learnt])

    def refused(template, line):
        with pytest.raises(InputError) as error:
            encode(template, line)
        assert str(error.value).startswith("in.jsonl, line 2")
        return str(error.value)

    thought = {"messages": THOUGHT}
    assert "writes an earlier answer in another way when later turns come" in refused(untagged(THINKING), thought)
    tokenizer, sample, learnt = encode(untagged(THINKING), thought, mask_history=True)
    assert sample.tokens == tokenizer.apply_chat_template(THOUGHT)["input_ids"]
    assert learnt == "<think>\n\n</think>\nOn the mat.<|im_end|>"
    assert encode(untagged(THINKING), {"messages": THOUGHT[:2]})[2] == "<think>\nCats sit.\n</think>\nThe cat.<|im_end|>"
    tokenizer, sample, learnt = encode(THINKING, thought)
    assert list(sample.mask) == tokenizer.apply_chat_template(THOUGHT, return_assistant_tokens_mask=True)["assistant_masks"]
    assert learnt == "The cat.<|im_end|><think>\n\n</think>\nOn the mat.<|im_end|>"
    assert encode(THINKING, thought, mask_history=True)[2] == "<think>\n\n</think>\nOn the mat.<|im_end|>"
    assert "does not begin with the chat template's generation prompt" in refused(
        untagged(QWEN).replace("assistant\n", "assistant\n<think>"), {"messages": CHATS[0]})
    assert "the chat template refuses the messages: no system" in refused(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + QWEN, {"messages": CHATS[1]})
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    called = [asked("Look."), {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]},
              {"role": "tool", "content": "A mat."}, said("A mat.")]
    _, sample, learnt = encode(untagged(QWEN), {"messages": called, "tools": tools})
    assert learnt == "<|im_end|>A mat.<|im_end|>" and "'look'" in tokenizer.decode(sample.tokens)
    assert "has no <|image_pad|>; give the directory of a vision-language model" in refused(QWEN, {"messages": [ASKED, said("sat")]})


@pytest.mark.parametrize("victim", ["worker", "parent"])
def test_a_killed_process_leaves_none_waiting(tmp_path, victim):
    make_tokenizer(tmp_path)
    (tmp_path / "in.jsonl").write_text((json.dumps({"text": TEXTS[0] * 20}) + "\n") * 40000)
    program = subprocess.Popen([sys.executable, PROGRAM, "--output-prefix", tmp_path / "out", "--input", tmp_path / "in.jsonl",
                                "--tokenizer-model", tmp_path, "--workers", "2", "--log-interval", "1000000"],
                               stderr=subprocess.PIPE, text=True)
    children, end = Path(f"/proc/{program.pid}/task/{program.pid}/children"), time.monotonic() + 30
    try:
        while len(workers := children.read_text().split()) < 2 or (tmp_path / "out_text_document.bin.partial").stat().st_size == 0:
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(int(workers[0]) if victim == "worker" else program.pid, signal.SIGKILL)
        said = program.communicate(timeout=30)[1]  # until the last of them has closed it
    finally:
        program.kill()
    if victim == "worker":
        assert said.startswith("preprocess_data: a worker process has ended before its work") and program.returncode == 1
        assert not list(tmp_path.glob("out*"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """In this process: one import of transformers for all that is wrong."""
    folder = tmp_path_factory.mktemp("vision")
    make_processors(folder)
    make_videos(folder, "qwen2_5_vl")
    (folder / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    (folder / "cut.png").write_bytes((folder / "a.png").read_bytes()[:300])
    header = bytearray((folder / "a.png").read_bytes())
    header[16:24] = struct.pack(">II", 60000, 60000)  # no OSError in Pillow
    header[29:33] = struct.pack(">I", zlib.crc32(header[12:29]))
    (folder / "huge.png").write_bytes(header)
    Image.new("RGB", (1, 300)).save(folder / "thin.png")
    write_video(folder / "one.mp4", 1, 4, (16, 16))
    write_video(folder / "a.avi", 9, 4, (20, 24))
    for whole, begin, end in (("a.mp4", b"mdat", b"moov"), ("a.avi", b"movi", b"idx1")):
        content = (folder / whole).read_bytes()
        (folder / f"cut_{whole}").write_bytes(content[:(content.index(begin) + content.index(end)) // 2])
    with wave.open(str(folder / "sound.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(1600))
    (folder / "nothing").mkdir()
    (folder / "frames").mkdir()
    for number in range(3):
        noise = numpy.random.RandomState(number).randint(0, 256, (21, 26, 3)).astype("uint8")
        Image.fromarray(noise).save(folder / "frames" / f"{number}.png")
    sys.path.insert(0, str(PROGRAM.parent))
    from preprocess_conversations import Encoder
    yield Encoder(folder), folder
    sys.path.remove(str(PROGRAM.parent))


def about(kind, path):
    return [asked([{"type": kind, kind: path}]), said("sat")]


@pytest.mark.parametrize("messages, sentence", [
    (about("image", "none.png"), "none.png: No such file or directory; correct the path or the file, or delete the line"),
    (about("image", "tokenizer.json"), "cannot read the image"),
    (about("image", "cut.png"), "cut.png: image file is truncated"),
    (about("image", "huge.png"), "huge.png: Image size (3600000000 pixels) exceeds"),
    (about("image", "thin.png"), "the image processor refuses a picture"),
    (about("sound", "a.wav"), "content of type 'sound' is not supported; known are text, image and video"),
    (about("video", "none.mp4"), "none.mp4 cannot be opened: No such file or directory"),
    (about("video", "cut_a.mp4"), "cut_a.mp4 cannot be opened: Invalid data found"),
    (about("video", "cut_a.avi"), "ends before frame 2 of the 9 that it announces; it is truncated"),
    (about("video", "sound.wav"), "sound.wav has no pictures, only sound"),
    (about("video", "one.mp4"), "one.mp4 has 1 frames, too few to sample 2 of them"),
    (about("video", "nothing"), "nothing is a folder without frames"),
    (about("video", "frames"), "frames is a folder of frames; say beside it how many of them make a second"),
    ([asked("<|image_pad|>"), said("sat")], "the text contains <|image_pad|>"),
    ([asked("<|video_pad|>"), said("sat")], "the text contains <|video_pad|>"),
    ([ASKED], "must begin with a question and end with an answer"),
    ([], "has no list \"messages\""),
    ([{"role": "robot", "content": "the"}], "a message must have a role of system, user, assistant, tool"),
], ids=["missing", "not an image", "cut", "huge", "thin", "sound", "missing video", "cut video", "cut in its frames", "no video", "one frame",
        "empty folder", "folder", "placeholder", "video placeholder", "unanswered", "empty", "role"])
def test_wrong_conversations_are_named(encoder, messages, sentence):
    encode, folder = encoder[0].encode, encoder[1]
    from preprocess_input import InputError
    with pytest.raises(InputError) as refused:
        encode(("in.jsonl, line 2,", {"messages": messages}, str(folder)))
    assert sentence in str(refused.value) and str(refused.value).startswith("in.jsonl, line 2,")


def test_videos_are_those_of_both_processors(encoder, monkeypatch):
    """Which frames are taken, to which size they are resized, and frames that do not fill the last patch."""
    import torch
    from preprocess_input import InputError
    from preprocess_videos import DEFAULTS, VideoFile, VideoProcessor
    from transformers import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata
    folder, random = encoder[1], numpy.random.RandomState(0)
    frames = numpy.stack([numpy.asarray(Image.open(file)) for file in sorted((folder / "frames").iterdir())])
    for kind in (Qwen2VLVideoProcessor, Qwen3VLVideoProcessor):
        changed = {"patch_size": 4, "cap_pixels_per_frame": True, "size": {"shortest_edge": 3000, "longest_edge": 60000}}
        theirs, ours = kind(**changed), VideoProcessor(folder)
        ours.name, ours.parameters = kind.__name__, {**DEFAULTS[kind.__name__], **changed}
        for _ in range(200):
            total, fps = int(random.randint(2, 3000)), float(random.choice([23.976, 25, 30, 1, 0.7]))
            for chosen in ({"fps": float(random.choice([0.5, 1, 2, 3.3])), "num_frames": None},
                           {"fps": None, "num_frames": int(random.randint(2, total + 1))}):
                if kind is Qwen2VLVideoProcessor and chosen["num_frames"] and round(chosen["num_frames"] / 2) * 2 > total:
                    continue  # refused by both
                ours.parameters |= {**chosen, "do_sample_frames": True}
                wanted = theirs.sample_frames(VideoMetadata(total_num_frames=total, fps=fps), **chosen)
                # By rounding, Qwen2VLVideoProcessor at times asks for a frame behind the last.
                assert ours.sample(total, fps).tolist() == wanted[wanted < total].tolist()
            height, width, count = (int(number) for number in random.randint(9, 900, 3))
            count += 1 - count // 450  # odd ones too
            video = torch.empty(1, count, 3, height, width, device="meta")
            wanted = theirs.resize(video, size=theirs.size, resample=3, factor=8, temporal_factor=2, cap_pixels_per_frame=True)
            assert ours.size_of(count, height, width) == tuple(wanted.shape[-2:])
        made = ours.process(folder / "frames", 2)
        wanted = theirs(videos=[frames], do_sample_frames=False, return_tensors="np")
        assert made.grid == tuple(wanted["video_grid_thw"][0]) and made.grid[0] == 2
        # In grey levels; two in 1 of 100,000, as torchvision rounds with weights of 16 bits, and Pillow with finer ones.
        off = abs(made.pixels - wanted["pixel_values_videos"]) * 255 * min(theirs.image_std)
        assert (off > 1.001).mean() < 1e-4 and off.max() < 2.001
        assert made.times == [0.25, 1.0] and made.seconds_per_grid == 1.0
    images = [Image.fromarray(frame) for frame in frames]
    images[0].save(folder / "a.gif", save_all=True, append_images=images[1:], duration=250)
    video = VideoFile(folder / "a.gif")  # does not say how many frames it has
    assert video.total == 3 and video.fps == 4 and len(list(video.frames([0, 2, 2]))) == 3
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InputError, match="videos need the package av"):
        VideoFile(folder / "a.mp4")
