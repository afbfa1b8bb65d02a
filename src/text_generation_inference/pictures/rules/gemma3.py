"""Gemma 3: a square, distorted; with pan-and-scan also crops of pictures that are long or tall.

pixels: [1 + crops, side, side, 3], the whole first. grid: ().
Each square is a block of tokens between two of its own, with blank lines around; crops are introduced in words.
"""

import math
from dataclasses import dataclass

import numpy as np
from PIL.Image import Image

from text_generation_inference.pictures.rule import PictureLayout, PictureRule
from text_generation_inference.pictures.rules.base import FamilyRule
from text_generation_inference.pictures.rules.llava import check_side
from text_generation_inference.pictures.rules.settings import HALVES, ModelFiles


@dataclass(frozen=True, kw_only=True)
class Gemma3Rule(FamilyRule):
    start_token: str
    end_token: str
    side: int
    num_tokens: int  # of a square
    pans: bool
    min_crop: int
    max_crops: int
    min_ratio: float

    @property
    def reserved(self) -> frozenset[str]:
        return frozenset({self.image_token, self.start_token, self.end_token})

    def layout(self, width: int, height: int) -> PictureLayout:
        num_crops = len(self._crops(width, height))
        before, after = f"\n\n{self.start_token}", f"{self.end_token}\n\n"
        expansion: tuple[str | int, ...] = (before, self.num_tokens, after)
        if num_crops:
            first = f"{after} and here are some crops to help you see better {before}"
            more = (self.num_tokens, f"{after} {before}") * (num_crops - 1)
            words = f"Here is the original image {before}"
            expansion = (words, self.num_tokens, first, *more, self.num_tokens, after)
        return PictureLayout((1 + num_crops, self.side, self.side, 3), (), expansion)

    def pixels(self, image: Image, layout: PictureLayout) -> np.ndarray:
        pixels = np.empty(layout.shape, np.uint8)
        pixels[0] = self.resize(image, self.side, self.side)
        for each, box in enumerate(self._crops(*image.size), 1):
            pixels[each] = self.resize(image.crop(box), self.side, self.side)
        return pixels

    def _crops(self, width: int, height: int) -> list[tuple[int, int, int, int]]:
        """(left, top, right, bottom) of parts along the longer side."""
        long, short = max(width, height), min(width, height)
        if not self.pans or long / short < self.min_ratio:
            return []
        num_crops = min(long // self.min_crop, math.floor(long / short + 0.5))
        num_crops = min(self.max_crops, max(2, num_crops))
        length = math.ceil(long / num_crops)
        if min(length, short) < self.min_crop:
            return []
        starts = [length * each for each in range(num_crops)]
        if width >= height:
            return [(start, 0, min(start + length, width), height) for start in starts]
        return [(0, start, width, min(start + length, height)) for start in starts]


def make(files: ModelFiles) -> PictureRule:
    settings = files.picture
    files.processor_type("Gemma3")
    settings.must_be("do_resize", True)
    _, tower_side, _ = files.tower("siglip_vision_model", 224, 16)
    side = settings.side("size", 224)
    check_side(files, "size", side, tower_side)
    start = files.token("boi_token", "<start_of_image>", "boi_token_index")
    return Gemma3Rule(
        image_token=files.token("image_token", "<image_soft_token>", "image_token_index", "image_token_id"),
        marker=start,
        normalisation=settings.normalisation(HALVES),
        resample=settings.resample(2),
        start_token=start,
        end_token=files.token("eoi_token", "<end_of_image>", "eoi_token_index"),
        side=side,
        num_tokens=files.config.integer("mm_tokens_per_image", 256, most=2**16),
        pans=settings.flag("do_pan_and_scan", False),
        min_crop=settings.integer("pan_and_scan_min_crop_size", 256, most=2**14),
        max_crops=settings.integer("pan_and_scan_max_num_crops", 4, most=64),
        min_ratio=settings.number("pan_and_scan_min_ratio_to_activate", 1.2),
    )
