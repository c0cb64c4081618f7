"""The image processors of vision-language models: pictures to patches, and to the text that stands for them."""

import json
import math
from pathlib import Path

from conversation_writer import Pictures
from preprocess_input import InputError


def load_image_processor(model, tokenizer):
    """QwenImages, PixtralImages or SiglipImages, with the model's settings."""
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
    if type(images).__name__.startswith("Gemma3"):
        return SiglipImages(images, model, tokenizer)
    raise InputError(f"the image processor of {model} is not that of a Qwen-VL, Mistral or Gemma 3 model")


def placeholder(tokenizer, kind):
    """The token that stands for a picture of this kind in the chat template's text; None without one."""
    marks = (getattr(tokenizer, f"{kind}_token", None), f"<|{kind}_pad|>", "[IMG]" if kind == "image" else None)
    if kind == "image":  # Gemma 3's template writes the token that begins a picture
        marks = (getattr(tokenizer, "boi_token", None), *marks)
    return next((mark for mark in marks if mark and tokenizer.convert_tokens_to_ids(mark)
                 not in (None, tokenizer.unk_token_id)), None)


def refuse_limits(least, most):
    if least is not None or most is not None:
        raise InputError("--image-min-pixels and --image-max-pixels are for Qwen-VL's processors; this model's takes "
                         "another limit: change size in its preprocessor_config.json")


def sizes_of(model, *names):
    """Whole numbers of config.json, by paths of keys."""
    config, sizes = json.loads((Path(model) / "config.json").read_text()), []
    for name in names:
        found = config
        for key in name.split("."):
            if key not in found:
                raise InputError(f"config.json of {model} has no {name}; take the file that was published with the "
                                 "model")
            found = found[key]
        sizes.append(found)
    return sizes


def patches_of(images, patch, merge):
    """Images [C, rows, columns] as patches of merge x merge units, row by row in a unit and unit by unit."""
    import numpy
    grids, pixels = [], []
    for image in images:
        rows, columns = (side // (patch * merge) for side in image.shape[1:])
        units = image.reshape(len(image), rows, merge, patch, columns, merge, patch)
        pixels.append(units.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns * merge**2, -1))
        grids.append([1, rows * merge, columns * merge])
    pixels = numpy.concatenate(pixels)
    return Pictures(grids, pixels.astype("<f4").tobytes(), pixels.shape[1])


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
        self.patch, self.merge = sizes_of(model, "vision_config.patch_size", "spatial_merge_size")
        self.processor, self.mark = processor, placeholder(tokenizer, "image")
        self.row_end = getattr(tokenizer, "image_break_token", None) or "[IMG_BREAK]"
        self.end = getattr(tokenizer, "image_end_token", None) or "[IMG_END]"

    def set_limits(self, least, most):
        refuse_limits(least, most)

    def process(self, images):
        """Grids, pixels and placeholder text of the pictures."""
        unit = self.patch * self.merge
        images = [self.processor(images=[self.resized(image, unit)], do_resize=False,
                                 return_tensors="np")["pixel_values"][0] for image in images]
        texts = []
        for image in images:
            rows, columns = (side // unit for side in image.shape[1:])
            row = self.mark * columns
            texts.append((row + self.row_end) * (rows - 1) + row + self.end)
        return patches_of(images, self.patch, self.merge), texts

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


class SiglipImages:
    """A picture of one size, and as many placeholders for each, between marks and line breaks."""

    def __init__(self, processor, model, tokenizer):
        self.patch, side, tokens = sizes_of(model, "vision_config.patch_size", "vision_config.image_size",
                                            "mm_tokens_per_image")
        if processor.do_pan_and_scan:
            raise InputError(f"the image processor of {model} cuts pictures (do_pan_and_scan), which is not supported; "
                             "write false in its preprocessor_config.json")
        self.processor, self.merge = processor, side // self.patch // math.isqrt(tokens)
        self.mark = placeholder(tokenizer, "image")
        self.text = f"\n\n{self.mark}{tokenizer.image_token * tokens}{tokenizer.eoi_token}\n\n"

    def set_limits(self, least, most):
        refuse_limits(least, most)

    def process(self, images):
        """Grids, pixels and placeholder text of the pictures."""
        from preprocess_images import resize
        of = self.processor
        if of.do_resize:
            images = [resize(image, of.size.height, of.size.width, of.resample) for image in images]
        seen = of(images=images, do_resize=False, return_tensors="np")["pixel_values"]
        return patches_of(seen, self.patch, self.merge), [self.text] * len(images)
