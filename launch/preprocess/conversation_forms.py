"""The forms in which conversations are published, as the messages that chat templates take.

    messages    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    sharegpt    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    alpaca      {"instruction": "...", "input": "...", "output": "..."}
    completion  {"prompt": [messages], "completion": [messages]}; both may be texts, which no template wraps

A turn of any of them may have role and content, or from and value.
"""

import difflib
import inspect
from typing import NamedTuple

from learnt_turns import is_learnt, without_marks
from preprocess_input import RecordError
from tool_calls import call_of_text, given_calls, given_tools

FORMS = {"messages": "messages", "sharegpt": "conversations", "alpaca": "instruction",
         "completion": "completion"}  # key that identifies each form
OTHER_KEYS = {"messages": (), "sharegpt": (), "alpaca": ("input", "output", "history"), "completion": ("prompt",)}
COMMON_KEYS = ("system", "tools", "functions", "chat_template_kwargs")
ROLES = {"system": "system", "developer": "developer", "user": "user", "human": "user", "assistant": "assistant",
         "gpt": "assistant", "chatgpt": "assistant", "function_call": "assistant", "tool": "tool",
         "observation": "tool", "function": "tool"}
PICTURES = ("image", "images", "video", "videos", "audio", "audios")
PREFERENCES = ("chosen", "rejected", "kto_tag")

# Kinds of reports about parts of a record that are missing in its tokens.
UNREAD = "nobody reads these keys"
SYSTEM_TURN = "a system turn is taken instead of the record's own"


class Conversation(NamedTuple):
    messages: list
    learnt: list  # one per message
    tools: list = None
    variables: dict = {}  # for the chat template
    told: tuple = ()  # (how, what, of what)


class Completion(NamedTuple):
    """Two texts; the second is learnt."""
    prompt: str
    text: str
    told: tuple = ()


def form_of(where, item):
    """By the keys of a set's first record."""
    if isinstance(item, RecordError):
        raise item
    has = [form for form, key in FORMS.items() if isinstance(item, dict) and item.get(key) is not None]
    if len(has) == 1:
        return has[0]
    if has:
        raise RecordError(f"{where}: the record has {' and '.join(FORMS[form] for form in has)}, each of which may be "
                          "the conversation; say which by --conversation-form")
    for key in PREFERENCES:
        if isinstance(item, dict) and key in item:
            raise preference(where, key)
    found = ", ".join(sorted(map(str, item))) or "none" if isinstance(item, dict) else "no JSON object"
    raise RecordError(f"{where}: this is no conversation: it has none of the keys {', '.join(FORMS.values())} (it has "
                      f"{found}); text without turns is read by --input-format jsonl")


def preference(where, key):
    return RecordError(f"{where}: {key!r} is of preference data, which --input-format preferences reads; to learn "
                       "answers alone, make records of those, without that key")


def read(where, item, form, knows_developer=False):
    """The Conversation or Completion of a record; a template that knows no developer gets a system."""
    if not isinstance(item, dict):
        raise RecordError(f"{where}: the record is no JSON object; correct or delete it")
    for key in PREFERENCES + (("label",) if form == "completion" else ()):
        if item.get(key) is not None:
            raise preference(where, key)
    if any(item.get(key) for key in PICTURES):
        raise RecordError(f"{where}: pictures beside the turns are not read; give them as parts of a message, in the "
                          "messages form, or tokenise by --template")
    known = {FORMS[form], *OTHER_KEYS[form], *COMMON_KEYS}
    told = [(UNREAD, repr(key), "record") for key, value in item.items() if key not in known and value is not None]
    if form == "completion" and isinstance(item.get("prompt"), str):
        return completion(where, item, told)
    if form == "alpaca":
        turns = alpaca(where, item)
    elif form == "completion":
        turns = prompted(where, item)
    else:
        turns = [(turn, True) for turn in turns_in(where, item, FORMS[form])]
    messages = [message_of(where, turn, knows_developer) for turn, _ in turns]
    learnt = [is_learnt(where, turn, message["role"]) and may for (turn, may), message in zip(turns, messages)]
    if system := text_in(where, item, "system", ""):
        if messages[0]["role"] in ("system", "developer"):
            if messages[0].get("content") != system:
                told.append((SYSTEM_TURN, "", "record"))
        else:
            messages.insert(0, {"role": "system", "content": system})
            learnt.insert(0, False)
    require_order(where, messages)
    return Conversation(messages, learnt, given_tools(where, item, wrap=form in ("sharegpt", "alpaca")),
                        variables_of(where, item), tuple(told))


