"""Noise, timesteps and weights of models of latents against diffusers' schedulers and the formulas of MindSpeed-MM."""
import math

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_loss_weighting_for_sd3, compute_snr
from safetensors.torch import load_file, save_file

import megashard

PATCH, ROWS, LENGTH = 8, 5, 6
SAMPLINGS, WEIGHTINGS = ["uniform", "logit-normal"], ["none", "bsmntw", "sigma-sqrt", "cosmap", "linear"]
BATCH = {"latents": torch.randn(PATCH, ROWS, LENGTH, generator=torch.Generator().manual_seed(1)),
         "noise": torch.randn(PATCH, ROWS, LENGTH, generator=torch.Generator().manual_seed(2)),
         "noise_seeds": torch.arange(ROWS), "loss_mask": torch.ones(ROWS, LENGTH)}


def noised(folder, batch, objective, *flags):
    save_file(batch, folder / "in.safetensors")
    megashard.run(megashard.INTEROP / "noised_latents", folder / "in.safetensors", folder / "out.safetensors",
                  objective, *flags)
    return load_file(folder / "out.safetensors")


def by_rows(column):
    return column.transpose(0, 1)  # samples first


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)  # fp32, other orders


def test_flow_matching_is_diffusers(tmp_path):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    timesteps = scheduler.timesteps[torch.tensor([0, 10, 400, 800, 999])]
    out = noised(tmp_path, BATCH | {"timesteps": timesteps}, "flow-matching")
    same(by_rows(out["latents"]), scheduler.scale_noise(by_rows(BATCH["latents"]), timesteps, by_rows(BATCH["noise"])))
    same(out["targets"], BATCH["noise"] - BATCH["latents"])
    same(out["timesteps"], timesteps)
    assert "noise" not in out


