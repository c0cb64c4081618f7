"""The recipes of docs/extending.md, carried out: their code is put into a copy of the tree, built, and trained with."""
import json
import math
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (DiffLlamaConfig, DiffLlamaForCausalLM, MinistralConfig, MinistralForCausalLM, Qwen3Config,
                          Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, SiglipConfig,
                          SiglipForImageClassification)

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
    assert len(EDITS) == PAGE.count("\n```") // 2 - PAGE.count("\n```sh") > 10


@pytest.mark.parametrize("recipe, own", [("A loss", 1), ("A data format", 1), ("A model family", 1), ("A mixer", 3),
                                         ("A router", 1), ("An encoder", 1)])
def test_a_recipe_changes_one_file_of_the_product(recipe, own):
    section = PAGE.split(f"\n## {recipe}\n")[1].split("\n## ")[0]
    edits = [match.groupdict() for match in EDIT.finditer(section)]
    assert len({edit["file"] for edit in edits if edit["where"]}) <= 1
    assert len([edit for edit in edits if edit["where"] is None]) == own


@pytest.mark.parametrize("recipe, own", [("A callback", 1), ("A modality", 3)])
def test_a_library_touches_no_file(recipe, own):
    section = PAGE.split(f"\n## {recipe}\n")[1].split("\n## ")[0]
    assert [edit["where"] for edit in map(re.Match.groupdict, EDIT.finditer(section))] == [None] * own


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


def library_of(folder, name, **renamed):
    """A recipe's file as a library against the headers of the tree without the recipes; `renamed`: words of its."""
    code = next(edit["code"] for edit in EDITS if edit["file"].endswith(f"{name}.cpp"))
    for before, after in renamed.items():
        code = code.replace(before, after)
    return built_library(folder, name, code)


def built_library(folder, name, code):
    (folder / f"{name}.cpp").write_text(code)
    flags = megashard.run("pkg-config", "--cflags", "megashard", env=environment(
        PKG_CONFIG_PATH=str(BUILD / "meson-uninstalled"))).stdout.split()
    megashard.run("g++", "-shared", "-fPIC", "-O0", f"{name}.cpp", "-o", f"{name}.so", *flags,
                  f"-I{ROOT / 'framework'}", cwd=folder, timeout=300)
    return folder / f"{name}.so"


def test_the_callback_ends_the_training(libraries, folder):
    """A library that was compiled with a flag less."""
    steps, out = megashard.pretrain(
        folder, "--callback-plugin", library_of(folder, "plateau"), "--callback", "plateau", "--plateau-steps", 3,
        "--save", folder / "saved", ranks=2, env=libraries, defaults=megashard.network() +
        "--mock-data --micro-batch-size 2 --global-batch-size 4 --train-iters 30 --lr 0 --min-lr 0 --save-interval 100 "
        + megashard.RUN)
    seen = losses(steps)
    over = next(step for step in range(1, 30) if step - 1 - seen.index(min(seen[:step])) == 3)
    assert len(seen) == over + 1 < 30  # a request counts from the next step on
    assert f"successfully saved checkpoint from iteration {over + 1:7d}" in out


