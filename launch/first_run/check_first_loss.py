#!/usr/bin/env python3
"""Compare the first loss of a run with transformers' on the same batch, and the run's end with its beginning.

usage: check_first_loss.py --model HF_FOLDER --data PREFIX --metrics RUN.jsonl --seq-length N --global-batch-size N
       [--seed 1234]

The batch is built here from PREFIX.bin and PREFIX.idx by Megatron's rules for one unsplit data set (--split 100,0,0)
of which less than one epoch is read: shuffled documents, one stream, cut every seq-length tokens, samples shuffled.
"""
import argparse
import json
import os
import struct
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np

TOLERANCE = 1e-4  # maximum difference of the first loss
LARGEST_FIRST_LOSS = 4.5  # a pretrained model on plain text; more means wrong weights or wrong tokens
LEAST_PROGRESS = 0.1  # mean of the first ten steps minus that of the last ten
TOKEN_TYPES = {1: np.uint8, 4: np.int32, 5: np.int64, 8: np.uint16}


def fail(message):
    sys.exit(f"check_first_loss: {message}")


def read_documents(prefix):
    with open(prefix + ".idx", "rb") as file:
        header = file.read(34)
        magic, version, dtype, sequences, _ = struct.unpack("<9sQBQQ", header)
        if magic != b"MMIDIDX\0\0" or version != 1:
            fail(f"{prefix}.idx is no indexed dataset; tokenise the text again")
        lengths = np.fromfile(file, "<i4", sequences)
    tokens = np.memmap(prefix + ".bin", TOKEN_TYPES[dtype], "r")
    ends = np.cumsum(lengths, dtype=np.int64)
    return [tokens[end - length : end] for end, length in zip(ends, lengths)]


def first_batch(documents, seq_length, batch_size, seed):
    """[batch_size, seq_length + 1] tokens: the first samples of megatron.core's GPTDataset, epoch 1."""
    random = np.random.RandomState(seed)
    order = np.arange(len(documents), dtype=np.int32)
    random.shuffle(order)
    stream = np.concatenate([documents[i] for i in order])
    samples = np.arange((len(stream) - 1) // seq_length, dtype=np.uint32)
    random.shuffle(samples)
    if len(samples) < batch_size:
        fail(f"the data holds {len(samples)} samples, fewer than one batch of {batch_size}")
    starts = samples[:batch_size].astype(np.int64) * seq_length
    return np.stack([stream[start : start + seq_length + 1] for start in starts]).astype(np.int64)


def reference_loss(model_folder, batch):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    batch = torch.from_numpy(batch)
    with torch.no_grad():
        logits = model(batch[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--metrics", required=True)
    parser.add_argument("--seq-length", type=int, required=True)
    parser.add_argument("--global-batch-size", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()

    with open(args.metrics) as lines:
        losses = [json.loads(line)["loss"] for line in lines]
    batch = first_batch(read_documents(args.data), args.seq_length, args.global_batch_size, args.seed)
    expected = reference_loss(args.model, batch)
    first, last = np.mean(losses[:10]), np.mean(losses[-10:])
    print(f"first loss: {losses[0]:.6f} here, {expected:.6f} by transformers on the same batch "
          f"(difference {abs(losses[0] - expected):.1e})")
    print(f"mean of the first 10 steps: {first:.4f}, of the last 10: {last:.4f}")
    if not abs(losses[0] - expected) <= TOLERANCE:
        fail(f"the first losses differ by more than {TOLERANCE}: the model or the order of the data is not the same")
    if not losses[0] < LARGEST_FIRST_LOSS:
        fail(f"the first loss is not below {LARGEST_FIRST_LOSS}: weights or tokens are wrong")
    if not first - last >= LEAST_PROGRESS:
        fail(f"the loss fell by less than {LEAST_PROGRESS}: more steps or another learning rate are needed")


if __name__ == "__main__":
    main()
