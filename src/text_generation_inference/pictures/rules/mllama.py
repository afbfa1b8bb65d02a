"""Llama 3.2 Vision: the picture is fitted into an arrangement of tiles, at the top left, black beside and below.

pixels: [tiles, side, side, 3], row by row. grid: (aspect ratio id, tile rows, tile columns); the id is the place of the
arrangement in the list of all, from 1. Tiles up to the tower's number are missing: zero after normalising.
One token stands for a picture; its features are read by cross-attention.
"""

import math
from dataclasses import dataclass

import numpy as np
from PIL.Image import Image

from text_generation_inference.pictures.rule import PictureLayout, PictureRule
from text_generation_inference.pictures.rules.base import FamilyRule, cut_tiles
from text_generation_inference.pictures.rules.llava import check_side
from text_generation_inference.pictures.rules.settings import HALVES, ModelFiles


@dataclass(frozen=True, kw_only=True)
class MllamaRule(FamilyRule):
    side: int  # of a tile
    max_tiles: int

    @property
    def places_bos(self) -> bool:
        return True

    def finish(self, text: str, bos: str) -> str:
        """Pictures that a prompt begins with come before BOS, unless it has one already."""
        if bos in text:
            return text
        rest = text
        while rest.startswith(self.image_token):
            rest = rest.removeprefix(self.image_token)
        return text[: len(text) - len(rest)] + bos + rest

    def layout(self, width: int, height: int) -> PictureLayout:
        number, rows, columns = self._arrangement(width, height)
        return PictureLayout((rows * columns, self.side, self.side, 3), (number, rows, columns), (1,))

    def pixels(self, image: Image, layout: PictureLayout) -> np.ndarray:
        _, rows, columns = layout.grid
        canvas = np.zeros((rows * self.side, columns * self.side, 3), np.uint8)
        width, height = self._fit(image.width, image.height, canvas.shape[1], canvas.shape[0])
        canvas[:height, :width] = self.resize(image, width, height)
        pixels = np.empty(layout.shape, np.uint8)
        cut_tiles(canvas, pixels)
        return pixels

    def _arrangement(self, width: int, height: int) -> tuple[int, int, int]:
        """(its number, rows, columns): the smallest that enlarges the picture, else the one that shrinks it least."""
        most = range(1, self.max_tiles + 1)
        sizes = [(rows, columns) for rows in most for columns in most if rows * columns <= self.max_tiles]
        scales = [min(rows * self.side / height, columns * self.side / width) for rows, columns in sizes]
        scale = min((each for each in scales if each >= 1), default=max(scales))
        same = [each for each in range(len(sizes)) if scales[each] == scale]
        chosen = min(same, key=lambda each: math.prod(sizes[each]))
        return chosen + 1, *sizes[chosen]

    def _fit(self, width: int, height: int, most_width: int, most_height: int) -> tuple[int, int]:
        """At least a tile, at most the canvas, in the same proportions."""
        target_width = min(max(width, self.side), most_width)
        target_height = min(max(height, self.side), most_height)
        by_width, by_height = target_width / width, target_height / height
        if by_width < by_height:
            return target_width, min(math.floor(height * by_width) or 1, target_height)
        return min(math.floor(width * by_height) or 1, target_width), target_height


def make(files: ModelFiles) -> PictureRule:
    settings = files.picture
    files.processor_type("Mllama")
    settings.must_be("do_resize", True)
    settings.must_be("do_pad", True)
    side, max_tiles = settings.side("size", 224), settings.integer("max_image_tiles", 4, most=64)
    check_side(files, "size", side, files.vision.side("image_size", 448))
    if max_tiles != files.vision.integer("max_num_tiles", 4):
        raise settings.wrong(
            "max_image_tiles", f"is {max_tiles}, but the tower's pictures have another number of tiles"
        )
    token = files.token("image_token", "<|image|>", "image_token_index", "image_token_id")
    return MllamaRule(
        image_token=token,
        marker=token,
        normalisation=settings.normalisation(HALVES),
        resample=settings.resample(2),
        side=side,
        max_tiles=max_tiles,
    )
