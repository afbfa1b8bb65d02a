"""Llava-Next: the whole picture, then tiles of it, whose features become one map with a newline behind each row.

pixels: `[1 + rows * columns, side, side, 3]`, the whole picture first. grid: (rows, columns) of tiles, then those of
features that are kept: what was padded to make the picture fit its tiles is cut off evenly at both ends.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.vision.blocks import Parameter
from text_generation_inference.models.vision.llava import DECODERS as DECODERS
from text_generation_inference.models.vision.llava import HEADS as HEADS
from text_generation_inference.models.vision.llava import LlavaTower
from text_generation_inference.models.vision.llava import text_config as text_config
from text_generation_inference.models.vision.see import see
from text_generation_inference.models.vision.tower import Parts, Tower, settle
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

    def in_parts(self, pixels: Sequence[Tensor], grids: Sequence[tuple[int, ...]]) -> Parts[list[Tensor]]:
        features = yield from self.project(torch.cat(list(pixels)))
        each = features.split([len(picture) for picture in pixels])
        return [self._pack(found, *grid) for found, grid in zip(each, grids, strict=True)]

    def _pack(self, features: Tensor, rows: int, columns: int, kept_rows: int, kept_columns: int) -> Tensor:
        """features `[1 + tiles, tokens, width]` -> `[num_features, width]`."""
        side = self.encoder.side
        tiles = features[1:].view(rows, columns, side, side, -1)
        whole = tiles.transpose(1, 2).reshape(rows * side, columns * side, -1)
        top, left = (rows * side - kept_rows) // 2, (columns * side - kept_columns) // 2
        whole = whole[top : top + kept_rows, left : left + kept_columns]
        newlines = self.newline.vector.value.expand(kept_rows, 1, -1)
        return torch.cat((features[0], torch.cat((whole, newlines), dim=1).flatten(0, 1)))
