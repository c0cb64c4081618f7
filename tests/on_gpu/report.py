"""Results: on the terminal line by line, as JSON, and as a table of Markdown."""

import dataclasses
import datetime
import json
import os

PERCENT, WHOLE = {"MFU"}, {"tokens/s", "kernels"}


def shown(name, value):
    if name in PERCENT:
        return f"{100 * value:.1f} %"
    if name in WHOLE:
        return f"{value:.0f}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def cell(text):
    return text.replace("|", "\\|").replace("\n", " ")


class Report:
    """Results of one mode in a folder: MODE.json and MODE.md, rewritten after each line."""

    def __init__(self, mode, machine, folder):
        self.mode, self.machine, self.folder = mode, machine, folder
        self.begin = datetime.datetime.now()
        self.results = []

    def add(self, result):
        self.results.append(result)
        figures = ", ".join(f"{name} {shown(name, value)}" for name, value in self.scalars(result))
        words = [f"{result.outcome:9} {result.seconds:6.1f} s", result.name, result.why, figures]
        print(*filter(None, words), sep="  ", flush=True)
        self.write()

    @staticmethod
    def scalars(result):
        return [(name, value) for name, value in result.figures.items() if not isinstance(value, list)]

    def counts(self):
        outcomes = [result.outcome for result in self.results]
        passed, skipped = outcomes.count("passed"), outcomes.count("skipped")
        return passed, len(outcomes) - passed - skipped, skipped

    def write(self):
        whole = {"mode": self.mode, "date": self.begin.isoformat(timespec="seconds"), "machine": self.machine.facts(),
                 "seconds": round((datetime.datetime.now() - self.begin).total_seconds(), 1),
                 "lines": [dataclasses.asdict(result) for result in self.results]}
        for name, text in ((f"{self.mode}.json", json.dumps(whole, indent=1)), (f"{self.mode}.md", self.markdown())):
            new = self.folder / f".{name}.new"
            new.write_text(text + "\n")
            os.replace(new, self.folder / name)

    def markdown(self):
        machine = self.machine
        on = f"dry run on {machine.device}: no figure means anything" if machine.dry_run else (
            f"{machine.gpu}, {machine.memory_gib:.0f} GiB, driver {machine.driver}")
        columns = list(dict.fromkeys(name for result in self.results for name, _ in self.scalars(result)))
        lines = [f"{self.begin:%Y-%m-%d}, {on}, torch {machine.torch}, built with -O{machine.optimization} "
                 f"(`tests/gpu --{self.mode}`).", "",
                 "| " + " | ".join(["line", "outcome", "seconds", *columns, "what was wrong"]) + " |",
                 "|---" * (4 + len(columns)) + "|"]
        for result in self.results:
            figures = dict(self.scalars(result))
            row = [result.name, result.outcome, f"{result.seconds:.1f}",
                   *(shown(name, figures[name]) if name in figures else "" for name in columns), result.why]
            lines.append("| " + " | ".join(map(cell, row)) + " |")
        for result in self.results:
            for table in (value for value in result.figures.values() if isinstance(value, list) and value):
                lines += ["", f"{result.name}:", "", "| " + " | ".join(table[0]) + " |", "|---" * len(table[0]) + "|"]
                lines += ["| " + " | ".join(cell(str(value)) for value in row.values()) + " |" for row in table]
        return "\n".join(lines)
