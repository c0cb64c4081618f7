"""`import megashard`: trainings from Python (docs/python.md) are those of the command line."""
import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from conversations import write_conversation_set
from documented import blocks
from megashard import PROGRAM, ROOT, TRACKER, environment, launch, run

DOOR = ROOT / "launch" / "python"
SMALL = dict(use_torch_fsdp2=True, ckpt_format="torch_dcp", eval_iters=0, hf_model="model", data_path=["chats"],
             split="1,0,0", seq_length=32, micro_batch_size=1, global_batch_size=4, lr=1e-3)


@pytest.fixture(scope="module", autouse=True)
def work(folder):
    """The folder of the scripts, with a tiny model and a set of conversations."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, max_position_embeddings=64)).save_pretrained(folder / "model")
    said = [torch.randint(0, 64, (12 + i,)).tolist() for i in range(12)]
    write_conversation_set(folder / "chats", said, [[0] * 5 + [1] * (len(each) - 5) for each in said])


def script(folder, text):
    """The last line that a Python script prints, read as JSON."""
    done = python(folder, text)
    out, errors = done.communicate(timeout=120)
    assert done.returncode == 0 and out, errors[-3000:]
    return json.loads(out.splitlines()[-1])


def python(folder, text):
    """A script whose `megashard` is the package, not this folder's module."""
    head = f"import json, megashard\nSMALL = {SMALL!r}\n"
    return subprocess.Popen([sys.executable, "-c", head + text], cwd=folder, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=environment(PYTHONPATH=str(DOOR), MEGASHARD_BIN=str(PROGRAM)))


def ranks_of(folder):
    """The processes of megashard that work in the folder."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder and b"pretrain" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:  # it has ended, or is another user's
            pass
    return found


def wait_for(happened, seconds=30):
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def flags_of(arguments):
    words = []
    for name, value in arguments.items():
        words += ["--" + name.replace("_", "-"), *([] if value is True else value if isinstance(value, list) else
                                                   [value])]
    return words


def test_a_training_and_its_checkpoint_are_the_command_lines(folder):
    run(*launch(2, "pretrain"), *flags_of(SMALL), "--train-iters", 4, "--save", "a", "--save-interval", 2,
        "--metrics-file", "a.jsonl", cwd=folder)
    seen = script(folder, """
steps = list(megashard.train(nproc=2, train_iters=4, save="b", save_interval=2, **SMALL))
import torch
same = lambda a, b: a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
load = megashard.load_checkpoint
print(json.dumps(dict(steps=steps, names=sorted(load("b")), last=same(load("b", optimizer=True),
    load("a", optimizer=True)), second=same(load("b", 2), load("a", 2)), apart=same(load("b"), load("b", 2)),
    start=sorted(load("model")), state=len(load("b", optimizer=True)))))
""")
    measured = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    of_values = lambda steps: [(each["step"], each["loss"], each["grad_norm"], each["lr"]) for each in steps]
    assert of_values(seen["steps"]) == of_values(measured) and len(measured) == 4
    assert (seen["last"], seen["second"], seen["apart"]) == (True, True, False)
    assert set(seen["start"]) <= set(seen["names"]) and "model.embed_tokens.weight" in seen["names"]
    assert seen["state"] == 4 * len(seen["names"])  # exp_avg, exp_avg_sq, step


def test_the_examples_of_the_page(folder):
    """As they stand there: the steps of a training and its weights, the better learning rate."""
    examples = [block.text for block in blocks(ROOT / "docs" / "python.md") if block.language == "python"]
    printed = [python(folder, text).communicate(timeout=120)[0].splitlines() for text in examples]
    assert [line.split()[0] for line in printed[0][:-1]] == [str(step) for step in range(1, 21)]
    assert float(printed[0][19].split()[1]) < float(printed[0][0].split()[1]), printed
    assert printed[0][-1].endswith("torch.Size([64, 32])") and printed[1][0] in ("0.001", "0.003")


def test_a_resumed_run_gives_only_its_own_steps(folder):
    seen = script(folder, """
more = dict(save="c", load="c", save_interval=2, metrics_file="c.jsonl")
first = megashard.train(train_iters=2, **more, **SMALL).wait()
run = megashard.train(train_iters=4, override_opt_param_scheduler=True, **more, **SMALL)
print(json.dumps([first["step"], [step["step"] for step in run], run.code, "iteration        4" in run.log]))
""")
    assert seen == [2, [3, 4], 0, True]


MISTAKES = {
    "a misspelt name": ("micro_batch_sise=1", "micro_batch_sise is no argument; did you mean --micro-batch-size?"),
    "another trainer's name": ("learning_rate=1", "learning_rate is no argument; here it is --lr"),
    "text for a number": ("train_iters='all'", "train_iters takes a whole number, got 'all'"),
    "a number for a switch": ("bf16=3", "bf16 takes True or False, got 3"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_before_anything_starts(tmp_path, mistake):
    given, message = MISTAKES[mistake]
    seen = script(tmp_path, f"""
try:
    megashard.train({given})
except ValueError as error:
    print(json.dumps([str(error), isinstance(error, megashard.UsageError)]))
""")
    assert seen == [message, True] and not list(tmp_path.iterdir())


def test_what_the_program_refuses_is_a_usage_error(folder):
    seen = script(folder, """
try:
    megashard.train(nproc=2, train_iters=1, **{**SMALL, "lr": -1.0}).wait()
