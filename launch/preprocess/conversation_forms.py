"""The forms in which conversations are published, as the messages that chat templates take.

    messages   {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    sharegpt   {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    alpaca     {"instruction": "...", "input": "...", "output": "..."}
"""

from preprocess_input import InputError

FORMS = {"messages": "messages", "sharegpt": "conversations", "alpaca": "instruction"}  # the key that tells
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
                  "system": "system", "tool": "tool", "observation": "tool"}
PICTURES = ("image", "images", "video", "videos")


def form_of(where, item):
    """By the keys of a set's first record."""
    for form, key in FORMS.items():
        if isinstance(item, dict) and key in item:
            return form
    found = ", ".join(sorted(map(str, item))) or "none" if isinstance(item, dict) else "no JSON object"
    raise InputError(f"{where} is no conversation: it has none of the keys {', '.join(FORMS.values())} (it has "
                     f"{found}); text "
                     "without turns is read by --input-format jsonl")


def text_in(where, item, key, missing=None):
    """A string; `missing`: what stands for an absent key or null."""
    value = item.get(key)
    value = missing if value is None else value
    if not isinstance(value, str):
        raise InputError(f"{where}: {key!r} " + ("is missing" if value is None else "is no text") +
                         "; correct or delete the record")
    return value


def messages_in(where, item, form):
    """(messages, tools) of a record."""
    if not isinstance(item, dict):
        raise InputError(f"{where} is no JSON object; correct or delete it")
    if form == "messages":
        return item.get("messages"), item.get("tools")
    if any(item.get(key) for key in PICTURES):
        raise InputError(f"{where}: pictures beside the turns are not read; give them as parts of a message, in the "
                         f"messages form")
    messages = [{"role": "system", "content": item["system"]}] if item.get("system") else []
    return messages + (sharegpt if form == "sharegpt" else alpaca)(where, item), None


def sharegpt(where, item):
    turns = item.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise InputError(f"{where} has no list 'conversations'; each record is {{\"conversations\": [{{\"from\": "
                         f"\"human\", \"value\": "
                         "...}, {\"from\": \"gpt\", \"value\": ...}]}")
    if item.get("tools"):
        raise InputError(f"{where}: tools are read in the messages form alone")
    messages = []
    for turn in turns:
        speaker = turn.get("from") if isinstance(turn, dict) else None
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            raise InputError(f"{where}: a turn is from {speaker!r}; known are {', '.join(SHAREGPT_ROLES)}")
        messages.append({"role": SHAREGPT_ROLES[speaker], "content": text_in(where, turn, "value")})
    return messages


def alpaca(where, item):
    messages = []
    history = item.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise InputError(f"{where}: 'history' is no list of pairs [question, answer]")
    for question, answer in history:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    asked = [text_in(where, item, "instruction"), text_in(where, item, "input", "")]
    question = "\n".join(part for part in asked if part)
    return [*messages, {"role": "user", "content": question},
            {"role": "assistant", "content": text_in(where, item, "output")}]
