"""Idefics2: proportions are kept, within limits for both sides; with splitting the four quarters, then the whole.

pixels: [squares, height, width, 3], as large as the largest of them; each stands at the top left of its place.
grid: (height, width) of each, one after another. What lies beyond is zero after normalising, and counts as padding.
"""

import re
from dataclasses import dataclass

import numpy as np
from PIL.Image import Image

from text_generation_inference.errors import ValidationError
from text_generation_inference.pictures.rule import PictureLayout, PictureRule
from text_generation_inference.pictures.rules.base import FamilyRule
from text_generation_inference.pictures.rules.settings import HALVES, ModelFiles


@dataclass(frozen=True, kw_only=True)
class Idefics2Rule(FamilyRule):
    boundary_token: str  # around every picture
    num_tokens: int  # of each
    splits: bool
    min_edge: int
    max_edge: int

    @property
    def reserved(self) -> frozenset[str]:
        return frozenset({self.image_token, self.boundary_token})

    def finish(self, text: str, bos: str) -> str:
        """Neighbours share a boundary, and a word keeps its distance from one."""
        boundary = self.boundary_token
        text = text.replace(boundary * 2, boundary)
        return re.sub(rf"{re.escape(boundary)}(?=[^\s<])", lambda _: f"{boundary} ", text)

    def layout(self, width: int, height: int) -> PictureLayout:
        sizes = [self._resized(right - left, bottom - top) for left, top, right, bottom in self._boxes(width, height)]
        tallest, widest = max(height for height, _ in sizes), max(width for _, width in sizes)
        one = (self.boundary_token, self.num_tokens)
        grid = tuple(side for size in sizes for side in size)
        return PictureLayout((len(sizes), tallest, widest, 3), grid, (*one * len(sizes), self.boundary_token))

    def pixels(self, image: Image, layout: PictureLayout) -> np.ndarray:
        pixels = np.zeros(layout.shape, np.uint8)
        for each, box in enumerate(self._boxes(*image.size)):
            height, width = layout.grid[2 * each : 2 * each + 2]
            part = image.crop(box) if box != (0, 0, *image.size) else image
            pixels[each, :height, :width] = self.resize(part, width, height)
        return pixels

    def _boxes(self, width: int, height: int) -> list[tuple[int, int, int, int]]:
        """(left, top, right, bottom) of each part."""
        whole = (0, 0, width, height)
        if not self.splits:
            return [whole]
        if min(width, height) < 2:
            raise ValidationError(f"a picture of {width}x{height} pixels cannot be split into quarters")
        middle, centre = height // 2, width // 2
        upper = [(0, 0, centre, middle), (centre, 0, width, middle)]
        return [*upper, (0, middle, centre, height), (centre, middle, width, height), whole]

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        ratio = width / height
        if width >= height and width > self.max_edge:
            width, height = self.max_edge, int(self.max_edge / ratio)
        elif height > width and height > self.max_edge:
            width, height = int(self.max_edge * ratio), self.max_edge
        return max(height, self.min_edge), max(width, self.min_edge)


def make(files: ModelFiles) -> PictureRule:
    settings = files.picture
    files.processor_type("Idefics2")
    settings.must_be("do_resize", True)
    settings.must_be("do_pad", True)
    size = settings.inner("size")
    min_edge = size.integer("shortest_edge", 378, most=2**14)
    token = files.token("image_token", "<image>", "image_token_id", "image_token_index")
    return Idefics2Rule(
        image_token=token,
        marker=token,
        normalisation=settings.normalisation(HALVES),
        resample=settings.resample(2),
        boundary_token=files.token("image_boundary_token", "<fake_token_around_image>"),
        num_tokens=files.config.inner("perceiver_config").integer("resampler_n_latents", 64, most=2**16),
        splits=settings.flag("do_image_splitting", False),
        min_edge=min_edge,
        max_edge=size.integer("longest_edge", 980, least=min_edge, most=2**14),
    )
