"""Images, and frames of videos, as transformers and torchvision read and resize them, by Pillow."""

from PIL import Image, ImageOps


def resize(image, rows, columns, resample):
    """Resizes horizontally, then vertically, with integer grey levels in between, as torchvision; Pillow chooses the
    order."""
    return image.resize((columns, image.height), Image.Resampling(resample)).resize((columns, rows),
                                                                                    Image.Resampling(resample))


def read_image(file):
    """Upright, as transformers' load_image() gives it: EXIF says how the camera was held."""
    with Image.open(file) as image:
        return ImageOps.exif_transpose(image).convert("RGB")
