"""Models, Hugging Face directories and conversations that do not fit."""
import json
import struct

import numpy as np
import pytest

from megashard import FAILURE, USAGE
from wrong_use import ALL_TRAINING, FROM_MODEL, LOOP, RATE, check, run

EXPERT_RANKS = ["--expert-model-parallel-size"]
CASES = {
    "no model folder": ([*FROM_MODEL, "{folder}/none"], USAGE, "none; --hf-model takes a Hugging Face model directory"),
    "a model without weights": ([*FROM_MODEL, "{folder}/model"], FAILURE, "has neither model.safetensors nor"),
    "a flag against config.json": ([*FROM_MODEL, "{folder}/model", "--from-scratch", "--num-layers", "3"], USAGE,
                                   "--num-layers 3 contradicts the model's config.json, which says 1: leave the flag"),
    "experts that cannot be shared out": (
        ["launch", "-n", "2", "--", *FROM_MODEL, "{folder}/experts", "--from-scratch", *EXPERT_RANKS, "2"], USAGE,
        "--expert-model-parallel-size 2 does not divide the 3 experts of the model; choose a number that does"),
    "a misspelt model": ([*FROM_MODEL, "{folder}/model", "--from-scratch", "--model", "LlamaForCausalML"], USAGE,
                         "no model is registered for architecture LlamaForCausalML; known are: "),
    "what a misspelt model may mean": (
        [*FROM_MODEL, "{folder}/model", "--from-scratch", "--model", "LlamaForCausalML"], USAGE,
        "; did you mean LlamaForCausalLM?"),
    "a model without experts": (
        ["launch", "-n", "2", "--", *FROM_MODEL, "{folder}/model", "--from-scratch", *EXPERT_RANKS, "2"], USAGE,
        "--expert-model-parallel-size 2 needs a model with experts, and this one has none; leave it out"),
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
ANOTHER = {  # a directory's files, and a part of the message; False: config.json is not there, None: as it should be
    "an empty directory": ({"config.json": False}, "must be a Hugging Face model directory with a config.json in it"),
    "a config that is no JSON": ({"config.json": "{bad"}, "config.json is no JSON, or was cut short"),
    "a config that is a list": ({"config.json": "[]"}, "config.json is not a JSON object"),
    "an unknown architecture": ({"config.json": {"model_type": "mamba"}},
                                "model_type mamba is not supported; known are: cohere2, deepseek_v2, deepseek_v3"),
    "a config of no model": ({"config.json": {"model_type": None}}, "config.json: model_type is missing"),
    "a config without a size": ({"config.json": {"hidden_size": None}},
                                "hidden_size is missing; take the file that was published with"),
    "a size in words": ({"config.json": {"hidden_size": "16"}}, 'hidden_size has an unexpected type: "16"'),
    "heads that do not divide": ({"config.json": {"num_key_value_heads": 3}},
                                 "num_attention_heads 2 is not divisible by"),
    "an unknown activation": ({"config.json": {"hidden_act": "mish"}},
                              "hidden_act mish is not supported; known are silu"),
    "unknown positions": ({"config.json": {"rope_scaling": {"rope_type": "su", "factor": 2}}},
                          "rope_type su is not supported; known are default, linear, llama3, yarn, dynamic and"),
    "positions in two places": (
        {"config.json": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": YARN}},
        'rope_parameters and rope_scaling describe the same positions, and not alike: they say rope_type "default" and '
        '"yarn"; factor nothing and 4.0; original_max_position_embeddings nothing and 8; rope_theta 1000000.0 and '
        "10000.0. Put what is meant, rope_theta included, into one of them and take the other out"),
    "rope_theta in two places": ({"config.json": {"rope_theta": 500, "rope_parameters": YARN | {"rope_theta": 10000}}},
                                 "rope_theta says 500 and rope_parameters.rope_theta says 10000: keep the one that is"),
    "a part of a head that turns": ({"config.json": {"partial_rotary_factor": 0.5}},
                                    "partial_rotary_factor 0.5: this family turns all channels of a head"),
    "padding beyond the vocabulary": ({"config.json": {"pad_token_id": 64}},
                                      "pad_token_id 64 is no token of the vocabulary, of 64; write null"),
    "two sets of weights": ({"model.safetensors": None, "model-00001-of-00001.safetensors": None,
                             "model.safetensors.index.json": {"weight_map": {
                                 "model.norm.weight": "model-00001-of-00001.safetensors"}}},
                            "has two sets of weights: model.safetensors, which transformers reads, and the 1 of "
                            "model.safetensors.index.json; move away the one that is not the model"),
    "quantised weights": ({"config.json": {"quantization_config": {"quant_method": "gptq"}}},
                          "the weights are quantised"),
    "PEFT adapters": ({"config.json": False, "adapter_config.json": "{}"},
                      "holds PEFT adapters, not a model: give the model that"),
    "adapters beside a config": ({"adapter_model.safetensors": "x"},
                                 "holds PEFT adapters, not a model; merge them first"),
    "a GGUF file": ({"config.json": False, "model.gguf": "GGUF"},
                    "has a GGUF file, which is for inference by llama.cpp"),
    "a GGUF file beside a config": ({"model.gguf": "GGUF"}, "has a GGUF file, which is for inference by llama.cpp"),
    "Meta's form": ({"config.json": False, "params.json": "{}", "consolidated.00.pth": "x"},
                    "has a model in Meta's form"),
    "a run's checkpoints": ({"config.json": False, "latest_checkpointed_iteration.txt": "2"},
                            "give it as --load, or write a model of it"),
    "pickled weights": ({"pytorch_model.bin": "x"},
                        "has pickled weights (pytorch_model*.bin) only; write safetensors once"),
    "pieces without an index": ({"model-00001-of-00002.safetensors": None},
                                "no model.safetensors.index.json, which names them; fetch"),
    "a piece that is missing": ({"model-00001-of-00002.safetensors": None, "model.safetensors.index.json": {
        "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors",
                       "b": "model-00002-of-00002.safetensors"}}},
        "names 2 files, of which model-00002-of-00002.safetensors is missing; fetch the directory again"),
    "an index without names": ({"model.safetensors.index.json": "{}"}, "is no index: it has no weight_map"),
    "weights that were not fetched":
    ({"model.safetensors": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"},
     "model.safetensors is a Git LFS pointer, not the weights; fetch them"),
    "weights without bytes": ({"model.safetensors": ""}, "too short for a safetensors file; fetch it again"),
    "weights that were cut off": ({"model.safetensors": 3000}, "the file is truncated or damaged; fetch it again"),
    "weights cut in their header": ({"model.safetensors": 100}, "is announced, and the file has 100; fetch it again"),
    "weights of a wider model": ({"config.json": {"hidden_size": 32}, "model.safetensors": None},
                                 "of other sizes: model.embed_tokens.weight [64, 16] for model.embed_tokens.weight "
                                 "[64, 32]"),
    "weights of fewer layers": ({"config.json": {"num_hidden_layers": 2}, "model.safetensors": None},
                                "missing: model.layers.1."),
    "weights in integers": ({"model.safetensors": "I32"}, "of integers, so quantised: model.embed_tokens.weight"),
}
INFER = ["infer", "--hf-model", "{place}", "--log-probs", "{place}/out.npy", "--data-path", "{folder}/good",
         "--seq-length"]
FLAGS = {
    "a name of the hub": (["Qwen/Qwen3-0.6B"],
                          "run `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B` (huggingface-cli of older "
                          "versions), then give --hf-model Qwen3-0.6B"),
    "a name in the hub's cache": (["some/model"],
                                  "its files lie in the hub's cache: give --hf-model {folder}/hub/models--some--model/"
                                  "snapshots/abc"),
    "a short name of the hub": (["gpt2"], "there is no folder gpt2; --hf-model takes a Hugging Face model directory"),
    "a GGUF file itself": (["{folder}/none.gguf"],
                           "is a GGUF file, which is for inference by llama.cpp; give the original"),
    "a file of the model": (["{folder}/model/config.json"], "is a file; give its folder, --hf-model {folder}/model"),
    "a vocabulary that is not the model's": (["{folder}/model", "--tokenizer-type", "NullTokenizer", "--vocab-size",
                                              "62"],
                                             "--vocab-size 62 contradicts the model's config.json, which says 64"),
}

SEES = ["launch", "-n", "2", "--", "pretrain", "--hf-model", "{folder}/sees", "--from-scratch", "--seq-length", "16",
        *LOOP, *RATE, *ALL_TRAINING, "--data-path"]
CASES |= {
    "conversations in which nothing is learnt": ([*SEES, "{folder}/masked"], USAGE,
                                                 "masked every label is masked; prepare it again so that answers"),
    "a conversation's token beyond the vocabulary": ([*SEES, "{folder}/beyond"], FAILURE,
                                                     'beyond" holds token 60 (in sample'),
    "a picture that the model cannot merge": ([*SEES, "{folder}/uneven"], FAILURE,
                                              "image_grid_thw[0] is [1, 3, 4]: all must be"),
    "pictures of another model": ([*SEES, "{folder}/pixels"], FAILURE, "pixel_values [8, 96] must be [8, 24]"),
    "more places than pictures": ([*SEES, "{folder}/places"], FAILURE,
                                  "has a place for a further image (token 50) at 4"),
    "a picture larger than its place": ([*SEES, "{folder}/larger"], FAILURE,
                                        "image 0 of image_grid_thw has 4 features, but only 2 tokens 50 stand for it"),
    "a set of pictures that is cut off": ([*SEES, "{folder}/cut"], FAILURE, "cut.vision.safetensors"),
    "a conversation that is too long":
    ([*[("4" if before == "--seq-length" else word) for before, word in zip(["", *SEES], SEES)],
      "{folder}/chats"], FAILURE,
     "it must have from 2 to --seq-length + 1 = 5: raise --seq-length, or write the set with"),
    "heads that two ranks cannot share": ([*SEES, "{folder}/chats", "--context-parallel-size", "2"], USAGE,
                                          "Qwen2_5_VLForConditionalGeneration has 3 attention heads, which 2 ranks of "
                                          "a sequence"),
}


@pytest.mark.parametrize("name", CASES)
def test_ends_in_one_message(folder, name):
    check(CASES[name], folder=folder)


SHAPES = {"model.embed_tokens": [64, 16], "lm_head": [64, 16], "model.norm": [16], "model.layers.0.input_layernorm":
          [16],
          "model.layers.0.post_attention_layernorm": [16], "model.layers.0.mlp.gate_proj": [32, 16],
          "model.layers.0.mlp.up_proj": [32, 16], "model.layers.0.mlp.down_proj": [16, 32],
          **{f"model.layers.0.self_attn.{name}_proj": [16, 16] for name in "qkvo"}}


def weights(dtype="F32"):
    """A safetensors file of zeros for the fixture's model."""
    header, end = {}, 0
    for name, shape in SHAPES.items():
        start, end = end, end + 4 * int(np.prod(shape))
        header[f"{name}.weight"] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def make_model(folder, place, files):
    place.mkdir(exist_ok=True)
    config = json.loads((folder / "model" / "config.json").read_text())
    for name, content in {"config.json": {}, **files}.items():
        if name == "config.json" and isinstance(content, dict):
            content = json.dumps({key: value for key, value in (config | content).items() if value is not None})
        elif name.endswith(".safetensors") and content in (None, "I32"):
            content = weights(content or "F32")
        elif isinstance(content, int) and content is not False:
            content = weights()[:content]
        elif isinstance(content, dict):
            content = json.dumps(content)
        if content is not False:
            (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("name", ANOTHER)
def test_a_directory_that_is_no_model(folder, tmp_path, name):
    files, message = ANOTHER[name]
    make_model(folder, tmp_path, files)
    code = USAGE if "config.json" in files and "model.safetensors" not in files else FAILURE  # what config.json says
    check(([*FROM_MODEL, "{place}"], code, message), place=tmp_path)


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_that_names_no_model(folder, name, monkeypatch):
    cached = folder / "hub" / "models--some--model"
    (cached / "snapshots" / "abc").mkdir(parents=True, exist_ok=True)
    (cached / "snapshots" / "abc" / "config.json").write_text("{}")
    (cached / "refs").mkdir(exist_ok=True)
    (cached / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "hub"))
    words, message = FLAGS[name]
    check(([*FROM_MODEL, *words], USAGE, message.format(folder=folder)), folder=folder)


HUB = "Qwen/Qwen3-0.6B"
CONVERTED = {"hf_to_dcp": (["--hf-dir", HUB, "--dcp-dir", "{place}/out"], "--hf-dir"),
             "hf_to_torch_dist": (["--hf-dir", HUB, "--save-dir", "{place}/out"], "--hf-dir"),
             "dcp_to_hf": (["--load-dir", "x", "--save-dir", "{place}/out", "--model-assets-dir", HUB],
                           "--model-assets-dir"),
             "torch_dist_to_hf": (["--load-dir", "x", "--save-dir", "{place}/out", "--model-assets-dir", HUB],
                                  "--model-assets-dir"),
             "dcp_to_torch_dist": (["--load-dir", "x", "--save-dir", "{place}/out", "--megatron-layout",
                                    "--model-assets-dir", HUB],
                                   "--model-assets-dir")}


@pytest.mark.parametrize("name", CONVERTED)
def test_a_name_of_the_hub_for_a_converter(tmp_path, name):
    words, flag = CONVERTED[name]
    check((["convert", name, *words], USAGE, f"run `hf download {HUB} --local-dir Qwen3-0.6B` (huggingface-cli of "
           f"older versions), "
           f"then give {flag} Qwen3-0.6B"), place=tmp_path)


def test_null_tokenizer_adds_one_token(folder, tmp_path):
    """--vocab-size 63 means the 64 tokens of config.json; without a tokenizer the last one ends mock documents."""
    make_model(folder, tmp_path, {"model.safetensors": None})
    for words in (["--tokenizer-type", "NullTokenizer", "--vocab-size", "63"], []):
        done = run(*FROM_MODEL, tmp_path, *words)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", ["pretrain", "infer"])
def test_a_sequence_beyond_the_models_positions_is_warned_of(folder, tmp_path, program):
    make_model(folder, tmp_path, {"model.safetensors": None})
    flags = {"pretrain": [*LOOP, *RATE, *ALL_TRAINING], "infer": ["--log-probs", tmp_path / "out.npy"]}[program]
    done = run(program, "--hf-model", tmp_path, "--seq-length", "40", "--data-path", folder / "good", *flags)
    assert done.returncode == 0, done.stderr
    assert "WARNING: --seq-length 40 is more than the 16 positions (max_position_embeddings)" in done.stdout
    assert '"rope_type": "linear", "factor": 3.0 in the rope_parameters of config.json' in done.stdout


def test_documents_longer_than_a_sequence(folder, tmp_path):
    make_model(folder, tmp_path, {"model.safetensors": None})
    check(([*INFER, "16"], FAILURE, "has 40 tokens; it must have 1 to 17, which is --seq-length and one: give "
           "--seq-length 39"),
          place=tmp_path, folder=folder)


def test_a_launch_lines_flag_of_untied_weights_on_a_tied_model(folder, tmp_path):
    """config.json decides; the error for a later change of it names the changed key."""
    tied = {"config.json": {"tie_word_embeddings": True}, "model.safetensors": None}
    make_model(folder, tmp_path / "model", tied)
    done = run(*FROM_MODEL, tmp_path / "model", "--untie-embeddings-and-output-weights", "--save", tmp_path / "run",
               "--save-interval", "2")
    assert done.returncode == 0, done.stderr
    assert "--untie-embeddings-and-output-weights is not used: " in done.stdout
    make_model(folder, tmp_path / "model", {"config.json": {"tie_word_embeddings": False}})
    check(([*FROM_MODEL, "{place}/model", "--load", "{place}/run"], USAGE,
           'its model was tied; write "tie_word_embeddings": true into {place}/model/config.json'.format(
               place=tmp_path)), place=tmp_path)
