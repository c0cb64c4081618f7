#!/usr/bin/env python3
"""Videos or pictures with captions to features for models of latents: DIR/data.jsonl and DIR/features/N.pt, in the form
of MindSpeed-MM's feature folders (framework/data/latent_set.h).

The encoders are those of a diffusers pipeline of Wan (text to video, image to video, VACE), HunyuanVideo 1.5 or, for
pictures, Flux.1 or Qwen-Image. A line of --input is {"video": PATH, "text": CAPTION}, or with "image" in place of
"video"; VACE also takes "vace_video" and "vace_video_mask". Needs `diffusers`, `transformers`, `torch` and, for Wan,
`ftfy`; video files also `av`.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from preprocess_images import read_image, resize
from preprocess_input import BadRecords, InputError, RecordError, input_files, model_folder, records_of
from preprocess_videos import FrameFolder, VideoFile

# by what is learnt
WAN = {"t2v": "WanPipeline", "i2v": "WanImageToVideoPipeline", "vace": "WanVACEPipeline"}
HUNYUAN = {"t2v": "HunyuanVideo15Pipeline", "i2v": "HunyuanVideo15ImageToVideoPipeline"}
FLUX, QWEN = {"t2i": "FluxPipeline"}, {"t2i": "QwenImagePipeline"}
FAMILIES = (WAN, HUNYUAN, FLUX, QWEN)
BICUBIC = 3


def parse_arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of the diffusers pipeline")
    parser.add_argument("--task", choices=(*WAN, *FLUX),
                        help="what is learnt: a video of a text, of its first frame too, or of VACE's controls "
                             "(default: what the pipeline is for)")
    parser.add_argument("--input", required=True, nargs="+", metavar="FILE",
                        help="JSON lines, or an array; or MindSpeed-MM's data.txt, lines of FOLDER,FILE")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write; give it as --data-path")
    parser.add_argument("--folder", metavar="DIR", help="where relative paths begin (default: the input file's folder)")
    parser.add_argument("--size", required=True, nargs="+", metavar="HxW", help="sizes in pixels; each video takes the "
                        "one whose shape is nearest to its own, and is cut to it at the middle")
    parser.add_argument("--num-frames", type=int, default=81, metavar="N", help="frames of a video: the first N, or "
                        "the most of a shorter one that the VAE takes (default: 81)")
    parser.add_argument("--fps", type=float, metavar="F", help="take so many frames of a second (default: all)")
    parser.add_argument("--max-text-length", type=int, metavar="N", help="tokens of a caption; what is behind its end "
                        "is padding (default: 512, HunyuanVideo's 1000)")
    parser.add_argument("--device", default="cpu", help="of the encoders (default: cpu)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                        help="of the encoders and of the text features (default: float32)")
    parser.add_argument("--skip-bad-records", action="store_true")
    parser.add_argument("--log-interval", type=int, default=100, metavar="N")
    return parser.parse_args(words)


def sizes_of(words):
    sizes = []
    for word in words:
        numbers = word.lower().split("x")
        if len(numbers) != 2 or not all(number.isdigit() and int(number) > 0 for number in numbers):
            raise InputError(f"--size {word} is no size; give rows and columns of pixels, as 480x832")
        sizes.append(tuple(map(int, numbers)))
    return sizes


def load_pipeline(folder, task, dtype, device):
    folder = model_folder("--model", folder)
    try:
        name = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))["_class_name"]
    except (OSError, ValueError, KeyError):
        raise InputError(f"{folder} is no folder of a diffusers pipeline: it has no model_index.json with a "
                         "_class_name") from None
    family = next((each for each in FAMILIES if name in each.values()), None)
    if family is None:
        raise InputError(f"{folder} is a {name}; features are written for "
                         f"{', '.join(each for family in FAMILIES for each in family.values())}")
    if task and task not in family:
        raise InputError(f"--task {task} is not for a {name}; give {' or '.join(family)}")
    name = family[task] if task else name
    try:
        import diffusers
        import torch
    except ImportError as error:
        raise InputError(f"{sys.executable} has no package {error.name}; install it with `pip install diffusers "
                         "transformers torch`") from None
    left_out = {"transformer": None} | ({"transformer_2": None} if family is WAN else {})
    pipeline = getattr(diffusers, name).from_pretrained(folder, **left_out, dtype=getattr(torch, dtype))
    return pipeline.to(device)


class Encoder:
    """A pipeline's encoders, used as its own __call__ uses them."""

    def __init__(self, flags, pipeline):
        import torch
        self.torch = torch
        self.flags, self.sizes, self.pipeline = flags, sizes_of(flags.size), pipeline
        self.kind = type(pipeline).__name__

    def pixels(self, path):
        """[1, 3, F, H, W] from -1 to 1."""
        try:
            return self.prepared_pixels(path)
        except (ValueError, OSError) as error:
            raise RecordError(f"{path} {error}") from None

    def prepared_pixels(self, path):
        torch = self.torch
        if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp", ".bmp"):
            frames = [read_image(path)]
        else:
            video = FrameFolder(path, self.flags.fps or 1) if path.is_dir() else VideoFile(path)
            step = video.fps / self.flags.fps if self.flags.fps else 1
            numbers = [round(i * step) for i in range(self.flags.num_frames) if round(i * step) < video.total]
            between = getattr(self.pipeline, "vae_scale_factor_temporal", None)
            if between is None:
                raise RecordError("is a video, and the model's are pictures")
            import numpy
            frames = list(video.frames(numpy.array(numbers[:(len(numbers) - 1) // between * between + 1])))
        own = frames[0].width / frames[0].height
        rows, columns = min(self.sizes, key=lambda size: abs(size[1] / size[0] - own))
        cut = []
        for frame in frames:
            scale = max(rows / frame.height, columns / frame.width)
            whole = resize(frame, max(rows, round(frame.height * scale)), max(columns, round(frame.width * scale)),
                           BICUBIC)
            left, top = (whole.width - columns) // 2, (whole.height - rows) // 2
            cut.append(whole.crop((left, top, left + columns, top + rows)))
        return self.prepared(cut, rows, columns).to(self.flags.device, self.pipeline.vae.dtype)

    def prepared(self, frames, rows, columns):
        return self.pipeline.video_processor.preprocess_video(frames, rows, columns)

    def further(self, pixels, record, path_of):
        return {}

    def first_picture(self, pixels):
        picture = (pixels[0, :, 0].float().clamp(-1, 1) + 1) / 2
        return self.pipeline.video_processor.numpy_to_pil(picture.permute(1, 2, 0)[None].cpu().numpy())[0]

    def features(self, record, folder):
        path = next((record[key] for key in ("video", "image", "path", "file") if key in record), None)
        caption = next((record[key] for key in ("text", "caption", "cap") if key in record), None)
        caption = caption[0] if isinstance(caption, list) and caption else caption
        if not isinstance(path, str) or not isinstance(caption, str):
            raise RecordError('a record needs "video" or "image", a path, and "text", its caption')
        pixels = self.pixels(folder / path)
        features = {"video": self.latents(pixels), **self.text(caption)}
        return features | self.further(pixels, record, lambda name: folder / name)


class WanEncoder(Encoder):
    def __init__(self, flags, pipeline):
        super().__init__(flags, pipeline)
        self.mean, self.deviation = (
            self.torch.tensor(values, device=flags.device).view(1, -1, 1, 1, 1)
            for values in (pipeline.vae.config.latents_mean, pipeline.vae.config.latents_std))

    def text(self, caption):
        features = self.pipeline.encode_prompt(caption, do_classifier_free_guidance=False, device=self.flags.device,
                                               max_sequence_length=self.flags.max_text_length or 512)[0]
        return {"prompt_ids": features[0].cpu()}

    def latents(self, pixels):
        encoded = self.pipeline.vae.encode(pixels).latent_dist.mode()
        return ((encoded.float() - self.mean) / self.deviation)[0].cpu()

    def further(self, pixels, record, path_of):
        if self.kind == "WanImageToVideoPipeline":
            return self.first_frame(pixels)
        return self.controls(pixels, record, path_of) if self.kind == "WanVACEPipeline" else {}

    def first_frame(self, pixels):
        """What the pipeline of images to videos makes of the first frame."""
        frames, rows, columns = pixels.shape[2:]
        first = pixels[:, :, 0]
        if self.pipeline.config.expand_timesteps:
            return {"clean_frames": 1}
        _, conditions = self.pipeline.prepare_latents(
            first, 1, self.pipeline.vae.config.z_dim, rows, columns, frames, self.torch.float32, self.flags.device)
        features = {"i2v_vae_feature": conditions[0].float().cpu()}
        if self.pipeline.image_encoder is not None:
            image = self.pipeline.encode_image(self.first_picture(pixels), self.flags.device)
            features["i2v_clip_feature"] = image[0].cpu()
        return features

    def controls(self, pixels, record, path_of):
        """VACE: the control video without and with its masked parts, and the mask."""
        if "vace_reference_image" in record:
            raise RecordError("vace_reference_image is not supported; leave it out")
        control, mask = self.torch.zeros_like(pixels), self.torch.ones_like(pixels)
        if "vace_video" in record:
            control = self.pixels(path_of(record["vace_video"]))
        if "vace_video_mask" in record:
            mask = ((self.pixels(path_of(record["vace_video_mask"])) + 1) / 2).clamp(0, 1)
        if not control.shape == mask.shape == pixels.shape:
            raise RecordError("vace_video and vace_video_mask must have the frames and the shape of the video")
        masked = self.pipeline.prepare_video_latents(control, mask, [[]], None, self.flags.device)[0]
        return {"vace_context": self.torch.cat([masked.float(), self.vace_mask(mask)]).cpu()}

    def vace_mask(self, mask):
        """[64, F, H, W]: the pixels of a latent as channels (WanVACEPipeline.prepare_masks, without a transformer)."""
        space, time = self.pipeline.vae_scale_factor_spatial, self.pipeline.vae_scale_factor_temporal
        one = mask[0, 0].float()
        frames, rows, columns = one.shape
        one = one.view(frames, rows // space, space, columns // space, space).permute(2, 4, 0, 1, 3).flatten(0, 1)
        size = ((frames + time - 1) // time, rows // space, columns // space)
        return self.torch.nn.functional.interpolate(one[None], size=size, mode="nearest-exact")[0]


class HunyuanEncoder(Encoder):
    def text(self, caption):
        self.pipeline.tokenizer_max_length = self.flags.max_text_length or self.pipeline.tokenizer_max_length
        text, mask, letters, letter_mask = self.pipeline.encode_prompt(caption, device=self.flags.device)
        return {"prompt_ids": [text[0].cpu(), letters[0].cpu()],
                "prompt_mask": [mask[0].bool().cpu(), letter_mask[0].bool().cpu()]}

    def latents(self, pixels):
        vae = self.pipeline.vae
        return (vae.encode(pixels).latent_dist.mode().float() * vae.config.scaling_factor)[0].cpu()

    def further(self, pixels, record, path_of):
        if self.kind == HUNYUAN["t2v"]:
            return {}
        picture, (rows, columns), device = self.first_picture(pixels), pixels.shape[3:], self.flags.device
        latents = self.latents(pixels)[None].to(device)
        condition = self.pipeline.prepare_cond_latents_and_mask(latents, picture, 1, rows, columns,
                                                                self.torch.float32, device)
        image = self.pipeline.encode_image(picture, 1, device, self.pipeline.vae.dtype)
        return {"cond_latents": self.torch.cat(condition, 1)[0].cpu(), "vision_states": image[0].cpu()}


class PictureEncoder(Encoder):
    def prepared(self, frames, rows, columns):
        return self.pipeline.image_processor.preprocess(frames, rows, columns).unsqueeze(2)


class FluxEncoder(PictureEncoder):
    def text(self, caption):
        text, pooled, _ = self.pipeline.encode_prompt(caption, None, device=self.flags.device,
                                                      max_sequence_length=self.flags.max_text_length or 512)
        return {"prompt_ids": text[0].cpu(), "pooled_prompt": pooled[0].cpu()}

    def latents(self, pixels):
        config = self.pipeline.vae.config
        encoded = self.pipeline.vae.encode(pixels[:, :, 0]).latent_dist.mode().float()
        return ((encoded - config.shift_factor) * config.scaling_factor)[0].unsqueeze(1).cpu()


class QwenEncoder(PictureEncoder):
    """Captions have as many tokens as they have: they are padded to one length."""

    def text(self, caption):
        most = self.flags.max_text_length or 512
        text, _ = self.pipeline.encode_prompt(caption, device=self.flags.device, max_sequence_length=most)
        count = text.shape[1]
        padded = self.torch.nn.functional.pad(text[0], (0, 0, 0, most - count))
        return {"prompt_ids": padded.cpu(), "prompt_mask": self.torch.arange(most) < count}

    def latents(self, pixels):
        config = self.pipeline.vae.config
        mean, deviation = (self.torch.tensor(values, device=pixels.device).view(1, -1, 1, 1, 1)
                           for values in (config.latents_mean, config.latents_std))
        encoded = self.pipeline.vae.encode(pixels).latent_dist.mode().float()
        return ((encoded - mean) / deviation)[0].cpu()


def encoder_of(flags):
    pipeline = load_pipeline(flags.model, flags.task, flags.dtype, flags.device)
    encoders = zip(FAMILIES, (WanEncoder, HunyuanEncoder, FluxEncoder, QwenEncoder), strict=True)
    return next(each for family, each in encoders if type(pipeline).__name__ in family.values())(flags, pipeline)


def sources_of(flags):
    """(folder of relative paths, file of records). A data.txt of MindSpeed-MM has a line "FOLDER,FILE" for each."""
    for file in input_files(flags.input):
        if not file.endswith(".txt"):
            yield Path(flags.folder) if flags.folder else Path(file).parent, file
            continue
        for line in filter(None, map(str.strip, Path(file).read_text(encoding="utf-8").splitlines())):
            folder, comma, records = line.partition(",")
            if not comma:
                raise InputError(f"{file}: the line {line!r} is not FOLDER,FILE")
            yield Path(folder.strip()), input_files([records.strip()])[0]


def write_features(flags):
    output, sources = Path(flags.output), list(sources_of(flags))
    if (output / "data.jsonl").exists():
        raise InputError(f"{output} has a data.jsonl already; remove it, or give another --output")
    encoder = encoder_of(flags)
    torch = encoder.torch
    (output / "features").mkdir(parents=True, exist_ok=True)
    bad, lines = BadRecords(flags.skip_bad_records), []
    with torch.inference_mode():
        torch.save(encoder.text(""), output / "empty_prompt.pt")
        for folder, file in sources:
            for number, record in records_of(file):
                try:
                    if isinstance(record, RecordError):
                        raise record
                    if not isinstance(record, dict):
                        raise RecordError("a record must be an object")
                    features = encoder.features(record, folder)
                except RecordError as error:
                    bad.add(RecordError(f"{file}, line {number}: {error}"))
                    continue
                name = f"features/{len(lines):07}.pt"
                torch.save(features, output / name)
                lines.append(json.dumps({"file": name, "shape": list(features["video"].shape)}))
                if len(lines) % flags.log_interval == 0:
                    print(f"{len(lines)} samples", file=sys.stderr, flush=True)
    bad.tell()
    if not lines:
        raise InputError("there is no sample in --input; nothing was written")
    part = output / "data.jsonl.part"
    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.replace(part, output / "data.jsonl")
    print(f"wrote the features of {len(lines)} samples to {output}")


if __name__ == "__main__":
    try:
        write_features(parse_arguments())
    except InputError as error:
        sys.exit(f"preprocess_latents: {error}")
