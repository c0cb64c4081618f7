"""Shared by the preprocessing of text and of conversations: input files, their records, worker processes, progress."""

import collections
import contextlib
import glob
import gzip
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path


class InputError(Exception):
    """A mistake of the user; only the message is shown."""


class FlagError(InputError):
    """A flag is wrong: exit code 2."""


class RecordError(InputError):
    """One record is wrong; others may be right."""


FIRST_PLACES = 3  # places of skipped records that are listed


class BadRecords:
    """Ends the work at the first of them or, with --skip-bad-records, counts them."""

    def __init__(self, skip=False):
        self.skip, self.count, self.first = bool(skip), 0, []

    def add(self, error):
        if not self.skip:
            raise error
        self.count += 1
        if len(self.first) < FIRST_PLACES:
            self.first.append(str(error))

    def tell(self):
        if self.count:
            notice(f"{counted(self.count, 'bad record')} left out" +
                   (f"; the first {len(self.first)}" if self.count > len(self.first) else ""))
            for place in self.first:
                print(f"  {place}", file=sys.stderr)


def notice(text):
    print(f"preprocess_data: notice: {text}", file=sys.stderr)


def counted(count, what):
    """The plural of "part of text" is "parts of text"."""
    first, of, rest = what.partition(" of ")
    return f"{count} {first}{'' if count == 1 else 's'}{of}{rest}"


def input_files(patterns):
    files = []
    for pattern in patterns:
        found = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern))
        found = [name for name in found if os.path.isfile(name)]
        if not found:
            folder = "; it is a folder: give the files in it, as in 'DIR/*.jsonl'" if os.path.isdir(
                pattern) else "; check --input"
            raise FlagError(f"there is no input file {pattern}{folder}")
        files += found
    return files


def model_folder(flag, model):
    """The path; for a name of the Hugging Face hub the error says how to download it, or its path in the hub's
    cache."""
    path = Path(model)
    if path.exists() or not re.fullmatch(r"[\w][\w.-]*/[\w.-]+", model):
        return path
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    entry = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{model.replace('/', '--')}"
    revision = entry / "refs" / "main"
    if revision.is_file() and (snapshot := entry / "snapshots" / revision.read_text().strip()).is_dir():
        raise FlagError(f"{flag} {model} is a name of the Hugging Face hub, and its files lie in the hub's cache: "
                        f"give {flag} "
                        f"{snapshot}")
    name = model.split("/")[1]
    raise FlagError(f"there is no {model}; if it is a name of the Hugging Face hub, run `hf download {model} "
                    f"--local-dir {name}` "
                    f"(huggingface-cli of older versions), then give {flag} {name}")


BINARY = {b"PAR1": "a Parquet file; write it as lines of JSON first: "
                   "pandas.read_parquet(FILE).to_json(OUT, orient=\"records\", lines=True)",
          b"ARROW1": "an Arrow file; write it as lines of JSON first: datasets.Dataset.from_file(FILE).to_json(OUT)",
          b"\x28\xb5\x2f\xfd": "compressed by zstd; unpack it first, by `zstd -d`",
          b"\xfd7zXZ": "compressed by xz; unpack it first, by `xz -d`",
          b"BZh": "compressed by bzip2; unpack it first, by `bzip2 -d`",
          b"PK\x03\x04": "a zip archive; unpack it first",
          b"version https://git-lfs": "a Git LFS pointer, not the data; fetch it by `git lfs pull`"}


def open_text(file):
    """UTF-8, packed by gzip or not, whatever the file is called."""
    with open(file, "rb") as stream:
        start = stream.read(32)
    for mark, what in BINARY.items():
        if start.startswith(mark):
            raise InputError(f"{file} is {what}")
    opened = gzip.open if start.startswith(b"\x1f\x8b") else open
    return opened(file, "rt", encoding="utf-8-sig")


@contextlib.contextmanager
def reading(file, line):
    """Error messages for reading; `line`: number of lines read."""
    try:
        yield
    except UnicodeDecodeError:
        raise InputError(f"{file}, after line {line()}, is not UTF-8; convert it, for example with "
                         "`iconv -t utf-8`") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{file} is a damaged gzip file ({error}); fetch it again") from None
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None


def lines_of(file):
    """(line number, text) of a UTF-8 file."""
    number = 0
    with reading(file, lambda: number), open_text(file) as stream:
        for number, line in enumerate(stream, 1):
            yield number, line


