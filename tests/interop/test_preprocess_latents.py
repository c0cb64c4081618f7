"""Features of launch/preprocess/preprocess_latents.py against diffusers' pipelines."""
import json

import pytest
import torch

from preprocess_input import InputError
from preprocess_latents import parse_arguments, write_features
from tiny_hunyuan import make_hunyuan
from tiny_ltx2 import BINS, SOUND_CHANNELS, make_ltx2, write_precomputed
from tiny_pictures import make_flux, make_qwen_image
from tiny_wan import CHANNELS, WIDTH, make_pipeline, write_video

TEXT = 12


def preprocess(folder, pipeline, *flags):
    words = ["--model", pipeline, "--input", folder / "clips.jsonl", "--max-text-length", TEXT, *flags]
    write_features(parse_arguments([str(word) for word in words]))


@pytest.fixture(scope="module")
def clips(folder):
    write_video(folder / "wide", 6, 32, 48, (200, 0, 0))
    write_video(folder / "high", 5, 48, 32, (0, 0, 200))
    records = [{"video": "wide", "text": "a red  ball moves"}, {"video": "high", "text": "a blue box"},
               {"path": "wide/000.png", "cap": ["a box"]}]
    (folder / "clips.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_features_are_the_pipelines(clips):
    pipeline = make_pipeline(clips / "pipeline")
    preprocess(clips, clips / "pipeline", "--output", clips / "out", "--size", "32x48", "48x32", "--num-frames", 9)
    lines = [json.loads(line) for line in (clips / "out" / "data.jsonl").read_text().splitlines()]
    assert [line["shape"] for line in lines] == [[CHANNELS, 2, 4, 6], [CHANNELS, 2, 6, 4], [CHANNELS, 1, 4, 6]]
    first = torch.load(clips / "out" / lines[0]["file"])
    assert first.keys() == {"video", "prompt_ids"}
    expected, _ = pipeline.encode_prompt("a red ball moves", do_classifier_free_guidance=False,
                                         max_sequence_length=TEXT)
    torch.testing.assert_close(first["prompt_ids"], expected[0])
    assert first["prompt_ids"].shape == (TEXT, WIDTH) and not first["prompt_ids"][5:].any()
    from PIL import Image
    frames = [Image.open(clips / "wide" / f"{number:03}.png") for number in range(5)]  # 4k + 1 of the six
    with torch.no_grad():
        latents = pipeline.vae.encode(pipeline.video_processor.preprocess_video(frames, 32, 48)).latent_dist.mode()
    mean, std = (torch.tensor(each).view(-1, 1, 1, 1) for each in (pipeline.vae.config.latents_mean,
                                                                   pipeline.vae.config.latents_std))
    torch.testing.assert_close(first["video"], (latents[0] - mean) / std, rtol=1e-5, atol=1e-5)
    empty = torch.load(clips / "out" / "empty_prompt.pt")["prompt_ids"]
    assert empty[0].any() and not empty[1:].any()


def test_the_first_frame_is_a_condition(clips):
    make_pipeline(clips / "i2v", "WanImageToVideoPipeline", image_encoder=None, image_processor=None)
    (clips / "data.txt").write_text(f"{clips},{clips}/clips.jsonl\n")  # MindSpeed-MM's
    preprocess(clips, clips / "i2v", "--input", clips / "data.txt", "--output", clips / "out_i2v", "--size", "32x48",
               "48x32", "--num-frames", 5)
    condition = torch.load(clips / "out_i2v" / "features" / "0000000.pt")["i2v_vae_feature"]
    assert condition.shape == (4 + CHANNELS, 2, 4, 6)
    assert (condition[:4, 0] == 1).all() and not condition[:4, 1:].any()


def test_controls_are_the_pipelines(clips):
    """A masked video: WanVACEPipeline's own control latents and masks."""
    from diffusers import WanVACETransformer3DModel
    sizes = dict(num_attention_heads=2, attention_head_dim=12, text_dim=WIDTH, ffn_dim=32, num_layers=1,
                 vace_layers=[0], vace_in_channels=2 * CHANNELS + 64)
    pipeline = make_pipeline(clips / "vace", "WanVACEPipeline")
    write_video(clips / "mask", 5, 32, 48, (255, 255, 255))
    (clips / "vace.jsonl").write_text(json.dumps({"video": "wide", "text": "a box", "vace_video": "wide",
                                                  "vace_video_mask": "mask"}) + "\n")
    preprocess(clips, clips / "vace", "--input", clips / "vace.jsonl", "--output", clips / "out_vace", "--size",
               "32x48", "--num-frames", 5)
    found = torch.load(clips / "out_vace" / "features" / "0000000.pt")["vace_context"]
    from PIL import Image
    video, mask = ([Image.open(clips / name / f"{number:03}.png") for number in range(5)] for name in ("wide", "mask"))
    pipeline.transformer = WanVACETransformer3DModel(**sizes)
    with torch.no_grad():
        pixels, masks, references = pipeline.preprocess_conditions(
            video, mask, None, 1, 32, 48, 5, torch.float32, torch.device("cpu"))
        latents = pipeline.prepare_video_latents(pixels, masks, references, None, torch.device("cpu"))
        expected = torch.cat([latents, pipeline.prepare_masks(masks, references)], 1)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert found.shape == (2 * CHANNELS + 64, 2, 4, 6) and 0 < found[-1].mean() < 1


def test_mistakes_are_told(clips):
    def told(*flags):
        with pytest.raises(InputError) as error:
            preprocess(clips, *flags, "--output", clips / "none")
        return str(error.value)

    assert "no folder of a diffusers pipeline" in told(clips, "--size", "32x48")
    assert "--size 32 is no size; give rows and columns" in told(clips / "pipeline", "--size", "32")
    with open(clips / "clips.jsonl", "a") as file:
        file.write('{"text": "nothing to see"}\n')
    assert 'line 4: a record needs "video" or "image"' in told(clips / "pipeline", "--size", "32x48")
    assert not (clips / "none" / "data.jsonl").exists()


@pytest.mark.parametrize("kind", ["HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"])
def test_features_of_hunyuan_are_the_pipelines(clips, kind):
    from PIL import Image

    pipeline = make_hunyuan(clips / kind, kind)
    text = 'a red ball "moves"'
    (clips / "quoted.jsonl").write_text(json.dumps({"video": "wide", "text": text}))
    preprocess(clips, clips / kind, "--input", clips / "quoted.jsonl", "--output", clips / f"out_{kind}", "--size",
               "32x48", "--num-frames", 5)
    found = torch.load(clips / f"out_{kind}" / "features" / "0000000.pt")
    pipeline.tokenizer_max_length = TEXT
    expected = pipeline.encode_prompt(text)
    for ours, theirs in zip((*found["prompt_ids"], *found["prompt_mask"]), (*expected[::2], *expected[1::2])):
        torch.testing.assert_close(ours.float(), theirs[0])
    assert all(mask.any() for mask in found["prompt_mask"])
    frames = [Image.open(clips / "wide" / f"{number:03}.png") for number in range(5)]
    with torch.no_grad():
        latents = pipeline.vae.encode(pipeline.video_processor.preprocess_video(frames, 32, 48)).latent_dist.mode()
        torch.testing.assert_close(found["video"], latents[0] * pipeline.vae.config.scaling_factor)
        if "Image" in kind:
            image = pipeline.encode_image(frames[0], 1, "cpu", torch.float32)
            torch.testing.assert_close(found["vision_states"], image[0], rtol=1e-4, atol=1e-4)  # pixels by way of fp32
            condition = torch.cat(pipeline.prepare_cond_latents_and_mask(latents, frames[0], 1, 32, 48, torch.float32,
                                                                         "cpu"), 1)
            torch.testing.assert_close(found["cond_latents"], condition[0], rtol=1e-4, atol=1e-4)
    assert ("vision_states" in found) == ("Image" in kind)


def test_features_of_ltx2s_trainer(folder):
    import preprocess_ltx2

    both = make_ltx2(folder / "ltx2")
    write_precomputed(folder / "trainer" / ".precomputed")
    words = ["--model", folder / "ltx2", "--input", folder / "trainer", "--output", folder / "out_ltx2", "--sounds",
             "audio_latents", "--max-samples", 3]
    preprocess_ltx2.write_features(preprocess_ltx2.parse_arguments([str(word) for word in words]))
    lines = (folder / "out_ltx2" / "data.jsonl").read_text().splitlines()
    assert [json.loads(line)["shape"] for line in lines] == [[4, 2, 4, 6]] * 3
    for number in range(3):
        name = f"{number:03}.pt"
        found = torch.load(folder / "out_ltx2" / "features" / f"{number:07}.pt")
        video, text, sound = (torch.load(folder / "trainer" / ".precomputed" / each / name)
                              for each in ("latents", "conditions", "audio_latents"))
        latents = video["latents"]
        torch.testing.assert_close(found["video"], latents if latents.dim() == 4 else
                                   latents.reshape(2, 4, 6, 4).permute(3, 0, 1, 2))
        torch.testing.assert_close(found["sound"], sound["latents"].permute(1, 0, 2).reshape(5, SOUND_CHANNELS * BINS))
        assert found["frame_rate"] == 25
        mask = (text["prompt_attention_mask"].long() - 1)[None, None, None] * torch.finfo(torch.float32).max
        with torch.no_grad():
            expected = both.audio_connector(text["prompt_embeds"][None], mask)[0][0]
        torch.testing.assert_close(found["prompt_ids"][1], expected)
        assert found["prompt_mask"][0].all()  # registers take the places of padding


@pytest.mark.parametrize("make", [make_flux, make_qwen_image])
def test_features_of_pictures_are_the_pipelines(clips, make):
    from PIL import Image

    folder, text = clips / make.__name__, "a red ball moves " * 9
    pipeline = make(folder)
    (clips / "pictures.jsonl").write_text(json.dumps({"image": "wide/000.png", "text": text}))
    words = ["--input", clips / "pictures.jsonl", "--size", "32x48"]
    preprocess(clips, folder, *words, "--output", clips / f"out_{make.__name__}", "--max-text-length", 48)
    found = torch.load(clips / f"out_{make.__name__}" / "features" / "0000000.pt")
    pixels = pipeline.image_processor.preprocess(Image.open(clips / "wide" / "000.png"), 32, 48)
    with torch.no_grad():
        if make is make_flux:
            expected, pooled, _ = pipeline.encode_prompt(text, None, max_sequence_length=48)
            torch.testing.assert_close(found["pooled_prompt"], pooled[0])
            latents = (pipeline.vae.encode(pixels).latent_dist.mode() - 0.1) * 0.4
            torch.testing.assert_close(found["prompt_ids"], expected[0])
        else:
            expected, _ = pipeline.encode_prompt(text, max_sequence_length=48)
            mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (pipeline.vae.config.latents_mean,
                                                                             pipeline.vae.config.latents_std))
            latents = ((pipeline.vae.encode(pixels.unsqueeze(2)).latent_dist.mode() - mean) / std)[:, :, 0]
            count = found["prompt_mask"].sum()
            assert 0 < count == expected.shape[1] <= 48 and not found["prompt_ids"][count:].any()
            torch.testing.assert_close(found["prompt_ids"][:count], expected[0])
    torch.testing.assert_close(found["video"], latents[0].unsqueeze(1))
