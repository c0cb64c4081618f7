"""A training as a process that this one follows."""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from typing import TYPE_CHECKING

from .program import error_of, program, variables, words_of

if TYPE_CHECKING:  # editors read it: launch/python/write_types.py writes it for a wheel
    from typing import Unpack

    from .argument_types import Arguments

PERIOD = 0.05  # seconds between two looks into the files of a run


def train(config: str | os.PathLike | None = None, *, nproc: int = 1, environment: dict[str, str] | None = None,
          log: str | os.PathLike | None = None, **arguments: "Unpack[Arguments]") -> "Run":
    """Starts a training and returns its Run: `for step in megashard.train(...)` follows it, `.wait()` waits for it.

    config: a YAML file (docs/arguments.md), which the arguments override.
    nproc: ranks on this machine.
    environment: variables for the ranks, besides this process's.
    log: a file for the ranks' output; None: one that lives as long as the Run.
    arguments: Megatron's flags: lr=1e-3, use_torch_fsdp2=True, data_path=["a", "b"]; megashard.arguments("lora") lists
        those about a word. True and False set switches; None is the default.

    Raises UsageError for names and types that do not fit before anything starts; what else is wrong, the run says
    when it is followed. The run ends when this process does.
    """
    return Run(config, nproc, environment, log, arguments)


class Run:
    """A training that has started. Its iterator gives each step's metrics as a dict: step, loss, grad_norm, lr,
    tokens_per_s, ... Whoever leaves the loop before its end, also by Ctrl-C, stops the run."""

    def __init__(self, config, nproc, environment, log, arguments):
        self._folder = tempfile.mkdtemp(prefix="megashard_")
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        words = [] if config is None else [os.fspath(config)]
        metrics = arguments.get("metrics_file") or metrics_file_in(config)
        if metrics is None:
            metrics = os.path.join(self._folder, "metrics.jsonl")
            arguments = {**arguments, "metrics_file": metrics}
        if not arguments.keys() & {"exit_signal_handler", "exit_signal"}:
            arguments = {**arguments, "exit_signal_handler": True}  # SIGTERM saves
        handles = arguments.get("exit_signal_handler", False)
        named = getattr(signal, str(arguments.get("exit_signal")), signal.SIGTERM)
        self._stop_signal = named if handles else signal.SIGINT
        self.command = [program(), "launch", "-n", str(nproc), "--parent", str(os.getpid()), "--", "pretrain", *words,
                        *words_of("pretrain", arguments)]
        self.metrics_file = pathlib.Path(metrics).absolute()
        self.log_file = pathlib.Path(log or os.path.join(self._folder, "log")).absolute()
        self._earlier_events = self._events()
        self._stopped = False
        with open(self.log_file, "wb") as output:
            # In a session of its own: a terminal's Ctrl-C reaches this process alone, which passes it on.
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=variables(environment), start_new_session=True)

    def __iter__(self):
        is_over = False
        try:
            for line in self._lines():
                step = json.loads(line)
                if step["step"] > self._loaded_step:
                    yield step
            is_over = True
        finally:
            if not is_over:
                self.stop()
        self._raise_failure()

    def wait(self, timeout=None):
        """Waits for the end, and returns the metrics of the last step; None if there was none. Ctrl-C stops the run.
        Raises UsageError or MegashardError if it failed, and subprocess.TimeoutExpired after `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except KeyboardInterrupt:
            self.stop()
            raise
        last = None
        for last in self:
            pass
        return last

    def stop(self):
        """Lets the ranks finish their step, save (with save=...), and end; waits for that. Ctrl-C meanwhile ends them
        at once."""
        if self.code is None:
            self._stopped = True
            self._process.send_signal(self._stop_signal)
        try:
            self._process.wait()
        except KeyboardInterrupt:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()
            raise

    @property
    def code(self):
        """The exit code; None while the run goes on."""
        return self._process.poll()

    @property
    def log(self):
        """What the ranks have printed."""
        return self.log_file.read_text(errors="replace")

    def _raise_failure(self):
        ended_on_request = self._stopped and self.code in (128 + signal.SIGINT, 128 + signal.SIGTERM)
        if self.code != 0 and not ended_on_request:
            raise error_of(self.log, self.code)

    def _events(self):
        """Of this run and of those that it continues: METRICS_FILE.events begins each with a line."""
        try:
            return pathlib.Path(f"{self.metrics_file}.events").read_bytes()
        except OSError:
            return b""

    def _start_event(self):
        """The one of this run; None before it trains. When it is there, the metrics file has no other run's steps
        behind the loaded one."""
        events = self._events()
        own = events.removeprefix(self._earlier_events) if events != self._earlier_events else b""
        line, end, _ = own.partition(b"\n")
        return json.loads(line) if end else None

    def _lines(self):
        """Complete lines of the metrics file, as they come."""
        start = None
        while start is None:
            is_over = self.code is not None
            start = self._start_event()
            if is_over and start is None:
                return
            time.sleep(0 if start else PERIOD)
        self._loaded_step = start["step"]
        with open(self.metrics_file, "rb") as file:
            text = b""
            while True:
                is_over = self.code is not None
                text += file.read()
                *lines, text = text.split(b"\n")
                yield from lines
                if is_over:
                    return
                time.sleep(PERIOD)


def metrics_file_in(config):
    """The value of that key of a YAML file, if it is there."""
    if config is None:
        return None
    found = re.search(r"""^\s*metrics[-_]file\s*:\s*["']?([^\s"'#]+)""", pathlib.Path(config).read_text(), re.MULTILINE)
    return found and found[1]
