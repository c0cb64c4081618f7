"""Megatron-core's GPTModel, random, for test_megatron_network.py: one forward and backward of each case.

megatron_network.py FOLDER: FOLDER/cases.json has by name the arguments of TransformerConfig ("config"), of GPTModel
("model") and of the layers ("layer"), and what is taken off the norms' weights that are written ("norms_less"). Leaves
in FOLDER/NAME the weights by our names (model.safetensors), input.bin and wanted.bin, as model_logits reads and writes
them.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_gpt import without_gpu

PARTS = {"embedding.word_embeddings": "model.embed_tokens", "embedding.position_embeddings": "model.embed_positions",
         "decoder.final_layernorm": "model.norm", "output_layer": "lm_head"}
LAYER_PARTS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm",
               "self_attention.linear_proj": "self_attn.o_proj", "self_attention.q_layernorm": "self_attn.q_norm",
               "self_attention.k_layernorm": "self_attn.k_norm", "mlp.linear_fc2": "mlp.down_proj",
               "mlp.router": "mlp.gate", "mlp.fc1_latent_proj": "mlp.fc1_latent_proj",
               "mlp.fc2_latent_proj": "mlp.fc2_latent_proj",
               "mlp.shared_experts.linear_fc2": "mlp.shared_experts.down_proj"}
LATENT_PARTS = {"self_attention.linear_q_proj": "self_attn.q_proj",
                "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
                "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
                "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
                "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
                "self_attention.q_layernorm": "self_attn.q_a_layernorm",
                "self_attention.kv_layernorm": "self_attn.kv_a_layernorm"}
LEAVES = {"self_attention.core_attention.softmax_offset": "self_attn.sinks",
          "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
          "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight"}
PREDICTING = "mtp.layers."
BATCH, LENGTH = 2, 17


def by_our_names(tensors, config):
    """Megatron has queries, keys and values of a group of heads together, and both halves of a gated MLP."""
    layer_parts = LAYER_PARTS | (LATENT_PARTS if config.multi_latent_attention else {})
    found, by_expert = {}, {}
    for name, tensor in tensors.items():
        part, leaf = name.rsplit(".", 1)
        if part in PARTS:
            found[f"{PARTS[part]}.{leaf}"] = tensor
            continue
        predicts = part.startswith(PREDICTING)
        layer, part = part.removeprefix("decoder.layers.").removeprefix(PREDICTING).split(".", 1)
        ours = f"model.mtp_layers.{layer}." if predicts else f"model.layers.{layer}."
        if predicts and not part.startswith("transformer_layer."):
            found[f"{ours}{part}.{leaf}"] = tensor
            continue
        if predicts:
            ours, part = f"{ours}transformer_layer.", part.removeprefix("transformer_layer.")
        if f"{part}.{leaf}" in LEAVES:
            found[ours + LEAVES[f"{part}.{leaf}"]] = tensor
        elif part.startswith("mlp.experts."):
            by_expert.setdefault(f"{ours}{part.rsplit('.', 1)[1]}.{leaf}", []).append(tensor)
        elif part in layer_parts:
            found[f"{ours}{layer_parts[part]}.{leaf}"] = tensor
        elif part == "self_attention.linear_qkv":
            groups, head = config.num_query_groups, config.kv_channels
            gated = config.attention_output_gate  # gates follow the queries of a group
            queries = config.num_attention_heads // groups * head * (2 if gated else 1)
            rows = tensor.reshape(groups, queries + 2 * head, *tensor.shape[1:])
            for letter, piece in zip("qkv", rows.split([queries, head, head], 1)):
                if letter == "q" and gated:
                    piece = piece.unflatten(1, (2, -1, head)).transpose(1, 2).flatten(1, 3)
                found[f"{ours}self_attn.{letter}_proj.{leaf}"] = piece.flatten(0, 1)
        else:
            block, _, fc1 = part.rpartition(".")
            assert fc1 == "linear_fc1", name
            names = ["gate_proj", "up_proj"] if config.gated_linear_unit else ["up_proj"]
            for each, piece in zip(names, tensor.chunk(len(names))):
                found[f"{ours}{block}.{each}.{leaf}"] = piece
    for name, experts in by_expert.items():
        layer, part, leaf = name.rsplit(".", 2)
        up = "gate_up_proj" if config.gated_linear_unit else "up_proj"
        ours = f"{layer}.mlp.experts.{dict(linear_fc1=up, linear_fc2='down_proj')[part]}"
        found[ours if leaf == "weight" else f"{ours}_bias"] = torch.stack(experts)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def with_halves(tensors):
    """As we have the gradients of experts: gate and up are two matrices."""
    return {name: tensor.unflatten(1, (2, -1)) if ".experts.gate_up_proj" in name else tensor
            for name, tensor in tensors.items()}


def core_attention_of_latents():
    """Megatron-core's attention without Transformer Engine, for values of another width."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    multi_latent_attention.HAVE_TE = False  # its import succeeds without Transformer Engine

    class Core(DotProductAttention):
        def __init__(self, *arguments, k_channels=0, v_channels=0, **more):
            super().__init__(*arguments, **more)
            self.hidden_size_per_partition = v_channels * self.config.num_attention_heads

    return Core


