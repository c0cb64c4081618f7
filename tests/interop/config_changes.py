"""Changes that make config.json odd, wrong or redundant: for every key of transformers' configurations of our text
families, and for keys of older versions."""
import dataclasses
import itertools
import random

import transformers
from transformers import (Cohere2Config, DeepseekV2Config, DeepseekV3Config, Ernie4_5Config, Exaone4Config,
                          Gemma2Config, Gemma3TextConfig, Gemma4TextConfig, Glm4Config, Glm4MoeConfig,
                          GraniteConfig, HunYuanDenseV1Config, KimiLinearConfig, Lfm2Config, Lfm2MoeConfig,
                          Llama4TextConfig, LlamaConfig, MiniMaxM2Config, Ministral3Config, Mistral4Config,
                          MistralConfig, MixtralConfig, NemotronHConfig, Olmo2Config, Olmo3Config, Phi3Config,
                          Qwen2Config, Qwen2MoeConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3Config,
                          Qwen3MoeConfig, Qwen3NextConfig, SeedOssConfig, SmolLM3Config, Starcoder2Config)

VOCAB, LENGTH, POSITIONS, ORIGINAL = 96, 40, 24, 16  # sequences are longer than both
SIZES = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=POSITIONS, eos_token_id=2, bos_token_id=1)
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2_tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    "gemma3_text": Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=6, query_pre_attn_scalar=16,
                                    layer_types=["sliding_attention", "full_attention"]),
}
LATENT = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1,
              n_group=2, topk_group=1, kv_lora_rank=20, q_lora_rank=28, qk_rope_head_dim=16, qk_nope_head_dim=12,
              v_head_dim=20)
LINEAR = dict(head_dim=64, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
              linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12)
