#!/usr/bin/env python3
"""A small Wan learns to draw videos of moving shapes: launch/examples/moving_shapes.py RUN

The latents are pixels, so that nothing but megashard and torch is needed. A caption names a shape and a colour. The
script writes videos, trains, lets `megashard infer` sample videos for captions, and compares each with
all videos that there can be. RUN/samples.png shows some, one a row. Some videos are held out of training, for the
validation loss.
"""
import argparse
import itertools
import json
import os
import pathlib
import shutil
import subprocess

import torch

FRAMES, SIDE, SPAN = 3, 12, 4  # of a video; rows and columns of a shape
COLOURS = {"red": (1.0, -1.0, -1.0), "green": (-1.0, 1.0, -1.0), "blue": (-1.0, -1.0, 1.0)}
STEP = 2  # columns a frame
SHAPES = ("square", "ring")
CAPTIONS = list(itertools.product(SHAPES, COLOURS))
WORDS = [*SHAPES, *COLOURS]
CONFIG = {"_class_name": "WanTransformer3DModel", "patch_size": [1, 2, 2], "num_attention_heads": 4,
          "attention_head_dim": 32, "in_channels": 3, "out_channels": 3, "text_dim": len(WORDS), "freq_dim": 64,
          "ffn_dim": 384, "num_layers": 4, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-6,
          "rope_max_seq_len": 64, "image_dim": None, "added_kv_proj_dim": None}


def video(caption, row, column):
    """[3, FRAMES, SIDE, SIDE] from -1 to 1: a shape on grey, which leaves to the right and comes back."""
    shape, colour = caption
    pixels = torch.zeros(3, FRAMES, SIDE, SIDE)
    for frame in range(FRAMES):
        for y, x in itertools.product(range(SPAN), range(SPAN)):
            if shape == "square" or {x, y} & {0, SPAN - 1}:
                place = (column + x + STEP * frame) % SIDE
                pixels[:, frame, row + y, place] = torch.tensor(COLOURS[colour])
    return pixels


def places():
    """Rows and columns where a shape begins, on the grid of the patches."""
    return itertools.product(range(0, SIDE - SPAN + 1, 2), range(0, SIDE, 2))


def text_features(caption):
    """[2, words]: one-hot words; all zeros for the empty prompt."""
    features = torch.zeros(2, len(WORDS))
    for place, word in enumerate(caption):
        features[place, WORDS.index(word)] = 1
    return features


def write_features(folder, samples):
    (folder / "features").mkdir(parents=True)
    torch.save({"prompt_ids": text_features(())}, folder / "empty_prompt.pt")
    lines = []
    for number, (caption, pixels) in enumerate(samples):
        torch.save({"video": pixels, "prompt_ids": text_features(caption)}, folder / f"features/{number}.pt")
        lines.append(json.dumps({"file": f"features/{number}.pt", "shape": list(pixels.shape)}))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")


def program():
    built = pathlib.Path(__file__).resolve().parents[2] / "build" / "launch" / "megashard"
    return os.environ.get("MEGASHARD_BIN") or (str(built) if built.exists() else shutil.which("megashard"))


def rated(folder):
    """(share of samples that are nearest to a video of their caption, mean distance to the nearest one, distance of an
    empty video, the samples)."""
    known = [(caption, video(caption, *place)) for caption in CAPTIONS for place in places()]
    videos = torch.stack([pixels for _, pixels in known]).flatten(1)
    samples = torch.stack([torch.load(folder / json.loads(line)["file"])["video"]
                           for line in (folder / "data.jsonl").read_text().splitlines()])
    distances = torch.cdist(samples.flatten(1), videos) ** 2 / videos.shape[1]
    nearest = distances.min(1)
    right = [known[place][0] == CAPTIONS[number % len(CAPTIONS)] for number, place in enumerate(nearest.indices)]
    return sum(right) / len(right), float(nearest.values.mean()), float(videos.square().mean()), samples


def draw(samples, file):
    from PIL import Image

    rows = samples.clamp(-1, 1).add(1).mul(127.5).byte().permute(0, 3, 2, 4, 1)  # sample, row, frame, column, colour
    sheet = rows.reshape(len(samples) * SIDE, FRAMES * SIDE, 3).numpy()
    Image.fromarray(sheet).resize((FRAMES * SIDE * 4, len(samples) * SIDE * 4), Image.Resampling.NEAREST).save(file)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path, help="folder of the run, which is made")
    parser.add_argument("--steps", type=int, default=3000, help="of training (3000)")
    parser.add_argument("--ranks", type=int, default=2, help="of training and sampling (2)")
    options = parser.parse_args()
    run, ranks = options.run, str(options.ranks)
    run.mkdir(parents=True)
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text(json.dumps(CONFIG))
    videos = [(caption, video(caption, *place)) for caption in CAPTIONS for place in places()]
    order = torch.randperm(len(videos), generator=torch.Generator().manual_seed(0)).tolist()
    write_features(run / "held_out", [videos[number] for number in order[:20]])
    write_features(run / "videos", [videos[number] for number in order[20:]])
    write_features(run / "captions", [(caption, video(caption, 0, 0)) for caption in CAPTIONS * 8])
    (run / "fsdp2.yaml").write_text("sub_modules_to_wrap: ['blocks.{*}']\n")
    common = ["--use-torch-fsdp2", "--fsdp2-config-path", run / "fsdp2.yaml", "--hf-model", run / "model",
              "--ckpt-format", "torch_dcp"]
    start = [program(), "launch", "-n", ranks, "--"]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}

    def megashard(*words):
        subprocess.run([str(word) for word in [*start, *words]], check=True, env=environment)

    megashard("pretrain", *common, "--from-scratch", "--train-data-path", run / "videos",
              "--valid-data-path", run / "held_out", "--objective", "flow-matching",
              "--timestep-sampling", "logit-normal", "--caption-dropout-rate", 0.1,
              "--micro-batch-size", 16, "--global-batch-size", 32,
              "--train-iters", options.steps, "--lr", 2e-3, "--min-lr", 1e-4, "--lr-decay-style", "cosine",
              "--lr-warmup-iters", options.steps // 30, "--adam-beta2", 0.99, "--eval-interval", options.steps,
              "--eval-iters", 1, "--log-interval", 100, "--save", run / "checkpoints",
              "--save-interval", options.steps)
    megashard("infer", *common, "--load", run / "checkpoints", "--data-path", run / "captions",
              "--micro-batch-size", 8, "--latents", run / "samples", "--sampling-steps", 30, "--guidance-scale", 2)
    share, distance, empty, samples = rated(run / "samples")
    draw(samples[:2 * len(CAPTIONS)], run / "samples.png")
    print(f"{100 * share:.0f}% of the samples are nearest to a video of their caption; mean distance {distance:.3f} "
          f"({empty:.3f} without a shape)")


if __name__ == "__main__":
    main()
