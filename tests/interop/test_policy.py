"""Losses of sampled answers against verl's and ROLL's: values, and gradients by the log-probabilities."""
import functools
import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file

import megashard

ROWS, LENGTH, LOW, HIGH = 4, 9, 0.15, 0.3
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOSSES = ["ppo", "gspo", "cispo", "reinforce", "tis", "topr", "kimi15", "sapo", "geo_mean", "dppo_tv", "dppo_kl"]
ALL_LOSSES = [*LOSSES, "clip_cov", "kl_cov"]
KLS = ["k1", "k2", "k3", "abs"]
# verl's sapo and geo_mean have one aggregation.
CASES = [(loss, mode) for loss, mode in itertools.product(LOSSES, AGGREGATIONS)
         if loss not in ("sapo", "geo_mean") or mode == "seq-mean-token-mean"]


@pytest.fixture(scope="module")
def batch():
    """Ragged answers, one sequence without any token, ratios beyond every clip."""
    torch.manual_seed(3)
    log_probs = -torch.rand(ROWS, LENGTH) * 2 - 0.05
    lengths = torch.tensor([LENGTH, 5, 0, 2])
    mask = (torch.arange(LENGTH) < lengths[:, None]).float()
    return {"log_probs": log_probs, "mask": mask, "advantages": torch.randn(ROWS, LENGTH) * mask,
            "old_log_probs": (log_probs + torch.randn(ROWS, LENGTH) * 0.6).clamp_max(-0.02),
            "ref_log_probs": (log_probs + torch.randn(ROWS, LENGTH)).clamp_max(-0.02),
            "infer_logprobs": (log_probs + torch.randn(ROWS, LENGTH) * 0.2).clamp_max(-0.02),
            "scores": torch.tensor([1.0, -1.0, 0.5, 0.0])}


def ours(folder, batch, *flags):
    names = ("advantages", "old_log_probs", "ref_log_probs", "infer_logprobs")
    save_file({"token_losses": -batch["log_probs"], "loss_mask": batch["mask"], "conversation.scores": batch["scores"],
               **{name: batch[name] for name in names if name in batch}}, folder / "in.safetensors")
    megashard.run(megashard.INTEROP / "objective_values", folder / "in.safetensors", folder / "out.safetensors",
                  "policy", *flags)
    out = load_file(folder / "out.safetensors")
    return out["loss"], -out["grad"]


@functools.cache
def verl():
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig, PolicyLossConfig

    return core_algos, ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=LOW,
                                   clip_ratio_high=HIGH, clip_ratio_c=2.0, policy_loss=PolicyLossConfig(dro_beta=0.1))


def expected(batch, loss_of):
    log_probs = batch["log_probs"].clone().requires_grad_()
    loss = loss_of(log_probs)
    return loss.detach(), torch.autograd.grad(loss, log_probs)[0]


def verls(batch, name, aggregation, correction=None):
    algorithms, config = verl()
    function = algorithms.get_policy_loss_fn({"ppo": "vanilla", "reinforce": "gpg", "kimi15": "dro"}.get(name, name))
    return expected(batch, lambda log_probs: function(
        old_log_prob=batch["old_log_probs"], log_prob=log_probs, advantages=batch["advantages"],
        response_mask=batch["mask"], loss_agg_mode=aggregation, config=config, rollout_is_weights=correction)[0])


def rolls(batch, name, aggregation):
    """ROLL's formulas, in fp64."""
    algorithms, _ = verl()

    def loss_of(log_probs):
        ratio = (log_probs - batch["old_log_probs"]).exp().clamp(0, 1).detach()
        plain = -batch["advantages"] * log_probs
        losses = plain * ratio if name == "tis" else torch.where(batch["scores"][:, None] > 0, plain, plain * ratio)
        return algorithms.agg_loss(losses.double(), batch["mask"].double(), aggregation)

    return expected(batch, loss_of)


def expect_equal(found, wanted):
    for each, other in zip(found, wanted):
        torch.testing.assert_close(each, other.float(), rtol=2e-6, atol=2e-7)  # fp32 sums in another order


