"""Reward models against TRL's RewardTrainer: losses, rewards and gradient norms of 20 steps; their files."""
import json
import re
import statistics

import numpy
import pytest
import torch
from safetensors.torch import load_file
from transformers import (AutoModelForSequenceClassification, Qwen3Config, Qwen3ForCausalLM,
                          Qwen3ForSequenceClassification)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

import megashard
from conversations import write_conversation_set
from test_objectives import (LR, STEPS, TRAINING, WORDS, expect_packed_alike, expect_trls, pairs,  # noqa: F401
                             tokenizer)

METRICS = ("min_reward", "mean_reward", "max_reward", "accuracy", "margin")
KINDS = {"plain": ("", {}), "centred": ("--reward-center-coefficient 0.1", {"center_rewards_coefficient": 0.1}),
         "margins": ("", {})}
REWARD = "--objective reward "


def config(**more):
    return Qwen3Config(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.3, eos_token_id=WORDS - 1,
        pad_token_id=0, **more)


def scorer():
    torch.manual_seed(1)
    return Qwen3ForSequenceClassification(config(num_labels=1))


def margins(pairs):
    return [0.25 * (i % 3) for i in range(len(pairs))]


def trained_by_trl(folder, pairs, kind):
    import trl
    from datasets import Dataset

    text = lambda tokens: "".join(f" w{token}" for token in tokens)
    rows = [{"prompt": text(prompt), "chosen": text(chosen), "rejected": text(rejected)}
            for prompt, chosen, rejected in pairs]
    if kind == "margins":
        rows = [row | {"margin": margin} for row, margin in zip(rows, margins(pairs))]
    losses = []

    class InOrder(trl.RewardTrainer):
        def _get_train_sampler(self, dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, *given, **named):
            loss = super().compute_loss(*given, **named)
            losses.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss

    arguments = trl.RewardConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=STEPS,
        learning_rate=LR, lr_scheduler_type="constant", max_grad_norm=1.0, weight_decay=0.0, adam_beta2=0.999,
        adam_epsilon=1e-8, optim="adamw_torch", bf16=False, gradient_checkpointing=False, disable_dropout=True,
        use_cpu=True, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True, max_length=None,
        **KINDS[kind][1])
    trainer = InOrder(model=scorer(), train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
                      args=arguments)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    return [log | {"loss": statistics.mean(losses[2 * i:2 * i + 2])} for i, log in enumerate(logs)]  # not rounded


@pytest.fixture(scope="module")
def data(folder, pairs):
    scorer().save_pretrained(folder / "scorer")
    torch.manual_seed(1)
    Qwen3ForCausalLM(config()).save_pretrained(folder / "base")
    rows = [(prompt, answer) for prompt, chosen, rejected in pairs for answer in (chosen, rejected)]
    both = torch.tensor([float(each) for margin in margins(pairs) for each in (margin, 9)])  # the second is not read
    for name, more in (("pairs", {}), ("margins", {"of_conversations": {"margin": both}})):
        write_conversation_set(folder / name, [prompt + answer for prompt, answer in rows],
                               [[0] * len(prompt) + [1] * len(answer) for prompt, answer in rows], **more)
    return folder / "pairs"


def set_of(folder, kind):
    return folder / ("margins" if kind == "margins" else "pairs")


@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_trls(folder, pairs, data, kind):
    trained = trained_by_trl(folder, pairs, kind)
    for ranks, more in ((1, ""), (2, ""), (2, "--context-parallel-size 2")):
        steps, out = megashard.pretrain(
            folder, "--hf-model", folder / "scorer", "--data-path", set_of(folder, kind), *REWARD.split(),
            *KINDS[kind][0].split(), *more.split(), ranks=ranks, defaults=TRAINING)
        expect_trls(steps, trained, METRICS)
        assert " reward loss: " in out


@pytest.mark.parametrize("kind", ["plain", "margins"])
@pytest.mark.parametrize("ranks, more", [(1, ""), (2, "--context-parallel-size 2")])
def test_packed_trains_the_same(folder, pairs, data, kind, ranks, more):
    flags = ["--hf-model", folder / "scorer", "--data-path", set_of(folder, kind), *REWARD.split(), "--train-iters", 3]
    expect_packed_alike(folder, flags, 2 * len(pairs), *more.split(), ranks=ranks)


