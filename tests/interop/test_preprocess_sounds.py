"""Clips of sound in conversations: launch/preprocess/preprocess_data.py beside transformers' processors, and training
on what it writes beside transformers' models."""
import wave

import numpy
import pytest
import torch
from safetensors.torch import load_file

from conversations import losses_by_pytorch, packed, train
from preprocess_conversations import Encoder
from preprocess_input import InputError, RecordError
from tiny_audio import make_asr, make_omni, spectra_of, write_clip
from tiny_vision import AGAIN, ASKED, SHOWN, asked, preprocessing, said, write_conversations

HEARD = {"role": "user", "content": [{"type": "audio", "audio": "a.wav"}, {"type": "text", "text": "the cat"}]}
OTHER = {"role": "user", "content": [{"type": "text", "text": "on"}, {"type": "audio", "audio": "b.wav"}]}
BOTH = {"role": "user", "content": [*OTHER["content"], {"type": "image", "image": "a.png"}, *HEARD["content"]]}
CONVERSATIONS = {make_omni: [[HEARD, said("sat"), AGAIN, said("the mat")], [asked("on"), said("the cat")],
                             [SHOWN, said("cat on"), OTHER, said("sat")], [BOTH, said("the")]],
                 make_asr: [[HEARD, said("sat")], [asked("on"), said("the cat")],
                            [OTHER, said("cat on")], [HEARD, said("the")]]}


def wave_of(path):
    with wave.open(str(path)) as file:
        return numpy.frombuffer(file.readframes(file.getnframes()), "<i2").astype("float32") / 32768


def by_their_processor(processor, folder, messages):
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    clips = [wave_of(folder / part["audio"]) for part in parts if part["type"] == "audio"]
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
    of = {"padding": True} if "Omni" in type(processor).__name__ else {"padding": "longest"}
    return processor(text=[text], audio=clips or None, return_tensors="pt", audio_kwargs=of, **pictures(folder, parts))


def pictures(folder, parts):
    from transformers.image_utils import load_image
    found = [load_image(str(folder / part["image"])) for part in parts if part["type"] == "image"]
    return {"images": found} if found else {}


@pytest.mark.parametrize("make", CONVERSATIONS)
def test_conversations_with_sound_are_prepared_and_trained(tmp_path, make):
    """Tokens and spectrograms as the model's own processor gives them, and the losses of runs by several strategies,
    where batches have sound, pictures, both or neither, are transformers'."""
    processor, model = make(tmp_path)
    conversations = CONVERSATIONS[make]
    write_conversations(tmp_path, conversations, tmp_path / "out")
    ours = load_file(tmp_path / "out.vision.safetensors")
    samples, token, seen = [], 0, dict.fromkeys(("image", "video", "pixel_values", "pixel_values_videos"), 0)

    def next_rows(name, counter, end):
        begin, seen[counter] = seen[counter], int(end)
        return ours[name][begin:end]

    frame, clip = 0, 0
    for number, messages in enumerate(conversations):
        tokens = ours["tokens"][token:ours["sample_ends"][number]].long()
        mask = ours["loss_mask"][token:ours["sample_ends"][number]].bool()
        token = ours["sample_ends"][number]
        more = {}
        lengths = ours["items.audio_feature_lengths"][clip:ours["item_ends.audio_feature_lengths"][number]]
        frames = ours["items.input_features"][frame:ours["item_ends.input_features"][number]]
        clip, frame = clip + len(lengths), frame + len(frames)
        watched = any(part["type"] == "video" for message in messages if isinstance(message["content"], list)
                      for part in message["content"])
        if not watched:  # test_preprocess_pictures.py compares videos
            wanted = by_their_processor(processor, tmp_path, messages)
            assert tokens.tolist() == wanted["input_ids"][0].tolist()
        if len(lengths):
            spectra, heard = spectra_of(frames, lengths)
            if not watched:
                theirs = wanted["input_features"]
                name = "feature_attention_mask" if make is make_omni else "input_features_mask"
                assert wanted[name].sum(1).tolist() == lengths.tolist()
                assert (spectra - torch.nn.functional.pad(theirs, (0, spectra.size(2) - theirs.size(2)))
                        )[heard[:, None].expand_as(spectra) == 1].abs().max() < 1e-6
            more = dict(input_features=spectra, **({"feature_attention_mask": heard} if make is make_omni else
                                                   {"input_features_mask": heard}))
        if make is make_omni:
            more["attention_mask"] = torch.ones_like(tokens[None])
            for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
                if kind == "video" and ours["video_ends"][number] > seen["video"]:
                    more["video_second_per_grid"] = ours["second_per_grid_ts"][seen["video"]:
                                                                               ours["video_ends"][number]]
                grids = next_rows(f"{kind}_grid_thw", kind, ours[f"{kind}_ends"][number])
                if len(grids):
                    end = seen[pixels] + grids.prod(1).sum()
                    more |= {f"{kind}_grid_thw": grids, pixels: next_rows(pixels, pixels, end)}
        samples.append((tokens[None], tokens[1:].where(mask[1:], -100), more))

    ones = train(tmp_path)
    assert ones == pytest.approx(losses_by_pytorch(model, samples), rel=2e-6)  # fp32, sums over two ranks
    assert ones[2] < ones[0]
    assert packed(tmp_path) == pytest.approx(ones, rel=1e-6)
    assert train(tmp_path, "--context-parallel-size", 2) == pytest.approx(ones, rel=2e-6)
    units = tmp_path / "fsdp2.yaml"
    units.write_text("sharding_size: 2\nrecompute_modules: ['model.audio_tower.layers.{*}']\nuse_reentrant: false\n")
    more = ["--fsdp2-config-path", units, "--micro-batch-size", 1]
    more += ["--expert-model-parallel-size", 2] if make is make_omni else []
    assert train(tmp_path, *more, ranks=4) == pytest.approx(ones, rel=2e-6)


