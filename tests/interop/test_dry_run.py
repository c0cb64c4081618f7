"""`megashard pretrain --dry-run`: what it says of a run is what the run does; it needs no memory and writes nothing."""
import re

import pytest

from megashard import LAYERS, NO_DROPOUT, PROGRAM, environment, launch, network, peak_bytes, pretrain, run, \
    write_documents

FLAGS = (network(layers=3, hidden=20, heads=2, length=16) + "--micro-batch-size 1 --global-batch-size 8 --train-iters "
         "12 --eval-interval 6 --eval-iters 2 --use-torch-fsdp2 --ckpt-format torch_dcp").split() + NO_DROPOUT


def dry_run(*flags, expect=0, **options):
    done = run(PROGRAM, "pretrain", *flags, "--dry-run", expect=expect, **options)
    return done.stdout if expect == 0 else done.stdout + done.stderr


def origins(text):
    """{argument: (source, value)}."""
    table = text[text.index("\nargument "):].split("\n\n")[0].strip().splitlines()
    middle, last = table[0].index("from"), table[0].index("value")
    return {line[:middle].strip(): (line[middle:last].strip(), line[last:].strip()) for line in table[1:]}


def test_each_value_has_its_origin(folder):
    (folder / "run.yaml").write_text("lr: 0.25\nseed: 3\nclip_grad: 0.5\n")
    pretrain(folder, *FLAGS[:-len(NO_DROPOUT)], "--attention-dropout", 0.125, "--hidden-dropout", 0, "--mock-data",
             "--lr", "1e-3", "--train-iters", 1, "--save", folder / "saved", "--save-interval", 1, defaults="", ranks=2)
    found = origins(dry_run(folder / "run.yaml", "--seed", 7, "--load", folder / "saved", "--use-checkpoint-args",
                            "--mock-data", "--micro-batch-size", 1, "--train-iters", 12, "--use-torch-fsdp2",
                            "--ckpt-format", "torch_dcp", "--print-all-arguments", "--world-size", 2))
    assert found["lr"] == (f"{folder}/run.yaml:1", "0.25") and found["clip_grad"] == (f"{folder}/run.yaml:3", "0.5")
    assert found["seed"] == ("command line", "7")  # which beats the file
    assert found["attention_dropout"] == (f"checkpoint {folder}/saved", "0.125")
    assert found["num_layers"] == (f"checkpoint {folder}/saved", "3")
    assert found["world_size"] == ("--world-size", "2")
    assert found["global_batch_size"] == ("follows from others", "2")
    assert found["weight_decay"] == ("default", "0.01")


def test_launchers_and_models_say_some(folder):
    text = dry_run(*FLAGS, "--lr", "1e-3", "--mock-data", env=environment(
        RANK="0", WORLD_SIZE="4", LOCAL_RANK="0", LOCAL_WORLD_SIZE="4", MASTER_ADDR="localhost", MASTER_PORT="1"))
    assert origins(text)["world_size"] == ("launcher's environment", "4")
    assert "3 micro batches" not in text and "1 in a micro batch x 2 micro batches x 4 data parallel ranks" in text
    assert "at their defaults" in text and "weight_decay" not in origins(text)


def test_the_file_of_fsdp2_is_shown(folder):
    (folder / "fsdp2.yaml").write_text(LAYERS + "reduce_dtype: fp32\nshardin: 2\n")
    text = dry_run(*FLAGS, "--lr", "1e-3", "--mock-data", "--fsdp2-config-path", folder / "fsdp2.yaml")
    assert re.search(rf"^reduce_dtype +{folder}/fsdp2.yaml:2 +fp32$", text, re.M)
    assert re.search(r"^shardin +\S+fsdp2.yaml:3 +ignored: unknown key", text, re.M)


def keys_of_the_file(text, file):
    """{key: (line, how it is read)} of the dry run's table."""
    found = re.findall(rf"^(\S+) +{re.escape(str(file))}:(\d+) +(.*)$", text, re.M)
    return {key: (int(line), how) for key, line, how in found}


