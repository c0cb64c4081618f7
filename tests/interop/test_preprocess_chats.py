"""Conversations of text: tokens, and which of them are learnt, as transformers' chat templates give them."""

import gzip
import json
import sys

import numpy
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from conversations import losses_by_pytorch, packed, train
from megashard import launch, run
from tiny_vision import ASKED, asked, preprocessing, said, write_conversations

# As the published ones are written; {% generation %} is for transformers, to say which tokens are the assistant's.
TURN = ("{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}")
QWEN = ("{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
        "{% if tools %}{{ tools }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        + TURN + "{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
LLAMA = ("{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_start|>\n\n' }}"
         + TURN + "{% endfor %}"
         "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_start|>\n\n' }}{% endif %}")
CHATS = [[asked("Which one?"), said("The caf\u00e9 \u2603 on the mat.\n\nYes.")],
         [{"role": "system", "content": "Be brief."},
          asked([{"type": "text", "text": "Who "}, {"type": "text", "text": "sat?"}]), said("The cat."),
          asked("Where?"), said("On the mat, where it sat.")],
         [asked("Sing."), said(" la la " * 9)], [asked(""), said("the")]]


def untagged(template):
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def make_chat_tokenizer(folder, template):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator(["the cat sat on the mat, where it sat. la la la user assistant system"] * 9,
                                  trainers.BpeTrainer(
vocab_size=300, special_tokens=["<|begin|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin|>",
                                                     eos_token="<|im_end|>", chat_template=template)
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("family, template", [("Qwen3", QWEN), ("Llama", LLAMA)], ids=["qwen3", "llama"])
def test_conversations_of_text_are_prepared_and_trained(tmp_path, family, template):
    """Tokens, and which of them are learnt, as transformers' chat template gives them, and transformers' losses; no
    picture anywhere."""
    tokenizer = make_chat_tokenizer(tmp_path, untagged(template))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(
        vocab_size=300, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.1, bos_token_id=0, eos_token_id=2))
    model.save_pretrained(tmp_path)
    write_conversations(tmp_path, CHATS, tmp_path / "out")
    ours, samples, first = load_file(tmp_path / "out.vision.safetensors"), [], 0
    for messages, end in zip(CHATS, ours["sample_ends"].tolist()):
        whole = [{**message, "content": message["content"] if isinstance(message["content"], str) else
                  "".join(part["text"] for part in message["content"])} for message in messages]
        theirs = tokenizer.apply_chat_template(whole, chat_template=template, return_assistant_tokens_mask=True)
        assert ours["tokens"][first:end].tolist() == theirs["input_ids"]
        assert ours["loss_mask"][first:end].tolist() == theirs["assistant_masks"] and 0 < sum(theirs["assistant_masks"])
        tokens, learnt = torch.tensor(theirs["input_ids"]), torch.tensor(theirs["assistant_masks"]).bool()
        samples.append((tokens[None], tokens[1:].where(learnt[1:], -100), {}))
        first = end
    assert len(ours["tokens"]) == first and ours["image_grid_thw"].shape == (0,
                                                                             3) and ours["pixel_values"].shape[0] == 0
    seen = train(tmp_path)
    if family == "Llama":
        rows = "--seq-length", 128  # two an epoch
        whole = packed(tmp_path, *rows)
        packed(tmp_path, *rows, "--exit-interval", 2, "--save-interval", 2, "--save", tmp_path / "saved")
        assert packed(tmp_path, *rows, "--load", tmp_path / "saved") == whole[2:]
        run(*launch(1, "infer", "--hf-model", tmp_path, "--data-path", tmp_path / "out", "--seq-length", 128,
                    "--log-probs", tmp_path / "log_probs.npy"))
        for ours, (tokens, _, _) in zip(numpy.load(tmp_path / "log_probs.npy"), samples):
            wanted = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].detach().numpy()
            assert abs(ours[:len(wanted)] - wanted).max() < 1e-5 * abs(wanted).max()
    assert packed(tmp_path) == pytest.approx(seen, rel=1e-6)
    assert packed(tmp_path, "--context-parallel-size", 2, "--context-parallel-algo", "megatron_cp_algo",
                  ranks=2) == pytest.approx(seen, rel=1e-6)
    assert seen == pytest.approx(losses_by_pytorch(model, samples), rel=2e-6)  # fp32, sums over two ranks
    assert seen[2] < seen[0]


FORMS = {  # each the conversation of "messages"
    "sharegpt": {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Who sat?"},
                                   {"from": "gpt", "value": "The cat."}, {"from": "user", "value": "Where?"},
                                   {"from": "assistant", "value": "On the mat."}]},
    "sharegpt with a system of its own": {"system": "Be brief.", "conversations": [
        {"from": "human", "value": "Who sat?"}, {"from": "chatgpt", "value": "The cat."},
        {"from": "human", "value": "Where?"}, {"from": "gpt", "value": "On the mat."}]},
    "alpaca": {"system": "Be brief.", "history": [["Who sat?", "The cat."]], "instruction": "Where?", "input": "",
               "output": "On the mat."}}
SAID = [{"role": "system", "content": "Be brief."}, asked("Who sat?"), said("The cat."), asked("Where?"),
        said("On the mat.")]


@pytest.mark.parametrize("packed", [False, True])
def test_published_forms_are_the_same_conversation(tmp_path, monkeypatch, packed):
    """ShareGPT and Alpaca give the tokens and the mask that transformers' chat template gives for the messages."""
    tokenizer = make_chat_tokenizer(tmp_path, untagged(QWEN))
    theirs = tokenizer.apply_chat_template(SAID, chat_template=QWEN, return_assistant_tokens_mask=True)
    import preprocess_data
    for name, record in {**FORMS, "messages": {"messages": SAID}}.items():
        text = json.dumps([record, record], indent=1) if packed else json.dumps(record) + "\n" + json.dumps(record)
        (tmp_path / "in.json").write_bytes(gzip.compress(text.encode()) if packed else text.encode())
        monkeypatch.setattr(sys, "argv", ["preprocess_data.py", "--input", str(tmp_path / "in.json"), "--input-format",
                                          "conversations", "--tokenizer-model", str(tmp_path), "--output-prefix",
                                          str(tmp_path / "out")])
        preprocess_data.main()
        ours = load_file(tmp_path / "out.vision.safetensors")
        assert ours["tokens"].tolist() == theirs["input_ids"] * 2, name
        assert ours["loss_mask"].tolist() == theirs["assistant_masks"] * 2, name
    from conversation_forms import read
    given = {"instruction": "Say it in French.", "input": "a cat", "output": "un chat"}
    assert read("", given, "alpaca").messages == [asked("Say it in French.\na cat"), said("un chat")]


# drops the reasoning of answers before the last question, as Qwen3's
THINKING = ("{% set last = namespace(question=0) %}"
            "{% for m in messages %}{% if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% "
            "endfor %}"
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
            "{% if loop.index0 > last.question %}{{ '<think>\n' + m.get('reasoning_content', '') + '\n</think>\n' "
            "}}{% endif %}"
            "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% "
            "endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
THOUGHT = [asked("Who sat?"), {**said("The cat."), "reasoning_content": "Cats sit."}, asked("Where?"),
           said("On the mat.")]


def test_answers_are_learnt_as_the_template_writes_them(tmp_path):
    from preprocess_conversations import Encoder
    from preprocess_input import InputError

    def encode(template, line, **options):
        tokenizer = make_chat_tokenizer(tmp_path, template)
        sample = Encoder(preprocessing(tmp_path, **options)).encode(("in.jsonl, line 2", line, str(tmp_path)))
        return tokenizer, sample, tokenizer.decode([token for token, learnt in zip(sample.tokens, sample.mask)
                                                    if learnt])

    def refused(template, line):
        with pytest.raises(InputError) as error:
            encode(template, line)
        assert str(error.value).startswith("in.jsonl, line 2")
        return str(error.value)

    thought = {"messages": THOUGHT}
    assert "writes an earlier answer in another way when later turns come" in refused(untagged(THINKING), thought)
    tokenizer, sample, learnt = encode(untagged(THINKING), thought, mask_history=True)
    assert sample.tokens == tokenizer.apply_chat_template(THOUGHT)["input_ids"]
    assert learnt == "<think>\n\n</think>\nOn the mat.<|im_end|>"
    assert encode(untagged(THINKING),
                  {"messages": THOUGHT[:2]})[2] == "<think>\nCats sit.\n</think>\nThe cat.<|im_end|>"
    tokenizer, sample, learnt = encode(THINKING, thought)
    assert list(sample.mask) == tokenizer.apply_chat_template(THOUGHT,
                                                              return_assistant_tokens_mask=True)["assistant_masks"]
    assert learnt == "The cat.<|im_end|><think>\n\n</think>\nOn the mat.<|im_end|>"
    assert encode(THINKING, thought, mask_history=True)[2] == "<think>\n\n</think>\nOn the mat.<|im_end|>"
    assert "does not begin with the chat template's generation prompt" in refused(
        untagged(QWEN).replace("assistant\n", "assistant\n<think>"), {"messages": CHATS[0]})
    assert "the chat template refuses the messages: no system" in refused(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + QWEN,
        {"messages": CHATS[1]})
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    called = [asked("Look."), {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]},
              {"role": "tool", "content": "A mat."}, said("A mat.")]
    _, sample, learnt = encode(untagged(QWEN), {"messages": called, "tools": tools})
    assert learnt == "<|im_end|>A mat.<|im_end|>" and "'look'" in tokenizer.decode(sample.tokens)
    assert "has no <|image_pad|>; give the directory of a vision-language model" in refused(
        QWEN, {"messages": [ASKED, said("sat")]})
