"""The log of a run: its start, its steps, its evaluations, and the place where Ctrl-C stopped it."""
import re
import signal
import subprocess
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megashard import TRACKER, environment, free_port, launch, run, with_defaults, write_documents
from test_pretrain import TRAINING, pretrain

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 16, "rms_norm_eps": 1e-5,
         "hidden_act": "silu", "tie_word_embeddings": False}
FROM_MODEL = ("--seq-length 16 --micro-batch-size 2 --global-batch-size 4 --eval-iters 1 --train-iters 2 --lr 1e-3 "
              "--mock-data --use-torch-fsdp2 --ckpt-format torch_dcp").split()


def megashard(*words, ranks=1, expect=0):
    done = run(*launch(ranks, *words), expect=expect)
    return done.stdout + done.stderr


def training(*flags):
    """test_pretrain's, on other data or with other flags."""
    return ["pretrain", *with_defaults(flags, TRAINING)]


def steps_with_a_line(out):
    return [int(number) for number in re.findall(r" iteration +(\d+)/ *\d+ \| consumed samples", out)]


def test_the_first_and_the_last_step_have_a_line(folder):
    _, out = pretrain(folder, "--train-iters", "8", "--save", str(folder / "steps"), "--save-interval", "100")
    assert steps_with_a_line(out) == [1, 5, 8]
    assert out.index("iteration        8/") < out.index("saving checkpoint") < out.index(
        "successfully saved checkpoint")
    _, out = pretrain(folder, "--train-iters", "20", "--exit-interval", "8")
    assert steps_with_a_line(out) == [1, 5, 8]
    _, out = pretrain(folder, "--train-iters", "10", "--load", str(folder / "steps"), "--override-opt_param-scheduler")
    assert steps_with_a_line(out) == [9, 10]


def test_what_is_added_to_the_line_of_a_step_stands_behind_megatrons(folder):
    _, out = pretrain(folder, "--train-iters", "1", "--log-tokens-per-second", "--log-memory", "--log-throughput")
    (line,) = [line for line in out.splitlines() if " iteration " in line and "elapsed time" in line]
    assert re.search(r"nan iterations: +\d+ \| tokens per second: [\d.]+ \| peak memory \(MiB\): [\d.]+ \|$", line)
    assert float(line.split(":")[4].split("|")[0]) > 0  # where scripts cut the time of a step
    assert "TFLOP/s/GPU" in line
    (made_of,) = [line for line in out.splitlines() if line.startswith("[Rank 0] (after 1 iterations) memory (MiB) | ")]
    peak, *parts = map(float, re.findall(r": ([\d.]+)", made_of))
    assert len(parts) == 6 and sum(parts) == pytest.approx(peak, abs=0.5)  # each is rounded to 0.1


def test_the_start_says_what_differs_from_the_defaults(folder):
    _, out = pretrain(folder, "--train-iters", "1")
    banner = out[:out.index("end of arguments")]
    assert re.search(r"^  hidden_size \.+ 32$", banner, re.M) and "adam_beta1 ..." not in banner
    assert "--print-all-arguments" in banner
    _, out = pretrain(folder, "--train-iters", "1", "--print-all-arguments", "--exit-signal", "SIGUSR1")
    assert "WARNING: --exit-signal SIGUSR1 needs --exit-signal-handler; without it the signal ends the run" in out
    banner = out[:out.index("end of arguments")]
    assert "------------------------ arguments ------------------------" in banner
    assert re.search(r"^  hidden_size \.+ 32$", banner, re.M) and re.search(r"^  adam_beta1 \.+ 0.9$", banner, re.M)


def test_the_start_counts_parameters_once_and_those_that_are_trained(folder):
    counts = {}
    for name, flags in {"tied": [], "untied": ["--untie-embeddings-and-output-weights"]}.items():
        _, out = pretrain(folder, "--train-iters", "1", *flags)
        counts[name] = int(re.search(r" > number of parameters on .*: (\d+)$", out, re.M)[1])
    assert counts["untied"] - counts["tied"] == 128 * 32  # of the padded vocabulary
    assert f" > trainable parameters: {counts['untied']} (100.00%)" in out
    _, out = pretrain(folder, "--train-iters", "1", "--freeze-module-prefix", "model.embed")
    trained = re.search(rf" > trainable parameters: (\d+) \(\d+\.\d\d%\) of {counts['tied']}$", out, re.M)
    assert 0 < int(trained[1]) <= counts["tied"] - 128 * 32


