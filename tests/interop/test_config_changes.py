"""Odd and contradictory config.json: transformers' loss and gradient, or an error that names the key.

usage: test_config_changes.py COUNT [SEED]   as many of all changes by lot, and each that fails"""
import json
import logging
import os
import sys
import tempfile
import pathlib

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from config_changes import ABSENT, FAMILIES, LENGTH, VOCAB, some
from megashard import INTEROP, run
from transformers_twin import make_model, model_class

BAR = 1e-5  # of the loss; other kernels, other orders of sums
GRADIENT_BAR = 1e-4  # of its norm


def make_models(folder):
    """A directory for each family, every weight random."""
    torch.manual_seed(0)
    for family, config in FAMILIES.items():
        model = make_model(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_norm = parameter.dim() == 1
                scale = 0.1 if is_norm else 0.05 if "qwen3_5" in family or family == "qwen3_next" else 0.3
                parameter.copy_(is_norm * 1.0 + torch.randn_like(parameter) * scale)
        model.save_pretrained(folder / family)
    tokens = torch.randint(0, VOCAB, (2, LENGTH + 1))
    tokens[0, 3], tokens[1, 5] = VOCAB - 1, 7
    inputs = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    save_file(inputs, folder / "input.bin")
    return inputs


def place(folder, number, family, change):
    made = folder / str(number)
    made.mkdir()
    config = json.loads((folder / family / "config.json").read_text()) | change
    (made / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != ABSENT}))
    os.link(folder / family / "model.safetensors", made / "model.safetensors")
    os.link(folder / "input.bin", made / "input.bin")
    return made


def by_transformers(folder, inputs, family=""):
    """(loss, norm of the gradient), or the reason of the failure."""
    try:
        model, notes = model_class(family).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        strange = [str(name) for kind in ("missing_keys", "mismatched_keys", "unexpected_keys")
                   for name in notes[kind] if "inv_freq" not in str(name)]
        if strange:
            return "weights made up or dropped: " + ", ".join(strange[:3])
        out = model.train()(inputs["tokens"])
        loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), inputs["labels"].flatten())
        if out.get("aux_loss") is not None:
            loss = loss + model.config.router_aux_loss_coef * out.aux_loss
        loss.backward()
        squares = [parameter.grad.square().sum() for parameter in model.parameters() if parameter.grad is not None]
        return float(loss.detach()), float(torch.stack(squares).sum().sqrt())
    except Exception as error:  # of any kind: it does not train
        return f"{type(error).__name__}: {error}"


def by_megashard(folder):
    if (folder / "error.txt").exists():
        return (folder / "error.txt").read_text()
    out = load_file(folder / "output.bin")
    head = out.get("grad.lm_head.weight")
    if head is not None and head.equal(out["grad.model.embed_tokens.weight"]):
        del out["grad.lm_head.weight"]  # tied: one gradient under two names
    squares = [value.square().sum() for key, value in out.items() if key.startswith("grad.")]
    return float(out["loss"].mean()), float(torch.stack(squares).sum().sqrt())


def keys_of(change):
    """All keys, also of nested objects."""
    for key, value in change.items():
        yield key
        yield from keys_of(value) if isinstance(value, dict) else ()


def fault(change, wanted, ours, told=""):
    """The mistake in our result; None if it is right."""
    if isinstance(ours, str) and "model_type" in change:
        return None  # another family may miss any key
    if isinstance(ours, str):
        names = [*keys_of(change), "weights"]
        return None if any(name in ours for name in names) else f"the error names none of {names}: {ours[:300]}"
    if {"attention_dropout", "residual_dropout", "resid_pdrop", "embedding_dropout"} & change.keys():
        return None  # random
    if isinstance(wanted, str):
        if "lm_head.weight" in wanted and "has no lm_head.weight, and config.json says" in told:
            return None  # transformers' head is random, ours the embeddings
        if "Could not find a `sliding_window`" in wanted:
            return None  # transformers makes the mask of sliding layers also where no layer slides, and fails
        return f"{ours}, where transformers has no answer ({wanted[:200]})"
    if any(abs(a - b) > bar * abs(b) for a, b, bar in zip(ours, wanted, (BAR, GRADIENT_BAR))) or wanted[0] != wanted[0]:
        return f"{ours} and not {wanted}"
    return None


def compared(folder, cases):
    """[(family, change, fault)] for the wrong answers."""
    inputs = make_models(folder)
    folders = [place(folder, number, *case) for number, case in enumerate(cases)]
    for first in range(0, len(folders), 200):
        run(INTEROP / "model_logits", "--each", *folders[first:first + 200], timeout=300)
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    try:
        found = []
        for each, (family, change) in zip(folders, cases):
            told = each / "told.txt"
            wrong = fault(change, by_transformers(each, inputs, family), by_megashard(each),
                          told.read_text() if told.exists() else "")
            if wrong:
                found.append((family, change, wrong))
        return found
    finally:
        logging.disable(logging.NOTSET)


def bare(weights):
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


FILES = {  # family, change of config.json, change of the weights, our error; None: transformers' loss
    "names of a decoder without a head": ("qwen2_tied", {}, bare, None),
    "a head that is the embeddings": ("qwen2_tied", {}, lambda weights: weights | {
        "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, None),
    "a head that is not": ("qwen2", {"tie_word_embeddings": True}, dict,
                           'lm_head.weight than for model.embed_tokens.weight, and the model one weight for both: '
                           'config.json says "tie_word_embeddings": true. Write false there'),
    "layers whose positions are none": ("qwen2", {"rope_parameters": {"full_attention": None}}, dict,
                                        "rope_parameters has an object full_attention, but all layers of this family"),
    "a scaling by its old name": ("gemma3_text", {"rope_parameters": ABSENT, "rope_scaling": {"type": "linear",
                                                                                             "factor": 3.0}}, dict,
                                  'rope_scaling.type "linear": transformers keeps this family\'s default positions'),
    "a compiled model": ("qwen2", {}, lambda weights: {f"_orig_mod.{name}": tensor for name, tensor in weights.items()},
                         'their names have "_orig_mod.", the mark of torch.compile, in them'),
}


def test_what_the_files_hold(tmp_path):
    inputs = make_models(tmp_path)
    folders = []
    for number, (family, change, edit, _) in enumerate(FILES.values()):
        folders.append(place(tmp_path, number, family, change))
        (folders[-1] / "model.safetensors").unlink()
        save_file(edit(load_file(tmp_path / family / "model.safetensors")), folders[-1] / "model.safetensors",
                  metadata={"format": "pt"})
    run(INTEROP / "model_logits", "--each", *folders)
    for folder, (name, (_, change, _, message)) in zip(folders, FILES.items()):
        ours = by_megashard(folder)
        if message:
            assert message in ours, name
        else:
            assert not isinstance(ours, str), f"{name}: {ours}"
            assert fault(change, by_transformers(folder, inputs), ours) is None, name


def test_80_of_them(tmp_path):
    assert compared(tmp_path, some(80, seed=34)) == []


@pytest.mark.slow
def test_1500_of_them(tmp_path):
    assert compared(tmp_path, some(1500, seed=1500)) == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        wrong = compared(pathlib.Path(folder), some(int(sys.argv[1]), int((sys.argv + ["0"])[2])))
    for family, change, why in wrong:
        print(family, json.dumps(change), why, sep="\t")
    print(f"{len(wrong)} failed")