def test_a_sound_has_the_noise_level_of_its_video(tmp_path):
    draw = torch.Generator().manual_seed(4)
    x, n = (torch.randn(ROWS, 7, 3, generator=draw) for _ in range(2))
    out = noised(tmp_path, BATCH | {"sounds": x, "sound_noise": n}, "flow-matching")
    sigma = (out["timesteps"] / 1000).view(-1, 1, 1)
    same(out["sounds"], (1 - sigma) * x + sigma * n)
    same(out["sound_targets"], n - x)
    drawn = noised(tmp_path, BATCH | {"sounds": x}, "flow-matching")
    noise = drawn["sound_targets"] + x
    assert 0.7 < noise.std() < 1.3 and torch.equal(drawn["latents"], out["latents"])


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("betas", ["scaled_linear", "linear"])
def test_ddpm_is_diffusers(tmp_path, prediction, betas):
    start, end, gamma = (0.00085, 0.012, 5.0) if betas == "scaled_linear" else (1e-4, 0.02, 0.0)
    scheduler = DDPMScheduler(beta_start=start, beta_end=end, beta_schedule=betas, prediction_type=prediction)
    timesteps = torch.tensor([0, 10, 400, 800, 999])
    out = noised(tmp_path, BATCH | {"timesteps": timesteps.float()}, "ddpm", "--ddpm-prediction",
                 int(prediction != "epsilon"), "--ddpm-betas", int(betas == "linear"), "--ddpm-beta-start", start,
                 "--ddpm-beta-end", end, "--ddpm-snr-gamma", gamma)
    x, n = by_rows(BATCH["latents"]), by_rows(BATCH["noise"])
    same(by_rows(out["latents"]), scheduler.add_noise(x, n, timesteps))
    same(by_rows(out["targets"]), n if prediction == "epsilon" else scheduler.get_velocity(x, n, timesteps))
    snr = compute_snr(scheduler, timesteps)
    weights = snr.clamp(max=gamma) / (snr if prediction == "epsilon" else snr + 1) if gamma else torch.ones(ROWS)
    # alphas_cumprod is a product of a thousand fp32 numbers there.
    torch.testing.assert_close(out["weights"], weights[:, None] * BATCH["loss_mask"], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_weights(tmp_path, weighting):
    """bsmntw: as a table of MindSpeed-MM's wan_flow_match_scheduler with extra_one_step; linear: NeMo Automodel's."""
    shift = 5.0
    sigmas = torch.linspace(1, 0, 1001, dtype=torch.float64)[:-1]
    sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
    y = torch.exp(-2 * ((1000 * sigmas - 500) / 1000) ** 2)
    bell = (y - y.min()) * 1000 / (y - y.min()).sum()
    places = torch.tensor([0, 10, 400, 800, 999])
    mask = BATCH["loss_mask"].clone()
    mask[2, 3:] = 0
    out = noised(tmp_path, BATCH | {"timesteps": (1000 * sigmas[places]).float(), "loss_mask": mask}, "flow-matching",
                 "--timestep-shift", shift, "--timestep-weighting", WEIGHTINGS.index(weighting))
    given = sigmas[places]
    expected = {"bsmntw": bell[places], "linear": 1 + shift * given}.get(
        weighting, compute_loss_weighting_for_sd3(weighting.replace("-", "_"), given))
    same(out["weights"], (expected[:, None] * mask).float())


@pytest.mark.parametrize("flags,least,most", [
    ((), 0, 1000), (("--timestep-min", 875, "--timestep-shift", 5), 875, 1000),
    (("--timestep-sampling", 1, "--timestep-logit-mean", -0.5), 0, 1000),
    (("--timestep-sampling", 1, "--timestep-max", 400), 0, 400), (("--timestep-shift-by", 1), 0, 1000),
    (("--timestep-shift-by", 2, "--timestep-sampling", 1), 0, 1000)])
def test_timesteps_have_their_distribution(tmp_path, flags, least, most):
    """Kolmogorov-Smirnov: with 4,000 draws a distance of 0.034 has a chance of 2e-4, and the seeds are fixed."""
    draws, patches = 4000, 16
    batch = {"latents": torch.zeros(1, draws, patches), "noise": torch.zeros(1, draws, patches),
             "noise_seeds": torch.arange(draws) * 7919, "loss_mask": torch.ones(draws, patches)}
    t = noised(tmp_path, batch, "flow-matching", *flags)["timesteps"].double().sort().values
    assert least <= t[0] and t[-1] <= most
    options = dict(zip(flags[::2], flags[1::2]))
    shift = options.get("--timestep-shift", 1)
    if "--timestep-shift-by" in options:
        flux, ltx2 = 0.5 + 0.65 * (patches - 256) / 3840, 0.95 + 1.1 * (patches - 1024) / 3072
        shift = math.exp(flux if options["--timestep-shift-by"] == 1 else ltx2)

    def share_below(timestep):
        sigma = timestep / 1000
        sigma = sigma / (shift - (shift - 1) * sigma)
        if options.get("--timestep-sampling"):
            return torch.special.ndtr(torch.special.logit(sigma) - options.get("--timestep-logit-mean", 0))
        return sigma

    low, high = share_below(torch.tensor(float(least)).double()), share_below(torch.tensor(float(most)).double())
    expected = (share_below(t) - low) / (high - low)
    assert (expected - (torch.arange(draws) + 0.5) / draws).abs().max() < 0.034


def test_a_sample_has_its_noise_by_its_seed(tmp_path):
    """Whatever else is in the batch, and however long the batch is."""
    batch = {name: each for name, each in BATCH.items() if name != "noise"}
    all_rows = noised(tmp_path, batch, "flow-matching")
    shorter = {"latents": torch.cat([batch["latents"][:, 3:4], torch.zeros(PATCH, 1, 2)], 2).contiguous(),
               "noise_seeds": batch["noise_seeds"][3:4].clone(), "loss_mask": torch.ones(1, LENGTH + 2),
               "token_mask": torch.tensor([[True] * LENGTH + [False] * 2])}
    alone = noised(tmp_path, shorter, "flow-matching")
    for name in ("latents", "targets"):
        assert torch.equal(alone[name][:, 0, :LENGTH], all_rows[name][:, 3])
        assert not alone[name][:, 0, LENGTH:].any()
    assert alone["timesteps"][0] == all_rows["timesteps"][3]
    noise = all_rows["targets"] + batch["latents"]
    assert 0.7 < noise.std() < 1.3 and all_rows["timesteps"].unique().numel() == ROWS
