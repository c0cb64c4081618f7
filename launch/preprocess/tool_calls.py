"""Calls of tools and their descriptions, as chat templates take them, from the forms in which records have them."""

import json
import re

from preprocess_input import RecordError, whole_text

THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


def from_json(where, what, text):
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{where}: {what} {text[:40]!r} is not JSON ({error}); correct or delete it") from None
    whole_text(where, value)
    return value


def call_of(where, call):
    """With arguments that are an object: templates apply tojson to them, which would write a string in quotes."""
    if not isinstance(call, dict):
        raise RecordError(f"{where}: a tool call is no JSON object; correct or delete it")
    if "function" in call:
        if not isinstance(call["function"], dict):
            raise RecordError(f"{where}: 'function' of a tool call is no JSON object; correct or delete it")
        return {**call, "function": call_of(where, call["function"])}
    if not isinstance(call.get("name"), str):
        raise RecordError(f"{where}: a tool call has no 'name'; correct or delete it")
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = from_json(where, "'arguments' of a tool call", arguments) if arguments.strip() else {}
    if arguments is None and "arguments" in call:
        arguments = {}
    if arguments is not None and not isinstance(arguments, dict):
        raise RecordError(f"{where}: 'arguments' of a tool call are no JSON object; correct or delete it")
    return call if arguments is None else {**call, "arguments": arguments}


def given_calls(where, message):
    """The calls of `tool_calls`, or of OpenAI's older `function_call`."""
    calls, older = message.get("tool_calls"), message.get("function_call")
    if isinstance(calls, str):
        calls = from_json(where, "'tool_calls'", calls)
    if older is not None:
        if calls:
            raise RecordError(f"{where}: a message has 'tool_calls' and 'function_call'; delete one of them")
        calls = [{"type": "function", "function": older}]
    if calls is not None and not isinstance(calls, list):
        raise RecordError(f"{where}: 'tool_calls' is no list; correct or delete it")
    if calls and message["role"] != "assistant":
        raise RecordError(f"{where}: a message of the {message['role']} has tool calls; correct or delete it")
    return [call_of(where, call) for call in calls or []]


def call_of_text(where, text):
    """ShareGPT's function_call: a call or a list of them as JSON, optionally after a thought."""
    if not isinstance(text, str):
        raise RecordError(f"{where}: a function_call is no text; correct or delete it")
    thought = THOUGHT.match(text)
    calls = from_json(where, "a function_call", text[thought.end() if thought else 0:])
    return {"content": thought.group().strip() if thought else None,
            "tool_calls": [{"type": "function", "function": call}
                           for call in (calls if isinstance(calls, list) else [calls])]}


def given_tools(where, item, wrap):
    """The tools of `tools`, or of OpenAI's older `functions`. `wrap`: turns a bare function into a tool, as
    LLaMA-Factory."""
    tools, older = item.get("tools"), item.get("functions")
    if older:
        if tools:
            raise RecordError(f"{where}: a record has 'tools' and 'functions'; delete one of them")
        tools, wrap = older, True
    if isinstance(tools, str):
        tools = from_json(where, "'tools'", tools) if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordError(f"{where}: 'tools' is no list of JSON objects; correct or delete it")
    return [{"type": "function", "function": tool} if wrap and tool.get("type") != "function" else tool
            for tool in tools]