def test_the_start_says_what_the_data_is(folder):
    write_documents(folder / "data", 10 * [range(40)])
    flags = training("--data-path", folder / "data", "--split", "80,10,10", "--train-iters", "8", "--eval-iters", "1")
    flags.remove("--mock-data")
    out = megashard(*flags)
    assert " > training data: 8 documents, 320 tokens; asked for: 64 samples of 16 tokens, 3.20 epochs" in out
    assert " > validation data: 1 document, 40 tokens; asked for: 8 samples of 16 tokens, 3.20 epochs" in out
    assert " > test data: 1 document, 40 tokens; asked for: 8 samples" in out
    chosen = flags.index("--data-path")
    blend = flags[:chosen + 1] + ["3", folder / "data", "1", folder / "data"] + flags[chosen + 2:]
    assert " > training data: 16 documents, 640 tokens; asked for: 64 samples of 16 tokens, 0.80 to 2.40 epochs" in \
        megashard(*blend)
    flags[flags.index("--eval-iters") + 1] = "0"
    out = megashard(*flags)
    assert " > validation data: not read" in out and " > test data: not read" in out


def test_evaluations_say_on_what(folder):
    _, out = pretrain(folder, "--train-iters", "2", "--eval-iters", "3", "--eval-interval", "100")
    last_step, begun = out.index("iteration        2/"), out.index("Evaluating on 24 samples")
    assert last_step < out.index("after training is done") < begun < out.index("validation loss at iteration 2 on "
                                                                               "validation set")
    assert out.count("Evaluating on 24 samples") == 2  # validation and test


def test_the_parts_of_a_step_are_told_in_megatrons_form(folder):
    def parts(name, *flags):
        save = ["--save", str(folder / name), "--save-interval", "100"]
        return pretrain(folder, "--train-iters", "7", "--eval-iters", "1", *save, *flags)[1]

    assert "across ranks" not in parts("no_parts")
    out = parts("parts", "--timing-log-level", "1")
    pair = r"\((\d+\.\d\d), (\d+\.\d\d)\)$"
    heads = re.findall(r"^\(min, max\) time across ranks \(ms\):\n    (\S+) ", out, re.M)
    assert heads.count("forward-backward") == 3  # steps 1, 5 and 7
    assert heads.count("save-checkpoint") == 1 and heads.count("evaluate") == 2
    for part in ("forward-backward", "optimizer", "optimizer-clip-main-grad", "optimizer-inner-step"):
        least, most = re.findall(rf"^    {part} \.+: {pair}", out, re.M)[-1]
        assert 0 < float(least) <= float(most)
    assert "batch-generator" not in out
    out = parts("small_parts", "--timing-log-level", "2", "--timing-log-option", "all")
    for part in ("batch-generator", "forward-compute", "backward-compute"):
        assert re.search(rf"^  {part}:\n     rank  0: \d+\.\d\d\n     rank  1: \d+\.\d\d$", out, re.M)
    out = parts("longest_parts", "--timing-log-level", "1", "--timing-log-option", "max")
    assert re.search(r"^max time across ranks \(ms\):\n    forward-backward \.+: \d+\.\d\d$", out, re.M)