@pytest.fixture(scope="module")
def hears(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sounds")
    make_asr(folder)
    write_clip(folder / "stereo.wav", 0.8, 300, rate=48000, channels=2)
    write_clip(folder / "short.wav", 0.02, 300)
    (folder / "damaged.wav").write_bytes(b"RIFF")
    return folder


def test_clips_of_other_rates_become_one_channel_at_the_models(hears):
    sounds = Encoder(preprocessing(hears)).sounds
    sounds.need_extractor()
    assert len(sounds.samples_of("here", str(hears / "stereo.wav"))) == 12800
    same = sounds.samples_of("here", str(hears / "a.wav"))
    assert numpy.array_equal(same, wave_of(hears / "a.wav"))


@pytest.mark.parametrize("name, error, message", [
    ("none.wav", RecordError, "cannot read the sound"),
    ("damaged.wav", RecordError, "cannot read the sound"),
    ("short.wav", RecordError, "has 320 samples at 16000 a second, and a clip needs 400; delete the record"),
])
def test_wrong_clips_are_named(hears, name, error, message):
    turn = {"role": "user", "content": [{"type": "audio", "audio": name}]}
    with pytest.raises(error, match=message):
        Encoder(preprocessing(hears)).encode(("line 1", {"messages": [turn, said("the cat")]}, str(hears)))


def test_a_model_that_does_not_hear_is_named(hears, tmp_path):
    from tiny_vision import make_processors
    make_processors(tmp_path)
    with pytest.raises(InputError, match=r"has no <\|audio_pad\|>; give the directory of a model that hears"):
        Encoder(preprocessing(tmp_path)).encode(("line 1", {"messages": [HEARD, said("the cat")]}, str(hears)))


TURNS = "messages=messages audios=audios role=role content=content user=user assistant=assistant".split()


def encode_turns(folder, item, template, **flags):
    encoder = Encoder(preprocessing(folder, template=template, columns=TURNS, **flags))
    return encoder.encode(("in.jsonl, line 2", item, str(folder))), encoder.tokenizer


def test_turns_get_empty_thoughts_and_clips(hears):
    """As MindSpeed-MM's template qwen3_omni; with enable_thinking false it does not learn the thoughts."""
    item = {"messages": [asked("<audio> the"), said("<think>on the mat</think>\n\ncat"), asked("on"), said("sat")],
            "audios": ["a.wav"]}
    sample, tokenizer = encode_turns(hears, item, "qwen3_omni")
    clip = f"<|audio_start|>{'<|audio_pad|>' * 17}<|audio_end|>"
    question = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    empty = "<think>\n\n</think>\n\n"

    def check(sample, *pieces):
        parts = [[tokenizer(text, add_special_tokens=False)["input_ids"] for text in piece] for piece in pieces]
        assert sample.tokens == [token for piece in parts for part in piece for token in part]
        assert list(sample.mask) == [number % 2 for number, piece in enumerate(parts) for part in piece for _ in part]

    check(sample, [question.format(f"{clip} the")], ["<think>on the mat</think>\n\ncat<|im_end|>\n"],
          [question.format("on")], [empty, "sat<|im_end|>\n"])
    assert sample.sounds.lengths == [131]
    check(encode_turns(hears, item, "qwen3_omni", disable_thinking=True)[0],
          [question.format(f"{clip} the"), empty], ["cat<|im_end|>\n"], [question.format("on"), empty],
          ["sat<|im_end|>\n"])
    check(encode_turns(hears, item, "qwen3_omni_nothink")[0], [question.format(f"{clip} the")],
          ["<think>on the mat</think>\n\ncat<|im_end|>\n"], [question.format("on")], ["sat<|im_end|>\n"])
    with pytest.raises(InputError, match="--cutoff-length 30 cuts a picture or a clip"):
        encode_turns(hears, item, "qwen3_omni", cutoff_length=30)
    with pytest.raises(RecordError, match="there are 1 marks <audio> for 2 audios"):
        encode_turns(hears, item | {"audios": ["a.wav", "b.wav"]}, "qwen3_omni")


@pytest.mark.parametrize("item", [
    {"audio": "a.wav", "prompt": "on the mat", "text": "the cat sat"},
    {"audio": "a.wav", "messages": [{"role": "system", "content": "on the mat"}, asked("<audio>"),
                                    said("the cat sat")]}])
def test_transcriptions_are_prepared_by_the_chat_template(hears, item):
    """As MindSpeed-MM's data set qwen3_asr: what is said and the token that ends it are learnt."""
    sample, tokenizer = encode_turns(hears, item, "qwen3_asr")
    question = tokenizer(f"<|im_start|>system\non the mat<|im_end|>\n<|im_start|>user\n<|audio_start|>"
                         f"{'<|audio_pad|>' * 17}<|audio_end|><|im_end|>\n<|im_start|>assistant\n",
                         add_special_tokens=False)["input_ids"]
    answer = tokenizer("the cat sat<|im_end|>", add_special_tokens=False)["input_ids"]
    assert sample.tokens == question + answer and list(sample.mask) == [0] * len(question) + [1] * len(answer)


@pytest.mark.parametrize("item, message", [
    ({"text": "the cat"}, "the record has no clip of sound"), ({"audio": "a.wav"}, "the record has no text"),
    ({"audio": 3, "text": "the"}, "'audio' is no text"), ([], "the record is no JSON object")])
def test_wrong_transcriptions_are_named(hears, item, message):
    with pytest.raises(RecordError, match=message):
        encode_turns(hears, item, "qwen3_asr")
