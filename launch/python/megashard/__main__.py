"""The commands of the wheel: each becomes the program that it names, so Python is gone when that runs."""
import importlib.util
import os
import pathlib
import re
import sys

PACKAGE = pathlib.Path(__file__).resolve().parent
PROGRAM = PACKAGE / "bin" / "megashard"


def torch_folder():
    """The torch of this Python, found without importing it; refused if it is not the one that the wheel is made for."""
    wanted = (PACKAGE / "share" / "torch_version").read_text().strip()
    minor = ".".join(wanted.split(".")[:2])
    remedy = f"pip install 'torch=={minor}.*'"
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        sys.exit(f"megashard: error: {sys.executable} has no package torch; install it: {remedy}")
    folder = pathlib.Path(found.origin).resolve().parent
    there = re.search(r"__version__ = '([^']+)'", (folder / "version.py").read_text())[1]
    if not there.startswith(minor + "."):
        sys.exit(f"megashard: error: this megashard is built for torch {minor}, and torch {there} is installed in "
                 f"{folder}; install one that fits: {remedy}, or megashard's wheel for torch "
                 f"{'.'.join(there.split('.')[:2])}")
    return folder


def become(*command):
    """Replaces this process; LibTorch is in the folder beside the wheel's, or is named to the loader."""
    torch = torch_folder()
    beside = PACKAGE.parent / "torch"
    if not beside.exists() or not beside.samefile(torch):
        paths = [str(torch / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        os.environ["LD_LIBRARY_PATH"] = ":".join(paths)
    sys.stdout.flush()
    os.execv(command[0], [str(word) for word in command])


def become_tool(file, arguments):
    become(sys.executable, PACKAGE / "tools" / file, *arguments)


def main():
    if sys.argv[1:2] == ["quickstart"]:
        become_tool("quickstart.py", sys.argv[2:])
    become(PROGRAM, *sys.argv[1:])


def flags(words):
    """Compiler flags by the wheel's megashard.pc: g++ needs no pkg-config then."""
    text = (PACKAGE / "lib" / "pkgconfig" / "megashard.pc").read_text()
    values = {"pcfiledir": str(PACKAGE / "lib" / "pkgconfig")}
    for name, value in re.findall(r"^(\w+)=(.*)$", text, re.M):
        values[name] = os.path.normpath(re.sub(r"\$\{(\w+)\}", lambda each: values[each[1]], value))
    values["libtorch"] = str(torch_folder())
    return " ".join(re.sub(r"\$\{(\w+)\}", lambda each: values[each[1]],
                           re.search(rf"^{word}: (.*)$", text, re.M)[1]) for word in words)


CONFIG = {
    "--cflags": lambda: flags(["Cflags"]),
    "--libs": lambda: flags(["Libs"]),
    "--pkgconfigdir": lambda: PACKAGE / "lib" / "pkgconfig",
    "--cmakedir": lambda: PACKAGE / "lib" / "cmake" / "megashard",
    "--examplesdir": lambda: PACKAGE / "share" / "examples",
}


def config():
    words = sys.argv[1:]
    if not words or not CONFIG.keys() >= set(words):
        print(f"usage: megashard-config {' '.join(f'[{flag}]' for flag in CONFIG)}\n"
              "prints flags for g++ and folders for build files, as pkg-config does", file=sys.stderr)
        sys.exit(0 if words in (["-h"], ["--help"]) else 2)
    print(" ".join(str(CONFIG[word]()) for word in words))


def preprocess():
    become_tool("preprocess/preprocess_data.py", sys.argv[1:])


def ask():
    become_tool("ask.py", sys.argv[1:])


def forward_to_wandb():
    become_tool("forward_to_wandb.py", sys.argv[1:])


if __name__ == "__main__":
    main()