class LinearWithoutBias(torch.nn.Linear):
    """Transformer Engine's linear layer, which is not installed, for the latents of experts."""

    def __init__(self, rows_in, rows_out, *, init_method, **_):
        super().__init__(rows_in, rows_out, bias=False)
        init_method(self.weight)

    def forward(self, x):
        return super().forward(x), None


def layers_of(config, case):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer.moe import moe_layer, moe_utils

    moe_layer.HAVE_TE, moe_layer.TELinear = True, LinearWithoutBias

    moe_utils.te_general_gemm = None  # its import leaves the name out where Transformer Engine is not installed
    if config.num_moe_experts or config.multi_latent_attention:
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
        for layer in block.layer_specs if config.multi_latent_attention else []:
            layer.submodules.self_attention.submodules.core_attention = core_attention_of_latents()
        return block
    return get_gpt_layer_local_spec(normalization=config.normalization, **case["layer"])


def prediction_of(config, layers):
    if config.mtp_num_layers is None:
        return None
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    return get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False)


def predicted_losses():
    """The list that gets the loss of each prediction layer: GPTModel only makes its gradient."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    losses, apply = [], torch.autograd.Function.__dict__["apply"].__get__(None, MTPLossAutoScaler)

    def note(hidden, loss):
        losses.append(loss.detach().sum())
        return apply(hidden, loss)

    MTPLossAutoScaler.apply = note
    return losses


def run(folder, case):
    from megatron.core.activations import squared_relu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from torch.nn.functional import gelu, silu

    activations = {"gelu": gelu, "silu": silu, "squared_relu": squared_relu}
    given = case["config"] | {"activation_func": activations[case["config"]["activation_func"]]}
    kind = MLATransformerConfig if given.get("multi_latent_attention") else TransformerConfig
    config = kind(use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0, masked_softmax_fusion=False,
                  bias_dropout_fusion=False, apply_rope_fusion=False, gradient_accumulation_fusion=False, **given)
    layers = layers_of(config, case)
    model = GPTModel(config, layers, mtp_block_spec=prediction_of(config, layers), **case["model"])
    model.eval()  # the log of prediction layers needs a GPU in training
    corrections = {name: each for name, each in model.named_buffers() if name.endswith(".expert_bias")}
    for name, parameter in [*model.named_parameters(), *corrections.items()]:  # norms and biases prove more if random
        torch.nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.3)
    vocabulary = case["model"]["vocab_size"]
    tokens, labels = (torch.randint(0, vocabulary, (BATCH, LENGTH)) for _ in range(2))
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    outputs = []
    model.output_layer.register_forward_hook(
        lambda module, inputs, output: outputs.append(output[0].detach().clone()))  # the loss overwrites them
    predicted = predicted_losses()
    loss = model(tokens, positions, mask, labels=labels)
    loss.mean().backward()
    logits, loss = outputs[-1].transpose(0, 1).contiguous(), loss.detach() + sum(predicted)
    gradients = with_halves(by_our_names({name: each.grad for name, each in model.named_parameters()}, config))
    gradients.setdefault("lm_head.weight", gradients["model.embed_tokens.weight"].clone())
    folder.mkdir()
    weights = {name: each.detach() - case["norms_less"] if name.endswith("norm.weight") else each.detach()
               for name, each in [*model.named_parameters(), *corrections.items()]}
    save_file(by_our_names(weights, config), folder / "model.safetensors")
    save_file({"tokens": tokens, "labels": labels}, folder / "input.bin")
    save_file({"logits": logits, "loss": loss} | {f"grad.{name}": each for name, each in gradients.items()},
              folder / "wanted.bin")


def main():
    folder = Path(sys.argv[1])
    without_gpu()
    for seed, (name, case) in enumerate(json.loads((folder / "cases.json").read_text()).items()):
        torch.manual_seed(seed)
        run(folder / name, case)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
