"""Trainings of models of latents by `megashard pretrain` against diffusers' models and torch.optim.AdamW."""
import pytest
import torch
from diffusers import WanTransformer3DModel

import megashard
from latents import sample_order, write_latents

STEPS, BATCH, TEXT, WIDTH, LR = 10, 4, 7, 12, 2e-3
SIZES = dict(patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
             text_dim=WIDTH, freq_dim=16, ffn_dim=40, num_layers=2, rope_max_seq_len=32)
SHAPES = [(4, 3, 4, 6)] * 5 + [(4, 1, 8, 6)] * 6
FLAGS = (f"{megashard.RUN} --objective flow-matching --timestep-weighting bsmntw --timestep-shift 5 --seq-length 24 "
         f"--train-iters {STEPS} --micro-batch-size 2 --global-batch-size {BATCH} --optimizer adam --lr {LR} "
         f"--min-lr {LR} --weight-decay 0.01 --clip-grad 1 --adam-beta2 0.999 --split 100,0,0")
UNITS = "sub_modules_to_wrap: ['blocks.{*}']\n"


@pytest.fixture(scope="module")
def samples():
    draw = torch.Generator().manual_seed(3)
    numbers = lambda *sizes: torch.randn(*sizes, generator=draw)
    return [{"video": numbers(*shape), "prompt_ids": numbers(TEXT, WIDTH), "noise": numbers(*shape),
             "timestep": 1000 * torch.rand(1, generator=draw)} for shape in SHAPES]


@pytest.fixture(scope="module")
def data(folder, samples):
    torch.manual_seed(1)
    WanTransformer3DModel(**SIZES).save_pretrained(folder / "wan")
    return write_latents(folder / "latents", samples)


@pytest.fixture(scope="module")
def expected(folder, data, samples):
    """(loss, gradient norm) of each step with diffusers' model; the weights are the table of MindSpeed-MM."""
    model = WanTransformer3DModel.from_pretrained(folder / "wan")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    sigmas = torch.linspace(1, 0, 1001, dtype=torch.float64)[:-1]
    y = torch.exp(-2 * (5 * sigmas / (1 + 4 * sigmas) - 0.5) ** 2)
    order, steps = sample_order(samples, STEPS * BATCH, BATCH), []
    for first in range(0, len(order), BATCH):
        optimizer.zero_grad()
        total = 0
        for sample in order[first:first + BATCH]:
            sigma = sample["timestep"] / 1000
            weight = (torch.exp(-2 * (sigma.double() - 0.5) ** 2) - y.min()) / (y - y.min()).mean()
            noisy = (1 - sigma) * sample["video"] + sigma * sample["noise"]
            velocity = model(noisy[None], sample["timestep"], sample["prompt_ids"][None]).sample[0]
            error = (velocity - (sample["noise"] - sample["video"])).square().mean()
            total = total + weight.float() * error / BATCH
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps.append((total.item(), norm.item()))
    return steps


@pytest.mark.parametrize("ranks,more", [(1, ""), (2, ""), (2, "--context-parallel-size 2")])
def test_a_training_is_that_of_diffusers(folder, data, expected, ranks, more):
    steps, out = megashard.pretrain(folder, "--hf-model", folder / "wan", "--data-path", data, *more.split(),
                                    ranks=ranks, defaults=FLAGS, config=UNITS)
    for step, (loss, norm) in zip(steps, expected, strict=True):
        assert step["loss"] == pytest.approx(loss, rel=2e-5)  # fp32 sums in another order, and Adam's steps of them
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert " flow matching loss: " in out and " mse: " in out
    assert "11 samples, 216 latents; asked for: 40 samples" in out
