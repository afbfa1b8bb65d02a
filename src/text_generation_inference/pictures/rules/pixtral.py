"""Pixtral, and Mistral 3 which merges its patches: the longer side is limited, both are filled up to whole patches.

pixels: [height, width, 3]. grid: (rows, columns), in patches before they are merged.
A line of features ends in a token of its own, the last one in another.
"""

import math
from dataclasses import dataclass

import numpy as np
from PIL.Image import Image

from text_generation_inference.pictures.rule import PictureLayout, PictureRule
from text_generation_inference.pictures.rules.base import FamilyRule
from text_generation_inference.pictures.rules.settings import CLIP, ModelFiles


@dataclass(frozen=True, kw_only=True)
class PixtralRule(FamilyRule):
    break_token: str
    end_token: str
    patch: int
    merge: int  # patches along a side that become one feature
    max_height: int
    max_width: int

    @property
    def reserved(self) -> frozenset[str]:
        return frozenset({self.image_token, self.break_token, self.end_token})

    def layout(self, width: int, height: int) -> PictureLayout:
        ratio = max(height / self.max_height, width / self.max_width)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        unit = self.patch * self.merge
        # A side that was rounded down to nothing has no patch either in the library; one is the least there can be.
        rows, columns = max(1, math.ceil(height / unit)), max(1, math.ceil(width / unit))
        line = (columns, self.break_token)
        expansion = (*line * (rows - 1), columns, self.end_token)
        grid = rows * self.merge, columns * self.merge
        return PictureLayout((rows * unit, columns * unit, 3), grid, expansion)

    def pixels(self, image: Image, layout: PictureLayout) -> np.ndarray:
        height, width = layout.shape[:2]
        return self.resize(image, width, height)


def make(files: ModelFiles) -> PictureRule:
    settings = files.picture
    files.processor_type("Pixtral")
    settings.must_be("do_resize", True)
    _, _, patch = files.tower("pixtral", 1540, 14)
    merge = files.config.integer(
        "spatial_merge_size", 2 if files.config.get("model_type") == "mistral3" else 1, most=64
    )
    size = settings.inner("size")
    edge = size.integer("longest_edge", 1024, most=2**14)
    has_edge = size.has("longest_edge") or not size.has("height")
    token = files.token("image_token", "[IMG]", "image_token_index", "image_token_id")
    return PixtralRule(
        image_token=token,
        marker=token,
        normalisation=settings.normalisation(CLIP),
        resample=settings.resample(3),
        break_token=files.token("image_break_token", "[IMG_BREAK]"),
        end_token=files.token("image_end_token", "[IMG_END]"),
        patch=patch,
        merge=merge,
        max_height=edge if has_edge else size.integer("height", 0, most=2**14),
        max_width=edge if has_edge else size.integer("width", 0, most=2**14),
    )
