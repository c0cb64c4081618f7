"""verl's TrainingWorker with megashard's engine: its policy loss trains as with transformers and AdamW."""
import json
import sys

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import megashard


@pytest.fixture(scope="module")
def found(folder):
    """What the first rank of verl_engine.py has found."""
    torch.manual_seed(1)
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        initializer_range=0.3)).save_pretrained(folder / "model")
    megashard.run(sys.executable, megashard.ROOT / "tests" / "interop" / "verl_engine.py", folder / "model", folder,
                  env=megashard.environment(PYTHONPATH=str(megashard.ROOT / "launch" / "python"),
                                            MEGASHARD_BIN=str(megashard.PROGRAM), VERL_ENGINE_DEVICE="megashard",
                                            MASTER_ADDR="127.0.0.1", MASTER_PORT=megashard.free_port()))
    return json.loads((folder / "found.json").read_text())


def test_steps_are_those_of_transformers(found):
    for ours, theirs in zip(found["steps"], found["twin"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    assert [step["lr"] for step in found["steps"]] == pytest.approx([1e-3, 2e-3, 2e-3])
    assert found["weights"] < 1e-4  # a twentieth of the rate: AdamW follows signs


def test_a_critic_trains(found):
    assert found["critic"] > 0


def test_a_checkpoint_brings_the_weights_back(found):
    assert found["again"]
