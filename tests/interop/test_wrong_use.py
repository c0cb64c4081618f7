"""What a new user gets wrong ends in one sentence on one rank that says what to do, and in the right exit code."""
import json
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("MEGASHARD_BUILD", ROOT / "build"))
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
USAGE, FAILURE = 2, 1


def run(*arguments, **environment):
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    return subprocess.run([BUILD / "launch" / "megashard", *arguments], env={**clean, **environment}, cwd=ROOT,
                          capture_output=True, text=True, timeout=60)


CASES = {
    "unknown subcommand": (["train"], USAGE, "unknown subcommand 'train': known are"),
    "unknown subcommand on every rank": (["launch", "-n", "3", "--", "train"], USAGE, "unknown subcommand 'train'"),
    "launch without a number": (["launch", "--", "pretrain"], USAGE, "--processes is required"),
    "launch without a subcommand": (["launch", "-n", "2"], USAGE, "no subcommand to start"),
    "launch of no ranks": (["launch", "-n", "0", "--", "pretrain"], USAGE, "0 not in range 1 to 4096"),
    "launch with a flag twice": (["launch", "-n", "2", "-n", "2", "--", "pretrain"], USAGE, "At Most 1 required"),
    "a padding to multiples of nothing": (
        ["convert", "hf_to_torch_dist", "--hf-dir", "x", "--save-dir", "y", "--megatron-layout", "--make-vocab-size-divisible-by", "0"],
        USAGE, "--make-vocab-size-divisible-by is 0; it must be at least 1."),
    "launch with an unknown flag": (["launch", "--nodes", "2", "-n", "2", "--", "pretrain"], USAGE,
                                    "unknown flag --nodes"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_sentence(name):
    arguments, code, sentence = CASES[name]
    done = run(*arguments)
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("megashard: error: ") and sentence in lines[0], done.stderr
    assert done.returncode == code


def test_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        done = run("launch", "-n", "2", "--master-port", port, "--", "pretrain")
    assert f"port {port} cannot be used: Address already in use; choose another" in done.stderr
    assert done.returncode == FAILURE


def test_help_and_version_need_no_rank():
    assert "launch" in run("--help").stdout
    assert run("--version").stdout.startswith("megashard ")
    assert "--master-port" in run("launch", "--help").stdout


NETWORK = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 --seq-length 16 "
    "--tokenizer-type NullTokenizer --vocab-size 60"
).split()
LOOP = (
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 2 --eval-iters 0 --use-torch-fsdp2 "
    "--ckpt-format torch_dcp"
).split()
PRETRAIN = ["pretrain", *NETWORK, *LOOP]
ON_TWO_RANKS = ["launch", "-n", "2", "--", *PRETRAIN]
RATE, MOCK, ALL_TRAINING = ["--lr", "1e-3"], ["--mock-data"], ["--split", "100,0,0"]


def only_line(done):
    """What the user sees: one line on stderr, no stack."""
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("megashard: error: "), done.stderr
    return lines[0]


def write_tokens(prefix, token, documents=10):
    """A data set of 40 tokens a document in Megatron's format; all documents but one are all `token`."""
    lengths = np.full(documents, 40, np.int32)
    tokens = np.tile(np.arange(40, dtype=np.int32), (documents, 1))
    tokens[1:] = token
    tokens.tofile(f"{prefix}.bin")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, documents, documents + 1)
    pointers = np.arange(documents, dtype=np.int64) * 160
    bounds = np.arange(documents + 1, dtype=np.int64)
    pathlib.Path(f"{prefix}.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + bounds.tobytes())


def write_conversations(prefix, tokens=(3, 50, 50, 4, 1, 2), grid=(1, 2, 4), width=24):
    """A set of two alike: a question with places (50) for a picture of zeros, and an answer."""
    sys.path.insert(0, str(ROOT / "launch" / "preprocess"))
    from preprocess_conversations import Pictures, Sample, Writer
    sys.path.pop(0)
    writer = Writer(str(prefix))
    for _ in range(2):
        writer.add(Sample(tokens, bytes([0, 0, 0, 0, 1, 1]), Pictures([grid], bytes(4 * width * int(np.prod(grid))), width)))
    writer.finish()


VISION = {
    "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "image_token_id": 50, "video_token_id": 51,
    "text_config": {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "vocab_size": 60,
                    "num_key_value_heads": 3, "max_position_embeddings": 64,
                    "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 2, "out_hidden_size": 24,
                      "window_size": 8, "fullatt_block_indexes": [0]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data, FSDP2 files and a model to get wrong."""
    path = tmp_path_factory.mktemp("wrong")
    (path / "bad.yaml").write_text("sharding_size: [1\n a: b: c")
    (path / "thirds.yaml").write_text("sharding_size: 3\n")
    (path / "misspelt.yaml").write_text("sharding_size: auto\nparm_dtype: bf16\n")
    (path / "arguments.yaml").write_text("gpt_args:\n  num_layer: 2\n")
    worker = "strategy_args: {{strategy_name: fsdp2_train, strategy_config: {{{}}}}}, device_mapping: 'list(range(0,{}))'"
    (path / "roll.yaml").write_text(
        "pretrain: model\nsequence_length: 16\n" + f"actor: {{{worker.format('fsdp_siz: 2', 2)}}}\n" +
        f"student: {{{worker.format('ep_size: 2, efsdp_size: 2', 2)}}}\n" + f"large: {{{worker.format('', 16)}}}\n")
    write_tokens(path / "good", 1)
    write_tokens(path / "large", 999)
    write_tokens(path / "short", 1)
    (path / "short.idx").write_bytes((path / "good.idx").read_bytes()[:60])
    (path / "model").mkdir()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 16, "rms_norm_eps": 1e-5,
             "hidden_act": "silu", "tie_word_embeddings": False}
    (path / "model" / "config.json").write_text(json.dumps(
        sizes | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    (path / "experts").mkdir()
    (path / "experts" / "config.json").write_text(json.dumps(
        sizes | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 3, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 8, "head_dim": 8}))
    (path / "sees").mkdir()
    (path / "sees" / "config.json").write_text(json.dumps(VISION))
    write_conversations(path / "chats")
    write_conversations(path / "beyond", tokens=(3, 50, 50, 4, 60, 2))
    write_conversations(path / "places", tokens=(3, 50, 50, 4, 50, 2))
    write_conversations(path / "larger", grid=(1, 4, 4))
    write_conversations(path / "uneven", grid=(1, 3, 4))
    write_conversations(path / "pixels", width=96)
    whole = (path / "chats.vision.safetensors").read_bytes()
    (path / "cut.vision.safetensors").write_bytes(whole[:-100])
    return path


FROM_MODEL = ["pretrain", *LOOP, *RATE, *MOCK, "--seq-length", "16", "--hf-model"]
EXPERT_RANKS = ["--expert-model-parallel-size"]
ROLL = ["pretrain", "--config", "{folder}/roll.yaml", *MOCK, "--role"]
# {folder} stands for the fixture's.
PRETRAIN_CASES = {
    "no data": ([*PRETRAIN, *RATE], USAGE, "give --data-path PREFIX of .bin/.idx files, or --mock-data"),
    "a flag twice": ([*PRETRAIN, *MOCK, *RATE, "--lr", "1e-4"], USAGE, "--lr is given twice; keep one"),
    "a misspelt flag": ([*PRETRAIN, *MOCK, *RATE, "--weigth-decay", "0"], USAGE, "did you mean --weight-decay?"),
    "a flag that is refused": ([*PRETRAIN, *MOCK, *RATE, "--use-distributed-optimizer"], USAGE,
                               "FSDP2 shards the optimizer's state already"),
    "no FSDP2 file": ([*PRETRAIN, *MOCK, *RATE, "--fsdp2-config-path", "{folder}/none.yaml"], USAGE,
                      "none.yaml: the file cannot be read or is empty; check the path"),
    "bad YAML": ([*PRETRAIN, *MOCK, *RATE, "--fsdp2-config-path", "{folder}/bad.yaml"], USAGE,
                 "bad.yaml:2: this is not YAML"),
    "ranks that cannot be divided": ([*ON_TWO_RANKS, *MOCK, *RATE, "--fsdp2-config-path", "{folder}/thirds.yaml"],
                                     USAGE, "World size 2 must be divisible by sharding_size 3; change sharding_size"),
    "no such data": ([*PRETRAIN, *RATE, "--data-path", "{folder}/none"], FAILURE, "there is no file"),
    "tokens beyond the vocabulary": ([*PRETRAIN, *RATE, *ALL_TRAINING, "--data-path", "{folder}/large"], FAILURE,
                                     "tokenise the text with the model's own tokenizer"),
    "an empty split": ([*PRETRAIN, *RATE, "--data-path", "{folder}/good", "--split", "0,100,0"], FAILURE,
                       "there is no training data: --split gives the train split a weight of 0"),
    "a corrupt index": ([*PRETRAIN, *RATE, *ALL_TRAINING, "--data-path", "{folder}/short"], FAILURE,
                        "short.idx is truncated or corrupt"),
    "no model folder": ([*FROM_MODEL, "{folder}/none"], FAILURE, "none/config.json: --hf-model must be a Hugging"),
    "a model without weights": ([*FROM_MODEL, "{folder}/model"], FAILURE, "has neither model.safetensors nor"),
    "a flag against config.json": ([*FROM_MODEL, "{folder}/model", "--from-scratch", "--num-layers", "3"], FAILURE,
                                   "--num-layers 3 contradicts the model's config.json, which says 1: leave the flag"),
    "experts and ranks that do not fit": (
        ["launch", "-n", "4", "--", *FROM_MODEL, "{folder}/experts", "--from-scratch", *EXPERT_RANKS, "3"], USAGE,
        "world size 4 is not divisible by --expert-model-parallel-size 3; change one of them"),
    "experts that cannot be shared out": (
        ["launch", "-n", "2", "--", *FROM_MODEL, "{folder}/experts", "--from-scratch", *EXPERT_RANKS, "2"], FAILURE,
        "--expert-model-parallel-size 2 does not divide the 3 experts of the model; choose a number that does"),
    "a model without experts": (
        ["launch", "-n", "2", "--", *FROM_MODEL, "{folder}/model", "--from-scratch", *EXPERT_RANKS, "2"], FAILURE,
        "--expert-model-parallel-size 2 needs a model with experts, and this one has none; leave it out"),
    "a misspelt key of the FSDP2 file": (
        [*PRETRAIN, *MOCK, *RATE, "--fsdp2-config-path", "{folder}/misspelt.yaml", "--fsdp2-config-strict"], USAGE,
        'misspelt.yaml:2: unknown key "parm_dtype"; did you mean param_dtype?'),
    "a misspelt key of the arguments": (["pretrain", "{folder}/arguments.yaml"], USAGE,
                                        'arguments.yaml:2: unknown key "num_layer"; did you mean num_layers?'),
    "a misspelt key of ROLL's": ([*ROLL, "actor"], USAGE,
                                 "unknown key actor.strategy_args.strategy_config.fsdp_siz; did you mean fsdp_size?"),
    "experts of ROLL that do not fit": (["launch", "-n", "2", "--", *ROLL, "student"], USAGE,
                                        "leaves 1 with the same experts; efsdp_size, which is 2, must divide that"),
    "devices that are not there": (["launch", "-n", "2", "--", *ROLL, "large"], USAGE,
                                   "large.device_mapping is for 16 devices, but the run has 2 ranks; start as many"),
    "a role that is not there": ([*ROLL, "critic"], USAGE, "has no such worker; it has actor, student, large."),
    "a loss that is no number": ([*PRETRAIN, *MOCK, "--lr", "1e30"], FAILURE, "lower the learning rate"),
}


SEES = ["launch", "-n", "2", "--", "pretrain", "--hf-model", "{folder}/sees", "--from-scratch", "--seq-length", "16", *LOOP, *RATE,
        *ALL_TRAINING, "--data-path"]
PRETRAIN_CASES |= {
    "a conversation's token beyond the vocabulary": ([*SEES, "{folder}/beyond"], FAILURE,
                                                     'beyond" holds token 60 (in sample'),
    "a picture that the model cannot merge": ([*SEES, "{folder}/uneven"], FAILURE, "image_grid_thw[0] is [1, 3, 4]: all must be"),
    "pictures of another model": ([*SEES, "{folder}/pixels"], FAILURE, "pixel_values [8, 96] must be [8, 24]"),
    "more places than pictures": ([*SEES, "{folder}/places"], FAILURE, "has a place for a further image (token 50) at 4"),
    "a picture larger than its place": ([*SEES, "{folder}/larger"], FAILURE,
                                        "image 0 of image_grid_thw has 4 features, but only 2 tokens 50 stand for it"),
    "a set of pictures that is cut off": ([*SEES, "{folder}/cut"], FAILURE, "cut.vision.safetensors"),
    "heads that two ranks cannot share": ([*SEES, "{folder}/chats", "--context-parallel-size", "2"], FAILURE,
                                          "Qwen2_5_VLForConditionalGeneration has 3 attention heads, which 2 ranks of a sequence"),
}


@pytest.mark.parametrize("name", PRETRAIN_CASES)
def test_pretrain_ends_in_one_sentence(folder, name):
    arguments, code, sentence = PRETRAIN_CASES[name]
    done = run(*[each.format(folder=folder) for each in arguments], OMP_NUM_THREADS="1")
    assert sentence in only_line(done)
    assert done.returncode == code


@pytest.fixture(scope="module")
def saved(folder):
    done = run(*PRETRAIN, *RATE, *MOCK, "--save", str(folder / "saved"), "--save-interval", "2", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return folder / "saved"


def test_a_damaged_checkpoint(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "damaged")
    (rank_file,) = (tmp_path / "damaged" / "iter_0000002").glob("*.distcp")
    os.truncate(rank_file, 500)
    done = run(*PRETRAIN, *RATE, *MOCK, "--load", str(tmp_path / "damaged"), OMP_NUM_THREADS="1")
    assert "__0_0.distcp has 500 bytes" in only_line(done) and "put back what is damaged from a copy" in done.stderr
    assert done.returncode == FAILURE


def test_another_models_checkpoint(saved):
    wider = [("32" if before == "--hidden-size" else each) for before, each in zip(["", *PRETRAIN], PRETRAIN)]
    done = run(*wider, *RATE, *MOCK, "--load", str(saved), OMP_NUM_THREADS="1")
    assert "has hidden_size 16, and this run has 32: give --hidden-size 16, or --use-checkpoint-args" in only_line(done)
    assert done.returncode == USAGE


def test_a_rank_that_is_killed_is_named(folder):
    """The group ends at once, not at a collective's deadline."""
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    flags = [*ON_TWO_RANKS, *RATE, *MOCK, "--log-interval", "1"]
    flags[flags.index("--train-iters") + 1] = "1000000"
    group = subprocess.Popen([BUILD / "launch" / "megashard", *flags], env={**clean, "OMP_NUM_THREADS": "1"}, cwd=ROOT,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert any(" iteration " in line for line in group.stdout), "the group ended before its first step"
        ranks = pathlib.Path(f"/proc/{group.pid}/task/{group.pid}/children").read_text().split()
        os.kill(int(ranks[1]), signal.SIGKILL)
        _, errors = group.communicate(timeout=30)
    finally:
        group.kill()
    assert errors.splitlines()[0].startswith("megashard: error: launch: rank 1 was ended by signal 9"), errors
    assert len(errors.splitlines()) == 1
    assert group.returncode == 128 + signal.SIGKILL
