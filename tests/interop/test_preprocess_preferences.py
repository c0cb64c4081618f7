"""--input-format preferences: the tokens and masks of TRL's trainers, in each form of record, or a message."""
import argparse
import importlib.util
import json
import sys

import pytest
from safetensors.torch import load_file
from tokenizers import processors

from conversation_spellings import TEMPLATE
from test_preprocess_chats import make_chat_tokenizer
from tiny_vision import ASKED, make_processors, preprocessing, said, write_conversations

needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
KTO_BATCH = 3


def user(text):
    return {"role": "user", "content": text}


LOOK = {"role": "assistant", "content": "", "tool_calls": [{"type": "function",
                                                            "function": {"name": "look", "arguments": {}}}]}
SEEN = {"role": "tool", "name": "look", "content": "the mat"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
QUESTIONS = [[user("where?")], [{"role": "system", "content": "la"}, user("who sat?"), said("the cat"), user("where?")],
             [user("")]]
ANSWERS = [([said("on the mat")], [said("on the cat la la")]), ([said("where it sat")], [said("the")]),
           ([LOOK, SEEN, said("the mat")], [said("la")])]
MESSAGES = [{"prompt": question, "chosen": chosen, "rejected": rejected}
            for question, (chosen, rejected) in zip(QUESTIONS, ANSWERS)]
TEXTS = [{"prompt": "the cat sat on ", "chosen": "the mat", "rejected": ""},  # the blank joins one of the answers
         {"prompt": "where?", "chosen": " on the mat<|im_end|>", "rejected": " the cat sat"},
         {"prompt": "la la", "chosen": "", "rejected": " la"}]
PAIRS = {
    "messages": MESSAGES, "texts": TEXTS,
    "messages that begin with the question": [  # without calls: in `datasets` all turns of a column have their keys
        {key: each["prompt"] + each[key] for key in ("chosen", "rejected")} for each in MESSAGES[:2]],
    "texts that begin with the question": [{"chosen": "where? 12", "rejected": "where? 34"},
                                           {"chosen": "the cat sat", "rejected": "the cat sat la"}],
    "tools and variables": [{**each, "tools": TOOLS, "chat_template_kwargs": {"mood": "glad"}} for each in MESSAGES],
}
SINGLES = {form: [{"prompt": each["prompt"], "completion": each[key], "label": key == "chosen"}
                  for key in ("chosen", "rejected") for each in pairs]
           for form, pairs in (("messages", MESSAGES), ("texts", TEXTS))}


@pytest.fixture(scope="module")
def model(folder):
    """Text gets <|begin|> by the tokenizer, messages what the template says."""
    tokenizer = make_chat_tokenizer(folder, "{{ mood }}" + TEMPLATE)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A",
                                                                               special_tokens=[("<|begin|>", 0)])
    tokenizer.save_pretrained(folder)
    return folder


def prepare(folder, lines, *flags):
    """The set's samples as (tokens, mask), and its other tensors."""
    import preprocess_data

    lines = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "in.jsonl").write_text("\n".join(lines))
    given, sys.argv = sys.argv, ["preprocess_data.py", "--input", str(folder / "in.jsonl"), "--input-format",
                                 "preferences", "--tokenizer-model", str(folder), "--output-prefix",
                                 str(folder / "out"), *map(str, flags)]
    try:
        preprocess_data.main()
    finally:
        sys.argv = given
    made = load_file(folder / "out.vision.safetensors")
    return samples_of(made), made


def samples_of(made):
    ends = [0, *made["sample_ends"].tolist()]
    return [(made["tokens"][first:end].tolist(), made["loss_mask"][first:end].tolist())
            for first, end in zip(ends, ends[1:])]


def prepared_by_trl(trainer, tokenizer, records, **settings):
    """The data set that a TRL trainer makes of records."""
    import trl
    from datasets import Dataset

    arguments = getattr(trl, f"{trainer}Config")(output_dir="none", bf16=False, use_cpu=True, report_to="none",
                                                 **settings)
    itself = argparse.Namespace(_tokenizer=tokenizer, calculate_KL=True)
    return getattr(trl, f"{trainer}Trainer")._prepare_dataset(itself, Dataset.from_list(records), tokenizer, arguments,
                                                              "train")


def whole(row, answer, length=None):
    tokens, mask = row["prompt_ids"] + row[answer], [0] * len(row["prompt_ids"]) + [1] * len(row[answer])
    return tokens[:length], mask[:length]


@needs_trl
@pytest.mark.parametrize("form", PAIRS)
def test_pairs_have_the_tokens_of_trl(model, form):
    from transformers import AutoTokenizer

    theirs = prepared_by_trl("DPO", AutoTokenizer.from_pretrained(model), PAIRS[form], max_length=None)
    samples, made = prepare(model, PAIRS[form])
    assert samples == [whole(row, f"{answer}_ids") for row in theirs for answer in ("chosen", "rejected")]
    assert not [name for name in made if name.startswith("conversation.")]


