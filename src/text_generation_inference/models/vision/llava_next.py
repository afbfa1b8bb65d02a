"""Llava-Next: the whole picture, then tiles of it, whose features become one map with a newline behind each row.

pixels: `[1 + rows * columns, side, side, 3]`, the whole picture first. grid: (rows, columns) of tiles, then those of
features that are kept: what was padded to make the picture fit its tiles is cut off evenly at both ends.
"""

from collections.abc import Collection, Sequence

import numpy as np
from torch import Tensor

from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.vision.blocks import Parameter
from text_generation_inference.models.vision.llava import DECODERS as DECODERS
from text_generation_inference.models.vision.llava import HEADS as HEADS
from text_generation_inference.models.vision.llava import LlavaTower
from text_generation_inference.models.vision.llava import text_config as text_config
from text_generation_inference.models.vision.see import see
from text_generation_inference.models.vision.tower import Tower, settle
from text_generation_inference.weights.declare import Module


def build(config: Config, context: Context) -> Model:
    return see(config, context, text_config(config), tower(config, context), DECODERS, HEADS)


def tower(config: Config, context: Context) -> Tower:
    return LlavaNextTower(config, context)


class _Newline(Module):
    def __init__(self, width: int) -> None:
        self.vector = Parameter("image_newline", (width,))


class LlavaNextTower(LlavaTower):
    def __init__(self, config: Config, context: Context) -> None:
        super().__init__(config, context)
        self.newline = _Newline(self.width)

    def adapt(self, names: Collection[str]) -> None:
        super().adapt(names)
        settle(self.newline, ("", "model"), names)

    @property
    def between(self) -> Tensor | None:
        return self.newline.vector.value

    def order_of(self, shape: Sequence[int], grid: Sequence[int]) -> np.ndarray:
        """The whole picture's features, then rows of the map that its tiles make, each with a newline behind it."""
        side, (rows, columns, kept_rows, kept_columns) = self.encoder.side, grid
        whole = np.arange(self.num_each)
        tiles = self.num_each + np.arange(rows * columns * side**2).reshape(rows, columns, side, side)
        joined = tiles.transpose(0, 2, 1, 3).reshape(rows * side, columns * side)
        top, left = (rows * side - kept_rows) // 2, (columns * side - kept_columns) // 2
        kept = joined[top : top + kept_rows, left : left + kept_columns]
        newlines = np.full((kept_rows, 1), -1)
        return np.concatenate((whole, np.concatenate((kept, newlines), axis=1).reshape(-1)))
