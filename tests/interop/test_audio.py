"""Models that hear, fp32, against transformers' in fp64 on the same small random weights: logits, losses and every
gradient."""
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megashard import convert, pretrain
from tiny_audio import make_asr, make_omni, publish, spectra_of, write_heard
from test_models import in_fp64
from transformers_twin import by_transformers, check, model_logits

VOCAB, BINS = 200, 12
AUDIO, IMAGE, VIDEO, AUDIO_START, VISION_START, AUDIO_END, VISION_END = range(VOCAB, VOCAB + 7)
TEXT = dict(vocab_size=VOCAB + 7, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=128, initializer_range=0.2)
HEARS = dict(num_mel_bins=BINS, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=40, d_model=32,
             downsample_hidden_size=6, output_dim=48, initializer_range=0.1)
SEES = dict(depth=3, hidden_size=32, intermediate_size=40, num_heads=2, patch_size=4, out_hidden_size=48,
            num_position_embeddings=25, deepstack_visual_indexes=[0, 2])
OMNI = dict(
    text_config=TEXT | dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, rope_parameters=dict(
        rope_type="default", rope_theta=500.0, mrope_section=[3, 3, 2], mrope_interleaved=True)),
    audio_config=HEARS | dict(n_window_infer=200), vision_config=SEES, audio_token_id=AUDIO, image_token_id=IMAGE,
    video_token_id=VIDEO, audio_start_token_id=AUDIO_START, vision_start_token_id=VISION_START,
    position_id_per_seconds=7)
ASR = dict(text_config=TEXT, audio_config=HEARS, audio_token_id=AUDIO, tie_word_embeddings=True)
LENGTH = 72
# Frames of clips: features of whole chunks (13), of parts of one (frames / 8), more than a window of 2 chunks (omni).
CLIPS = (130, 205, 241)


def features(frames):
    return frames // 100 * 13 + (frames % 100 + 7) // 8


def patches(*grids):
    return torch.randn(sum(torch.tensor(grid).prod() for grid in grids), 3 * 2 * 4 * 4), torch.tensor(grids)


def put(row, at, *tokens):
    row[at:at + len(tokens)] = torch.tensor(tokens)
    return at + len(tokens)


def put_clip(row, at, frames):
    return put(row, at, AUDIO_START, *[AUDIO] * features(frames), AUDIO_END)


def put_picture(row, at, token, count):
    return put(row, at, VISION_START, *[token] * count, VISION_END)


def clips(tokens):
    """Two in the first row, one in the second, none in the third."""
    put_clip(tokens[0], put_clip(tokens[0], 2, CLIPS[0]) + 3, CLIPS[1])
    put_clip(tokens[1], 5, CLIPS[2])
    return CLIPS, {}


def pictures_too(tokens):
    """A clip between two images; a video of which two frames are 0.7 seconds apart, then a clip; an image."""
    at = put_clip(tokens[0], put_picture(tokens[0], 3, IMAGE, 6) + 2, CLIPS[0])
    put_picture(tokens[0], at, IMAGE, 10)
    put_clip(tokens[1], put_picture(tokens[1], 1, VIDEO, 18) + 4, CLIPS[1])
    put_picture(tokens[2], 40, IMAGE, 4)
    images, image_grids = patches((1, 6, 4), (1, 4, 10), (1, 4, 4))
    videos, video_grids = patches((3, 4, 6))
    return CLIPS[:2], dict(pixel_values=images, image_grid_thw=image_grids, pixel_values_videos=videos,
                           video_grid_thw=video_grids, second_per_grid_ts=torch.tensor([0.7]))


def videos_with_sound(tokens):
    """In the first row the sound lasts longer, in the second the video; the third has an image."""
    mixed = {0: [VIDEO] * 6 + [AUDIO] * 5 + [VIDEO] * 6 + [AUDIO] * (features(CLIPS[0]) - 5),
             1: [AUDIO] * features(CLIPS[0]) + [VIDEO] * 24}
    for row, marks in mixed.items():
        put(tokens[row], 4, VISION_START, AUDIO_START, *marks, AUDIO_END, VISION_END)
    put_picture(tokens[2], 40, IMAGE, 4)
    images, image_grids = patches((1, 4, 4))
    videos, video_grids = patches((2, 4, 6), (4, 6, 4))
    return (CLIPS[0],) * 2, dict(pixel_values=images, image_grid_thw=image_grids, pixel_values_videos=videos,
                                 video_grid_thw=video_grids, second_per_grid_ts=torch.tensor([1.1, 2.3]))


