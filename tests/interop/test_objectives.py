"""--objective dpo against TRL's DPOTrainer: losses, rewards and gradient norms of a training on one and two ranks."""
import statistics

import numpy
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import megashard
from conversations import write_conversation_set

WORDS, PAIRS, STEPS, BETA, LR, LENGTH = 60, 12, 3, 0.4, 1e-2, 24
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
TRAINING = (f"--objective dpo --dpo-beta {BETA} --seq-length {LENGTH} --micro-batch-size 4 --global-batch-size 8 "
            f"--train-iters {STEPS} --lr {LR} --min-lr {LR} --lr-decay-style constant --weight-decay 0 --clip-grad 1 "
            "--split 1,0,0 --no-shuffle-conversations --tokenizer-type NullTokenizer --vocab-size 59 --peak-tflops 1 "
            "--log-interval 1 " + megashard.RUN)


def network(seed):
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.3, eos_token_id=WORDS - 1))


@pytest.fixture(scope="module")
def pairs():
    """(prompt, chosen, rejected) of unequal lengths."""
    draw = torch.Generator().manual_seed(1)
    words = lambda: torch.randint(0, WORDS - 1, (int(torch.randint(2, 8, (1,), generator=draw)),),
                                  generator=draw).tolist()
    return [(words(), words() + [WORDS - 1], words() + [WORDS - 1]) for _ in range(PAIRS)]


@pytest.fixture(scope="module")
def trained_by_trl(folder, pairs):
    """The loss, the gradient norm and the rewards of each step."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    vocabulary = {f"w{i}": i for i in range(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{WORDS - 1}", pad_token="w0")
    text = lambda tokens: "".join(f" w{token}" for token in tokens)
    rows = [{"prompt": text(prompt), "chosen": text(chosen), "rejected": text(rejected)}
            for prompt, chosen, rejected in pairs]
    losses = []

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, *given, **named):
            loss = super().compute_loss(*given, **named)
            losses.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss

    trainer = InOrder(
        model=network(1), ref_model=network(2), train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        args=DPOConfig(output_dir=str(folder / "trl"), per_device_train_batch_size=2, gradient_accumulation_steps=2,
                       max_steps=STEPS, learning_rate=LR, lr_scheduler_type="constant", beta=BETA,
                       loss_type=["sigmoid"], max_grad_norm=1.0, weight_decay=0.0, adam_beta2=0.999, adam_epsilon=1e-8,
                       optim="adamw_torch", bf16=False, gradient_checkpointing=False, disable_dropout=True,
                       max_length=None, use_cpu=True, report_to="none", save_strategy="no", logging_steps=1,
                       disable_tqdm=True))
    trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    return [log | {"loss": statistics.mean(losses[2 * i:2 * i + 2])} for i, log in enumerate(logs)]  # not rounded


@pytest.fixture(scope="module")
def data(folder, pairs):
    """The pairs as a set of conversations, with the reference's log-probabilities, which `megashard infer` computes."""
    for name, seed in (("policy", 1), ("reference", 2)):
        network(seed).save_pretrained(folder / name)
    rows = [(prompt, answer) for prompt, chosen, rejected in pairs for answer in (chosen, rejected)]
    conversations = [prompt + answer for prompt, answer in rows]
    masks = [[0] * len(prompt) + [1] * len(answer) for prompt, answer in rows]
    for name in ("pairs", "bare"):
        write_conversation_set(folder / name, conversations, masks)
    megashard.run(*megashard.launch(2, "infer", "--use-torch-fsdp2", "--hf-model", folder / "reference",
                                    "--data-path", folder / "pairs", "--seq-length", LENGTH, "--tokenizer-type",
                                    "NullTokenizer", "--vocab-size", 59, "--log-probs", folder / "ref.npy"))
    log_probs = torch.from_numpy(numpy.load(folder / "ref.npy"))
    column = [torch.cat([torch.zeros(1), row[:len(each) - 1]]) for row, each in zip(log_probs, conversations)]
    write_conversation_set(folder / "pairs", conversations, masks, ref_log_probs=torch.cat(column))
    return folder / "pairs"


@pytest.mark.parametrize("ranks, more", [(1, ""), (2, ""), (2, "--context-parallel-size 2")])
def test_dpo_trains_as_trls(folder, trained_by_trl, data, ranks, more):
    steps, out = megashard.pretrain(folder, "--hf-model", folder / "policy", "--data-path", data, *more.split(),
                                    ranks=ranks, defaults=TRAINING)
    assert len(steps) == STEPS == len(trained_by_trl)
    for step, theirs in zip(steps, trained_by_trl):
        assert step["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert step["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        for name in METRICS:
            assert step[name] == pytest.approx(theirs[name], abs=1e-4), name  # AdamW's first steps follow signs
    assert f" dpo loss: {steps[-1]['loss']:.6E} |" in out and " rewards/margins: " in out


@pytest.mark.parametrize("objective", ["next-token", "dpo"])
def test_logits_in_parts_train_the_same(folder, data, objective):
    """Parts of a few rows: the head makes the gradients in forward (next-token), or its logits twice (dpo)."""
    flags = ["--hf-model", folder / "policy", "--data-path", data, "--objective", objective]
    whole, _ = megashard.pretrain(folder, *flags, ranks=2, defaults=TRAINING)
    parts, _ = megashard.pretrain(folder, *flags, "--logits-at-once", 7 * WORDS, ranks=2, defaults=TRAINING)
    for step, of_parts in zip(whole, parts, strict=True):
        for name in ("loss", "grad_norm"):
            assert of_parts[name] == pytest.approx(step[name], rel=2e-6)  # sums over rows in another order


def test_pairs_stay_together(folder, data):
    """Shuffled, each micro batch still has a chosen answer and its rejected one: losses of one pair each are the same
    set as in the file's order."""
    flags = ["--hf-model", folder / "policy", "--data-path", data, "--micro-batch-size", 2, "--global-batch-size", 2,
             "--train-iters", PAIRS, "--lr", 0, "--min-lr", 0]
    in_order, _ = megashard.pretrain(folder, *flags, defaults=TRAINING)
    shuffled, _ = megashard.pretrain(folder, *flags, defaults=TRAINING.replace("--no-shuffle-conversations ", ""))
    assert megashard.losses(in_order) != megashard.losses(shuffled)
    assert sorted(megashard.losses(in_order)) == pytest.approx(sorted(megashard.losses(shuffled)), abs=1e-6)


@pytest.mark.parametrize("change, message", [
    (["--micro-batch-size", "3", "--global-batch-size", "6"], "give --micro-batch-size a multiple of it"),
    (["--neat-packing"], "without --neat-packing"),
    (["--data-path", "{folder}/documents"], "give one set of conversations"),
    (["--data-path", "{folder}/bare"], 'have no column "ref_log_probs"'),
    (["--dpo-beta", "-1"], "--dpo-beta"),
    (["--objective", "ppo"], "--objective"),
])
def test_refused(folder, data, change, message):
    megashard.write_documents(folder / "documents", [range(40)] * 20)
    words = [word.format(folder=folder) for word in change]
    words = megashard.with_defaults(words, f"--hf-model {folder}/policy --data-path {data}")
    _, out = megashard.pretrain(folder, *words, defaults=TRAINING, expect=None)
    assert message in out, out[-2000:]
