"""A teacher's likeliest tokens, and entropies: values and gradients against ROLL's formulas in fp64, and trainings
against transformers' whole logits."""
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

import megashard
from conversations import write_conversation_set
from test_reward import TRAINING, config

ROWS, LENGTH, TOKENS, STEPS = 3, 6, 5, 3
DIVERGENCES = ["forward_kl", "reverse_kl", "adaptive_kl", "skewed_forward_kl", "skewed_reverse_kl", "js_divergence"]
TEMPERATURE, TEACHERS, ALPHA, SKEW, WEIGHT = 1.5, 0.8, 0.4, 0.2, 0.7
FLAGS = ["--distill-weight", WEIGHT, "--distill-temperature", TEMPERATURE, "--distill-teacher-temperature", TEACHERS,
         "--distill-adaptive-alpha", ALPHA, "--distill-skew", SKEW]


def divergence(name, student, teacher):
    """ROLL's, restated: of log-probabilities [..., K] of the teacher's likeliest tokens; both are normalised over
    these. -inf: the teacher has fewer tokens."""
    absent = teacher.isinf()
    teachers = (teacher / TEMPERATURE / TEACHERS).log_softmax(-1)
    q, log_q = teachers.exp(), teachers.masked_fill(absent, 0)
    log_p = (student / TEMPERATURE).log_softmax(-1)
    p = log_p.exp()
    total = lambda each: each.masked_fill(absent, 0).sum(-1)
    forward, reverse = total(q * (log_q - log_p)), total(p * (log_p - log_q))
    if name == "adaptive_kl":
        ordered, places = q.sort(-1)
        gap = (ordered - p.detach().gather(-1, places)).abs()
        tail = (ordered.cumsum(-1) <= ALPHA).double()
        head = (gap * (1 - tail)).sum(-1) / gap.sum(-1)
        return head * forward + (1 - head) * reverse
    if name == "js_divergence":
        log = lambda each: (each + 1e-9).log()
        middle = log((p + q) / 2)
        return total((q * (log(q) - middle) + p * (log(p) - middle)) / 2)
    return {"forward_kl": forward, "reverse_kl": reverse,
            "skewed_forward_kl": total(q * (log_q - (SKEW * q + (1 - SKEW) * p).log())),
            "skewed_reverse_kl": total(p * (log_p - ((1 - SKEW) * q + SKEW * p).log()))}[name]


@pytest.fixture(scope="module")
def batch():
    torch.manual_seed(4)
    mask = (torch.arange(LENGTH) < torch.tensor([LENGTH, 3, 0])[:, None]).float()
    log_probs = lambda: torch.randn(ROWS, LENGTH, TOKENS).log_softmax(-1) - 0.3  # of more tokens than these
    teacher = log_probs()
    teacher[0, 1, 3:] = -torch.inf
    return {"mask": mask, "losses": torch.rand(ROWS, LENGTH), "student": log_probs(), "teacher": teacher}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_values_and_gradients(tmp_path, batch, name):
    by_tokens = lambda each: each.permute(2, 0, 1).contiguous()
    save_file({"token_losses": batch["losses"], "loss_mask": batch["mask"],
               "output.teacher_log_probs": by_tokens(batch["student"]),
               "teacher_topk_log_probs": by_tokens(batch["teacher"]),
               "teacher_topk_ids": torch.zeros(TOKENS, ROWS, LENGTH, dtype=torch.int64)}, tmp_path / "in.safetensors")
    megashard.run(megashard.INTEROP / "objective_values", tmp_path / "in.safetensors", tmp_path / "out.safetensors",
                  "distill", *FLAGS, "--distill-divergence", DIVERGENCES.index(name))
    found = load_file(tmp_path / "out.safetensors")
    student, losses = batch["student"].double().requires_grad_(), batch["losses"].double().requires_grad_()
    each = (1 - WEIGHT) * losses + WEIGHT * divergence(name, student, batch["teacher"].double())
    loss = (each * batch["mask"]).sum() / batch["mask"].sum()
    wanted = torch.autograd.grad(loss, (student, losses))
    close = lambda one, other: torch.testing.assert_close(one, other.float(), rtol=2e-5, atol=1e-6)
    close(found["loss"], loss.detach())
    close(found["grad.teacher_log_probs"], by_tokens(wanted[0]))
    close(found["grad"], wanted[1])
    assert found["grad.teacher_log_probs"].abs().max() > 0.003


