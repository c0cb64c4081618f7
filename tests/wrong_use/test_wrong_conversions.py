"""Converters and `inspect` with wrong folders, files, names and models: one message, and every file is as it was."""
import json
import os
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megashard import FAILURE, USAGE
from wrong_use import MOCK, NETWORK, PRETRAIN, RATE, check, run

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 24,
         "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 48,
         "tie_word_embeddings": False}
QWEN3 = LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8}
EXPERTS = QWEN3 | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 2,
                   "num_experts_per_tok": 1, "moe_intermediate_size": 8}


def sizes_of(config, rows=None):
    """The weights that transformers asks for."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["hidden_size"] // config[
        "num_attention_heads"]
    sizes = {"model.embed_tokens": (rows or config["vocab_size"], hidden), "model.norm": (hidden,)}
    if not config["tie_word_embeddings"]:
        sizes["lm_head"] = sizes["model.embed_tokens"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        key_rows = config["num_key_value_heads"] * head
        sizes |= {at + f"self_attn.{name}_proj": (key_rows if name in "kv" else hidden, hidden) for name in "qkvo"}
        sizes |= {at + f"{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        if "num_experts" in config:
            inner = config["moe_intermediate_size"]
            sizes[at + "mlp.gate"] = (config["num_experts"], hidden)
        for mlp in [f"mlp.experts.{i}" for i in range(config.get("num_experts", 0))] or ["mlp"]:
            sizes |= {at + mlp + ".gate_proj": (inner, hidden), at + mlp + ".up_proj": (inner, hidden),
                      at + mlp + ".down_proj": (hidden, inner)}
        if config["model_type"].startswith("qwen3"):
            sizes |= {at + f"self_attn.{name}_norm": (head,) for name in "qk"}
    return {name + ".weight": size for name, size in sizes.items()}


def write_model(folder, config, sizes=None, says=True):
    folder.mkdir()
    generator = np.random.default_rng(1)
    weights = {name: generator.normal(size=size).astype(np.float32)
               for name, size in (sizes or sizes_of(config)).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if says:
        (folder / "config.json").write_text(json.dumps(config))


def converted(*words):
    done = run("convert", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def models(tmp_path_factory, saved):
    """Models, the steps made of them, and files that are neither."""
    path = tmp_path_factory.mktemp("conversions")
    write_model(path / "llama", LLAMA)
    write_model(path / "qwen3", QWEN3)
    write_model(path / "experts", EXPERTS)
    write_model(path / "wide", LLAMA | {"hidden_size": 32})
    write_model(path / "tied", LLAMA | {"tie_word_embeddings": True})
    write_model(path / "deep", LLAMA | {"num_hidden_layers": 2})
    write_model(path / "bare", LLAMA, says=False)
    write_model(path / "padded", LLAMA, sizes_of(LLAMA, rows=128), says=False)
    adapters = {f"model.layers.0.self_attn.q_proj.lora_{letter}.weight": size
                for letter, size in (("A", (4, 16)), ("B", (16, 4)))}
    write_model(path / "adapters", LLAMA, adapters, says=False)
    write_model(path / "headless", LLAMA, {name: size for name, size in sizes_of(LLAMA).items()
                                           if name != "lm_head.weight"})
    write_model(path / "mixed", QWEN3, sizes_of(LLAMA))
    write_model(path / "unlike", LLAMA | {"vocab_size": 40}, sizes_of(LLAMA))
    for name in ("llama", "qwen3", "experts", "wide", "tied", "deep", "padded", "adapters"):
        converted("hf_to_dcp", "--hf-dir", path / name, "--dcp-dir", path / f"{name}_dcp")
    converted("hf_to_torch_dist", "--hf-dir", path / "llama", "--save-dir", path / "dist")
    converted("hf_to_torch_dist", "--hf-dir", path / "llama", "--save-dir", path / "megatron", "--megatron-layout")
    converted("dcp_to_torch", "--dcp-dir", path / "llama_dcp" / "release", "--torch-save-path", path / "whole.pt")
    shutil.copytree(saved, path / "run")
    (path / "assets").mkdir()
    (path / "assets" / "config.json").write_text(json.dumps(LLAMA))
    (path / "no_json").mkdir()
    (path / "no_json" / "config.json").write_text("{hidden_size: 16")
    (path / "sizeless").mkdir()
    (path / "sizeless" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (path / "empty").mkdir()
    (path / "file").write_text("text")
    (path / "peft").mkdir()
    shutil.copy(path / "adapters" / "model.safetensors", path / "peft" / "adapter_model.safetensors")
    (path / "old").mkdir()
    (path / "old" / "pytorch_model.bin").write_bytes(b"PK")
    shutil.copytree(path / "llama", path / "cut")
    os.truncate(path / "cut" / "model.safetensors", 300)
    shutil.copytree(path / "llama_dcp", path / "damaged")
    (data,) = (path / "damaged" / "release").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 16
    data.write_bytes(content)
    (path / "link").symlink_to(path / "llama_dcp" / "release")
    (path / "renamed").symlink_to(path / "llama_dcp" / "release")
    return path


def state_of(folder):
    return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*")}


HF_TO_DCP = ["convert", "hf_to_dcp", "--hf-dir", "{models}/llama", "--dcp-dir"]
HF_TO_DIST = ["convert", "hf_to_torch_dist", "--hf-dir", "{models}/llama", "--save-dir"]
DCP_TO_HF = ["convert", "dcp_to_hf", "--load-dir", "{models}/llama_dcp/release", "--model-assets-dir", "{models}/llama",
             "--save-dir"]
DIST_TO_HF = ["convert", "torch_dist_to_hf", "--load-dir", "{models}/dist/release", "--model-assets-dir",
              "{models}/llama", "--save-dir"]
DCP_TO_DIST = ["convert", "dcp_to_torch_dist", "--load-dir", "{models}/llama_dcp/release", "--save-dir"]
DIST_TO_DCP = ["convert", "torch_dist_to_dcp", "--load-dir", "{models}/dist/release", "--save-dir"]
DCP_TO_TORCH = ["convert", "dcp_to_torch", "--dcp-dir", "{models}/llama_dcp/release", "--torch-save-path"]
TORCH_TO_DCP = ["convert", "torch_to_dcp", "--torch-save-path", "{models}/whole.pt", "--dcp-dir"]
WRITERS = {"hf_to_dcp": HF_TO_DCP, "hf_to_torch_dist": HF_TO_DIST, "dcp_to_hf": DCP_TO_HF,
           "torch_dist_to_hf": DIST_TO_HF, "dcp_to_torch_dist": DCP_TO_DIST, "torch_dist_to_dcp": DIST_TO_DCP,
           "torch_to_dcp": TORCH_TO_DCP}
REMEDY = "give a folder of its own, or --overwrite"

# What a target may hold: each converter refuses each.
CASES = {}
for name, words in WRITERS.items():
    CASES |= {f"{name} into a model": ([*words, "{models}/qwen3"], USAGE, "holds weights (model.safetensors)"),
              f"{name} into a step": ([*words, "{models}/qwen3_dcp/release"], USAGE, "holds a step (.metadata)"),
              f"{name} into a run": ([*words, "{models}/run"], USAGE, "holds a run's steps (iter_0000002"),
              f"{name} below a file": ([*words, "{models}/file/new"], USAGE, "file is no folder")}
CASES |= {
    "dcp_to_torch over a file": ([*DCP_TO_TORCH, "{models}/whole.pt"], USAGE, "whole.pt exists already"),
    "dcp_to_torch into a folder": ([*DCP_TO_TORCH, "{models}/empty"], USAGE,
                                   "empty is a directory, and --torch-save-path takes a file"),
    "dcp_to_torch below nothing": ([*DCP_TO_TORCH, "{new}/whole.pt"], USAGE, "there is no directory"),
    "dcp_to_torch into its step": ([*DCP_TO_TORCH, "{models}/llama_dcp/release/whole.pt", "--overwrite"], USAGE,
                                   "lies in the folder that --dcp-checkpoint-dir names"),
    "a file as target": ([*DCP_TO_HF, "{models}/file"], USAGE, "file is no folder"),
    "a target that takes no files": ([*DCP_TO_HF, "/proc/megashard"], USAGE, "no folder can be made in /proc"),
    "the assets are the target": (["convert", "dcp_to_hf", "--load-dir", "{models}/llama_dcp/release", "--save-dir",
                                   "{models}/llama", "--model-assets-dir", "{models}/llama"], USAGE, REMEDY),
    "the old torch weights are there": ([*DCP_TO_HF, "{models}/old"], USAGE, "holds weights (pytorch_model.bin)"),
    # Source and target are one: --overwrite does not help.
    "dcp_to_hf into its source": ([*DCP_TO_HF, "{models}/llama_dcp/release", "--overwrite"], USAGE,
                                  "is the folder that --load-dir names"),
    "into its source by a link": ([*DCP_TO_HF, "{models}/link", "--overwrite"], USAGE,
                                  "is the folder that --load-dir names"),
    "into its source by a way round": ([*DIST_TO_HF, "{models}/empty/../dist/release/.", "--overwrite"], USAGE,
                                       "is the folder that --load-dir names"),
    "inside its source": ([*DCP_TO_HF, "{models}/llama_dcp/release/hf"], USAGE,
                          "lies in the folder that --load-dir names"),
    "hf_to_dcp into its source": ([*HF_TO_DCP, "{models}/llama", "--overwrite"], USAGE,
                                  "is the folder that --hf-dir names"),
    "a step in place of its source": ([*DCP_TO_DIST, "{models}/llama_dcp", "--overwrite"], USAGE,
                                      "would replace the step that --load-dir names"),
    "torch_to_dcp in place of its source": (["convert", "torch_to_dcp", "--torch-save-path",
                                             "{models}/llama_dcp/release/.metadata", "--dcp-dir",
                                             "{models}/llama_dcp/release", "--overwrite"], USAGE,
                                            "holds the file that --torch-save-path names"),
    "torch_to_dcp in place of other things": ([*TORCH_TO_DCP, "{models}/run", "--overwrite"], USAGE,
                                              "--overwrite replaces a folder that holds a step and nothing else"),
}

TO_HF = ["convert", "dcp_to_hf", "--save-dir", "{new}", "--load-dir"]
DIST_AS_HF = ["convert", "torch_dist_to_hf", "--save-dir", "{new}", "--load-dir"]
ASSETS = ["--model-assets-dir", "{models}/assets"]
LAYOUT = ["--megatron-layout"]
# Weights against config.json.
CASES |= {
    "adapters alone": ([*TO_HF, "{models}/adapters_dcp/release", *ASSETS], FAILURE, "--skip-train --save-hf DIR"),
    "a GPT as a Llama": ([*TO_HF, "{models}/run/iter_0000002", *ASSETS], FAILURE,
                         "missing: model.layers.0.mlp.gate_proj.weight"),
    "another width": ([*TO_HF, "{models}/wide_dcp/release", *ASSETS], FAILURE,
                      "of other sizes: model.embed_tokens.weight [48, 32]"),
    "Qwen3 as Llama": ([*TO_HF, "{models}/qwen3_dcp/release", *ASSETS], FAILURE,
                       "unexpected: model.layers.0.self_attn.k_norm.weight"),
    "Llama as Qwen3": ([*TO_HF, "{models}/llama_dcp/release", "--model-assets-dir", "{models}/qwen3"], FAILURE,
                       "missing: model.layers.0.self_attn.q_norm.weight"),
    "experts as Llama": ([*TO_HF, "{models}/experts_dcp/release", *ASSETS], FAILURE,
                         "missing: model.layers.0.mlp.gate_proj.weight"),
    "Llama as experts": ([*TO_HF, "{models}/llama_dcp/release", "--model-assets-dir", "{models}/experts"], FAILURE,
                         "unexpected: model.layers.0.mlp.down_proj.weight"),
    "more layers": ([*TO_HF, "{models}/deep_dcp/release", *ASSETS], FAILURE, "unexpected: model.layers.1."),
    "fewer layers": ([*TO_HF, "{models}/llama_dcp/release", "--model-assets-dir", "{models}/deep"], FAILURE,
                     "missing: model.layers.1."),
    "a head that is tied elsewhere": ([*TO_HF, "{models}/tied_dcp/release", *ASSETS], FAILURE,
                                      "missing: lm_head.weight"),
    "a padded vocabulary": ([*TO_HF, "{models}/padded_dcp/release", *ASSETS], FAILURE,
                            'rows for 128 tokens, and config.json says "vocab_size": 48'),
    "torch_dist of another width": ([*DIST_AS_HF, "{models}/dist/release", "--model-assets-dir", "{models}/wide"],
                                    FAILURE, "of other sizes: model.embed_tokens.weight [48, 16]"),
    "Megatron's layout not said": ([*DIST_AS_HF, "{models}/megatron/release", *ASSETS], FAILURE,
                                   "give --megatron-layout"),
    "Megatron's layout said in vain": ([*DIST_AS_HF, "{models}/dist/release", *ASSETS, *LAYOUT], FAILURE,
                                       "convert without --megatron-layout"),
    "Megatron's layout of another model": ([*DIST_AS_HF, "{models}/megatron/release", "--model-assets-dir",
                                            "{models}/wide", *LAYOUT],
                                           FAILURE, "config.json that belongs to it"),
    "a wrong prefix": ([*TO_HF, "{models}/llama_dcp/release", *ASSETS, "--dcp-prefix", "model.", "--hf-prefix",
                        "thinker."], FAILURE,
                       "missing: model.embed_tokens.weight"),
    "a prefix that no key has": ([*TO_HF, "{models}/llama_dcp/release", *ASSETS, "--dcp-prefix", "inner."], FAILURE,
                                 "no tensor whose key begins with"),
    "a config.json without sizes": ([*TO_HF, "{models}/llama_dcp/release", "--model-assets-dir", "{models}/sizeless"],
                                    FAILURE, "hidden_size is missing"),
    "a config.json that is none": ([*TO_HF, "{models}/llama_dcp/release", "--model-assets-dir", "{models}/no_json"],
                                   FAILURE, "no_json/config.json"),
    "no assets": ([*TO_HF, "{models}/llama_dcp/release", "--model-assets-dir", "{models}/none"], USAGE,
                  "there is no folder"),
}
for name in ("hf_to_dcp --dcp-dir", "hf_to_torch_dist --save-dir"):
    converter, flag = name.split()
    from_hf = ["convert", converter, flag, "{new}", "--hf-dir"]
    CASES |= {
        f"{converter}: Llama's weights with Qwen3's config.json": ([*from_hf, "{models}/mixed"], FAILURE,
                                                                   "q_norm.weight"),
        f"{converter}: another vocabulary": ([*from_hf, "{models}/unlike"], FAILURE,
                                             'and config.json says "vocab_size": 40'),
        f"{converter}: no head": ([*from_hf, "{models}/headless"], FAILURE,
                                  "--tie-weight-mapping lm_head.weight=model.embed_tokens.weight"),
        f"{converter}: a step": ([*from_hf, "{models}/llama_dcp/release"], FAILURE, "is a step's folder"),
        f"{converter}: a run": ([*from_hf, "{models}/run"], FAILURE, "is a run's folder"),
        f"{converter}: adapters of PEFT": ([*from_hf, "{models}/peft"], FAILURE, "merge_and_unload"),
        f"{converter}: weights of torch.save": ([*from_hf, "{models}/old"], FAILURE, "has pickled weights"),
        f"{converter}: cut weights": ([*from_hf, "{models}/cut"], FAILURE, "model.safetensors"),
    }

# Sources and words.
CASES |= {
    "no converter": (["convert"], USAGE, "name a converter: hf_to_dcp, dcp_to_hf"),
    "no such converter": (["convert", "nosuch"], USAGE,
                          'there is no converter "nosuch": there are hf_to_dcp, dcp_to_hf'),
    "a misspelt converter": (["convert", "hf_to_dpc"], USAGE, "did you mean hf_to_dcp?"),
    "a converter with a digit": (["convert", "dcp2hf"], USAGE, "did you mean dcp_to_hf?"),
    "a misspelt flag": (["convert", "dcp_to_hf", "--lod-dir", "x"], USAGE,
                        "unknown flag --lod-dir; did you mean --load-dir?"),
    "a missing flag": (["convert", "dcp_to_hf", "--load-dir", "x"], USAGE, "--save-dir is required"),
    "a flag without a value": ([*TO_HF], USAGE, "--load-dir"),
    "a flag twice": ([*DCP_TO_HF, "{new}", "--save-dir", "{new}"], USAGE, "--save-dir"),
    "a size that is none": ([*DCP_TO_HF, "{new}", "--max-shard-size", "big"], USAGE, "--max-shard-size"),
    "a word too many": ([*DCP_TO_HF, "{new}", "more"], USAGE, "more"),
    "a model for a step": ([*TO_HF, "{models}/qwen3", *ASSETS], FAILURE,
                           "holds Hugging Face weights; hf_to_dcp and hf_to_torch_dist read them"),
    "a file for a step": ([*TO_HF, "{models}/whole.pt", *ASSETS], FAILURE, "torch_to_dcp makes a step of"),
    "an empty folder for a step": ([*TO_HF, "{models}/empty", *ASSETS], FAILURE, "it is no checkpoint"),
    "nothing for a step": ([*TO_HF, "{models}/none", *ASSETS], FAILURE, "there is no directory"),
    "torch_dist for torch_dcp": ([*TO_HF, "{models}/dist/release", *ASSETS], FAILURE, "torch_dist_to_hf reads it"),
    "torch_dcp for torch_dist": ([*DIST_AS_HF, "{models}/llama_dcp/release", *ASSETS], FAILURE, "dcp_to_hf reads it"),
    "a step converted into what it is": (["convert", "torch_dist_to_dcp", "--load-dir", "{models}/llama_dcp/release",
                                          "--save-dir", "{new}"],
                                         FAILURE, "is a torch_dcp checkpoint"),
    "torch_dist as a torch file": (["convert", "dcp_to_torch", "--dcp-dir", "{models}/dist/release",
                                    "--torch-save-path", "{new}.pt"],
                                   FAILURE, "torch_dist_to_dcp"),
    "safetensors for a torch file": (["convert", "torch_to_dcp", "--torch-save-path",
                                      "{models}/llama/model.safetensors", "--dcp-dir", "{new}"], FAILURE,
                                     "hf_to_dcp reads"),
    "a folder for a torch file": (["convert", "torch_to_dcp", "--torch-save-path", "{models}/llama", "--dcp-dir",
                                   "{new}"], FAILURE,
                                  "llama is a directory"),
    "damaged bytes": ([*TO_HF, "{models}/damaged/release", *ASSETS], FAILURE, "has the checksum"),
    "a step by another name": (["convert", "dcp_to_torch_dist", "--load-dir", "{models}/renamed", "--save-dir",
                                "{new}"], FAILURE,
                               "is no step by its name"),
}

# inspect
CASES |= {
    "inspect nothing": (["inspect"], USAGE, "inspect takes a PATH, or --diff A B"),
    "inspect what is not there": (["inspect", "{models}/none"], FAILURE, "there is no file or folder"),
    "inspect an empty folder": (["inspect", "{models}/empty"], FAILURE, "is no checkpoint"),
    "inspect text": (["inspect", "{models}/file"], FAILURE, "file"),
    "inspect a cut file": (["inspect", "{models}/cut/model.safetensors"], FAILURE, "model.safetensors"),
    "a filter that fits nothing": (["inspect", "{models}/llama", "--filter", "zzz"], USAGE, "no tensor or value of"),
    "a filter that fits a part": (["inspect", "{models}/llama", "--filter", "q_proj"], USAGE,
                                  'did you mean "*q_proj*", which fits 1 name?'),
    "a filter that is misspelt": (["inspect", "{models}/llama", "--filter", "model.norm.wieght"], USAGE,
                                  "did you mean model.norm.weight?"),
    "a filter of a difference": (["inspect", "--diff", "{models}/llama", "{models}/tied", "--filter", "zzz"], USAGE,
                                 "zzz"),
    "a filter in JSON": (["inspect", "{models}/llama", "--filter", "zzz", "--json"], USAGE, "zzz"),
    "inspect one of two": (["inspect", "--diff", "{models}/llama"], USAGE, "--diff"),
    "inspect one and two": (["inspect", "{models}/llama", "--diff", "{models}/llama", "{models}/tied"], USAGE,
                            "a PATH or --diff A B, not both"),
    "inspect a step of a file": (["inspect", "{models}/whole.pt", "--ckpt-step", "3"], FAILURE,
                                 "--ckpt-step goes with the directory"),
    "inspect a step that is not there": (["inspect", "{models}/run", "--ckpt-step", "3"], FAILURE,
                                         "it has iter_0000002"),
    "inspect with a misspelt flag": (["inspect", "{models}/llama", "--verfy"], USAGE, "did you mean --verify?"),
}


@pytest.mark.parametrize("name", CASES)
def test_ends_in_one_message_and_loses_nothing(models, tmp_path, name):
    before = state_of(models)
    check(CASES[name], models=models, new=tmp_path / "new")
    assert state_of(models) == before
    assert not list(tmp_path.iterdir())


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], value) for name, value in other.items())


def test_overwrite_replaces_what_is_there(models, tmp_path):
    """And only with it."""
    shutil.copytree(models / "qwen3", tmp_path / "hf")
    converted(*DCP_TO_HF[1:2], "--overwrite", "--load-dir", models / "llama_dcp" / "release", "--model-assets-dir",
              models / "llama", "--save-dir", tmp_path / "hf")
    assert same(weights(tmp_path / "hf"), weights(models / "llama"))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "llama"

    for source, flag in (("tied", "--dcp-dir"), ("llama", "--dcp-dir")):
        converted("hf_to_dcp", "--hf-dir", models / source, flag, tmp_path / "steps", "--overwrite")
    release = tmp_path / "steps" / "release"
    converted("dcp_to_hf", "--load-dir", release, "--model-assets-dir", models / "llama", "--save-dir",
              tmp_path / "back")
    assert same(weights(tmp_path / "back"), weights(models / "llama"))

    (tmp_path / "old.pt").write_bytes(b"old")
    converted("dcp_to_torch", "--dcp-dir", models / "tied_dcp" / "release", "--torch-save-path", tmp_path / "old.pt",
              "--overwrite")
    converted("torch_to_dcp", "--torch-save-path", tmp_path / "old.pt", "--dcp-dir", release, "--overwrite")
    done = run("inspect", "--diff", release, models / "tied_dcp" / "release")
    assert "0 tensors and 0 values differ" in done.stdout, done.stdout
    assert sorted(os.listdir(tmp_path / "steps")) == ["latest_checkpointed_iteration.txt", "release"]


def test_save_hf_into_what_is_there(models, tmp_path):
    """Before the first step."""
    network = [*NETWORK, "--normalization", "RMSNorm", "--swiglu", "--position-embedding-type", "rope",
               "--untie-embeddings-and-output-weights", "--disable-bias-linear", "--ffn-hidden-size", "32"]
    flags = ["pretrain", *network, *PRETRAIN[1 + len(NETWORK):], *RATE, *MOCK, "--save-hf"]
    before = state_of(models)
    for target, message in (("qwen3", "holds weights (model.safetensors)"), ("run", "holds a run's steps"),
                             ("file", "is no folder"), ("llama_dcp/release", "holds a step")):
        done = run(*flags, models / target)
        assert done.returncode == USAGE and "--save-hf" in done.stderr and message in done.stderr, done.stderr
        assert " iteration " not in done.stdout
    assert state_of(models) == before
    shutil.copytree(models / "qwen3", tmp_path / "hf")
    done = run(*flags, tmp_path / "hf", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "hf")["model.embed_tokens.weight"].shape[1] == 16


def test_a_config_that_nobody_knows_is_said_to_be_unchecked(models, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    said = converted("dcp_to_hf", "--load-dir", models / "llama_dcp" / "release", "--model-assets-dir", tmp_path,
                     "--save-dir", tmp_path / "hf")
    assert "the weights are not compared with config.json: gpt2 is no model that is known here" in said
    said = converted("hf_to_dcp", "--hf-dir", models / "bare", "--dcp-dir", tmp_path / "dcp")
    assert "the weights are not compared with config.json: there is none" in said


def test_settings_that_change_no_size_do_not_matter(models, tmp_path):
    """A model that is not computed here is converted all the same."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"hidden_act": "mish",
                                                              "rope_scaling": {"rope_type": "su", "factor": 4.0}}))
    converted("dcp_to_hf", "--load-dir", models / "llama_dcp" / "release", "--model-assets-dir", tmp_path, "--save-dir",
              tmp_path / "hf")
    assert same(weights(tmp_path / "hf"), weights(models / "llama"))


