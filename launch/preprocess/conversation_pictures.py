"""Images and videos of records, by the model's processors."""

import math
import os

from conversation_writer import Pictures
from image_processors import TileImages, load_image_processor, placeholder
from preprocess_input import InputError, RecordError


class PictureReader:
    """The processors are loaded when there is something for them."""

    def __init__(self, flags, tokenizer):
        self.flags, self.tokenizer, self.processor, self.video_processor = flags, tokenizer, None, None
        marks = {kind: placeholder(tokenizer, kind) for kind in ("image", "video")}
        self.placeholders = {kind: mark for kind, mark in marks.items() if mark}

    def need_placeholder(self, kind):
        if kind not in self.placeholders:
            raise InputError(f"the tokenizer of {self.flags.tokenizer_model} has no <|{kind}_pad|>; give the directory "
                             "of a vision-language model")

    def images(self, where, images):
        """Grids, pixels and placeholder text of the pictures."""
        if not images:
            return Pictures(), []
        self.need_processor(where)
        try:
            return self.processor.process(images)
        except ValueError as error:
            raise RecordError(f"{where}: the image processor refuses a picture: {error}; give another form of it, or "
                              "delete the line") from None

    def videos(self, where, folder, parts):
        """Grids, pixels, seconds per step and placeholder text of the videos."""
        watched = [self.watch(where, folder, part) for part in parts]
        if not watched:
            return Pictures(), [], []
        pixels = b"".join(video.pixels.astype("<f4").tobytes() for video in watched)
        return (Pictures([video.grid for video in watched], pixels, watched[0].pixels.shape[1]),
                [video.seconds_per_grid for video in watched], [self.text_of(video) for video in watched])

    def watch(self, where, folder, part):
        from preprocess_videos import VideoProcessor
        try:
            if self.video_processor is None:
                self.need_placeholder("video")
                self.video_processor = VideoProcessor(self.flags.tokenizer_model, self.flags.video_fps,
                                                      self.flags.video_num_frames)
            return self.video_processor.process(os.path.join(folder, part["video"]), part.get("sample_fps"))
        except InputError as error:
            raise type(error)(f"{where}: {error}") from None

    def text_of(self, video):
        count = math.prod(video.grid) // self.video_processor.parameters["merge_size"]**2
        if not self.video_processor.says_times:
            return self.placeholders["video"] * count
        start, end = (getattr(self.tokenizer, f"vision_{at}_token", None) or f"<|vision_{at}|>"
                      for at in ("start", "end"))
        step = start + self.placeholders["video"] * (count // video.grid[0]) + end
        return "".join(f"<{time:.1f} seconds>{step}" for time in video.times)

    def need_processor(self, where):
        if self.processor is None:
            try:
                self.need_placeholder("image")
                self.processor = load_image_processor(self.flags.tokenizer_model, self.tokenizer)
                if not self.flags.template:
                    self.processor.set_limits(self.flags.image_min_pixels, self.flags.image_max_pixels)
                elif isinstance(self.processor, TileImages):
                    self.processor.shares_tiles = True
            except InputError as error:
                raise InputError(f"{where}: {error}") from None

    def open_image(self, where, path):
        self.need_processor(where)
        from preprocess_images import read_image
        try:
            return read_image(path)
        except Exception as error:  # Pillow's decoders raise many kinds for a damaged file
            reason = getattr(error, "strerror", None) or error
            raise RecordError(f"{where}: cannot read the image {path}: {reason}; correct the path or the file, or "
                              "delete the line") from None
