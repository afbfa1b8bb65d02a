"""InternVL as `transformers` has it: distorted to tiles in the arrangement of the nearest proportions, then the whole.

pixels: [tiles + 1, side, side, 3], row by row, the whole last; [1, side, side, 3] where a tile is enough. grid: ().
`crop_to_patches` of the files is not looked at: they say false, and the processor of the family always passes true.
"""

from dataclasses import dataclass

import numpy as np
from PIL.Image import Image

from text_generation_inference.pictures.rule import PictureLayout, PictureRule
from text_generation_inference.pictures.rules.base import FamilyRule, cut_tiles
from text_generation_inference.pictures.rules.llava import check_side
from text_generation_inference.pictures.rules.settings import CLIP, ModelFiles


@dataclass(frozen=True, kw_only=True)
class InternVLRule(FamilyRule):
    start_token: str
    end_token: str
    side: int
    num_tokens: int  # of a tile
    arrangements: tuple[tuple[int, int], ...]  # (columns, rows), in the order in which they are tried

    @property
    def reserved(self) -> frozenset[str]:
        return frozenset({self.image_token, self.start_token, self.end_token})

    def layout(self, width: int, height: int) -> PictureLayout:
        columns, rows = self._arrangement(width, height)
        num = rows * columns + (rows * columns > 1)
        return PictureLayout(
            (num, self.side, self.side, 3), (), (self.start_token, num * self.num_tokens, self.end_token)
        )

    def pixels(self, image: Image, layout: PictureLayout) -> np.ndarray:
        columns, rows = self._arrangement(*image.size)
        pixels = np.empty(layout.shape, np.uint8)
        canvas = self.resize(image, columns * self.side, rows * self.side)
        cut_tiles(canvas, pixels[: rows * columns])
        if rows * columns > 1:
            pixels[-1] = self.resize(image, self.side, self.side)
        return pixels

    def _arrangement(self, width: int, height: int) -> tuple[int, int]:
        """The nearest proportions; of equal ones more tiles, as long as the picture fills half of them."""
        best, least = (1, 1), float("inf")
        for columns, rows in self.arrangements:
            difference = abs(width / height - columns / rows)
            if difference < least:
                best, least = (columns, rows), difference
            elif difference == least and width * height > 0.5 * self.side * self.side * columns * rows:
                best = columns, rows
        return best


def make(files: ModelFiles) -> PictureRule:
    settings = files.picture
    files.processor_type("GotOcr2")
    settings.must_be("do_resize", True)
    side = settings.side("size", 384)
    check_side(files, "size", side, files.vision.side("image_size", 448))
    patch = files.vision.side("patch_size", 14)
    ratio = files.config.number("downsample_ratio", 0.5)
    along = side // patch * ratio
    if along != int(along) or along < 1:
        raise files.config.wrong("downsample_ratio", f"is {ratio}, which leaves no whole number of patches")
    most, least = settings.integer("max_patches", 12, most=256), settings.integer("min_patches", 1, most=256)
    tiles = range(1, most + 1)
    sizes = [(columns, rows) for columns in tiles for rows in tiles if least <= columns * rows <= most]
    token = files.token("context_image_token", "<IMG_CONTEXT>", "image_token_id", "image_token_index")
    return InternVLRule(
        image_token=token,
        marker=token,
        normalisation=settings.normalisation(CLIP),
        resample=settings.resample(3),
        start_token=files.token("start_image_token", "<img>"),
        end_token=files.token("end_image_token", "</img>"),
        side=side,
        num_tokens=int(along) ** 2,
        arrangements=tuple(sorted(sizes, key=lambda size: size[0] * size[1])),
    )
