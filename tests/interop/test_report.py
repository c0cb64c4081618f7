"""`megashard report`: one page about runs, from their files."""
import html.parser
import json
import re

import pytest

import megashard
from megashard import PROGRAM, USAGE, run

TRAINING = megashard.network() + (
    "--mock-data --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --use-torch-fsdp2 --ckpt-format torch_dcp "
    "--eval-iters 1 --eval-interval 2 --log-memory --save-interval 2 ")


class Page(html.parser.HTMLParser):
    """The words of a page by their tag, and its tags."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.tags = [], {}, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in {"meta", "br", "link"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.words.setdefault(self.open[-1], []).append(data)


def report(folder, *words, expect=0):
    done = run(PROGRAM, "report", *words, "--out", folder / "page.html", expect=expect)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(folder):
    """A run that was stopped and went on, and another with a trace."""
    for name in "ab":
        (folder / name).mkdir()
    first = ["--metrics-file", folder / "a" / "metrics.jsonl", "--save", folder / "a" / "saved"]
    words = ["pretrain", *megashard.with_defaults(["--train-iters", 6], TRAINING)]
    run(PROGRAM, *words, *first, "--exit-interval", 4)
    run(PROGRAM, *words, *first, "--load", folder / "a" / "saved")
    run(PROGRAM, *words, "--metrics-file", folder / "b" / "metrics.jsonl", "--save", folder / "b", "--seed", "77",
        "--profile", "--profile-step-start", "2", "--profile-step-end", "4", "--profile-save-path", folder / "b")
    return folder / "a", folder / "b"


def test_a_page_tells_of_two_runs(folder, runs):
    assert f"wrote {folder}/page.html: 2 runs, 12 steps" in report(folder, *runs)
    text = (folder / "page.html").read_text()
    page = Page(text)
    assert page.open == []
    assert not [tag for tag, attributes in page.tags if tag == "link" or {"src", "href"} & attributes.keys()]
    for title in ("Loss (points: validation)", "Norm of the gradients", "Learning rate", "Tokens per second",
                  "Peak memory of a rank (MiB)", "Waited for data"):
        assert title in page.words["h3"]
    lines = [attributes["data-name"] for tag, attributes in page.tags if tag == "polyline"]
    assert {f"{run}{which}" for run in runs for which in ("", " validation")} <= set(lines)
    assert text.count('class="restart"') > 5  # one in each chart
    assert len(re.findall(r"<td>seed</td><td>1234</td><td>77</td>", text)) == 2
    assert "activations and the rest" in text and 'class="communicates"' in text
    assert [word for word in page.words["td"] if word.startswith("iter_")] == [
        "iter_0000006", "iter_0000004", "iter_0000002"] * 2
    assert page.words["td"].count("latest") == 2
    assert page.words["td"].count("done") == 4 and page.words["td"].count("exited") == 1  # two are the summary's


def test_the_page_of_one_run_lies_in_its_folder(runs):
    page = runs[1] / "report.html"
    assert run(PROGRAM, "report", runs[1]).stdout == f"wrote {page}: 1 run, 6 steps\n"
    assert page.read_text().startswith("<!doctype html>")


def test_a_run_that_goes_on_is_reported_up_to_its_last_whole_line(folder, runs):
    growing = folder / "growing.jsonl"
    growing.write_text((runs[0] / "metrics.jsonl").read_text() + '{"step": 7, "lo')
    assert "1 run, 6 steps" in report(folder, growing)
    page = (folder / "page.html").read_text()
    assert "there is no file of events" in page


def test_a_planned_step_is_drawn(folder, runs):
    trace = [{"ph": "X", "name": "aten::mm", "tid": 0, "ts": 0, "dur": 60},
             {"ph": "X", "name": "all_gather (layer)", "tid": 34, "ts": 50, "dur": 50},
             {"ph": "C", "name": "memory", "ts": 0, "args": {"sharded parameters": 1 << 20, "gradients": 0}},
             {"ph": "C", "name": "memory", "ts": 60, "args": {"sharded parameters": 1 << 20, "gradients": 3 << 20}}]
    (folder / "plan.json").write_text(json.dumps({"traceEvents": trace}))
    report(folder, runs[0], "--trace", folder / "plan.json")
    text = (folder / "page.html").read_text()
    assert "compute 60 us (60.0 %), communication 50 us (50.0 %), of which exposed 40 us (40.0 %)" in text
    assert "Memory, at most 4.0 MiB" in text and "<title>gradients, at most 3.0 MiB</title>" in text


def test_wrong_files_are_one_sentence(folder, runs):
    (folder / "empty").mkdir()
    (folder / "text.jsonl").write_text("step 1\n")
    for words, message in ([[folder / "gone"], "is not there; give the file of --metrics-file"],
                           [[folder / "empty"], "has no metrics file (*.jsonl); train with --metrics-file"],
                           [[folder / "text.jsonl"], "text.jsonl:1 is no JSON object"],
                           [[runs[0], "--trace", folder / "text.jsonl"], "is no Chrome trace"],
                           [[runs[0], "--trase", "x"], "unknown flag --trase; did you mean --trace?"]):
        out = report(folder, *words, expect=USAGE)
        assert message in out and len(out.splitlines()) == 1


def test_only_a_report_is_replaced(folder, runs):
    metrics = runs[0] / "metrics.jsonl"
    before = metrics.read_bytes()
    done = run(PROGRAM, "report", runs[0], "--out", metrics, expect=USAGE)
    assert "is there and is no report; remove it, or give another name" in done.stderr
    assert metrics.read_bytes() == before