def test_the_loss_weighs_answers_by_their_lengths(libraries, folder):
    """Losses of two steps without a change, on two ranks, and packed."""
    torch.manual_seed(6)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=30, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, initializer_range=0.3)).eval()
    model.save_pretrained(folder / "model")
    tokens, lengths = torch.randint(0, 30, (8, 9)), [9, 7, 5, 9, 6, 6, 8, 4]
    masks = [torch.arange(length) > 2 for length in lengths]
    write_conversation_set(folder / "answers", [row[:length] for row, length in zip(tokens, lengths)], masks)
    wanted = []
    with torch.no_grad():
        for row, length, mask in zip(tokens, lengths, masks):
            of_labels = log_probs(model, row[:length])[mask[1:]]
            wanted.append(-of_labels.sum().item() / len(of_labels)**0.5)
    own = ("--objective", "answers", "--answers-power", 0.5)
    run = lambda batch, *more, loss=own, **on: megashard.pretrain(
        folder, "--hf-model", folder / "model", "--data-path", folder / "answers", *loss, *more, env=libraries, **on,
        defaults=f"--split 1,0,0 --no-shuffle-conversations --seq-length 64 --micro-batch-size {batch // 2} "
                 f"--global-batch-size {batch} --train-iters 2 --lr 0 --min-lr 0 --tokenizer-type NullTokenizer "
                 "--vocab-size 29 " + megashard.RUN)
    steps, out = run(4, ranks=2)
    assert losses(steps) == pytest.approx([sum(wanted[:4]) / 4, sum(wanted[4:]) / 4], abs=1e-6)
    assert " answers loss: " in out
    packed, _ = run(2, "--neat-packing", "--micro-batch-size", 1, "--global-batch-size", 1)
    assert losses(packed)[0] == pytest.approx(sum(wanted) / 8, abs=1e-6)
    plugin = library_of(folder, "answers", **{'"answers': '"lengths', "--answers": "--lengths"})
    by_plugin, out = run(4, loss=("--loss-plugin", plugin, "--objective", "lengths", "--lengths-power", 0.5), ranks=2)
    assert losses(by_plugin) == losses(steps) and " lengths loss: " in out


def log_probs(model, tokens):
    logits = model(tokens[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


@torch.no_grad()
def expect_log_probs_of(model, libraries, folder):
    """Losses of the model that is saved in the folder, on two ranks."""
    text = torch.randint(0, 97, (24,))
    megashard.write_documents(folder / "text", [text])
    megashard.run(*megashard.launch(2, "infer", "--hf-model", folder / "model", "--data-path", folder / "text",
                                    "--seq-length", 23, "--micro-batch-size", 1, "--use-torch-fsdp2", "--log-probs",
                                    folder / "ours.npy"),
                  env=libraries)
    ours = torch.from_numpy(np.load(folder / "ours.npy"))[0, :23]
    torch.testing.assert_close(ours, log_probs(model, text), rtol=1e-5, atol=1e-5)


def test_the_family_computes_what_transformers_does(libraries, folder):
    torch.manual_seed(5)
    config = MinistralConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, head_dim=8,
                             num_attention_heads=4, num_key_value_heads=2, sliding_window=5, initializer_range=0.3,
                             layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    model = MinistralForCausalLM(config).eval()
    model.save_pretrained(folder / "model")
    expect_log_probs_of(model, libraries, folder)


def test_the_mixer_computes_what_transformers_does(libraries, folder):
    torch.manual_seed(7)
    config = DiffLlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                             num_attention_heads=8, num_key_value_heads=4, initializer_range=0.3, lambda_std_dev=0.5)
    model = DiffLlamaForCausalLM(config).eval()
    model.save_pretrained(folder / "model")
    expect_log_probs_of(model, libraries, folder)
    # Trained without a change, and saved with the published names.
    rows = [torch.randint(0, 97, (9,)) for _ in range(4)]
    write_conversation_set(folder / "rows", rows, [torch.ones(9, dtype=torch.bool)] * 4)
    steps, _ = megashard.pretrain(
        folder, "--hf-model", folder / "model", "--data-path", folder / "rows", "--save-hf", folder / "saved",
        "--overwrite", ranks=2, env=libraries,
        defaults=UNCHANGED + "--micro-batch-size 2 --global-batch-size 4 --train-iters 1 ")
    with torch.no_grad():
        assert losses(steps) == pytest.approx([float(-torch.cat([log_probs(model, row) for row in rows]).mean())],
                                              abs=1e-5)
    first, saved = load_file(folder / "model" / "model.safetensors"), load_file(folder / "saved" / "model.safetensors")
    assert first.keys() == saved.keys()
    assert all(torch.equal(first[name], saved[name]) for name in first)


def test_the_encoder_trains_as_in_pytorch(libraries, folder):
    """Two steps of SGD on two ranks, of which one has no audio in the first step."""
    torch.manual_seed(9)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, initializer_range=0.3, tie_word_embeddings=False))
    projector = torch.nn.ModuleDict({"linear_1": torch.nn.Linear(5, 32), "linear_2": torch.nn.Linear(32, 32)})
    model.save_pretrained(folder / "model")
    weights = load_file(folder / "model" / "model.safetensors")
    save_file(weights | {f"model.audio.{name}": value for name, value in projector.state_dict().items()},
              folder / "model" / "model.safetensors", metadata={"format": "pt"})
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {
        "model_type": "qwen3_audio", "architectures": ["Qwen3AudioForCausalLM"], "audio_bins": 5,
        "audio_token_id": 96}))
    rows, frames = [torch.randint(0, 96, (9,)) for _ in range(8)], [None] * 8
    for number, count in ((1, 3), (4, 2), (5, 4), (7, 1)):
        rows[number][2:2 + count] = 96
        frames[number] = torch.randn(count, 5)
    write_conversation_set(folder / "rows", rows, [torch.ones(9, dtype=torch.bool)] * 8,
                           items={"audio_frames": frames})
    optimizer = torch.optim.SGD([*model.parameters(), *projector.parameters()], lr=0.1)
    wanted = []
    for step in range(2):
        row_losses = []
        for row, each in list(zip(rows, frames))[4 * step:4 * step + 4]:
            embeddings = model.model.embed_tokens(row[:-1])
            if each is not None:
                features = projector["linear_2"](torch.nn.functional.gelu(projector["linear_1"](each)))
                embeddings = embeddings.index_copy(0, torch.nonzero(row[:-1] == 96)[:, 0], features)
            logits = model(inputs_embeds=embeddings[None]).logits[0]
            row_losses.append(torch.nn.functional.cross_entropy(logits, row[1:]))
        loss = sum(row_losses) / 4
        wanted.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    steps, _ = megashard.pretrain(
        folder, "--hf-model", folder / "model", "--data-path", folder / "rows", ranks=2, env=libraries, config=None,
        defaults=UNCHANGED.replace("--lr 0 --min-lr 0", "--lr 0.1 --lr-decay-style constant --optimizer sgd "
                                   "--sgd-momentum 0 --weight-decay 0 --clip-grad 0") +
        "--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --overwrite --save-hf " + str(folder / "saved"))
    assert losses(steps) == pytest.approx(wanted, abs=1e-5)
    saved = load_file(folder / "saved" / "model.safetensors")
    for name, value in projector.state_dict().items():
        torch.testing.assert_close(saved[f"model.audio.{name}"], value, atol=1e-6, rtol=1e-5)


