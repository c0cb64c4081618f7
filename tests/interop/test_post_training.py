"""The commands of docs/post_training.md, as they stand there."""
import re
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from documented import blocks_run_by
from megashard import BUILD, ROOT, environment, run

PAGE = ROOT / "docs" / "post_training.md"


def make_model(folder):
    """Tokens are bytes."""
    words = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>",
        chat_template="{% for m in messages %}{{ m.role[0] + ':' + m.content + '<|end|>' }}{% endfor %}"
                      "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}").save_pretrained(folder)
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        head_dim=16, num_key_value_heads=1, max_position_embeddings=128, eos_token_id=0)).save_pretrained(folder)


def test_the_commands_of_the_page(folder):
    commands = "\n".join(blocks_run_by("tests/interop/test_post_training.py", PAGE))
    make_model(folder / "run" / "model")
    (folder / "launch").symlink_to(ROOT / "launch")
    (folder / "build").symlink_to(BUILD)
    out = run("bash", "-euc", commands, cwd=folder, env=environment(MEGASHARD_VENV=sys.prefix), timeout=300).stdout
    first, *_, last = [float(margin) for margin in re.findall(r"rewards/margins: (\S+)", out)]
    losses = [float(loss) for loss in re.findall(r"dpo loss: (\S+)", out)]
    assert losses[0] == pytest.approx(0.693147, abs=1e-6) and first == pytest.approx(0, abs=1e-6)
    assert losses[4] < losses[0] > losses[-1] and last > 0.1
    for name in ("preferred", "preferred_lora"):
        AutoModelForCausalLM.from_pretrained(folder / "run" / name)
