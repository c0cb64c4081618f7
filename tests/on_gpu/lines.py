"""Runs lines: commands in processes of their own, each under its own limit, whatever became of those before."""

import concurrent.futures
import dataclasses
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from typing import Callable

LEAST_SECONDS = 2  # with less time left a line is not begun
LONGEST_REASON = 400  # characters
KEPT_OUTPUT = 200_000  # characters of a line's output in the log


class Failure(Exception):
    """A line ended well and still shows something wrong; the text is one message."""


@dataclasses.dataclass
class Line:
    name: str
    command: list
    limit: float  # seconds
    environment: dict  # whole
    judge: Callable[[str], dict] = lambda output: {}  # figures of its output; throws Failure
    obstacle: str = ""  # why it cannot run on this machine
    prepare: Callable[[], None] = lambda: None  # before it is run
    clean: Callable[[], None] = lambda: None  # afterwards, whatever became of it


@dataclasses.dataclass
class Result:
    name: str
    command: str
    seconds: float
    outcome: str  # passed, failed, timed out, skipped
    why: str
    figures: dict


def last_words(output):
    """The failure's text in an output: its last error and the lines after it, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output"]
    telling = [place for place, line in enumerate(lines) if "rror" in line or "Failure" in line]
    return " ".join(lines[(telling or [len(lines) - 1])[-1]:])[:LONGEST_REASON]


class Runner:
    """Runs lines until `deadline` (of time.monotonic) and reports each to `tell`."""

    def __init__(self, deadline, log, tell, workers=1):
        self.deadline, self.log, self.tell, self.workers = deadline, log, tell, workers
        self.lock = threading.Lock()

    def run_together(self, lines):
        """Runs them in parallel, one per worker; returns when all are done."""
        with concurrent.futures.ThreadPoolExecutor(self.workers) as pool:
            list(pool.map(self.run, lines))

    def run(self, line):
        begin = time.monotonic()
        left = self.deadline - begin
        output = ""
        if line.obstacle:
            outcome, why, figures = "skipped", line.obstacle, {}
        elif left < LEAST_SECONDS:
            outcome, why, figures = "skipped", "no time was left", {}
        else:
            outcome, why, figures, output = self.attempt(line, min(line.limit, left))
        command = shlex.join(str(word) for word in line.command)
        result = Result(line.name, command, round(time.monotonic() - begin, 2), outcome, why, figures)
        with self.lock:
            with open(self.log, "a") as log:
                log.write(f"==> {line.name}: {outcome} {why}\n{command}\n{output[-KEPT_OUTPUT:]}\n")
            self.tell(result)

    @staticmethod
    def attempt(line, limit):
        """(outcome, why, figures, output) of a line that is begun."""
        output = ""
        try:
            line.prepare()
            code, output = run_in_group(line, limit)
            if code is None:
                return "timed out", f"did not end within {limit:.0f} s", {}, output
            if code < 0:
                return "failed", f"ended by {signal.Signals(-code).name}: {last_words(output)}", {}, output
            if code > 0:
                return "failed", f"exit code {code}: {last_words(output)}", {}, output
            figures = line.judge(output)
            skipped = figures.get("skipped")
            return ("skipped", skipped, {}, output) if skipped else ("passed", "", figures, output)
        except Failure as failure:
            return "failed", str(failure), {}, output
        except Exception as mistake:  # one line's mistake must not end the others
            return "failed", f"{type(mistake).__name__}: {mistake}", {}, output
        finally:
            line.clean()


def run_in_group(line, limit):
    """(exit code, output) of a command; no code where it had to be ended. Nothing that it started outlives it."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([str(word) for word in line.command], stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, env=line.environment, start_new_session=True)
        code = None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        output.seek(0)
        return code, output.read().decode(errors="replace")