@needs_trl
@pytest.mark.parametrize("form", SINGLES)
@pytest.mark.parametrize("length", [None, 0])
def test_answers_with_labels_have_the_tokens_of_trl(model, form, length):
    """With their partners; of these no more tokens than the longest answer has with its question."""
    from transformers import AutoTokenizer

    flags = ["--kto-batch-size", KTO_BATCH]
    if length is not None:
        length = max(len(tokens) for tokens, _ in prepare(model, SINGLES[form], *flags)[0][::2])
        flags += ["--max-length", length]
    theirs = prepared_by_trl("KTO", AutoTokenizer.from_pretrained(model), SINGLES[form], max_length=length,
                             per_device_train_batch_size=KTO_BATCH)
    samples, made = prepare(model, SINGLES[form], *flags)
    assert samples == [whole(row, answer, length) for row in theirs for answer in ("completion_ids",
                                                                                   "KL_completion_ids")]
    labels = [label for row in theirs for label in (float(row["label"]), 0.0)]
    assert made["conversation.desirable"].tolist() == labels


def turns_of(messages):
    return [{"from": {"user": "human", "assistant": "gpt"}.get(each["role"], each["role"]), "value": each["content"]}
            for each in messages]


def test_other_forms_mean_the_same(model):
    """LLaMA-Factory's and ROLL's as TRL's."""
    pairs = [{"conversations": turns_of(question), **{key: turns_of(each[key])[0] for key in ("chosen", "rejected")}}
             for question, each in zip(QUESTIONS[:2], MESSAGES)]
    assert prepare(model, pairs)[0] == prepare(model, MESSAGES[:2])[0]
    asked = {"instruction": "where?", "input": "la", "chosen": "on the mat", "rejected": "la la"}
    same = {"prompt": [user("where?\nla")], "chosen": [said("on the mat")], "rejected": [said("la la")]}
    assert prepare(model, [asked])[0] == prepare(model, [same])[0]
    tags = (True, False)
    wanted = prepare(model, [{"prompt": [user("who?")], "completion": [said("the cat")], "label": tag} for tag in tags])
    talk = [user("who?"), said("the cat")]
    for record, key in (({"messages": talk}, "label"), ({"conversations": turns_of(talk)}, "kto_tag"),
                        ({"instruction": "who?", "output": "the cat"}, "kto_tag")):
        samples, made = prepare(model, [{**record, key: tag} for tag in tags])
        assert samples == wanted[0] and made["conversation.desirable"].tolist() == [1, 0, 0, 0]


def test_margins(model):
    _, made = prepare(model, [{**TEXTS[0], "margin": 0.5}, {**TEXTS[1], "margin": 2}])
    assert made["conversation.margin"].tolist() == [0.5, 0.5, 2, 2]


@pytest.mark.parametrize("workers", [1, 2])
def test_pairs_are_left_out_whole(model, capsys, workers):
    long = {**TEXTS[1], "rejected": " la" * 99}
    wrong = ['{"prompt": ', {"prompt": "a", "chosen": "b"}, {**TEXTS[0], "margin": 1}]
    lines = [wrong[0], TEXTS[0], wrong[1], long, TEXTS[1], wrong[2]]
    samples, _ = prepare(model, lines, "--skip-bad-records", "--max-length", 50, "--workers", workers)
    told = capsys.readouterr()
    assert samples == prepare(model, TEXTS[:2])[0]
    assert "2 pairs of answers (1 longer ones left out)" in told.out and "3 bad records left out" in told.err


def test_what_a_question_loses_before_its_answer_is_told(model, capsys):
    prepare(model, TEXTS[:2])
    assert capsys.readouterr().err == ("preprocess_data: notice: the end of a question has other tokens before its "
                                       "answer, which are learnt: 1 record\n")
    prepare(model, [{**MESSAGES[0], "source": "x", "chosen": [{**said("la"), "stars": 5}]}])
    assert capsys.readouterr().err.split("notice: ")[1:] == [
        "nobody reads these keys: 'source' of 1 record\npreprocess_data: ",
        "the chat template does not write: 'stars' of 1 message\n"]


def test_both_answers_have_the_pictures_of_their_question(tmp_path):
    make_processors(tmp_path)
    answers = [said("the cat"), said("on")]
    samples, made = prepare(tmp_path, [{"prompt": [ASKED], "chosen": answers[:1], "rejected": answers[1:]}])
    write_conversations(tmp_path, [[ASKED, answer] for answer in answers], tmp_path / "talk")
    wanted = load_file(tmp_path / "talk.vision.safetensors")
    assert [tokens for tokens, _ in samples] == [tokens for tokens, _ in samples_of(wanted)]
    for name in ("image_ends", "image_grid_thw", "pixel_values"):
        assert made[name].equal(wanted[name]), name