def text_in(where, item, key, missing=None):
    """A string; `missing`: the value for an absent key or null."""
    value = item.get(key)
    value = missing if value is None else value
    if not isinstance(value, str):
        raise RecordError(f"{where}: {key!r} " + ("is missing" if value is None else "is no text") +
                          "; correct or delete the record")
    return value


def turns_in(where, item, key):
    turns = item.get(key)
    if not isinstance(turns, list):
        raise RecordError(f"{where}: the record has no list {key!r}; each is {{{key!r}: [{{\"role\": ..., "
                          "\"content\": ...}]}")
    if not turns:
        raise RecordError(f"{where}: its list {key!r} is empty; delete the record")
    return turns


def prompted(where, item):
    """The prompt is not learnt."""
    turns = [(turn, False) for turn in turns_in(where, item, "prompt")]
    turns += [(turn, True) for turn in turns_in(where, item, "completion")]
    for turn, of_completion in turns:
        if of_completion and isinstance(turn, dict) and ROLES.get(str(turn.get("role"))) not in ("assistant", None):
            raise RecordError(f"{where}: its completion has a turn of {turn['role']!r}; give the whole conversation "
                              "as \"messages\"")
    return turns


def completion(where, item, told):
    for key in COMMON_KEYS:
        if item.get(key):
            raise RecordError(f"{where}: {key!r} beside a prompt that is a text has no place, since no chat template "
                              "is applied; give messages instead")
    return Completion(item["prompt"], text_in(where, item, "completion"), tuple(told))


def alpaca(where, item):
    turns = []
    history = item.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise RecordError(f"{where}: 'history' is no list of pairs [question, answer]")
    for question, answer in history:
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    asked = [text_in(where, item, "instruction"), text_in(where, item, "input", "")]
    turns += [{"role": "user", "content": "\n".join(part for part in asked if part)},
              {"role": "assistant", "content": text_in(where, item, "output")}]
    return [(turn, True) for turn in turns]


def message_of(where, turn, knows_developer):
    """A message with role, content and the turn's other keys that are not null."""
    if not isinstance(turn, dict):
        raise RecordError(f"{where}: a turn is no JSON object; correct or delete the record")
    message = {key: value for key, value in without_marks(turn).items() if value is not None}
    for theirs, ours in (("from", "role"), ("value", "content")):
        if theirs in message:
            if message.get(ours, message[theirs]) != message[theirs]:
                raise RecordError(f"{where}: a turn has {theirs!r} and {ours!r}, which differ; delete one of them")
            message[ours] = message.pop(theirs)
        elif "from" in turn and ours == "content" and "content" not in message and "tool_calls" not in message:
            raise RecordError(f"{where}: 'value' is missing; correct or delete the record")
    said = message.get("role")
    if not isinstance(said, str) or said not in ROLES:
        near = difflib.get_close_matches(str(said).lower(), ROLES, 1)
        raise RecordError(f"{where}: a message has the role {said!r}; " +
                          (f"did you mean {near[0]!r}? " if near else "") + f"known are {', '.join(ROLES)}")
    message["role"] = ROLES[said]
    if said == "developer" and not knows_developer:
        message["role"] = "system"
    if said == "function_call":
        message |= call_of_text(where, message.get("content"))
    calls = given_calls(where, message)
    message.pop("function_call", None)
    if calls:
        message["tool_calls"] = calls
        message.setdefault("content", None)
    return message


def require_order(where, messages):
    if messages[0]["role"] == "assistant" or messages[-1]["role"] != "assistant":
        raise RecordError(f"{where}: a conversation must begin with a question and end with an answer of the "
                          "assistant; complete or delete it")


def variables_of(where, item):
    """A record's arguments for its chat template, as in TRL."""
    variables = item.get("chat_template_kwargs")
    if variables is None:
        return {}
    if not isinstance(variables, dict):
        raise RecordError(f"{where}: 'chat_template_kwargs' is no JSON object; correct or delete it")
    from transformers import PreTrainedTokenizerBase
    taken = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    for name in variables:
        if name in taken:
            raise RecordError(f"{where}: 'chat_template_kwargs' may not set {name!r}; delete it there")
    return variables
