"""What the preprocessing of text and of conversations share: input files, their lines, progress."""

import glob
import os
import sys
import time


class InputError(Exception):
    """What the user gave is wrong; the message is all that is shown."""


def input_files(patterns):
    files = []
    for pattern in patterns:
        found = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern))
        found = [name for name in found if os.path.isfile(name)]
        if not found:
            raise InputError(f"there is no input file {pattern}; check --input")
        files += found
    return files


def lines_of(file):
    """(line number, text) of a UTF-8 file."""
    number = 0
    try:
        with open(file, encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                yield number, line
    except UnicodeDecodeError:
        raise InputError(f"{file}, after line {number}, is not UTF-8; convert it, for example with "
                         "`iconv -t utf-8`") from None
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None


class Progress:
    """One rewritten line on a terminal, else a line every log_interval documents."""

    def __init__(self, interval):
        self.interval, self.start = interval, time.monotonic()
        self.documents, self.shown, self.terminal = 0, 0.0, sys.stderr.isatty()

    def add(self, documents, tokens):
        before, now = self.documents, time.monotonic()
        self.documents += documents
        if self.terminal:
            if now - self.shown >= 0.2:
                self.shown = now
                print(f"\r{self.text(tokens)}", end="", file=sys.stderr, flush=True)
        elif before // self.interval != self.documents // self.interval:
            print(self.text(tokens), file=sys.stderr, flush=True)

    def text(self, tokens):
        seconds = max(time.monotonic() - self.start, 1e-9)
        return (f"{self.documents} documents, {tokens} tokens in {seconds:.1f} s "
                f"({self.documents / seconds:.0f} documents/s)")

    def end(self):
        if self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr)
