"""prime-rl's side of `megashard rl`: its rollout files, and its losses (trainer/rl/loss.py of 0.8.0, restated)."""
import os

import msgspec
import torch


class MicroBatch(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """The fields of prime-rl's transports/rollouts/types.py, in their order."""

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int]
    ref_logprobs: list[float] | None = None
    routed_experts: list | None = None
    mm_kwargs: dict | None = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None


def packed(samples, **streams):
    """A micro batch of samples (tokens, loss mask, advantage, log-probabilities of the engine, temperature)."""
    join = lambda parts: [value for part in parts for value in part]
    lengths = [len(sample[0]) for sample in samples]
    return MicroBatch(
        input_ids=join(sample[0] for sample in samples), loss_mask=join(sample[1] for sample in samples),
        advantages=join([sample[2]] * len(sample[0]) for sample in samples),
        inference_logprobs=join(sample[3] for sample in samples), position_ids=join(map(range, lengths)),
        sequence_lengths=lengths, temperatures=join([sample[4]] * len(sample[0]) for sample in samples),
        env_names=["toy"] * sum(lengths), seq_lens=lengths, **streams)


def write_step(run, step, of_ranks):
    """RUN/rollouts/step_N/rank_R.bin, each renamed when it is whole."""
    folder = run / "rollouts" / f"step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    for rank, micro_batches in enumerate(of_ranks):
        hidden = folder / f"rank_{rank}.bin.tmp"
        hidden.write_bytes(msgspec.msgpack.encode(micro_batches))
        os.rename(hidden, folder / f"rank_{rank}.bin")


def log_probs(model, batch):
    """[tokens]: of each token given those before it in its segment; 0 for the first ones."""
    found, begin = [], 0
    for length in batch.seq_lens:
        tokens = torch.tensor([batch.input_ids[begin:begin + length]])
        logits = model(tokens, position_ids=torch.tensor([batch.position_ids[begin:begin + length]])).logits[0, :-1]
        scaled = logits / torch.tensor(batch.temperatures[begin:begin + length - 1])[:, None]
        found += [torch.zeros(1), scaled.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]]
        begin += length
    return torch.cat(found)


def losses(model, batch, ipo=False, low=0.2, high=0.2, threshold=0.1, adv_tau=1.0, kl_tau=1e-3):
    """Sums and counts of prime-rl's three losses over a micro batch."""
    now, values = log_probs(model, batch), lambda stream: torch.tensor(stream, dtype=torch.float)
    engine, advantages = values(batch.inference_logprobs), values(batch.advantages)
    mask = torch.tensor(batch.loss_mask)
    log_ratio = now - engine
    moved = now.detach().exp() - engine.exp()
    masked = moved.abs() > threshold if ipo else torch.where(advantages > 0, moved > high, moved < -low)
    rl_weights = values(batch.rl_weights) if batch.rl_weights else torch.ones_like(now)
    of_rl = mask & (rl_weights != 0)
    rl = (-adv_tau * (advantages * ~masked) * log_ratio.exp() + kl_tau * log_ratio ** 2) * rl_weights
    sums, counts = [rl[of_rl].sum()], [of_rl.sum()]
    ce_weights = values(batch.ce_weights) if batch.ce_weights else torch.zeros_like(now)
    sums.append((-now * ce_weights)[ce_weights != 0].sum())
    counts.append((ce_weights != 0).sum())
    kl_weights = values(batch.ref_kl_weights) if batch.ref_kl_weights else torch.zeros_like(now)
    reference = values(batch.ref_logprobs) if batch.ref_logprobs else now.detach()
    kl = -((reference - now).detach() * ~(moved < -0.2)) * log_ratio.exp() + 1e-3 * log_ratio ** 2
    sums.append((kl * kl_weights)[kl_weights != 0].sum())
    counts.append((kl_weights != 0).sum())
    return torch.stack(sums), torch.stack(counts)
