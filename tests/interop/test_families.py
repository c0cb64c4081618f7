"""Each family of decoders at three odd shapes, with options of its config.json on and off: logits, loss and every
gradient against transformers' (eager attention), fp32, on the same random weights, norms, biases and buffers. Packed
documents against each document alone; the converters both ways, bit for bit."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from megashard import convert
from transformers_twin import by_transformers, check, everything_in, gradients_of, make_model, model_logits

VOCAB, LENGTH = 211, 17  # windows are shorter, original positions fewer
DOCUMENTS = (6, 1, 10)
SIZES = dict(vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
             max_position_embeddings=128, initializer_range=0.04, pad_token_id=None)
LARGER = SIZES | dict(hidden_size=56, intermediate_size=52, num_hidden_layers=5, num_attention_heads=4)
ODD = SIZES | dict(hidden_size=36, intermediate_size=44, num_hidden_layers=4, num_attention_heads=9)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=12, rope_theta=500.0)
LINEAR = dict(rope_type="linear", factor=3.0, rope_theta=1000.0)
EXPERTS = dict(num_local_experts=6, num_experts_per_tok=2)
GROUPED = dict(n_routed_experts=12, num_experts_per_tok=3, moe_intermediate_size=20, first_k_dense_replace=1)
LINEAR_HEADS = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12)
SHARED = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=28)
SPARSE_CONV = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20)
MAMBA = dict(mamba_num_heads=6, mamba_head_dim=10, n_groups=2, ssm_state_size=7)
LATENT_EXPERTS = dict(n_routed_experts=12, num_experts_per_tok=3, moe_intermediate_size=20,
                      moe_shared_expert_intermediate_size=28)
LONGROPE = dict(rope_type="longrope", rope_theta=500.0, short_factor=[1.0 + 0.2 * i for i in range(6)],
                long_factor=[1.5 + 0.6 * i for i in range(6)])
GROWS = dict(llama_4_scaling_beta=0.3, original_max_position_embeddings=5, rope_theta=500.0)
LATENT = dict(kv_lora_rank=20, q_lora_rank=28, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10)
SHARED_BY_KIMI = dict(linear_num_heads=4, linear_head_dim=8, num_experts=6, num_experts_per_tok=2,
                      moe_intermediate_size=20)

GEMMA4 = dict(hidden_size_per_layer_input=0, sliding_window=5)


def layers_by(letters):
    return [{"s": "sliding_attention", "f": "full_attention"}[letter] for letter in letters]


CASES = {
    "mixtral": [
        SIZES | EXPERTS | dict(num_key_value_heads=2),
        LARGER | EXPERTS | dict(num_key_value_heads=4, sliding_window=5, output_router_logits=True,
                                router_aux_loss_coef=0.3),
        ODD | dict(num_key_value_heads=3, head_dim=10, num_local_experts=5, num_experts_per_tok=5, pad_token_id=7,
                   tie_word_embeddings=True)],
    "qwen2_moe": [
        SIZES | dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, num_key_value_heads=2,
                     shared_expert_intermediate_size=28),
        LARGER | dict(num_experts=5, num_experts_per_tok=1, moe_intermediate_size=12, num_key_value_heads=4,
                      shared_expert_intermediate_size=16, norm_topk_prob=True, qkv_bias=False, mlp_only_layers=[1],
                      output_router_logits=True, router_aux_loss_coef=0.3),
        ODD | dict(num_experts=7, num_experts_per_tok=3, moe_intermediate_size=18, num_key_value_heads=3,
                   shared_expert_intermediate_size=30, use_sliding_window=True, sliding_window=4, max_window_layers=3,
                   decoder_sparse_step=2)],
    "glm4_moe": [
        SIZES | GROUPED | dict(num_key_value_heads=2, head_dim=16),
        LARGER | GROUPED | dict(num_key_value_heads=4, head_dim=12, use_qk_norm=True, attention_bias=True, n_group=3,
                                topk_group=2, n_shared_experts=2, routed_scaling_factor=1.7, first_k_dense_replace=2),
        ODD | GROUPED | dict(num_key_value_heads=3, head_dim=8, norm_topk_prob=False, first_k_dense_replace=0,
                             rope_parameters=YARN | dict(partial_rotary_factor=1.0))],
    "minimax_m2": [
        SIZES | EXPERTS | dict(num_key_value_heads=2, head_dim=16),
        LARGER | EXPERTS | dict(num_key_value_heads=4, head_dim=12, output_router_logits=True, router_aux_loss_coef=0.3,
                                rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5)),
        ODD | dict(num_key_value_heads=3, head_dim=8, num_local_experts=9, num_experts_per_tok=4,
                   tie_word_embeddings=True)],
    "granite": [
        SIZES | dict(num_key_value_heads=2),
        LARGER | dict(num_key_value_heads=4, embedding_multiplier=3.0, logits_scaling=8.0, residual_multiplier=0.22,
                      attention_multiplier=0.1, attention_bias=True),
        ODD | dict(num_key_value_heads=3, mlp_bias=True, residual_multiplier=1.5, logits_scaling=3.0, pad_token_id=7,
                   rope_parameters=LINEAR)],
    "seed_oss": [  # dropout would draw other numbers
        SIZES | dict(num_key_value_heads=2, head_dim=16, attention_dropout=0.0, residual_dropout=0.0),
        LARGER | dict(num_key_value_heads=4, head_dim=10, attention_dropout=0.0, residual_dropout=0.0,
                      attention_out_bias=True, mlp_bias=True),
        ODD | dict(num_key_value_heads=3, head_dim=8, attention_dropout=0.0, residual_dropout=0.0, attention_bias=False,
                   tie_word_embeddings=True, pad_token_id=7)],
    "olmo2": [
        SIZES | dict(num_key_value_heads=2),
        LARGER | dict(num_key_value_heads=4, attention_bias=True),
        ODD | dict(num_key_value_heads=3, tie_word_embeddings=True, rope_parameters=LINEAR)],
    "olmo3": [
        SIZES | dict(num_key_value_heads=2, sliding_window=4),
        LARGER | dict(num_key_value_heads=4, sliding_window=6, attention_bias=True,
                      rope_parameters=dict(full_attention=YARN, sliding_attention=dict(rope_type="default",
                                                                                      rope_theta=300.0))),
        ODD | dict(num_key_value_heads=3, sliding_window=5,
                   layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention"])],
    "smollm3": [
        SIZES | dict(num_key_value_heads=2, no_rope_layer_interval=2),
        LARGER | dict(num_key_value_heads=4, attention_bias=True, mlp_bias=True, tie_word_embeddings=False,
                      no_rope_layers=[0, 1, 1, 0, 1]),
        ODD | dict(num_key_value_heads=3, use_sliding_window=True, sliding_window=4)],
    "exaone4": [
        SIZES | dict(num_key_value_heads=2, sliding_window=4, sliding_window_pattern=2),
        LARGER | dict(num_key_value_heads=4, sliding_window=None, layer_types=["full_attention"] * 5),
        ODD | dict(num_key_value_heads=3, head_dim=8, sliding_window=5, tie_word_embeddings=True,
                   layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"])],
    "deepseek_v3": [
        SIZES | GROUPED | LATENT | dict(num_key_value_heads=6, n_group=4, topk_group=2),
        LARGER | GROUPED | LATENT | dict(
            num_key_value_heads=4, q_lora_rank=None, v_head_dim=16, n_group=1, topk_group=1, rope_interleave=False,
            attention_bias=True, n_shared_experts=2, first_k_dense_replace=2, norm_topk_prob=False),
        ODD | GROUPED | LATENT | dict(num_key_value_heads=9, v_head_dim=20, n_group=3, topk_group=2,
                                      first_k_dense_replace=0,
                                      rope_parameters=YARN | dict(mscale=1.2, mscale_all_dim=0.7))],
    "deepseek_v2": [
        SIZES | GROUPED | LATENT | dict(num_key_value_heads=6),
        LARGER | GROUPED | LATENT | dict(
            num_key_value_heads=4, q_lora_rank=None, v_head_dim=16, topk_method="group_limited_greedy", n_group=4,
            topk_group=2, routed_scaling_factor=1.7, attention_bias=True, mlp_bias=True),
        ODD | GROUPED | LATENT | dict(num_key_value_heads=9, first_k_dense_replace=3,
                                      rope_parameters=YARN | dict(mscale=1.2, mscale_all_dim=0.7))],
    "gpt_oss": [
        SIZES | EXPERTS | dict(num_key_value_heads=2, head_dim=16, sliding_window=4),
        LARGER | EXPERTS | dict(num_key_value_heads=4, head_dim=12, sliding_window=6, swiglu_limit=0.2,
                                swiglu_alpha=1.1, attention_bias=False, output_router_logits=True,
                                router_aux_loss_coef=0.3,
                                rope_parameters=YARN | dict(truncate=False)),
        ODD | dict(num_key_value_heads=3, head_dim=8, num_local_experts=5, num_experts_per_tok=4, sliding_window=5,
                   tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=500.0),
                   layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention"])],
    "qwen3_next": [
        SIZES | LINEAR_HEADS | SHARED | dict(num_key_value_heads=2, head_dim=16,
                                             layer_types=["linear_attention", "full_attention", "linear_attention"]),
        LARGER | LINEAR_HEADS | SHARED | dict(
            num_key_value_heads=4, head_dim=12, norm_topk_prob=False, attention_bias=True, linear_conv_kernel_dim=3,
            mlp_only_layers=[1], output_router_logits=True, router_aux_loss_coef=0.3,
            rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5)),
        ODD | SHARED | dict(num_key_value_heads=3, head_dim=8, linear_num_key_heads=3, linear_num_value_heads=3,
                            linear_key_head_dim=10, linear_value_head_dim=6, tie_word_embeddings=True)],
    "qwen3_5_text": [
        SIZES | LINEAR_HEADS | dict(num_key_value_heads=2, head_dim=16,
                                    layer_types=["linear_attention", "full_attention", "linear_attention"]),
        LARGER | LINEAR_HEADS | dict(num_key_value_heads=4, head_dim=16, attention_bias=True, linear_conv_kernel_dim=2),
        ODD | dict(num_key_value_heads=3, head_dim=8, linear_num_key_heads=3, linear_num_value_heads=3,
                   linear_key_head_dim=10, linear_value_head_dim=6, tie_word_embeddings=True, pad_token_id=7)],
    "qwen3_5_moe_text": [
        SIZES | LINEAR_HEADS | SHARED | dict(num_key_value_heads=2, head_dim=16,
                                             layer_types=["linear_attention", "full_attention", "linear_attention"]),
        LARGER | LINEAR_HEADS | SHARED | dict(num_key_value_heads=4, head_dim=16, output_router_logits=True,
                                              router_aux_loss_coef=0.3),
        ODD | SHARED | dict(num_key_value_heads=3, head_dim=8, linear_num_key_heads=1, linear_num_value_heads=5,
                            linear_key_head_dim=10, linear_value_head_dim=6)],
    "lfm2": [
        SIZES | dict(num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"], block_multiple_of=8),
        LARGER | dict(num_key_value_heads=4, layer_types=["conv", "full_attention", "conv", "conv", "full_attention"],
                      conv_bias=True, conv_L_cache=4, block_multiple_of=10, block_ffn_dim_multiplier=1.3,
                      norm_eps=1e-3, tie_word_embeddings=False),
        ODD | dict(num_key_value_heads=3, full_attn_idxs=[2], conv_L_cache=1, block_auto_adjust_ff_dim=False,
                   pad_token_id=7, rope_parameters=LINEAR)],
    "lfm2_moe": [
        SIZES | SPARSE_CONV | dict(num_key_value_heads=2, num_dense_layers=1,
                                   layer_types=["conv", "full_attention", "conv"]),
        LARGER | SPARSE_CONV | dict(num_key_value_heads=4, conv_bias=True, conv_L_cache=2, use_expert_bias=False,
                                    routed_scaling_factor=1.7, num_dense_layers=3, tie_word_embeddings=False,
                                    layer_types=["conv", "full_attention", "conv", "conv", "full_attention"]),
        ODD | SPARSE_CONV | dict(num_key_value_heads=3, norm_topk_prob=False, num_dense_layers=0, norm_eps=1e-3,
                                 layer_types=["full_attention", "conv", "conv", "conv"])],
    "nemotron_h": [
        SIZES | MAMBA | dict(num_key_value_heads=2, head_dim=16,
                             layers_block_type=["linear_attention", "full_attention", "mlp"]),
        LARGER | MAMBA | LATENT_EXPERTS | dict(
            num_key_value_heads=4, head_dim=12, moe_latent_size=24, n_groups=1, conv_kernel=3, use_conv_bias=False,
            use_bias=True, mlp_bias=True, routed_scaling_factor=1.7, time_step_min=0.05,
            layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention", "moe"]),
        ODD | MAMBA | LATENT_EXPERTS | dict(
            num_key_value_heads=3, head_dim=8, n_groups=3, n_group=4, topk_group=2, norm_topk_prob=False,
            mlp_hidden_act="gelu", mamba_hidden_act="gelu", layer_norm_epsilon=1e-3,
            layers_block_type=["moe", "linear_attention", "mlp", "full_attention"])],
    "kimi_linear": [
        SIZES | LATENT | SHARED_BY_KIMI | dict(
            num_key_value_heads=6, layer_types=["linear_attention", "full_attention", "linear_attention"]),
        LARGER | LATENT | SHARED_BY_KIMI | dict(
            num_key_value_heads=4, q_lora_rank=None, v_head_dim=16, attention_bias=True, linear_conv_kernel_dim=3,
            num_experts=12, n_group=3, topk_group=2, n_shared_experts=2, norm_topk_prob=False,
            routed_scaling_factor=1.7, mlp_layer_types=["sparse", "dense", "sparse", "sparse", "dense"]),
        ODD | LATENT | SHARED_BY_KIMI | dict(
            num_key_value_heads=9, linear_num_heads=3, linear_head_dim=10, num_experts=5, num_experts_per_tok=5,
            pad_token_id=7, hidden_act="gelu",
            layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"])],
    "phi3": [
        SIZES | dict(num_key_value_heads=2),
        LARGER | dict(hidden_size=64, num_key_value_heads=2, sliding_window=5, original_max_position_embeddings=12,
                      rope_parameters=LONGROPE | dict(partial_rotary_factor=0.75,
                                                      original_max_position_embeddings=12)),
        ODD | dict(hidden_size=144, num_key_value_heads=3, tie_word_embeddings=True, pad_token_id=7,
                   original_max_position_embeddings=64, rope_parameters=LONGROPE | dict(
                       partial_rotary_factor=0.75, attention_factor=1.3, original_max_position_embeddings=64))],
    "ministral3": [
        SIZES | dict(num_key_value_heads=2, head_dim=16),
        LARGER | dict(num_key_value_heads=4, head_dim=10, sliding_window=5, rope_parameters=YARN | GROWS),
        ODD | dict(num_key_value_heads=3, head_dim=8, tie_word_embeddings=True, pad_token_id=7,
                   rope_parameters=GROWS | dict(rope_type="default"))],
    "mistral4": [
        SIZES | GROUPED | LATENT | dict(num_key_value_heads=6, n_group=4, topk_group=2),
        LARGER | GROUPED | LATENT | dict(
            num_key_value_heads=4, q_lora_rank=None, v_head_dim=16, rope_interleave=False, attention_bias=True,
            n_shared_experts=2, norm_topk_prob=False, rope_parameters=YARN | GROWS),
        ODD | GROUPED | LATENT | dict(
            num_key_value_heads=9, v_head_dim=20, n_group=3, topk_group=2, first_k_dense_replace=0,
            routed_scaling_factor=1.7, rope_parameters=YARN | GROWS | dict(mscale=1.2, mscale_all_dim=0.7))],
    "gemma2": [
        SIZES | dict(num_key_value_heads=2, head_dim=16, sliding_window=4, attn_logit_softcapping=0.3),
        LARGER | dict(num_key_value_heads=4, head_dim=10, sliding_window=6, attention_bias=True,
                      final_logit_softcapping=0.5, attn_logit_softcapping=None, tie_word_embeddings=False),
        ODD | dict(num_key_value_heads=3, head_dim=8, sliding_window=5, query_pre_attn_scalar=5,
                   attn_logit_softcapping=0.4, final_logit_softcapping=None, rope_parameters=LINEAR,
                   layer_types=["full_attention", "full_attention", "sliding_attention", "full_attention"])],
    "cohere2": [
        SIZES | dict(num_key_value_heads=2, sliding_window=4),
        LARGER | dict(hidden_size=64, num_key_value_heads=4, sliding_window=6, attention_bias=True, logit_scale=0.5,
                      tie_word_embeddings=False, rope_parameters=LINEAR),
        ODD | dict(num_key_value_heads=3, sliding_window=5, pad_token_id=7, layer_norm_eps=0.1,
                   layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"])],
    "starcoder2": [
        SIZES | dict(num_key_value_heads=2),
        LARGER | dict(num_key_value_heads=4, use_bias=False, sliding_window=5, tie_word_embeddings=False,
                      norm_epsilon=0.1),
        ODD | dict(num_key_value_heads=3, hidden_act="relu", pad_token_id=7, rope_parameters=LINEAR)],
    "ernie4_5": [
        SIZES | dict(num_key_value_heads=2),
        LARGER | dict(num_key_value_heads=4, head_dim=10, use_bias=True, tie_word_embeddings=False),
        ODD | dict(num_key_value_heads=3, head_dim=8, pad_token_id=7, rope_parameters=YARN)],
    "hunyuan_v1_dense": [
        SIZES | dict(num_key_value_heads=2, head_dim=16),
        LARGER | dict(num_key_value_heads=4, head_dim=10, attention_bias=True,
                      rope_parameters=dict(rope_type="dynamic", alpha=50.0, factor=1.0, rope_theta=500.0)),
        ODD | dict(num_key_value_heads=3, head_dim=8, tie_word_embeddings=True, pad_token_id=7)],
    "glm4": [
        SIZES | dict(num_key_value_heads=2, head_dim=16),
        LARGER | dict(num_key_value_heads=4, head_dim=10, attention_bias=False,
                      rope_parameters=dict(rope_type="default", rope_theta=900.0, partial_rotary_factor=1.0)),
        ODD | dict(num_key_value_heads=3, head_dim=8, tie_word_embeddings=True, pad_token_id=7)],
    "gemma4_text": [
        SIZES | GEMMA4 | dict(num_key_value_heads=2, head_dim=12, global_head_dim=20, num_global_key_value_heads=1,
                              attention_k_eq_v=True, layer_types=layers_by("sff"), final_logit_softcapping=3.0),
        LARGER | GEMMA4 | dict(num_key_value_heads=4, head_dim=8, global_head_dim=12, layer_types=layers_by("ssfsf"),
                               attention_bias=True, enable_moe_block=True, num_experts=6, top_k_experts=2,
                               moe_intermediate_size=20, tie_word_embeddings=False),
        ODD | GEMMA4 | dict(num_hidden_layers=6, num_key_value_heads=3, head_dim=8, global_head_dim=10, pad_token_id=7,
                            layer_types=layers_by("sfssff"), num_kv_shared_layers=3, use_double_wide_mlp=True,
                            hidden_size_per_layer_input=14, vocab_size_per_layer_input=VOCAB,
                            rope_parameters=dict(
                                full_attention=dict(rope_type="proportional", rope_theta=500.0, factor=2.0,
                                                    partial_rotary_factor=0.7),
                                sliding_attention=dict(rope_type="default", rope_theta=300.0)))],
    "llama4_text": [
        SIZES | EXPERTS | dict(num_key_value_heads=2, head_dim=16, num_experts_per_tok=1, intermediate_size_mlp=60,
                               attention_chunk_size=5, no_rope_layer_interval=2, floor_scale=4, attn_scale=0.5),
        LARGER | EXPERTS | dict(
            hidden_size=104, num_key_value_heads=4, head_dim=10, intermediate_size_mlp=60, attention_chunk_size=7,
            interleave_moe_layer_step=2, use_qk_norm=False, attention_bias=True, output_router_logits=True,
            rope_parameters=dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                 original_max_position_embeddings=12, rope_theta=500.0)),
        ODD | EXPERTS | dict(num_key_value_heads=3, head_dim=8, num_experts_per_tok=3, intermediate_size_mlp=60,
                             attention_chunk_size=4, moe_layers=[0, 3], no_rope_layers=[0, 1, 1, 0],
                             attn_temperature_tuning=False, pad_token_id=7, tie_word_embeddings=True)],
}
# Names in the model and in transformers', where they differ.
CONVOLUTIONAL = {"feed_forward.gate_proj": "feed_forward.w1", "feed_forward.up_proj": "feed_forward.w3",
                 "feed_forward.down_proj": "feed_forward.w2", "self_attn.o_proj": "self_attn.out_proj",
                 "self_attn.q_norm": "self_attn.q_layernorm", "self_attn.k_norm": "self_attn.k_layernorm",
                 "model.norm": "model.embedding_norm"}
FORGET_GATE = {f"self_attn.{name}": f"self_attn.forget_gate.{name}"
               for name in ("f_a_proj", "f_b_proj", "dt_bias", "A_log")}
RENAMED = {"nemotron_h": {"model.embed_tokens": "model.embeddings", "model.norm": "model.norm_f"},
           "gemma4_text": {"feed_forward.": "", "per_layer_input.": ""}, "kimi_linear": FORGET_GATE,
           "lfm2": CONVOLUTIONAL, "lfm2_moe": CONVOLUTIONAL,
           "starcoder2": {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
           "hunyuan_v1_dense": {"self_attn.q_norm": "self_attn.query_layernorm",
                                "self_attn.k_norm": "self_attn.key_layernorm"}}
# Tensors in the files that are not read: of multi-token prediction, and keys of a layer that takes another's.
UNREAD = {"gemma4_text-2": "model.layers.4.self_attn.k_proj.weight",
          "deepseek_v3-0": "model.layers.3.eh_proj.weight", "glm4_moe-0": "model.layers.3.enorm.weight",
          "qwen3_next-0": "mtp.fc.weight", "qwen3_5_text-1": "mtp.layers.0.mlp.up_proj.weight"}
# Roundings of the delta rule, transformers' own half as large; those of norms behind a branch, 2.9e-6 with AVX-512;
# those of Gemma 4's scores, which are not scaled down and so sqrt(D) times as large, 1.1e-5.
BARS = {"olmo2": 4e-6, "olmo3": 4e-6, "exaone4": 4e-6, "gemma4_text": 1.5e-5, "kimi_linear": 1e-5, "qwen3_next": 5e-6,
        "qwen3_5_text": 5e-6, "qwen3_5_moe_text": 5e-6}
NAMES = [f"{family}-{shape}" for family, shapes in CASES.items() for shape in range(len(shapes))]


def options(name):
    family, shape = name.split("-")
    return CASES[family][int(shape)]


# A loss of routers balances all tokens together.
PACKED = [name for name in NAMES if not options(name).get("output_router_logits")]

# transformers computes a single token of these as a chunk of 64, or by all experts.
MORE_THAN_NEEDED = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "nemotron_h", "llama4_text"}
COUNTED = [name for name in NAMES if name.split("-")[0] not in MORE_THAN_NEEDED]


def write_model(folder, name, seed):
    """Writes the model of a case with random values, and returns it."""
    torch.manual_seed(seed)
    model = make_model(AutoConfig.for_model(name.split("-")[0], **options(name)), attn_implementation="eager",
                       experts_implementation="eager")
    corrections = [values for key, values in model.named_buffers()
                   if key.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar"))]
    with torch.no_grad():
        for values in [*model.parameters(), *corrections]:
            values.add_(torch.randn_like(values) * 0.02)
    model.save_pretrained(folder)
    if name in UNREAD:
        weights = load_file(folder / "model.safetensors") | {UNREAD[name]: torch.ones(3)}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def write_case(folder, name, seed):
    """Writes the model of a case and its input. Returns both."""
    model = write_model(folder, name, seed)
    tokens, labels = torch.randint(0, VOCAB, (2, LENGTH)), torch.randint(0, VOCAB, (2, LENGTH))
    tokens[0, 3] = 7
    save_file({"tokens": tokens, "labels": labels}, folder / "input.bin")
    return model, tokens, labels


def documents_alone(model, tokens, labels):
    """transformers' results for each document of a row, and the gradients of the mean over all tokens."""
    logits, losses = [], []
    for document, wanted in zip(tokens.split(DOCUMENTS, 1), labels.split(DOCUMENTS, 1)):
        logits.append(model(document).logits)
        losses.append(torch.nn.functional.cross_entropy(logits[-1][0], wanted[0], reduction="none"))
    loss = torch.cat(losses)[None]
    loss.mean().backward()
    return {"logits": torch.cat(logits, 1).detach(), "loss": loss.detach()} | {
        f"grad.{key}": gradient for key, gradient in gradients_of(model)}


