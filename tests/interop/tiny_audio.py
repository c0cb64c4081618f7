"""Tiny models that hear, of random weights, with their processors, clips of sound, and conversations about them."""
import json
import shutil
import wave

import numpy
import torch
from safetensors.torch import load_file, save_file

from tiny_vision import (AGAIN, ASKED, IMAGE, MARKS, SMALL_TEXT, TEMPLATE, VIDEO, WORDS, asked, make_pictures,
                         make_tokenizer, said, saved, write_conversations, write_video)

LONG = "the cat sat on the mat the mat sat on the cat the cat sat"
SOUND_MARKS = ["<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"]
HEARD_WORDS = [*WORDS, *SOUND_MARKS]
AUDIO, AUDIO_START = HEARD_WORDS.index("<|audio_pad|>"), HEARD_WORDS.index("<|audio_start|>")
HEARING_TEMPLATE = TEMPLATE.replace("{% else %}{{ c['text'] }}", "{% elif c['type'] == 'audio' %}<|audio_start|>"
                                    "<|audio_pad|><|audio_end|>{% else %}{{ c['text'] }}")
NAMES = dict(image_token="<|image_pad|>", video_token="<|video_pad|>", audio_token="<|audio_pad|>",
             vision_bos_token="<|vision_start|>", vision_eos_token="<|vision_end|>", audio_bos_token="<|audio_start|>",
             audio_eos_token="<|audio_end|>")
RATE, BINS = 16000, 8
TEXT = SMALL_TEXT | dict(vocab_size=len(HEARD_WORDS))
TOWER = dict(num_mel_bins=BINS, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=20, d_model=16,
             downsample_hidden_size=4, output_dim=16, initializer_range=0.1)


# Names in the files of transformers' class, and in those that Qwen publishes; the first that fits.
PUBLISHED = {"qwen3_omni_moe_thinker": ("qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration", [("", "thinker.")]),
             "qwen3_asr": ("qwen3_asr", "Qwen3ASRForConditionalGeneration", [
                 ("model.multi_modal_projector.linear_1.", "thinker.audio_tower.proj1."),
                 ("model.multi_modal_projector.linear_2.", "thinker.audio_tower.proj2."),
                 ("model.audio_tower.", "thinker.audio_tower."), ("model.language_model.", "thinker.model."),
                 ("", "thinker.")])}


def write_clip(path, seconds, pitch, rate=RATE, channels=1):
    """A falling tone."""
    time = numpy.arange(int(seconds * rate)) / rate
    tone = (numpy.sin(2 * numpy.pi * pitch * time * (1 - time / 20)) * 20000).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(numpy.repeat(tone, channels).tobytes())


def make_clips(folder):
    write_clip(folder / "a.wav", 1.31, 300)
    write_clip(folder / "b.wav", 2.05, 700)


def make_omni(folder):
    """A thinker of Qwen3-Omni with processor, two clips, two pictures and a video; returns transformers' processor, and
    the model."""
    import transformers

    tokenizer = make_tokenizer(folder, HEARD_WORDS, [*MARKS, *SOUND_MARKS], HEARING_TEMPLATE,
                               extra_special_tokens=NAMES)
    sizes = dict(patch_size=4, min_pixels=64, max_pixels=1024)
    videos = transformers.Qwen2VLVideoProcessor(patch_size=4, min_pixels=64, max_pixels=320, do_sample_frames=True,
                                                fps=2)
    processor = transformers.Qwen3OmniMoeProcessor(
        transformers.Qwen2VLImageProcessor(**sizes), videos,
        transformers.WhisperFeatureExtractor(feature_size=BINS, return_attention_mask=True), tokenizer,
        chat_template=HEARING_TEMPLATE)
    processor.save_pretrained(folder)
    make_pictures(folder)
    make_clips(folder)
    write_video(folder / "a.mp4", 9, 4, (20, 24))
    config = transformers.Qwen3OmniMoeThinkerConfig(
        text_config=TEXT | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, rope_parameters=dict(
            rope_type="default", rope_theta=100.0, mrope_section=[2, 1, 1], mrope_interleaved=True)),
        vision_config=dict(depth=2, hidden_size=16, intermediate_size=20, num_heads=2, patch_size=4,
                           out_hidden_size=16, num_position_embeddings=16, deepstack_visual_indexes=[0],
                           initializer_range=0.1),
        audio_config=TOWER, audio_token_id=AUDIO, image_token_id=IMAGE, video_token_id=VIDEO,
        audio_start_token_id=AUDIO_START, vision_start_token_id=WORDS.index("<|vision_start|>"),
        position_id_per_seconds=13)
    return processor, saved(folder, transformers.Qwen3OmniMoeThinkerForConditionalGeneration, config)