UNCHANGED = ("--split 1,0,0 --no-shuffle-conversations --seq-length 16 --lr 0 --min-lr 0 "
             "--tokenizer-type NullTokenizer --vocab-size 96 " + megashard.RUN + " ")
RATE = 0.01


class SoftplusGate(torch.nn.Module):

    def __init__(self, gate, bias):
        super().__init__()
        self.weight, self.bias, self.top_k, self.chosen = gate.weight, bias, gate.top_k, None

    def forward(self, hidden):
        scores = torch.nn.functional.softplus(hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T).sqrt()
        self.chosen = (scores + self.bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, self.chosen)
        return scores, weights / (weights.sum(-1, keepdim=True) + 1e-20), self.chosen

    def move_bias(self, counts):
        self.bias += RATE * (counts.mean() - counts).sign()


@pytest.fixture()
def softplus_model(folder):
    torch.manual_seed(8)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True,
        initializer_range=0.3)).eval()
    model.save_pretrained(folder / "model")
    weights = load_file(folder / "model" / "model.safetensors")
    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate = SoftplusGate(layer.mlp.gate, torch.randn(6) * 0.1)
        weights[f"model.layers.{number}.mlp.gate.e_score_correction_bias"] = layer.mlp.gate.bias.clone()
    save_file(weights, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {
        "model_type": "qwen3_moe_softplus", "architectures": ["Qwen3MoeSoftplusForCausalLM"],
        "router_bias_update_rate": RATE}))
    return model


