"""Models of latents against diffusers': trainings with torch.optim.AdamW, velocities, samples; an example."""
import json
import sys

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel, LTX2VideoTransformer3DModel, WanTransformer3DModel

import megashard
import tiny_hunyuan as hunyuan
import tiny_ltx2 as ltx2
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
    assert "11 samples, 162 latents; asked for: 40 samples" in out


def test_a_dry_run_counts_latents(folder, data):
    flags = ["--hf-model", folder / "wan", "--data-path", data, *FLAGS.split(), "--use-torch-fsdp2"]
    flags = [flag for flag in flags if flag not in ("--seq-length", "24")]
    out = megashard.run(megashard.PROGRAM, "pretrain", "--dry-run", *flags).stdout
    assert "11 samples, 162 latents; asked for: 40 samples" in out
    assert "sequences of 18 tokens a step" in out  # patches of the largest video
    assert "no units and no forecast: steps of models of latents are not planned" in out


def further_samples(family):
    """Samples of models with more columns than Wan's, and what diffusers takes of one."""
    draw = torch.Generator().manual_seed(4)
    numbers = lambda *sizes: torch.randn(*sizes, generator=draw)
    for number in range(BATCH * 2):
        sample = {"video": numbers(4, 2, 4, 6), "noise": numbers(4, 2, 4, 6),
                  "timestep": 1000 * torch.rand(1, generator=draw)}
        mask = torch.arange(TEXT) < TEXT - number % 3
        if family == "ltx2":
            sample |= {"sound": numbers(5, ltx2.SOUND_CHANNELS * ltx2.BINS), "frame_rate": torch.tensor(25.0),
                       "sound_noise": numbers(5, ltx2.SOUND_CHANNELS * ltx2.BINS),
                       "prompt_ids": [numbers(TEXT, ltx2.TEXT), numbers(TEXT, ltx2.TEXT)], "prompt_mask": [mask, mask]}
        else:
            sample |= {"prompt_ids": [numbers(TEXT, hunyuan.TEXT), numbers(1, 3, hunyuan.LETTERS)],
                       "prompt_mask": [mask[None], (torch.arange(3) < number % 4)[None]],  # as MindSpeed-MM's
                       "cond_latents": numbers(5, 2, 4, 6), "vision_states": numbers(4, hunyuan.PICTURE)}
        yield sample


def further_loss(family, model, sample):
    sigma, video = sample["timestep"] / 1000, sample["video"]
    noisy, target = (1 - sigma) * video + sigma * sample["noise"], sample["noise"] - video
    text, other = (each.reshape(1, -1, each.shape[-1]) for each in sample["prompt_ids"])
    mask, other_mask = (each.reshape(1, -1) for each in sample["prompt_mask"])
    if family == "hunyuan":
        found = model(torch.cat([noisy, sample["cond_latents"]])[None], sample["timestep"], text, mask,
                      encoder_hidden_states_2=other, encoder_attention_mask_2=other_mask,
                      image_embeds=sample["vision_states"][None]).sample[0]
        return (found - target).square().mean(), None
    sound = (1 - sigma) * sample["sound"] + sigma * sample["sound_noise"]
    found = model(noisy.flatten(1).T[None], sound[None], text, other, sample["timestep"],
                  encoder_attention_mask=mask, audio_encoder_attention_mask=other_mask, num_frames=2, height=4,
                  width=6, fps=25.0, audio_num_frames=5)
    sound_loss = (found.audio_sample[0] - (sample["sound_noise"] - sample["sound"])).square().mean()
    return (found.sample[0].T - target.flatten(1)).square().mean(), sound_loss