def test_other_keys_of_a_file_of_flags_are_shown(folder):
    file = folder / "run.yaml"
    file.write_text("lr: 1.0e-3\nlog_progress: true\nmock_data: true\nclip_grad:\n")
    keys = keys_of_the_file(dry_run(file, *FLAGS), file)
    assert keys["log_progress"][1].startswith("ignored: ") and "--metrics-file" in keys["log_progress"][1]
    assert keys["log_progress"][0] == 2 and keys["clip_grad"][1] == "ignored: it has no value"
    file.write_text("lr: 1.0e-3\nhiden_size: 3\nseed: many\n")
    text = dry_run(file, *FLAGS, "--mock-data", expect=2)
    keys = keys_of_the_file(text, file)
    assert keys["hiden_size"][0] == 2 and "hidden_size" in keys["hiden_size"][1]
    assert keys["seed"] == (3, 'refused: --seed takes a whole number, got "many".')
    assert f'{file}:3: --seed takes a whole number, got "many".' in text  # among the mistakes that end it, too


def test_keys_of_roll_are_shown_by_our_flags(folder):
    file = folder / "roll.yaml"
    file.write_text("""seed: 3
exp_name: tiny
actor_train:
  model_args: {model_name_or_path: none, dtype: bf16, attn_implementation: fa2}
  training_args: {learning_rate: 1.0e-2, max_steps: 5}
  strategy_args: {strategy_name: fsdp2_train, strategy_config: {fsdp_size: 1, param_dtype: bf16}}
actor_infer:
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8}}
""")
    keys = keys_of_the_file(dry_run("--config", file, "--role", "actor_train", "--mock-data", expect=2), file)
    assert keys["actor_train.training_args.learning_rate"] == (5, "--lr 0.01")
    assert keys["actor_train.training_args.max_steps"] == (5, "5")
    for ignored in ("exp_name", "actor_train.model_args.attn_implementation", "actor_infer"):
        assert keys[ignored][1] == "ignored: nothing here reads it"


def test_keys_of_mindspeed_are_shown_by_our_flags(folder):
    file = folder / "native.yaml"
    file.write_text("""parallel:
  fsdp_plan: {apply_modules: ["model.layers.{*}"], param_dtype: bf16}
training:
  lr: 1.0e-5
  adam_fused: true
  save_format: hf
""")
    (folder / "data.json").write_text("""{"dataset_param": {"basic_parameters": {"dataset": "a.json"},
"preprocess_parameters": {"model_name_or_path": "hf", "image_max_pixels": 1024}}}
""")
    text = dry_run(file, "--mm-data", folder / "data.json", expect=2)
    keys = keys_of_the_file(text, file)
    assert keys["training.lr"] == (4, "--lr 1e-05")
    assert keys["training.adam_fused"] == (5, "ignored: nothing here reads it")
    assert keys["training.save_format"][1].startswith("refused: training.save_format is hf; write dcp, and give")
    keys = keys_of_the_file(text, folder / "data.json")
    assert keys["dataset_param.preprocess_parameters.image_max_pixels"] == (2, "1024")


