"""An orchestrator of prime-rl's protocol in small: samples with transformers, rewards by a rule, writes rollouts.

The task: a prompt is a digit d and ":", and each of three answer tokens ought to be (d + 1) modulo 10. The reward is
the share of right tokens.
"""
import pathlib
import time

import torch

import prime_rollouts
from published_weights import read_step

DIGITS, COLON = 10, 10  # tokens: the digits, then ":"
WORDS, ANSWER, PROMPTS, GROUP = 12, 3, 10, 16  # GROUP: samples of a prompt


def rewards_of(prompts, answers):
    return (answers == ((prompts[:, :1] + 1) % DIGITS)).float().mean(1)


@torch.no_grad()
def sample(model, prompts, generator):
    """Answers [B, ANSWER], and their log-probabilities."""
    tokens, found = prompts, []
    for _ in range(ANSWER):
        log_probs = model(tokens).logits[:, -1].float().log_softmax(-1)
        chosen = torch.multinomial(log_probs.exp(), 1, generator=generator)
        found.append(log_probs.gather(1, chosen))
        tokens = torch.cat([tokens, chosen], 1)
    return tokens[:, prompts.shape[1]:], torch.cat(found, 1)


class Orchestrator:
    def __init__(self, run, model, ranks):
        self.run, self.model, self.ranks = pathlib.Path(run), model.eval(), ranks
        self.rewards = []  # mean of each step

    def wait_for_weights(self, step, seconds=120):
        """Loads broadcasts/step_N once it is stable."""
        folder, deadline = self.run / "broadcasts" / f"step_{step}", time.monotonic() + seconds
        while not (folder / "STABLE").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {folder} within {seconds} s")
            time.sleep(0.01)
        self.model.load_state_dict(read_step(folder), strict=False)

    def roll_out(self, step):
        """Samples with the weights that are loaded, and writes the rollouts of `step`."""
        digits = torch.arange(DIGITS).repeat_interleave(GROUP)[:, None]
        prompts = torch.cat([digits, torch.full_like(digits, COLON)], 1)
        answers, log_probs = sample(self.model, prompts, torch.Generator().manual_seed(step))
        rewards = rewards_of(prompts, answers)
        self.rewards.append(float(rewards.mean()))
        groups = rewards.view(-1, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)).flatten()
        samples = [(prompt + answer, [False] * len(prompt) + [True] * len(answer), advantage,
                    [0.0] * len(prompt) + logged, 1.0)
                   for prompt, answer, advantage, logged in zip(prompts.tolist(), answers.tolist(), advantages.tolist(),
                                                                log_probs.tolist())]
        share = len(samples) // self.ranks
        prime_rollouts.write_step(self.run, step, [
            [prime_rollouts.packed(samples[rank * share:(rank + 1) * share])] for rank in range(self.ranks)])
