"""PREFIX.vision.safetensors: samples as the preprocessing makes them, and the file that the runtime maps."""

import array
import json
import math
import os
import shutil
import struct
from typing import NamedTuple


class Pictures(NamedTuple):
    grids: list = []
    pixels: bytes = b""
    width: int = 0  # values per patch


class Sounds(NamedTuple):
    lengths: list = []  # frames of each clip
    frames: bytes = b""
    width: int = 0  # values per frame


class Sample(NamedTuple):
    tokens: list
    mask: bytes
    images: Pictures = Pictures()
    videos: Pictures = Pictures()
    seconds: list = []  # per step of the grid, for each video
    told: list = []  # reports (conversation_forms.py) about parts of the record that the sample lacks
    sounds: Sounds = Sounds()
    values: dict = {}  # NAME -> number, the same names for all samples of a set


class PictureWriter:
    """Grids of images or of videos, and their pixels in a file of their own until all are there."""

    def __init__(self, path):
        self.grids, self.ends, self.patches, self.width = array.array("q"), array.array("q"), 0, 0
        self.path = path
        self.values = open(path, "w+b")

    def add(self, pictures):
        for grid in pictures.grids:
            self.grids.extend(grid)
        self.ends.append(len(self.grids) // 3)
        if pictures.grids:
            self.width = pictures.width
            self.patches += len(pictures.pixels) // (4 * self.width)
            self.values.write(pictures.pixels)

    @property
    def count(self):
        return len(self.grids) // 3

    @property
    def shape(self):
        return [self.patches, self.width]


class SoundWriter:
    """Lengths of clips, and their frames in a file of their own until all are there."""

    def __init__(self, path):
        self.lengths, self.ends, self.frame_ends, self.width = array.array("q"), array.array("q"), array.array("q"), 0
        self.frames = 0
        self.path = path
        self.values = open(path, "w+b")

    def add(self, sounds):
        self.lengths.extend(sounds.lengths)
        self.ends.append(len(self.lengths))
        self.frames += sum(sounds.lengths)
        self.frame_ends.append(self.frames)
        if sounds.lengths:
            self.width = sounds.width
            self.values.write(sounds.frames)

    @property
    def count(self):
        return len(self.lengths)

    @property
    def shape(self):
        return [self.frames, self.width]


def is_in_file(data):
    return isinstance(data, (PictureWriter, SoundWriter))


class Writer:
    """The set; it gets its name in finish(), so that half a set never looks whole."""

    def __init__(self, prefix, flags, inputs):
        self.path = prefix + ".vision.safetensors"
        self.facts = {"flags": flags, "inputs": {os.path.basename(file): str(os.path.getsize(file)) for file in inputs}}
        self.tokens, self.mask, self.sample_ends, self.seconds = array.array("i"), bytearray(), array.array(
            "q"), array.array("f")
        self.values = {}
        self.images = PictureWriter(self.path + ".images.partial")
        self.videos = PictureWriter(self.path + ".videos.partial")
        self.sounds = SoundWriter(self.path + ".sounds.partial")

    def add(self, sample):
        self.tokens.extend(sample.tokens)
        self.mask += sample.mask
        self.sample_ends.append(len(self.tokens))
        self.images.add(sample.images)
        self.videos.add(sample.videos)
        self.sounds.add(sample.sounds)
        self.seconds.extend(sample.seconds)
        for name, value in sample.values.items():
            self.values.setdefault(name, array.array("f")).append(value)

    def finish(self):
        kinds = [("image", "pixel_values", self.images)]
        if self.videos.count:
            kinds.append(("video", "pixel_values_videos", self.videos))
        arrays = [("sample_ends", "I64", [len(self.sample_ends)], self.sample_ends)]  # widest first: aligned
        arrays += [(f"{kind}_ends", "I64", [len(of.ends)], of.ends) for kind, _, of in kinds]
        arrays += [(f"{kind}_grid_thw", "I64", [of.count, 3], of.grids) for kind, _, of in kinds]
        if self.sounds.count:
            of = self.sounds
            arrays += [("items.audio_feature_lengths", "I64", [of.count], of.lengths),
                       ("item_ends.audio_feature_lengths", "I64", [len(of.ends)], of.ends),
                       ("item_ends.input_features", "I64", [len(of.ends)], of.frame_ends),
                       ("items.input_features", "F32", of.shape, of)]
        arrays += [(name, "F32", of.shape, of) for _, name, of in kinds]
        arrays += [("second_per_grid_ts", "F32", [self.videos.count], self.seconds)] if self.videos.count else []
        arrays += [(f"conversation.{name}", "F32", [len(of)], of) for name, of in self.values.items()]
        arrays += [("tokens", "I32", [len(self.tokens)], self.tokens), ("loss_mask", "U8", [len(self.mask)], self.mask)]
        facts = {name: json.dumps(of) for name, of in self.facts.items()}
        header, offset = {"__metadata__": {"format": "pt", **facts}}, 0
        for name, dtype, shape, data in arrays:
            size = 4 * math.prod(shape) if is_in_file(data) else memoryview(data).nbytes
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(self.path + ".partial", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _, _, _, data in arrays:
                if is_in_file(data):
                    data.values.seek(0)
                    shutil.copyfileobj(data.values, file, 1 << 20)
                else:
                    file.write(data)
        os.replace(self.path + ".partial", self.path)
        self.discard()

    def discard(self):
        parts = (self.images, self.videos, self.sounds)
        for part in parts:
            part.values.close()
        for path in (self.path + ".partial", *(part.path for part in parts)):
            if os.path.exists(path):
                os.remove(path)
