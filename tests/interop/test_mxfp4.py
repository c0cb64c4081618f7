"""GPT-OSS's published weights, in MXFP4, are those that transformers dequantises."""
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megashard import convert
from transformers_twin import model_logits

EXPERTS, HIDDEN, INNER = 3, 64, 96
QUANTISED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same model as bf16 and in MXFP4."""
    folder = tmp_path_factory.mktemp("mxfp4")
    plain, packed = folder / "bf16", folder / "mxfp4"
    torch.manual_seed(4)
    model = GptOssForCausalLM(GptOssConfig(
        vocab_size=97, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=EXPERTS, num_experts_per_tok=2, sliding_window=4,
        pad_token_id=None)).bfloat16()
    model.save_pretrained(plain)
    weights = load_file(plain / "model.safetensors")
    quantised = {name: value for name, value in weights.items() if not name.endswith(("gate_up_proj", "down_proj"))}
    for name in weights.keys() - quantised.keys():
        rows, columns = (2 * INNER, HIDDEN) if name.endswith("gate_up_proj") else (HIDDEN, INNER)
        blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (EXPERTS, rows, columns // 32), dtype=torch.uint8)
        quantised |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weights[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
        assert weights[name].shape == (EXPERTS, columns, rows)
    packed.mkdir()
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(quantised, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTISED}))
    tokens = torch.randint(0, 97, (2, 9))
    for each in (plain, packed):
        save_file({"tokens": tokens, "labels": tokens.clone()}, each / "input.bin")
    return plain, packed


def test_it_computes_what_the_dequantised_model_does(folders):
    done = model_logits(*folders)
    assert done.returncode == 0, done.stderr
    plain, packed = (load_file(folder / "output.bin") for folder in folders)
    assert plain.keys() == packed.keys() and all(torch.equal(packed[name], value) for name, value in plain.items())


def test_it_is_converted_as_the_dequantised_model(folders, tmp_path):
    plain, packed = folders
    convert("hf_to_dcp", "--hf-dir", packed, "--dcp-dir", tmp_path / "dcp")
    convert("dcp_to_hf", "--load-dir", tmp_path / "dcp" / "release", "--save-dir", tmp_path / "back",
            "--model-assets-dir", packed)
    wanted, back = (load_file(folder / "model.safetensors") for folder in (plain, tmp_path / "back"))
    assert wanted.keys() == back.keys() and all(torch.equal(back[name], value) for name, value in wanted.items())
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config and config["model_type"] == "gpt_oss"


def test_another_quantisation_is_refused(folders, tmp_path):
    config = json.loads((folders[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    done = model_logits(tmp_path)
    assert done.returncode == 1 and "the weights are quantised, which cannot be trained here" in done.stderr
