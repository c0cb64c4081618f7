"""Conversation records in many forms: exactly their answers are learnt, or they are refused."""
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from conversation_spellings import FORMS, TAGGED, TEMPLATE, broken_record, odd_file, pieces, turn_pieces
from test_preprocess_chats import make_chat_tokenizer
from tiny_vision import preprocessing


@pytest.fixture(scope="module")
def chats(folder):
    """Prepares a file's bytes; the caller compares the learnt text."""
    import preprocess_data

    tokenizer = make_chat_tokenizer(folder, TEMPLATE)

    def prepare(content, *flags, template=TEMPLATE):
        (folder / "chat_template.jinja").write_text(template)
        (folder / "in.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
        given, sys.argv = sys.argv, ["preprocess_data.py", "--input", str(folder / "in.jsonl"), "--input-format",
                                     "conversations", "--tokenizer-model", str(folder), "--output-prefix",
                                     str(folder / "out"), *map(str, flags)]
        try:
            preprocess_data.main()
        finally:
            sys.argv = given
        return samples(load_file(folder / "out.vision.safetensors"))

    def samples(of):
        first, found = 0, []
        for end in of["sample_ends"].tolist():
            found.append((of["tokens"][first:end].tolist(), of["loss_mask"][first:end].tolist()))
            first = end
        return found

    return tokenizer, prepare


def meant(tokenizer, texts, whole=True):
    """Tokens and mask of (text, is it learnt); `whole`: tokenised as one text, marks keep the tokens apart."""
    texts = [(text, learnt) for text, learnt in texts if text]
    each = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in texts]
    if whole:
        assert tokenizer("".join(text for text, _ in texts), add_special_tokens=False)["input_ids"] == sum(each, [])
    return sum(each, []), sum(([int(learnt)] * len(tokens) for tokens, (_, learnt) in zip(each, texts)), [])


def compare(chats, seeds, template=TEMPLATE):
    tokenizer, prepare = chats
    for seed in seeds:
        form, meanings, content = odd_file(seed)
        if form == "template":
            found = prepare(content, "--template", "qwen3_vl_nothink")
            wanted = [meant(tokenizer, turn_pieces(meaning), whole=False) for meaning in meanings]
        else:
            found = prepare(content, template=template)
            wanted = [meant(tokenizer, pieces(meaning)) for meaning in meanings]
        assert found == wanted, (seed, content)


def encode_broken(chats, folder, seeds):
    """Result of each record: samples, or a message."""
    from preprocess_conversations import Encoder
    from preprocess_input import RecordError

    chats[1](json.dumps({"messages": [ASKED, SAID]}))  # the folder has a template
    encoders = {form: Encoder(preprocessing(folder, template="qwen2vl" if form == "template" else None), form)
                for form in FORMS}
    refused = 0
    for seed in seeds:
        form, record = broken_record(seed)
        try:
            encoders[form].encode(("in.jsonl, line 2", record, str(folder)))
        except RecordError as error:
            refused += 1
            assert str(error).startswith("in.jsonl, line 2"), (seed, error)
    assert len(seeds) / 4 < refused < len(seeds)


def test_odd_files_mean_what_they_say(chats):
    compare(chats, range(40))
    compare(chats, range(10), TAGGED)


def test_broken_records_are_named(chats, folder):
    encode_broken(chats, folder, range(500))


@pytest.mark.slow
def test_many_odd_files_and_broken_records(chats, folder):
    compare(chats, range(40, 540))
    compare(chats, range(10, 210), TAGGED)
    encode_broken(chats, folder, range(500, 10500))


