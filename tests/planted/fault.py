"""A planted fault."""

import dataclasses
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Tests:
    """Tests of one room's program that may catch a fault."""

    room: str
    names: str  # as --gtest_filter takes them
    sim: str = ""  # MEGASHARD_SIM
    device: str = "sim"

    def __str__(self):
        return f"{self.room}: {self.names}" + (f" ({self.sim})" if self.sim else "")


@dataclasses.dataclass(frozen=True)
class Fault:
    """`text`, which the file holds once, becomes `instead`, in which PLANTED is true in this fault's runs only."""

    name: str
    file: str  # from the root
    text: str
    instead: str
    tests: tuple
    also: tuple = ()  # further (text, instead) of the same file
    users: tuple = ()  # for a header: all sources that use the changed text

    def changes(self):
        return ((self.text, self.instead), *self.also)

    def places(self):
        """(begin, end) of its texts in the file; None if the file has changed."""
        source = (ROOT / self.file).read_text()
        if any(source.count(text) != 1 for text, _ in self.changes()):
            return None
        return [(source.index(text), source.index(text) + len(text)) for text, _ in self.changes()]


def without(name, file, statement, *tests, after="", before="", users=()):
    """Removes the statement; known text before and after it may distinguish it from others."""
    left_out = f"if (!PLANTED) {{ {statement} }}"
    return Fault(name, file, after + statement + before, after + left_out + before, tests, users=users)
