"""The commands of docs/fine_tuning.md, as they stand there, print what stands there."""
import json
import re
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from documented import blocks, blocks_run_by
from megashard import BUILD, ROOT, environment, run

PAGE = ROOT / "docs" / "fine_tuning.md"
TEMPLATE = ("{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}")


def make_model(folder, text):
    """A small Qwen3 that has almost learnt the page's answers, which a real model needs the page's run for."""
    (folder / "text").write_text(text + " user assistant")
    run(sys.executable, ROOT / "launch/first_run/make_tiny_qwen3.py", folder / "text", folder, "--vocab-size", 700)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(30):
        for line in text.splitlines():
            record = json.loads(line)
            said = [{"role": "user", "content": record["instruction"]},
                    {"role": "assistant", "content": record["output"]}]
            tokens = tokenizer.apply_chat_template(said, return_dict=True, return_tensors="pt").input_ids
            model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def by_transformers(folder):
    """The trained model's answers to the questions."""
    model, tokenizer = (kind.from_pretrained(folder / "trained") for kind in (AutoModelForCausalLM, AutoTokenizer))
    answers = []
    for line in (folder / "chats.jsonl").read_text().splitlines():
        question = [{"role": "user", "content": json.loads(line)["instruction"]}]
        tokens = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True,
                                               return_tensors="pt")
        said = model.generate(**tokens, max_new_tokens=16, do_sample=False)[0, tokens.input_ids.shape[1]:]
        answers.append(tokenizer.decode(said, skip_special_tokens=True))
    return answers


def test_the_commands_of_the_page(folder):
    commands = "\n".join(blocks_run_by("tests/interop/test_fine_tuning.py", PAGE))
    (folder / "run" / "model").mkdir(parents=True)
    make_model(folder / "run" / "model", "\n".join(line for line in commands.splitlines() if line[:1] == "{"))
    (folder / "launch").symlink_to(ROOT / "launch")
    (folder / "build").symlink_to(BUILD)
    out = run("bash", "-euc", commands, cwd=folder, env=environment(MEGASHARD_VENV=sys.prefix), timeout=300).stdout
    answers = blocks(PAGE)[-2].text
    assert answers in out and answers.splitlines()[:4] == by_transformers(folder / "run")
    losses = [float(loss) for loss in re.findall(r"/ +20 .* lm loss: (\S+)", out)]  # of the run, then of the adapters
    assert losses[4] < 0.8 * losses[0]
    assert {"adapter", "model.safetensors"} <= {each.name for each in (folder / "run/lora_trained").iterdir()}
    assert "key of the file" not in out  # of the dry run: none is ignored
    assert "dry run: nothing is trained" in out and "iteration       30/      30" in out