def test_begins_with_a_language_model_and_ends_as_transformers_classifier(folder, data):
    """The same new head on one rank and two; transformers loads what is saved, and scores as training did."""
    runs = {}
    for ranks in (1, 2):
        steps, out = megashard.pretrain(
            folder, "--hf-model", folder / "base", "--data-path", data, *REWARD.split(), "--train-iters", 2,
            "--save-hf", folder / f"saved{ranks}", ranks=ranks, defaults=TRAINING)
        assert "no score.weight: the head begins with random values, and lm_head.weight of the files is not read" in out
        runs[ranks] = steps
    assert megashard.losses(runs[1]) == pytest.approx(megashard.losses(runs[2]), rel=1e-5)
    assert runs[1][0]["max_reward"] > runs[1][0]["min_reward"]
    written = json.loads((folder / "saved2/config.json").read_text())
    assert written["architectures"] == ["Qwen3ForSequenceClassification"]
    assert written["id2label"] == {"0": "LABEL_0"} and written["label2id"] == {"LABEL_0": 0}
    weights = load_file(folder / "saved2/model.safetensors")
    assert weights["score.weight"].shape == (1, 32) and "lm_head.weight" not in weights
    model, told = AutoModelForSequenceClassification.from_pretrained(folder / "saved2", output_loading_info=True)
    assert model.config.num_labels == 1 and not told["missing_keys"] and not told["unexpected_keys"]
    again, _ = megashard.pretrain(folder, "--hf-model", folder / "saved2", "--data-path", data, *REWARD.split(),
                                  "--train-iters", 1, "--lr", 0, "--min-lr", 0, "--global-batch-size", 2,
                                  "--micro-batch-size", 2, defaults=TRAINING)
    texts = load_file(f"{data}.vision.safetensors")
    ends = [0, *texts["sample_ends"].tolist()]
    scores = [model(input_ids=texts["tokens"][begin:end].long()[None]).logits.item()
              for begin, end in zip(ends[:2], ends[1:])]
    assert again[0]["max_reward"] == pytest.approx(max(scores), abs=1e-5)
    assert again[0]["min_reward"] == pytest.approx(min(scores), abs=1e-5)


@pytest.mark.parametrize("ranks, more", [(1, ""), (2, ""), (2, "--context-parallel-size 2")])
def test_infer_scores_texts(folder, data, ranks, more):
    infer = lambda *words: megashard.run(*megashard.launch(
        ranks, "infer", "--use-torch-fsdp2", "--hf-model", folder / "scorer", "--data-path", data, "--seq-length", 24,
        "--micro-batch-size", 5, "--tokenizer-type", "NullTokenizer", "--vocab-size", 59, *more.split(), *words),
        expect=None)
    infer("--scores", folder / "scores.npy")
    texts, model = load_file(f"{data}.vision.safetensors"), scorer()
    ends = [0, *texts["sample_ends"].tolist()]
    wanted = [model(input_ids=texts["tokens"][begin:end].long()[None]).logits.item()
              for begin, end in zip(ends, ends[1:])]
    assert numpy.load(folder / "scores.npy")[:, 0].tolist() == pytest.approx(wanted, abs=1e-5)
    refused = infer("--log-probs", folder / "log_probs.npy")
    assert "is `score`, which gives no log-probabilities; give --scores FILE.npy" in refused.stderr


def test_a_dry_run_tells_that_it_makes_no_forecast(folder, data):
    _, out = megashard.pretrain(folder, "--hf-model", folder / "scorer", "--data-path", data, *REWARD.split(),
                                "--train-iters", 2, "--dry-run", defaults=TRAINING)
    assert "no units and no forecast: steps of --objective reward are not planned" in out


def test_resumes(folder, data):
    flags = ["--hf-model", folder / "base", "--data-path", data, *REWARD.split()]
    whole, _ = megashard.pretrain(folder, *flags, "--train-iters", 4, ranks=2, defaults=TRAINING)
    megashard.pretrain(folder, *flags, "--train-iters", 2, "--save", folder / "run", "--save-interval", 2,
                       ranks=2, defaults=TRAINING)
    rest, _ = megashard.pretrain(folder, *flags, "--train-iters", 4, "--load", folder / "run",
                                 "--override-opt_param-scheduler", defaults=TRAINING)
    assert megashard.losses(rest)[-2:] == pytest.approx(megashard.losses(whole)[-2:], rel=1e-5)


def test_the_classes_that_transformers_has():
    """What --save-hf writes for each text model: its own class's name with another ending, or one of the exceptions."""
    sources = megashard.ROOT / "models" / "families"
    listed = (sources / "model_family.cpp").read_text().split("kWithout{")[1]
    without = set(re.findall(r'"(\w+)"', listed.split("};")[0]))
    renamed = dict(re.findall(r'type == "(\w+)"\) return "(\w+)"', listed))
    of_text = [family for file in sources.glob("*.cpp") for family in file.read_text().split(".model_type = ")[1:]
               if ".encoder = " not in family]
    families = dict(found.groups() for family in of_text
                    if (found := re.match(r'"(\w+)",\s*\.architecture = "(\w+)ForCausalLM"', family)))
    assert len(families) > 30 and without < families.keys()
    for kind, name in families.items():
        ours = None if kind in without else renamed.get(kind, name + "ForSequenceClassification")
        assert ours == MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind), kind


@pytest.mark.parametrize("change, message", [
    (["--objective", "next-token"], "has the head `score` in place of lm_head: give --objective reward or value"),
    (["--lora-r", "2", "--lora-target-modules", "all-linear"], "leave out --lora-r"),
    (["--tensor-model-parallel-size", "2"], "leave out --tensor-model-parallel-size"),
    (["--loss-by-weights"], "is a function of more than these; leave it out"),
    (["--micro-batch-size", "3", "--global-batch-size", "6"], "give --micro-batch-size a multiple of it"),
    (["--seq-length", "8"], "it must have from 2 to --seq-length = 8"),
])
def test_refused(folder, data, change, message):
    words = megashard.with_defaults(change, f"--hf-model {folder}/scorer --data-path {data} {REWARD}")
    ranks = 2 if "--tensor-model-parallel-size" in change else 1
    _, out = megashard.pretrain(folder, *words, ranks=ranks, defaults=TRAINING, expect=None)
    assert message in out, out[-2000:]
