"""Writes megatron_flags.txt: every flag of Megatron-LM's training, as its own parser has them.

    python tests/golden/make_megatron_flags.py MEGATRON-LM > tests/golden/megatron_flags.txt

MEGATRON-LM is a checkout of NVIDIA/Megatron-LM at tag core_v0.16.1, beside an installed PyTorch.
"""
import argparse
import ast
import enum
import inspect
import sys
import unittest.mock

HEAD = """\
# The flags of NVIDIA/Megatron-LM at tag core_v0.16.1 (megatron/training/arguments.py), by make_megatron_flags.py.
# A line: who makes the flag (written: a call of add_argument there; generated: from the fields of a configuration
# class), how many values follow it (+: one or more, *: any number), their kind, all spellings, Megatron's default
# (-: none).
"""


def values_of(action):
    if action.nargs is None:
        return "1"
    return str(action.nargs)


def kind_of(action):
    if action.nargs == 0:
        return "switch"
    return {int: "int", float: "float", bool: "bool"}.get(action.type, "text")


def default_of(action):
    default = action.default
    if isinstance(default, enum.Enum):
        default = default.name
    return "-" if action.nargs == 0 or default is None or default == "" or isinstance(default, list) else default


def line(origin, values, kind, flags, default):
    return f"{origin} {values} {kind} {','.join(flags)} {default}"


def main():
    sys.path.insert(0, sys.argv.pop())
    sys.modules["six"] = unittest.mock.MagicMock()  # of a tokenizer that is not made here
    from megatron.training import arguments

    calls = [node for node in ast.walk(ast.parse(inspect.getsource(arguments)))
             if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"]
    written = {tuple(word.value for word in call.args): call for call in calls}
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(add_help=False))
    lines = []
    for action in parser._actions:
        # Of BooleanOptionalAction the call has only the first spelling.
        spellings = tuple(action.option_strings)
        call = written.pop(spellings, None) or written.pop(spellings[:1], None)
        origin = "written" if call else "generated"
        lines.append(line(origin, values_of(action), kind_of(action), spellings, default_of(action)))
    for flags, call in written.items():  # registered only where a further package is installed
        kinds = [word.value.id for word in call.keywords if word.arg == "type"]
        lines.append(line("written", "1", {"int": "int", "float": "float"}.get(kinds[0], "text"), flags, "-"))
    print(HEAD + "\n".join(lines))


if __name__ == "__main__":
    main()
