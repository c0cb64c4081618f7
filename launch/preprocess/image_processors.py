"""The image processors of vision-language models: pictures to patches, and to the text that stands for them."""

import json
import math
from pathlib import Path

from conversation_writer import Pictures
from preprocess_input import InputError


CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and deviation


def model_type_of(model):
    file = Path(model) / "config.json"
    return json.loads(file.read_text()).get("model_type") if file.exists() else None


def load_image_processor(model, tokenizer):
    """An object below, with the model's settings."""
    if model_type_of(model) == "internvl_chat":
        return TileImages(None, model, tokenizer)
    if not any((Path(model) / f"{name}_config.json").exists() for name in ("preprocessor", "processor")):
        raise InputError(f"{model} has no image processor (preprocessor_config.json); images need the directory of a "
                         "vision-language model")
    if model_type_of(model) == "kimi_k25":
        return KimiImages(model, placeholder(tokenizer, "image"))
    if model_type_of(model) == "step_robotics":
        return StepImages(model, placeholder(tokenizer, "image"))
    try:
        from transformers import AutoImageProcessor
        images = AutoImageProcessor.from_pretrained(model, backend="pil")
    except (OSError, ValueError, ImportError) as error:
        raise InputError(
            f"{model} has no image processor that transformers reads with the package Pillow: {error}") from None
    kind = type(images).__name__
    if hasattr(images, "merge_size"):
        return QwenImages(images, placeholder(tokenizer, "image"))
    for name, made in (("Pixtral", PixtralImages), ("Gemma3", SiglipImages), ("GotOcr2", TileImages)):
        if kind.startswith(name):
            return made(images, model, tokenizer)
    raise InputError(f"the image processor of {model} is not that of a Qwen-VL, GLM-V, InternVL, Kimi, Mistral or "
                     "Gemma 3 model")


def placeholder(tokenizer, kind):
    """The token that stands for a picture of this kind in the chat template's text; None without one."""
    marks = (getattr(tokenizer, f"{kind}_token", None), f"<|{kind}_pad|>")
    if kind == "image":  # Gemma 3's template writes the token that begins a picture
        marks = (getattr(tokenizer, "boi_token", None), *marks, "[IMG]", "<|image|>", "<|media_pad|>", "<IMG_CONTEXT>",
                 "<im_patch>")
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


def settings_of(model):
    """Those of the image processor."""
    for name in ("preprocessor", "processor"):
        file = Path(model) / f"{name}_config.json"
        if file.exists():
            says = json.loads(file.read_text())
            return says.get("image_processor", says)
    return {}


