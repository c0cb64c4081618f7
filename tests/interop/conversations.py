"""Sets of conversations, and training on them, here and by PyTorch."""

import torch
from safetensors.torch import save_file

from megashard import losses, pretrain


def write_conversation_set(prefix, conversations, masks, items=None, of_conversations=None, **columns):
    """Writes PREFIX.vision.safetensors of texts: tokens and loss mask of each; columns: a value per token; items: by
    name a tensor of each conversation's items, or None; of_conversations: by name a value for each."""
    joined = lambda each, dtype: torch.cat([torch.as_tensor(part).to(dtype) for part in each])
    of_items = {}
    for name, each in (items or {}).items():
        of_items[f"items.{name}"] = torch.cat([part for part in each if part is not None])
        of_items[f"item_ends.{name}"] = torch.tensor([0 if part is None else len(part) for part in each]).cumsum(0)
    save_file({"tokens": joined(conversations, torch.int32), "loss_mask": joined(masks, torch.uint8),
               "sample_ends": torch.tensor([len(each) for each in conversations]).cumsum(0),
               **of_items, **{f"conversation.{name}": values for name, values in (of_conversations or {}).items()},
               **{f"column.{name}": values for name, values in columns.items()}},
              f"{prefix}.vision.safetensors")


def losses_by_pytorch(model, samples):
    """Losses of three SGD steps, each on all samples: (tokens [1, T], labels [T - 1], further inputs of the model)."""
    seen, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        each = [torch.nn.functional.cross_entropy(model(tokens, **more).logits[0, :-1], labels, reduction="sum")
                for tokens, labels, more in samples]
        loss = sum(each) / sum(int((labels >= 0).sum()) for _, labels, _ in samples)
        seen.append(float(loss.detach()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return seen


def train(folder, *flags, ranks=2):
    """The losses of the same steps, on a set of four samples."""
    steps, _ = pretrain(folder, *flags, ranks=ranks, config=None, defaults=(
        f"--hf-model {folder} --data-path {folder / 'out'} --split 1,0,0 --seq-length 128 --micro-batch-size 2 "
        "--global-batch-size 4 --train-iters 3 --lr 0.1 --eval-iters 0 --optimizer sgd --sgd-momentum 0 "
        "--weight-decay 0 "
        "--lr-decay-style constant --calculate-per-token-loss --use-torch-fsdp2 --peak-tflops 1"))
    return losses(steps)


def packed(folder, *flags, ranks=1):
    """The same with all four samples in one row."""
    length = [] if "--seq-length" in flags else ["--seq-length", 320]
    return train(folder, "--neat-packing", *length, "--micro-batch-size", 1, "--global-batch-size", 1, *flags,
                 ranks=ranks)