@pytest.mark.parametrize("loss, aggregation", CASES)
def test_values_and_gradients(tmp_path, batch, loss, aggregation):
    if loss == "geo_mean":  # verl's mean counts sequences without a token
        batch = {name: each[batch["mask"].sum(1) > 0] for name, each in batch.items()}
    flags = ["--policy-loss", LOSSES.index(loss), "--policy-aggregation", AGGREGATIONS.index(aggregation),
             "--policy-clip-low", LOW, "--policy-clip-high", HIGH]
    if loss in ("ppo", "dppo_tv", "dppo_kl"):
        flags += ["--policy-dual-clip", 2]
    if loss == "sapo":
        flags += ["--policy-tau", 1]
    found = ours(tmp_path, batch, *flags)
    expect_equal(found, (rolls if loss in ("tis", "topr") else verls)(batch, loss, aggregation))
    assert found[1].abs().max() > 0.01 and not found[1][batch["mask"] == 0].any()


def of_each_row(batch, loss_of):
    """The sum of the rows' losses by their tokens: a micro batch chooses by its own covariances."""
    counts = batch["mask"].sum(1)

    def total(log_probs):
        rows = [loss_of({name: each[row:row + 1] for name, each in batch.items()}, log_probs[row:row + 1])
                * counts[row] for row in range(ROWS) if counts[row] > 0]
        return sum(rows) / counts.sum()

    return expected(batch, total)


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize("share", [0.01, 0.5])
def test_tokens_by_their_covariance(tmp_path, batch, loss, share):
    """A random choice cannot be compared: clip_cov chooses from one token, or all that are within the bounds."""
    from verl.workers.config import ActorConfig, PolicyLossConfig

    algorithms, _ = verl()
    low, high = (0.16, 9) if share < 0.1 else (0.03, 9)
    if loss == "clip_cov" and share > 0.1:
        share = 1.0
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=LOW, clip_ratio_high=HIGH,
        policy_loss=PolicyLossConfig(clip_cov_ratio=share, clip_cov_lb=low, clip_cov_ub=high, kl_cov_ratio=share,
                                     ppo_kl_coef=0.7))
    function = algorithms.get_policy_loss_fn(loss)
    wanted = of_each_row(batch, lambda row, log_probs: function(
        old_log_prob=row["old_log_probs"], log_prob=log_probs, advantages=row["advantages"],
        response_mask=row["mask"], loss_agg_mode="token-mean", config=config)[0])
    found = ours(tmp_path, batch, "--policy-loss", ALL_LOSSES.index(loss), "--policy-clip-low", LOW,
                 "--policy-clip-high", HIGH, "--policy-cov-share", share, "--policy-cov-low", low, "--policy-cov-high",
                 high, "--policy-cov-kl", 0.7)
    expect_equal(found, wanted)
    plain = ours(tmp_path, batch, "--policy-clip-low", LOW if loss == "clip_cov" else 1000, "--policy-clip-high",
                 HIGH if loss == "clip_cov" else 1000)
    assert not torch.equal(found[1], plain[1])  # some token was chosen


def test_on_policy_the_weights_are_the_advantages(tmp_path, batch):
    batch = {name: each for name, each in batch.items() if name != "old_log_probs"}
    _, gradient = ours(tmp_path, batch)
    torch.testing.assert_close(gradient, -batch["advantages"] / batch["mask"].sum())


@pytest.mark.parametrize("estimator", KLS)
def test_divergence_from_the_reference(tmp_path, batch, estimator):
    algorithms, _ = verl()
    found = ours(tmp_path, batch | {"advantages": torch.zeros(ROWS, LENGTH)}, "--policy-kl", 0.7,
                 "--policy-kl-estimator", KLS.index(estimator))
    expect_equal(found, expected(batch, lambda log_probs: 0.7 * algorithms.agg_loss(
        algorithms.kl_penalty(log_probs, batch["ref_log_probs"], estimator), batch["mask"], "token-mean")))


