"""The order of the layers, headers that cost too much to include, and the length of lines."""
import pathlib
import re
import subprocess

from megashard import ROOT

ROOMS = ["parallel", "checkpoint", "framework", "models", "launch"]
TOO_WIDE = {"torch/torch.h", "torch/nn.h", "torch/all.h", "ATen/ATen.h", "torch/extension.h"}
CODE = {".h", ".cpp", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]', re.MULTILINE)


def includes(folder):
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in CODE:
            for header in INCLUDE.findall(path.read_text()):
                yield path.relative_to(ROOT), header


def test_rooms_include_only_rooms_to_their_left():
    assert any(header == "parallel/collectives/device_mesh.h" for _, header in includes("parallel"))  # it reads at all
    wrong = []
    for position, room in enumerate(ROOMS):
        to_the_right = ROOMS[position + 1 :] + ["tests"]
        wrong += [f"{path} includes {header}" for path, header in includes(room)
                  if header.split("/")[0] in to_the_right]
    assert not wrong


def test_headers_of_detail_are_private():
    """Only parallel/fsdp and its tests include headers of parallel/fsdp/detail."""
    found = [(path, header) for room in ROOMS for path, header in includes(room)
             if header.startswith("parallel/") and "/detail/" in header]
    assert found  # it reads at all
    assert not [f"{path} includes {header}" for path, header in found
                if not str(path).startswith(header.split("detail/")[0])]
    public = [f"{path} includes {header}" for path, header in found
              if path.suffix == ".h" and "detail" not in path.parts]
    assert not public  # or an installed header would need them


def test_nobody_includes_headers_that_take_seconds():
    assert not [f"{path} includes {header}" for room in [*ROOMS, "tests"] for path, header in includes(room)
                if header in TOO_WIDE]


def test_a_family_is_a_small_file():
    """No code elsewhere asks for one: what a family needs is a part, or a switch of the configuration."""
    families = ROOT / "models" / "families"
    texts = {path: path.read_text() for path in families.glob("*.cpp")}
    types = set(re.findall(r'\.model_type = "(\w+)"', "".join(texts.values())))
    sizes = sorted(text.count("\n") for path, text in texts.items() if "RegisterFamily k" in text)
    assert len(types) > 40 and sizes[len(sizes) // 2] <= 60 and sizes[-1] <= 120
    # MindSpeed-MM names models by words of its own.
    others = [path for room in ROOMS for path in (ROOT / room).rglob("*")
              if path.suffix in CODE and families not in path.parents and "mindspeed" not in path.parts]
    assert not [f"{path.relative_to(ROOT)} names {word}" for path in others
                for word in re.findall(r'"(\w+)"', path.read_text()) if word in types]


LONGEST_LINE = 120
NOT_OURS = (  # expected values, written by other programs
    "tests/golden/lr_schedule.json", "tests/golden/megatron_flags.txt", "tests/golden/mindspeed_flags.txt",
    "tests/conformance/upstream.json")


def text_files():
    """The text files of the repository: (path, lines)."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True,
                            text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b"\0"
        if b"\0" not in content and name not in NOT_OURS:
            yield name, content.decode().splitlines()


def test_lines_are_not_long():
    files = dict(text_files())
    assert "README.md" in files and "tests/run" in files  # it reads at all
    assert not [f"{name}:{number} has {len(line)} columns" for name, lines in files.items()
                for number, line in enumerate(lines, 1) if len(line) > LONGEST_LINE]


def folders_included(room):
    """{folder: folders of the room that it includes}. detail/ counts as part of its parent folder."""
    graph = {}
    for path, header in includes(room):
        here, there = (each.parent.parent if each.parent.name == "detail" else each.parent
                       for each in (path, pathlib.PurePath(header)))
        graph.setdefault(str(here), set())
        if there.parts[:1] == (room,) and there != here:
            graph[str(here)].add(str(there))
    return graph


def reached(graph, start):
    seen, left = set(), [start]
    while left:
        new = graph.get(left.pop(), set()) - seen
        seen |= new
        left += new
    return seen


def test_folders_of_a_room_include_each_other_in_no_circle():
    assert "checkpoint/values" in folders_included("checkpoint")["checkpoint/dcp"]  # it reads at all
    wrong = []
    for room in ROOMS:
        graph = folders_included(room)
        reach = {folder: reached(graph, folder) for folder in graph}
        wrong += [{one, other} for one in sorted(graph) for other in sorted(reach[one])
                  if one < other and one in reach.get(other, ())]
    assert not wrong
