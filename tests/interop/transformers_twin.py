"""A model's results by transformers, and the comparison with those of model_logits.cpp."""

import contextlib

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Kimi_K25ForConditionalGeneration, Mistral4ForCausalLM

from megashard import INTEROP, run


def model_class(model_type):
    """AutoModelForCausalLM does not know all classes of this kind."""
    return {"mistral4": Mistral4ForCausalLM}.get(model_type, AutoModelForCausalLM)


def make_model(config, **options):
    """With random weights."""
    kind = model_class(config.model_type)
    return (kind.from_config if kind is AutoModelForCausalLM else kind._from_config)(config, **options)


def separate(name, gradient, config):
    """As ours: layers that transformers has as one, with the rows of one after those of the other."""
    if ".self_attn.qkv_proj." in name:
        keys = config.num_key_value_heads * gradient.size(0) // (config.num_attention_heads
                                                                 + 2 * config.num_key_value_heads)
        pieces = zip(("q_proj", "k_proj", "v_proj"), gradient.split((gradient.size(0) - 2 * keys, keys, keys)))
        return [(name.replace("qkv_proj", layer), piece) for layer, piece in pieces]
    if ".mlp.gate_up_proj." in name:
        pieces = zip(("gate_proj", "up_proj"), gradient.chunk(2))
        return [(name.replace("gate_up_proj", layer), piece) for layer, piece in pieces]
    return [(name, gradient)]


def by_our_names(named, config):
    """Pairs of parameters' names and their weights or gradients."""
    if config.model_type == "kimi_k25":
        with torch.device("meta"):
            named = with_published_tower(list(named), Kimi_K25ForConditionalGeneration(config))
    pairs = [pair for name, values in named for pair in separate(name, values, config.get_text_config())]
    return with_halves(pairs, transposed=config.model_type == "llama4_text")


def gradients_of(model):
    named = [(name, parameter.grad) for name, parameter in model.named_parameters(remove_duplicate=False)]
    return by_our_names(named, model.config)


def published_kimi(model, named):
    """Weights of Kimi K2.5, or gradients, by the names and in the forms of its files."""
    from transformers.core_model_loading import revert_weight_conversion

    wrong = {"language_model.model.blocks.": "language_model.model.layers.",  # in transformers 5.23
             "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.", "model.mm_projector.": "mm_projector."}
    for name, values in revert_weight_conversion(model, dict(named)).items():
        for written, published in wrong.items():
            name = name.replace(written, published)
        yield name, values.contiguous()


def save_published_kimi(model, folder):
    model.config.save_pretrained(folder)
    save_file(dict(published_kimi(model, model.state_dict())), folder / "model.safetensors", metadata={"format": "pt"})


def with_published_tower(named, model):
    """As ours: Kimi's tower and projector have the names and the order of rows of its files."""
    tower = {name: values for name, values in named if ".language_model." not in name and name != "lm_head.weight"}
    yield from ((name, values) for name, values in named if name not in tower)
    yield from ((f"model.{name}", values) for name, values in published_kimi(model, tower))


def with_halves(gradients, transposed):
    """As ours: gate and up of experts [E, 2 I, C] are two matrices [E, 2, I, C]. GPT-OSS has [E, C, 2 I] with their
    channels in turn, and biases; `transposed`: [E, C, 2 I] as Llama 4. Kimi Linear's convolution of queries, keys and
    values is three."""
    gradients = dict(gradients)
    for name, gradient in gradients.items():
        if name.endswith("self_attn.conv1d.weight"):
            for which, part in zip("qkv", gradient.chunk(3)):
                yield name.replace("conv1d", f"{which}_conv1d"), part
            continue
        in_turn = name.removesuffix("_bias") + "_bias" in gradients
        if transposed and ".experts." in name:
            gradient = gradient.mT.unflatten(1, (2, -1)) if "gate_up" in name else gradient.mT
        elif name.endswith("experts.gate_up_proj"):
            gradient = gradient.unflatten(2, (-1, 2)).permute(0, 3, 2, 1) if in_turn else gradient.unflatten(1, (2, -1))
        elif name.endswith("experts.gate_up_proj_bias"):
            gradient = gradient.unflatten(1, (-1, 2)).mT
        elif name.endswith("experts.down_proj") and in_turn:
            gradient = gradient.mT
        yield name, gradient


def by_transformers(model, tokens, labels, mask, **inputs):
    out = model(tokens, **inputs)
    loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="none")
    if out.get("aux_loss") is not None:  # transformers adds it to the mean
        loss = loss + model.config.get_text_config().router_aux_loss_coef * out.aux_loss
    loss = loss.view_as(labels) * mask
    loss.mean().backward()
    return {"logits": out.logits.detach() * mask[..., None], "loss": loss.detach()} | {
        f"grad.{key}": gradient for key, gradient in gradients_of(model)}


@contextlib.contextmanager
def everything_in(dtype):
    """Makes transformers compute in `dtype` what it computes in fp32 whatever a model's dtype is: the delta rule, or
    rotations of pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", dtype)
        patch.setattr(torch, "float", dtype)
        patch.setattr(torch.Tensor, "float", lambda tensor: tensor.to(dtype))
        yield


def check(ours, wanted, bar=1e-5, rough=None):
    """`rough`: transformers' results in fp32, where `wanted` are in fp64: ours may have twice their errors."""
    assert sorted(ours) == sorted(wanted)  # the parameter names, too
    # Some gradients are zero but for roundings: that of k_proj's bias without positions.
    least = 1e-2 * max(want.abs().max() for key, want in wanted.items() if key.startswith("grad."))
    for key, want in wanted.items():
        largest = want.abs().max().clamp_min(least)
        error = (ours[key] - want).abs().max() / largest
        theirs = 0 if rough is None else (rough[key] - want).abs().max() / largest
        assert error <= max(bar, 2 * theirs), f"{key}: {error:.1e} of the largest value, transformers' own {theirs:.1e}"


def model_logits(*folders):
    return run(INTEROP / "model_logits", *folders, expect=None)
