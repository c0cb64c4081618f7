"""megashard convert: a Hugging Face model to torch_dcp and back."""

import json
import os
import stat
import subprocess
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("MEGASHARD_BUILD", ROOT / "build"))


def convert(*words):
    done = subprocess.run([BUILD / "launch" / "megashard", "convert", *map(str, words)], capture_output=True, text=True,
                          timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return done


def small_model(folder, **options):
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, **options)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="6KB")
    return model


def test_there_and_back(tmp_path):
    model = small_model(tmp_path / "hf", tie_word_embeddings=False)
    done = convert("hf_to_dcp", "--hf_dir", tmp_path / "hf", "--dcp-dir", tmp_path / "dcp")
    assert done.returncode == 0, done.stderr
    release = tmp_path / "dcp" / "release"
    assert (tmp_path / "dcp" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert len(list(release.glob("*.distcp"))) == len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    assert stat.S_IMODE(release.stat().st_mode) & 0o750 == stat.S_IMODE(release.stat().st_mode)
    dcp_to_torch_save(str(release), str(tmp_path / "whole.pt"))
    state = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert state["checkpoint_version"] == 3.0
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in model.state_dict().items())
    for size, files in (("5GB", 1), ("6KB", 2)):
        save = tmp_path / f"back_{size}"
        done = convert("dcp_to_hf", "--load-dir", release, "--save-dir", save, "--model-assets-dir", tmp_path / "hf",
                       "--max-shard-size", size)
        assert done.returncode == 0, done.stderr
        assert len(list(save.glob("*.safetensors"))) >= files
        back = AutoModelForCausalLM.from_pretrained(save, dtype=torch.bfloat16).state_dict()
        assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())


def test_tied_weights(tmp_path):
    model = small_model(tmp_path / "hf", tie_word_embeddings=True)
    done = convert("hf_to_dcp", "--hf-dir", tmp_path / "hf", "--dcp-dir", tmp_path / "dcp")
    assert done.returncode == 0, done.stderr
    done = convert("hf_to_dcp", "--hf-dir", tmp_path / "hf", "--dcp-dir", tmp_path / "untied",
                   "--tie-weight-mapping", "lm_head.weight=model.embed_tokens.weight")
    assert done.returncode == 0, done.stderr
    for name, present in (("dcp", False), ("untied", True)):
        dcp_to_torch_save(str(tmp_path / name / "release"), str(tmp_path / "whole.pt"))
        weights = torch.load(tmp_path / "whole.pt", weights_only=False)["model"]
        assert ("lm_head.weight" in weights) == present
        save = tmp_path / f"back_{name}"
        done = convert("dcp_to_hf", "--load-dir", tmp_path / name / "release", "--save-dir", save,
                       "--model-assets-dir", tmp_path / "hf")
        assert done.returncode == 0, done.stderr
        back = AutoModelForCausalLM.from_pretrained(save, dtype=torch.bfloat16)
        assert json.loads((save / "config.json").read_text())["tie_word_embeddings"]
        assert torch.equal(back.lm_head.weight, model.lm_head.weight)


def test_wrong_use_is_one_sentence(tmp_path):
    small_model(tmp_path / "hf", tie_word_embeddings=False)
    for words, part in (
            (("hf_to_dcp",), "--hf-dir is required"),
            (("hf_to_dcp", "--hf-dir", tmp_path, "--dcp-dir", tmp_path / "x"), "neither model.safetensors nor"),
            (("hf_to_dcp", "--hf-dir", tmp_path / "hf", "--dcp-dir", tmp_path / "x", "--hf-prefix", "zz"), "begins with --hf-prefix"),
            (("hf_to_dcp", "--hf-dir", tmp_path / "hf", "--dcp-dir", tmp_path / "x", "--tie-weight-mapping", "a"), "target=source"),
            (("dcp_to_hf", "--load-dir", tmp_path, "--save-dir", tmp_path / "y", "--model-assets-dir", tmp_path / "hf"), "no .metadata"),
            (("hf_to_dpc",), "convert")):
        done = convert(*words)
        assert done.returncode != 0 and part in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