SPARSE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=28)
FAMILIES |= {
    "mixtral": MixtralConfig(**SIZES, head_dim=16, num_local_experts=4),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **SPARSE),
    "glm4_moe": Glm4MoeConfig(**SIZES, head_dim=32, n_routed_experts=4, num_experts_per_tok=2,
                              moe_intermediate_size=24),
    "minimax_m2": MiniMaxM2Config(**SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "granite": GraniteConfig(**SIZES, attention_multiplier=0.3, embedding_multiplier=2.0, logits_scaling=3.0),
    "seed_oss": SeedOssConfig(**SIZES, head_dim=16, attention_dropout=0.0, residual_dropout=0.0, pad_token_id=None),
    "olmo2": Olmo2Config(**SIZES, pad_token_id=None),
    "olmo3": Olmo3Config(**SIZES, pad_token_id=None, sliding_window=6, layer_types=["sliding_attention",
                                                                                   "full_attention"]),
    "smollm3": SmolLM3Config(**SIZES, pad_token_id=None, no_rope_layers=[1, 0]),
    "exaone4": Exaone4Config(**SIZES, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
    "deepseek_v3": DeepseekV3Config(**SIZES | dict(num_key_value_heads=4), **LATENT),
    "deepseek_v2": DeepseekV2Config(**SIZES | dict(num_key_value_heads=4), **LATENT,
                                    topk_method="group_limited_greedy"),
    "qwen3_next": Qwen3NextConfig(**SIZES, **LINEAR, **SPARSE),
    "qwen3_5_text": Qwen3_5TextConfig(**SIZES, **LINEAR),
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig(
        **{key: size for key, size in SIZES.items() if key != "intermediate_size"}, **LINEAR, **SPARSE),
    "lfm2": Lfm2Config(**SIZES, pad_token_id=None, layer_types=["conv", "full_attention"], block_multiple_of=8),
    "lfm2_moe": Lfm2MoeConfig(**SIZES, pad_token_id=None, layer_types=["conv", "full_attention"], num_experts=4,
                              num_experts_per_tok=2, moe_intermediate_size=24, num_dense_layers=1),
    "nemotron_h": NemotronHConfig(
        **SIZES | dict(num_hidden_layers=3), pad_token_id=None, head_dim=16, n_routed_experts=4,
        layers_block_type=["linear_attention", "moe", "full_attention"], moe_intermediate_size=24, mamba_num_heads=4,
        mamba_head_dim=8, n_groups=2, ssm_state_size=6, moe_shared_expert_intermediate_size=28),
    "kimi_linear": KimiLinearConfig(
        **SIZES | dict(num_key_value_heads=4), pad_token_id=None, layer_types=["linear_attention", "full_attention"],
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, kv_lora_rank=20, qk_rope_head_dim=16,
        qk_nope_head_dim=12, v_head_dim=20, linear_num_heads=2, linear_head_dim=8),
}
FAMILIES |= {
    "phi3": Phi3Config(**SIZES, pad_token_id=None),
    "ministral3": Ministral3Config(**SIZES, head_dim=16, pad_token_id=None),
    "mistral4": Mistral4Config(**SIZES | dict(num_key_value_heads=4), **LATENT | dict(n_group=1),
                               pad_token_id=None),
    "gemma2": Gemma2Config(**SIZES, head_dim=16, sliding_window=6, query_pre_attn_scalar=16),
    "gemma4_text": Gemma4TextConfig(
        **SIZES, head_dim=16, global_head_dim=24, sliding_window=6, hidden_size_per_layer_input=8, pad_token_id=None,
        vocab_size_per_layer_input=VOCAB, layer_types=["sliding_attention", "full_attention"]),
    "cohere2": Cohere2Config(**SIZES, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
    "starcoder2": Starcoder2Config(**SIZES),
    "ernie4_5": Ernie4_5Config(**SIZES, head_dim=16),
    "hunyuan_v1_dense": HunYuanDenseV1Config(**SIZES, head_dim=16),
    "glm4": Glm4Config(**SIZES, head_dim=32, pad_token_id=None),
    "llama4_text": Llama4TextConfig(**SIZES, head_dim=16, num_local_experts=4, intermediate_size_mlp=40,
                                    attention_chunk_size=6, floor_scale=4, no_rope_layers=[1, 0], moe_layers=[1]),
}
GROWING = {"ministral3", "mistral4"}  # queries need two further keys among the positions
BY_LAYER = {"gemma3_text", "gemma4_text", "olmo3"}  # rope_parameters has an object for each type of layers
ABSENT = "absent"  # removes the key
GENERAL = {field.name for field in dataclasses.fields(transformers.PretrainedConfig)} - {
    "tie_word_embeddings", "pad_token_id", "rope_parameters"}
SILENT = {"use_cache", "pretraining_tp", "initializer_range", "bos_token_id", "eos_token_id"}  # without an effect here
UNREAD = {  # by transformers' class
    "nemotron_h": {"expand", "chunk_size", "num_nextn_predict_layers", "mtp_layers_block_type", "num_logits_to_keep",
                   "use_mamba_kernels", "mamba_ssm_cache_dtype", "mamba_proj_bias", "moe_shared_expert_overlap",
                   "residual_in_fp32", "hidden_dropout", "time_step_limit", "attention_bias", "output_router_logits",
                   "n_shared_experts"},
    "kimi_linear": {"output_router_logits"},
    "phi3": {"embd_pdrop"},
    "hunyuan_v1_dense": {"eod_token_id"},
}
UNROTATED = {"nemotron_h", "kimi_linear"}  # attention without positions
FULL, SLIDES = "full_attention", "sliding_attention"

PAIRS = 8  # of a head's 16 channels
ROPES = {  # by the kind of positions; every one also alone
    "default": dict(rope_type="default"),
    "linear": dict(rope_type="linear", factor=3.0),
    "llama3": dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=ORIGINAL),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=ORIGINAL),
    "yarn, mscale": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=ORIGINAL, mscale=1.2,
                         mscale_all_dim=0.7, beta_fast=8, beta_slow=0.5),
    "yarn, attention_factor": dict(rope_type="yarn", factor=2.5, original_max_position_embeddings=ORIGINAL,
                                   attention_factor=1.3, truncate=False),
    "dynamic": dict(rope_type="dynamic", factor=4.0),
    "longrope": dict(rope_type="longrope", short_factor=[1.0 + 0.1 * i for i in range(PAIRS)],
                     long_factor=[1.5 + 0.6 * i for i in range(PAIRS)], original_max_position_embeddings=ORIGINAL),
    "longrope, factor": dict(rope_type="longrope", short_factor=[1.0] * PAIRS, factor=5.0,
                             long_factor=[1.5 + 0.6 * i for i in range(PAIRS)],
                             original_max_position_embeddings=LENGTH),
    "phi3's su": dict(type="su", short_factor=[1.0] * PAIRS, long_factor=[2.0] * PAIRS),
    "axial": dict(rope_type="axial"),
    "no name": dict(rope_type=None, factor=2.0),
}
ODD = {  # beside what odd_values() makes of a key's value
    "hidden_act": ["swish", "gelu", "gelu_new", "gelu_fast", "quick_gelu", "gelu_pytorch_tanh", "gelu_python", "relu",
                   "relu2", "relu6", "tanh", "SiLU", "mish", "laplace", "linear", "sigmoid"],
    "hidden_activation": ["silu", "gelu", "gelu_new", "gelu_accurate", "gelu_10", "GELU"],
    "sliding_window": [4, 1, POSITIONS], "max_window_layers": [1, 2, 99], "decoder_sparse_step": [2, 3],
    "mlp_only_layers": [[0], [0, 1], [7], [-1], ["0"], [1.0]], "num_experts_per_tok": [1, 3, 4, 5],
    "layer_types": [[FULL, FULL], [SLIDES, SLIDES], [SLIDES, FULL], [FULL], [FULL, SLIDES, FULL], ["full", "full"],
                    [FULL, "chunked_attention"], [FULL, "linear_attention"], [], "full_attention"],
    "pad_token_id": [-1, 0, 7, 95, 96, -96, -97, 1000, "0", [0]], "query_pre_attn_scalar": [8, 256],
    "rope_theta": [1, 2, 1e6, 500000], "tie_word_embeddings": [], "num_key_value_heads": [1, 4, 3, 8],
    "attention_dropout": [-0.5, 1.5], "norm_topk_prob": [], "router_aux_loss_coef": [0.5],
    "sliding_window_pattern": [1, 2, 3, 6, 0, -1, "2", 2.0],
    "partial_rotary_factor": [0.5, 1, 1.0, 0.25, 0, "0.5", 2.0], "original_max_position_embeddings": [8, 64],
    "quantization_config": [{"quant_method": "gptq", "bits": 4}, {}, None, "fp8"],
    "num_local_experts": [4, 8, 2], "layer_norm_eps": [1e-3], "layer_norm_epsilon": [1e-3], "norm_eps": [1e-3],
    "n_layer": [3], "num_layers": [1], "n_embd": [64], "ffn_hidden_size": [64], "kv_channels": [4], "n_head": [8],
    "qkv_bias": [True], "bias": [True], "use_bias": [True], "use_qk_norm": [True, False], "qk_norm": [True],
    "logit_scale": [2.0], "embedding_multiplier": [3.0], "logits_scaling": [2.0], "residual_multiplier": [0.5],
    "final_logit_softcapping": [30.0, 0.0, None, "30"], "attn_logit_softcapping": [50.0, 0.0],
    "torch_dtype": ["bfloat16", "float8"], "dtype": ["bfloat16"], "moe_layers": [[0]], "first_k_dense_replace": [1],
    "num_nextn_predict_layers": [1], "n_shared_experts": [1], "attention_out_bias": [True],
    "use_parallel_residual": [True], "rope_local_base_freq": [100, 10000.0, None],
    "rope_scaling": [{}, None, [], "yarn"],
    "model_type": ["phi_3", "Llama", "", None, 3, "qwen3_next"], "text_config": [{"hidden_size": 64}],
    "head_dim": [8, 16, 4, 7], "no_rope_layers": [[1, 0]], "per_layer_config": [{}], "attention_chunk_size": [8],
}


