"""Draws the pictures of README.md from the figures that run.py has written.

    pictures.py [docs/pictures]

The folder has figures.json; loss.svg, speed.svg, memory.svg and README.md, which says how they were made, are written
beside it. `run.py --pictures DIR` measures, writes the figures and draws.
"""
import html
import json
import pathlib
import statistics
import sys

OURS, THEIRS, GREY = "#1f6feb", "#d29922", "#57606a"
NAMES = {"theirs": "PyTorch FSDP2", "compiled": "compiled PyTorch FSDP2", "fsdp1": "PyTorch FSDP1",
         "eager-experts": "PyTorch FSDP2 with a loop over experts",
         "eager-attention": "PyTorch FSDP2 with eager attention",
         "ours": "megashard"}
SHOWN = {  # measure: how a value is printed
    "tokens/s": lambda value: f"{value:.0f} tokens/s",
    "processor time a step": lambda value: f"{value:.2f} s",
    "time to first step": lambda value: f"{value:.2f} s",
    "the same, behind another program": lambda value: f"{value:.2f} s",
    "host cost of a unit": lambda value: f"{value:.0f} µs",
    "clip + AdamW, 128 tensors": lambda value: f"{value:.0f} µs",
    "resident memory": lambda value: f"{value / 1e6:.0f} MB",
    "tensors of a step": lambda value: f"{value / 1e6:.1f} MB",
}


class Picture:
    """An SVG of text, lines and boxes."""

    def __init__(self, width, height):
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"',
                      f'     viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
                      '<rect width="100%" height="100%" fill="white"/>']

    def text(self, x, y, text, anchor="start", fill="#1f2328"):
        self.parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{fill}">{html.escape(text)}</text>')

    def box(self, x, y, width, height, fill):
        self.parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{fill}"/>')

    def line(self, points, stroke, width, dash=""):
        """A path, broken into short lines of the file."""
        places = [f"{x:.1f},{y:.1f}" for x, y in points]
        rows = "\n".join(" ".join(places[i:i + 9]) for i in range(0, len(places), 9))
        dash = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline fill="none" stroke="{stroke}" stroke-width="{width}"{dash} points="\n{rows}"/>')

    def write(self, path):
        path.write_text("\n".join([*self.parts, "</svg>", ""]))


def draw_bars(path, measures):
    """For each measure PyTorch's bar and ours; the longer one fills the width."""
    left, full, row = 205, 330, 58
    picture = Picture(left + full + 130, row * len(measures) + 12)
    for number, (measure, values) in enumerate(measures.items()):
        top = 12 + row * number
        picture.text(left - 12, top + 26, measure, "end")
        for place, (side, colour) in enumerate((("theirs", THEIRS), ("ours", OURS))):
            width = full * values[side] / max(values.values())
            picture.box(left, top + 21 * place, width, 17, colour)
            label = f"{NAMES[side]}: {SHOWN[measure](values[side])}"
            inside = width > 200
            picture.text(left + (6 if inside else width + 6), top + 13 + 21 * place, label,
                         fill="white" if inside else "#1f2328")
    picture.write(path)


def draw_loss(path, losses):
    left, top, width, height = 56, 16, 560, 250
    picture = Picture(left + width + 20, top + height + 44)
    steps, highest = len(losses["ours"]), max(losses["ours"] + losses["theirs"])
    low, high = 0, int(highest) + 1
    place = lambda number, loss: (left + width * number / (steps - 1), top + height * (high - loss) / (high - low))
    for loss in range(low, high + 1):
        y = place(0, loss)[1]
        picture.line([(left, y), (left + width, y)], "#d0d7de", 1)
        picture.text(left - 8, y + 4, str(loss), "end", GREY)
    for step in range(0, steps + 1, max(1, steps // 4)):
        picture.text(place(max(step - 1, 0), 0)[0], top + height + 18, str(max(step, 1)), "middle", GREY)
    picture.text(left + width / 2, top + height + 36, "step", "middle", GREY)
    picture.line([place(i, loss) for i, loss in enumerate(losses["theirs"])], THEIRS, 5)
    picture.line([place(i, loss) for i, loss in enumerate(losses["ours"])], OURS, 1.5)
    for number, (side, colour) in enumerate((("theirs", THEIRS), ("ours", OURS))):
        y = top + 20 + 20 * number
        picture.line([(left + width - 230, y), (left + width - 200, y)], colour, 5 if side == "theirs" else 1.5)
        picture.text(left + width - 192, y + 4, NAMES[side])
    furthest = max(abs(a - b) / b for a, b in zip(losses["ours"], losses["theirs"]))
    picture.text(left + width - 230, top + 64, f"largest relative difference {furthest:.0e}", fill=GREY)
    picture.write(path)
    return furthest


def medians(figures, names):
    """By measure and side, of those that were measured."""
    found = {}
    for name in names:
        runs = figures.get(name, {})
        for measure in runs.get("ours", [{}])[0]:
            found[measure] = {side: statistics.median(run[measure] for run in each) for side, each in runs.items()}
    return found


def draw(folder):
    figures = json.loads((folder / "figures.json").read_text())
    furthest = draw_loss(folder / "loss.svg", figures["loss"])
    measured = medians(figures, ("training", "host", "bytes"))
    memory = ("resident memory", "tensors of a step")
    draw_bars(folder / "memory.svg", {measure: measured[measure] for measure in memory})
    others = (*memory, "processor time a step")
    draw_bars(folder / "speed.svg", {measure: values for measure, values in measured.items() if measure not in others})
    (folder / "README.md").write_text(f"""# How these pictures were made

<!-- not run: it takes minutes -->
```sh
python tests/benchmarks/run.py --pictures docs/pictures      # measures and draws
python tests/benchmarks/pictures.py docs/pictures            # draws again from figures.json
```

Measured on {figures["date"]} with torch {figures["torch"]} on {figures["machine"]}. Both sides ran by turns, on 2
ranks of one thread each; a bar is the median of {len(figures["training"]["ours"])} run(s).
[benchmarks.md](../benchmarks.md) says what each figure means.

- `loss.svg`: {len(figures["loss"]["ours"])} steps of AdamW on the same batches, fp32; PyTorch's `fully_shard` and ours.
  The largest relative difference of a step's loss is {furthest:.1e}.
- `speed.svg`: a Llama of 8 M parameters under `megashard pretrain` and under PyTorch; `host cost of a unit` and `clip +
  AdamW` are the time of the host alone. For all but tokens/s, shorter is better.
- `memory.svg`: resident memory of the largest process of such a run, and the bytes of a rank's tensors in a step.
""")


if __name__ == "__main__":
    draw(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures"))
