"""`megashard pretrain --config` of a file of ROLL's: the run that the same flags make."""
import json

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megashard import LAYERS, NO_DROPOUT, losses, pretrain, write_documents

ROLL = """
exp_name: tiny
pretrain: ${folder}/tiny
folder: FOLDER
sequence_length: 16
save_steps: 2
logging_steps: 5
actor_train:
  model_args: {disable_gradient_checkpointing: false, dtype: bf16,
               freeze_module_prefix: "model.embed_tokens,model.layers.0."}
  training_args: {learning_rate: 1.0e-2, weight_decay: 0.1, per_device_train_batch_size: 1,
                  gradient_accumulation_steps: 2, warmup_steps: 1, num_train_epochs: 1.5, lr_scheduler_type: cosine}
  data_args: {template: qwen3}
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config: {fsdp_size: 1, param_dtype: float32, reduce_dtype: float32, async_save_ckpt: false, SYNC
                      wrap_policy: {transformer_layer_cls_to_wrap: [Qwen3Attention, Qwen3MLP], wrap_lm_output: true}}
  device_mapping: list(range(0,2))
"""
TINY = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32,
        "head_dim": 8, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "eos_token_id": 1, "tie_word_embeddings": False}


def test_a_configuration_of_roll_is_a_run_of_flags(folder):
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(TINY))
    write_documents(folder / "data", [[(7 * i + j * j) % 64 for j in range(40)] for i in range(10)])
    data = f"--from-scratch --data-path {folder / 'data'} --split 1,0,0 --eval-iters 0"

    def run(*flags, sharding=None):
        steps, out = pretrain(folder, *flags, ranks=2, defaults=data, config=sharding)
        return losses(steps), out

    config = folder / "roll.yaml"
    config.write_text(ROLL.replace("FOLDER", str(folder)).replace("SYNC", ""))
    by_roll, out = run("--config", config, "--role", "actor_train", "--save", folder / "roll")
    assert "num_train_epochs 1.5 of 24 sequences, 4 an iteration, are 9 iterations" in out
    assert "* 2 ranks are a global batch of 4" in out
    assert "wrap_policy: Qwen3Attention -> 2 modules" in out and "wrap_policy: Linear -> 1 module (lm_head)" in out
    assert "ROLL: not used here: actor_train.data_args, exp_name, folder" in out
    assert "sharded over 2 ranks (all of them: fsdp_size is 1 or less, absent, or all ranks, as in ROLL)" in out
    assert len(by_roll) == 9 and by_roll[-1] < by_roll[0] - 0.1

    by_flags, _ = run("--hf-model", folder / "tiny", "--seq-length", 16, "--micro-batch-size", 1,
                      "--global-batch-size", 4, "--lr", "1e-2", "--weight-decay", "0.1", "--lr-warmup-iters", 1,
                      "--param-group-overrides", "*:wd_mult=1", "--lr-decay-style", "cosine", "--train-iters", 9,
                      "--seed", 42, "--use-torch-fsdp2", *NO_DROPOUT, "--freeze-module-prefix", "model.embed_tokens",
                      "model.layers.0.", sharding=LAYERS + "reduce_dtype: fp32\n")
    # Only the order of sums may differ: groups lie elsewhere in the buffers that are reduced, and the norm's parts too.
    assert by_roll == pytest.approx(by_flags, abs=1e-6)

    config.write_text(ROLL.replace("FOLDER", str(folder)).replace("SYNC",
                                                                  "reduce_scatter_during_grad_accumulation: false,"))
    late, _ = run("--config", config, "--role", "actor_train")
    assert late == pytest.approx(by_roll, abs=1e-6)  # gradients are summed before they are reduced, not after
    meta, _ = run("--config", config, "--role", "actor_train", "--init-model-with-meta-device")
    assert meta == late

    def saved(step):
        whole = folder / "roll.pt"
        dcp_to_torch_save(str(folder / "roll" / f"iter_{step:07d}"), str(whole))
        return torch.load(whole, weights_only=False)

    first, last = saved(2), saved(9)
    for name, value in first["model"].items():
        frozen = name.startswith(("model.embed_tokens", "model.layers.0."))
        assert torch.equal(value, last["model"][name]) == frozen, name
        assert (name in last["optimizer"]["state"]) == (not frozen), name
