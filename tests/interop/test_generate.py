"""`megashard generate`: transformers' tokens, distributions and cuts, and a set that training and infer read."""
import json
import math
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (Qwen3Config, Qwen3ForCausalLM, TemperatureLogitsWarper, TopKLogitsWarper,
                          TopPLogitsWarper)

from documented import blocks, blocks_run_by
from megashard import BUILD, ROOT, environment, launch, run, write_documents
from test_families import VOCAB, write_model

LENGTHS = (9, 1, 24, 13, 2, 17, 5)  # of prompts; not a multiple of the ranks' batches
NEW = 12
NOTICE = "each new token takes a forward of the whole text: "
# What keys and values a layer keeps, and how later tokens see them.
CACHED = ["gemma2-0", "gemma2-2", "gpt_oss-1", "deepseek_v3-0", "mistral4-1", "gemma4_text-0", "gemma4_text-2",
          "llama4_text-0", "ministral3-1", "exaone4-0", "olmo2-0", "smollm3-0", "cohere2-1", "glm4-1", "granite-1",
          "starcoder2-1", "ernie4_5-1", "minimax_m2-1"]
RECOMPUTED = {
    "phi3-1": "its positions turn by the sequence's length",
    "qwen3_next-0": "some of its layers pass on more than keys and values",
    "lfm2-0": "some of its layers pass on more than keys and values",
    "nemotron_h-0": "some of its layers pass on more than keys and values",
    "kimi_linear-0": "some of its layers pass on more than keys and values",
}


def generate(folder, *flags, ranks=1, output="answers", expect=0):
    done = run(*launch(ranks, "generate", "--hf-model", folder, "--data-path", folder / "prompts", "--seq-length", 40,
                       "--output", folder / output, *flags), expect=expect, timeout=300)
    return done.stdout + done.stderr


def read_set(prefix):
    """A list of prompts, answers and log-probabilities of the answers' tokens."""
    with safe_open(f"{prefix}.vision.safetensors", "pt") as file:
        ends = file.get_tensor("sample_ends")[:-1]
        columns = [file.get_tensor(name).tensor_split(ends)
                   for name in ("tokens", "loss_mask", "column.infer_logprobs")]
    answers = []
    for tokens, mask, log_probs in zip(*columns):
        learnt = mask == 1
        assert not log_probs[~learnt].any()
        answers.append((tokens[~learnt], tokens[learnt], log_probs[learnt]))
    return answers


def infer_log_probs(folder, output="answers", *flags):
    run(*launch(1, "infer", "--hf-model", folder, "--data-path", folder / output, "--seq-length", 40,
                "--micro-batch-size", 1, "--log-probs", folder / "again.npy", *flags), timeout=300)
    return torch.from_numpy(np.load(folder / "again.npy"))


