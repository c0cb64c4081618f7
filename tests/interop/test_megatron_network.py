"""The network of Megatron's flags against megatron-core's own GPTModel: logits, losses and gradients, fp32, on the same
random weights."""

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megashard import INTEROP, run

LAYERS, HIDDEN, HEADS, INNER, VOCAB, POSITIONS = 2, 48, 6, 80, 211, 32
CONFIG = dict(num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=INNER,
              activation_func="gelu", add_bias_linear=True, bias_activation_fusion=True, normalization="LayerNorm",
              num_query_groups=HEADS, kv_channels=HIDDEN // HEADS)
FLAGS = [["--num-layers", str(LAYERS)], ["--hidden-size", str(HIDDEN)], ["--num-attention-heads", str(HEADS)],
         ["--ffn-hidden-size", str(INNER)], ["--vocab-size", str(VOCAB)],
         ["--max-position-embeddings", str(POSITIONS)], ["--attention-dropout", "0"], ["--hidden-dropout", "0"]]
MODEL = dict(vocab_size=VOCAB, max_sequence_length=POSITIONS, share_embeddings_and_output_weights=True,
             position_embedding_type="learned_absolute")
ROPE = [["--position-embedding-type", "rope"]]
NO_BIAS = ["--disable-bias-linear"]
NO_BIASES = dict(add_bias_linear=False, bias_activation_fusion=False)
EXPERTS = [["--num-experts", "6"], ["--moe-router-topk", "2"], ["--moe-ffn-hidden-size", "28"]]
LATENTS = [["--multi-latent-attention"], ["--kv-lora-rank", "20"], ["--qk-head-dim", "10"],
           ["--qk-pos-emb-head-dim", "6"], ["--v-head-dim", "12"]]
MLA = dict(multi_latent_attention=True, q_lora_rank=None, kv_lora_rank=20, qk_head_dim=10, qk_pos_emb_head_dim=6,
           v_head_dim=12, rotary_scaling_factor=1.0)
MOE = dict(num_moe_experts=6, moe_router_topk=2, moe_ffn_hidden_size=28, moe_aux_loss_coeff=0.0)


def case(flags, config={}, model={}, layer={}, norms_less=0.0):
    return dict(flags=FLAGS + flags, config=CONFIG | config, model=MODEL | model, layer=layer, norms_less=norms_less)


CASES = {
    "gpt": case([]),
    "untied": case([["--untie-embeddings-and-output-weights"]], model=dict(share_embeddings_and_output_weights=False)),
    "exact_gelu": case([["--no-bias-gelu-fusion"]], dict(bias_activation_fusion=False)),
    "no_biases": case([NO_BIAS], dict(add_bias_linear=False, bias_activation_fusion=False)),
    "qkv_biases": case([NO_BIAS, ["--add-qkv-bias"]],
                       dict(add_bias_linear=False, add_qkv_bias=True, bias_activation_fusion=False)),
    "squared_relu": case([["--squared-relu"]], dict(activation_func="squared_relu", bias_activation_fusion=False)),
    "swiglu_rms": case([["--swiglu"], ["--normalization", "RMSNorm"], NO_BIAS, *ROPE, ["--norm-epsilon", "1e-3"]],
                       dict(activation_func="silu", gated_linear_unit=True, normalization="RMSNorm",
                            add_bias_linear=False, layernorm_epsilon=1e-3, bias_activation_fusion=False),
                       dict(position_embedding_type="rope")),
    "swiglu_biases": case([["--swiglu"], *ROPE], dict(activation_func="silu", gated_linear_unit=True),
                          dict(position_embedding_type="rope")),
    "gqa": case([["--group-query-attention"], ["--num-query-groups", "2"], ["--kv-channels", "10"], *ROPE],
                dict(num_query_groups=2, kv_channels=10), dict(position_embedding_type="rope")),
    "qk_norm": case([["--qk-layernorm"], *ROPE], dict(qk_layernorm=True), dict(position_embedding_type="rope"),
                    dict(qk_layernorm=True)),
    "half_rotated": case([*ROPE, ["--rotary-percent", "0.5"], ["--rotary-base", "500"]], {},
                         dict(position_embedding_type="rope", rotary_percent=0.5, rotary_base=500)),
    "interpolated": case([*ROPE, ["--rotary-seq-len-interpolation-factor", "4"]], {},
                         dict(position_embedding_type="rope", seq_len_interpolation_factor=4.0)),
    "llama3_rope": case([*ROPE, ["--use-rope-scaling"], ["--rope-scaling-factor", "4"], ["--rotary-base", "500000"]],
                        {}, dict(position_embedding_type="rope", rotary_base=500000, rope_scaling=True,
                                 rope_scaling_factor=4.0)),
    "neighbours_rotated": case([*ROPE, ["--rotary-interleaved"], ["--rotary-percent", "0.5"]],
                               dict(rotary_interleaved=True), dict(position_embedding_type="rope", rotary_percent=0.5)),
    "experts": case([NO_BIAS, *EXPERTS], NO_BIASES | MOE),
    "experts_gated": case([NO_BIAS, *EXPERTS, ["--swiglu"], ["--moe-layer-freq", "[0]*1+[1]*1"],
                           ["--moe-router-pre-softmax"], ["--moe-router-topk-scaling-factor", "1.7"],
                           ["--moe-shared-expert-intermediate-size", "36"], ["--moe-shared-expert-gate"],
                           ["--moe-router-dtype", "fp32"]],
                          NO_BIASES | MOE | dict(activation_func="silu", gated_linear_unit=True, moe_layer_freq=[0, 1],
                                                 moe_router_pre_softmax=True, moe_router_topk_scaling_factor=1.7,
                                                 moe_shared_expert_intermediate_size=36, moe_shared_expert_gate=True,
                                                 moe_router_dtype="fp32")),
    "experts_of_groups": case([NO_BIAS, *EXPERTS, ["--moe-router-num-groups", "3"], ["--moe-router-group-topk", "2"],
                               ["--moe-layer-freq", "2"]],
                              NO_BIASES | MOE | dict(moe_router_num_groups=3, moe_router_group_topk=2,
                                                     moe_layer_freq=2)),
    "experts_by_sigmoid": case([NO_BIAS, *EXPERTS, ["--moe-router-score-function", "sigmoid"],
                                ["--moe-router-enable-expert-bias"], ["--moe-router-num-groups", "2"],
                                ["--moe-router-group-topk", "1"], ["--moe-router-topk-scaling-factor", "2.5"],
                                ["--moe-shared-expert-intermediate-size", "36"]],
                               NO_BIASES | MOE | dict(
                                   moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
                                   moe_router_num_groups=2, moe_router_group_topk=1,
                                   moe_router_topk_scaling_factor=2.5, moe_shared_expert_intermediate_size=36)),
    "one_expert": case([NO_BIAS, *EXPERTS[:1], ["--moe-router-topk", "1"], ["--moe-router-score-function", "sigmoid"]],
                       NO_BIASES | MOE | dict(moe_router_topk=1, moe_router_score_function="sigmoid",
                                              moe_ffn_hidden_size=INNER)),
    "latents": case([NO_BIAS, *ROPE, *LATENTS, ["--rotary-scaling-factor", "4"], ["--mscale", "0.7"],
                     ["--mscale-all-dim", "1.3"]],
                    NO_BIASES | MLA | dict(rotary_scaling_factor=4.0, mscale=0.7, mscale_all_dim=1.3),
                    dict(position_embedding_type="rope")),
    "latents_normed": case([NO_BIAS, *ROPE, *LATENTS, ["--q-lora-rank", "18"], ["--qk-layernorm"],
                            ["--norm-epsilon", "1e-3"], ["--normalization", "RMSNorm"], ["--rope-type", "rope"]],
                           NO_BIASES | MLA | dict(q_lora_rank=18, qk_layernorm=True, layernorm_epsilon=1e-3,
                                                  normalization="RMSNorm", rope_type="rope"),
                           dict(position_embedding_type="rope")),
    "latents_and_experts": case([NO_BIAS, *ROPE, *LATENTS, *EXPERTS, ["--q-lora-rank", "18"]],
                                NO_BIASES | MLA | MOE | dict(q_lora_rank=18), dict(position_embedding_type="rope")),
    "predicting": case([NO_BIAS, *ROPE, ["--mtp-num-layers", "2"], ["--mtp-loss-scaling-factor", "0.7"],
                        ["--untie-embeddings-and-output-weights"]],
                       NO_BIASES | dict(mtp_num_layers=2, mtp_loss_scaling_factor=0.7),
                       dict(position_embedding_type="rope", share_embeddings_and_output_weights=False)),
    "predicting_with_experts": case([NO_BIAS, *ROPE, *LATENTS, *EXPERTS, ["--moe-layer-freq", "[0]*1+[1]*1"],
                                     ["--mtp-num-layers", "1"]],
                                    NO_BIASES | MLA | MOE | dict(moe_layer_freq=[0, 1], mtp_num_layers=1),
                                    dict(position_embedding_type="rope")),
    "gated_attention": case([*ROPE, ["--group-query-attention"], ["--num-query-groups", "2"], ["--kv-channels", "10"],
                             ["--attention-output-gate"]],
                            dict(num_query_groups=2, kv_channels=10, attention_output_gate=True),
                            dict(position_embedding_type="rope")),
    "sinks_and_windows": case([*ROPE, ["--softmax-type", "learnable"], ["--window-size", "5,0"],
                               ["--window-attn-skip-freq", "2"]],
                              dict(softmax_type="learnable", window_size=[5, 0], window_attn_skip_freq=2),
                              dict(position_embedding_type="rope")),
    "windows": case([["--window-size", "(3, 0)"]], dict(window_size=[3, 0])),
    "a_layer_without_positions": case([*ROPE, ["--no-rope-freq", "2"]], dict(no_rope_freq=2),
                                      dict(position_embedding_type="rope")),
    "experts_of_a_latent": case([NO_BIAS, *EXPERTS, ["--moe-latent-size", "20"],
                                 ["--moe-shared-expert-intermediate-size", "36"]],
                                NO_BIASES | MOE | dict(moe_latent_size=20, moe_shared_expert_intermediate_size=36)),
    "norms_1p": case([["--apply-layernorm-1p"]], norms_less=1.0),  # megatron-core has them on GPUs alone
    "no_positions": case([["--position-embedding-type", "none"]], {}, dict(position_embedding_type="none")),
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("networks")
    (folder / "cases.json").write_text(json.dumps(CASES))
    run(sys.executable, Path(__file__).with_name("megatron_network.py"), folder, timeout=300)
    for name, each in CASES.items():
        (folder / name / "flags.json").write_text(json.dumps(each["flags"]))
    run(INTEROP / "model_logits", *(folder / name for name in CASES))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_as_gpt_model(compared, name):
    ours, wanted = (load_file(compared / name / file) for file in ("output.bin", "wanted.bin"))
    assert sorted(ours) == sorted(wanted)
    for key, want in wanted.items():
        # Scores that are all shifted alike make the same weights: a key's bias alone has no gradient, only rounding.
        largest = wanted[key.replace("k_proj.bias", "q_proj.bias")].abs().max()
        error = (ours[key] - want).abs().max() / largest
        assert error <= 1e-5, f"{key}: {error:.1e} of the largest value"
