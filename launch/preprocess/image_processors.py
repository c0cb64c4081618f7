"""The image processors of vision-language models: pictures to patches, and to the text that stands for them."""

import json
import math
from pathlib import Path

from conversation_writer import Pictures
from preprocess_input import InputError


def load_image_processor(model, tokenizer):
    """QwenImages or PixtralImages, with the model's settings."""
    if not any((Path(model) / f"{name}_config.json").exists() for name in ("preprocessor", "processor")):
        raise InputError(f"{model} has no image processor (preprocessor_config.json); images need the directory of a "
                         "vision-language model")
    try:
        from transformers import AutoImageProcessor
        images = AutoImageProcessor.from_pretrained(model, backend="pil")
    except (OSError, ValueError, ImportError) as error:
        raise InputError(
            f"{model} has no image processor that transformers reads with the package Pillow: {error}") from None
    if hasattr(images, "merge_size"):
        return QwenImages(images, placeholder(tokenizer, "image"))
    if type(images).__name__.startswith("Pixtral"):
        return PixtralImages(images, model, tokenizer)
    raise InputError(f"the image processor of {model} is neither that of a Qwen-VL nor of a Mistral model")


def placeholder(tokenizer, kind):
    """The token that stands for a picture of this kind in the chat template's text; None without one."""
    marks = (getattr(tokenizer, f"{kind}_token", None), f"<|{kind}_pad|>", "[IMG]" if kind == "image" else None)
    return next((mark for mark in marks if mark and tokenizer.convert_tokens_to_ids(mark)
                 not in (None, tokenizer.unk_token_id)), None)


class QwenImages:
    """One placeholder for merge_size^2 patches of two frames each."""

    def __init__(self, processor, mark):
        self.processor, self.mark = processor, mark

    def set_limits(self, least, most):
        """Applies limits of pixels; None: the processor's own."""
        size = self.processor.size
        self.processor.size = type(size)(shortest_edge=size.shortest_edge if least is None else least,
                                         longest_edge=size.longest_edge if most is None else most)

    def process(self, images):
        """Grids, pixels and placeholder text of the pictures."""
        from preprocess_images import resize
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
        of = self.processor
        if of.do_resize:
            images = [resize(image, *smart_resize(image.height, image.width, of.patch_size * of.merge_size,
                                                  of.size.shortest_edge, of.size.longest_edge), of.resample)
                      for image in images]
        seen = of(images=images, do_resize=False, return_tensors="np")
        grids, pixels = seen["image_grid_thw"].tolist(), seen["pixel_values"]
        return Pictures(grids, pixels.astype("<f4").tobytes(), pixels.shape[1]), [
            self.mark * (math.prod(grid) // of.merge_size**2) for grid in grids]


class PixtralImages:
    """One placeholder for spatial_merge_size^2 patches, a break behind each row of them, an end behind the last."""

    def __init__(self, processor, model, tokenizer):
        config = json.loads((Path(model) / "config.json").read_text())
        try:
            self.patch, self.merge = config["vision_config"]["patch_size"], config["spatial_merge_size"]
        except KeyError as missing:
            raise InputError(f"config.json of {model} has no {missing}; take the file that was published with the "
                             "model") from None
        self.processor, self.mark = processor, placeholder(tokenizer, "image")
        self.row_end = getattr(tokenizer, "image_break_token", None) or "[IMG_BREAK]"
        self.end = getattr(tokenizer, "image_end_token", None) or "[IMG_END]"

    def set_limits(self, least, most):
        if least is not None or most is not None:
            raise InputError("--image-min-pixels and --image-max-pixels are for Qwen-VL's processors; this model's "
                             "limits the longest side: change size in its preprocessor_config.json")

    def process(self, images):
        """Grids, pixels and placeholder text of the pictures."""
        import numpy
        unit, texts, grids, pixels = self.patch * self.merge, [], [], []
        for image in images:
            image = self.processor(images=[self.resized(image, unit)], do_resize=False, return_tensors="np")
            image = image["pixel_values"][0]
            rows, columns = (side // unit for side in image.shape[1:])
            units = image.reshape(len(image), rows, self.merge, self.patch, columns, self.merge, self.patch)
            pixels.append(units.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns * self.merge**2, -1))
            grids.append([1, rows * self.merge, columns * self.merge])
            row = self.mark * columns
            texts.append((row + self.row_end) * (rows - 1) + row + self.end)
        pixels = numpy.concatenate(pixels)
        return Pictures(grids, pixels.astype("<f4").tobytes(), pixels.shape[1]), texts

    def resized(self, image, unit):
        from preprocess_images import resize
        from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
        import numpy
        of = self.processor
        if not of.do_resize:
            return image
        most = of.size.longest_edge
        sides = get_resize_output_image_size(numpy.asarray(image), (most, most) if most else (of.size.height,
                                                                                              of.size.width), unit)
        return resize(image, *sides, of.resample)
