"""`PictureRule`: what a family does with a picture before its tower sees it.

A rule knows sizes and pixels, nothing of requests. What it needs is read from a model folder's files once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class PictureLayout:
    """What follows from a picture's size alone."""

    shape: tuple[int, ...]  # of its pixels, uint8: [tiles, height, width, 3] or [height, width, 3]
    grid: tuple[int, ...]  # what the tower must know beside the pixels; the rule's file says what it is
    # What stands for the picture in the prompt: texts, and numbers of tokens in whose place its features stand.
    expansion: tuple[str | int, ...]

    @property
    def num_features(self) -> int:
        return sum(part for part in self.expansion if isinstance(part, int))


@dataclass(frozen=True, slots=True)
class Normalisation:
    """(pixel * factor - mean) / std, by channel, in float32 on the device."""

    factor: float = 1 / 255
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)


class PictureRule(Protocol):
    @property
    def image_token(self) -> str:
        """The text of the token in whose place features stand."""
        ...

    @property
    def marker(self) -> str:
        """What the model's chat template writes for a picture; `PictureLayout.expansion` takes its place."""
        ...

    @property
    def reserved(self) -> frozenset[str]:
        """Texts of tokens that may come from pictures alone: not from users."""
        ...

    @property
    def normalisation(self) -> Normalisation: ...

    @property
    def identity(self) -> str:
        """All settings that decide pixels or layout, as text: part of every digest."""
        ...

    @property
    def places_bos(self) -> bool:
        """`finish` puts BOS where the family has it in a prompt with pictures; tokenising must add none."""
        ...

    def finish(self, text: str, bos: str) -> str:
        """A prompt with pictures as it is tokenised: as one text, texts of expansions joined with those around them.

        `text` has the expansions in it, with a single image token in place of each number: it is repeated when the
        text is ids. `bos` is the text of BOS, empty where the tokenizer would add none.
        """
        ...

    def layout(self, width: int, height: int) -> PictureLayout:
        """Raises `ValidationError` for sizes that the family cannot have."""
        ...

    def pixels(self, image: Image, layout: PictureLayout) -> np.ndarray:
        """uint8, of `layout.shape`, from an upright RGB picture of the size that the layout was made for."""
        ...

    def video_layout(self, width: int, height: int, num_frames: int, fps: float) -> PictureLayout:
        """Of a video whose frames have this size: `shape` is [frames, height, width, 3].

        Raises `ValidationError` for what the family cannot have.
        """
        ...

    def video_pixels(self, images: Iterable[Image], layout: PictureLayout) -> np.ndarray:
        """uint8, of `layout.shape`, from upright RGB frames of the size and number that the layout was made for."""
        ...
