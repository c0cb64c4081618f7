#!/usr/bin/env python3
"""Features that LTX-2's trainer has written (.precomputed: latents, conditions, audio_latents) to those that models of
latents read here (framework/data/latent_set.h): DIR/data.jsonl and DIR/features/N.pt.

The connectors of a diffusers pipeline of LTX-2 make the text features; the trainer runs them in each step. Needs
`diffusers`, `transformers` and `torch`.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from preprocess_input import InputError, model_folder


def parse_arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of the diffusers pipeline")
    parser.add_argument("--input", required=True, metavar="DIR", help=".precomputed, or the folder that has it")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write; give it as --data-path")
    parser.add_argument("--latents", default="latents", metavar="NAME", help="folder of the videos (default: latents)")
    parser.add_argument("--conditions", default="conditions", metavar="NAME", help="of the texts (default: conditions)")
    parser.add_argument("--sounds", metavar="NAME", help="of the sounds; without it videos alone are trained")
    parser.add_argument("--fps", type=float, default=24, metavar="F", help="frames of a second where a file does not "
                        "say it (default: 24)")
    parser.add_argument("--max-samples", type=int, metavar="N", help="write the first N")
    parser.add_argument("--device", default="cpu", help="of the connectors (default: cpu)")
    return parser.parse_args(words)


def pairs_of(flags):
    """(video, text, sound or None) of each sample that has all of them."""
    root = Path(flags.input)
    root = root / ".precomputed" if (root / ".precomputed").is_dir() else root
    for name in filter(None, (flags.latents, flags.conditions, flags.sounds)):
        if not (root / name).is_dir():
            raise InputError(f"{root} has no folder {name}; give the folder that LTX-2's trainer has written")
    for video in sorted((root / flags.latents).rglob("*.pt")):
        own = video.relative_to(root / flags.latents)
        texts = [root / flags.conditions / own,
                 root / flags.conditions / own.with_name(f"condition_{own.stem.removeprefix('latent_')}.pt")]
        text = next((each for each in texts if each.exists()), None)
        sound = root / flags.sounds / own if flags.sounds else None
        if text and (sound is None or sound.exists()):
            yield video, text, sound


def number(value):
    return value.reshape(-1)[0].item() if hasattr(value, "reshape") else value[0] if isinstance(value, list) else value


def video_of(stored, fps):
    latents = stored["latents"]
    if latents.dim() == 2:  # patches, frames first
        sizes = [int(number(stored[key])) for key in ("num_frames", "height", "width")]
        latents = latents.reshape(*sizes, latents.shape[-1]).permute(3, 0, 1, 2)
    rate = stored.get("fps")
    return latents.contiguous(), float(fps if rate is None else number(rate))


def sound_of(stored):
    """[S, C] from [C, S, bins], or as it is."""
    latents = stored["latents"]
    while latents.dim() > 3 or (latents.dim() == 3 and latents.shape[0] == 1):
        latents = latents[0]
    return (latents.permute(1, 0, 2).flatten(1) if latents.dim() == 3 else latents).contiguous()


class Connectors:
    def __init__(self, folder, device):
        try:
            import torch
            from diffusers.pipelines.ltx2 import LTX2TextConnectors
        except ImportError as error:
            raise InputError(f"{sys.executable} has no package {error.name}; install it with `pip install diffusers "
                             "transformers torch`") from None
        folder = model_folder("--model", folder)
        if not (folder / "connectors").is_dir():
            raise InputError(f"{folder} has no folder connectors; give a diffusers pipeline of LTX-2")
        self.torch, self.device = torch, device
        self.both = LTX2TextConnectors.from_pretrained(folder, subfolder="connectors").to(device).eval()

    def __call__(self, stored):
        """Features of the video's and of the sound's text and their mask, as LTX2TextConnectors makes them."""
        torch = self.torch
        text = stored["prompt_embeds"].to(self.device, torch.float32)
        text = text if text.dim() == 3 else text[None]
        mask = stored.get("prompt_attention_mask")
        mask = torch.ones(text.shape[:2]) if mask is None else mask.reshape(text.shape[:2])
        added = (mask.to(self.device, torch.int64) - 1).to(text.dtype)[:, None, None] * torch.finfo(text.dtype).max
        video, video_mask = self.both.video_connector(text, added)
        sound, _ = self.both.audio_connector(text, added)
        counted = (video_mask < 1e-6).reshape(video.shape[:2])
        return (video * counted.unsqueeze(-1))[0].cpu(), sound[0].cpu(), counted[0].cpu()


def write_features(flags):
    output = Path(flags.output)
    if (output / "data.jsonl").exists():
        raise InputError(f"{output} has a data.jsonl already; remove it, or give another --output")
    pairs = list(pairs_of(flags))[:flags.max_samples]
    if not pairs:
        raise InputError(f"{flags.input} has no sample with a file in each folder; nothing was written")
    connectors = Connectors(flags.model, flags.device)
    torch = connectors.torch
    (output / "features").mkdir(parents=True, exist_ok=True)
    lines = []
    with torch.inference_mode():
        for video, text, sound in pairs:
            latents, fps = video_of(torch.load(video, map_location="cpu", weights_only=True), flags.fps)
            of_video, of_sound, mask = connectors(torch.load(text, map_location="cpu", weights_only=True))
            features = {"video": latents, "prompt_ids": of_video, "prompt_mask": mask,
                        "frame_rate": torch.tensor(fps)}
            if sound:
                features |= {"sound": sound_of(torch.load(sound, map_location="cpu", weights_only=True)),
                             "prompt_ids": [of_video, of_sound], "prompt_mask": [mask, mask]}
            name = f"features/{len(lines):07}.pt"
            torch.save(features, output / name)
            lines.append(json.dumps({"file": name, "shape": list(latents.shape)}))
    part = output / "data.jsonl.part"
    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.replace(part, output / "data.jsonl")
    print(f"wrote the features of {len(lines)} samples to {output}")


if __name__ == "__main__":
    try:
        write_features(parse_arguments())
    except InputError as error:
        sys.exit(f"preprocess_ltx2: {error}")
