"""Idefics3 and SmolVLM: tiles and the whole picture, of which squares of neighbours become one feature.

pixels: `[tiles + 1, side, side, 3]`, or the whole alone. grid: (rows, columns) of tiles, not looked at.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.kernels.ops import Ops
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.vision.blocks import TowerLinear, linear
from text_generation_inference.models.vision.idefics_vision import IdeficsVision
from text_generation_inference.models.vision.padded import TileTower
from text_generation_inference.models.vision.see import see
from text_generation_inference.models.vision.text import read_text
from text_generation_inference.models.vision.tower import Parts, Tower
from text_generation_inference.weights.declare import Module

DECODERS = ("model.text_model",)  # what checkpoints call the text model
HEADS = ("lm_head",)
_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
}


def text_config(config: Config) -> dict[str, Any]:
    return read_text(config, "llama", **({"rms_norm_eps": 1e-5} if config.get("text_config") is None else {}))


def build(config: Config, context: Context) -> Model:
    return see(config, context, text_config(config), tower(config, context), DECODERS, HEADS)


def tower(config: Config, context: Context) -> Tower:
    return Idefics3Tower(config, context)


class _Idefics3Connector(Module):
    name = "model.connector"

    def __init__(self, ops: Ops, in_features: int, width: int) -> None:
        self.projection: TowerLinear = linear(ops, ["modality_projection.proj"], [width], in_features, bias=False)


class Idefics3Tower(TileTower):
    def __init__(self, config: Config, context: Context) -> None:
        self.width = Config(text_config(config), config.source).integer("hidden_size")
        self.scale = config.integer("scale_factor", 2)
        self.encoder = IdeficsVision(context.ops, config.inner("vision_config").with_defaults(**_VISION))
        self.num_parts = len(self.encoder.blocks)
        self.connector = _Idefics3Connector(context.ops, self.encoder.hidden_size * self.scale**2, self.width)

    def adapt(self, names: Collection[str]) -> None:
        """There is one spelling."""

    def look_at(self, shape: Sequence[int]) -> None:
        super().look_at(shape)
        self.num_each = (shape[1] // self.encoder.embeddings.patches.patch_size // self.scale) ** 2

    def get_ready(self, device: torch.device) -> None:
        super().get_ready(device)
        self._places(self.tile_shape, self.encoder.embeddings.positions.value.device)  # with its number, as a pass asks

    def lay_out(
        self, shapes: Sequence[tuple[int, ...]], grids: Sequence[tuple[int, ...]], device: torch.device
    ) -> list[Tensor]:
        return [self._places(shapes[0][1:], device)]

    def _places(self, tile: Sequence[int], device: torch.device) -> Tensor:
        rows, columns = (side // self.encoder.embeddings.patches.patch_size for side in tile[:2])
        return self.encoder.places_of_grid(rows, columns, device)

    def see(self, tiles: Tensor) -> Parts[Tensor]:
        scale = self.scale
        x, lengths = yield from self.encoder.forward([tiles], self.normalisation)
        side = round(lengths[0] ** 0.5) // scale
        x = x.view(len(tiles), side, scale, side, scale, -1).transpose(2, 3).reshape(len(tiles) * side**2, -1)
        return self.connector.projection.forward(x)
