"""What the preprocessing of text and of conversations share: input files, their lines, worker processes, progress."""

import collections
import glob
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool


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


def in_workers(count, encoder, arguments, jobs):
    """What encoder(*arguments).encode makes of each job, in their order, by `count` processes with an encoder each."""
    if count == 1:
        yield from map(encoder(*arguments).encode, jobs)
        return
    children = multiprocessing.get_context("fork")  # of this process, which leave_with relies on
    pool = ProcessPoolExecutor(count, children, start_worker, (os.getpid(), encoder, arguments))
    waiting = collections.deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(encode_in_worker, job))
            if len(waiting) > 8 * count:  # what is read ahead and not yet written stays in memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise InputError("a worker process has ended before its work; if the system killed it for memory, give a smaller "
                         "--workers, else --workers 1 shows what is wrong") from None
    finally:
        pool.shutdown(cancel_futures=True)


def start_worker(parent, encoder, arguments):
    global encoder_of_worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    threading.Thread(target=leave_with, args=(parent,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a worker is enough: the package would start threads in each
    encoder_of_worker = encoder(*arguments)


def leave_with(parent):
    """A killed parent tells nobody, and its workers would wait for jobs for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def encode_in_worker(job):
    return encoder_of_worker.encode(job)


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