def odd_values(value):
    if isinstance(value, bool):
        return [not value, int(value), str(value).lower(), None, ABSENT]
    if isinstance(value, float):  # transformers refuses whole numbers for it, which are no other values
        return [None, ABSENT, str(value), [value], -value or -1.0, 0.0, value + 0.5, True]
    if isinstance(value, int):
        return [None, ABSENT, str(value), [value], -value or -1, 0, float(value), value + 0.5, True]
    return [None, ABSENT] + ([[value], value.upper(), "", 3] if isinstance(value, str) else [])


def of_keys(family, config):
    """One key at a time."""
    own = {field.name for field in dataclasses.fields(type(config))} - GENERAL - SILENT - UNREAD.get(family, set())
    for key in sorted(own | set(ODD)):
        values = list(ODD.get(key, []))
        if key in own and key != "rope_parameters":
            values += odd_values(vars(config).get(key))  # some are of layers, and no attributes of the whole
        for value in values:
            yield {key: value}


def windows():
    """Combinations of the keys that select sliding layers."""
    for uses, window, first, types in itertools.product(
            (True, False, None), (4, None, 0), (0, 1, None), (ABSENT, None, [FULL, SLIDES], [SLIDES, SLIDES])):
        yield {"use_sliding_window": uses, "sliding_window": window, "max_window_layers": first, "layer_types": types}