@torch.no_grad()
def greedy(model, prompt, ends):
    """A forward of the whole text for each token."""
    text = prompt[None].long()
    for _ in range(NEW):
        text = torch.cat([text, model(text, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
        if int(text[0, -1]) in ends:
            break
    return text[0, len(prompt):]


def write_prompts(folder, vocabulary=VOCAB, lengths=LENGTHS):
    torch.manual_seed(7)
    prompts = [torch.randint(0, vocabulary, (length,)) for length in lengths]
    write_documents(folder / "prompts", prompts)
    return prompts


@pytest.mark.parametrize("name", [*CACHED, *RECOMPUTED])
def test_greedy_tokens_are_those_of_transformers(tmp_path, name):
    """And their log-probabilities those of a forward of the whole text."""
    model = write_model(tmp_path, name, seed=5).eval()
    prompts = write_prompts(tmp_path)
    ends = {int(greedy(model, prompts[0], ())[4])}
    out = generate(tmp_path, "--max-new-tokens", NEW, "--temperature", 0, "--micro-batch-size", 3, "--stop-token-ids",
                   ",".join(map(str, ends)))
    assert (NOTICE + "the model keeps no keys and values: " + RECOMPUTED[name] in out) if name in RECOMPUTED else (
        NOTICE not in out)
    answers = read_set(tmp_path / "answers")
    assert len(answers) == len(prompts)
    for prompt, (asked, answer, _) in zip(prompts, answers):
        assert torch.equal(asked.long(), prompt)
        assert torch.equal(answer.long(), greedy(model, prompt, ends))
    if name == "phi3-1":  # a longer text turns its first tokens by other frequencies
        return
    for prompt, row, (_, answer, log_probs) in zip(prompts, infer_log_probs(tmp_path), answers):
        again = row[len(prompt) - 1:][:len(answer)]
        assert (log_probs - again).abs().max() < 1e-5 * again.abs().max()


SIZES = dict(vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             head_dim=8, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, eos_token_id=23,
             pad_token_id=None)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model with a small vocabulary, and its prompts."""
    folder = tmp_path_factory.mktemp("generate")
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval()
    model.save_pretrained(folder)
    return folder, model, write_prompts(folder, SIZES["vocab_size"])


CUTS = {
    "all": ([], []),
    "temperature": (["--temperature", 1.7], [TemperatureLogitsWarper(1.7)]),
    "top-k": (["--top-k", 5], [TopKLogitsWarper(5)]),
    "top-p": (["--top-p", 0.8], [TopPLogitsWarper(0.8)]),
    "the likeliest alone": (["--top-p", 0.01], [TopPLogitsWarper(0.01)]),
    "all of them": (["--temperature", 2.5, "--top-k", 9, "--top-p", 0.7],
                    [TemperatureLogitsWarper(2.5), TopKLogitsWarper(9), TopPLogitsWarper(0.7)]),
}


@pytest.mark.parametrize("cut", CUTS)
def test_tokens_are_drawn_by_their_probabilities(small, tmp_path, cut):
    """First tokens of many samples: those that transformers' warpers leave, as often as they are probable."""
    folder, model, prompts = small
    flags, warpers = CUTS[cut]
    drawn, prompt = 4000, prompts[0]
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(folder / file)
    write_documents(tmp_path / "prompts", [prompt])
    generate(tmp_path, "--max-new-tokens", 1, "--samples-per-prompt", drawn, "--micro-batch-size", 1000, *flags)
    tokens = torch.cat([answer for _, answer, _ in read_set(tmp_path / "answers")])
    counts = torch.bincount(tokens, minlength=SIZES["vocab_size"])
    with torch.no_grad():
        scores = model(prompt[None]).logits[:, -1]
    for warper in warpers:
        scores = warper(prompt[None], scores)
    probabilities = scores.softmax(-1)[0].double()
    likely = probabilities > 5 / drawn  # the others may be missing
    assert torch.equal((counts > 0) & likely, likely) and not counts[probabilities == 0].any()
    # Five standard deviations: one of 24 counts is farther off in 1 of 70,000 such tests.
    spread = (drawn * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - drawn * probabilities).abs() <= 5 * spread + 1).all()


FSDP2 = ["--use-torch-fsdp2"]
SAMPLED = ("--max-new-tokens", 9, "--samples-per-prompt", 3, "--temperature", 0.9, "--top-p", 0.95)


def content(folder, output):
    return (folder / f"{output}.vision.safetensors").read_bytes()


def test_ranks_and_batches_change_nothing(small):
    folder = small[0]
    generate(folder, *SAMPLED, "--micro-batch-size", 4)
    for ranks, flags in ((2, FSDP2), (3, FSDP2), (2, [*FSDP2, "--tensor-model-parallel-size", 2])):
        generate(folder, *SAMPLED, "--micro-batch-size", 4, *flags, ranks=ranks, output="ranks")
        if "--tensor-model-parallel-size" not in flags:
            assert content(folder, "ranks") == content(folder, "answers")
        same_answers(folder, "ranks")
    for batch in (1, 7, 21):
        generate(folder, *SAMPLED, "--micro-batch-size", batch, output="batches")
        same_answers(folder, "batches")
    generate(folder, *SAMPLED, "--micro-batch-size", 4, "--seed", 5, output="seeds")
    with pytest.raises(AssertionError):
        same_answers(folder, "seeds")


def same_answers(folder, output):
    """Products of other sizes round otherwise."""
    for one, other in zip(read_set(folder / "answers"), read_set(folder / output), strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
        assert torch.allclose(one[2], other[2], rtol=1e-5, atol=1e-6)


def test_log_probabilities_are_those_of_the_temperature(small):
    """Before the cuts; an answer ends with its stop token or at --max-new-tokens."""
    folder, model, prompts = small
    generate(folder, *SAMPLED, "--micro-batch-size", 4)
    answers = read_set(folder / "answers")
    assert [len(asked) for asked, _, _ in answers] == [length for length in LENGTHS for _ in range(3)]
    ended = 0
    for asked, answer, log_probs in answers:
        text = torch.cat([asked, answer]).long()
        with torch.no_grad():
            wanted = (model(text[None]).logits[0] / 0.9).log_softmax(-1)
        wanted = wanted[len(asked) - 1:-1].gather(1, answer.long()[:, None])[:, 0]
        assert (log_probs - wanted).abs().max() < 1e-5 * wanted.abs().max()
        assert 23 not in answer[:-1] and (len(answer) == 9 or answer[-1] == 23)
        ended += int(answer[-1]) == 23
    assert 0 < ended < len(answers)
    assert len({tuple(answer.tolist()) for _, answer, _ in answers[:3]}) == 3


def test_on_the_simulated_device(small):
    folder = small[0]
    generate(folder, *SAMPLED, "--micro-batch-size", 4)
    out = generate(folder, *SAMPLED, "--micro-batch-size", 4, "--device", "sim", *FSDP2, ranks=2,
                   output="sim")
    assert "the device checked " in out
    same_answers(folder, "sim")


def test_ranks_that_share_texts_recompute_them(small):
    folder = small[0]
    generate(folder, *SAMPLED, "--micro-batch-size", 4)
    out = generate(folder, *SAMPLED, "--micro-batch-size", 4, "--context-parallel-size", 2, *FSDP2,
                   ranks=2, output="shared")
    assert NOTICE + "ranks share each text" in out
    same_answers(folder, "shared")


@pytest.mark.parametrize("temperature", [1, 0.7])
def test_a_policy_is_trained_on_the_set(small, tmp_path, temperature):
    """Prompts from conversations, up to the first answer. The policy is the one that sampled."""
    folder, _, prompts = small
    tokens = torch.cat([torch.tensor([1, 2, 3, 9, 9, 4, 9]), torch.tensor([5, 6])]).int()
    save_file({"tokens": tokens, "sample_ends": torch.tensor([7, 9]),
               "loss_mask": torch.tensor([0, 0, 0, 1, 1, 0, 1, 0, 0], dtype=torch.uint8)},
              tmp_path / "prompts.vision.safetensors")
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(folder / file)
    generate(tmp_path, "--max-new-tokens", 6, "--samples-per-prompt", 2, "--micro-batch-size", 4, "--temperature",
             temperature)
    answers = read_set(tmp_path / "answers")
    assert [asked.tolist() for asked, _, _ in answers] == [[1, 2, 3], [1, 2, 3], [5, 6], [5, 6]]
    data = load_file(tmp_path / "answers.vision.safetensors")
    advantages = torch.cat([torch.full((len(asked) + len(answer),), 1.0 - 2 * (i % 2))
                            for i, (asked, answer, _) in enumerate(answers)])
    save_file(data | {"column.advantages": advantages}, tmp_path / "rated.vision.safetensors")
    metrics = tmp_path / "metrics.jsonl"
    run(*launch(1, "pretrain", "--hf-model", tmp_path, "--data-path", tmp_path / "rated", "--split", "1,0,0",
                "--objective", "policy", "--seq-length", 40, "--micro-batch-size", 4, "--global-batch-size", 4,
                "--train-iters", 1, "--lr", "1e-3", "--eval-iters", 0, "--metrics-file", metrics), timeout=300)
    step = json.loads(metrics.read_text().splitlines()[0])
    assert abs(step["mismatch_kl"]) < 1e-6 and math.isfinite(step["loss"]), step


def test_the_page(small, tmp_path):
    """The commands and snippets of docs/generation.md, as they stand there."""
    folder, _, prompts = small
    (tmp_path / "build").symlink_to(BUILD)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(folder)
    write_documents(tmp_path / "run" / "prompts", prompts)
    page, test = ROOT / "docs" / "generation.md", "tests/interop/test_generate.py"
    texts = blocks_run_by(test, page)
    assert [block.language for block in blocks(page) if block.mark == f"run by {test}"] == ["sh", "python", "python"]
    run("bash", "-euc", texts[0], cwd=tmp_path, env=environment(), timeout=300)
    run(sys.executable, "-c", "\n".join(texts[1:]), cwd=tmp_path)
    data = load_file(tmp_path / "run" / "rated.vision.safetensors")
    assert len(data["sample_ends"]) == 4 * len(prompts)
    assert data["column.advantages"].shape == data["tokens"].shape and data["column.advantages"].any()