def test_correction_for_the_inference_engine(tmp_path, batch):
    weights = (batch["old_log_probs"] - batch["infer_logprobs"]).exp().clamp_max(1.2)
    found = ours(tmp_path, batch, "--policy-infer-correction", 1.2, "--policy-clip-low", LOW, "--policy-clip-high",
                 HIGH, "--policy-dual-clip", 2)
    expect_equal(found, verls(batch, "ppo", "token-mean", weights))


def test_sum_norm_takes_a_length(tmp_path, batch):
    whole = ours(tmp_path, batch, "--policy-aggregation", 3)
    halved = ours(tmp_path, batch, "--policy-aggregation", 3, "--policy-sum-norm", 2 * LENGTH)
    torch.testing.assert_close(halved[1] * 2, whole[1])
    # ROLL divides by the length alone: the same with the length for each answer that has tokens.
    rolls_way = ours(tmp_path, batch, "--policy-aggregation", 3, "--policy-sum-norm", LENGTH / 3)
    token_sums = ours(tmp_path, batch, "--policy-aggregation", 1)
    expect_equal(rolls_way, [each.double() * 3 / LENGTH for each in token_sums])


def test_a_ratio_of_answers_is_gspos_if_an_answer_has_one_advantage(tmp_path, batch):
    """ROLL's importance_sampling: seq, whose gradient goes through the mean."""
    of_answers = batch | {"advantages": batch["advantages"][:, :1] * batch["mask"]}
    flags = ["--policy-loss", LOSSES.index("gspo"), "--policy-clip-low", LOW, "--policy-clip-high", HIGH,
             "--policy-dual-clip", 1.4]
    for aggregation in (0, 2):
        found = ours(tmp_path, of_answers, *flags, "--policy-aggregation", aggregation)
        expect_equal(found, by_answers(of_answers, AGGREGATIONS[aggregation]))
    found, wanted = ours(tmp_path, batch, *flags), by_answers(batch, "token-mean")
    torch.testing.assert_close(found[0], wanted[0].float())  # the same loss
    assert (found[1] - wanted[1]).abs().max() > 0.01  # but not the gradient


def by_answers(batch, aggregation):
    algorithms, _ = verl()
    mask, advantages = batch["mask"].double(), batch["advantages"].double()

    def loss_of(log_probs):
        mean = ((log_probs - batch["old_log_probs"]).double() * mask).sum(1) / mask.sum(1).clamp_min(1)
        ratio = mean.exp()[:, None]
        losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - LOW, 1 + HIGH) * advantages)
        losses = torch.where(advantages < 0, torch.minimum(losses, -1.4 * advantages), losses)
        return algorithms.agg_loss(losses, mask, aggregation)

    return expected(batch, loss_of)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_entropy_lowers_the_loss(tmp_path, batch, aggregation):
    """As verl's and ROLL's: minus the coefficient times the entropies, aggregated as the loss."""
    algorithms, _ = verl()
    entropies = torch.rand(ROWS, LENGTH) * 3
    names = {name: batch[name] for name in ("advantages", "old_log_probs")}
    save_file({"token_losses": -batch["log_probs"], "loss_mask": batch["mask"], "output.entropies": entropies, **names},
              tmp_path / "in.safetensors")
    losses = []
    for coefficient in (0, 0.3):
        megashard.run(megashard.INTEROP / "objective_values", tmp_path / "in.safetensors", tmp_path / "out.safetensors",
                      "policy", "--policy-aggregation", AGGREGATIONS.index(aggregation), "--policy-entropy-coefficient",
                      coefficient)
        losses.append(load_file(tmp_path / "out.safetensors"))
    wide = entropies.double().requires_grad_()
    wanted = -0.3 * algorithms.agg_loss(wide, batch["mask"].double(), aggregation)
    torch.testing.assert_close(losses[1]["loss"] - losses[0]["loss"], wanted.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses[1]["grad.entropies"], torch.autograd.grad(wanted, wide)[0].float())
    assert torch.equal(losses[0]["grad"], losses[1]["grad"]) and "grad.entropies" not in losses[0]