ASKED, SAID = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "say"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": {}}}]}
RESULT = {"role": "tool", "tool_call_id": "1", "name": "look", "content": "sun"}
PLAIN = TEMPLATE.replace("m.tool_calls or []", "[]").replace("{% if tools %}", "{% if false %}")
NOTICES = {  # template, records, notices
    "nothing": (TEMPLATE, [{"messages": [ASKED, CALL, RESULT, SAID], "tools": None}], ""),
    "keys of records": (TEMPLATE, [{"messages": [ASKED, SAID], "id": 1, "source": "x"}, {"messages": [ASKED, SAID],
                                                                                        "id": 2, "source": None}],
                        "nobody reads these keys: 'id' of 2 records, 'source' of 1 record\n"),
    "many keys": (TEMPLATE, [{"messages": [ASKED, SAID], **{f"k{i}": i for i in range(23)}}],
                  "nobody reads these keys: " + ", ".join(f"'k{i}' of 1 record" for i in range(20)) +
                  " and 3 more kinds\n"),
    "keys of messages": (TEMPLATE, [{"messages": [{**ASKED, "name": "Bob"}, {**SAID, "mood": "sad", "stars": 5}]}] * 2,
                         "the chat template does not write: 'name' of 2 messages, 'mood' of 2 messages, 'stars' of 2 "
                         "messages\n"),
    "keys of parts": (TEMPLATE, [{"messages": [{"role": "user", "content": [
        {"type": "text", "text": "ask", "mood": "sad"}, {"type": "text", "text": ".", "mood": None}]}, SAID]}],
                      "nobody reads these keys: 'mood' of 1 part of text\n"),
    "calls": (PLAIN, [{"messages": [ASKED, CALL, RESULT, CALL, RESULT, SAID], "tools": [{"name": "look"}]}],
              "the chat template does not write: 'tools' of 1 record, 'tool_calls' of 2 messages\n"),
    "some calls": (TEMPLATE.replace("m.tool_calls or []", "([] if m.content else m.tool_calls or [])"),
                   [{"messages": [ASKED, CALL, RESULT, {**CALL, "content": "look"}]}],
                   "the chat template does not write: 'tool_calls' of 1 message\n"),
    "a role": (TEMPLATE.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"),
               [{"messages": [ASKED, CALL, RESULT, SAID]}],
               "the chat template does not write: the content of 'tool' of 1 message\n"),
    "texts that are no parts": (TEMPLATE.replace("{{ m.content or '' }}", "{% for part in m.content %}{{ part.text }}"
                                                 "{% endfor %}"), [{"messages": [ASKED, {**SAID, "content": "a"}]}],
        "the chat template does not write: the content of 'user' of 1 message, the content of 'assistant' of 1 "
        "message\n"),
    "variables": (TEMPLATE, [{"messages": [ASKED, SAID], "chat_template_kwargs": {"enable_thinking": False}}],
                  "the chat template does not write: 'enable_thinking' of chat_template_kwargs of 1 record\n"),
    "a system beside a turn": (TEMPLATE, [{"system": "A.", "messages": [{"role": "system", "content": "B."}, ASKED,
                                                                       SAID]}],
                               "a system turn is taken instead of the record's own: 1 record\n"),
    "nothing to learn": (TEMPLATE, [{"messages": [ASKED, {**SAID, "weight": 0}]}, {"messages": [ASKED, SAID]}],
                         "nothing is learnt of: 1 conversation\n"),
}


@pytest.mark.parametrize("name", NOTICES)
def test_what_the_text_lacks_is_told(chats, capsys, name):
    template, records, told = NOTICES[name]
    for workers in (1, 2) if name == "keys of records" else (1,):
        chats[1]("\n".join(map(json.dumps, records)), "--workers", workers, template=template)
        assert capsys.readouterr().err == (told and f"preprocess_data: notice: {told}")


def test_keys_that_no_turns_are_made_of_are_told(chats, capsys):
    record = {"tools": "[{}]", "system": "A.", "id": 1, "conversations": [
        {"from": "system", "value": "B."}, {"from": "human", "value": "ask", "name": "Bob"},
        {"from": "gpt", "value": "say", "weight": 1}]}
    chats[1](json.dumps(record), "--template", "qwen2vl", "--columns", "system=system")
    assert capsys.readouterr().err == (
        "preprocess_data: notice: a system turn is taken instead of the record's own: 1 record\n"
        "preprocess_data: notice: nobody reads these keys: 'tools' of 1 record, 'id' of 1 record, 'name' of 1 "
        "message\n")


def test_variables_of_a_record_reach_its_template(chats):
    """`chat_template_kwargs`, as TRL takes it."""
    tokenizer, prepare = chats
    found = prepare("\n".join(json.dumps({"messages": [ASKED, SAID], "chat_template_kwargs": {"mood": mood}})
                              for mood in ("glad", "sad")),
                    template="{{ mood }}" + TEMPLATE)
    assert [tokenizer.decode(tokens).partition("<")[0] for tokens, _ in found] == ["glad", "sad"]


def test_a_developer_is_a_system_unless_the_template_knows_one(chats):
    tokenizer, prepare = chats
    record = json.dumps({"messages": [{"role": "developer", "content": "B."}, ASKED, SAID]})
    for template, role in ((TEMPLATE, "system"), (TEMPLATE + "{# developer #}", "developer")):
        (tokens, _), = prepare(record, template=template)
        assert tokenizer.decode(tokens).startswith(f"<|im_start|>{role}\nB.<|im_end|>")


