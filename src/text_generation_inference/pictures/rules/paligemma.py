"""PaliGemma: a square, distorted. A prompt is its pictures, BOS, the text and a newline.

pixels: [1, side, side, 3]. grid: ().
"""

from dataclasses import dataclass

import numpy as np
from PIL.Image import Image

from text_generation_inference.pictures.rule import PictureLayout, PictureRule
from text_generation_inference.pictures.rules.base import FamilyRule
from text_generation_inference.pictures.rules.llava import check_side
from text_generation_inference.pictures.rules.settings import HALVES, ModelFiles


@dataclass(frozen=True, kw_only=True)
class PaliGemmaRule(FamilyRule):
    side: int
    num_tokens: int

    @property
    def places_bos(self) -> bool:
        return True

    def finish(self, text: str, bos: str) -> str:
        """BOS comes after the last picture. Text before it, which the model never saw in training, stays in place."""
        end = text.rfind(self.image_token) + len(self.image_token)
        return f"{text[:end]}{bos}{text[end:]}\n"

    def layout(self, width: int, height: int) -> PictureLayout:
        return PictureLayout((1, self.side, self.side, 3), (), (self.num_tokens,))

    def pixels(self, image: Image, layout: PictureLayout) -> np.ndarray:
        return self.resize(image, self.side, self.side)[None]


def make(files: ModelFiles) -> PictureRule:
    settings = files.picture
    files.processor_type("Siglip")
    settings.must_be("do_resize", True)
    _, tower_side, patch = files.tower("siglip_vision_model", 224, 14)
    side = settings.side("size", 224)
    check_side(files, "size", side, tower_side)
    token = files.token("image_token", "<image>", "image_token_index", "image_token_id")
    return PaliGemmaRule(
        image_token=token,
        marker=token,
        normalisation=settings.normalisation(HALVES),
        resample=settings.resample(3),
        side=side,
        num_tokens=(side // patch) ** 2,
    )
