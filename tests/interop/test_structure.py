"""The order of the rooms, and headers that cost too much to include."""
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROOMS = ["parallel", "checkpoint", "framework", "models", "launch"]
TOO_WIDE = {"torch/torch.h", "torch/nn.h", "torch/all.h", "ATen/ATen.h", "torch/extension.h"}
INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]', re.MULTILINE)


def includes(folder):
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in {".h", ".cpp", ".cu", ".cuh"}:
            for header in INCLUDE.findall(path.read_text()):
                yield path.relative_to(ROOT), header


def test_rooms_include_only_rooms_to_their_left():
    assert any(header == "parallel/collectives/device_mesh.h" for _, header in includes("parallel"))  # it reads at all
    wrong = []
    for position, room in enumerate(ROOMS):
        to_the_right = ROOMS[position + 1 :] + ["tests"]
        wrong += [f"{path} includes {header}" for path, header in includes(room) if header.split("/")[0] in to_the_right]
    assert not wrong


def test_nobody_includes_headers_that_take_seconds():
    assert not [f"{path} includes {header}" for room in [*ROOMS, "tests"] for path, header in includes(room)
                if header in TOO_WIDE]
