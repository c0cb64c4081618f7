"""Expert parallelism beside everything else: the same training as with all experts on every rank."""
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megashard import train_dump
from test_save_hf import pretrain

STEPS, ROWS, LENGTH, VOCABULARY = 4, 4, 24, 101
EXPERTS = 8
LAYERS = "sub_modules_to_wrap: ['model.layers.{*}']\n"
UNITS = "sub_modules_to_wrap: ['model.layers.{*}', 'model.layers.{*}.mlp.experts']\nnum_to_forward_prefetch: 1\n"
HSDP, ULYSSES = LAYERS + "sharding_size: 2\n", dict(sequence_ranks=2)
# Adam's first steps are as long for small gradients as for large ones, so it would make steps out of bf16's roundings.
BF16 = dict(param_dtype="bfloat16", reduce_dtype="float32", optimizer="sgd", lr=0.02)
IN_BF16 = LAYERS + "param_dtype: bf16\nreduce_dtype: fp32\n"
# by name: reference, FSDP2 file, more flags
WITHOUT = {"plain": (LAYERS, {}), "Ulysses": (LAYERS, ULYSSES), "bf16": (IN_BF16, BF16)}
CASES = {
    "2 ranks": ("plain", LAYERS, dict(expert_ranks=2)),
    "4 ranks": ("plain", LAYERS, dict(expert_ranks=4)),
    "units": ("plain", UNITS, dict(expert_ranks=2)),
    "replicas of experts": ("plain", LAYERS + "expert_fully_shard_parallel_size: 1\n", dict(expert_ranks=2)),
    "HSDP": ("plain", HSDP, dict(expert_ranks=2)),
    "HSDP, 4 ranks": ("plain", HSDP, dict(expert_ranks=4)),
    "offload": ("plain", LAYERS + "offload_to_cpu: true\npin_memory: false\n", dict(expert_ranks=2)),
    "recompute": ("plain", UNITS + "recompute_modules: ['model.layers.{*}']\nuse_reentrant: false\n",
                  dict(expert_ranks=2)),
    "reentrant": ("plain", LAYERS + "recompute_modules: ['model.layers.{*}']\nuse_reentrant: true\n",
                  dict(expert_ranks=2)),
    "Ulysses": ("Ulysses", LAYERS, ULYSSES | dict(expert_ranks=2)),
    "Ulysses and HSDP": ("Ulysses", HSDP, ULYSSES | dict(expert_ranks=4)),
    "bf16": ("bf16", IN_BF16, BF16 | dict(expert_ranks=2)),
}


