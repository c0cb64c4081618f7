"""Layers of multi-token prediction from published files: loss and every gradient against transformers' MtpLayer, in
fp32; converters, --save-hf and a resumed training keep them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpLayer

from megashard import FAILURE, USAGE, convert, losses, pretrain
from test_families import GROUPED, LATENT, LENGTH, LINEAR_HEADS, SHARED, SIZES, VOCAB, check_converters
from transformers_twin import check, gradients_of, make_model, model_logits, with_halves

HYBRID = SIZES | LINEAR_HEADS | dict(num_hidden_layers=4, num_key_value_heads=2, head_dim=16)
CASES = {
    "deepseek_v3": (2, SIZES | LATENT | GROUPED | dict(num_key_value_heads=6, n_group=4, topk_group=2,
                                                       num_nextn_predict_layers=2)),
    "glm4_moe": (1, SIZES | GROUPED | dict(num_key_value_heads=2, head_dim=16, num_nextn_predict_layers=1)),
    "qwen3_5_text": (1, HYBRID | dict(mtp_num_hidden_layers=1)),
    "qwen3_5_moe_text": (1, HYBRID | SHARED | dict(mtp_num_hidden_layers=1)),
    "qwen3_next": (1, HYBRID | SHARED | dict(mtp_num_hidden_layers=1, tie_word_embeddings=True)),
}
BARS = {"qwen3_5_text": 1e-5, "qwen3_5_moe_text": 1e-5, "qwen3_next": 1e-5}  # of the delta rule
OURS = {"mtp_block": "transformer_layer", "post_norm": "final_layernorm"}
BEHIND = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
UNDER_MTP = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc",
             "post_norm": "mtp.norm"}


def prediction_layers(model, depth):
    """With random weights, and transformers' classes for the layers inside."""
    decoder = model.get_decoder()
    norm = type(decoder.norm)
    layers = torch.nn.ModuleList(
        MtpLayer(model.config, type(decoder.layers[-1]), norm, len(decoder.layers) - 1) for _ in range(depth))
    for name, parameter in layers.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.03)
    return layers


def by_transformers(model, layers, tokens, labels, scale=0.1):
    model.zero_grad()
    layers.zero_grad()
    decoder = model.get_decoder()
    states = decoder(tokens).last_hidden_state
    logits = model.lm_head(states)
    positions = torch.arange(LENGTH)[None]
    tables = decoder.rotary_emb(states, position_ids=positions)
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    later, predicted = tokens, 0
    for k, layer in enumerate(layers):
        later = torch.cat([later[:, 1:], torch.zeros_like(later[:, :1])], 1)
        embedded = decoder.embed_tokens(later)
        mask = create_causal_mask(config=model.config, inputs_embeds=embedded, attention_mask=None,
                                  past_key_values=None, position_ids=positions)
        states = layer(embedded, states, position_embeddings=tables, attention_mask=mask, position_ids=positions,
                       past_key_values=None)
        seen = LENGTH - 1 - k
        predicted = predicted + cross_entropy(model.lm_head(states[:, :seen]).flatten(0, 1),
                                              labels[:, k + 1:].flatten())
    losses = losses + scale / len(layers) * predicted
    losses.mean().backward()
    gradients = dict(gradients_of(model))
    ours = {f"model.mtp_layers.{name}": each.grad for name, each in layers.named_parameters()}
    for theirs, name in OURS.items():
        ours = {key.replace(f".{theirs}.", f".{name}."): value for key, value in ours.items()}
    gradients |= with_halves(ours, transposed=False)
    return {"logits": logits.detach(), "loss": losses.detach()} | {
        f"grad.{key}": value for key, value in gradients.items()}


def in_files(family, layers, first):
    """The layers' tensors as files have them: experts one by one."""
    stored = {}
    for name, tensor in [*layers.named_parameters(), *layers.named_buffers()]:
        layer, part = name.split(".", 1)
        inside, leaf = part.rsplit(".", 1)
        behind = family in ("deepseek_v3", "glm4_moe")
        path = f"model.layers.{first + int(layer)}" if behind else "mtp.layers.0"
        tensor = tensor.detach().clone()
        if inside in BEHIND:
            stored[f"{path}.{BEHIND[inside]}.{leaf}" if behind else f"{UNDER_MTP[inside]}.{leaf}"] = tensor
            continue
        inside = inside.removeprefix("mtp_block.")
        if not inside.endswith("mlp.experts"):
            stored[f"{path}.{inside}.{leaf}"] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            pieces = zip(("gate_proj", "up_proj"), matrix.chunk(2)) if leaf == "gate_up_proj" else [(leaf, matrix)]
            stored |= {f"{path}.{inside}.{expert}.{each}.weight": piece.clone() for each, piece in pieces}
    return stored


