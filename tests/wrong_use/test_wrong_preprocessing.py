"""launch/preprocess/preprocess_data.py with wrong flags, files and records: one message on stderr, and nothing
written."""
import argparse
import gzip
import json
import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megashard import FAILURE, PREPROCESS, USAGE, environment, run

PROGRAM = PREPROCESS / "preprocess_data.py"
GIVEN = ["--input", "{folder}/good.jsonl", "--output-prefix", "{folder}/out", "--tokenizer-model", "{folder}/tokenizer"]
# The last of a flag's values counts.
FLAGS = {
    "no input": (["--output-prefix", "out", "--tokenizer-model", "x"], USAGE,
                 "the following arguments are required: --input;"),
    "no output": (["--input", "x", "--tokenizer-model", "x"], USAGE, "are required: --output-prefix;"),
    "no tokenizer": (["--input", "x", "--output-prefix", "out"], USAGE, "are required: --tokenizer-model;"),
    "a misspelt flag": ([*GIVEN, "--append-eot"], USAGE,
                        "unrecognized arguments: --append-eot; did you mean --append-eod?"),
    "a flag of the trainer": ([*GIVEN, "--seq-length", "16"], USAGE, "unrecognized arguments: --seq-length 16"),
    "workers in words": ([*GIVEN, "--workers", "four"], USAGE, "argument --workers: invalid int value: 'four'"),
    "no workers": ([*GIVEN, "--workers", "0"], USAGE, "--workers and --log-interval must be at least 1"),
    "another tokenizer": ([*GIVEN, "--tokenizer-type", "GPT2BPETokenizer"], USAGE,
                          "is not supported; use HuggingFaceTokenizer"),
    "sentences": ([*GIVEN, "--split-sentences"], USAGE, "--split-sentences is for BERT-like models"),
    "an unknown format": ([*GIVEN, "--input-format", "parquet"], USAGE,
                          "argument --input-format: invalid choice: 'parquet'"),
    "an unknown form": ([*GIVEN, "--input-format", "conversations", "--conversation-form", "vicuna"], USAGE,
                        "invalid choice: 'vicuna'"),
    "a form of text": ([*GIVEN, "--conversation-form", "alpaca"], USAGE,
                       "--conversation-form belongs to --input-format conversations"),
    "a length of text": ([*GIVEN, "--max-length", "8"], USAGE, "--max-length belongs to --input-format conversations"),
    "too short a length": ([*GIVEN, "--input-format", "conversations", "--max-length", "0"], USAGE,
                           "a conversation has at least 2"),
    "both samplings": ([*GIVEN, "--input-format", "conversations", "--video-fps", "1", "--video-num-frames", "2"],
                       USAGE, "exclude each other; give one"),
    "no frames": ([*GIVEN, "--input-format", "conversations", "--video-fps", "0"], USAGE, "must be above 0"),
    "an end of conversations": ([*GIVEN, "--input-format", "conversations", "--append-eod"], USAGE,
                                "the chat template ends the turns"),
    "bad records of text": ([*GIVEN, "--input-format", "text", "--skip-bad-records"], USAGE,
                            "--skip-bad-records is about records of JSON"),
    "two templates": ([*GIVEN, "--input-format", "conversations", "--template", "qwen2vl", "--training-form"], USAGE,
                      "--template takes its place; give one"),
    "an end that is not appended": ([*GIVEN, "--eod-token", "<eos>"], USAGE, "--eod-token needs --append-eod"),
    "an unknown end": ([*GIVEN, "--append-eod", "--eod-token", "<no>"], USAGE, "has no token '<no>'"),
    "no end that is known": ([*GIVEN, "--append-eod"], USAGE,
                             "names an end-of-document token for --append-eod; give one with"),
    "blocks of JSON": ([*GIVEN, "--lines-per-document", "3"], USAGE,
                       "--lines-per-document takes a number of at least 1 and"),
    "blocks of no lines": ([*GIVEN, "--input-format", "text", "--lines-per-document", "0"], USAGE,
                           "takes a number of at least 1"),
    "no such input": ([*GIVEN, "--input", "{folder}/none.jsonl"], USAGE, "there is no input file"),
    "a folder of input": ([*GIVEN, "--input", "{folder}/tokenizer"], USAGE, "it is a folder: give the files in it"),
    "a pattern without files": ([*GIVEN, "--input", "{folder}/none*.jsonl"], USAGE, "none*.jsonl; check --input"),
    "no folder for the output": ([*GIVEN, "--output-prefix", "{folder}/none/out"], USAGE,
                                 "none of --output-prefix does not exist; create"),
    "an output without a name": ([*GIVEN, "--output-prefix", "{folder}/tokenizer/"], USAGE,
                                 "is a folder; give a name in it, such as"),
    "a file for the output's folder": ([*GIVEN, "--output-prefix", "{folder}/good.jsonl/out"], USAGE,
                                       "of --output-prefix does not exist"),
    "no such tokenizer": ([*GIVEN, "--tokenizer-model", "{folder}/none"], USAGE,
                          "takes a tokenizer.json or a directory that has one"),
    "a tokenizer of the hub": ([*GIVEN, "--tokenizer-model", "Qwen/Qwen3-0.6B"], USAGE,
                               "run `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`"),
    "a tokenizer in the hub's cache": ([*GIVEN, "--tokenizer-model", "some/model"], USAGE,
                                       "models--some--model/snapshots/abc"),
    "a model of the hub for conversations": ([*GIVEN, "--input", "{folder}/talk.jsonl", "--input-format",
                                              "conversations", "--tokenizer-model", "Qwen/Qwen3-0.6B"], USAGE,
                                             "run `hf download Qwen/Qwen3-0.6B"),
    "a file for conversations": ([*GIVEN, "--input", "{folder}/talk.jsonl", "--input-format", "conversations",
                                  "--tokenizer-model", "{folder}/tokenizer/tokenizer.json"], USAGE,
                                 "is no model directory; conversations need its chat"),
    "a tokenizer of sentencepiece": ([*GIVEN, "--tokenizer-model", "{folder}/sentencepiece"], USAGE,
                                     "no tokenizer.json; write one with transformers"),
    "a tokenizer that is none": ([*GIVEN, "--tokenizer-model", "{folder}/good.jsonl"], FAILURE,
                                 "give the tokenizer.json of a Hugging Face model"),
}
TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]}
HALF = "has half of a surrogate pair"