@pytest.fixture(scope="module")
def poisoned(folder):
    """A model with a NaN in one weight, as Hugging Face files and as a step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = folder / "poisoned"
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(model)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][31, 3] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    megashard("convert", "hf_to_dcp", "--hf-dir", model, "--dcp-dir", folder / "poisoned_step")
    return model, folder / "poisoned_step"


def test_weights_that_are_no_numbers_are_named_with_their_folder(poisoned, folder):
    model, step = poisoned
    words = ["pretrain", "--hf-model", model, *FROM_MODEL]
    for more, source in (([], model), (["--load", step], step), (["--skip-train"], model)):
        out = megashard(*words, *more, ranks=2, expect=1)
        assert f"of the weights loaded from {source}" in out and "model.layers.0.mlp.up_proj.weight holds NaN" in out
        assert "learning rate" not in out
    write_documents(folder / "few", [range(17)])
    out = megashard("infer", "--hf-model", model, "--data-path", folder / "few", "--seq-length", "16", "--log-probs",
                    folder / "few.npy", expect=1)
    assert f"of the weights loaded from {model}, model.layers.0.mlp.up_proj.weight holds NaN" in out


def test_inference_says_how_far_it_is_and_nothing_of_a_split(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = folder / "whole"
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(model)
    write_documents(folder / "five", 5 * [range(17)])
    words = ["infer", "--hf-model", model, "--data-path", folder / "five", "--seq-length", "16", "--log-probs",
             folder / "five.npy"]
    out = megashard(*words)
    assert "Inferring on 5 documents" in out and "split" not in out
    assert len(np.load(folder / "five.npy")) == 5
    assert "WARNING: --split 0,0,1 is not used: infer reads every document" in megashard(*words, "--split", "0,0,1")


def start(*words, ranks=2, **variables):
    """A run in the background, that Ctrl-C can reach whatever the tests were started by."""
    return subprocess.Popen([str(word) for word in launch(ranks, *words)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=environment(**variables),
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def end(run, after, *signals):
    """Sends the signals after a line with `after`; returns stdout, stderr and exit code."""
    seen = ""
    deadline = threading.Timer(60, run.kill)
    deadline.start()
    try:
        for line in run.stdout:
            seen += line
            if after in line:
                break
        else:
            pytest.fail("the run has ended: " + run.stderr.read())
        for each in signals:
            run.send_signal(each)
        # Not communicate(), which leaves out what was read ahead.
        out, errors, code = run.stdout.read(), run.stderr.read(), run.wait()
    finally:
        deadline.cancel()
        run.kill()
    return seen + out, errors, code


ENDLESS = training("--train-iters", "1000000")


def test_ctrl_c_says_where_it_stopped_and_what_was_saved(folder):
    out, errors, code = end(start(*ENDLESS), "iteration       10/", signal.SIGINT)
    assert (code, errors) == (130, "")
    last = out.splitlines()[-1]
    assert re.fullmatch(r"interrupted by SIGINT after iteration \d+ of 1000000: nothing is saved, since there is no "
                        r"--save", last), out
    assert int(last.split()[5]) == steps_with_a_line(out)[-1]  # and its loss is shown
    for beside in ([], ["--async-save"]):
        save = folder / ("saved" + "".join(beside))
        saving = ["--save", save, "--save-interval", "5", *beside]
        out, errors, code = end(start(*ENDLESS, *saving), "iteration       15/", signal.SIGINT)
        assert (code, errors) == (130, "")
        step = int((save / TRACKER).read_text())
        assert out.count("successfully saved") == out.count("saving checkpoint")
        last = out.splitlines()[-1]
        assert f": iteration {step} is saved in {save}" in last and f"go on with --load {save}" in last


def test_ctrl_c_ends_an_evaluation(folder):
    run = start(*training("--train-iters", "1", "--eval-iters", "1000000"))
    out, errors, code = end(run, "Evaluating on", signal.SIGINT)
    assert (code, errors) == (130, "")
    assert "interrupted by SIGINT in an evaluation after iteration 1 of 1: nothing is saved" in out.splitlines()[-1]


def test_ctrl_c_before_the_first_step_ends_at_once():
    first_of_two = start(*ENDLESS, ranks=1, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
                         MASTER_PORT=free_port())
    _, errors, code = end(first_of_two, "end of arguments", signal.SIGINT)
    assert code == 130
    assert errors == "megashard: interrupted before the first step; nothing was trained or saved\n"


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGINT", "SIGTERM"])
def test_the_exit_signal_saves_and_ends_the_run(folder, name):
    save = folder / name
    flags = ["--exit-signal-handler", "--save", save, "--save-interval", "1000000",
             *([] if name == "SIGTERM" else ["--exit-signal", name])]
    out, errors, code = end(start(*ENDLESS, *flags), "iteration       10/", getattr(signal, name))
    assert (code, errors) == (0, "")
    step = int((save / TRACKER).read_text())
    assert step >= 10 and f"[exiting program at iteration {step}]" in out