def records_of(file):
    """(line number, JSON value) of a file of JSON lines or JSON arrays; for an invalid line its RecordError."""
    with reading(file, lambda: 0), open_text(file) as stream:
        while (first := stream.read(1)).isspace():
            pass
    if first == "[":
        yield from array_of(file)
        return
    for number, line in lines_of(file):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            several = line.strip() in ("{", "{}") or line.rstrip().endswith((",", "{", "["))
            how = ("give each record a line of its own (`jq -c . FILE` does), or the file a JSON array" if several else
                   "correct or delete it, or use --input-format text for plain text")
            yield number, RecordError(f"{file}, line {number}, is not JSON ({error}); {how}")


def array_of(file):
    """The values of an array, and of further arrays and objects appended to it."""
    with reading(file, lambda: 0), open_text(file) as stream:
        text = stream.read()
    decoder, spaces = json.JSONDecoder(), re.compile(r"\s*")
    number, counted_to = 1, 0

    def line_of(at):
        nonlocal number, counted_to
        number, counted_to = number + text.count("\n", counted_to, at), at
        return number

    def value_at(at):
        line = line_of(at)
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{file}, the record at line {line}, is not JSON ({error}); correct or delete "
                             "it") from None
        return line, value, spaces.match(text, end).end()

    at = spaces.match(text).end()
    while at < len(text):
        if text[at] == "{":
            line, value, at = value_at(at)
            yield line, value
            continue
        if text[at] != "[":
            raise InputError(f"{file}, line {line_of(at)}: behind the JSON array stands {text[at:at + 20]!r}; delete "
                             "it, or give records")
        at = spaces.match(text, at + 1).end()
        while text[at:at + 1] != "]":
            line, value, at = value_at(at)
            yield line, value
            if text[at:at + 1] == ",":
                at = spaces.match(text, at + 1).end()
            elif text[at:at + 1] != "]":
                raise InputError(f"{file}: the JSON array breaks off or lacks a comma after the record at line {line}; "
                                 "fetch or correct it")
        at = spaces.match(text, at + 1).end()


def whole_text(where, value):
    """JSON may hold half of a pair (\\ud83d), which is no character; `value` is a text or another JSON value."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError:
        raise RecordError(f"{where}: the text has half of a surrogate pair (such as \\ud83d), which is no character; "
                          "correct or delete it") from None
    except RecursionError:
        raise RecordError(f"{where}: its values are nested too deeply; correct or delete it") from None


def in_workers(count, encoder, arguments, jobs):
    """Results of encoder(*arguments).encode for all jobs, in order, by `count` processes with an encoder each."""
    if count == 1:
        yield from map(encoder(*arguments).encode, jobs)
        return
    children = multiprocessing.get_context("fork")  # leave_with relies on children of this process
    pool = ProcessPoolExecutor(count, children, start_worker, (os.getpid(), encoder, arguments))
    waiting = collections.deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(encode_in_worker, job))
            if len(waiting) > 8 * count:  # bounds the records that are read but not written
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        pool._call_queue._reader.close()  # else its writer may wait for a reader: Python before 3.11.6, gh-94777
        raise InputError("a worker process has ended before its work; if the system killed it for memory, give a "
                         "smaller "
                         "--workers, else --workers 1 shows what is wrong") from None
    finally:
        pool.shutdown(cancel_futures=True)


def start_worker(parent, encoder, arguments):
    global encoder_of_worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    threading.Thread(target=leave_with, args=(parent,), daemon=True).start()
    # one process a worker is enough: the package would start threads in each
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder_of_worker = encoder(*arguments)


def leave_with(parent):
    """Ends the workers if the parent was killed; they would wait for jobs without end."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def encode_in_worker(job):
    return encoder_of_worker.encode(job)


class Progress:
    """One rewritten line on a terminal, else a line every log_interval documents."""

    def __init__(self, interval):
        self.interval, self.start = interval, time.monotonic()
        self.documents, self.shown = 0, 0.0
        self.terminal = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def add(self, documents, tokens):
        before, now = self.documents, time.monotonic()
        self.documents += documents
        if self.terminal:
            if now - self.shown >= 0.2:
                self.shown = now
                line = self.text(tokens)[:(os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1]
                print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        elif before // self.interval != self.documents // self.interval:
            print(self.text(tokens), file=sys.stderr, flush=True)

    def text(self, tokens):
        seconds = max(time.monotonic() - self.start, 1e-9)
        return (f"{self.documents} documents, {tokens} tokens in {seconds:.1f} s "
                f"({self.documents / seconds:.0f} documents/s)")

    def end(self):
        if self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr)