def make_model(folder):
    """With a load-balancing loss, which a rank computes over its own tokens."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=False,
        num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
        output_router_logits=True, router_aux_loss_coef=0.1, eos_token_id=2)
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder, save_original_format=False)


@pytest.fixture(scope="module", params=["cpu", "sim"])
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    make_model(folder / "model")
    start = torch.randint(0, VOCABULARY, (STEPS, ROWS, 1), generator=torch.Generator().manual_seed(1))
    save_file({"tokens": (start + 3 * torch.arange(LENGTH + 1)) % VOCABULARY}, folder / "batches")
    common = dict(batches=str(folder / "batches"), steps=STEPS, optimizer="adam", lr=1e-3, weight_decay=0.1, clip=0.5,
                  param_dtype=None, reduce_dtype=None, reshard=None, mesh=[4], model=str(folder / "model"))
    runs = {("without", name): run for name, run in WITHOUT.items()} | {("with", name): run[1:]
                                                                        for name, run in CASES.items()}
    jobs = [common | more | dict(fsdp2_config=text, output=str(folder / "-".join(key)))
            for key, (text, more) in runs.items()]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    train_dump(folder / "jobs.json", request.param)
    return {key: load_file(folder / "-".join(key)) for key in runs}


@pytest.mark.parametrize("name", CASES)
def test_trains_as_with_all_experts_everywhere(trained, name):
    mine, other = trained["with", name], trained["without", CASES[name][0]]
    assert mine.keys() == other.keys()
    bar = 1e-3 if "bf16" in name else 2e-6  # of the largest: sums in another order, and roundings of bf16
    assert other["grad_norm"].min() > 0.5  # clipped in every step
    for key in ("loss", "grad_norm"):
        assert ((mine[key] - other[key]) / other[key]).abs().max() <= bar * (1 if key == "loss" else 10), key
    assert mine["grad.model.layers.1.mlp.experts.down_proj"].shape == (EXPERTS, 32, 24)
    for key, value in other.items():
        if key.startswith("grad."):
            assert (mine[key] - value).abs().max() <= 10 * bar * value.abs().max(), key


ADAPTERS = "--lora-r 4 --lora-alpha 8 --lora-target-modules gate_proj up_proj down_proj q_proj".split()


@pytest.mark.parametrize("flags", [
    pytest.param([], marks=pytest.mark.slow),
    pytest.param(["--ckpt-format", "torch_dist"], marks=pytest.mark.slow),
    pytest.param(ADAPTERS, marks=pytest.mark.slow),
    ["--ckpt-format", "torch_dist", "--device", "sim", "--async-save", *ADAPTERS],
], ids=["torch_dcp", "torch_dist", "adapters", "adapters on the simulated device"])
def test_goes_on_from_either_kind_of_checkpoint(tmp_path, flags):
    """Two ranks with parts, made on meta, and two with all experts; gradients clipped by the norm of all."""
    make_model(tmp_path / "model")
    parts = ["--expert-model-parallel-size", "2", "--init-model-with-meta-device"]
    base = ["--hf-model", tmp_path / "model", "--train-iters", 4, "--log-params-norm", "--log-num-zeros-in-grad",
            "--log-interval", 1, *flags]
    norms = lambda said: [float(value) for field in ("num zeros", "params norm")
                          for value in re.findall(field + r": +([\d.]+)", said)]
    wanted, said = pretrain(tmp_path, *base, "--save-hf", tmp_path / "whole")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    for number, (first, second) in enumerate([(parts, []), ([], parts)]):
        save, written = tmp_path / f"save{number}", tmp_path / f"written{number}"
        begun, said_first = pretrain(tmp_path, *base, *first, "--exit-interval", 2, "--save", save)
        rest, said_rest = pretrain(tmp_path, *base, *second, "--load", save, "--save-hf", written)
        assert begun + rest == pytest.approx(wanted, rel=2e-6)  # sums in another order
        mine, all_of_them = norms(said_first) + norms(said_rest), norms(said)
        assert len(mine) == len(all_of_them) == 8
        # printed with three decimals
        assert sorted(mine) == pytest.approx(sorted(all_of_them), rel=1e-5)
        mine = load_file(written / "model.safetensors")
        assert mine.keys() == whole.keys()
        for key, value in whole.items():
            # Adam's first steps turn roundings of tiny gradients into differences of a step, which is 1e-2.
            assert (mine[key] - value).abs().mean() <= 1e-5 * value.abs().max(), key
    if "--lora-r" in flags:
        from peft import PeftModel

        tokens = torch.arange(13)[None]
        with torch.no_grad():
            adapted = PeftModel.from_pretrained(Qwen3MoeForCausalLM.from_pretrained(tmp_path / "model"),
                                                tmp_path / "whole" / "adapter")(tokens).logits
            merged = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "whole")(tokens).logits
        assert (merged - adapted).abs().max() <= 1e-5 * adapted.abs().max()  # other products, rounded otherwise


@pytest.mark.parametrize("parts", [1, 2])
def test_the_host_waits_for_the_device_once_a_layer(tmp_path, parts):
    """For the rows of each expert."""
    make_model(tmp_path / "model")
    _, said = pretrain(tmp_path, "--hf-model", tmp_path / "model", "--train-iters", 4, "--device", "sim",
                       "--log-host-syncs", "--no-check-for-nan-in-loss-and-grad", "--expert-model-parallel-size", parts,
                       "--eval-iters", 0)
    # Two micro-batches of two layers, and the step's line of metrics.
    assert re.findall(r"host syncs of step ([2-4]) of this run: (\d+)", said) == [("2", "5"), ("3", "5"), ("4", "5")]


def test_stacked_experts_are_written_by_all_ranks(tmp_path):
    make_model(tmp_path / "model")
    pretrain(tmp_path, "--hf-model", tmp_path / "model", "--train-iters", 1, "--expert-model-parallel-size", 2,
             "--save-hf", tmp_path / "stacked", "--save-hf-stacked-experts")
    stacked = load_file(tmp_path / "stacked" / "model.safetensors")["model.layers.1.mlp.experts.down_proj"]
    assert stacked.shape == (EXPERTS, 32, 24)
