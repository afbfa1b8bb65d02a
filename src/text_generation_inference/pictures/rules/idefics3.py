"""Idefics3 and SmolVLM: the longer side is scaled to one length, both up to whole tiles; tiles, then the whole.

pixels: [tiles + 1, side, side, 3], row by row, the whole last; [1, side, side, 3] where a tile is enough.
grid: (rows, columns) of tiles; (0, 0) where there is the whole alone.
"""

import math
from dataclasses import dataclass

import numpy as np
from PIL.Image import Image, Resampling

from text_generation_inference.pictures.rule import PictureLayout, PictureRule
from text_generation_inference.pictures.rules.base import FamilyRule, cut_tiles
from text_generation_inference.pictures.rules.settings import HALVES, ModelFiles

_LONGEST = 4096  # whatever the settings say


@dataclass(frozen=True, kw_only=True)
class Idefics3Rule(FamilyRule):
    boundary_token: str  # before every tile, and after the whole
    whole_token: str
    side: int  # of a tile
    edge: int  # of the longer side, before it is filled up to whole tiles
    num_tokens: int  # of a tile
    splits: bool

    @property
    def reserved(self) -> frozenset[str]:
        most = range(math.ceil(min(self.edge, _LONGEST) / self.side))
        places = {_place(row, column) for row in most for column in most} if self.splits else set[str]()
        return frozenset({self.image_token, self.boundary_token, self.whole_token, *places})

    def layout(self, width: int, height: int) -> PictureLayout:
        whole = self.boundary_token + self.whole_token
        if not self.splits or (canvas := self._canvas(*self._scaled(width, height))) == (self.side, self.side):
            return PictureLayout((1, self.side, self.side, 3), (0, 0), (whole, self.num_tokens, self.boundary_token))
        rows, columns = canvas[1] // self.side, canvas[0] // self.side
        parts: list[str | int] = []
        for row in range(rows):
            for column in range(columns):
                newline = "\n" if row and not column else ""
                parts += [f"{newline}{self.boundary_token}{_place(row, column)}", self.num_tokens]
        expansion = (*parts, f"\n\n{whole}", self.num_tokens, self.boundary_token)
        return PictureLayout((rows * columns + 1, self.side, self.side, 3), (rows, columns), expansion)

    def pixels(self, image: Image, layout: PictureLayout) -> np.ndarray:
        pixels, resample = np.empty(layout.shape, np.uint8), Resampling(self.resample)
        scaled = self._scaled(*image.size)
        image = image.resize(scaled, resample)
        if self.splits:
            image = image.resize(self._canvas(*scaled), resample)
        if layout.grid != (0, 0):
            cut_tiles(np.asarray(image), pixels[:-1])
        pixels[-1] = self.resize(image, self.side, self.side)  # of what was resized already
        return pixels

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        """The longer side has the length that is asked for, the other is even."""
        ratio = width / height
        if width >= height:
            other = int(self.edge / ratio)
            width, height = self.edge, max(other + other % 2, 1)
        else:
            other = int(self.edge * ratio)
            width, height = max(other + other % 2, 1), self.edge
        ratio = width / height
        if width >= height and width > _LONGEST:
            width, height = _LONGEST, max(int(_LONGEST / ratio), 1)
        elif height > _LONGEST:
            width, height = max(int(_LONGEST * ratio), 1), _LONGEST
        return width, height

    def _canvas(self, width: int, height: int) -> tuple[int, int]:
        """Whole tiles: the longer side is filled up, the other follows and is filled up too."""
        ratio = width / height
        if width >= height:
            width = self._fill_up(width)
            return width, self._fill_up(int(width / ratio))
        height = self._fill_up(height)
        return self._fill_up(int(height * ratio)), height

    def _fill_up(self, length: int) -> int:
        return math.ceil(length / self.side) * self.side


def _place(row: int, column: int) -> str:
    return f"<row_{row + 1}_col_{column + 1}>"


def make(files: ModelFiles) -> PictureRule:
    settings = files.picture
    files.processor_type("Idefics3", "SmolVLM")
    settings.must_be("do_resize", True)
    side = settings.side("max_image_size", 364)
    patch = files.vision.side("patch_size", 32)
    scale = files.config.integer("scale_factor", 2, most=64)
    if side // patch % scale or side < patch:
        raise settings.wrong("max_image_size", f"is {side}: its {side // patch} patches cannot be merged by {scale}")
    token = files.token("image_token", "<image>", "image_token_id", "image_token_index")
    return Idefics3Rule(
        image_token=token,
        marker=token,
        normalisation=settings.normalisation(HALVES),
        resample=settings.resample(1),
        boundary_token=files.token("fake_image_token", "<fake_token_around_image>"),
        whole_token=files.token("global_image_token", "<global-img>"),
        side=side,
        edge=settings.inner("size").integer("longest_edge", 4 * 364, most=2**14),
        num_tokens=(side // patch // scale) ** 2,
        splits=settings.flag("do_image_splitting", True),
    )
