"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: any size whose sides are whole numbers of merged patches, within limits of area.

pixels: [height, width, 3]; the tower makes patches of them, and repeats them along time.
grid: (1, rows, columns), in patches before they are merged.
"""

import math
from dataclasses import dataclass

import numpy as np
from PIL.Image import Image

from text_generation_inference.pictures.rule import PictureLayout, PictureRule
from text_generation_inference.pictures.rules.base import FamilyRule
from text_generation_inference.pictures.rules.settings import CLIP, ModelFiles


@dataclass(frozen=True, kw_only=True)
class Qwen2VLRule(FamilyRule):
    start_token: str
    end_token: str
    video_token: str
    patch: int
    merge: int  # patches along a side that become one feature
    min_pixels: int
    max_pixels: int

    @property
    def reserved(self) -> frozenset[str]:
        return frozenset({self.image_token, self.start_token, self.end_token, self.video_token})

    def layout(self, width: int, height: int) -> PictureLayout:
        self.check_ratio(width, height)
        height, width = self._resized(width, height)
        rows, columns = height // self.patch, width // self.patch
        num_tokens = rows * columns // self.merge**2
        return PictureLayout((height, width, 3), (1, rows, columns), (self.start_token, num_tokens, self.end_token))

    def pixels(self, image: Image, layout: PictureLayout) -> np.ndarray:
        height, width = layout.shape[:2]
        return self.resize(image, width, height)

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        unit = self.patch * self.merge
        rounded = round(height / unit) * unit, round(width / unit) * unit
        if math.prod(rounded) > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            rounded = (
                max(unit, math.floor(height / shrink / unit) * unit),
                max(unit, math.floor(width / shrink / unit) * unit),
            )
        elif math.prod(rounded) < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rounded = math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
        return rounded


def make(files: ModelFiles) -> PictureRule:
    settings = files.picture
    files.processor_type("Qwen2VL")
    settings.must_be("do_resize", True)
    size = settings.inner("size")
    patch, merge = settings.side("patch_size", 14), settings.integer("merge_size", 2, most=64)
    vision, sixteen = files.vision, files.config.get("model_type") in ("qwen3_vl", "qwen3_vl_moe")
    tower = vision.side("patch_size", 16 if sixteen else 14), vision.integer("spatial_merge_size", 2, most=64)
    if (patch, merge) != tower:
        raise settings.wrong(
            "patch_size", f"and `merge_size` are {patch} and {merge}, the tower's {tower[0]} and {tower[1]}"
        )
    start = files.token("vision_start_token", "<|vision_start|>", "vision_start_token_id")
    end = files.token("vision_end_token", "<|vision_end|>", "vision_end_token_id")
    token = files.token("image_token", "<|image_pad|>", "image_token_id")
    return Qwen2VLRule(
        image_token=token,
        marker=start + token + end,
        normalisation=settings.normalisation(CLIP),
        resample=settings.resample(3),
        start_token=start,
        end_token=end,
        video_token=files.token("video_token", "<|video_pad|>", "video_token_id"),
        patch=patch,
        merge=merge,
        min_pixels=settings.integer("min_pixels", size.integer("shortest_edge", size.integer("min_pixels", 56 * 56))),
        max_pixels=settings.integer(
            "max_pixels", size.integer("longest_edge", size.integer("max_pixels", 28 * 28 * 1280))
        ),
    )
