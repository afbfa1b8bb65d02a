"""What rules share: fields that all have, and a few steps on uint8 pixels."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from PIL.Image import Image, Resampling

from text_generation_inference.errors import ValidationError
from text_generation_inference.pictures.rule import Normalisation, PictureLayout

_NO_VIDEOS = "this model takes no videos: send frames as pictures"


@dataclass(frozen=True, kw_only=True)
class FamilyRule:
    """Every setting is a field, so that what a rule prints says all that decides pixels."""

    image_token: str
    marker: str
    normalisation: Normalisation
    resample: int  # Pillow's number

    @property
    def reserved(self) -> frozenset[str]:
        return frozenset({self.image_token, self.marker})

    @property
    def places_bos(self) -> bool:
        return False

    @property
    def identity(self) -> str:
        return repr(self)

    def finish(self, text: str, bos: str) -> str:
        return text

    def resize(self, image: Image, width: int, height: int) -> np.ndarray:
        return np.asarray(image.resize((width, height), Resampling(self.resample)))

    def video_layout(self, width: int, height: int, num_frames: int, fps: float) -> PictureLayout:
        raise ValidationError(_NO_VIDEOS)

    def video_pixels(self, images: Iterable[Image], layout: PictureLayout) -> np.ndarray:
        raise ValidationError(_NO_VIDEOS)

    def check_ratio(self, width: int, height: int, most: int = 200) -> None:
        """Beyond it a picture that is scaled by its shorter side would grow without bounds."""
        if max(width, height) > most * min(width, height):
            raise ValidationError(
                f"a picture of {width}x{height} pixels is too thin: its sides may differ by a factor of {most}"
            )


def cut_tiles(canvas: np.ndarray, tiles: np.ndarray) -> None:
    """Into [rows * columns, side, side, 3], row by row, from [rows * side, columns * side, 3]; copied once."""
    side = tiles.shape[1]
    rows, columns = canvas.shape[0] // side, canvas.shape[1] // side
    places = tiles.reshape(rows, columns, side, side, 3)
    places[...] = canvas.reshape(rows, side, columns, side, 3).swapaxes(1, 2)