def test_the_router_chooses_by_scores_and_bias(libraries, folder, softplus_model):
    expect_log_probs_of(softplus_model, libraries, folder)


@torch.no_grad()
def test_the_routers_bias_moves_after_each_step(libraries, folder, softplus_model):
    """The bias follows the counts of all ranks and micro batches; a resumed run continues with it."""
    rows = [torch.randint(0, 97, (9,)) for _ in range(16)]
    write_conversation_set(folder / "rows", rows, [torch.ones(9, dtype=torch.bool)] * 16)
    gates, wanted = [layer.mlp.gate for layer in softplus_model.model.layers], []
    for step in range(4):
        counts = [torch.zeros(6) for _ in gates]
        wanted.append(-torch.cat([log_probs(softplus_model, row[:9]) for row in rows[4 * step:4 * step + 4]]).mean())
        for row in rows[4 * step:4 * step + 4]:
            softplus_model(row[None, :8])
            for gate, count in zip(gates, counts):
                count += torch.bincount(gate.chosen.flatten(), minlength=6)
        for gate, count in zip(gates, counts):
            gate.move_bias(count)

    def pretrain(*more):
        return losses(megashard.pretrain(
            folder, "--hf-model", folder / "model", "--data-path", folder / "rows", "--save", folder / "steps",
            "--save-interval", 2, "--save-hf", folder / "saved", "--overwrite", *more, ranks=2, env=libraries,
            defaults=UNCHANGED + "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 ")[0])

    assert pretrain("--exit-interval", 2) + pretrain("--load", folder / "steps") == pytest.approx(
        [float(loss) for loss in wanted], abs=1e-5)
    saved = load_file(folder / "saved" / "model.safetensors")
    for number, gate in enumerate(gates):
        torch.testing.assert_close(saved[f"model.layers.{number}.mlp.gate.e_score_correction_bias"], gate.bias)


def test_the_router_stays_in_fp32(libraries, folder, softplus_model):
    """Also where the other weights are stored, trained and saved in bf16."""
    rows = [torch.randint(0, 97, (9,)) for _ in range(4)]
    write_conversation_set(folder / "rows", rows, [torch.ones(9, dtype=torch.bool)] * 4)
    megashard.pretrain(
        folder, "--hf-model", folder / "model", "--data-path", folder / "rows", "--save-hf", folder / "saved",
        "--overwrite", "--bf16", "--save-hf-dtype", "bf16", ranks=2, env=libraries,
        defaults=UNCHANGED + "--micro-batch-size 2 --global-batch-size 4 --train-iters 1 ")
    first, saved = load_file(folder / "model" / "model.safetensors"), load_file(folder / "saved" / "model.safetensors")
    for name, value in first.items():
        if not name.endswith("e_score_correction_bias"):
            kept = value if name.endswith(".gate.weight") else value.bfloat16()
            torch.testing.assert_close(saved[name], kept, rtol=0, atol=0)
        else:
            assert saved[name].dtype == torch.float32


SIDE, CLASSES = 16, 4


