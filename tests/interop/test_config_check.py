"""`megashard config --check`: how each key of a configuration file is read, and that pretrain agrees."""
import re

import pytest

from megashard import NO_DROPOUT, PROGRAM, ROOT, network, run

ARGUMENTS = """num_layers: 2
lr: 1.0e-4
hidden_size: 16
num_attention_heads: 2
sequence_parallel: false
log_progress: true
"""
ROLL = """
seed: 3
exp_name: tiny
actor_train:
  model_args: {model_name_or_path: hf, dtype: bf16, attn_implementation: fa2}
  training_args: {learning_rate: 1.0e-2, max_steps: 5}
  strategy_args: {strategy_name: fsdp2_train, strategy_config: {fsdp_size: 1, param_dtype: bf16}}
actor_infer:
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8}}
"""
NATIVE = """parallel:
  fsdp_plan: {apply_modules: ["model.layers.{*}"], param_dtype: bf16}
  data_parallel_size: 4
training:
  lr: 1.0e-5
  adam_fused: true
  save_format: dcp
"""
DATA = """{"dataset_param": {"basic_parameters": {"dataset": "a.json", "template": "qwen2vl"},
"preprocess_parameters": {"model_name_or_path": "hf", "image_max_pixels": 1024}}}
"""


def check(folder, name, text, *flags, expect=0):
    """{key: (line, how it is read)}, and the first and last lines."""
    (folder / name).write_text(text)
    done = run(PROGRAM, "config", "--check", folder / name, *flags, expect=expect)
    lines = done.stdout.splitlines()
    keys = {}
    for line in lines[1:-1]:
        number, key, what = re.fullmatch(rf"{re.escape(str(folder / name))}:(\d+): (\S+): (.*)", line).groups()
        keys[key] = (int(number), what)
    return keys, lines[0].split(": ")[-1], lines[-1]


def test_arguments_of_pretrain(folder):
    keys, dialect, end = check(folder, "run.yaml", ARGUMENTS)
    assert dialect == "arguments of megashard pretrain" and end == "keys: 5 read, 1 ignored, 0 refused"
    assert keys["lr"] == (2, "read as --lr 0.0001") and keys["num_layers"] == (1, "read as --num-layers 2")
    assert keys["sequence_parallel"] == (5, "read as --sequence-parallel False")
    assert keys["log_progress"] == (6, "ignored: there is no progress.txt; --metrics-file has a line for every step")


def test_mistakes_of_arguments(folder):
    wrong = "hiden_size: 3\nseed: many\npipeline_model_parallel_size: 2\nnum-layers: 3\n"
    keys, _, end = check(folder, "wrong.yaml", ARGUMENTS + wrong, expect=2)
    assert keys["hiden_size"] == (7, 'REFUSED: unknown key "hiden_size"; did you mean hidden_size?')
    assert keys["seed"] == (8, 'REFUSED: --seed takes a whole number, got "many".')
    assert keys["num-layers"][1].startswith("REFUSED: num-layers and num_layers in line 1 mean the same")
    assert end == "keys: 6 read, 1 ignored, 3 refused" or end == "keys: 5 read, 1 ignored, 4 refused"
    # pretrain says the same of each.
    done = run(PROGRAM, "pretrain", folder / "wrong.yaml", expect=2)
    for number, what in keys.values():
        if what.startswith("REFUSED: "):
            assert f"wrong.yaml:{number}: {what.removeprefix('REFUSED: ')}" in done.stdout + done.stderr


def test_a_device_of_plans(folder):
    text = (ROOT / "launch" / "plan" / "devices" / "h200.yaml").read_text()
    keys, dialect, _ = check(folder, "device.yaml", text)
    assert dialect == "device of megashard plan"
    assert keys["name"][1] == "read as NVIDIA H200" and keys["attention"][1] == "read as a map of 2"
    assert keys.keys() == set(re.findall(r"^(\w+):", text, re.M))
    (folder / "wrong.yaml").write_text(text.replace("memory_share", "memory_shard"))
    done = run(PROGRAM, "config", "--check", folder / "wrong.yaml", expect=2)
    mistake = r'REFUSED: \S+wrong.yaml:\d+: unknown key "memory_shard"; did you mean memory_share\?'
    assert re.search(mistake, done.stdout)


def test_the_sample_of_fsdp2(folder):
    text = (ROOT / "fsdp2_config.yaml").read_text()
    keys, dialect, _ = check(folder, "sample.yaml", text)
    assert dialect == "FSDP2 file"
    of_file = {line.split(":")[0] for line in text.splitlines() if re.match(r"\w+:", line)}
    assert keys.keys() == of_file and not any(what.startswith("REFUSED") for _, what in keys.values())
    assert keys["sharding_size"][1] == "read as auto"
    assert keys["shard_placement"][1] == "read as null"


