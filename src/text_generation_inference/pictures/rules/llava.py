"""Llava 1.5: the shorter side is resized to the tower's, the middle is cut out; or padded to a square first.

SigLIP's towers, and settings with a height and a width, have the whole picture, distorted to a square. Towers of
Pixtral's kind: `pixtral`.

pixels: [1, side, side, 3]. grid: ().
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image as PillowImage
from PIL.Image import Image

from text_generation_inference.pictures.rule import PictureLayout, PictureRule
from text_generation_inference.pictures.rules import pixtral
from text_generation_inference.pictures.rules.base import FamilyRule
from text_generation_inference.pictures.rules.settings import CLIP, HALVES, ModelFiles


@dataclass(frozen=True, kw_only=True)
class LlavaRule(FamilyRule):
    side: int  # of the tower's pictures
    edge: int  # what the shorter side is resized to
    num_tokens: int
    distorts: bool  # to a square, nothing is cut off
    pads: bool  # to a square, with the mean colour

    def layout(self, width: int, height: int) -> PictureLayout:
        if not self.distorts and not self.pads:
            self.check_ratio(width, height)
        return PictureLayout((1, self.side, self.side, 3), (), (self.num_tokens,))

    def pixels(self, image: Image, layout: PictureLayout) -> np.ndarray:
        if self.distorts:
            return self.resize(image, self.side, self.side)[None]
        if self.pads and image.width != image.height:
            image = self._pad(image)
        short, long = sorted(image.size)
        resized = self.edge, int(self.edge * long / short)
        width, height = resized if image.width <= image.height else resized[::-1]
        return _cut_middle(self.resize(image, width, height), self.side)[None]

    def _pad(self, image: Image) -> Image:
        side = max(image.size)
        colour = tuple(int(mean * 255) for mean in self.normalisation.mean)
        square = PillowImage.new("RGB", (side, side), (colour[0], colour[1], colour[2]))
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return square


def _cut_middle(pixels: np.ndarray, side: int) -> np.ndarray:
    """A square out of the middle; black around what is smaller."""
    height, width = pixels.shape[:2]
    top, left = (height - side) // 2, (width - side) // 2
    if top >= 0 and left >= 0:
        return pixels[top : top + side, left : left + side]
    square = np.zeros((side, side, 3), np.uint8)
    part = pixels[max(top, 0) : max(top, 0) + side, max(left, 0) : max(left, 0) + side]
    below, right = max(-top, 0), max(-left, 0)
    square[below : below + part.shape[0], right : right + part.shape[1]] = part
    return square


def count_features(files: ModelFiles, kind: str, side: int, patch: int) -> int:
    """Features that a tower makes of a square: patches, and the class token if it has one and it is kept.

    The model's config decides; `num_additional_image_tokens` of processors is often missing where it is 1.
    """
    drops = files.config.choice("vision_feature_select_strategy", ("default", "full"), "default") == "default"
    return (side // patch) ** 2 + (kind == "clip_vision_model") - drops


def check_side(files: ModelFiles, name: str, side: int, tower_side: int) -> None:
    """Towers with a place for each patch take pictures of one size."""
    if side != tower_side:
        raise files.picture.wrong(name, f"is {side}, but the tower's pictures have sides of {tower_side}")


def make(files: ModelFiles) -> PictureRule:
    kind, tower_side, patch = files.tower("clip_vision_model", 336, 14)
    if kind == "pixtral":
        return pixtral.make(files)
    settings = files.picture
    is_siglip = files.processor_type("CLIP", "Llava", "Siglip") == "Siglip"
    settings.must_be("do_resize", True)
    size = settings.get("size")
    distorts = is_siglip or (isinstance(size, dict) and "height" in size)
    if distorts:
        side = edge = settings.side("size", 224)
        check_side(files, "size", side, tower_side)
    else:
        settings.must_be("do_center_crop", True)
        side, edge = settings.side("crop_size", 224), settings.side("size", 224)
        check_side(files, "crop_size", side, tower_side)
    token = files.token("image_token", "<image>", "image_token_index", "image_token_id")
    return LlavaRule(
        image_token=token,
        marker=token,
        normalisation=settings.normalisation(HALVES if is_siglip else CLIP),
        resample=settings.resample(3),
        side=side,
        edge=edge,
        num_tokens=count_features(files, kind, side, patch),
        distorts=distorts,
        pads=not distorts and settings.flag("do_pad", False),
    )
