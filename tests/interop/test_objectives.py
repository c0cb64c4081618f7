"""Losses of preferences against TRL's trainers: losses, rewards and gradient norms of 20 steps on one and two ranks."""
import statistics

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import megashard
from conversations import write_conversation_set

WORDS, PAIRS, STEPS, BETA, LR, LENGTH = 60, 12, 20, 0.4, 2e-3, 24
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
TRAINING = (f"--seq-length {LENGTH} --micro-batch-size 4 --global-batch-size 8 "
            f"--train-iters {STEPS} --lr {LR} --min-lr {LR} --lr-decay-style constant --weight-decay 0 --clip-grad 1 "
            "--split 1,0,0 --no-shuffle-conversations --tokenizer-type NullTokenizer --vocab-size 59 --peak-tflops 1 "
            "--log-interval 1 " + megashard.RUN)
DPO = f"--objective dpo --dpo-beta {BETA} "

# Ours, and the trainer with what differs from DPOConfig's values below.
KINDS = {
    "sigmoid": ("dpo --dpo-loss-type sigmoid", "DPO", {"loss_type": ["sigmoid"]}),
    "robust": ("dpo --dpo-loss-type robust --dpo-label-smoothing 0.1", "DPO",
               {"loss_type": ["robust"], "label_smoothing": 0.1}),
    "hinge": ("dpo --dpo-loss-type hinge", "DPO", {"loss_type": ["hinge"]}),
    "ipo": ("dpo --dpo-loss-type ipo", "DPO", {"loss_type": ["ipo"]}),
    "sigmoid_norm": ("dpo --dpo-loss-type sigmoid_norm", "DPO", {"loss_type": ["sigmoid_norm"]}),
    "nll": ("dpo --dpo-nll-weight 0.3", "DPO", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}),
    "orpo": (f"orpo --orpo-beta {BETA}", "ORPO", {}),
    "simpo": (f"simpo --simpo-beta {BETA} --simpo-gamma 0.5 --simpo-label-smoothing 0.1", "CPO",
              {"loss_type": "simpo", "simpo_gamma": 0.5, "cpo_alpha": 0.0, "label_smoothing": 0.1}),
    "kto": (f"kto --kto-beta {BETA} --kto-desirable-weight 1.2 --kto-undesirable-weight 0.8", "KTO",
            {"desirable_weight": 1.2, "undesirable_weight": 0.8}),
}


def ours(kind):
    flags = "--objective " + KINDS[kind][0]
    return flags + (f" --dpo-beta {BETA}" if KINDS[kind][1] == "DPO" else "")


def network(seed):
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.3, eos_token_id=WORDS - 1))


@pytest.fixture(scope="module")
def pairs():
    """(prompt, chosen, rejected) of unequal lengths."""
    draw = torch.Generator().manual_seed(1)
    words = lambda: torch.randint(1, WORDS - 1, (int(torch.randint(2, 8, (1,), generator=draw)),),
                                  generator=draw).tolist()
    return [(words(), words() + [WORDS - 1], words() + [WORDS - 1]) for _ in range(PAIRS)]


