"""The commands of the wheel. Each becomes the program that it names, so Python is gone when that runs."""
import os
import re
import sys

from .program import ERROR, PACKAGE, UsageError, library_variables, torch_folder

BUILD_FILES = PACKAGE / "lib" / "pkgconfig"


def refuse(message):
    print(f"{ERROR}{message}", file=sys.stderr)
    sys.exit(2)


def let_find_torch():
    try:
        os.environ.update(library_variables())
    except UsageError as error:
        refuse(error)


def become(*command):
    os.execv(command[0], [str(word) for word in command])


def become_tool(file, arguments):
    become(sys.executable, PACKAGE / "tools" / file, *arguments)


def main():
    let_find_torch()
    if sys.argv[1:2] == ["quickstart"]:
        become_tool("quickstart.py", sys.argv[2:])
    become(PACKAGE / "bin" / "megashard", *sys.argv[1:])


def preprocess():
    become_tool("preprocess/preprocess_data.py", sys.argv[1:])


def ask():
    let_find_torch()
    become_tool("ask.py", sys.argv[1:])


def forward_to_wandb():
    become_tool("forward_to_wandb.py", sys.argv[1:])


def flags(key):
    """A line of megashard.pc, so that g++ needs no pkg-config."""
    text = (BUILD_FILES / "megashard.pc").read_text()
    values = {"pcfiledir": str(BUILD_FILES)}

    def filled(value):
        return re.sub(r"\$\{(\w+)\}", lambda each: values[each[1]], value)

    for name, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE):
        values[name] = os.path.normpath(filled(value))
    try:
        values["libtorch"] = str(torch_folder())
    except UsageError as error:
        refuse(error)
    return filled(re.search(rf"^{key}: (.*)$", text, re.MULTILINE)[1])


CONFIG = {
    "--cflags": lambda: flags("Cflags"),
    "--libs": lambda: flags("Libs"),
    "--pkgconfigdir": lambda: BUILD_FILES,
    "--cmakedir": lambda: PACKAGE / "lib" / "cmake" / "megashard",
    "--examplesdir": lambda: PACKAGE / "share" / "examples",
}


def config():
    words = sys.argv[1:]
    if words in (["-h"], ["--help"]):
        print(f"usage: megashard-config {' '.join(f'[{flag}]' for flag in CONFIG)}\n\n"
              "Prints what a plugin or a program is built with: g++'s flags, and the folders of megashard.pc,\n"
              "megashardConfig.cmake and the examples.")
    elif not words or not CONFIG.keys() >= set(words):
        refuse(f"megashard-config takes {', '.join(CONFIG)}")
    else:
        print(*(CONFIG[word]() for word in words))


if __name__ == "__main__":
    main()