def short_clip(tokens):
    """Shorter than a chunk."""
    put_clip(tokens[1], 5, 37)
    return (37,), {}


CASES = {
    "omni_short": ("Qwen3OmniMoeThinker", OMNI, short_clip),
    "asr_short": ("Qwen3ASR", ASR, short_clip),
    "omni": ("Qwen3OmniMoeThinker", OMNI, clips),
    "omni_sees": ("Qwen3OmniMoeThinker", OMNI, pictures_too),
    "omni_sees_and_hears": ("Qwen3OmniMoeThinker", OMNI, videos_with_sound),
    "asr": ("Qwen3ASR", ASR, clips),
}


def make_model(name):
    kind, config, _ = CASES[name]
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(getattr(transformers, f"{kind}Config")(**config))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, or their gradients prove little
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def as_transformers(name, tokens, frames, lengths, extra):
    """The arguments of transformers' forward."""
    spectrogram, mask = spectra_of(frames, torch.tensor(lengths))
    if name.startswith("asr"):
        return dict(input_features=spectrogram, input_features_mask=mask)
    extra = dict(extra)
    if "second_per_grid_ts" in extra:
        extra["video_second_per_grid"] = extra.pop("second_per_grid_ts")
    return dict(input_features=spectrogram, feature_attention_mask=mask, attention_mask=torch.ones_like(tokens),
                use_audio_in_video="hears" in name, **extra)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """transformers' results and ours for each case."""
    folder, wanted = tmp_path_factory.mktemp("audio"), {}
    for seed, name in enumerate(CASES):
        torch.manual_seed(seed)
        model = make_model(name)
        model.save_pretrained(folder / name)
        tokens = torch.randint(0, VOCAB, (3, LENGTH))
        labels = torch.randint(0, VOCAB, tokens.shape)
        lengths, extra = CASES[name][2](tokens)
        frames = torch.randn(sum(lengths), BINS)
        ours = {"input_features": frames, "audio_feature_lengths": torch.tensor(lengths), **extra}
        save_file({"tokens": tokens, "labels": labels} | {f"extra.{key}": value for key, value in ours.items()},
                  folder / name / "input.bin")
        given, ones = as_transformers(name, tokens, frames, lengths, extra), torch.ones_like(tokens)
        rough = by_transformers(model, tokens, labels, ones, **given)
        wanted[name] = in_fp64(model, tokens, labels, ones, given), rough
    done = model_logits(*(folder / name for name in CASES))
    assert done.returncode == 0, done.stderr[:2000]
    return {name: (*wanted[name], load_file(folder / name / "output.bin")) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_same_as_transformers(compared, name):
    wanted, rough, ours = compared[name]
    wanted = {key: value for key, value in wanted.items() if value is not None}  # of a tower that saw nothing
    check(ours, wanted, bar=3e-6, rough=rough)  # 2.5e-6 was seen, of roundings


@pytest.mark.parametrize("make", [make_omni, make_asr])
def test_published_files_are_trained_and_written_again(tmp_path, make):
    """Names and values of every weight, by converters and by --save-hf, which leave out what speaks."""
    folder = tmp_path / "hf"
    folder.mkdir()
    make(folder)
    publish(folder)
    write_heard(folder, tmp_path / "heard")
    whole = load_file(folder / "model.safetensors")
    told = convert("hf_to_dcp", "--hf-dir", folder, "--dcp-dir", tmp_path / "dcp").stdout
    assert ("2 tensors of the model beside this one are left out" in told) == (make is make_omni)
    convert("dcp_to_hf", "--load-dir", tmp_path / "dcp" / "release", "--save-dir", tmp_path / "back",
            "--model-assets-dir", folder)
    flags = ["--hf-model", folder, "--data-path", tmp_path / "heard", "--split", "1,0,0", "--seq-length", 128,
             "--micro-batch-size", 1, "--global-batch-size", 2, "--train-iters", 1, "--lr", 0, "--eval-iters", 0,
             "--save-hf", tmp_path / "saved", "--use-torch-fsdp2"]
    _, told = pretrain(tmp_path, *flags, ranks=2, config=None, defaults="")
    assert ("2 tensors are not read: they belong to a model beside this one" in told) == (make is make_omni)
    thinker = {name: values for name, values in whole.items() if name.startswith("thinker.")}
    for written in ("back", "saved"):
        ours = load_file(tmp_path / written / "model.safetensors")
        assert sorted(ours) == sorted(thinker)
        assert all(torch.equal(ours[name], values) for name, values in thinker.items()), written
        config = json.loads((tmp_path / written / "config.json").read_text())
        assert config["enable_audio_output"] == (make is make_asr)