def talk(**answer):
    return {"messages": [TALK["messages"][0], {**TALK["messages"][1], **answer}]}


# The file's content, the format, and a part of the message.
RECORDS = {
    "not JSON": ('{"text": "a"}\n{"text": ', "jsonl", "line 2, is not JSON"),
    "plain text": ("the cat sat\n", "jsonl", "use --input-format text for plain text"),
    "a record on several lines": ('{\n "text": "a"\n}\n', "jsonl", "give each record a line of its own"),
    "a record that is a list": ('{"text": "a"}\n["a"]\n', "jsonl", "line 2, is not a JSON object such as"),
    "an array of texts": ('["a", "b"]', "jsonl", "line 1, is not a JSON object"),
    "an array that breaks off": ('[\n{"text": "a"},\n{"text": "a"}\n', "jsonl",
                                 "breaks off or lacks a comma after the record at line 3"),
    "an array with a bad record": ('[\n{"text": "a"},\n{"text" "a"}]', "jsonl", "the record at line 3, is not JSON"),
    "another key": ('{"body": "a"}\n', "jsonl", "line 1, has no key 'text' (it has body); set --json-keys"),
    "no text": ('{"text": 3}\n', "jsonl", "line 1: the value of 'text' is no text"),
    "conversations as text": (json.dumps(TALK), "jsonl", "(it has messages); give --input-format conversations"),
    "text as conversations": ('{"text": "a"}\n', "conversations",
                              "it has none of the keys messages, conversations, instruction, completion (it has text)"),
    "preferences as conversations": ('{"chosen": [], "rejected": []}', "conversations",
                                     "'chosen' is of preference data"),
    "a record of two forms": ('{"messages": [], "conversations": []}', "conversations",
                              "has messages and conversations, each of which may be the conversation; say which by"),
    "text behind an array": ('[{"text": "a"}]\nthe end', "jsonl", "line 2: behind the JSON array stands 'the end'"),
    "an array behind an array that breaks off": ('[{"text": "a"}] [{"text": "a"}', "jsonl", "breaks off or lacks a"),
    "half of a character": ('{"text": "\\ud83d"}\n', "jsonl", "line 1: the text has half of a surrogate pair"),
    "an empty file": ("", "jsonl", "holds no text at all"),
    "an empty file of conversations": ("", "conversations", "holds no conversation; check --input"),
    "another encoding": ("caf\u00e9\n".encode("latin-1"), "text", "after line 0, is not UTF-8; convert it"),
    "a gzip file that was cut": (gzip.compress(b'{"text": "a"}\n' * 999)[:-9], "jsonl", "is a damaged gzip file"),
    "a Parquet file": (b"PAR1\0\0\0", "jsonl", "is a Parquet file; write it as lines of JSON first"),
    "an LFS pointer": ("version https://git-lfs.github.com/spec/v1\n", "jsonl", "is a Git LFS pointer, not the data"),
    "a zip file": (b"PK\x03\x04", "text", "is a zip archive; unpack it first"),
}
# Of conversations: the record, its form, and a part of the message.
CONVERSATIONS = {
    "a turn without a text": ({"conversations": [{"from": "human"}]}, "sharegpt",
                              "'value' is missing; correct or delete the record"),
    "a turn of nobody": ({"conversations": [{"value": "a"}]}, "sharegpt",
                         "a message has the role None; known are system, developer, user"),
    "a turn of a list": ({"conversations": [{"from": [], "value": "a"}]}, "sharegpt", "a message has the role []"),
    "a turn that is a text": ({"messages": ["a"]}, "messages", "a turn is no JSON object"),
    "a misspelt role": ({"messages": [{"role": "Assistnt", "content": "a"}]}, "messages",
                        "a message has the role 'Assistnt'; did you mean 'assistant'?"),
    "a turn of two": ({"conversations": [{"from": "human", "role": "gpt", "value": "a"}]}, "sharegpt",
                      "a turn has 'from' and 'role', which differ"),
    "no turns": ({"messages": []}, "messages", "its list 'messages' is empty"),
    "turns of another form": (TALK, "sharegpt", "has no list 'conversations'; each is"),
    "an answer learnt by half": (talk(weight=0.5), "messages", "'weight' of a turn is 0.5; a turn is learnt or not"),
    "an answer learnt in words": (talk(train="no"), "messages", "'train' of a turn is 'no'; a turn is learnt or not"),
    "an answer learnt and not": (talk(weight=0, train=True), "messages", "'weight' and 'train' of a turn contradict"),
    "parts of an answer": (talk(train_detail=[{"begin_offset": 0, "end_offset": 1, "train": False}]), "messages",
                           "'train_detail' of a turn is not read"),
    "a question to learn": ({"messages": [{**TALK["messages"][0], "train": True}, TALK["messages"][1]]}, "messages",
                            "'train' asks to learn a turn of the user; only answers are learnt"),
    "arguments of words": (talk(tool_calls=[{"function": {"name": "f", "arguments": "city"}}]), "messages",
                           "'arguments' of a tool call 'city' is not JSON"),
    "arguments of a list": (talk(tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}]), "messages",
                            "'arguments' of a tool call are no JSON object"),
    "a call of nothing": (talk(tool_calls=[{"function": {}}]), "messages", "a tool call has no 'name'"),
    "a call that is a text": (talk(tool_calls=["f"]), "messages", "a tool call is no JSON object"),
    "calls that are a number": (talk(tool_calls=3), "messages", "'tool_calls' is no list"),
    "both kinds of calls": (talk(tool_calls=[{"name": "f"}], function_call={"name": "f"}), "messages",
                            "has 'tool_calls' and 'function_call'"),
    "a question with a call": ({"messages": [{"role": "user", "content": "a", "tool_calls": [{"name": "f"}]}]},
                               "messages", "a message of the user has tool calls"),
    "a call in words": ({"conversations": [{"from": "function_call", "value": "f(a)"}]}, "sharegpt",
                        "a function_call 'f(a)' is not JSON"),
    "tools in words": ({"tools": "look", **TALK}, "messages", "'tools' 'look' is not JSON"),
    "tools that are names": ({"tools": ["look"], **TALK}, "messages", "'tools' is no list of JSON objects"),
    "no content": ({"messages": [{"role": "user"}, *TALK["messages"]]}, "messages",
                   "a message of the user has no content"),
    "a list of systems": ({"system": ["a"], **TALK}, "messages", "'system' is no text"),
    "variables of a list": ({"chat_template_kwargs": [1], **TALK}, "messages", "is no JSON object"),
    "variables of the program": ({"chat_template_kwargs": {"tokenize": 1}, **TALK}, "messages", "not set 'tokenize'"),
    "a bad answer of preferences": ({"kto_tag": False, **TALK}, "messages", "'kto_tag' is of preference data"),
    "a bad completion": ({"prompt": "a", "completion": "a", "label": False}, "completion",
                         "'label' is of preference data"),
    "a completion with a question": ({"prompt": TALK["messages"][:1], "completion": TALK["messages"]}, "completion",
                                     "its completion has a turn of 'user'"),
    "a completion that is a list": ({"prompt": "a", "completion": []}, "completion", "'completion' is no text"),
    "a prompt with tools": ({"prompt": "a", "completion": "a", "tools": [{}]}, "completion",
                            "'tools' beside a prompt that is a text has no place"),
    "pictures beside messages": ({"images": ["a.png"], **TALK}, "messages", "pictures beside the turns are not read"),
    "turns without an answer": ({"conversations": [{"from": "human", "value": "a"}]}, "sharegpt",
                                "end with an answer of the assistant"),
    "turns that begin with an answer": ({"conversations": [{"from": "gpt", "value": "a"}]}, "sharegpt",
                                        "must begin with a question"),
    "turns with a picture": ({"image": "a.png", "conversations": [{"from": "human", "value": "<image> a"}]}, "sharegpt",
                             "pictures beside the turns are not read"),
    "an instruction without an answer": ({"instruction": "a"}, "alpaca", "'output' is missing"),
    "an answer without an instruction": ({"output": "a"}, "alpaca", "'instruction' is missing"),
    "an instruction that is a number": ({"instruction": 3, "output": "a"}, "alpaca", "'instruction' is no text"),
    "a history of texts": ({"instruction": "a", "output": "a", "history": ["a"]}, "alpaca",
                           "'history' is no list of pairs"),
    "a record that is no object": (["a"], "alpaca", "is no JSON object"),
    "messages of turns": ({"conversations": []}, "messages", "has no list 'messages'"),
    "half of a character": ({"instruction": "\ud83d", "output": "a"}, "alpaca", HALF),
    "half of a character in a thought": (talk(reasoning_content="\ud83d"), "messages", HALF),
    "half of a character in a system": ({"system": "\ud83d", **TALK}, "messages", HALF),
    "half of a character in a call": (talk(tool_calls=[{"function": {"name": "f", "arguments": {"a": "\ud83d"}}}]),
                                      "messages", HALF),
    "half of a character behind a call": (talk(tool_calls=[{"name": "f", "arguments": '{"a": "\\ud83d"}'}]), "messages",
                                          HALF),
}


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preprocessing")
    (folder / "tokenizer").mkdir()
    (folder / "sentencepiece").mkdir()
    (folder / "sentencepiece" / "tokenizer.model").write_bytes(b"\n\x0e")
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "good.jsonl").write_text('{"text": "a a"}\n')
    (folder / "talk.jsonl").write_text(json.dumps(TALK) + "\n")
    cached = folder / "cache" / "models--some--model"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    return folder


