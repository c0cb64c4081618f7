"""Conversations with pictures and videos: prepared as transformers' processors do, and trained with its losses."""

import json
import struct
import sys
import wave
import zlib

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from conversations import losses_by_pytorch, packed, train
from step_twin import StepTwin
from test_preprocess_data import run
from tiny_vision import (AGAIN, ASKED, MIXED, SHOWN, asked, make_gemma3, make_glm4v, make_internvl, make_kimi_k25,
                         make_mistral3, make_processors, make_step3, make_videos, make_vision_model, preprocessing,
                         row_by_row, said, whole_images, write_conversations, write_video)


def prepared_by_theirs(processor, folder, messages):
    """The output of transformers' processor (torchvision) for a conversation."""
    from transformers.image_utils import load_image
    from transformers.video_utils import load_video
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    videos = [load_video(str(folder / part["video"]), sample_indices_fn=lambda metadata,
                         **_: numpy.arange(metadata.total_num_frames))
              for part in parts if part["type"] == "video"]
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
    return processor(text=[text], images=[load_image(str(folder / part["image"])) for part in parts
                                          if part["type"] == "image"] or None,
                     videos=[frames for frames, _ in videos] or None, video_metadata=[data for _, data in videos]
                     or None, return_tensors="pt")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_conversations_with_pictures_are_prepared_and_trained(tmp_path, family):
    """Tokens, grids and pixels as the model's own processor gives them, and the losses of a run on two ranks, where
    batches have images, videos, both or neither, are transformers'."""
    make_processors(tmp_path)
    processor, model = make_videos(tmp_path, family), make_vision_model(tmp_path, family)
    conversations = [[ASKED, said("sat"), AGAIN, said("the mat")], [{"role": "user", "content": "on"}, said("the cat")],
                     [SHOWN, said("cat on")], [MIXED, said("the"), SHOWN, said("sat")]]
    if family == "qwen2_5_vl":
        done = run(tmp_path, "--input-format", "conversations", "--workers", "2", tokenizer=False,
                   lines=[json.dumps({"messages": messages}) for messages in conversations])
        assert done.returncode == 0, done.stderr
    else:
        write_conversations(tmp_path, conversations, tmp_path / "out")
    ours = load_file(tmp_path / "out.vision.safetensors")
    theirs = [prepared_by_theirs(processor, tmp_path, messages) for messages in conversations]
    levels = {"pixel_values": processor.image_processor, "pixel_values_videos": processor.video_processor}
    samples, ends = [], dict.fromkeys(("token", "image", "video", "pixel_values", "pixel_values_videos"), 0)

    def next_rows(name, rows, counter):
        ends[counter] += rows
        return ours[name][ends[counter] - rows:ends[counter]]

    answered = [["sat", "the mat"], ["the cat"], ["cat on"], ["the", "sat"]]
    for number, wanted in enumerate(theirs):
        tokens = next_rows("tokens", ours["sample_ends"][number] - ends["token"], "token").long()
        assert tokens.tolist() == wanted["input_ids"][0].tolist()
        mask = ours["loss_mask"][ends["token"] - len(tokens):ends["token"]].bool()
        learnt = processor.tokenizer.decode(tokens[mask]).replace("<|im_end|>", " <|im_end|> ").split()
        assert learnt == " ".join(f"{answer} <|im_end|>" for answer in answered[number]).split()
        pictures = {}
        for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if pixels not in wanted:
                assert ours[f"{kind}_ends"][number] == ends[kind]
                continue
            if kind == "video":
                pictures["second_per_grid_ts"] = ours["second_per_grid_ts"][ends[kind]:ours["video_ends"][number]]
            grids = next_rows(f"{kind}_grid_thw", ours[f"{kind}_ends"][number] - ends[kind], kind)
            assert torch.equal(grids, wanted[f"{kind}_grid_thw"])
            pictures |= {f"{kind}_grid_thw": grids, pixels: next_rows(pixels, int(grids.prod(1).sum()), pixels)}
            # Both round to whole grey levels when they resize, and may round differently.
            off = (pictures[pixels] - wanted[pixels]).abs().max()
            assert off <= 1.001 / 255 / min(levels[pixels].image_std)
        if "second_per_grid_ts" in wanted:
            assert torch.equal(pictures["second_per_grid_ts"], torch.tensor(wanted["second_per_grid_ts"]))
        if family == "qwen3_vl":
            pictures.pop("second_per_grid_ts", None)
        samples.append((tokens[None], tokens[1:].where(mask[1:], -100),
                        pictures | {"mm_token_type_ids": wanted["mm_token_type_ids"]}))

    seen = train(tmp_path)
    assert seen == pytest.approx(losses_by_pytorch(model, samples), rel=2e-6)  # fp32, sums over two ranks
    assert packed(tmp_path) == pytest.approx(seen, rel=1e-6)
    assert seen[2] < seen[0]
    if family == "qwen2_5_vl":  # each conversation on both ranks
        assert train(tmp_path, "--context-parallel-size", 2) == pytest.approx(seen, rel=2e-6)