def make_asr(folder):
    """The same for Qwen3-ASR: clips alone."""
    import transformers

    tokenizer = make_tokenizer(folder, HEARD_WORDS, [*MARKS, *SOUND_MARKS], HEARING_TEMPLATE,
                               extra_special_tokens=NAMES, pad_token="<unk>")
    processor = transformers.Qwen3ASRProcessor(transformers.Qwen3ASRFeatureExtractor(feature_size=BINS), tokenizer,
                                               chat_template=HEARING_TEMPLATE)
    processor.save_pretrained(folder)
    make_clips(folder)
    config = transformers.Qwen3ASRConfig(text_config=TEXT, audio_config=TOWER, audio_token_id=AUDIO,
                                         tie_word_embeddings=True)
    return processor, saved(folder, transformers.Qwen3ASRForConditionalGeneration, config)


def publish(folder):
    """Writes the model of a folder as Qwen publishes it, beside what speaks, and moves transformers' files to its
    folder `part`."""
    part = folder / "part"
    part.mkdir()
    config = json.loads((folder / "config.json").read_text())
    model_type, kind, names = PUBLISHED[config["model_type"]]
    weights = {"talker.model.norm.weight": torch.ones(3), "code2wav.decoder.bias": torch.ones(2)}
    for name, values in load_file(folder / "model.safetensors").items():
        begin, new = next(pair for pair in names if name.startswith(pair[0]))
        weights[new + name.removeprefix(begin)] = values
    if model_type == "qwen3_asr":  # speaks to nobody, and says in text_config that it is tied
        weights = {name: values for name, values in weights.items() if name.startswith("thinker.")}
        config["text_config"]["tie_word_embeddings"] = config["tie_word_embeddings"]
    for name in ("config.json", "model.safetensors"):
        shutil.move(folder / name, part / name)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(
        dict(architectures=[kind], model_type=model_type, thinker_config=config, enable_audio_output=True)))


def write_heard(folder, prefix, count=6):
    """Conversations: of clips and pictures, of clips, of pictures or of text alone."""
    heard = {"role": "user", "content": [{"type": "audio", "audio": "a.wav"}, {"type": "text", "text": "the cat"}]}
    other = {"role": "user", "content": [{"type": "text", "text": "on"}, {"type": "audio", "audio": "b.wav"}]}
    mixed = [[ASKED, said("sat"), other, said(LONG)], [AGAIN, said(LONG)]] if (folder / "a.png").exists() else []
    plain = [[heard, said(LONG)], [asked("on the mat"), said(LONG)], [other, said("the mat"), heard, said(LONG)],
             [heard, said("cat on the mat")], [asked("the cat"), said(LONG)], [other, said(LONG)]]
    write_conversations(folder, (mixed + plain)[:count], prefix)


def spectra_of(frames, lengths):
    """As transformers' extractors give clips: [clips, bins, frames] with zeros behind each, and which are no padding;
    whole chunks of 100."""
    longest = -(-int(lengths.max()) // 100) * 100
    spectra, heard = torch.zeros(len(lengths), frames.size(1), longest), torch.zeros(len(lengths), longest).long()
    for row, part in enumerate(frames.split(lengths.tolist())):
        spectra[row, :, :len(part)], heard[row, :len(part)] = part.T, 1
    return spectra, heard