def nested(rope):
    return rope if rope in (ABSENT, None) else {FULL: rope, SLIDES: {"rope_type": "default", "rope_theta": 100.0}}


def growing(rope):
    keys = {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": ORIGINAL}
    return keys | rope if isinstance(rope, dict) else rope


def renamed(rope):
    """With transformers' earlier name of rope_type."""
    return {"type" if key == "rope_type" else key: value for key, value in rope.items()}


def ropes(family):
    """Positions in one place, and in several places that agree or disagree."""
    shape = nested if family in BY_LAYER else growing if family in GROWING else (lambda rope: rope)
    for rope in ROPES.values():
        yield {"rope_parameters": shape(rope | {"rope_theta": 500.0})}
        yield {"rope_parameters": ABSENT, "rope_scaling": rope, "rope_theta": 500.0}
        yield {"rope_parameters": ABSENT, "rope_scaling": renamed(rope)}
        yield {"rope_parameters": ABSENT, "rope_scaling": renamed(rope) | rope}
        yield {"rope_parameters": shape(rope | {"rope_theta": 500.0}), "rope_scaling": rope | {"rope_theta": 500.0}}
        yield {"rope_parameters": shape(rope), "rope_scaling": rope, "rope_theta": 500.0}
        yield {"rope_parameters": shape(rope | {"rope_theta": 500.0}), "rope_scaling": rope}
        yield {"rope_parameters": shape({"rope_type": "default", "rope_theta": 500.0}), "rope_scaling": rope}
        yield {"rope_parameters": shape(rope | {"rope_theta": 500.0}), "rope_theta": 1000.0}
        yield {"rope_parameters": shape(rope | {"partial_rotary_factor": 0.5})}
        yield {"rope_parameters": shape(rope | {"original_max_position_embeddings": None})}
        yield {"rope_parameters": shape(rope), "original_max_position_embeddings": 32}
        for key in rope:
            yield {"rope_parameters": shape({each: rope[each] for each in rope if each != key})}
            for value in [None, 0, -2.0, "4", [], True, 0.5]:
                yield {"rope_parameters": shape(rope | {key: value})}
    for one, other in itertools.permutations(ROPES.values(), 2):
        yield {"rope_parameters": shape(one | {"rope_theta": 500.0}), "rope_scaling": other | {"rope_theta": 500.0}}
        yield {"rope_parameters": ABSENT, "rope_scaling": renamed(one) | other}
    for rope in ({"factor": 2.0}, {"rope_theta": 300}, {"rope_theta": None}, ROPES["linear"] | {"unknown": 1},
                 nested(ROPES["linear"]), {FULL: None}, {}, ["linear"], "linear", ROPES["linear"]):
        yield {"rope_parameters": rope}
        yield {"rope_parameters": ABSENT, "rope_scaling": rope}


def changes(family):
    """All changes of a family, each once: the entries to put into its config.json."""
    found = []
    of_positions = () if family in UNROTATED else ropes(family)
    for change in itertools.chain(of_keys(family, FAMILIES[family]), windows(), of_positions):
        if change not in found:
            found.append(change)
    return found


def some(count, seed):
    """[(family, change)]: a random sample of all changes."""
    everything = [(family, change) for family in FAMILIES for change in changes(family)]
    return random.Random(seed).sample(everything, min(count, len(everything)))
