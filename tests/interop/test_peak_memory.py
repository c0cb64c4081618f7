"""Bytes of tensors that a training step holds at most: megashard, PyTorch FSDP1 and FSDP2 on the same job, counted by
the same allocator (live_memory.h).

Weights, gradients, moments, activations (of four tokens a rank: next to nothing) and the buffers of communication. On
Gloo, its own temporary tensors are counted on either side; a fake group has none, so what is left is what the strategy
holds. docs/benchmarks.md has the figures.
"""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megashard import INTEROP, fsdp2_reference, train_dump
from test_parity import Case

STEPS, TOKENS = 3, 4
SIDES = ("ours", "fsdp2", "fsdp1")
# Model, ranks, backend; upper bound of our peak / FSDP1's.
CASES = {("qwen3", 2, "gloo"): 0.93, ("qwen3", 2, "fake"): 0.93, ("qwen3", 4, "fake"): 0.93, ("llama", 2, "gloo"): 0.93,
         ("llama", 4, "fake"): 0.93}


def make_model(family, folder):
    import transformers

    common = dict(max_position_embeddings=64, bos_token_id=None, eos_token_id=None)
    configs = {
        # Qwen3-0.6B with every width divided by eight; 37 MB.
        "qwen3": transformers.Qwen3Config(
            vocab_size=18992, hidden_size=128, intermediate_size=384, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=16, tie_word_embeddings=True, **common),
        # Of tests/benchmarks/run.py; embeddings and head are two weights; 34 MB.
        "llama": transformers.LlamaConfig(
            vocab_size=4096, hidden_size=256, intermediate_size=688, num_hidden_layers=8, num_attention_heads=8,
            num_key_value_heads=8, **common),
    }
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(configs[family], dtype=torch.float32).save_pretrained(folder)
    return configs[family].vocab_size


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """Rank 0's bytes in and after each step, by case and side, and the bytes of the models."""
    folder = tmp_path_factory.mktemp("peak_memory")
    vocabularies = {family: make_model(family, folder / family) for family in {case[0] for case in CASES}}
    jobs = {side: [] for side in SIDES}
    for family, world, group in CASES:
        batches = folder / f"{family}-{world}.safetensors"
        save_file({"tokens": torch.randint(0, vocabularies[family], (STEPS, world, TOKENS + 1))}, batches)
        for side, job in jobs.items():
            job.append(dataclasses.asdict(Case(family, (world,), steps=STEPS)) | {
                "model": str(folder / family), "batches": str(batches), "process_group": group,
                "output": str(folder / f"{side}-{family}-{world}-{group}.safetensors"),
                "count_memory": str(INTEROP / "live_memory.so"),
                "wrapper": "fsdp1" if side == "fsdp1" else "fsdp2"})
    (folder / "ours.json").write_text(json.dumps(jobs.pop("ours")))
    (folder / "theirs.json").write_text(json.dumps(sum(jobs.values(), [])))
    train_dump(folder / "ours.json")
    fsdp2_reference(folder / "theirs.json")
    weights = {family: sum(tensor.nbytes for tensor in load_file(folder / family / "model.safetensors").values())
               for family in vocabularies}
    found = {case: {side: load_file(folder / ("-".join(map(str, (side, *case))) + ".safetensors")) for side in SIDES}
             for case in CASES}
    return found, weights


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_holds_less_than_fsdp1s(counts, case):
    peaks = {side: found["peak_bytes"][2].item() for side, found in counts[0][case].items()}
    print("\n", *case, *(f"{side} {peak / 1e6:.2f} MB" for side, peak in peaks.items()))
    assert peaks["ours"] <= CASES[case] * peaks["fsdp1"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_between_steps_weights_and_moments_are_left(counts, case):
    (family, world, _), (found, weights) = case, counts
    assert found[case]["ours"]["kept_bytes"][2] <= 3 * weights[family] / world * 1.001
