"""The commands of docs/fine_tuning.md, as they stand there, print what stands there."""
import json
import re
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import quickstart
from documented import blocks, blocks_run_by
from megashard import BUILD, ROOT, environment, run

PAGE = ROOT / "docs" / "fine_tuning.md"
TEMPLATE = ("{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}")


def make_tokenizer(text):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainers.BpeTrainer(
        vocab_size=700, special_tokens=[quickstart.END_OF_TEXT], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=quickstart.END_OF_TEXT, chat_template=TEMPLATE)


def make_model(folder, text):
    """A small Qwen3 that has almost learnt the page's answers, which a real model needs the page's run for."""
    quickstart.write_model(folder)
    tokenizer = make_tokenizer(text + " user assistant")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(
        folder, vocab_size=700, eos_token_id=tokenizer.eos_token_id))
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
