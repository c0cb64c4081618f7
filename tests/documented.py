"""Fenced blocks of the pages, and the marks above them: the test that runs a block, or why none does."""
import re
from typing import NamedTuple

from megashard import ROOT

PAGES = [ROOT / "README.md", ROOT / "tests" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
                   re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    page: str  # from the top of the tree
    line: int
    language: str
    mark: str  # the comment in the line above, or nothing
    text: str


def blocks(page):
    content = page.read_text()
    return [Block(str(page.relative_to(ROOT)), content.count("\n", 0, each.start()) + 1, each["language"],
                  each["mark"] or "", each["text"]) for each in FENCE.finditer(content)]


def blocks_run_by(test, page):
    """The commands of the blocks that a test runs, in their order."""
    mark = f"run by {test}"
    return [block.text for block in blocks(page) if block.mark == mark]
