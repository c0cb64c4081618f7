"""Videos to patches, as transformers' Qwen2VLVideoProcessor and Qwen3VLVideoProcessor make them, without torchvision.

A video is a file that PyAV decodes, or a folder of frames as images, in the order of their names. Frames are sampled by
the processor's parameters, resized (bicubic, Pillow), normalised, and cut into patches of temporal_patch_size frames.
"""

import json
import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy
from PIL import Image

from preprocess_images import read_image, resize
from preprocess_input import InputError, RecordError

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
BOTH = {"rescale_factor": 1 / 255, "resample": 3, "temporal_patch_size": 2, "merge_size": 2, "min_frames": 4,
        "max_frames": 768, "fps": None, "num_frames": None, "cap_pixels_per_frame": False, "do_resize": True,
        "do_rescale": True, "do_normalize": True}
DEFAULTS = {
    "Qwen2VLVideoProcessor": {**BOTH, **CLIP, "size": {"shortest_edge": 128 * 28**2, "longest_edge": 768 * 28**2},
                              "patch_size": 14, "do_sample_frames": False, "max_video_tokens": 128000},
    "Qwen3VLVideoProcessor": {**BOTH, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16,
                              "do_sample_frames": True, "size": {"shortest_edge": 128 * 32**2, "longest_edge":
                                                                 768 * 32**2}, "fps": 2, "max_video_tokens": 768},
}
PROCESSORS = {"qwen2_vl": "Qwen2VLVideoProcessor", "qwen2_5_vl": "Qwen2VLVideoProcessor",
              "qwen3_omni_moe": "Qwen2VLVideoProcessor", "qwen3_omni_moe_thinker": "Qwen2VLVideoProcessor",
              "qwen3_vl": "Qwen3VLVideoProcessor", "qwen3_vl_moe": "Qwen3VLVideoProcessor",
              "qwen3_5": "Qwen3VLVideoProcessor", "qwen3_5_moe": "Qwen3VLVideoProcessor"}


class Patches(NamedTuple):
    grid: tuple  # (time, rows, columns)
    pixels: numpy.ndarray  # [patches, channels * frames * rows * columns] float32
    times: list  # one per step of the grid, in seconds
    seconds_per_grid: float


def read_json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None


