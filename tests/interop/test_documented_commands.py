"""Each block of commands in README.md and docs/ names the test that runs it, or says why none does; and some of them
run here, as they stand, in a folder that has what they name."""
import json
import os
import re
import sys

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from documented import PAGES, blocks, blocks_run_by
from megashard import BUILD, ROOT, environment, run, write_documents

HERE = "tests/interop/test_documented_commands.py"
COMMAND = re.compile(r"\s*(\$python|python3?|megashard|build/|launch/|tests/|DIR/|torchrun|srun|mpirun|meson|ninja|"
                     r"cmake|g\+\+|git|apt-get|[A-Z_]+=\S+ [\w/]+)\s?[\w/.-]")
ROLL = """
pretrain: DIR
sequence_length: 512
max_steps: 2
actor_train:
  training_args: {learning_rate: 1.0e-4, per_device_train_batch_size: 2, gradient_accumulation_steps: 2}
  strategy_args: {strategy_name: fsdp2_train, strategy_config: {param_dtype: float32}}
reference:
  strategy_args: {strategy_name: fsdp2_infer, strategy_config: {param_dtype: float32}}
  infer_batch_size: 4
"""


def is_marked(block):
    """With a test that exists and that reads the page, or runs the script by its name; or with a reason."""
    if not all((ROOT / test).exists() for test in re.findall(r"tests/[\w/]+(?:\.py)?", block.mark)):
        return False
    test = re.fullmatch(r"run by (tests/[\w/.]+)", block.mark)
    if not test or not test[1].endswith(".py"):
        return bool(test) or block.mark.startswith("not run: ")
    names = ["documented", *re.findall(r"(\w+)\.py", block.text)]
    return any(name in (ROOT / test[1]).read_text() for name in names)


def test_each_block_of_commands_is_run_or_says_why_not():
    found = [block for page in PAGES for block in blocks(page)
             if block.language in ("sh", "bash") or not block.language and COMMAND.match(block.text)]
    assert len(found) > 30 and not [f"{block.page}:{block.line}" for block in found if not is_marked(block)]


def test_commands_stand_in_blocks():
    """And not in lines with an indent, which have no mark."""
    for page in PAGES:
        outside = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        lines = re.findall(r"(?<=\n\n)    .*", outside) + re.findall(r"(?<=^## ).*\n    .*", outside, re.MULTILINE)
        assert not [line for line in lines if COMMAND.match(line.split("\n")[-1])], page


def make_tokenizer(folder):
    """Of bytes."""
    tokenizer = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(
        ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>",
        chat_template="{% for m in messages %}{{ m.role + ':' + m.content + '<|end|>' }}{% endfor %}"
                      "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}").save_pretrained(folder)


def bash(page, folder):
    commands = "\n".join(blocks_run_by(HERE, ROOT / page))
    return run("bash", "-euc", commands, cwd=folder, env=environment(MEGASHARD_VENV=sys.prefix), timeout=300).stdout


def link(folder, *names):
    for name in names:
        (folder / name).symlink_to(BUILD if name == "build" else ROOT / name)


def test_those_of_the_readme(tmp_path):
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, max_position_embeddings=512))
    model.save_pretrained(tmp_path / "DIR")
    (tmp_path / "HF").symlink_to("DIR")
    write_documents(tmp_path / "PREFIX", [torch.randint(0, 64, (400,)).tolist() for _ in range(60)])
    (tmp_path / "roll.yaml").write_text(ROLL)
    link(tmp_path, "build", "fsdp2_config.yaml")
    (tmp_path / "run" / "tiny").mkdir(parents=True)
    os.symlink("../../SAVED", tmp_path / "run" / "tiny" / "save")  # of launch/quickstart, which is not run here
    run(BUILD / "launch" / "megashard", "convert", "hf_to_dcp", "--hf-dir", "DIR", "--dcp-dir", "SAVED", cwd=tmp_path)
    out = bash("README.md", tmp_path)
    assert "torch_dcp step run/tiny/save/release" in out and "iteration      100/     100" in out
    assert "log-probabilities of 60 documents" in out
    trained = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "OUT")
    assert not torch.equal(trained.lm_head.weight, model.lm_head.weight)


def test_those_about_data(tmp_path):
    make_tokenizer(tmp_path / "MODEL_DIR")
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(9)))
    said = [{"role": "user", "content": "Who sat?"}, {"role": "assistant", "content": "The cat."}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "Who sat?", "chosen": " A cat.", "rejected": " I."}))
    link(tmp_path, "launch")
    bash("docs/data.md", tmp_path)
    assert {each.name for each in (tmp_path / "data").iterdir()} == {
        "corpus_text_document.bin", "corpus_text_document.idx", "chats.vision.safetensors",
        "pairs.vision.safetensors"}