def pixels_of(make, ours, grids):
    """Our pixels in the form of the family's own processor."""
    if make in (make_glm4v, make_step3):
        return dict(pixel_values=ours, image_grid_thw=grids)
    return row_by_row(ours, grids) if make is make_kimi_k25 else whole_images(ours, grids)


def model_inputs(make, pictures, wanted):
    """Those of transformers' model."""
    if make is make_gemma3:
        return dict(pixel_values=pictures["pixel_values"], token_type_ids=wanted["token_type_ids"])
    if make is make_glm4v:
        return pictures | dict(mm_token_type_ids=wanted["mm_token_type_ids"])
    return dict(pixel_values=pictures["pixel_values"]) if make is make_internvl else pictures


def difference(make, pictures, wanted):
    """Of our pixels and those of the family's own processor."""
    if make is make_step3:  # it has the whole pictures apart from their squares
        squares, whole = iter(wanted.get("pixel_values_local", ())), iter(wanted["pixel_values"])
        theirs = [each for count in wanted["num_local_patches"].tolist()
                  for each in (*[next(squares) for _ in range(count)], next(whole))]
        ours = StepTwin.tiles(*pictures.values())
        return torch.cat([(one[0] - other).flatten() for one, other in zip(ours, theirs, strict=True)])
    off = pictures["pixel_values"] - wanted["pixel_values"]
    if "image_grid_thw" in wanted:
        assert torch.equal(pictures["image_grid_thw"], wanted["image_grid_thw"])
        return off
    sizes = pictures["image_sizes"].tolist()
    assert sizes == (wanted["image_sizes"].tolist() if make is make_mistral3 else [[16, 16]] * len(sizes))
    return torch.cat([each[:, :rows, :columns].flatten() for each, (rows, columns) in zip(off, sizes)])


