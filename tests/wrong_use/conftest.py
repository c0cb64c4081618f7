"""Inputs of the cases: data, FSDP2 files, models and a checkpoint, made once."""
import json
import os
import shutil

import pytest

from megashard import TRACKER
from wrong_use import MOCK, PRETRAIN, RATE, SAVE, TRAIN, VISION, run, write_conversations, write_tokens


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Data, FSDP2 files and a model to get wrong."""
    path = tmp_path_factory.mktemp("wrong")
    (path / "bad.yaml").write_text("sharding_size: [1\n a: b: c")
    (path / "thirds.yaml").write_text("sharding_size: 3\n")
    (path / "misspelt.yaml").write_text("sharding_size: auto\nparm_dtype: bf16\n")
    (path / "good.yaml").write_text("seed: 1\n")
    (path / "empty.yaml").write_text("\n")
    worker = ("strategy_args: {{strategy_name: fsdp2_train, strategy_config: {{{}}}}}, "
              "device_mapping: 'list(range(0,{}))'")
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
        sizes | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 3,
                 "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}))
    (path / "sees").mkdir()
    (path / "sees" / "config.json").write_text(json.dumps(VISION))
    write_conversations(path / "chats")
    write_conversations(path / "masked", learnt=0)
    write_conversations(path / "beyond", tokens=(3, 50, 50, 4, 60, 2))
    write_conversations(path / "places", tokens=(3, 50, 50, 4, 50, 2))
    write_conversations(path / "larger", grid=(1, 4, 4))
    write_conversations(path / "uneven", grid=(1, 3, 4))
    write_conversations(path / "pixels", width=96)
    whole = (path / "chats.vision.safetensors").read_bytes()
    (path / "cut.vision.safetensors").write_bytes(whole[:-100])
    return path


@pytest.fixture(scope="session")
def saved(folder):
    done = run(*PRETRAIN, *RATE, *MOCK, "--save", str(folder / "saved"), "--save-interval", "2")
    assert done.returncode == 0, done.stderr
    return folder / "saved"


@pytest.fixture(scope="session")
def here(folder, saved, tmp_path_factory):
    """The run's step 2 in `saved`, and damaged variants of it."""
    path = tmp_path_factory.mktemp("checkpoints")
    done = run(*TRAIN, *SAVE, path / "saved")  # steps 1 and 2
    assert done.returncode == 0, done.stderr

    def copied(name):
        shutil.copytree(saved, path / name)
        return path / name / "iter_0000002"

    for name in ("empty", "iter_0000005"):
        (path / name).mkdir()
    (path / "file").write_text("text\n")
    (path / "dangling").symlink_to(path / "gone")
    shutil.copytree(saved / "iter_0000002", path / "renamed")
    shutil.copytree(saved / "iter_0000002", path / "moved" / "best_step")
    (path / "trackers_step_is_gone").mkdir()
    (path / "trackers_step_is_gone" / TRACKER).write_text("7")
    (path / "torn_tracker").mkdir()
    (path / "torn_tracker" / TRACKER).write_text("\x00\x00")
    (path / "legacy" / "iter_0000002" / "mp_rank_00").mkdir(parents=True)
    (path / "legacy" / TRACKER).write_text("2")
    shutil.copytree(saved / "iter_0000002", path / "roll" / "dcp")
    shutil.copytree(saved, path / "runs" / "a")
    (path / "weights").mkdir()
    (path / "weights" / "model.safetensors").write_bytes(bytes(8))
    for name in ("nowhere", "empty", "roll"):
        (path / f"from_{name}.yaml").write_text(
            f"sequence_length: 16\nresume_from_checkpoint: {path / name}\n"
            "actor: {strategy_args: {strategy_name: fsdp2_train}, training_args: {per_device_train_batch_size: 1}}\n")
    for name, text in {"zarr": '{"sharded_backend": "zarr", "sharded_backend_version": 1}', "not_json": "{",
                       "version": '{"sharded_backend": "torch_dist", "sharded_backend_version": 9}'}.items():
        (path / name / "iter_0000002").mkdir(parents=True)
        (path / name / "iter_0000002" / "metadata.json").write_text(text)
        (path / name / TRACKER).write_text("2")
    (copied("no_metadata") / ".metadata").unlink()
    os.truncate(copied("cut_metadata") / ".metadata", 100)
    (copied("no_data") / "__0_0.distcp").unlink()
    (copied("torn_manifest") / "manifest.json").write_text("{")
    step = copied("changed_manifest")
    (step / "manifest.json").write_text((step / "manifest.json").read_text().replace('"iteration": 2',
                                                                                     '"iteration": 3'))
    (copied("newer_manifest") / "manifest.json").write_text('{"format_version": 9, "crc32": "00000000", "files": {}}')
    step = copied("flipped")
    data = bytearray((step / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (step / "__0_0.distcp").write_bytes(data)
    shutil.copytree(path / "saved", path / "both_damaged")
    for step in ("iter_0000001", "iter_0000002"):
        (path / "both_damaged" / step / "__0_0.distcp").write_bytes(b"")
    copied("alone")
    return path
