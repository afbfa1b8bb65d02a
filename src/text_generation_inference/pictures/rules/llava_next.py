"""Llava-Next (Llava 1.6): the whole picture, distorted, and tiles of it at the best of some larger sizes.

pixels: [1 + tiles, side, side, 3], the whole first, then the tiles row by row; black around what does not fill them.
grid: (tile rows, tile columns, feature rows, feature columns). The tiles' features make a map of
[tile rows * n, tile columns * n] for n patches along a tile. Feature rows and columns are what is kept of it, cut off
evenly at both ends: the first row that is kept is (tile rows * n - feature rows) // 2, and so for columns. Each row
that is kept ends in `image_newline`. Very thin pictures keep no rows. The features of the whole come first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from PIL.Image import Image

from text_generation_inference.files import shorten
from text_generation_inference.pictures.rule import PictureLayout, PictureRule
from text_generation_inference.pictures.rules.base import FamilyRule, cut_tiles
from text_generation_inference.pictures.rules.llava import check_side, count_features
from text_generation_inference.pictures.rules.settings import CLIP, ModelFiles, PictureSettings

_SIZES = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


@dataclass(frozen=True, kw_only=True)
class LlavaNextRule(FamilyRule):
    side: int  # of a tile
    patches: int  # along a side
    num_tokens: int  # of the whole
    sizes: tuple[tuple[int, int], ...]  # (height, width) that tiles may make up together

    def layout(self, width: int, height: int) -> PictureLayout:
        canvas_height, canvas_width = self._best_size(width, height)
        rows, columns = canvas_height // self.side, canvas_width // self.side
        feature_rows, feature_columns = self._kept(width, height, rows * self.patches, columns * self.patches)
        num_tokens = self.num_tokens + feature_rows * (feature_columns + 1)
        shape = (1 + rows * columns, self.side, self.side, 3)
        return PictureLayout(shape, (rows, columns, feature_rows, feature_columns), (num_tokens,))

    def pixels(self, image: Image, layout: PictureLayout) -> np.ndarray:
        pixels = np.empty(layout.shape, np.uint8)
        pixels[0] = self.resize(image, self.side, self.side)
        canvas = np.zeros((layout.grid[0] * self.side, layout.grid[1] * self.side, 3), np.uint8)
        width, height = _fit(image.width, image.height, canvas.shape[1], canvas.shape[0])
        top, left = (canvas.shape[0] - height) // 2, (canvas.shape[1] - width) // 2
        canvas[top : top + height, left : left + width] = self.resize(image, width, height)
        cut_tiles(canvas, pixels[1:])
        return pixels

    def _best_size(self, width: int, height: int) -> tuple[int, int]:
        """The one that keeps most of the picture's pixels; of equals the smallest, then the first."""

        def judge(size: tuple[int, int]) -> tuple[int, int]:
            scale = min(size[1] / width, size[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - size[0] * size[1]

        return max(self.sizes, key=judge)

    def _kept(self, width: int, height: int, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns of a map of features that the picture fills."""
        if width / height > columns / rows:
            filled = int(round(height * (columns / width), 7))
            return rows - (rows - filled) // 2 * 2, columns
        filled = int(round(width * (rows / height), 7))
        return rows, columns - (columns - filled) // 2 * 2


def _fit(width: int, height: int, most_width: int, most_height: int) -> tuple[int, int]:
    """The largest size of the same proportions that fits."""
    by_width, by_height = most_width / width, most_height / height
    if by_width < by_height:
        return most_width, min(math.ceil(height * by_width), most_height)
    return min(math.ceil(width * by_height), most_width), most_height


def _read_sizes(settings: PictureSettings, side: int) -> tuple[tuple[int, int], ...]:
    name = "image_grid_pinpoints"
    value = settings.get(name) if settings.has(name) else _SIZES
    sizes: list[tuple[int, int]] = []
    for pair in cast(Sequence[Any], value if isinstance(value, list) else [value]):
        if not isinstance(pair, list) or len(cast(list[Any], pair)) != 2:
            raise settings.wrong(name, f"must be a list of heights and widths, it has {shorten(pair)}")
        one = PictureSettings({name: pair[0]}, settings.source), PictureSettings({name: pair[1]}, settings.source)
        height, width = (each.integer(name, 0, most=2**14) for each in one)
        if height % side or width % side:
            raise settings.wrong(name, f"has {shorten(pair)}, which tiles of {side} do not fill")
        sizes.append((height, width))
    if not sizes:
        raise settings.wrong(name, "must have at least one size")
    return tuple(sizes)


def make(files: ModelFiles) -> PictureRule:
    kind, tower_side, patch = files.tower("clip_vision_model", 336, 14)
    settings = files.picture
    files.processor_type("LlavaNext")
    settings.must_be("do_resize", True)
    side = settings.side("crop_size", 224)
    check_side(files, "crop_size", side, tower_side)
    check_side(files, "size", settings.side("size", 224), tower_side)
    token = files.token("image_token", "<image>", "image_token_index", "image_token_id")
    return LlavaNextRule(
        image_token=token,
        marker=token,
        normalisation=settings.normalisation(CLIP),
        resample=settings.resample(3),
        side=side,
        patches=side // patch,
        num_tokens=count_features(files, kind, side, patch),
        sizes=_read_sizes(settings, side),
    )