class VideoProcessor:
    """The one that a model directory describes. `fps` and `num_frames` go before its own."""

    def __init__(self, model, fps=None, num_frames=None):
        model = Path(model)
        self.model_type = read_json(model / "config.json").get("model_type")
        found = (read_json(model / "processor_config.json").get("video_processor")
                 or read_json(model / "video_preprocessor_config.json")
                 or read_json(model / "preprocessor_config.json"))
        self.name = found.get("video_processor_type") or PROCESSORS.get(self.model_type)
        if self.name not in DEFAULTS or self.model_type not in PROCESSORS:
            raise InputError(f"the videos of {model} (model_type {self.model_type}, video processor {self.name}) are "
                             f"not supported; "
                             "known are those of Qwen2.5-VL, Qwen3-VL, Qwen3.5 and Qwen3-Omni")
        parameters = {**DEFAULTS[self.name], **{name: value for name, value in found.items() if value is not None}}
        if self.is_qwen2:
            edges = {"shortest_edge": found.get("min_pixels"), "longest_edge": found.get("max_pixels")}
            parameters["size"] = {**parameters["size"], **{name: value for name, value in edges.items()
                                                           if value is not None}}
        if fps is not None or num_frames is not None:
            parameters.update(do_sample_frames=True, fps=fps, num_frames=num_frames)
        if not {"shortest_edge", "longest_edge"} <= parameters["size"].keys():
            raise InputError(f"the video processor of {model} has a size without shortest_edge and longest_edge")
        if parameters["resample"] not in (2, 3) or not all(parameters[name]
                                                           for name in ("do_resize", "do_rescale", "do_normalize")):
            raise InputError(f"the video processor of {model} must resize (bilinear or bicubic), rescale and normalise")
        self.parameters = parameters

    @property
    def is_qwen2(self):
        return self.name == "Qwen2VLVideoProcessor"

    @property
    def says_times(self):
        """Qwen3-VL's text has the time of each step; Qwen2.5-VL's positions know seconds_per_grid."""
        return PROCESSORS[self.model_type] == "Qwen3VLVideoProcessor"

    def process(self, path, sample_fps=None):
        """Patches of a video; sample_fps says how many frames of a folder make a second."""
        try:
            if os.path.isdir(path):
                video = FrameFolder(path, sample_fps)
                numbers = numpy.arange(video.total)
            else:
                video = VideoFile(path)
                numbers = self.sample(video.total, video.fps)
            return self.patches_of(self.resized(video, numbers), numbers.tolist(), video)
        except ValueError as error:
            raise RecordError(f"the video {path} {error}") from None

    def resized(self, video, numbers):
        resized, size, seen = [], None, None
        for frame in video.frames(numbers):
            if size is None:
                size, seen = self.size_of(len(numbers), frame.height, frame.width), frame.size
            if frame.size != seen:
                raise ValueError(f"has frames of {seen} and of {frame.size} pixels; make them of one size")
            resized.append(numpy.asarray(resize(frame, *size, self.parameters["resample"])))
        if len(resized) != len(numbers):
            raise ValueError(f"ends before frame {numbers[len(resized)]} of the {video.total} that it announces; it "
                             f"is truncated or "
                             "damaged, write it again")
        return resized

    def sample(self, total, fps):
        """Numbers of the frames to take, as sample_frames() of the two classes chooses them."""
        of = self.parameters
        if not of["do_sample_frames"]:
            return numpy.arange(total)
        step, wanted = of["temporal_patch_size"], of["num_frames"]
        if not self.is_qwen2:
            if wanted is None and of["fps"] is None:
                wanted = min(max(total, of["min_frames"]), of["max_frames"])
            elif wanted is None:
                wanted = min(max(int(total / fps * of["fps"]), of["min_frames"]), of["max_frames"], total)
            return numpy.linspace(0, total - 1, wanted).round().astype(int)
        if wanted is not None:
            wanted = round(wanted / step) * step
        elif of["fps"] is not None:
            most = min(of["max_frames"], total) // step * step
            wanted = math.floor(min(max(total / fps * of["fps"], of["min_frames"]), most) / step) * step
        else:
            return numpy.arange(total)
        if wanted == 0 or wanted > total:
            raise ValueError(f"has {total} frames, too few to sample {wanted or step} of them; take a longer one, or "
                             f"fewer frames "
                             "by --video-num-frames")
        # In fp32, as torch.arange counts, which decides between neighbours; without the one too many that rounding may
        # add.
        return numpy.arange(0, total, total / wanted).astype(numpy.float32).astype(int)[:wanted]

    def size_of(self, frames, height, width):
        """Rows and columns of pixels after resizing: whole patches, and as many as the limits allow for."""
        of = self.parameters
        factor, step = of["patch_size"] * of["merge_size"], of["temporal_patch_size"]
        least, most = of["size"]["shortest_edge"], of["size"]["longest_edge"]
        if self.is_qwen2:  # limits per frame
            if of["cap_pixels_per_frame"]:
                most = max(min(most, int(of["max_video_tokens"] * factor**2 * 0.9) * step // frames), int(least * 1.05))
            frames = even = 1
        else:  # limits for all frames together
            if frames < step:
                raise ValueError(f"has too few frames: {frames}; the model needs {step}")
            if of["cap_pixels_per_frame"]:
                most = max(min(of["max_video_tokens"] * factor**2, most // frames), int(least * 1.05)) * frames
            even = round(frames / step) * step
            if min(height, width) < factor:
                scale = max(factor / height, factor / width)
                height, width = int(height * scale), int(width * scale)
        if max(height, width) > 200 * min(height, width):
            raise ValueError(f"has frames of {width} x {height} pixels, more than 200 times as long as wide; cut them")
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        if even * rows * columns > most:
            scale = math.sqrt(frames * height * width / most)
            rows, columns = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
        elif even * rows * columns < least:
            scale = math.sqrt(least / (frames * height * width))
            rows, columns = (math.ceil(side * scale / factor) * factor for side in (height, width))
        return rows, columns

    def patches_of(self, frames, numbers, video):
        of = self.parameters
        patch, merge, step = of["patch_size"], of["merge_size"], of["temporal_patch_size"]
        taken, missing = len(frames), -len(frames) % step
        frames, numbers = frames + frames[-1:] * missing, numbers + numbers[-1:] * missing
        rows, columns = frames[0].shape[0] // patch, frames[0].shape[1] // patch
        grid = (len(frames) // step, rows, columns)
        mean, deviation = (numpy.array(of[name], numpy.float32) * numpy.float32(1 / of["rescale_factor"])
                           for name in ("image_mean", "image_std"))
        pixels = (numpy.stack(frames).astype(numpy.float32) - mean) / deviation
        # Time, frame, row of places, row of it, row of pixels, column of places, column of it, column of pixels,
        # channel.
        pixels = pixels.reshape(grid[0], step, rows // merge, merge, patch, columns // merge, merge, patch, 3)
        pixels = pixels.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(math.prod(grid), 3 * step * patch**2)
        times = [number / video.fps for number in numbers]
        return Patches(grid, pixels, [(times[i] + times[i + step - 1]) / 2 for i in range(0, len(times), step)],
                       step / (taken / video.total * video.fps))


class FrameFolder:
    def __init__(self, path, sample_fps):
        self.files = sorted(file for file in Path(path).iterdir() if file.is_file())
        self.total, self.fps = len(self.files), sample_fps
        if not self.files:
            raise ValueError("is a folder without frames")
        if isinstance(sample_fps, bool) or not isinstance(sample_fps, (int, float)) or not sample_fps > 0:
            raise ValueError(
                "is a folder of frames; say beside it how many of them make a second, as \"sample_fps\": 2")

    def frames(self, numbers):
        for number in numbers:
            try:
                frame = read_image(self.files[number])
            except Exception as error:  # Pillow's decoders raise many kinds for a damaged file
                reason = getattr(error, "strerror", None) or error
                raise ValueError(f"has the frame {self.files[number].name}, which cannot be read: {reason}") from None
            yield frame


class VideoFile:
    """Frames are counted in the order in which they are shown; a file that does not say how many is decoded twice."""

    def __init__(self, path):
        try:
            import av
        except ImportError:
            raise InputError("videos need the package av (PyAV); install it with `pip install av`, or run this with "
                             "the Python of "
                             "the venv that launch/setup made") from None
        self.av, self.path = av, path
        with self.opened() as container:
            stream = container.streams.video[0]
            self.total, self.fps = stream.frames, float(stream.average_rate or 24)
            if self.total == 0:
                self.total = sum(1 for _ in self.decoded(container))
        if self.total == 0:
            raise ValueError("has no frames; write it again")

    def opened(self):
        try:
            container = self.av.open(str(self.path))
        except (self.av.FFmpegError, OSError) as error:
            raise ValueError(f"cannot be opened: {error.strerror or error}") from None
        if not container.streams.video:
            container.close()
            raise ValueError("has no pictures, only sound or text")
        return container

    def decoded(self, container):
        container.streams.video[0].thread_type = "AUTO"
        try:
            yield from container.decode(video=0)
        except (self.av.FFmpegError, OSError) as error:
            raise ValueError(f"cannot be decoded ({error.strerror or error}); it is truncated or damaged, write it "
                             f"again") from None

    def frames(self, numbers):
        times = numpy.bincount(numbers)  # a frame may be sampled several times
        with self.opened() as container:
            for number, frame in enumerate(self.decoded(container)):
                if number >= len(times):
                    break
                for _ in range(times[number]):
                    yield Image.fromarray(frame.to_ndarray(format="rgb24"))
