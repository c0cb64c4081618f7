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