@pytest.mark.parametrize("family", ["hunyuan", "ltx2"])
@pytest.mark.parametrize("ranks,more", [(1, ""), (2, "--context-parallel-size 2")])
def test_a_training_of_more_columns_is_that_of_diffusers(folder, family, ranks, more):
    samples = list(further_samples(family))
    kind, sizes = {"hunyuan": (HunyuanVideo15Transformer3DModel, hunyuan.SIZES),
                   "ltx2": (LTX2VideoTransformer3DModel, ltx2.SIZES)}[family]
    files = folder / f"{family}_{ranks}"
    torch.manual_seed(1)
    kind(**sizes).save_pretrained(files / "model")
    data = write_latents(files / "latents", samples)
    steps, out = megashard.pretrain(files, "--hf-model", files / "model", "--data-path", data, *more.split(),
                                    ranks=ranks, config="sub_modules_to_wrap: ['transformer_blocks.{*}']\n", defaults=(
                                        f"{megashard.RUN} --objective flow-matching --train-iters 4 --lr {LR} "
                                        f"--min-lr {LR} --weight-decay 0.01 --clip-grad 1 --adam-beta2 0.999 "
                                        f"--micro-batch-size 2 --global-batch-size {BATCH} --optimizer adam "
                                        "--split 100,0,0"))
    model = kind.from_pretrained(files / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    order = sample_order(samples, 4 * BATCH, BATCH)
    for number, step in enumerate(steps):
        optimizer.zero_grad()
        losses = [further_loss(family, model, sample) for sample in order[number * BATCH:(number + 1) * BATCH]]
        video = sum(loss for loss, _ in losses) / BATCH
        sound = sum(loss for _, loss in losses) / BATCH if family == "ltx2" else 0
        (video + sound).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert step["loss"] == pytest.approx(video.item(), rel=2e-5)
        assert step["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        if family == "ltx2":
            assert step["sound_loss"] == pytest.approx(sound.item(), rel=2e-5)
    assert len(steps) == 4


def inferred(folder, data, *flags, ranks=1):
    """The features that `megashard infer` writes, in the order of the data."""
    out = folder / f"inferred_{len(flags)}_{ranks}"
    megashard.run(*megashard.launch(ranks, "infer", "--hf-model", folder / "wan", "--data-path", data,
                                    "--use-torch-fsdp2", "--micro-batch-size", 2, *flags, out))
    lines = [json.loads(line) for line in (out / "data.jsonl").read_text().splitlines()]
    return [torch.load(out / line["file"])["video"] for line in lines]


@pytest.mark.parametrize("ranks,more", [(1, ()), (2, ()), (2, ("--context-parallel-size", 2))])
def test_velocities_are_those_of_diffusers(folder, data, samples, ranks, more):
    model = WanTransformer3DModel.from_pretrained(folder / "wan")
    found = inferred(folder, data, *more, "--velocities", ranks=ranks)
    for sample, velocity in zip(samples, found, strict=True):
        sigma = sample["timestep"] / 1000
        noisy = (1 - sigma) * sample["video"] + sigma * sample["noise"]
        with torch.no_grad():
            expected = model(noisy[None], sample["timestep"], sample["prompt_ids"][None]).sample[0]
        torch.testing.assert_close(velocity, expected, rtol=0, atol=2e-6 * expected.abs().max().item())


def test_samples_are_eulers_steps_of_diffusers_model(folder, data, samples):
    """From the data's noise, with guidance."""
    torch.save({"prompt_ids": torch.ones(TEXT, WIDTH)}, data / "empty_prompt.pt")
    flags = "--sampling-steps 3 --sampling-shift 3 --guidance-scale 2 --latents".split()
    found = inferred(folder, data, *flags, ranks=2)
    model = WanTransformer3DModel.from_pretrained(folder / "wan")
    sigmas = torch.tensor([1, 2 / 3, 1 / 3, 0], dtype=torch.float64)
    sigmas = (3 * sigmas / (1 + 2 * sigmas)).float()
    for sample, latents in list(zip(samples, found, strict=True))[::4]:
        x = sample["noise"]
        for sigma, following in zip(sigmas, sigmas[1:]):
            with torch.no_grad():
                both = [model(x[None], 1000 * sigma[None], text[None]).sample[0]
                        for text in (torch.ones(TEXT, WIDTH), sample["prompt_ids"])]
            x = x + (following - sigma) * (both[0] + 2 * (both[1] - both[0]))
        torch.testing.assert_close(latents, x, rtol=0, atol=1e-5 * x.abs().max().item())  # three steps of 2e-6 each


def test_the_example_runs(tmp_path):
    out = megashard.run(sys.executable, megashard.ROOT / "launch" / "examples" / "moving_shapes.py", tmp_path / "run",
                        "--steps", 2, env=megashard.environment(MEGASHARD_BIN=str(megashard.PROGRAM))).stdout
    assert "of the samples are nearest to a video of their caption" in out
    assert (tmp_path / "run" / "samples.png").exists()