def write_packed(folder, case, tokens, labels):
    """The model of `case` with its first row as packed documents."""
    folder.mkdir()
    for file in ("config.json", "model.safetensors"):
        (folder / file).symlink_to(case / file)
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    save_file({"tokens": tokens[:1].clone(), "labels": labels[:1].clone(), "position_ids": positions,
               "document_lengths": torch.tensor(DOCUMENTS)}, folder / "input.bin")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    wanted = {}
    for seed, name in enumerate(NAMES):
        model, tokens, labels = write_case(folder / name, name, seed)
        ways = {name: lambda: by_transformers(model, tokens, labels, torch.ones_like(labels))}
        if name in PACKED:
            write_packed(folder / f"{name} packed", folder / name, tokens, labels)
            ways[f"{name} packed"] = lambda: documents_alone(model, tokens[:1], labels[:1])
        if name in COUNTED:
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                model(tokens[:1, :1])
            (folder / name / "counted.txt").write_text(str(counter.get_total_flops()))
        rough = {}
        for dtype in (torch.float, torch.double):
            model.to(dtype)
            for way, results in ways.items():
                model.zero_grad()
                with everything_in(dtype):
                    wanted[way] = results(), rough.get(way)
                rough[way] = wanted[way][0]
    done = model_logits("--each", *(folder / name for name in wanted))
    assert done.returncode == 0, done.stderr[:2000]
    return folder, wanted


