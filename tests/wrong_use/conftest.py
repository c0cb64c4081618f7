"""What the cases get wrong: data, FSDP2 files, models and a checkpoint, made once."""
import json

import pytest

from wrong_use import MOCK, PRETRAIN, RATE, VISION, run, write_conversations, write_tokens


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
