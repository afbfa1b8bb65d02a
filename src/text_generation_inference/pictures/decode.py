"""Bytes of a stranger to an upright RGB picture. Runs in a worker process (`worker`), never elsewhere.

The order matters: the format is one of a few, then the header says a size, then the size is checked, and only then are
pixels decoded. What goes wrong has fixed words for the client: a decoder's own text may tell addresses of memory.
"""

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from io import BytesIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from text_generation_inference.errors import ValidationError
from text_generation_inference.pictures.data_uri import NO_VIDEO

log = logging.getLogger("text_generation_inference.pictures")

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP")
_NAMES = "PNG, JPEG, GIF, WebP, TIFF or BMP"
_DAMAGED = "invalid image: it is damaged or incomplete"
_ANIMATIONS = ("GIF", "WEBP", "PNG")


def decode(data: bytes | bytearray, format: str | None, max_pixels: int) -> Image.Image:
    """`format`: the only one to try; None: as the first bytes say. Raises `ValidationError`, with the cause in it."""
    with _limit(max_pixels):
        try:
            with Image.open(BytesIO(data), formats=FORMATS if format is None else (format,)) as image:
                check_size(*image.size, max_pixels)
                image.load()  # the first frame
                return to_rgb(image)
        except (ValidationError, MemoryError):
            raise
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise _too_large(max_pixels) from error
        except UnidentifiedImageError as error:
            what = _NAMES if format is None else f"the {format} that it is said to be"
            raise ValidationError(f"invalid image: it is not {what}") from error
        except Exception as error:  # decoders raise whatever they please
            raise ValidationError(_DAMAGED) from error


@contextmanager
def open_animation(data: bytes | bytearray, max_pixels: int) -> Generator["Animation", None, None]:
    """Raises `ValidationError`, with the cause in it."""
    with _limit(max_pixels):
        try:
            with Image.open(BytesIO(data), formats=_ANIMATIONS) as image:
                check_size(*image.size, max_pixels)
                yield Animation(image)
        except (ValidationError, MemoryError):
            raise
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise _too_large(max_pixels) from error
        except UnidentifiedImageError as error:
            raise ValidationError(NO_VIDEO) from error
        except Exception as error:
            raise ValidationError("invalid video: it is damaged or incomplete") from error


class Animation:
    """A file of several frames, which are decoded one after the other."""

    def __init__(self, image: Image.Image) -> None:
        self._image = image
        self.size = image.size
        self.num_frames = int(getattr(image, "n_frames", 1))
        self._milliseconds = 0.0

    def frames(self) -> Generator[Image.Image, None, None]:
        for number in range(self.num_frames):
            self._image.seek(number)
            self._image.load()
            self._milliseconds += float(self._image.info.get("duration") or 0)
            yield to_rgb(self._image.copy())

    @property
    def fps(self) -> float | None:
        """Once all frames were read; None: the file does not say."""
        return 1000 * self.num_frames / self._milliseconds if self._milliseconds > 0 else None


@contextmanager
def _limit(max_pixels: int) -> Generator[None, None, None]:
    """Pillow checks sizes too, in places that only it knows of. Its warning is meant as an error here; what is made of
    a picture afterwards may be larger."""
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def check_size(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise ValidationError("invalid image: it has no pixels")
    if width * height > max_pixels:
        raise _too_large(max_pixels)


def _too_large(max_pixels: int) -> ValidationError:
    return ValidationError(f"invalid image: it has more than the {max_pixels} pixels that are allowed")


def to_rgb(image: Image.Image) -> Image.Image:
    """Upright, transparency on white, as `transformers` does it."""
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception as error:  # a picture whose notes are damaged is shown as it is stored
        log.debug("An orientation cannot be read: %r", error)
    if image.mode.startswith("I;16") or image.mode == "I":
        # Pillow cuts at 255, which leaves little more than white. The upper byte, as of colours with 16 bits.
        values = np.clip(np.asarray(image), 0, 65535).astype(np.uint16)
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValidationError("invalid image: its pixels are no whole numbers")
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image if image.mode == "RGB" else image.convert("RGB")