def renamed(name, family):
    for ours, theirs in RENAMED.get(family, {}).items():
        name = name.replace(ours, theirs)
    return name


def check_case(compared, name):
    folder, wanted = compared
    family = name.split("-")[0]
    error = folder / name / "error.txt"
    assert not error.exists(), error.read_text()
    exact, rough = wanted[name]
    ours = {renamed(key, family): values for key, values in load_file(folder / name / "output.bin").items()}
    check(ours, exact, rough=rough, bar=BARS.get(family, 2e-6))


@pytest.mark.parametrize("name", NAMES)
def test_same_as_transformers(compared, name):
    check_case(compared, name)


@pytest.mark.parametrize("name", PACKED)
def test_packed_documents_are_documents_alone(compared, name):
    check_case(compared, f"{name} packed")


@pytest.mark.parametrize("name", COUNTED)
def test_flops_of_a_token(compared, name):
    """Those of the log and the plan, which leave routers and short convolutions out as Megatron does; backward has
    twice those of forward."""
    ours, counted = (float((compared[0] / name / file).read_text()) for file in ("flops.txt", "counted.txt"))
    assert ours == pytest.approx(3 * counted, rel=0.06)


WITH_OWN_FILES = {"mixtral", "gpt_oss", "phi3", "glm4", "llama4_text", "lfm2_moe", "nemotron_h", "kimi_linear",
                  "qwen3_5_moe_text", "deepseek_v3"}


@pytest.mark.parametrize("family", [family if family in WITH_OWN_FILES else pytest.param(family, marks=pytest.mark.slow)
                                    for family in CASES])
def test_converters_both_ways(compared, tmp_path, family):
    check_converters(compared[0] / f"{family}-1", tmp_path)


def check_converters(source, tmp_path):
    """To a step and back: the same tensors, bit for bit."""
    convert("hf_to_dcp", "--hf-dir", source, "--dcp-dir", tmp_path / "dcp")
    convert("dcp_to_hf", "--load-dir", tmp_path / "dcp" / "release", "--save-dir", tmp_path / "back",
            "--model-assets-dir", source)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert sorted(after) == sorted(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
