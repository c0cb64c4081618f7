"""docs/from_*.md: their commands run, and their statements about flags and keys are true."""
import re
import sys

import pytest
import torch
import transformers

import megatron_page
from documented import blocks_run_by
from megashard import BUILD, PREPROCESS, PROGRAM, ROOT, environment, run

PAGES = {name: ROOT / "docs" / f"{name}.md" for name in ("from_megatron", "from_torchtitan", "from_accelerate")}
PROGRAMS = [*([PROGRAM, *name.split()] for name in (
    "pretrain", "infer", "plan", "launch", "convert hf_to_dcp", "convert dcp_to_hf",
    "convert hf_to_torch_dist")), [sys.executable, PREPROCESS / "preprocess_data.py"],
            [sys.executable, ROOT / "launch" / "ask.py"], [ROOT / "launch" / "quickstart"]]
OTHERS = {"--nnodes", "--node-rank", "--nproc-per-node", "--no-python", "--local-dir"}  # torchrun's, hf's


def rows(page):
    """(there, here) of each row of its tables whose second column is ours."""
    ours = False
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 2 or cells[0].startswith("---"):
            ours &= len(cells) == 2
        elif cells[1] == "here":
            ours = True
        elif ours:
            yield cells


def flags_quoted(text):
    return {flag for code in re.findall(r"`([^`]*)`", text) for flag in megatron_page.flags_in(code)}


@pytest.fixture(scope="module")
def known():
    """The flags of each program, from --help."""
    texts = [run(*words, "--help").stdout for words in PROGRAMS]
    return {flag for text in texts for flag in megatron_page.flags_in(text)}


@pytest.mark.parametrize("name", [*PAGES, "fine_tuning", "mindspeed", "roll"])
def test_every_flag_of_ours_is_known(name, known):
    page = PAGES.get(name, ROOT / "docs" / f"{name}.md")
    text = "\n".join(here for _, here in rows(page)) if name in PAGES else page.read_text()
    flags = flags_quoted(text)
    assert len(flags) > 5 and flags - known - OTHERS == set()


@pytest.mark.parametrize("name", PAGES)
def test_every_key_of_ours_is_one_of_the_file(name):
    """A flag's value is written with a blank, a key's with a colon."""
    sample = set(re.findall(r"^#? ?(\w+):", (ROOT / "fsdp2_config.yaml").read_text(), re.MULTILINE))
    keys = {key for _, here in rows(PAGES[name]) for key in re.findall(r"`(\w+): [^`]*`", here)}
    assert keys and keys - sample == set()


def test_names_of_accelerate_are_answered_with_ours():
    """Unknown flags of `accelerate launch` and TrainingArguments: the message has a word of the page, or says that the
    flag is not needed."""
    here = {}
    for there, ours in rows(PAGES["from_accelerate"]):
        if re.search(r"\S\(|[:/.]|fsdp_|accelerate|ignored_|\b[dtcs]p_", there):
            continue  # code, and keys of Accelerate's file
        for name in re.findall(r"`(?:--)?([a-z]\w+)[^`*]*`", there):
            name = name.replace("_", "-")
            here[name] = here.get(name, "") + re.sub("[`,:;]", " ", ours)
    done = run(PROGRAM, "pretrain", *(f"--{name}=1" for name in here), expect=2)
    answers = dict(re.findall(r"unknown flag --(\S+); (.*)", done.stderr))
    assert len(answers) > 40
    for name, answer in answers.items():
        words = re.findall(r"--[a-z][\w-]+|\w*_\w+|megashard launch", here[name])
        assert any(word in answer for word in [*words, "leave it out", "docs/launch.md"]), (name, answer, here[name])


def test_what_is_the_same_as_megatron_s_works():
    works = megatron_page.lists().split("### These have no effect")[0]
    same = {flag for there, here in rows(PAGES["from_megatron"]) if here == "the same" for flag in flags_quoted(there)}
    assert len(same) > 3 and not [flag for flag in same if f"`{flag}`" not in works]


def test_the_list_of_megatron_s_flags_is_of_today():
    """If not: PYTHONPATH=tests python tests/interop/megatron_page.py"""
    text = PAGES["from_megatron"].read_text()
    assert text.split(megatron_page.MARK)[1] == megatron_page.lists()


@pytest.mark.parametrize("name, sources", [("mindspeed", "launch/mindspeed/*_keys.cpp"),
                                           ("roll", "launch/roll/roll_keys.cpp")])
def test_every_key_that_is_known_is_named(name, sources):
    known = {key for file in ROOT.glob(sources) for line in file.read_text().splitlines()
             for key in re.findall(r'(?:^    |}, ){"(\w+)"[,}]', line)}
    page = (ROOT / "docs" / f"{name}.md").read_text()
    named = {key for code in re.findall(r"`([^`]*)`", page) for key in re.findall(r"\w+", code)}
    assert len(known) > 60 and known - named == set()


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_the_page(tmp_path, name):
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, max_position_embeddings=64)).save_pretrained(tmp_path / "run" / "model")
    (tmp_path / "build").symlink_to(BUILD)
    commands = "\n".join(blocks_run_by("tests/interop/test_peer_pages.py", PAGES[name]))
    out = run("bash", "-euc", commands, cwd=tmp_path, env=environment(), timeout=300)
    assert "successfully saved checkpoint" in out.stdout and "no module" not in out.stdout
