#!/usr/bin/env python3
"""A whole loop of reinforcement learning with megashard alone: launch/examples/rl_arithmetic.py RUN

A small model learns the last digit of sums, a + b, from rewards. `megashard generate` samples answers, this script
rates them, and `megashard rl` trains and publishes the next weights. A run that was stopped goes on where it was.
"""
import argparse
import os
import pathlib
import shutil
import subprocess
import time

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

DIGITS, PLUS, EQUALS = 10, 10, 11  # tokens: the digits, then "+" and "="
PROMPT = 4  # tokens of "a+b="


def program():
    built = pathlib.Path(__file__).resolve().parents[2] / "build" / "launch" / "megashard"
    return os.environ.get("MEGASHARD_BIN") or (str(built) if built.exists() else shutil.which("megashard"))


def write_prompts(prefix):
    """All hundred sums, as conversations without an answer."""
    sums = torch.tensor([[a, PLUS, b, EQUALS] for a in range(DIGITS) for b in range(DIGITS)], dtype=torch.int32)
    save_file({"tokens": sums.flatten(), "loss_mask": torch.zeros(sums.numel(), dtype=torch.uint8),
               "sample_ends": torch.arange(1, len(sums) + 1) * PROMPT}, f"{prefix}.vision.safetensors")


def make_model(folder):
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=12, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, max_position_embeddings=32)).save_pretrained(folder)


def rate(answers, rollouts, samples):
    """Writes the answers with their advantages as a step's rollouts; returns the mean reward."""
    data = load_file(f"{answers}.vision.safetensors")
    tokens = data["tokens"].view(-1, PROMPT + 1)  # an answer is one token
    rewards = (tokens[:, -1] == (tokens[:, 0] + tokens[:, 2]) % DIGITS).float()
    groups = rewards.view(-1, samples)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    data["column.advantages"] = advantages.flatten().repeat_interleave(PROMPT + 1)
    hidden = rollouts.with_name("." + rollouts.name)
    hidden.mkdir(parents=True, exist_ok=True)
    save_file(data, hidden / "rollouts.vision.safetensors")
    hidden.rename(rollouts)
    return float(rewards.mean())


def wait_for(path, trainer, seconds=120):
    deadline = time.monotonic() + seconds
    while not path.exists():
        if trainer.poll() is not None:
            raise SystemExit(f"the trainer ended with exit code {trainer.returncode}: its log is in trainer.log")
        if time.monotonic() > deadline:
            raise SystemExit(f"{path} did not appear within {seconds} s")
        time.sleep(0.01)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path, help="folder of the run")
    parser.add_argument("--steps", type=int, default=100, help="most steps (100)")
    parser.add_argument("--samples", type=int, default=16, help="answers to each sum (16)")
    parser.add_argument("--ranks", type=int, default=2, help="of the trainer and of sampling (2)")
    parser.add_argument("--until", type=float, default=0.95, help="mean reward that ends the run (0.95)")
    options = parser.parse_args()
    run = options.run
    run.mkdir(parents=True, exist_ok=True)
    if not (run / "base").exists():
        make_model(run / "base")
    write_prompts(run / "prompts")
    common = "--use-torch-fsdp2 --seq-length 8 --tokenizer-type NullTokenizer --vocab-size 11".split()
    start = [program(), "launch", "-n", str(options.ranks), "--"]
    with open(run / "trainer.log", "a") as log:
        trainer = subprocess.Popen(
            [*start, "rl", run, *common, "--hf-model", run / "base", "--micro-batch-size", "200", "--train-iters",
             str(options.steps), "--lr", "3e-3", "--lr-decay-style", "constant", "--weight-decay", "0", "--ckpt-format",
             "torch_dcp", "--save", run / "checkpoints", "--load", run / "checkpoints", "--save-interval", "1",
             "--most-recent-k", "2"], stdout=log, stderr=log)
    try:
        steps = [int(path.name.split("_")[1]) for path in (run / "rollouts").glob("step_*")]
        for step in range(max(steps, default=0) + 1, options.steps + 1):
            weights = run / "broadcasts" / f"step_{step - 1}"
            wait_for(weights / "STABLE", trainer)
            subprocess.run([*start, "generate", *common, "--hf-model", weights, "--data-path", run / "prompts",
                            "--micro-batch-size", "400", "--max-new-tokens", "1", "--samples-per-prompt",
                            str(options.samples), "--seed", str(step), "--output", run / "answers"],
                           check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            reward = rate(run / "answers", run / "rollouts" / f"step_{step}", options.samples)
            print(f"step {step}: mean reward {reward:.3f}", flush=True)
            if reward >= options.until:
                break
    finally:
        trainer.terminate()
        trainer.wait()


if __name__ == "__main__":
    main()