def test_texts_and_their_completions(chats):
    """As TRL tokenises them: with the end token; tokens shared with the prompt alone are not learnt."""
    tokenizer, prepare = chats
    record = {"prompt": "the cat sat on ", "completion": "the mat"}
    (tokens, mask), (again, _) = prepare("\n".join(json.dumps({**record, "completion": record["completion"] + end})
                                                   for end in ("", "<|im_end|>")))
    assert tokens == again == tokenizer("the cat sat on the mat<|im_end|>")["input_ids"]
    prompt = tokenizer("the cat sat on ")["input_ids"]
    assert prompt[-1] != tokens[len(prompt) - 1]  # the blank is of the next token there
    assert mask == [0] * (len(prompt) - 1) + [1] * (len(tokens) - len(prompt) + 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_records_are_left_out(chats, capsys, workers):
    prepare = chats[1]
    good = json.dumps({"messages": [ASKED, SAID]})
    wrong = ['{"messages": [', '{"text": "a"}', '{"messages": []}', '{"messages": [{"role": "user", "content": 3}]}']
    lines = "\n".join([wrong[1], good, *wrong, good])
    with pytest.raises(SystemExit):
        prepare(lines)
    assert "in.jsonl, line 1: this is no conversation" in capsys.readouterr().err
    assert prepare(lines, "--skip-bad-records", "--workers", workers) == 2 * prepare(good)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "preprocess_data: notice: 5 bad records left out; the first 3" and len(told) == 4
    assert [re.search(r"in.jsonl, line (\d+)", line).group(1) for line in told[1:]] == ["1", "3", "4"]
    with pytest.raises(SystemExit):
        prepare(wrong[0], "--skip-bad-records")
    assert "holds no conversation" in capsys.readouterr().err


# Repeats answers before the last question without their reasoning, and calls too where there is none, as Qwen3's does.
THINKING = ("{% set last = namespace(question=0) %}{% for m in messages %}{% if m.role == 'user' %}"
            "{% set last.question = loop.index0 %}{% endif %}{% endfor %}"
            "{% for m in messages %}<|im_start|>{{ m.role }}\n"
            "{% if m.role == 'assistant' and loop.index0 > last.question and (loop.last or m.reasoning_content) %}"
            "<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
            "{{ m.content or '' }}{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}"
            "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
THOUGHT = {**SAID, "reasoning_content": "hm"}
FOR_TRAINING = {
    "two questions": [ASKED, THOUGHT, ASKED, SAID],
    "a call without reasoning": [ASKED, CALL, RESULT, SAID],
    "calls and questions": [{"role": "system", "content": "B."}, ASKED, {**CALL, "reasoning_content": "hm"}, RESULT,
                            RESULT, {**CALL, "content": "look"}, RESULT, SAID, ASKED, CALL, RESULT, THOUGHT]}


def thought_out(messages):
    """Each answer with its thought."""
    for message in messages:
        yield f"<|im_start|>{message['role']}\n", False
        if message["role"] == "assistant":
            yield f"<think>\n{message.get('reasoning_content', '')}\n</think>\n{message['content']}" + (
                "[look]" if "tool_calls" in message else "") + "<|im_end|>", True
        else:
            yield message["content"] + "<|im_end|>", False
        yield "\n", False


@pytest.mark.parametrize("name", FOR_TRAINING)
def test_the_training_form_writes_each_answer_as_the_last(chats, capsys, name):
    tokenizer, prepare = chats
    record = json.dumps({"messages": FOR_TRAINING[name]})
    with pytest.raises(SystemExit):
        prepare(record, template=THINKING)
    assert "give --training-form" in capsys.readouterr().err
    assert prepare(record, "--training-form", template=THINKING) == [meant(tokenizer, thought_out(FOR_TRAINING[name]))]
    assert capsys.readouterr().err == ("preprocess_data: notice: --training-form: answers differ from how the chat "
                                       "template repeats them later: 1 conversation\n")
    (tokens, mask), = prepare(record, "--training-form", "--mask-history", template=THINKING)
    last = tokenizer.decode([token for token, learnt in zip(tokens, mask) if learnt])
    assert last == list(thought_out(FOR_TRAINING[name]))[-2][0]


TRL = importlib.util.find_spec("trl")


@pytest.mark.skipif(TRL is None, reason="trl is not installed")
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_6"])
def test_the_training_form_of_qwen_has_the_tokens_of_trl(chats, name):
    """Of its published template, and TRL's that it trains with, whose mask has the line break behind an answer too, and
    the generation prompt's <think> where there is one."""
    templates = Path(TRL.submodule_search_locations[0]) / "chat_templates"
    tokenizer, prepare = chats
    tools, end = [{"type": "function", "function": {"name": "look", "parameters": {}}}], tokenizer.eos_token_id
    found = prepare("\n".join(json.dumps({"messages": messages, "tools": tools}) for messages in FOR_TRAINING.values()),
                    "--training-form", template=(templates / f"{name}.jinja").read_text())
    for (tokens, mask), messages in zip(found, FOR_TRAINING.values(), strict=True):
        theirs = tokenizer.apply_chat_template(messages, tools=tools, return_assistant_tokens_mask=True,
                                               chat_template=(templates / f"{name}_training.jinja").read_text())
        assert tokens == theirs["input_ids"]
        assert name != "qwen3" or mask == [int(learnt and last != end) for learnt, last in
                                           zip(theirs["assistant_masks"], [0, *tokens])]


def test_a_template_that_forgets_answers_has_no_training_form(chats, capsys):
    forgets = TEMPLATE.replace("in messages %}", "in messages %}{% if m.role == 'user' or loop.last %}").replace(
        "{% endfor %}{% if add", "{% endif %}{% endfor %}{% if add")
    with pytest.raises(SystemExit):
        chats[1](json.dumps({"messages": [ASKED, SAID, ASKED, SAID]}), "--training-form", template=forgets)
    assert "there is no --training-form of it" in capsys.readouterr().err
