"""megashard convert: Hugging Face models as torch_dcp and torch_dist folders, and back."""

import json
import os
import stat

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from megashard import TRACKER, convert
from values import SAFETENSORS_DTYPES, random_bits, same_bits


def small_model(folder, **options):
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, **options)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="6KB")
    return model


def test_there_and_back(tmp_path):
    model = small_model(tmp_path / "hf", tie_word_embeddings=False)
    convert("hf_to_dcp", "--hf_dir", tmp_path / "hf", "--dcp-dir", tmp_path / "dcp")
    release = tmp_path / "dcp" / "release"
    assert (tmp_path / "dcp" / TRACKER).read_text() == "release"
    assert len(list(release.glob("*.distcp"))) == len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(release.stat().st_mode) == stat.S_IMODE(release.parent.stat().st_mode) == 0o777 & ~umask
    dcp_to_torch_save(str(release), str(tmp_path / "whole.pt"))
    state = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert state["checkpoint_version"] == 3.0
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in model.state_dict().items())
    for size, files in (("5GB", 1), ("6KB", 2)):
        save = tmp_path / f"back_{size}"
        convert("dcp_to_hf", "--load-dir", release, "--save-dir", save, "--model-assets-dir", tmp_path / "hf",
                       "--max-shard-size", size)
        assert len(list(save.glob("*.safetensors"))) >= files
        back = AutoModelForCausalLM.from_pretrained(save, dtype=torch.bfloat16).state_dict()
        assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())


def test_tied_weights(tmp_path):
    model = small_model(tmp_path / "hf", tie_word_embeddings=True)
    convert("hf_to_dcp", "--hf-dir", tmp_path / "hf", "--dcp-dir", tmp_path / "dcp")
    convert("hf_to_dcp", "--hf-dir", tmp_path / "hf", "--dcp-dir", tmp_path / "untied",
                   "--tie-weight-mapping", "lm_head.weight=model.embed_tokens.weight")
    for name, present in (("dcp", False), ("untied", True)):
        dcp_to_torch_save(str(tmp_path / name / "release"), str(tmp_path / "whole.pt"))
        weights = torch.load(tmp_path / "whole.pt", weights_only=False)["model"]
        assert ("lm_head.weight" in weights) == present
        save = tmp_path / f"back_{name}"
        convert("dcp_to_hf", "--load-dir", tmp_path / name / "release", "--save-dir", save,
                       "--model-assets-dir", tmp_path / "hf")
        back = AutoModelForCausalLM.from_pretrained(save, dtype=torch.bfloat16)
        assert json.loads((save / "config.json").read_text())["tie_word_embeddings"]
        assert torch.equal(back.lm_head.weight, model.lm_head.weight)


def test_every_dtype_of_safetensors_there_and_back(tmp_path):
    torch.manual_seed(3)
    weights = {f"w.{dtype}": random_bits(dtype, 3, 5) for dtype in SAFETENSORS_DTYPES}
    weights |= {f"scalar.{dtype}": random_bits(dtype) for dtype in SAFETENSORS_DTYPES}
    weights |= {f"empty.{dtype}": random_bits(dtype, 0, 4) for dtype in SAFETENSORS_DTYPES}
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    convert("hf_to_dcp", "--hf-dir", tmp_path / "hf", "--dcp-dir", tmp_path / "dcp")
    dcp_to_torch_save(str(tmp_path / "dcp" / "release"), str(tmp_path / "whole.pt"))
    stored = torch.load(tmp_path / "whole.pt", weights_only=False)["model"]
    assert all(same_bits(stored[name], weight) for name, weight in weights.items())
    for size in ("5GB", "200B"):
        save = tmp_path / f"back_{size}"
        convert("dcp_to_hf", "--load-dir", tmp_path / "dcp" / "release", "--save-dir", save, "--model-assets-dir",
                tmp_path / "hf", "--max-shard-size", size)
        files = sorted(save.glob("*.safetensors"))
        assert (len(files) == 1) == (size == "5GB")
        back = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert back.keys() == weights.keys()
        assert all(same_bits(back[name], weight) for name, weight in weights.items())

    # and by way of torch_dist, straight and through torch_dcp
    convert("hf_to_torch_dist", "--hf-dir", tmp_path / "hf", "--save-dir", tmp_path / "dist")
    convert("torch_dist_to_dcp", "--load-dir", tmp_path / "dist" / "release", "--save-dir", tmp_path / "dcp_of_dist")
    convert("dcp_to_torch_dist", "--load-dir", tmp_path / "dcp_of_dist" / "release", "--save-dir",
            tmp_path / "dist_of_dcp")
    for name in ("dist", "dist_of_dcp"):
        save = tmp_path / f"back_of_{name}"
        convert("torch_dist_to_hf", "--load-dir", tmp_path / name / "release", "--save-dir", save, "--model-assets-dir",
           tmp_path / "hf")
        back = load_file(save / "model.safetensors")
        assert back.keys() == weights.keys()
        assert all(same_bits(back[name], weight) for name, weight in weights.items())


