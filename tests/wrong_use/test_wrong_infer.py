"""`megashard infer`: its own flags, its data, its files and its model, each got wrong."""
import pathlib

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megashard import FAILURE, USAGE
from wrong_use import RATE, check, run, write_tokens

SHAPES = {
    "model.embed_tokens.weight": (64, 16), "lm_head.weight": (64, 16), "model.norm.weight": (16,),
    "model.layers.0.input_layernorm.weight": (16,), "model.layers.0.post_attention_layernorm.weight": (16,),
    **{f"model.layers.0.self_attn.{name}_proj.weight": (16, 16) for name in "qkvo"},
    **{f"model.layers.0.mlp.{name}_proj.weight": (32, 16) for name in ("gate", "up")},
    "model.layers.0.mlp.down_proj.weight": (16, 32),
}


@pytest.fixture(scope="module")
def places(folder):
    """The model of the others with weights, and copies of it that are damaged."""
    config = (folder / "model" / "config.json").read_text()

    def make(name, weights):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(config)
        save_file(weights, folder / name / "model.safetensors", metadata={"format": "pt"})

    torch.manual_seed(0)
    whole = {name: torch.randn(sizes) * 0.02 for name, sizes in SHAPES.items()}
    make("whole", whole)
    make("nan", whole | {"model.norm.weight": torch.full((16,), float("nan"))})
    make("lacks", {name: each for name, each in whole.items() if "up_proj" not in name})
    (folder / "text.txt").write_text("In the beginning")
    (folder / "empty").mkdir()
    write_tokens(folder / "long", 1)
    write_tokens(folder / "foreign", 64)
    return folder


def infer(*words, model="whole", data="long", length="39"):
    return ["infer", *(["--hf-model", f"{{folder}}/{model}"] if model else []),
            *(["--data-path", f"{{folder}}/{data}"] if data else []), *(["--seq-length", length] if length else []),
            *words]


LOG_PROBS = ["--log-probs", "{folder}/out.npy"]
CASES = {
    "latents of a model of tokens": (infer("--latents", "{folder}/out"), USAGE, "the model takes tokens; --latents"),
    "steps without latents": (infer(*LOG_PROBS, "--sampling-steps", "3"), USAGE, "--sampling-steps needs --latents"),
    "nothing to do": (infer(), USAGE, "nothing to do; give --log-probs FILE.npy, --into COLUMN, --scores FILE.npy, "
                      "--generate N, --latents DIR or --velocities DIR"),
    "a number without a file": (infer("--generate", "3"), USAGE,
                                "--generate N and --generated FILE.npy belong together"),
    "a file without a number": (infer("--generated", "x.npy"), USAGE,
                                "--generate N and --generated FILE.npy belong together"),
    "no whole number of tokens": (infer("--generate", "2.5", "--generated", "x.npy"), USAGE,
                                  'takes a number of tokens, got "2.5"'),
    "no tokens": (infer("--generate=0", "--generated=x.npy"), USAGE, 'takes a number of tokens, got "0"'),
    "fewer tokens than one": (infer("--generate", "-1", "--generated", "x.npy"), USAGE,
                              'takes a number of tokens, got "-1"'),
    "a file name forgotten": (infer("--log-probs"), USAGE, "--log-probs has no value"),
    "no data": (infer(*LOG_PROBS, data=None), USAGE, "give --data-path PREFIX"),
    "two data sets": (infer(*LOG_PROBS, "--data-path", "{folder}/long", "{folder}/foreign", data=None), USAGE,
                      "inference reads one data set"),
    "a folder as data": (infer(*LOG_PROBS, data="empty"), USAGE, "it is a folder; give the prefix"),
    "text as data": (infer(*LOG_PROBS, data="text.txt"), USAGE, "is text, and training reads tokens"),
    "tokens of another tokenizer": (
        infer(*LOG_PROBS, data="foreign"), FAILURE,
        "has the token 64, but the model's vocabulary has 64; use the data of its tokenizer"),
    "no length": (infer(*LOG_PROBS, length=None), USAGE, "--seq-length is missing"),
    "a file that is a folder": (infer("--log-probs", "{folder}/empty"), USAGE, "empty cannot be written"),
    "weights that are no numbers": (infer(*LOG_PROBS, model="nan"), FAILURE,
                                    "model.norm.weight holds NaN or infinity; take other files"),
    "a weight that is missing": (infer(*LOG_PROBS, model="lacks"), FAILURE, "model.layers.0.mlp.up_proj.weight"),
    "no batch": (infer(*LOG_PROBS, "--micro-batch-size", "0"), USAGE, "--micro-batch-size"),
    "a role without a file": (infer(*LOG_PROBS, "--role", "reference"), USAGE, "--role"),
    "a misspelt flag": (infer("--log-prob", "x.npy", "--generate", "1", "--generated", "y.npy"), USAGE,
                        "unknown flag --log-prob; did you mean --log-probs?"),
    "a flag that nobody knows": (infer(*LOG_PROBS, "--zzz"), USAGE,
                                 "unknown flag --zzz; `megashard infer --help` lists all."),
}


@pytest.mark.parametrize("name", CASES)
def test_ends_in_one_message(places, name):
    words, code, message = CASES[name]
    check((words, code, message), folder=places)


def test_without_a_model_all_of_it_is_asked_for(places):
    done = run(*[word.format(folder=places) for word in infer(*LOG_PROBS, model=None)])
    assert done.stderr.startswith("megashard: error: 5 things must change:\n  --hidden-size is missing; give it, or "
                                  "--hf-model DIR")
    assert done.returncode == USAGE


def test_all_that_is_missing_is_told_at_once(places):
    done = run("infer", "--hf-model", places / "whole", "--generate", "2")
    parts = ["--generate N and --generated FILE.npy belong together; give both.", "--seq-length is missing",
             "inference reads one data set; give --data-path PREFIX"]
    assert done.returncode == USAGE and all(part in line for part, line in zip(parts, done.stderr.splitlines()[1:]))
    done = run("infer", "--use-checkpoint-args")
    parts = ["--use-checkpoint-args needs --load", "inference reads one data set", "there is nothing to do"]
    assert done.returncode == USAGE and all(part in line for part, line in zip(parts, done.stderr.splitlines()[1:]))


def test_help_needs_neither_model_nor_data():
    assert "Runs a model over each document" in run("infer", "--help").stdout


def test_flags_of_training_change_nothing(places):
    """A launch script of training is one of inference with another subcommand: flags of training are ignored."""
    out = []
    for more in ([], [*RATE, "--train-iters", "7", "--global-batch-size", "24", "--lr-decay-style", "cosine",
                      "--lr-warmup-iters", "99", "--save", str(places / "not_made"), "--save-interval", "2"]):
        done = run(*[word.format(folder=places) for word in infer(*LOG_PROBS)], *more)
        assert done.returncode == 0, done.stderr
        out.append(np.load(places / "out.npy"))
    assert np.array_equal(out[0], out[1]) and not pathlib.Path(places / "not_made").exists()