PAIR = TEXTS[0]
TAGGED = {"prompt": "a", "completion": "b", "label": True}
WRONG = {
    "no preference": ({"messages": []}, PAIR, "it has neither chosen and rejected nor kto_tag or label (it has mess"),
    "a pair and a single answer": ({**PAIR, "label": True}, PAIR, "has a pair of answers and 'label'; delete one"),
    "another kind": (TAGGED, PAIR, "the record is of single answers, the set's first of pairs"),
    "a margin of some": ({**PAIR, "margin": 1}, PAIR, "the record has a 'margin', unlike the set's first"),
    "a margin in words": ({**PAIR, "margin": "1"}, {**PAIR, "margin": 1}, "'margin' is 1, which is no number of"),
    "a margin without end": ({**PAIR, "margin": float("nan")}, {**PAIR, "margin": 1}, "'margin' is nan, which is no"),
    "a margin that is too large": ({**PAIR, "margin": 10**400}, {**PAIR, "margin": 1}, "which is no number of float32"),
    "a label in words": ({**TAGGED, "label": "good"}, TAGGED, "'label' is 'good'; an answer is good or bad"),
    "two labels": ({**TAGGED, "kto_tag": False}, TAGGED, "'kto_tag' and 'label' contradict each other"),
    "two questions": ({"instruction": "a", "messages": [], "chosen": "b", "rejected": "c"}, PAIR,
                      "messages and instruction, each of which may be the question"),
    "a text and messages": ({**PAIR, "chosen": [said("b")], "prompt": [user("a")]}, PAIR,
                            "'rejected' is no list of turns, as the question before it is"),
    "messages behind a text": ({**PAIR, "chosen": [said("b")], "rejected": [said("c")]}, PAIR,
                               "'chosen' and 'rejected' do not begin with the same question"),
    "no question in texts": ({"chosen": "a", "rejected": "b"}, PAIR, "do not begin with the same question"),
    "texts with an unknown question": ({"chosen": "the a", "rejected": "the b", "question": "?"}, PAIR,
                                       "texts with 'question' beside them"),
    "the question twice": ({**MESSAGES[0], "chosen": [user("a"), said("b")]}, PAIR,
                           "'chosen' does not begin with a turn of the assistant"),
    "a mark on an answer": ({**MESSAGES[0], "chosen": [{**said("b"), "weight": 0}]}, PAIR,
                            "a turn of 'chosen' is marked as not learnt"),
    "a completion without a prompt": ({"completion": "a", "label": True}, TAGGED,
                                      "a tagged answer has 'prompt' and 'completion', or one of messages, "),
    "an instruction with an output": ({"instruction": "a", "output": "b", "chosen": "b", "rejected": "c"}, PAIR,
                                      "an 'output' beside chosen and rejected has no place"),
    "pictures beside turns": ({**MESSAGES[0], "images": ["a.png"]}, PAIR, "pictures beside the turns are not read"),
    "tools beside texts": ({**PAIR, "tools": [{}]}, PAIR, "'tools' beside a prompt that is a text has no place"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_records_are_named(name):
    from preference_forms import kind_of, preference_of
    from preprocess_input import RecordError

    record, first, message = WRONG[name]
    with pytest.raises(RecordError) as refused:
        preference_of("in.jsonl, line 2", record, kind_of("in.jsonl, line 1", first))
    assert message in str(refused.value) and str(refused.value).startswith("in.jsonl, line 2: ")


JUNK = (None, 3, 0.5, True, "", "a", [], [3], [None], [[]], ["a"], {}, {"role": 3}, {"role": "user"}, [{"role": []}],
        [{"role": "assistant", "content": 3}], [{"from": "gpt", "value": {}}])


def test_broken_records_are_named(model):
    from preference_forms import PAIRS, SINGLES, Kind
    from preprocess_input import RecordError
    from preprocess_preferences import PreferenceEncoder

    talk = {"conversations": turns_of(QUESTIONS[0])}
    pair = {"chosen": turns_of([said("la")])[0], "rejected": turns_of([said("the")])[0]}
    texts = {"instruction": "a", "input": "b", "history": [["c", "d"]]}
    of_kind = {Kind(PAIRS): [MESSAGES[1], TEXTS[0], {**talk, **pair}, {**texts, "chosen": "la", "rejected": "the"}],
               Kind(SINGLES): [TAGGED, {"conversations": [*talk["conversations"], pair["chosen"]], "kto_tag": True}]}
    refused = made = 0
    for kind, records in of_kind.items():
        encoder = PreferenceEncoder(preprocessing(model), kind)
        for broken in [{**record, key: junk} for record in records for key in record for junk in JUNK]:
            try:
                made += len(encoder.encode(("in.jsonl, line 2", broken, "")))
            except RecordError as error:
                refused += 1
                assert str(error).startswith("in.jsonl, line 2"), broken
    assert refused > 200 and made > 10


@pytest.mark.parametrize("lines, flags, message", [
    ([PAIR], ["--kto-batch-size", 4], "--kto-batch-size is about single answers with a label"),
    ([TAGGED], ["--kto-batch-size", 1], "among fewer than 2 answers there is no other"),
    ([PAIR], ["--mask-history"], "--mask-history belongs to --input-format conversations"),
    ([PAIR], ["--max-length", 2], "holds no preference (of at most --max-length tokens)"),
    ([], [], "holds no preference; check --input"),
    ([{"prompt": "la", "chosen": "la"}], [], "line 1: this is no preference"),
])
def test_refused(model, capsys, lines, flags, message):
    with pytest.raises(SystemExit):
        prepare(model, lines, *flags)
    assert message in capsys.readouterr().err
