"""Megatron's losses of routers by flag, with --hf-model: gradients and log against megatron-core's own functions."""
import re

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import (compute_routing_scores_for_aux_loss,
                                                     switch_load_balancing_loss_func, z_loss_func)
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import megashard
from megashard import mock_samples

EXPERTS, CHOSEN, LENGTH, BATCH, WORDS = 8, 2, 16, 8, 100
# One step of plain SGD at rate 1: the weights change by the gradients.
TRAINING = (f"--mock-data --seq-length {LENGTH} --micro-batch-size 2 --global-batch-size {BATCH} --train-iters 1 "
            "--lr 1 --min-lr 1 --lr-decay-style constant --weight-decay 0 --clip-grad 0 --optimizer sgd "
            "--sgd-momentum 0 --peak-tflops 1 --log-interval 1 " + megashard.RUN)
AUX, SEQUENCE, Z = "load_balancing_loss", "seq_load_balancing_loss", "z_loss"
CASES = {
    "aux": ({AUX: 0.5}, 1, []),
    "each sequence": ({SEQUENCE: 0.5}, 2, []),
    "z": ({Z: 0.05}, 1, ["--calculate-per-token-loss"]),
    "both, experts on two ranks": ({AUX: 0.5, Z: 0.05}, 2, ["--expert-model-parallel-size", 2]),
    "both, sequences on two ranks": ({SEQUENCE: 0.5, Z: 0.05}, 2, ["--context-parallel-size", 2]),
    "recomputed": ({AUX: 0.5, Z: 0.05}, 1, ["--recompute-granularity", "full", "--recompute-method", "uniform",
                                            "--recompute-num-layers", 1]),
}


def flags_of(losses):
    flags = ["--moe-z-loss-coeff", losses[Z]] if Z in losses else []
    if losses.keys() == {Z}:
        flags += ["--moe-aux-loss-coeff", 0]
    for name, kind in ((AUX, "aux_loss"), (SEQUENCE, "seq_aux_loss")):
        if name in losses:
            flags += ["--moe-aux-loss-coeff", losses[name], "--moe-router-load-balancing-type", kind]
    return flags


@pytest.fixture(scope="module")
def model(folder):
    """config.json asks for transformers' own loss, which a flag replaces."""
    config = Qwen3MoeConfig(
        vocab_size=WORDS + 1, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=False,
        num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=24, norm_topk_prob=True,
        mlp_only_layers=[1], eos_token_id=WORDS, output_router_logits=True, router_aux_loss_coef=0.3)
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "model")
    return folder / "model"


def router_losses(logits, sequences):
    """Losses of a layer and a micro batch, as in megatron-core's TopKRouter for one rank."""
    def balance(logits, sequences):
        chosen, scores = compute_routing_scores_for_aux_loss(logits, CHOSEN, "softmax")
        length = len(logits) // sequences
        apart = lambda each: each.view(sequences, length, EXPERTS).transpose(0, 1).reshape(length, -1)
        return switch_load_balancing_loss_func(apart(scores), apart(chosen).sum(0), length, CHOSEN, EXPERTS,
                                               1.0) / sequences

    return {AUX: balance(logits, 1), SEQUENCE: balance(logits, sequences), Z: z_loss_func(logits, 1.0)}


@pytest.fixture(scope="module")
def reference(folder, model):
    """Gradients and losses for these coefficients, over the micro batches of the step."""
    network = Qwen3MoeForCausalLM.from_pretrained(model)
    tokens = mock_samples(folder, BATCH, length=LENGTH, vocabulary=WORDS + 1, end=WORDS)

    def step(coefficients):
        network.zero_grad()
        told = {name: 0.0 for name in (AUX, SEQUENCE, Z, "lm loss")}
        micros = tokens.view(-1, 2, LENGTH + 1)
        for micro in micros:
            out = network(micro[:, :-1], output_router_logits=True)
            loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), micro[:, 1:].flatten())
            told["lm loss"] += loss.item() / len(micros)
            for logits in out.router_logits:
                for name, value in router_losses(logits, 2).items():
                    told[name] += value.item() / len(out.router_logits) / len(micros)
                    loss = loss + coefficients.get(name, 0) * value
            (loss / len(micros)).backward()
        return {name: each.grad.clone() for name, each in network.named_parameters()}, told

    return step


def published(gradients):
    """Under the names of files, with separate experts."""
    for name, value in gradients.items():
        if name.endswith("experts.gate_up_proj"):
            for i, expert in enumerate(value):
                gate, up = expert.chunk(2)
                stem = name.removesuffix("gate_up_proj") + str(i)
                yield from ((f"{stem}.gate_proj.weight", gate), (f"{stem}.up_proj.weight", up))
        elif name.endswith("experts.down_proj"):
            for i, expert in enumerate(value):
                yield f"{name.removesuffix('down_proj')}{i}.down_proj.weight", expert
        else:
            yield name, value


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_log_are_megatrons(folder, model, reference, case):
    losses, ranks, more = CASES[case]
    written = folder / case.replace(" ", "_")
    (step,), out = megashard.pretrain(folder, "--hf-model", model, "--save-hf", written, *flags_of(losses), *more,
                                      ranks=ranks, defaults=TRAINING)
    gradients, told = reference(losses)
    assert step["loss"] == pytest.approx(told["lm loss"], rel=1e-6)  # without them
    line, = re.findall(r"lm loss: .*loss scale", out)
    for name in (AUX, SEQUENCE, Z):
        assert (name in step, f" {name}: " in line) == ((name in losses),) * 2
        if name in losses:
            assert step[name] == pytest.approx(told[name], rel=1e-5)  # fp32 sums in another order
            shown, = re.findall(rf" {name}: (\S+) \|", line)
            assert float(shown) == pytest.approx(told[name], rel=1e-5)
    assert "and not by transformers', for which config.json says router_aux_loss_coef 0.3" in out
    before, after = load_file(model / "model.safetensors"), load_file(written / "model.safetensors")
    for name, gradient in published(gradients):
        difference = before[name] - after[name]
        # Differences of weights of about 1 in fp32.
        assert (difference - gradient).abs().max() <= 2e-5 * max(1, gradient.abs().max().item()), name