def test_the_latest_step_of_a_folder_is_converted(models, tmp_path):
    said = converted("dcp_to_hf", "--load-dir", models / "llama_dcp", "--model-assets-dir", models / "llama",
                     "--save-dir", tmp_path / "hf")
    assert f"step: {models}/llama_dcp/release" in said and same(weights(tmp_path / "hf"), weights(models / "llama"))


def test_inspect_shows_a_summary(models):
    said, rest = run("inspect", models / "run").stdout.split("\n\n")
    assert rest == "--all shows each tensor, value and file, --filter PATTERN some\n"
    whole = run("inspect", models / "run", "--all").stdout
    assert whole.startswith(said) and re.search(r"^model\.\S+ +float32 ", whole, re.M) and "\niteration " in whole
    part = run("inspect", models / "run", "--filter", "model.*").stdout
    assert "float32" in part.split("\n\n")[1] and "\niteration " not in part
    for part in ("torch_dcp step", "iteration 2", "saved by", "1 rank", "parameters", "float32", "optimizer", "exp_avg",
                 "random states", "gpt", "1 layer", "hidden size 16", "2 heads"):
        assert part in said, (part, said)
    said = run("inspect", models / "llama").stdout.split("\n\n")[0]
    for part in ("Hugging Face model", "12 tensors", "llama", "1 layer", "vocabulary 48"):
        assert part in said, (part, said)
    summary = json.loads(run("inspect", models / "run", "--json").stdout)["summary"]
    assert summary["parameters"] > 0 and summary["optimizer"] and summary["ranks"] == 1
