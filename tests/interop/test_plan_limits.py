"""`megashard plan`: results of --fit, the largest plans, devices, and wrong flags and files."""
import re
import time

import pytest

from megashard import LAYERS, PROGRAM, ROOT, environment, peak_bytes, run
from test_plan import LLAMA_7B, LLAMA_70B, MIXED, RECOMPUTE, SMALL, peak_of, plan, seconds_of


def test_the_fastest_that_fits_is_found(folder):
    said = plan(folder, LLAMA_7B, 16, "--fit", "--device-memory", "30GiB", batches=4)
    trials = re.findall(r"^ +(\d+) +(full|-) +(true|false) +(all|8) +- +([\d.]+) +(fits|does not fit) +([\d.]+) ", said,
                        re.M)
    assert len({trial[:4] for trial in trials}) == len(trials) > 16
    for *_, gib, fits, _ in trials:
        assert (float(gib) <= 30) == (fits == "fits")
    best = min((trial for trial in trials if trial[5] == "fits"), key=lambda trial: float(trial[6]))
    micro_batch, recompute, reshards, shards, gib, _, ms = best
    told = re.search(r"^fastest that fits: (--micro-batch-size \d+)(.*?); (.*)$", said, re.M)
    assert told[1] == f"--micro-batch-size {micro_batch}"
    assert told[2].split() == (RECOMPUTE if recompute == "full" else [])
    # The same flags by hand are the same plan.
    again = plan(folder, LLAMA_7B, 16, *told[2].split(), micro_batch=int(micro_batch), batches=4 // int(micro_batch),
                 config=MIXED + told[3].replace("; ", "\n") + "\n")
    assert f"{peak_of(again) / 2**30:.2f}" == gib and f"{1e3 * seconds_of(again):.2f}" == ms
    assert f"reshard_after_forward: {reshards}" in told[3] and ("sharding_size: 8" in told[3]) == (shards == "8")


def test_host_memory_is_tried_where_nothing_else_fits(folder):
    said = plan(folder, LLAMA_7B, 2, "--fit", "--device-memory", "40GiB", batches=2)
    trials = re.findall(r"^ +\d+ +(?:full|-) +(?:true|false) +all +(yes|-) +([\d.]+) +(fits|does not fit) ", said, re.M)
    assert {fits for offloads, _, fits in trials if offloads == "-"} == {"does not fit"}
    assert "fits" in {fits for offloads, _, fits in trials if offloads == "yes"}
    assert re.search(r"^fastest that fits: .*; offload_to_cpu: true$", said, re.M)


def test_70b_on_2816_ranks_is_planned_in_seconds(folder):
    begin = time.monotonic()
    said = plan(folder, LLAMA_70B, 2816, *RECOMPUTE, "--device-memory", "139GiB")
    assert time.monotonic() - begin < 10
    (folder / "plan.yaml").write_text(MIXED)
    assert peak_bytes(PROGRAM, "plan", "--world-size", 2816, *LLAMA_70B.flags(4096), *RECOMPUTE, "--micro-batch-size",
                      1, "--global-batch-size", 2816, "--fsdp2-config-path", folder / "plan.yaml",
                      env=environment()) < 1e9
    assert "70.554 B parameters, 2816 x NVIDIA H200" in said and ": fits" in said


@pytest.mark.parametrize("schedule", [
    "--lr 1e-4", "--lr 1e-4 --train-iters 10000 --lr-warmup-iters 2000",
    "--lr-warmup-iters 3", "--lr-decay-style cosine --lr-warmup-fraction 0.9 --lr-decay-iters 20 --min-lr 1e-5",
    "--train-samples 9000 --lr-warmup-samples 900 --lr-decay-samples 8000 --rampup-batch-size 2 2 100",
    "--train-iters 50 --lr-decay-style WSD --lr-wsd-decay-iters 10"])
def test_a_plan_needs_no_learning_rate(folder, schedule):
    """Nor --use-torch-fsdp2; and the training's schedule, which is longer than the plan, does not change it."""
    (folder / "plan.yaml").write_text(LAYERS)
    flags = [*SMALL.flags(16), "--micro-batch-size", 1, "--global-batch-size", 8, "--world-size", 2,
             "--fsdp2-config-path", folder / "plan.yaml"]
    for flag, count in (("--lr", 2), ("--use-torch-fsdp2", 1)):
        at = flags.index(flag)
        del flags[at:at + count]
    without, given = (run(PROGRAM, "plan", *flags, *each).stdout for each in ([], schedule.split()))
    assert without == given and "step: " in given


def test_what_does_not_fit_is_told(folder):
    said = plan(folder, LLAMA_7B, 8, "--device-memory", "20GiB")
    assert "20.00 GiB: DOES NOT FIT" in said


@pytest.mark.parametrize("flags, message", [
    (["--device", "h300"], "the device h300 is neither a file nor one of a100, b200, h100, h200, l40s, mi300x, "),
    (["--device", "4090"], "; did you mean rtx4090?"),
    (["--device-memory", "much"], '--device-memory takes bytes, as 139GiB or 80GB, got "much"'),
    (["--fit", "yes"], 'unexpected word "yes" after --fit'),
    (["--fit"], "--fit needs --global-batch-size"),
    (["--world-size", "none"], '--world-size takes a number of ranks, got "none"')])
def test_wrong_flags_are_told(folder, flags, message):
    done = run(PROGRAM, "plan", *SMALL.flags(16), "--micro-batch-size", 1, *flags, expect=2)
    assert message in done.stdout + done.stderr


def test_each_device_that_comes_along_is_planned(folder):
    """Two sizes: large ones are shown in GiB, small ones as a number that is not 0."""
    files = sorted((ROOT / "launch" / "plan" / "devices").glob("*.yaml"))
    assert [file.stem for file in files] == ["a100", "b200", "h100", "h200", "l40s", "mi300x", "rtx4090"]
    for file in files:
        name = re.search("^name: (.*)", file.read_text(), re.M)[1]
        said = plan(folder, SMALL, 2, "--device", file.stem.upper(), length=16, config=LAYERS)
        assert f"plan: 0.326 M parameters, 2 x {name}\n" in said and "have not been compared with runs" in said
    said = plan(folder, LLAMA_7B, 1)
    assert re.search(r"^of these +bytes +GiB$", said, re.M) and "have not been compared" not in said
    assert "\nwithout --device the plan is of h200; there are a100, " in said


def test_a_device_file_says_what_it_lacks(folder):
    (folder / "device.yaml").write_text("name: mine\nmemry: 1GiB\n")
    done = run(PROGRAM, "plan", *SMALL.flags(16), "--micro-batch-size", 1, "--device", folder / "device.yaml", expect=2)
    assert 'device.yaml:2: unknown key "memry"; did you mean memory?' in done.stdout + done.stderr