def write_case(folder, family):
    depth, options = CASES[family]
    torch.manual_seed(1)
    model = make_model(AutoConfig.for_model(family, **options), attn_implementation="eager",
                       experts_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.03)
    layers = prediction_layers(model, depth)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors") | in_files(family, layers, options["num_hidden_layers"])
    if family == "deepseek_v3":  # copies, which are not read
        weights["model.layers.3.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["model.layers.3.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokens, labels = torch.randint(0, VOCAB, (2, LENGTH)), torch.randint(0, VOCAB, (2, LENGTH))
    save_file({"tokens": tokens, "labels": labels}, folder / "input.bin")
    (folder / "flags.json").write_text(json.dumps([["--hf-model", str(folder)], ["--mtp-num-layers", str(depth)]]))
    return model, layers, tokens, labels


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predicting")
    wanted = {}
    for family in CASES:
        model, layers, *batch = write_case(folder / family, family)
        rough = by_transformers(model, layers, *batch)
        wanted[family] = by_transformers(model.double(), layers.double(), *batch), rough
    done = model_logits("--each", *(folder / family for family in CASES))
    assert done.returncode == 0, done.stderr[:2000]
    return folder, wanted


@pytest.mark.parametrize("family", CASES)
def test_same_as_transformers(compared, family):
    folder, wanted = compared
    error = folder / family / "error.txt"
    assert not error.exists(), error.read_text()
    exact, rough = wanted[family]
    check(load_file(folder / family / "output.bin"), exact, rough=rough, bar=BARS.get(family, 2e-6))


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_moe_text"])
def test_converters_both_ways(compared, tmp_path, family):
    check_converters(compared[0] / family, tmp_path)


TRAINING = ("--use-torch-fsdp2 --ckpt-format torch_dcp --mock-data --seq-length 16 --micro-batch-size 1 "
            "--global-batch-size 4 --lr 1e-2 --eval-iters 1 --eval-interval 2 --tokenizer-type NullTokenizer "
            "--vocab-size 210")


def train(folder, model, depth, *flags, **options):
    return pretrain(folder, "--hf-model", model, "--mtp-num-layers", depth, *flags, ranks=2, defaults=TRAINING,
                    config="sub_modules_to_wrap: ['model.layers.{*}', 'model.mtp_layers.{*}']\n"
                           "num_to_forward_prefetch: 1\nnum_to_backward_prefetch: 1\n", **options)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_moe_text"])
def test_a_training_saves_them_and_goes_on(compared, tmp_path, family):
    depth, model = CASES[family][0], compared[0] / family
    whole, out = train(tmp_path, model, depth, "--train-iters", 4, "--lr-decay-iters", 4)
    assert f"mtp_{depth} loss: " in out
    assert all(abs(step["mtp_1 loss"] - step["loss"]) < 1 for step in whole)  # random models: both near ln V
    assert whole[0]["mtp_1 loss"] != whole[0]["loss"]
    save, written = tmp_path / "save", tmp_path / "written"
    half, _ = train(tmp_path, model, depth, "--train-iters", 4, "--lr-decay-iters", 4, "--exit-interval", 2, "--save",
                    save, "--save-interval", 100, "--save-hf", written)
    rest, _ = train(tmp_path, model, depth, "--train-iters", 4, "--lr-decay-iters", 4, "--load", save)
    assert losses([*half[:2], *rest[-2:]]) == losses(whole)

    source, saved = (load_file(folder / "model.safetensors") for folder in (model, written))
    copies = {name for name in source if name.endswith((".shared_head.head.weight", ".embed_tokens.weight"))
              and not name.startswith("model.embed")}
    assert sorted(saved) == sorted(set(source) - copies)
    convert("dcp_to_hf", "--load-dir", save, "--save-dir", tmp_path / "converted", "--model-assets-dir", written)
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    assert sorted(converted) == sorted(saved)
    assert all(torch.equal(converted[name], value) for name, value in saved.items())
    config = json.loads((written / "config.json").read_text())
    assert depth in (config.get("num_nextn_predict_layers"), config.get("mtp_num_hidden_layers"))


@pytest.mark.parametrize("family, depth, says, code", [
    ("qwen3_5_text", 2, "files of qwen3_5_text have one layer of multi-token prediction; say 1", USAGE),
    ("glm4_moe", 2, "are not those of the model; missing: model.mtp_layers.1.", FAILURE),
])
def test_layers_that_files_lack(compared, tmp_path, family, depth, says, code):
    _, out = train(tmp_path, compared[0] / family, depth, "--train-iters", 1, expect=code)
    assert says in out


def test_a_family_without_them(tmp_path):
    model = make_model(AutoConfig.for_model("llama", **SIZES | dict(num_key_value_heads=2)))
    model.save_pretrained(tmp_path / "llama")
    _, out = train(tmp_path, tmp_path / "llama", 1, "--train-iters", 1, expect=USAGE)
    assert "--mtp-num-layers 1: llama has no layers of multi-token prediction that are known here" in out
