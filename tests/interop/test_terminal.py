"""A run's output on a terminal: the status line, and the lines that each logging level shows."""
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time

import pytest

import megashard
from megashard import environment, launch, with_defaults
from test_pretrain import TRAINING

ERASE = "\r\x1b[K"


def on_a_terminal(folder, *flags, ranks=1, **options):
    """All that a run writes to a terminal."""
    (folder / "fsdp2.yaml").write_text(megashard.LAYERS)
    words = ["pretrain", *with_defaults(flags, TRAINING), "--fsdp2-config-path", folder / "fsdp2.yaml"]
    return written_to_a_terminal(launch(ranks, *words), **options)


def written_to_a_terminal(words, columns=120, **variables):
    """All that a command writes to a terminal of that width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    clean = {name: value for name, value in environment().items() if name not in {"NO_COLOR", "TERM"}}
    variables = {**clean, "TERM": "xterm", **variables}
    started = subprocess.Popen([str(word) for word in words], stdout=theirs, stderr=subprocess.PIPE,
                               stdin=subprocess.DEVNULL, cwd=megashard.ROOT, env=variables)
    os.close(theirs)
    seen = b""
    try:
        while piece := os.read(ours, 65536):
            seen += piece
    except OSError:  # Linux raises this when the other end is closed
        pass
    finally:
        os.close(ours)
    errors = started.stderr.read().decode()
    assert started.wait() == 0, errors
    return seen.decode().replace("\r\n", "\n")


def status_lines(seen):
    return re.findall(re.escape(ERASE) + r"([^\r\n]*step[^\r\n]*)\r", seen)


def shown(seen):
    """The final screen: each line as it was last written."""
    lines = []
    for line in seen.split("\n"):
        text = ""
        for piece in line.split("\r"):
            text = piece[3:] if piece.startswith("\x1b[K") else piece + text[len(piece):]
        lines.append(text)
    return lines


def bare(line):
    return re.sub(r"\x1b\[\d*m", "", line)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_terminal_has_a_line_that_is_written_again(folder, ranks):
    seen = on_a_terminal(folder, "--train-iters", "12", ranks=ranks)
    status = [bare(line) for line in status_lines(seen)]
    assert re.fullmatch(r"step 1/12  ETA [\d.]+ \w+  loss \d\.\d+  [\d.]+k? tokens/s  [\d.]+ [MG]iB  "
                        r"data [\d.]+ \w+", status[0]), status
    assert status[-1].startswith("step 12/12  ETA 0.0 ms")
    lines = shown(seen)
    assert not [line for line in lines if "ETA" in line]  # log lines have taken its place, and the end has erased it
    steps = re.findall(r"^ \[[^]]+\] iteration +(\d+)/ +12 \| consumed", "\n".join(lines), re.M)
    assert [int(step) for step in steps] == [1, 5, 10, 12]


def test_colors_are_for_terminals_that_want_them(folder):
    assert "\x1b[1mstep 1/2\x1b[0m" in on_a_terminal(folder, "--train-iters", "2")
    plain = on_a_terminal(folder, "--train-iters", "2", NO_COLOR="1")
    assert status_lines(plain) and not re.search(r"\x1b\[\d*m", plain)
    assert "\x1b" not in on_a_terminal(folder, "--train-iters", "2", TERM="dumb")


def test_the_line_is_cut_to_the_terminal(folder):
    status = status_lines(on_a_terminal(folder, "--train-iters", "2", columns=30))
    assert status and all(len(bare(line)) < 30 and bare(line).startswith("step") for line in status)


BYTES = r"[\d.]+ [MG]iB of [\d.]+ [MG]iB, [\d.]+ %(, [\d.]+ [MG]iB/s(, [\d.]+ \w+ left)?)?"
SAMPLES = r"[\d.]+[kM]? of [\d.]+[kM]? samples, [\d.]+ %(, \S+ samples/s, [\d.]+ \w+ left)?"


def works(seen):
    """The works that reported progress, in their order."""
    lines = re.finditer(re.escape(ERASE) + rf"(index: {SAMPLES}|(?!index)\w+: {BYTES})\r", seen)
    return list(dict.fromkeys(match[1].split(":")[0] for match in lines))


def in_the_end(seen):
    return [line for line in shown(seen) if re.match(r"\w+: .* of .*%", line)]


def test_saves_loads_and_indices_tell_their_progress(folder):
    def train(steps, *flags, **options):
        return on_a_terminal(folder, "--train-iters", steps, "--save", save, "--save-interval", steps,
                             "--override-opt_param-scheduler", *flags, **options)

    save = folder / "progress"
    first = train(2)
    assert works(first) == ["index", "save"]
    again = train(4, "--load", save, ranks=2)
    assert works(again) == ["check", "load", "index", "save"]
    beside = train(6, "--load", save, "--async-save")
    assert works(beside) == ["check", "load", "index"]  # training goes on, and tells its own
    assert not in_the_end(first + again + beside)
    _, piped = megashard.pretrain(folder, "--load", save, "--train-iters", 6, defaults=TRAINING)
    assert "\r" not in piped and "% " not in piped and "at iteration 6" in piped


def test_conversions_tell_their_progress(folder):
    words = [megashard.PROGRAM, "convert", "dcp_to_torch", "--dcp-checkpoint-dir", folder / "progress" / "iter_0000002",
             "--torch-save-path", folder / "whole.pt"]
    seen = written_to_a_terminal(words)
    assert works(seen) == ["check", "convert"] and not in_the_end(seen)
    assert shown(seen)[-2] == f"written: {folder / 'whole.pt'}"
    assert "\x1b" not in written_to_a_terminal([*words, "--overwrite"], TERM="dumb")
    assert "\r" not in megashard.convert(*words[2:], "--overwrite").stdout
    cut = written_to_a_terminal([*words, "--overwrite"], columns=20)
    assert max(len(line) for line in re.findall(re.escape(ERASE) + r"(convert: [^\r\n]*)\r", cut)) == 19


STEPS = "set -euo pipefail; steps_log={}; . launch/steps.sh; "


@pytest.mark.parametrize("says, shows", [("[3/40] Compiling", "[3/40] "), ("", "")])
def test_a_step_of_a_script_tells_its_progress(tmp_path, says, shows):
    script = STEPS.format(tmp_path) + f'work() {{ echo "{says}"; sleep 1.2; }}; step "building" work'
    seen = written_to_a_terminal(["bash", "-c", script])
    times = re.findall(re.escape(f"{ERASE}==> building ... {shows}") + r"\d\.\d s\r", seen)  # \r: not the last one
    assert times and times == sorted(set(times)), seen
    assert re.fullmatch(r"==> building \.\.\. 1\.\d s", shown(seen)[0]), seen
    piped = subprocess.run(["bash", "-c", script + "; step failing false"], cwd=megashard.ROOT, capture_output=True,
                           text=True)
    assert piped.returncode == 1 and "\r" not in piped.stdout and "'failing' failed with exit code 1" in piped.stderr


@pytest.mark.parametrize("kind", ["step", "shown_step"])
def test_a_script_that_is_interrupted_says_so(tmp_path, kind):
    """By Ctrl-C, which the script and its command get; the command ends as ninja does."""
    command = "bash -c \"trap 'exit 2' INT; touch $0/begun; sleep 9 & wait\""
    script = STEPS.format(tmp_path) + f"{kind} working {command.replace('$0', str(tmp_path))}; step more true"
    started = subprocess.Popen(["bash", "-c", script], cwd=megashard.ROOT, stdout=subprocess.PIPE, text=True,
                               stderr=subprocess.STDOUT, start_new_session=True)
    while not (tmp_path / "begun").exists():
        assert started.poll() is None
        time.sleep(0.01)
    os.killpg(started.pid, signal.SIGINT)
    said = started.communicate(timeout=20)[0]
    assert started.returncode == 130 and "more" not in said and "failed" not in said
    assert re.search(r"interrupted in 'working' after \d\.\d s; run it again to go on$", said.strip()), said


def test_a_file_has_lines_alone(folder):
    _, out = megashard.pretrain(folder, "--train-iters", "6", defaults=TRAINING)
    assert "\x1b" not in out and "\r" not in out and "ETA" not in out


def test_the_logging_level_leaves_notices_and_warnings_out(folder):
    def told(*flags):
        _, out = megashard.pretrain(folder, "--train-iters", "1", "--log-progress", *flags, defaults=TRAINING)
        assert "iteration        1/" in out
        return "there is no progress.txt" in out

    assert told() and told("--logging-level", "20")
    assert not told("--logging-level", "30")