@pytest.mark.parametrize("make", [make_mistral3, make_gemma3, make_internvl, make_glm4v, make_kimi_k25, make_step3])
def test_conversations_of_other_towers_are_prepared_and_trained(tmp_path, make):
    """Pixtral has a row of tokens for a row of features, and pictures of several sizes; Gemma 3's tokens of a picture
    see each other; InternVL and Step3-VL cut pictures into tiles. Two, one or no pictures in a conversation."""
    processor, model = make(tmp_path)
    conversations = [[ASKED, said("sat"), AGAIN, said("the mat")], [asked("on"), said("the cat")],
                     [AGAIN, said("cat on")], [ASKED, said("the")]]
    write_conversations(tmp_path, conversations, tmp_path / "out")
    ours = load_file(tmp_path / "out.vision.safetensors")
    samples, token, image, patch = [], 0, 0, 0
    for number, messages in enumerate(conversations):
        wanted = prepared_by_theirs(processor, tmp_path, messages)
        tokens = ours["tokens"][token:ours["sample_ends"][number]].long()
        assert tokens.tolist() == wanted["input_ids"][0].tolist()
        mask = ours["loss_mask"][token:ours["sample_ends"][number]].bool()
        grids = ours["image_grid_thw"][image:ours["image_ends"][number]]
        token, image = ours["sample_ends"][number], ours["image_ends"][number]
        pictures = {}
        if len(grids):
            count = int(grids.prod(1).sum())
            pictures = pixels_of(make, ours["pixel_values"][patch:patch + count], grids)
            patch += count
            # Both round to whole grey levels when they resize, and may round differently.
            off = difference(make, pictures, wanted).abs().max()
            assert off <= 1.001 / 255 / min(processor.image_processor.image_std)
            pictures = model_inputs(make, pictures, wanted)
        samples.append((tokens[None], tokens[1:].where(mask[1:], -100), pictures))
    seen = train(tmp_path)
    assert seen == pytest.approx(losses_by_pytorch(model, samples), rel=2e-6)
    assert packed(tmp_path) == pytest.approx(seen, rel=1e-6)
    assert seen[2] < seen[0]
    assert train(tmp_path, "--context-parallel-size", 2) == pytest.approx(seen, rel=2e-6)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """Runs in this process, so that all wrong inputs share one import of transformers."""
    folder = tmp_path_factory.mktemp("vision")
    make_processors(folder)
    make_videos(folder, "qwen2_5_vl")
    (folder / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    (folder / "cut.png").write_bytes((folder / "a.png").read_bytes()[:300])
    header = bytearray((folder / "a.png").read_bytes())
    header[16:24] = struct.pack(">II", 60000, 60000)  # no OSError in Pillow
    header[29:33] = struct.pack(">I", zlib.crc32(header[12:29]))
    (folder / "huge.png").write_bytes(header)
    Image.new("RGB", (1, 300)).save(folder / "thin.png")
    write_video(folder / "one.mp4", 1, 4, (16, 16))
    write_video(folder / "a.avi", 9, 4, (20, 24))
    for whole, begin, end in (("a.mp4", b"mdat", b"moov"), ("a.avi", b"movi", b"idx1")):
        content = (folder / whole).read_bytes()
        (folder / f"cut_{whole}").write_bytes(content[:(content.index(begin) + content.index(end)) // 2])
    with wave.open(str(folder / "sound.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(1600))
    (folder / "nothing").mkdir()
    (folder / "frames").mkdir()
    for number in range(3):
        noise = numpy.random.RandomState(number).randint(0, 256, (21, 26, 3)).astype("uint8")
        Image.fromarray(noise).save(folder / "frames" / f"{number}.png")
    from preprocess_conversations import Encoder

    return Encoder(preprocessing(folder)), folder


def about(kind, path):
    return [asked([{"type": kind, kind: path}]), said("sat")]


@pytest.mark.parametrize("messages, message", [
    (about("image", "none.png"),
     "none.png: No such file or directory; correct the path or the file, or delete the line"),
    (about("image", "tokenizer.json"), "cannot read the image"),
    (about("image", "cut.png"), "cut.png: image file is truncated"),
    (about("image", "huge.png"), "huge.png: Image size (3600000000 pixels) exceeds"),
    (about("image", "thin.png"), "the image processor refuses a picture"),
    (about("sound", "a.wav"), "content of type 'sound' is not supported; known are text, image, video and audio"),
    (about("video", "none.mp4"), "none.mp4 cannot be opened: No such file or directory"),
    (about("video", "cut_a.mp4"), "cut_a.mp4 cannot be opened: Invalid data found"),
    (about("video", "cut_a.avi"), "ends before frame 2 of the 9 that it announces; it is truncated"),
    (about("video", "sound.wav"), "sound.wav has no pictures, only sound"),
    (about("video", "one.mp4"), "one.mp4 has 1 frames, too few to sample 2 of them"),
    (about("video", "nothing"), "nothing is a folder without frames"),
    (about("video", "frames"), "frames is a folder of frames; say beside it how many of them make a second"),
    ([asked("<|image_pad|>"), said("sat")], "the text contains <|image_pad|>"),
    ([asked("<|video_pad|>"), said("sat")], "the text contains <|video_pad|>"),
    ([ASKED], "must begin with a question and end with an answer"),
    ([], "its list 'messages' is empty"),
    ([{"role": "robot", "content": "the"}], "a message has the role 'robot'; known are system, developer, user"),
], ids=["missing", "not an image", "cut", "huge", "thin", "sound", "missing video", "cut video", "cut in its frames",
        "no video", "one frame", "empty folder", "folder", "placeholder", "video placeholder", "unanswered", "empty",
        "role"])
def test_wrong_conversations_are_named(encoder, messages, message):
    encode, folder = encoder[0].encode, encoder[1]
    from preprocess_input import InputError
    with pytest.raises(InputError) as refused:
        encode(("in.jsonl, line 2", {"messages": messages}, str(folder)))
    assert message in str(refused.value) and str(refused.value).startswith("in.jsonl, line 2: ")


def test_videos_are_those_of_both_processors(encoder, monkeypatch):
    """The choice of frames, their size, and frames that do not fill the last patch."""
    from preprocess_input import InputError
    from preprocess_videos import DEFAULTS, VideoFile, VideoProcessor
    from transformers import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata
    folder, random = encoder[1], numpy.random.RandomState(0)
    frames = numpy.stack([numpy.asarray(Image.open(file)) for file in sorted((folder / "frames").iterdir())])
    for kind in (Qwen2VLVideoProcessor, Qwen3VLVideoProcessor):
        changed = {"patch_size": 4, "cap_pixels_per_frame": True, "size": {"shortest_edge": 3000,
                                                                           "longest_edge": 60000}}
        theirs, ours = kind(**changed), VideoProcessor(folder)
        ours.name, ours.parameters = kind.__name__, {**DEFAULTS[kind.__name__], **changed}
        for _ in range(200):
            total, fps = int(random.randint(2, 3000)), float(random.choice([23.976, 25, 30, 1, 0.7]))
            for chosen in ({"fps": float(random.choice([0.5, 1, 2, 3.3])), "num_frames": None},
                           {"fps": None, "num_frames": int(random.randint(2, total + 1))}):
                if kind is Qwen2VLVideoProcessor and chosen["num_frames"] and round(
                    chosen["num_frames"] / 2) * 2 > total:
                    continue  # refused by both
                ours.parameters |= {**chosen, "do_sample_frames": True}
                wanted = theirs.sample_frames(VideoMetadata(total_num_frames=total, fps=fps), **chosen)
                # By rounding, Qwen2VLVideoProcessor at times asks for a frame behind the last.
                assert ours.sample(total, fps).tolist() == wanted[wanted < total].tolist()
            height, width, count = (int(number) for number in random.randint(9, 900, 3))
            count += 1 - count // 450  # odd ones too
            video = torch.empty(1, count, 3, height, width, device="meta")
            wanted = theirs.resize(video, size=theirs.size, resample=3, factor=8, temporal_factor=2,
                                   cap_pixels_per_frame=True)
            assert ours.size_of(count, height, width) == tuple(wanted.shape[-2:])
        made = ours.process(folder / "frames", 2)
        wanted = theirs(videos=[frames], do_sample_frames=False, return_tensors="np")
        assert made.grid == tuple(wanted["video_grid_thw"][0]) and made.grid[0] == 2
        # In grey levels; two in 1 of 100,000, as torchvision rounds with weights of 16 bits, and Pillow with finer
        # ones.
        off = abs(made.pixels - wanted["pixel_values_videos"]) * 255 * min(theirs.image_std)
        assert (off > 1.001).mean() < 1e-4 and off.max() < 2.001
        assert made.times == [0.25, 1.0] and made.seconds_per_grid == 1.0
    images = [Image.fromarray(frame) for frame in frames]
    images[0].save(folder / "a.gif", save_all=True, append_images=images[1:], duration=250)
    video = VideoFile(folder / "a.gif")  # does not say how many frames it has
    assert video.total == 3 and video.fps == 4 and len(list(video.frames([0, 2, 2]))) == 3
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InputError, match="videos need the package av"):
        VideoFile(folder / "a.mp4")


def test_each_family_has_its_video_processor():
    """That of transformers; Qwen3-VL's text says times, also in Qwen3.5."""
    from preprocess_videos import PROCESSORS
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES
    for family, name in PROCESSORS.items():
        of_files = family.removesuffix("_thinker")
        assert VIDEO_PROCESSOR_MAPPING_NAMES[of_files]["torchvision"] == name
        assert (PROCESSOR_MAPPING_NAMES[of_files] == "Qwen3VLProcessor") == (name == "Qwen3VLVideoProcessor")
