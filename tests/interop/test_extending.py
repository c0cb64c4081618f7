"""The recipes of docs/extending.md, carried out: their code is put into a copy of the tree, built, and trained with."""
import math
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from transformers import MinistralConfig, MinistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

import megashard
from megashard import BUILD, ROOT, environment, losses
from conversations import write_conversation_set

PAGE = (ROOT / "docs" / "extending.md").read_text()
# `FILE`, behind `TEXT`:     and the code in a block below it
EDIT = re.compile(r"^`(?P<file>[^`\n]+)`, "
                  r"(?:a new file|(?P<where>behind|in front of|in place of) `(?P<text>[^`\n]+)`):\n"
                  r"```\w+\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
EDITS = [match.groupdict() for match in EDIT.finditer(PAGE)]


def apply(edit, tree):
    path = tree / edit["file"]
    if edit["where"] is None:
        assert not path.exists()
        path.write_text(edit["code"])
        return
    lines = path.read_text().splitlines(keepends=True)
    places = [number for number, line in enumerate(lines) if edit["text"] in line]
    assert len(places) == 1, f"{edit['text']!r} stands on {len(places)} lines of {edit['file']}"
    first, last = {"behind": (1, 1), "in front of": (0, 0), "in place of": (0, 1)}[edit["where"]]
    lines[places[0] + first:places[0] + last] = [edit["code"]]
    path.write_text("".join(lines))


def copied_tree(folder):
    """The repository's files, and its build folder but for the tests' programs; times stay, as ninja goes by them."""
    tree = folder / "tree"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True,
                            text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    shutil.copytree(BUILD, tree / BUILD.relative_to(ROOT), symlinks=True,
                    ignore=lambda path, names: ["tests"] if path == str(BUILD) else [])
    return tree


def in_place_of_root(tree, *command):
    """The command, for which the copy stands at the repository's path: what ninja knows of the build folder holds, and
    only what has changed is compiled."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    script = 'mount --bind "$0" "$1" && cd "$1" && shift && exec "$@"'
    return ["unshare", "--mount", *user, "sh", "-c", script, tree, ROOT, *command]


def without_optimisations(folder):
    """An environment in which c++ does not optimise, which saves some of its time."""
    folder.mkdir()
    compiler = folder / "c++"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("c++")} "$@" -O0\n')
    compiler.chmod(0o755)
    return environment(PATH=f"{folder}:{os.environ['PATH']}", CCACHE_COMPILERCHECK="content")


def test_every_block_of_the_page_says_where_it_goes():
    assert len(EDITS) == PAGE.count("\n```") // 2 > 10


def test_a_loss_takes_one_file_beside_its_own():
    section = PAGE.split("\n## A loss\n")[1].split("\n## ")[0]
    edits = [match.groupdict() for match in EDIT.finditer(section)]
    assert len({edit["file"] for edit in edits if edit["where"]}) <= 1
    assert len([edit for edit in edits if edit["where"] is None]) == 1


def test_a_callback_touches_no_file():
    section = PAGE.split("\n## A callback\n")[1].split("\n## ")[0]
    assert [edit["where"] for edit in map(re.Match.groupdict, EDIT.finditer(section))] == [None]


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """The build folder of the program with all recipes in it."""
    tree = copied_tree(tmp_path_factory.mktemp("extended"))
    for edit in EDITS:
        apply(edit, tree)
    if subprocess.run(in_place_of_root(tree, "true"), capture_output=True).returncode != 0:
        pytest.skip("nothing can be mounted here, and a build from nothing takes too long")
    build = BUILD.relative_to(ROOT)
    megashard.run(*in_place_of_root(tree, "ninja", "-C", build, "launch/megashard"), timeout=1500,
                  env=without_optimisations(tree.parent / "compiler"))
    return tree / build


@pytest.fixture()
def libraries(extended, monkeypatch):
    """Runs go to the program with all recipes; it names the other folder's libraries, and needs its own."""
    monkeypatch.setattr(megashard, "PROGRAM", extended / "launch" / "megashard")
    return environment(LD_LIBRARY_PATH=f"{extended}:{extended / 'launch'}")


def test_the_recipes_work_together(libraries, folder):
    def pretrain(**options):
        return megashard.pretrain(folder, "--data-path", folder / "counted", defaults=training, env=libraries,
                                  **options)

    document = " ".join(str(3 + number % 7) for number in range(50))
    (folder / "counted.numbers.txt").write_text(f"{document}\n" * 12)
    training = megashard.network() + ("--split 100,0,0 --micro-batch-size 2 --global-batch-size 4 --train-iters 8 "
                                      "--lr 1e-2 --log-interval 1 --optimizer lion --lr-decay-style square-root "
                                      "--log-samples-per-second " + megashard.RUN)
    steps, out = pretrain(ranks=2)
    assert "> training data: 12 documents, 600 tokens" in out
    assert [step["lr"] for step in steps] == pytest.approx([1e-2 * (1 - math.sqrt(done / 8)) for done in range(8)])
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.2
    for step in steps:
        assert step["samples_per_s"] == pytest.approx(4 / step["step_s"])
    assert out.count("| samples per second: ") == 8
    alone, _ = pretrain()
    # Where the momentum of an element is about 0, its sign may be another one.
    assert losses(alone) == pytest.approx(losses(steps), rel=1e-2)


def test_the_callback_ends_the_training(libraries, folder):
    """A library that was compiled against the headers of the tree without the recipes: with a flag less."""
    (folder / "plateau.cpp").write_text(next(edit["code"] for edit in EDITS if edit["file"] == "plateau.cpp"))
    flags = megashard.run("pkg-config", "--cflags", "megashard", env=environment(
        PKG_CONFIG_PATH=str(BUILD / "meson-uninstalled"))).stdout.split()
    megashard.run("g++", "-shared", "-fPIC", "-O0", "plateau.cpp", "-o", "plateau.so", *flags,
                  f"-I{ROOT / 'framework'}", cwd=folder, timeout=300)
    steps, out = megashard.pretrain(
        folder, "--callback-plugin", folder / "plateau.so", "--callback", "plateau", "--plateau-steps", 3, "--save",
        folder / "saved", ranks=2, env=libraries, defaults=megashard.network() +
        "--mock-data --micro-batch-size 2 --global-batch-size 4 --train-iters 30 --lr 0 --min-lr 0 --save-interval 100 "
        + megashard.RUN)
    seen = losses(steps)
    over = next(step for step in range(1, 30) if step - 1 - seen.index(min(seen[:step])) == 3)
    assert len(seen) == over + 1 < 30  # a request counts from the next step on
    assert f"successfully saved checkpoint from iteration {over + 1:7d}" in out


def test_the_loss_is_simpos(libraries, folder):
    """Of two steps without a change, on two ranks."""
    torch.manual_seed(6)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=30, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, initializer_range=0.3)).eval()
    model.save_pretrained(folder / "model")
    tokens, lengths = torch.randint(0, 30, (8, 9)), [9, 7, 5, 9, 6, 6, 8, 4]
    masks = [torch.arange(length) > 2 for length in lengths]
    write_conversation_set(folder / "pairs", [row[:length] for row, length in zip(tokens, lengths)], masks)
    with torch.no_grad():
        rewards = []
        for row, length, mask in zip(tokens, lengths, masks):
            log_probs = model(row[None, :length - 1]).logits[0].log_softmax(-1)
            of_labels = log_probs.gather(1, row[1:length, None])[:, 0]
            rewards.append(of_labels[mask[1:]].mean())
    wanted = [-torch.nn.functional.logsigmoid(1.5 * (chosen - rejected) - 0.5).item()
              for chosen, rejected in zip(rewards[::2], rewards[1::2])]
    steps, out = megashard.pretrain(
        folder, "--hf-model", folder / "model", "--data-path", folder / "pairs", "--objective", "simpo",
        "--simpo-beta", 1.5, "--simpo-margin", 0.5, ranks=2, env=libraries,
        defaults="--split 1,0,0 --no-shuffle-conversations --seq-length 16 --micro-batch-size 2 --global-batch-size 4 "
                 "--train-iters 2 --lr 0 --min-lr 0 --tokenizer-type NullTokenizer --vocab-size 29 " + megashard.RUN)
    assert losses(steps) == pytest.approx([sum(wanted[:2]) / 2, sum(wanted[2:]) / 2], abs=1e-6)
    assert " simpo loss: " in out


@torch.no_grad()
def test_the_family_computes_what_transformers_does(libraries, folder):
    torch.manual_seed(5)
    config = MinistralConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, head_dim=8,
                             num_attention_heads=4, num_key_value_heads=2, sliding_window=5, initializer_range=0.3,
                             layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    model = MinistralForCausalLM(config).eval()
    model.save_pretrained(folder / "model")
    text = torch.randint(0, 97, (24,))
    megashard.write_documents(folder / "text", [text])
    megashard.run(*megashard.launch(2, "infer", "--hf-model", folder / "model", "--data-path", folder / "text",
                                    "--seq-length", 23, "--micro-batch-size", 1, "--use-torch-fsdp2", "--log-probs",
                                    folder / "ours.npy"),
                  env=libraries)
    wanted = model(text[None]).logits[0, :-1].log_softmax(-1).gather(1, text[1:, None])[:, 0]
    ours = torch.from_numpy(np.load(folder / "ours.npy"))[0, :23]
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
