"""ROLL's files of dpo, rlvr, a critic and a student: the runs that flags of --objective make."""
import json

import pytest
import torch

from conversations import write_conversation_set
from megashard import NO_DROPOUT, losses, pretrain
from test_roll import TINY

LENGTH, ROWS = 24, 24
WORKER = """
pretrain: FOLDER/tiny
actor_train:
  worker_cls: roll.pipeline.CLASS
  model_args: {disable_gradient_checkpointing: true}
  training_args: {learning_rate: 1.0e-2, per_device_train_batch_size: 1, gradient_accumulation_steps: 2,
                  num_train_epochs: 9, lr_scheduler_type: linear}
  strategy_args: {strategy_name: fsdp2_train, strategy_config: {param_dtype: float32}}
  device_mapping: list(range(0,2))
"""
FILES = {
    "dpo": (WORKER.replace("CLASS", "dpo.actor_worker.ActorWorker") + f"""
sequence_length: {LENGTH}
max_steps: 5
beta: 0.4
label_smoothing: 0.1
chosen_key: chosen
""", "--objective dpo --dpo-beta 0.4 --dpo-label-smoothing 0.1 --micro-batch-size 2 --global-batch-size 8 "
     "--train-iters 5"),
    "rlvr": (WORKER.replace("CLASS", "rlvr.actor_worker.ActorWorker") + f"""
prompt_length: 8
response_length: {LENGTH - 8}
max_steps: 2
rollout_batch_size: 6
num_return_sequences_in_group: 2
adv_estimator: reinforce
dual_clip_loss: true
use_pg_clip_range: true
pg_clip_high: 0.28
use_kl_loss: true
kl_loss_coef: 0.05
train_infer_correction: {{is_weight: {{enabled: true}}}}
rewards: {{math_rule: {{}}}}
""", "--objective policy --policy-aggregation seq-mean-token-mean --policy-clip-high 0.28 --policy-dual-clip 1.4 "
     "--policy-kl 0.05 --policy-infer-correction 1.2 --micro-batch-size 1 --global-batch-size 4 --train-iters 6"),
    "critic": (WORKER.replace("CLASS", "base_worker.CriticWorker").replace("pretrain:", "reward_pretrain:") + f"""
prompt_length: 8
response_length: {LENGTH - 8}
max_steps: 2
rollout_batch_size: 12
adv_estimator: gae
value_clip: 0.3
""", "--objective value --value-aggregation seq-mean-token-mean --value-clip 0.3 --micro-batch-size 1 "
     "--global-batch-size 4 --train-iters 6"),
    "distill": (WORKER.replace("CLASS", "distill.distill_worker.StudentWorker")
                .replace("pretrain:", "student_pretrain:").replace("num_train_epochs: 9", "num_train_epochs: 1") + f"""
sequence_length: {LENGTH}
logits_topk: 4
distill_loss_weight: 0.85
kd_objective: reverse_kl
kd_temperature: 2
""", "--objective distill --distill-weight 0.85 --distill-divergence reverse_kl --distill-temperature 2 "
     "--micro-batch-size 1 --global-batch-size 4 --train-iters 6"),
}


@pytest.fixture(scope="module")
def data(folder):
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(TINY))
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, LENGTH, (ROWS,), generator=random).tolist()
    texts = [torch.randint(0, TINY["vocab_size"], (length,), generator=random) for length in lengths]
    log_probs = lambda: -torch.rand(sum(lengths), generator=random) - 3.7  # about log(1 / 64)
    write_conversation_set(folder / "data", texts, [[0] * 6 + [1] * (length - 6) for length in lengths],
                           advantages=torch.randn(sum(lengths), generator=random), ref_log_probs=log_probs(),
                           old_log_probs=log_probs(), infer_logprobs=log_probs(),
                           returns=torch.randn(sum(lengths), generator=random),
                           values=torch.randn(sum(lengths), generator=random),
                           teacher_topk_ids=torch.randint(0, 64, (sum(lengths), 4), generator=random).int(),
                           teacher_topk_log_probs=-torch.rand(sum(lengths), 4, generator=random))
    return f"--from-scratch --data-path {folder / 'data'} --split 1,0,0 --eval-iters 0"


@pytest.mark.parametrize("kind", FILES)
def test_a_file_is_a_run_of_flags(folder, data, kind):
    text, flags = FILES[kind]
    config = folder / f"{kind}.yaml"
    config.write_text(text.replace("FOLDER", str(folder)))
    steps, out = pretrain(folder, "--config", config, "--role", "actor_train", ranks=2, defaults=data, config=None)
    assert f"ROLL: actor_train: its loss is --objective {flags.split()[1]} " in out
    by_flags, _ = pretrain(
        folder, *flags.split(), "--hf-model", folder / "tiny", "--seq-length", LENGTH, "--lr", "1e-2",
        "--lr-decay-style", "linear", "--weight-decay", 0, "--seed", 42, "--use-torch-fsdp2", *NO_DROPOUT, ranks=2,
        defaults=data, config="sub_modules_to_wrap: ['model.layers.{*}']\nreduce_dtype: fp32\n")
    assert len(steps) == int(flags.split()[-1])
    assert losses(steps) == pytest.approx(losses(by_flags), abs=1e-6)  # sums in another order
    assert [step["grad_norm"] for step in steps] == pytest.approx([step["grad_norm"] for step in by_flags], rel=1e-5)
    assert len(set(losses(steps))) > 3