def tokenizer():
    vocabulary = {f"w{i}": i for i in range(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{WORDS - 1}", pad_token="w0")


def unpaired(pairs):
    """(prompt, answer, is good) of KTO: every third pair gives its rejected answer."""
    return [(prompt, rejected if i % 3 == 2 else chosen, i % 3 != 2) for i, (prompt, chosen, rejected) in
            enumerate(pairs)]


def trained_by_trl(folder, pairs, kind, model=None):
    """The loss, the gradient norm and the rewards of each step. model: instead of the policy and a reference, one with
    adapters, which its base is the reference of."""
    import trl
    from datasets import Dataset
    from trl.experimental import cpo, orpo

    text = lambda tokens: "".join(f" w{token}" for token in tokens)
    _, name, more = KINDS[kind]
    if name == "KTO":
        rows = [{"prompt": text(prompt), "completion": text(answer), "label": good}
                for prompt, answer, good in unpaired(pairs)]
    else:
        rows = [{"prompt": text(prompt), "chosen": text(chosen), "rejected": text(rejected)}
                for prompt, chosen, rejected in pairs]
    home = {"ORPO": orpo, "CPO": cpo}.get(name, trl)
    losses = []

    class InOrder(getattr(home, name + "Trainer")):
        def _get_train_sampler(self, dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, *given, **named):
            loss = super().compute_loss(*given, **named)
            losses.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss

    arguments = getattr(home, name + "Config")(
        output_dir=str(folder / "trl"), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=STEPS,
        learning_rate=LR, lr_scheduler_type="constant", beta=BETA, max_grad_norm=1.0, weight_decay=0.0,
        adam_beta2=0.999, adam_epsilon=1e-8, optim="adamw_torch", bf16=False, gradient_checkpointing=False,
        disable_dropout=True, use_cpu=True, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
        **{"max_length": None if name in ("DPO", "KTO") else 64}, **more)
    reference = {"ref_model": network(2)} if name in ("DPO", "KTO") and model is None else {}
    trainer = InOrder(model=model or network(1), train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
                      args=arguments, **reference)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    return [log | {"loss": statistics.mean(losses[2 * i:2 * i + 2])} for i, log in enumerate(logs)]  # not rounded


def expect_trls(steps, trained, metrics=METRICS):
    assert len(steps) == STEPS == len(trained)
    for step, theirs in zip(steps, trained):
        assert step["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert step["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        for metric in metrics:
            assert step[metric] == pytest.approx(theirs[metric], abs=1e-4), metric  # AdamW follows signs


def expect_packed_alike(folder, flags, answers, *more, ranks=1):
    """Steps of all answers in one row equal those of one micro batch with a row for each answer."""
    rows, _ = megashard.pretrain(folder, *flags, "--micro-batch-size", answers, "--global-batch-size", answers,
                                 defaults=TRAINING)
    packed, _ = megashard.pretrain(folder, *flags, "--neat-packing", "--seq-length", 400, "--micro-batch-size", 1,
                                   "--global-batch-size", 1, *more, ranks=ranks, defaults=TRAINING)
    for step, of_packed in zip(rows, packed, strict=True):
        for name in ("loss", "grad_norm"):
            assert of_packed[name] == pytest.approx(step[name], rel=5e-6)  # sums over rows in another order


@pytest.fixture(scope="module")
def data(folder, pairs):
    """The pairs as sets of conversations, with the reference's log-probabilities."""
    for name, seed in (("policy", 1), ("reference", 2)):
        network(seed).save_pretrained(folder / name)
    rows = [(prompt, answer) for prompt, chosen, rejected in pairs for answer in (chosen, rejected)]
    examples, of_kto = unpaired(pairs), []
    for i, (prompt, answer, _) in enumerate(examples):  # mismatched in blocks of two, as a batch of TRL
        of_kto += [(prompt, answer), (prompt, examples[i ^ 1][1])]
    good = torch.tensor([float(each) for _, _, is_good in examples for each in (is_good, False)])
    write = lambda name, rows, **more: write_conversation_set(
        folder / name, [prompt + answer for prompt, answer in rows],
        [[0] * len(prompt) + [1] * len(answer) for prompt, answer in rows], **more)
    write("pairs", rows)
    write("bare", rows)
    write("bare_rows", rows)
    write("kto", of_kto, of_conversations={"desirable": good})
    for name in ("pairs", "kto"):
        done = megashard.run(*megashard.launch(
            2, "infer", "--use-torch-fsdp2", "--hf-model", folder / "reference", "--data-path", folder / name,
            "--seq-length", LENGTH, "--tokenizer-type", "NullTokenizer", "--vocab-size", 59, "--into", "ref_log_probs"))
        assert "in column ref_log_probs of the data" in done.stdout + done.stderr
    return folder / "pairs"


@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_trls(folder, pairs, data, kind):
    trained = trained_by_trl(folder, pairs, kind)
    name = ours(kind).split()[1]
    ways = [(1, ""), (2, "--context-parallel-size 2"), (1, "--loss-by-weights")]
    if name != "kto":  # its distance is over all ranks' micro batches, and TRL has one rank here
        ways.append((2, ""))
    if kind not in ("kto", "nll", "orpo"):  # which have means over more than a pair
        ways.append((2, "--loss-by-weights --micro-batch-size 1"))
    for ranks, more in ways:
        steps, out = megashard.pretrain(
            folder, "--hf-model", folder / "policy", "--data-path", folder / "kto" if name == "kto" else data,
            *ours(kind).split(), *more.split(), ranks=ranks, defaults=TRAINING)
        expect_trls(steps, trained, ("kl",) if name == "kto" else METRICS)  # TRL's KTO means rewards by micro batch
        assert f" {name} loss: " in out and " rewards/chosen: " in out


@pytest.mark.parametrize("kind", ["nll", "kto", "ipo"])
@pytest.mark.parametrize("ranks, more", [(1, ""), (2, "--context-parallel-size 2"), (1, "--loss-by-weights")])
def test_packed_trains_the_same(folder, data, kind, ranks, more):
    name = folder / "kto" if kind == "kto" else data
    flags = ["--hf-model", folder / "policy", "--data-path", name, *ours(kind).split(), "--train-iters", 3]
    expect_packed_alike(folder, flags, 2 * PAIRS, *more.split(), ranks=ranks)


def test_the_distance_of_kto_is_over_all_ranks(folder, data):
    flags = ["--hf-model", folder / "policy", "--data-path", folder / "kto", *ours("kto").split(), "--train-iters", 3]
    one, _ = megashard.pretrain(folder, *flags, "--micro-batch-size", 8, defaults=TRAINING)
    two, _ = megashard.pretrain(folder, *flags, ranks=2, defaults=TRAINING)
    for step, of_two in zip(one, two, strict=True):
        for name in ("loss", "grad_norm", "kl"):
            assert of_two[name] == pytest.approx(step[name], rel=5e-6)


def test_adapters_are_left_out_for_the_reference(folder, data):
    """LoRA without a column: the base model is the reference, as with the column that it gives."""
    network(1).save_pretrained(folder / "base")
    flags = ["--hf-model", folder / "base", "--lora-r", 2, "--lora-target-modules", "all-linear",
             "--train-iters", 4, *DPO.split()]
    without, _ = megashard.pretrain(folder, *flags, "--data-path", folder / "bare", ranks=2, defaults=TRAINING)
    megashard.run(*megashard.launch(
        1, "infer", "--use-torch-fsdp2", "--hf-model", folder / "base", "--data-path", folder / "bare", "--seq-length",
        LENGTH, "--tokenizer-type", "NullTokenizer", "--vocab-size", 59, "--into", "ref_log_probs"))
    with safe_open(folder / "bare.vision.safetensors", "pt") as file:
        assert file.get_tensor("column.ref_log_probs").min() < -1
    column, _ = megashard.pretrain(folder, *flags, "--data-path", folder / "bare", ranks=2, defaults=TRAINING)
    assert megashard.losses(without) == pytest.approx(megashard.losses(column), rel=1e-6)
    assert without[-1]["rewards/margins"] != 0


def test_a_second_model_is_the_reference(folder, data):
    """--ref-model instead of the column that it would give; by weights, too."""
    run = lambda *flags, **more: megashard.pretrain(
        folder, "--hf-model", folder / "policy", *ours("sigmoid").split(), "--train-iters", 3, *flags, ranks=2,
        defaults=TRAINING, **more)
    column, _ = run("--data-path", data)
    flags = ["--data-path", folder / "bare_rows", "--ref-model", folder / "reference"]
    for more in ([], ["--loss-by-weights"]):
        model, _ = run(*flags, "--ref-model-dtype", "fp32", *more)
        for step, of_column in zip(model, column, strict=True):
            for name in ("loss", "grad_norm"):
                assert step[name] == pytest.approx(of_column[name], rel=2e-6)
    on_sim, _ = run(*flags, "--ref-model-dtype", "fp32", "--device", "sim")
    assert megashard.losses(on_sim) == pytest.approx(megashard.losses(model), rel=2e-6)
    narrow, _ = run(*flags)
    assert megashard.losses(narrow) != megashard.losses(model)
    assert megashard.losses(narrow) == pytest.approx(megashard.losses(model), rel=2e-2)  # log-probabilities in bf16
    _, out = run("--data-path", data, "--ref-model", folder / "reference", expect=None)
    assert "the data have the column ref_log_probs already" in out


def test_adapters_train_as_trls(folder, pairs, data):
    """TRL with PEFT, from the adapters that we begin with; the base is the reference on both sides."""
    from peft import PeftModel

    network(1).save_pretrained(folder / "base")
    flags = ["--hf-model", folder / "base", "--data-path", folder / "bare_rows", "--lora-r", 2, "--lora-alpha", 4,
             "--lora-target-modules", "q_proj", "v_proj", "down_proj", *DPO.split()]
    megashard.pretrain(folder, *flags, "--train-iters", 1, "--lr", 0, "--min-lr", 0, "--save-hf", folder / "begin",
                       defaults=TRAINING)
    model = PeftModel.from_pretrained(network(1), folder / "begin" / "adapter", is_trainable=True)
    trained = trained_by_trl(folder, pairs, "sigmoid", model)
    assert trained[-1]["rewards/margins"] > 0.1
    for ranks in (1, 2):
        steps, _ = megashard.pretrain(folder, *flags, ranks=ranks, defaults=TRAINING)
        expect_trls(steps, trained)


def test_replicas_of_shards_train_as_trls(folder, pairs, data):
    """HSDP: two replicas of two shards."""
    steps, out = megashard.pretrain(
        folder, "--hf-model", folder / "policy", "--data-path", data, *ours("sigmoid").split(), "--micro-batch-size", 2,
        ranks=4, defaults=TRAINING, config=megashard.LAYERS + "sharding_size: 2\n")
    assert "sharded over 2 ranks" in out
    expect_trls(steps, trained_by_trl(folder, pairs, "sigmoid"))


def test_a_large_vocabulary_never_has_all_logits(folder):
    """Pairs with 150,000 words: a run holds less memory than one copy of the logits would take."""
    words, rows, length = 150_000, 8, 256
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=words, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True)).save_pretrained(folder / "wide")
    texts = torch.randint(0, words, (rows, length + 1)).tolist()
    write_conversation_set(folder / "long", texts, [[0] * 9 + [1] * (length - 8)] * rows,
                           ref_log_probs=torch.full((rows * (length + 1),), -12.0))
    steps, _ = megashard.pretrain(
        folder, "--hf-model", folder / "wide", "--data-path", folder / "long", *DPO.split(), "--seq-length", length,
        "--micro-batch-size", rows, "--global-batch-size", rows, "--train-iters", 1, "--vocab-size", words,
        "--logits-at-once", 2 ** 24, defaults=TRAINING)
    assert steps[0]["peak_memory_bytes"] < rows * length * words * 4


@pytest.mark.parametrize("objective", ["next-token", "dpo"])
def test_logits_in_parts_train_the_same(folder, data, objective):
    """Parts of a few rows: the head makes the gradients in forward (next-token), or its logits twice (dpo)."""
    flags = ["--hf-model", folder / "policy", "--data-path", data, "--objective", objective, "--train-iters", 3]
    whole, _ = megashard.pretrain(folder, *flags, ranks=2, defaults=TRAINING)
    parts, _ = megashard.pretrain(folder, *flags, "--logits-at-once", 7 * WORDS, ranks=2, defaults=TRAINING)
    for step, of_parts in zip(whole, parts, strict=True):
        for name in ("loss", "grad_norm"):
            assert of_parts[name] == pytest.approx(step[name], rel=2e-6)  # sums over rows in another order


def test_pairs_stay_together(folder, data):
    """Shuffled, each micro batch still has a chosen answer and its rejected one: losses of one pair each are the same
    set as in the file's order."""
    flags = ["--hf-model", folder / "policy", "--data-path", data, *DPO.split(), "--micro-batch-size", 2,
             "--global-batch-size", 2, "--train-iters", PAIRS, "--lr", 0, "--min-lr", 0]
    in_order, _ = megashard.pretrain(folder, *flags, defaults=TRAINING)
    shuffled, _ = megashard.pretrain(folder, *flags, defaults=TRAINING.replace("--no-shuffle-conversations ", ""))
    assert megashard.losses(in_order) != megashard.losses(shuffled)
    assert sorted(megashard.losses(in_order)) == pytest.approx(sorted(megashard.losses(shuffled)), abs=1e-6)


@pytest.mark.parametrize("change, message", [
    (["--micro-batch-size", "3", "--global-batch-size", "6"], "give --micro-batch-size a multiple of it"),
    (["--micro-batch-size", "1", "--global-batch-size", "3", "--loss-by-weights"], "of which each rank has a multiple"),
    (["--neat-packing", "--seq-length", "16"], "raise --seq-length, or leave out --neat-packing"),
    (["--dataloader-type", "cyclic"], "which --dataloader-type cyclic takes apart"),
    (["--dpo-loss-type", "apo"], "--dpo-loss-type takes one of sigmoid, robust"),
    (["--data-path", "{folder}/documents"], "give one set of conversations"),
    (["--data-path", "{folder}/bare_rows"], 'have no column "ref_log_probs"'),
    (["--objective", "next-token", "--loss-by-weights"], "are known; leave it out"),
    (["--dpo-beta", "-1"], "--dpo-beta"),
    (["--objective", "ppo"], "--objective"),
])
def test_refused(folder, data, change, message):
    megashard.write_documents(folder / "documents", [range(40)] * 20)
    words = [word.format(folder=folder) for word in change]
    words = megashard.with_defaults(words, f"--hf-model {folder}/policy --data-path {data}")
    _, out = megashard.pretrain(folder, *words, defaults=DPO + TRAINING, expect=None)
    assert message in out, out[-2000:]