@pytest.fixture(scope="module")
def data(folder):
    """A student, a teacher's likeliest tokens of texts (entry t of a column belongs to token t), and answers."""
    models = []
    for name, seed in (("student", 1), ("teacher", 2)):
        torch.manual_seed(seed)
        models.append(Qwen3ForCausalLM(config()))
    models[0].save_pretrained(folder / "student")
    draw = torch.Generator().manual_seed(2)
    lengths = [9, 6, 12, 7, 8, 5, 10, 6]
    texts = [torch.randint(1, 59, (length,), generator=draw) for length in lengths]
    ids, log_probs = [], []
    for text in texts:
        top = models[1](text[None]).logits[0, :-1].log_softmax(-1).topk(TOKENS)
        for columns, values in ((ids, top.indices), (log_probs, top.values)):
            columns.append(torch.cat([torch.zeros(1, TOKENS, dtype=values.dtype), values.detach()]))
    write_conversation_set(
        folder / "texts", texts, [[0] * 3 + [1] * (length - 3) for length in lengths],
        teacher_topk_ids=torch.cat(ids).int(), teacher_topk_log_probs=torch.cat(log_probs),
        advantages=torch.randn(sum(lengths), generator=draw))
    return folder / "texts"


def distilled(log_p, labels, columns):
    student = log_p.gather(-1, columns["teacher_topk_ids"].long())
    return (1 - WEIGHT) * -labels + WEIGHT * divergence("forward_kl", student, columns["teacher_topk_log_probs"])


def with_entropy(log_p, labels, columns):
    entropy = -(log_p.exp() * log_p).sum(-1)
    return -columns["advantages"] * (labels - labels.detach()).exp() - 0.2 * entropy


@pytest.mark.parametrize("objective, loss_of, metrics", [
    (["distill", *FLAGS], distilled, ("kd_loss", "nll_loss")),
    (["policy", "--policy-entropy-coefficient", 0.2], with_entropy, ("ppo_kl", "entropy"))])
@pytest.mark.parametrize("ranks, more", [(1, ""), (2, "--logits-at-once 300"), (2, "--context-parallel-size 2"),
                                         (2, "--tensor-model-parallel-size 2")])
def test_a_training_is_that_of_whole_logits(folder, data, objective, loss_of, metrics, ranks, more):
    steps, out = megashard.pretrain(
        folder, "--hf-model", folder / "student", "--data-path", data, "--objective", *objective, "--train-iters",
        STEPS, *"--micro-batch-size 2 --optimizer sgd --sgd-momentum 0 --lr 0.01 --min-lr 0.01".split(), *more.split(),
        ranks=ranks, defaults=TRAINING)
    model = Qwen3ForCausalLM.from_pretrained(folder / "student")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    texts = load_file(f"{data}.vision.safetensors")
    ends = [0, *texts["sample_ends"].tolist()]
    counted = sum(end - begin - 3 for begin, end in zip(ends, ends[1:]))
    for step in steps:
        optimizer.zero_grad()
        loss = 0
        for begin, end in zip(ends, ends[1:]):
            tokens = texts["tokens"][begin:end].long()
            log_p = model(tokens[None, :-1]).logits[0].log_softmax(-1)
            columns = {name[len("column."):]: values[begin + 1:end] for name, values in texts.items()
                       if name.startswith("column.")}
            labels = log_p.gather(-1, tokens[1:, None])[:, 0]
            loss = loss + loss_of(log_p, labels, columns)[2:].sum() / counted
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert step["loss"] == pytest.approx(loss.item(), rel=2e-5)
        assert step["grad_norm"] == pytest.approx(norm.item(), rel=2e-5)
        optimizer.step()
    for metric in metrics:
        assert f" {metric}: " in out


def test_the_divergence_falls(folder, data):
    steps, _ = megashard.pretrain(
        folder, "--hf-model", folder / "student", "--data-path", data, "--objective", "distill", "--distill-weight", 1,
        "--train-iters", 30, "--lr", "3e-3", "--min-lr", "3e-3", defaults=TRAINING)
    assert steps[-1]["kd_loss"] < 0.3 * steps[0]["kd_loss"]


@pytest.mark.parametrize("change, message", [
    (["--loss-by-weights"], "is a function of more than these; leave it out"),
    (["--data-path", "{folder}/bare"], 'have no column "teacher_topk_ids"'),
    (["--lora-r", "2", "--lora-target-modules", "lm_head"], "leave out adapters and fp8 of lm_head"),
])
def test_refused(folder, data, change, message):
    write_conversation_set(folder / "bare", [[1, 2, 3, 4]] * 8, [[0, 0, 1, 1]] * 8)
    words = megashard.with_defaults([word.format(folder=folder) for word in change],
                                    f"--hf-model {folder}/student --data-path {data} --objective distill")
    _, out = megashard.pretrain(folder, *words, defaults=TRAINING, expect=None)
    assert message in out, out[-2000:]