except megashard.UsageError as error:
    print(json.dumps([str(error), error.code, error.log.count(str(error))]))
""")
    assert "--lr" in seen[0] and seen[1:] == [2, 1]


def test_a_failing_rank_has_the_last_word(folder):
    """Its message, and the exit code of the command line."""
    seen = script(folder, """
import os, signal, subprocess
run = megashard.train(nproc=2, train_iters=100000, **SMALL)
try:
    for step in run:
        if step["step"] == 2:
            ranks = subprocess.run(["pgrep", "-P", str(run._process.pid)], capture_output=True, text=True).stdout
            os.kill(int(ranks.split()[1]), signal.SIGKILL)
except megashard.MegashardError as error:
    print(json.dumps([str(error), error.code, isinstance(error, ValueError)]))
""")
    assert seen[0].startswith("launch: rank 1 was ended by signal 9") and seen[1:] == [128 + signal.SIGKILL, False]


FOLLOWED = """
run = megashard.train(nproc=2, train_iters=100000, save="{save}", save_interval=50000, **SMALL)
try:
    for step in run:
        print(step["step"], flush=True)
        {body}
except KeyboardInterrupt:
    print(json.dumps([run.code, step["step"]]), flush=True)
"""


@pytest.mark.parametrize("body", ["pass", "import time; time.sleep(0.5 * (step['step'] > 2))"],
                         ids=["while it waits", "within the loop"])
def test_ctrl_c_saves_and_ends_all_processes(folder, tmp_path, body):
    process = python(folder, FOLLOWED.format(save=tmp_path / "save", body=body))
    seen = [process.stdout.readline() for _ in range(3)]
    assert len(ranks_of(folder)) == 3  # the launcher, and the ranks
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    code, step = json.loads(out.splitlines()[-1])
    assert seen == ["1\n", "2\n", "3\n"] and code == 0 and process.returncode == 0, errors
    assert step <= int((tmp_path / "save" / TRACKER).read_text()) < 100000
    assert not ranks_of(folder)


def test_to_leave_the_loop_stops_the_run(folder, tmp_path):
    seen = script(folder, f"""
for step in (run := megashard.train(train_iters=100000, save="{tmp_path}/save", save_interval=50000, **SMALL)):
    if step["step"] == 3:
        break
print(json.dumps([run.code, run.wait()["step"]]))
""")
    assert seen[0] == 0 and int((tmp_path / "save" / TRACKER).read_text()) == seen[1] >= 3
    assert not ranks_of(folder)


def test_no_rank_outlives_python(folder):
    process = python(folder, FOLLOWED.format(save="never", body="pass"))
    assert process.stdout.readline() == "1\n" and len(ranks_of(folder)) == 3
    process.kill()
    process.wait()
    process.stdout.close()
    process.stderr.close()
    wait_for(lambda: not ranks_of(folder))


def test_a_thread_that_ends_does_not_end_its_run(folder):
    seen = script(folder, """
import threading
runs = []
thread = threading.Thread(target=lambda: runs.append(megashard.train(train_iters=3, **SMALL)))
thread.start()
thread.join()
print(json.dumps(runs[0].wait()["step"]))
""")
    assert seen == 3


def test_a_plan_has_the_figures_of_the_command_line(folder):
    seen = script(folder, """
print(json.dumps([megashard.plan(world_size=4, device="h100", fit=fit, **SMALL) for fit in (False, True)]))
""")
    out = run(PROGRAM, "plan", "--world-size", 4, "--device", "h100", *flags_of(SMALL), cwd=folder).stdout
    plan, fitted = seen
    assert f"({plan['peak_bytes']} bytes)" in out and f"({plan['checkpoint_bytes']} bytes)" in out
    assert f"step: {1e3 * plan['step_seconds']:.2f} ms" in out and plan["fits"] and plan["world_size"] == 4
    assert sum(plan["memory"].values()) == plan["peak_bytes"] and plan["collectives"]["all_gather"]["count"] > 0
    assert fitted["change"].startswith("--micro-batch-size 1") and fitted["step_seconds"] <= plan["step_seconds"]


def test_arguments_come_from_the_table(tmp_path):
    seen = script(tmp_path, "print(json.dumps(megashard.arguments('lora')))")
    helped = run(PROGRAM, "pretrain", "--help", "--lora-r").stdout
    assert {"lora_r", "lora_target_modules"} <= seen.keys() and seen["lora_r"]["type"] == "integer"
    assert " ".join(seen["lora_r"]["help"].split()) in " ".join(helped.split())


def test_editors_get_its_types(tmp_path):
    run(ROOT / "launch" / "python" / "write_types.py", PROGRAM, tmp_path / "argument_types.py")
    written = {}
    exec((tmp_path / "argument_types.py").read_text(), written)
    types = written["Arguments"].__annotations__
    assert (types["lr"], types["use_torch_fsdp2"], types["data_path"]) == (float, bool, list[str])
    assert "cosine" in types["lr_decay_style"].__args__ and "fp32_residual_connection" not in types


def test_the_import_needs_only_the_standard_library(tmp_path):
    out = run(sys.executable, "-I", "-S", "-X", "importtime", "-c",
              f"import sys; sys.path.insert(0, {str(DOOR)!r}); import megashard; print(*sys.modules)").stdout.split()
    assert "megashard.run" in out
    assert not [name for name in out if name.split(".")[0] not in sys.stdlib_module_names | {"megashard", "__main__"}]