def drawn_shapes(number, seed):
    """Grey pictures with noise, and which shape each shows: a square, a cross, a ring or a triangle, anywhere."""
    random = np.random.RandomState(seed)
    labels, pixels = random.randint(0, CLASSES, number), random.randn(number, 1, SIDE, SIDE).astype("float32") * 0.3
    down, across = np.mgrid[:SIDE, :SIDE]
    for label, picture in zip(labels, pixels[:, 0]):
        size = random.randint(3, 6)
        y, x = (np.abs(each - random.randint(size, SIDE - size)) for each in (down, across))
        shape = ((y <= size) & (x <= size), (np.minimum(y, x) == 0) & (np.maximum(y, x) <= size),
                 np.abs(np.hypot(y, x) - size) < 0.7, (y <= size) & (np.abs(x + y - size) < 0.7))[label]
        picture[shape] += random.uniform(1, 2)
    return {"pixels": torch.from_numpy(pixels), "labels": torch.from_numpy(labels)}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder with the library of the three files, compiled as one to save time, a model and sets of pictures."""
    folder = tmp_path_factory.mktemp("pictures")
    built_library(folder, "pictures", "".join(edit["code"] for edit in EDITS if edit["file"].startswith("picture_")))
    torch.manual_seed(3)
    config = SiglipConfig(
        vision_config=dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                           num_channels=1, image_size=SIDE, patch_size=4, vision_use_head=False),
        text_config=dict(hidden_size=32), num_labels=CLASSES)
    SiglipForImageClassification(config).save_pretrained(folder / "model")
    for name, number in (("shapes", 1024), ("held_out", 128)):
        save_file(drawn_shapes(number, seed=number), folder / f"{name}.pictures.safetensors")
    return folder


def classify(pictures, folder, *more, iterations, ranks):
    """The steps of a training, and what it printed."""
    library = pictures / "pictures.so"
    return megashard.pretrain(
        folder, "--model-plugin", library, "--loss-plugin", library, "--objective", "picture-classification",
        "--hf-model", pictures / "model", "--train-data-path", pictures / "shapes", "--save-hf", folder / "trained",
        "--overwrite", *more, ranks=ranks, config=None,
        defaults=f"--seq-length 1 --micro-batch-size {32 // ranks} --global-batch-size 32 --train-iters {iterations} "
                 "--lr 3e-3 --min-lr 0 --lr-decay-style constant --weight-decay 0.1 --log-interval 1 " + megashard.RUN)


def test_a_modality_trains_as_in_pytorch(pictures, folder):
    """Ten steps of AdamW on one rank and on two, and the weights after them."""
    model = SiglipForImageClassification.from_pretrained(pictures / "model")
    data = load_file(pictures / "shapes.pictures.safetensors")
    groups = [{"params": [each for each in model.parameters() if (each.dim() > 1) == decays],
               "weight_decay": 0.1 * decays} for decays in (True, False)]
    optimizer, wanted, norms = torch.optim.AdamW(groups, lr=3e-3), [], []
    for step in range(10):
        pixels, labels = (data[name][32 * step:32 * step + 32] for name in ("pixels", "labels"))
        loss = torch.nn.functional.cross_entropy(model(pixel_values=pixels).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        wanted.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    for ranks in (1, 2):
        steps, out = classify(pictures, folder, "--no-shuffle-conversations", "--eval-iters", 0, iterations=10,
                              ranks=ranks)
        assert "> training data: 1024 pictures, 1024 labels; asked for: 320 samples of 1 label, 0.3" in out
        assert losses(steps) == pytest.approx(wanted, rel=2e-6)
        assert [step["grad_norm"] for step in steps] == pytest.approx(norms, rel=2e-6)
    trained = SiglipForImageClassification.from_pretrained(folder / "trained").state_dict()
    for name, weight in model.state_dict().items():
        if not name.endswith("k_proj.bias"):  # has no gradient but rounding, which Adam makes as large as any
            torch.testing.assert_close(trained[name], weight, atol=2e-6, rtol=2e-6)


def test_a_modality_learns(pictures, folder):
    """Shapes that it has not seen, by the log and by transformers with the saved weights."""
    steps, out = classify(pictures, folder, "--valid-data-path", pictures / "held_out", "--eval-iters", 4,
                          "--eval-interval", 1000, iterations=150, ranks=2)
    assert steps[0]["accuracy"] < 0.6 and steps[-1]["loss"] < 0.3
    logged = float(re.findall(r"validation loss at .* accuracy value: (\S+)", out)[-1])
    assert logged > 0.9
    data = load_file(pictures / "held_out.pictures.safetensors")
    with torch.no_grad():
        logits = SiglipForImageClassification.from_pretrained(folder / "trained")(pixel_values=data["pixels"]).logits
    assert (logits.argmax(-1) == data["labels"]).double().mean().item() == pytest.approx(logged, abs=0.01)