def normed(images, mean, std):
    """Pillow's pictures as [C, rows, columns]."""
    import numpy
    mean, std = (numpy.asarray(values, "f4")[:, None, None] for values in (mean, std))
    return [(numpy.asarray(image, "f4").transpose(2, 0, 1) / 255 - mean) / std for image in images]


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
        of = self.processor
        if of.do_resize:
            images = [resize(image, *self.sides_of(image), of.resample) for image in images]
        seen = of(images=images, do_resize=False, return_tensors="np")
        grids, pixels = seen["image_grid_thw"].tolist(), seen["pixel_values"]
        return Pictures(grids, pixels.astype("<f4").tobytes(), pixels.shape[1]), [
            self.mark * (math.prod(grid) // of.merge_size**2) for grid in grids]

    def sides_of(self, image):
        """Rows and columns of pixels."""
        of = self.processor
        limits = of.patch_size * of.merge_size, of.size.shortest_edge, of.size.longest_edge
        if type(of).__name__.startswith("Glm4v"):  # counts the frames' pixels
            from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize
            return smart_resize(of.temporal_patch_size, image.height, image.width, of.temporal_patch_size, *limits)
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
        return smart_resize(image.height, image.width, *limits)


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


class TileImages:
    """InternVL: tiles of one size, of as many rows and columns as suit the picture best, and the whole as a last one;
    so many placeholders for each, between marks. `processor`: transformers', or None for InternVLChatModel, whose
    config.json says all."""

    def __init__(self, processor, model, tokenizer):
        ratio, vision = sizes_of(model, "downsample_ratio", "vision_config")
        side_of = lambda key: vision[key][0] if isinstance(vision.get(key), list) else vision.get(key)
        self.patch, self.merge = side_of("patch_size") or 14, round(1 / ratio)
        self.resample, self.shares_tiles = None, False
        if processor is None:
            config = json.loads((Path(model) / "config.json").read_text())
            self.side, self.has_whole = side_of("image_size") or 448, config.get("use_thumbnail", False)
            self.least, self.most = config.get("min_dynamic_patch", 1), config.get("max_dynamic_patch", 1)
            self.most = self.most if config.get("dynamic_image_size", False) else 1
            self.mean, self.std = IMAGENET
        else:
            self.side, self.has_whole, self.resample = processor.size.height, True, processor.resample
            self.least, self.most = processor.min_patches, processor.max_patches if processor.crop_to_patches else 1
            self.mean, self.std = processor.image_mean, processor.image_std
        self.tokens = (self.side // (self.patch * self.merge))**2
        self.mark = placeholder(tokenizer, "image")
        self.start, self.end = (getattr(tokenizer, f"{at}_image_token", None) or mark
                                for at, mark in (("start", "<img>"), ("end", "</img>")))

    def set_limits(self, least, most):
        refuse_limits(least, most)

    def process(self, images):
        """Grids, pixels and placeholder text of the pictures."""
        tiles, texts = [], []
        most = self.most // len(images) if self.shares_tiles and len(images) > 1 else self.most
        for image in images:
            cut = self.tiles_of(image, max(1, most))
            tiles += cut
            texts.append(self.start + self.mark * (self.tokens * len(cut)) + self.end)
        return patches_of(normed(tiles, self.mean, self.std), self.patch, self.merge), texts

    def resized(self, image, rows, columns):
        from preprocess_images import resize
        if self.resample is None:
            return image.resize((columns, rows))
        return resize(image, rows, columns, self.resample)

    def tiles_of(self, image, most):
        side = self.side
        across, down = self.canvas(image, most)
        if across * down == 1:
            return [self.resized(image, side, side)]
        canvas = self.resized(image, side * down, side * across)
        tiles = [canvas.crop((side * x, side * y, side * (x + 1), side * (y + 1)))
                 for y in range(down) for x in range(across)]
        return tiles + [self.resized(image, side, side)] * self.has_whole

    def canvas(self, image, most):
        """Columns and rows of tiles: those nearest to the picture's proportions; of equally near ones the more, if the
        picture has half of their pixels."""
        grids = sorted(((across, down) for across in range(1, most + 1) for down in range(1, most + 1)
                        if self.least <= across * down <= most), key=math.prod)
        best, nearest = (1, 1), math.inf
        for across, down in grids:
            off = abs(image.width / image.height - across / down)
            large = image.width * image.height > 0.5 * self.side**2 * across * down
            if off < nearest or off == nearest and large:
                best, nearest = (across, down), off
        return best


class KimiImages:
    """One placeholder for merge_size^2 patches; pictures are made smaller alone, and filled up with black."""

    def __init__(self, model, mark):
        says = settings_of(model)
        says = says.get("media_proc_cfg", says)  # the published form
        self.mark, self.merge = mark, says.get("merge_kernel_size", says.get("merge_size", 2))
        self.patch = says.get("patch_size", 14)
        self.most = says.get("in_patch_limit", says.get("max_patches", 16384))
        size = says.get("size") or {}
        self.longest = says.get("patch_limit_on_one_side", size.get("max_height", 512))  # patches
        self.mean, self.std = (says.get(f"image_{name}", [0.5] * 3) for name in ("mean", "std"))

    def set_limits(self, least, most):
        refuse_limits(least, most)

    def process(self, images):
        """Grids, pixels and placeholder text of the pictures."""
        made = normed([self.filled(image) for image in images], self.mean, self.std)
        pictures = patches_of(made, self.patch, self.merge)
        return pictures, [self.mark * (math.prod(grid) // self.merge**2) for grid in pictures.grids]

    def filled(self, image):
        from preprocess_images import resize
        from PIL import Image
        width, height = image.size
        across, down = (max(1, side // self.patch) for side in (width, height))
        longest = self.longest * self.patch
        scale = min(1, math.sqrt(self.most / (across * down)), longest / width, longest / height)
        columns, rows = (min(max(1, int(side * scale)), longest) for side in (width, height))
        unit = self.patch * self.merge
        whole = Image.new("RGB", tuple(math.ceil(side / unit) * unit for side in (columns, rows)))
        whole.paste(resize(image, rows, columns, Image.Resampling.BICUBIC))
        return whole


class StepImages:
    """Step3-VL: squares that are cut out of a picture, and the whole as a last one, of another size; so many
    placeholders for each, between marks."""

    def __init__(self, model, mark):
        says = settings_of(model)
        [vision] = sizes_of(model, "vision_config")
        self.mark, self.patch = mark, vision.get("patch_size", 14)
        self.side, self.tile = vision.get("image_size", 728), says.get("patch_size", 504)
        self.longest = says.get("max_image_size", 3024)

    def set_limits(self, least, most):
        refuse_limits(least, most)

    def process(self, images):
        """Grids, pixels and placeholder text of the pictures."""
        squares, texts = [], []
        for image in images:
            rows, whole = self.squares_of(image)
            squares += [square for row in rows for square in row] + [whole]
            tile = f"<patch_start>{self.features(self.tile)}<patch_end>"
            text = "<patch_newline>".join(tile * len(row) for row in rows)
            texts.append(f"{text}<im_start>{self.features(self.side)}<im_end>")
        return patches_of(normed(squares, *CLIP), self.patch, 4), texts

    def features(self, side):
        return self.mark * (side // (4 * self.patch))**2

    def squares_of(self, image):
        """Rows of squares, and the whole picture."""
        from preprocess_images import resize
        from PIL import Image
        bilinear = Image.Resampling.BILINEAR
        short, long = sorted(image.size)
        if short < 32 and long > 4 * short:
            square = Image.new("RGB", (long, long))
            square.paste(image)
            image, short = square, long
        width, height = image.size
        if long > self.longest:
            width, height = (int(side * (self.longest / long)) for side in (width, height))
        whole = resize(resize(image, height, width, bilinear), self.side, self.side, bilinear)
        short, long = sorted((width, height))
        if long <= self.side:
            window = short if long / short > 1.5 else 0
        else:
            window = min(short, self.tile) if long / short > 4 else self.tile
        if window == 0:
            return [], whole
        width, height = (side if side < window else window * (side // window + (side % window > 0.2 * window))
                         for side in (width, height))
        canvas = resize(image, height, width, bilinear)
        rows = [[canvas.crop((left, top, min(left + window, width), min(top + window, height)))
                 for left in range(0, width, window)] for top in range(0, height, window)]
        return [[resize(square, self.tile, self.tile, bilinear) for square in row] for row in rows], whole