def test_units_have_the_bytes_of_their_rows(folder):
    (folder / "fsdp2.yaml").write_text(LAYERS + "param_dtype: bf16\nnum_to_forward_prefetch: 2\n")
    text = dry_run(*FLAGS, "--lr", "1e-3", "--mock-data", "--world-size", 8, "--fsdp2-config-path",
                   folder / "fsdp2.yaml")
    rows = {row[0]: row[1:] for row in re.findall(
        r"^(\(root\)|model\.\S+) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+) +(\S+ -> \S+) +(.*)$", text, re.M)}
    h, ffn = 20, 80
    # Rows are dealt out in equal parts, the last ones of zeros where a dimension does not divide: 20 rows over 8 ranks
    # are 3 a rank.
    def padded(rows, row=1):
        return -(-rows // 8) * row
    sizes = [(h, 1)] * 2 + [(h, 1)] * 2 + [(3 * h, h), (3 * h, 1), (h, h), (h, 1), (ffn, h), (ffn, 1), (h, ffn), (h, 1)]
    parameters = sum(rows_ * row for rows_, row in sizes)
    modules, elements, ranks, sharded, gathered, dtype, prefetch = rows["model.layers.{*}"]
    assert (modules, ranks, dtype, prefetch) == ("3", "8", "float32 -> bfloat16", "2 forward, 0 backward")
    assert int(elements) == parameters and int(gathered) == 2 * parameters
    assert int(sharded) > 4 * parameters / 8  # some of it padding
    assert int(sharded) <= 4 * sum(padded(*size) for size in sizes) + 4 * 3 * h * 3
    assert rows["(root)"][0] == "1"


def test_batches_and_data_are_those_of_the_run(folder):
    write_documents(folder / "data", [[(7 * i + j) % 50 for j in range(40)] for i in range(30)])
    data = ["--data-path", folder / "data", "--lr", "1e-3", "--split", "8,1,1"]
    said = dry_run(*FLAGS, *data, "--world-size", 2)
    steps, log = pretrain(folder, *FLAGS, *data, ranks=2, defaults="")
    for split in ("training", "validation", "test"):
        line = re.search(rf"^ > {split} data: .*$", log, re.M)[0]
        assert line in said
    assert "batch: 8 sequences of 16 tokens a step: 1 in a micro batch x 4 micro batches x 2 data parallel" in said
    assert f"training: {len(steps)} steps, 96 sequences, 1536 tokens" in said and len(steps) == 12


def test_weights_are_told(folder):
    options = [*FLAGS, "--mock-data", "--lr", "1e-3", "--world-size", 2]
    assert "weights: drawn" in dry_run(*options)
    pretrain(folder, *FLAGS, "--mock-data", "--lr", "1e-3", "--save", folder / "weights", "--save-interval", 2,
             "--train-iters", 2, ranks=2, defaults="")
    assert f"weights: {folder}/weights/iter_0000002" in dry_run(*options, "--load", folder / "weights")


def test_the_forecast_is_that_of_a_plan(folder):
    flags = [*FLAGS, "--mock-data", "--lr", "1e-3", "--world-size", 4]
    planned = run(PROGRAM, "plan", *flags, "--device", "h100").stdout
    said = dry_run(*flags, "--machine", "h100", "--lr-warmup-iters", 4)
    assert planned.strip().splitlines()[-12:] == said.strip().splitlines()[-13:-1]
    assert re.search(r"^the whole training: [\d.]+ m?s, without evaluations and saves$", said, re.M)


def test_nothing_is_written(folder):
    before = sorted(folder.rglob("*"))
    dry_run(*FLAGS, "--mock-data", "--lr", "1e-3", "--save", folder / "never", "--metrics-file", folder / "never.jsonl",
            "--save-interval", 1)
    assert sorted(folder.rglob("*")) == before
    # Of several ranks one speaks.
    done = run(*launch(2, "pretrain", *FLAGS, "--mock-data", "--lr", "1e-3", "--dry-run"))
    assert done.stdout.count("dry run: nothing is trained") == 1


def test_a_model_of_70b_needs_no_memory(folder):
    llama = ("--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --num-query-groups 8 "
             "--group-query-attention --seq-length 4096 --max-position-embeddings 4096 --vocab-size 128255 --swiglu "
             "--tokenizer-type NullTokenizer --normalization RMSNorm --position-embedding-type rope --micro-batch-size "
             "1 --disable-bias-linear --untie-embeddings-and-output-weights --use-torch-fsdp2 --mock-data --lr 1e-4 "
             "--train-iters 100 --dry-run --world-size 512").split() + NO_DROPOUT
    assert peak_bytes(PROGRAM, "pretrain", *llama, env=environment()) < 1e9


@pytest.mark.parametrize("flags, message", [
    (["--world-size", 2], "--world-size is for --dry-run; leave it out, or add that."),
    (["--dry-run", "--machine", "h300"], "the device h300 is neither a file nor one of"),
    (["--dry-run", "true"], 'unexpected word "true" after --dry-run; a switch takes none: leave it out.'),
    (["--dry-run", "--lr-warmup-iters", 12], "the warm-up lasts 96.0 samples, but the decay ends at 96"),
    (["--dry-run", "--world-size", 3], "global batch size 8 is not divisible by 3")])
def test_mistakes_are_told(folder, flags, message):
    done = run(PROGRAM, "pretrain", *FLAGS, "--mock-data", "--lr", "1e-3", *flags, expect=2)
    assert message in done.stdout + done.stderr