def test_prefixes_and_stacked_experts(tmp_path):
    """Names and sizes are those of MindSpeed-MM's GenericDCPConverter, with its own arguments."""
    weights = {"thinker.model.layers.0.mlp.experts.gate_up_proj": torch.randn(4, 6, 5),
               "thinker.model.layers.0.mlp.down_proj.weight": torch.randn(8, 5), "talker.w": torch.randn(3)}
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "hf" / "config.json").write_text('{"thinker_config": {"text_config": {"num_experts": 4}}}')
    names = ("--dcp_prefix", "inner.", "--hf_prefix", "thinker.", "--fused_linear_names",
             '["gate_up_proj", "down_proj"]')
    convert("GenericDCPConverter", "hf_to_dcp", "--hf_dir", tmp_path / "hf", "--dcp_dir", tmp_path / "dcp", *names,
       "--tie_weight_mapping", '{"thinker.head": "talker.w"}', "--to_bf16", "false")
    dcp_to_torch_save(str(tmp_path / "dcp" / "release"), str(tmp_path / "whole.pt"))
    stored = torch.load(tmp_path / "whole.pt", weights_only=False)["model"]
    expected = {"inner.model.layers.0.mlp.experts.gate_up_proj": torch.Size((24, 5)), "talker.w": torch.Size((3,)),
                "inner.model.layers.0.mlp.down_proj.weight": torch.Size((8, 5)), "inner.head": torch.Size((3,))}
    assert {name: tensor.shape for name, tensor in stored.items()} == expected
    convert("dcp_to_hf", "--load_dir", tmp_path / "dcp" / "release", "--save_dir", tmp_path / "back",
            "--model_assets_dir", tmp_path / "hf", *names, "--trust_remote_code", "True")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(back.pop("thinker.head"), weights["talker.w"])
    assert back.keys() == weights.keys() and all(torch.equal(back[name], weight) for name, weight in weights.items())


def test_bf16_and_what_is_said(tmp_path):
    """Floating weights become bfloat16, the others stay; a line counts the tensors and their bytes."""
    weights = {f"w{i}": torch.randn(3) for i in range(1001)} | {"ids": torch.arange(4)}
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    expected = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    back = ("dcp_to_hf", "--save-dir", tmp_path / "back", "--overwrite", "--model-assets-dir", tmp_path / "hf",
            "--load-dir")
    unknown = f"the weights are not compared with config.json: there is none in {tmp_path / 'hf'}"
    for name, flag in (("half", "true"), ("whole", "false")):
        done = convert("hf_to_dcp", "--hf_dir", tmp_path / "hf", "--dcp_dir", tmp_path / name, "--to_bf16", flag)
        release = tmp_path / name / "release"
        assert done.stdout.splitlines() == [unknown, "1002 tensors, 0.01 MiB", f"written: {release}"]
        done = convert(*back, release, *(("--to_bf16", "true") if name == "whole" else ()))
        assert done.stdout.splitlines() == [unknown, f"checking the bytes of {release}",
                                            "1002 tensors, 0.01 MiB",
                                            f"written: {tmp_path / 'back'}"]
        written = load_file(tmp_path / "back" / "model.safetensors")
        assert written.keys() == expected.keys() and all(same_bits(written[key], tensor)
                                                         for key, tensor in expected.items())
