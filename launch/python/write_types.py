#!/usr/bin/env python3
"""Writes megashard/argument_types.py for editors: the arguments of megashard.train with types and explanations, from
the program's own table.

usage: launch/python/write_types.py PROGRAM FILE
"""
import json
import keyword
import pathlib
import subprocess
import sys

TYPES = {"switch": "bool", "integer": "int", "number": "float", "text": "str", "integers": "list[int]",
         "texts": "list[str]"}


def lines_of(row):
    name = row["flag"].lstrip("-").replace("-", "_")
    if row["status"] != "used" or keyword.iskeyword(name):
        return []
    kind = TYPES[row["type"]]
    if row["choices"] and row["type"] == "text":
        kind = "Literal[" + ", ".join(f'"{each}"' for each in row["choices"]) + "]"
    text = row["help"] + (f"; {row['range']}" if row["range"] else "")
    if row["default"] is not None and row["type"] != "switch":
        text += f" [{row['default']}]"
    return [f"    {name}: {kind}", f"    {json.dumps(text, ensure_ascii=False)}"]


def main():
    program, file = sys.argv[1:]
    table = subprocess.run([program, "completion", "json"], capture_output=True, text=True, check=True).stdout
    lines = ['"""Written by launch/python/write_types.py."""', "from typing import Literal, TypedDict", "", "",
             "class Arguments(TypedDict, total=False):"]
    for row in json.loads(table)["arguments"]:
        lines += lines_of(row)
    pathlib.Path(file).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
