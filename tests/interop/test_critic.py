"""Values of sampled answers against verl's and ROLL's critics: losses and gradients, and a training."""
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForSequenceClassification

import megashard
from conversations import write_conversation_set
from test_policy import AGGREGATIONS, LENGTH, ROWS
from test_reward import TRAINING, config

CLIP = 0.3


@pytest.fixture(scope="module")
def batch():
    """Ragged answers, one without any token, values beyond the clip on both sides."""
    torch.manual_seed(5)
    mask = (torch.arange(LENGTH) < torch.tensor([LENGTH, 5, 0, 2])[:, None]).float()
    old = torch.randn(ROWS, LENGTH)
    return {"loss_mask": mask, "values": old, "returns": old + torch.randn(ROWS, LENGTH),
            "output.values": old + torch.randn(ROWS, LENGTH) * 0.5}


def ours(folder, batch, *flags):
    save_file(batch, folder / "in.safetensors")
    megashard.run(megashard.INTEROP / "objective_values", folder / "in.safetensors", folder / "out.safetensors",
                  "value", *flags)
    out = load_file(folder / "out.safetensors")
    return out["loss"], out["grad.values"]


def expected(batch, clip, aggregation):
    """verl's loss in fp64; ROLL's is that of seq-mean-token-mean, and without a clip the plain squares."""
    from verl.trainer.ppo import core_algos

    of = {name: each.double() for name, each in batch.items()}
    values = of["output.values"].requires_grad_()
    loss, _ = core_algos.compute_value_loss(values, of["returns"], of["values"], of["loss_mask"], clip or 1e9,
                                            aggregation)
    return loss.detach(), torch.autograd.grad(loss, values)[0]


@pytest.mark.parametrize("clip", [0, CLIP])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_values_and_gradients(tmp_path, batch, clip, aggregation):
    found = ours(tmp_path, batch, "--value-clip", clip, "--value-aggregation", AGGREGATIONS.index(aggregation))
    for each, wanted in zip(found, expected(batch, clip, aggregation)):
        torch.testing.assert_close(each, wanted.float(), rtol=2e-6, atol=2e-7)  # fp32 sums in another order
    assert found[1].abs().max() > 0.01 and not found[1][batch["loss_mask"] == 0].any()


def test_the_clip_holds_values_back(tmp_path, batch):
    free, clipped = (ours(tmp_path, batch, "--value-clip", clip)[1] for clip in (0, CLIP))
    assert ((free != 0) & (clipped == 0)).any()


@pytest.fixture(scope="module")
def data(folder):
    """A critic, and answers with returns and values of it."""
    torch.manual_seed(1)
    Qwen3ForSequenceClassification(config(num_labels=1)).save_pretrained(folder / "critic")
    draw = torch.Generator().manual_seed(2)
    lengths = [9, 6, 12, 7, 8, 5, 10, 6]
    texts = [torch.randint(1, 59, (length,), generator=draw).tolist() for length in lengths]
    numbers = lambda: torch.randn(sum(lengths), generator=draw)
    write_conversation_set(folder / "answers", texts, [[0] * 3 + [1] * (length - 3) for length in lengths],
                           returns=numbers(), values=numbers())
    return folder / "answers"


@pytest.mark.parametrize("ranks, more", [(1, ""), (2, ""), (2, "--context-parallel-size 2")])
def test_a_training_is_that_of_transformers(folder, data, ranks, more):
    """Plain SGD; a value belongs to the token before the one that it is asked for."""
    steps, out = megashard.pretrain(
        folder, "--hf-model", folder / "critic", "--data-path", data, *"--objective value --value-clip 0.3".split(),
        *"--value-aggregation seq-mean-token-mean --train-iters 3 --micro-batch-size 2 --optimizer sgd".split(),
        *"--sgd-momentum 0 --lr 0.01 --min-lr 0.01".split(), *more.split(), ranks=ranks, defaults=TRAINING)
    model = Qwen3ForSequenceClassification.from_pretrained(folder / "critic")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    texts = load_file(f"{data}.vision.safetensors")
    ends = [0, *texts["sample_ends"].tolist()]
    for step in steps:
        optimizer.zero_grad()
        loss = 0
        for begin, end in zip(ends, ends[1:]):
            hidden = model.model(input_ids=texts["tokens"][begin:end - 1].long()[None]).last_hidden_state[0]
            values = model.score(hidden)[:, 0]
            old, returns = (texts[f"column.{name}"][begin + 1:end] for name in ("values", "returns"))
            near = torch.clamp(values, old - CLIP, old + CLIP)
            squares = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
            loss = loss + 0.5 * squares[2:].mean() / (len(ends) - 1)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert step["loss"] == pytest.approx(loss.item(), rel=2e-5)
        assert step["grad_norm"] == pytest.approx(norm.item(), rel=2e-5)
        optimizer.step()
    assert " value loss: " in out and " vf_clipfrac: " in out and " vpred_mean: " in out
