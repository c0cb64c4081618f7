"""A model's results by transformers, and the comparison with those of model_logits.cpp."""

import torch

from megashard import INTEROP, run


def with_halves(gradients):
    """As ours: gate and up of experts [E, 2 I, C] are two matrices [E, 2, I, C]. GPT-OSS has [E, C, 2 I] with their
    channels in turn, and biases. Kimi Linear's convolution of queries, keys and values is three."""
    gradients = dict(gradients)
    for name, gradient in gradients.items():
        if name.endswith("self_attn.conv1d.weight"):
            for which, part in zip("qkv", gradient.chunk(3)):
                yield name.replace("conv1d", f"{which}_conv1d"), part
            continue
        in_turn = name.removesuffix("_bias") + "_bias" in gradients
        if name.endswith("experts.gate_up_proj"):
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
        f"grad.{key}": gradient for key, gradient in with_halves(
            (key, parameter.grad) for key, parameter in model.named_parameters(remove_duplicate=False))}


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
