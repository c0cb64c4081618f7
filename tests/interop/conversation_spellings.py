"""Conversations with a known meaning, in the many ways in which people write them into files.

A meaning is drawn first: a system, tools, and turns of which some are learnt. `spell` then writes it as a record of one
of the forms of LLaMA-Factory, TRL, OpenAI and axolotl, and `chat_text` writes the text that a model should see. So what
is expected never comes from the program under test.
"""
import gzip
import json
import random
from typing import NamedTuple

# Tools and calls as JSON, so that a string that was not decoded shows.
SAYS = ("{{ m.content or '' }}{% for call in m.tool_calls or [] %}[{{ call.function.name }} "
        "{{ call.function.arguments | tojson }}]{% endfor %}<|im_end|>")
TEMPLATE = ("{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
            "<|im_start|>{{ m.role }}\n" + SAYS + "{{ '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
TAGGED = TEMPLATE.replace(SAYS, "{% if m.role == 'assistant' %}{% generation %}" + SAYS + "{% endgeneration %}"
                          "{% else %}" + SAYS + "{% endif %}")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SPELLINGS = {"user": ("human", "user"), "assistant": ("gpt", "assistant", "chatgpt"), "tool": ("observation", "tool"),
             "system": ("system", "developer")}
MARKS = (("weight", 0, 1), ("loss_weight", 0.0, 1.0), ("train", False, True), ("training", False, True),
         ("loss", False, True))
LAYOUTS = ("lines", "lines of Windows", "with a mark of the byte order", "packed", "array", "two arrays",
           "an array and a line")


class Turn(NamedTuple):
    role: str
    text: str = ""
    learnt: bool = False
    call: dict | None = None  # arguments


class Meaning(NamedTuple):
    turns: list
    system: str = ""
    tools: bool = False


def draw(random, form):
    tools = form != "template" and random.random() < 0.5
    turns = []
    for number in range(random.randint(1, 3)):
        turns.append(Turn("user", f"ask {number}\nmore" if random.random() < 0.3 else f"ask {number}"))
        if form in ("messages", "sharegpt", "completion") and tools and random.random() < 0.6:
            turns.append(Turn("assistant", "", True, {"city": f"Rome {number}", "days": number}))
            turns.append(Turn("tool", f"sun {number}"))
        turns.append(Turn("assistant", f"say {number}", True))
    if form == "completion":
        turns = [turn._replace(learnt=turn is turns[-1]) for turn in turns]
    elif form != "alpaca":
        turns = [turn._replace(learnt=turn.learnt and random.random() < 0.7) for turn in turns]
    return Meaning(turns, random.choice(("", "Be brief.")), tools)


def pieces(meaning):
    """(text, is it learnt) for the output of the chat template above."""
    if meaning.tools:
        yield f"<|im_start|>tools\n{json.dumps([TOOL])}<|im_end|>\n", False
    for turn in ([Turn("system", meaning.system)] if meaning.system else []) + meaning.turns:
        yield f"<|im_start|>{turn.role}\n", False
        call = f"[look {json.dumps(turn.call)}]" if turn.call else ""
        yield f"{turn.text}{call}<|im_end|>", turn.learnt
        yield "\n", False


def turn_pieces(meaning):
    """The same for LLaMA-Factory's qwen3_vl_nothink, tokenised one by one."""
    asked = f"<|im_start|>system\n{meaning.system}<|im_end|>\n" if meaning.system else ""
    for turn in meaning.turns:
        if turn.role == "user":
            asked += f"<|im_start|>user\n{turn.text}<|im_end|>\n<|im_start|>assistant\n"
        else:
            yield asked, False
            yield f"{turn.text}<|im_end|>\n", turn.learnt
            asked = ""


def marks(random, turn, form):
    """The keys that include an answer in the loss, or exclude it."""
    if turn.role != "assistant" or form in ("alpaca", "completion"):
        return random.choice(({}, {"weight": None}))
    key, no, yes = random.choice(MARKS)
    return {key: no} if not turn.learnt else random.choice(({}, {key: yes}, {key: None}))


def spell_turn(random, turn, form):
    """A turn as from and value, or as role and content."""
    said = {**marks(random, turn, form)}
    arguments = json.dumps(turn.call) if turn.call and random.random() < 0.5 else turn.call
    call = {"name": "look", "arguments": arguments}
    if random.random() < (0.8 if form == "sharegpt" else 0.1):
        if turn.call:
            return {"from": "function_call", "value": json.dumps(random.choice((call, [call]))), **said}
        return {"from": random.choice(SPELLINGS[turn.role]), "value": turn.text, **said}
    if turn.call:
        said |= random.choice(({"content": None}, {"content": ""}, {}))
        said |= random.choice(({"tool_calls": [{"id": "1", "type": "function", "function": call}]},
                               {"tool_calls": json.dumps([{"function": call}])}, {"function_call": call}))
    else:
        said["content"] = turn.text if random.random() < 0.8 else [{"type": "text", "text": letter}
                                                                   for letter in turn.text]
        said |= random.choice(({}, {"tool_calls": None, "reasoning_content": None}, {"tool_calls": []}))
    role = random.choice(("tool", "function")) if turn.role == "tool" else turn.role
    return {"role": role, **said}


def spell_tools(random, meaning):
    if not meaning.tools:
        return random.choice(({}, {"tools": None}, {"tools": "[]"}, {"tools": []}, {"tools": ""}))
    return random.choice(({"tools": [TOOL]}, {"tools": json.dumps([TOOL])}, {"functions": [TOOL["function"]]}))


def spell(random, meaning, form):
    """A record."""
    record = {"id": 7} if random.random() < 0.3 else {}
    turns, system = meaning.turns, meaning.system
    if form == "template":
        turns = [{"from": "human" if turn.role == "user" else "gpt", "value": turn.text, **marks(random, turn, form)}
                 for turn in turns]
        return record | {"conversations": [{"from": "system", "value": system}] * bool(system) + turns}
    record |= spell_tools(random, meaning)
    if form == "alpaca":
        texts = [turn.text for turn in turns]
        asked, _, more = texts[-2].partition("\n")
        record |= {"instruction": asked, "output": texts[-1]}
        record |= {"input": more} if more else random.choice(({}, {"input": None}, {"input": ""}))
        record |= {"history": list(zip(texts[:-2:2], texts[1:-2:2]))} if len(texts) > 2 else random.choice((
            {}, {"history": None}, {"history": []}))
        return record | random.choice(({"system": system}, {"system": system or None}))
    place = random.choice(("key", "turn", "both")) if system else "none"
    record |= {"key": {"system": system}, "turn": {}, "both": {"system": "Another."}, "none": {"system": None}}[place]
    spelt = [spell_turn(random, turn, form) for turn in turns]
    if place in ("turn", "both"):
        spelt.insert(0, spell_turn(random, Turn("system", system), form))
    if form == "completion":
        return record | {"prompt": spelt[:-1], "completion": spelt[-1:]}
    return record | {"messages" if form == "messages" else "conversations": spelt}


def layout(random, records):
    """The bytes of a file."""
    how = random.choice(LAYOUTS)
    lines = [json.dumps(record, ensure_ascii=random.random() < 0.5) for record in records]
    if how == "array":
        return json.dumps(records, indent=1).encode()
    if how == "two arrays":
        return "".join(json.dumps(part) for part in (records[:1], records[1:])).encode()
    if how == "an array and a line":
        return (json.dumps(records[:-1], indent=2) + "\n" + lines[-1] + "\n").encode()
    if how == "lines of Windows":
        return "\r\n".join(lines).encode()
    text = "\n\n".join(lines).encode()
    return gzip.compress(text) if how == "packed" else b"\xef\xbb\xbf" + text if how.startswith("with") else text


FORMS = ("messages", "sharegpt", "alpaca", "completion", "template")


def odd_file(seed):
    """(form, meanings, the file's bytes)"""
    dice = random.Random(seed)
    form = FORMS[seed % len(FORMS)]
    meanings = [draw(dice, form) for _ in range(3)]
    return form, meanings, layout(dice, [spell(dice, meaning, form) for meaning in meanings])


ODD = (None, True, 0, -1, 0.5, 10**30, float("nan"), "", " ", "a", "[]", "{}", "null", "[1]", "\ud83d", '"\\ud83d"',
       [], {}, [None], [[]], ["a"], [{}], {"a": None}, {"type": "text"}, [{"type": "text", "text": "x"}], "assistant",
       "system", [{"name": "f"}], {"name": "f", "arguments": "{}"}, '[{"name": "f", "arguments": {"a": "\\ud83d"}}]')
KEYS = ("role from content value tool_calls function_call name tool_call_id reasoning_content weight train training "
        "loss loss_weight train_detail tools functions system messages conversations prompt completion instruction "
        "input output history images chat_template_kwargs").split()


def broken_record(seed):
    """(form, a record of it that has something odd in one or two places)"""
    dice = random.Random(seed)
    form = FORMS[seed % len(FORMS)]
    record = json.loads(json.dumps(spell(dice, draw(dice, form), form)))
    for _ in range(dice.randint(1, 2)):
        parent = dice.choice(list(containers(record)))
        if isinstance(parent, dict):
            key = dice.choice(KEYS if dice.random() < 0.3 or not parent else list(parent))
        else:
            key = dice.randrange(len(parent))
        parent[key] = json.loads(json.dumps(dice.choice(ODD)))
    return form, record


def containers(value):
    """The value itself, and all non-empty objects and lists in it."""
    if isinstance(value, dict) or (isinstance(value, list) and value):
        yield value
        for part in value.values() if isinstance(value, dict) else value:
            yield from containers(part)
