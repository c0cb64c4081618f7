"""Records of a clip and what is said in it (--template qwen3_asr), as MindSpeed-MM's data set of that name reads them:

    {"audio": "a.wav", "prompt": "Transcribe it.", "text": "Welcome."}

or with the prompt and the text as the system's and the assistant's of the column of messages. The chat template makes
the question, and what is said is learnt with the token that ends it.
"""

from conversation_forms import UNREAD
from conversation_sounds import sound_paths
from conversation_writer import Sample
from preprocess_input import InputError, RecordError

READ = {"audio", "prompt", "text", "target"}


def text_at(where, item, key):
    value = item.get(key) or ""
    if not isinstance(value, str):
        raise RecordError(f"{where}: {key!r} is no text; correct or delete it")
    return value


def read(where, item, columns):
    """(prompt, path of the clip, what is said in it)"""
    if not isinstance(item, dict):
        raise RecordError(f"{where}: the record is no JSON object; correct or delete it")
    prompt = text_at(where, item, "prompt")
    said = text_at(where, item, "text" if "text" in item else "target")
    for turn in item.get(columns["messages"]) or []:
        if not isinstance(turn, dict):
            raise RecordError(f"{where}: a turn is no JSON object; correct or delete the record")
        role = turn.get(columns["role"])
        if role == (columns["system_role"] or "system"):
            prompt = prompt or text_at(where, turn, columns["content"])
        elif role == columns["assistant"]:
            said = text_at(where, turn, columns["content"])
    clip = text_at(where, item, columns["audios"] or "audio") or text_at(where, item, "audio")
    if not clip or not said:
        raise RecordError(f"{where}: the record has no {'text' if clip else 'clip of sound'}; it needs \"audio\" and "
                          "\"text\", or an answer in its messages: complete or delete it")
    return prompt, clip, said


def encode(where, tokenizer, sounds, item, folder, columns):
    """The record as a sample. `sounds`: the SoundReader."""
    prompt, clip, said = read(where, item, columns)
    part = {"type": "audio", "audio": clip}
    heard, places = sounds.sounds(where, sound_paths(folder, [part]))
    asked = tokenizer.apply_chat_template([{"role": "system", "content": prompt}, {"role": "user", "content": [part]}],
                                          add_generation_prompt=True, tokenize=False)
    if asked.count(sounds.mark) != 1:
        raise InputError(f"{where}: the chat template makes {asked.count(sounds.mark)} places for a clip; use the "
                         "model's own")
    asked = asked.replace(sounds.mark, places[0])
    question, tokens = (tokenizer(text, add_special_tokens=False)["input_ids"]
                        for text in (asked, asked + said + (tokenizer.eos_token or "")))
    told = [(UNREAD, repr(key), "record") for key, value in item.items()
            if key not in {*READ, columns["messages"], columns["audios"]} and value not in (None, "", [], {})]
    first = min(len(question), len(tokens))
    return Sample(tokens, bytes(first) + b"\1" * (len(tokens) - first), told=told, sounds=heard)