@pytest.fixture(scope="session")
def programs():
    """Runs the programs in this process, which has imported their packages: starting Python for each case takes
    seconds."""
    import preprocess_data

    return preprocess_data


def ends_in_one_message(programs, place, monkeypatch, capsys, words, code, message):
    monkeypatch.setenv("HF_HUB_CACHE", str(place / "cache"))
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *[word.format(folder=place) for word in words]])
    with pytest.raises(SystemExit) as ended:
        programs.main()
    said = capsys.readouterr().err
    assert message in said and said.startswith("preprocess_data: ") and said.count("\n") == 1
    assert ended.value.code == code
    assert not list(place.glob("out*"))


@pytest.mark.parametrize("name", FLAGS)
def test_wrong_flags(programs, place, monkeypatch, capsys, name):
    ends_in_one_message(programs, place, monkeypatch, capsys, *FLAGS[name])


@pytest.mark.parametrize("name", RECORDS)
def test_wrong_files(programs, place, monkeypatch, capsys, name):
    content, form, message = RECORDS[name]
    (place / "in").write_bytes(content if isinstance(content, bytes) else content.encode())
    ends_in_one_message(programs, place, monkeypatch, capsys, [*GIVEN, "--input", "{folder}/in", "--input-format",
                                                                form], FAILURE,
                         message)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_wrong_conversations(programs, name):
    """Without a tokenizer: missing keys of a record are found first."""
    from preprocess_conversations import Encoder
    from preprocess_input import RecordError
    record, form, message = CONVERSATIONS[name]
    encoder = Encoder.__new__(Encoder)
    encoder.form, encoder.pictures, encoder.turns = form, argparse.Namespace(placeholders={}), None
    encoder.tokenizer, encoder.flags = argparse.Namespace(chat_template=""), argparse.Namespace(skip_bad_records=False)
    with pytest.raises(RecordError) as refused:
        encoder.encode(("in.jsonl, line 2", record, ""))
    assert message in str(refused.value) and str(refused.value).startswith("in.jsonl, line 2: ")


def test_the_program_itself_ends_so(place):
    """Started as a user does: no traceback, and the exit code."""
    words = [word.format(folder=place) for word in [*GIVEN, "--tokenizer-model", "Qwen/Qwen3-0.6B"]]
    done = run(sys.executable, PROGRAM, *words, expect=USAGE, env=environment(HF_HUB_CACHE=str(place / "none")))
    assert done.stderr.count("\n") == 1 and "hf download" in done.stderr


def test_a_deep_record(place):
    """In a process of its own: in pytest's the recursion limit is reached in pytest's hooks too."""
    (place / "deep.jsonl").write_text('{"text": ' + "[" * 100000)
    words = [word.format(folder=place) for word in [*GIVEN, "--input", "{folder}/deep.jsonl"]]
    done = run(sys.executable, PROGRAM, *words, expect=FAILURE)
    assert done.stderr.count("\n") == 1 and "line 1, is not JSON" in done.stderr
    assert not list(place.glob("out*"))