def test_mistakes_of_fsdp2(folder):
    keys, _, end = check(folder, "fsdp2.yaml", "sharding_size: auto\nparam_dtype: bf17\nreshard_after_forwad: true\n"
                         "num_to_forward_prefetch: -1\n", expect=2)
    assert keys["param_dtype"] == (2, 'REFUSED: param_dtype takes one of fp16, bf16, fp32, fp64, got "bf17"; did you '
                                      'mean bf16?')
    assert keys["reshard_after_forwad"][1].startswith("ignored: unknown key")
    assert "did you mean reshard_after_forward?" in keys["reshard_after_forwad"][1]
    assert keys["num_to_forward_prefetch"][1].startswith("REFUSED: num_to_forward_prefetch takes a whole number")
    assert end == "keys: 1 read, 1 ignored, 2 refused"


def test_roll(folder):
    keys, dialect, end = check(folder, "roll.yaml", ROLL)
    assert dialect == "configuration of ROLL" and end.endswith(" 0 refused")
    assert keys["seed"] == (2, "read as --seed 3")
    assert keys["actor_train.training_args.learning_rate"][1] == "read as --lr 0.01"
    assert keys["actor_train.training_args.max_steps"][1] == "read as 5"
    assert keys["actor_train.model_args.attn_implementation"][1] == "ignored: nothing here reads it"
    assert keys["actor_infer"][1] == "ignored: nothing here reads it"  # a worker of vLLM
    keys, _, _ = check(folder, "roll.yaml", ROLL.replace("dtype: bf16,", "dtyp: bf16,"), "--role", "actor_train",
                       expect=2)
    assert keys["actor_train.model_args.dtyp"][1].endswith("did you mean dtype?")


def test_mindspeed(folder):
    keys, dialect, end = check(folder, "native.yaml", NATIVE)
    assert dialect == "configuration of MindSpeed-MM's native route"
    assert keys["fsdp_plan.apply_modules"][1] == 'read as ["model.layers.{*}"]'
    assert keys["parallel.data_parallel_size"][1] == "ignored: it follows from the others"
    assert keys["training.lr"] == (5, "read as --lr 1e-05")
    assert keys["training.adam_fused"][1] == "ignored: nothing here reads it"
    assert keys["training.save_format"][1] == "ignored: it asks for nothing"
    assert end == "keys: 3 read, 3 ignored, 0 refused"
    wrong = NATIVE.replace("dcp", "hf").replace("fsdp_plan: {", "fsdp_plan: {x: 1, ")
    keys, _, end = check(folder, "native.yaml", wrong, expect=2)
    assert keys["training.save_format"][1].startswith("REFUSED: training.save_format is hf, but checkpoints are")
    assert keys["fsdp_plan.x"][1].startswith('REFUSED: unknown key "fsdp_plan.x"')
    assert keys["fsdp_plan.apply_modules"][1].startswith("read as")  # all are told
    wrong = NATIVE.replace("data_parallel_size: 4", "ulysses_parallel_size: 2") + "paralel: {}\n"
    keys, _, end = check(folder, "native.yaml", wrong, expect=2)
    assert keys["parallel.ulysses_parallel_size"][1] == (
        "REFUSED: parallel.ulysses_parallel_size must be 1 here; give --context-parallel-size 2 instead.")
    assert keys["paralel"][1] == 'REFUSED: unknown key "paralel"; did you mean parallel?'
    assert end == "keys: 3 read, 2 ignored, 2 refused"
    keys, dialect, end = check(folder, "data.json", DATA)
    assert dialect == "data file of MindSpeed-MM"
    assert keys["dataset_param.preprocess_parameters.image_max_pixels"] == (2, "read as 1024")


def test_what_is_of_no_key_is_told_too(folder):
    (folder / "data.json").write_text('{"dataset_param": {"basic_parameters": {"template": "qwen2vl"}}}')
    done = run(PROGRAM, "config", "--check", folder / "data.json", expect=2)
    assert "REFUSED: " in done.stdout and "basic_parameters.dataset is missing; name the file." in done.stdout


@pytest.mark.parametrize("words, message", [
    ([], "--check is required"),
    (["--check", "none.yaml"], "--check none.yaml cannot be read: there is no such file"),
    (["--chek", "none.yaml"], "unknown flag --chek; did you mean --check?")])
def test_wrong_flags_are_told(folder, words, message):
    done = run(PROGRAM, "config", *words, expect=2)
    assert message in done.stdout + done.stderr


def test_a_file_that_is_let_through_runs(folder):
    _, _, end = check(folder, "run.yaml", ARGUMENTS)
    assert end.endswith(" 0 refused")
    run(PROGRAM, "pretrain", folder / "run.yaml", *network().split()[6:], "--mock-data", "--micro-batch-size", 1,
        "--train-iters", 1, *NO_DROPOUT, "--dry-run")
