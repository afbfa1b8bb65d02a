"""Idefics2: squares of any proportions, each of which a few latents read: as many features whatever its size.

pixels: `[squares, height, width, 3]`, as large as the largest. grid: (height, width) of each square, one after another.
A patch that is not wholly in its square is left out.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.segments import Segments
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.vision.blocks import (
    Attends,
    MaskedRows,
    Parameter,
    PatchEmbedding,
    TowerFeedForward,
    TowerNorm,
    attend,
    linear,
    read_activation,
)
from text_generation_inference.models.vision.idefics3 import DECODERS as DECODERS
from text_generation_inference.models.vision.idefics3 import HEADS as HEADS
from text_generation_inference.models.vision.idefics_vision import IdeficsVision
from text_generation_inference.models.vision.patches import PatchTower
from text_generation_inference.models.vision.see import see
from text_generation_inference.models.vision.text import read_text
from text_generation_inference.models.vision.tower import Parts, Tower, run_parts
from text_generation_inference.weights.declare import Module

_VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
}
_PERCEIVER = {
    "resampler_n_latents": 64,
    "resampler_depth": 3,
    "resampler_n_heads": 16,
    "resampler_head_dim": 96,
    "num_key_value_heads": 4,
}


def text_config(config: Config) -> dict[str, Any]:
    missing = {"max_position_embeddings": 4096 * 8, "rms_norm_eps": 1e-5}
    return read_text(config, "mistral", **(missing if config.get("text_config") is None else {}))


def build(config: Config, context: Context) -> Model:
    return see(config, context, text_config(config), tower(config, context), DECODERS, HEADS)


def tower(config: Config, context: Context) -> Tower:
    return Idefics2Tower(config, context)


class _Attention(Module):
    """Latents read the rows of their square, and themselves."""

    name = "self_attn"

    def __init__(self, ops: Ops, size: int, heads: int, kv_heads: int, head_dim: int) -> None:
        self.ops, self.head_dim = ops, head_dim
        self.q = linear(ops, ["q_proj"], [heads * head_dim], size, bias=False)
        self.kv = linear(ops, ["k_proj", "v_proj"], [kv_heads * head_dim] * 2, size, bias=False)
        self.out = linear(ops, ["o_proj"], [size], heads * head_dim, bias=False)

    def forward(self, latents: Tensor, rows: Tensor, seen: Segments | Attends) -> Tensor:
        q = self.q.forward(latents).unflatten(1, (-1, self.head_dim))
        k, v = self.kv.forward(rows).unflatten(1, (2, -1, self.head_dim)).unbind(1)
        return self.out.forward(attend(self.ops, q, k, v, seen))


class _Layer(Module):
    def __init__(self, ops: Ops, number: int, size: int, config: Config, norm: NormSpec) -> None:
        self.name = f"layers.{number}"
        heads, kv_heads = config.integer("resampler_n_heads"), config.integer("num_key_value_heads")
        if heads % kv_heads:
            raise config.wrong("num_key_value_heads", f"is {kv_heads}, which {heads} heads cannot share evenly")
        self.latents_norm = TowerNorm(ops, norm, "input_latents_norm", size)
        self.context_norm = TowerNorm(ops, norm, "input_context_norm", size)
        self.attention = _Attention(ops, size, heads, kv_heads, config.integer("resampler_head_dim"))
        self.norm = TowerNorm(ops, norm, "post_attention_layernorm", size)
        activation = read_activation(config, "hidden_act", "silu")
        up, sizes = ("gate_proj", "up_proj"), (size, 4 * size, size)
        self.mlp = TowerFeedForward(ops, "mlp", up, "down_proj", sizes, activation, bias=False)

    def forward(self, latents: Tensor, context: Tensor, order: Tensor | None, seen: Segments | Attends) -> Tensor:
        """order: the rows of all squares and then all latents, as each square's own follow each other; None: as they
        do already."""
        normed = self.latents_norm.forward(latents)
        rows = torch.cat((self.context_norm.forward(context), normed))
        if order is not None:
            rows = rows[order]
        latents = latents + self.attention.forward(normed, rows, seen)
        return latents + self.mlp.forward(self.norm.forward(latents))


class _Resampler(Module):
    name = "perceiver_resampler"

    def __init__(self, ops: Ops, size: int, config: Config, norm: NormSpec) -> None:
        self.latents = Parameter("latents", (config.integer("resampler_n_latents"), size))
        depth = range(config.integer("resampler_depth"))
        self.layers = [_Layer(ops, number, size, config, norm) for number in depth]
        self.norm = TowerNorm(ops, norm, "norm", size)

    def forward(self, context: Tensor, lengths: Sequence[int]) -> Tensor:
        """context `[rows of all squares, size]` -> `[latents of all, size]`."""
        num = self.latents.value.shape[0]
        latents = self.latents.value.repeat(len(lengths), 1)
        of_rows = torch.arange(sum(lengths)).split(list(lengths))
        of_latents = torch.arange(sum(lengths), sum(lengths) + num * len(lengths)).split(num)
        order = torch.cat([each for pair in zip(of_rows, of_latents, strict=True) for each in pair]).to(context.device)
        segments = Segments([num] * len(lengths), context.device, [length + num for length in lengths])
        return self._through(latents, context, order, segments)

    def forward_padded(self, context: Tensor, real: Tensor) -> Tensor:
        """context `[rows of a square and padding, size]` -> `[latents, size]`."""
        latents = self.latents.value
        seen = torch.cat((real, torch.ones_like(real[:1]).expand(latents.shape[0])))
        return self._through(latents, context, None, MaskedRows(seen, seen.shape[0]))

    def _through(self, latents: Tensor, context: Tensor, order: Tensor | None, seen: Segments | Attends) -> Tensor:
        for layer in self.layers:
            latents = layer.forward(latents, context, order, seen)
        return self.norm.forward(latents)


class _Idefics2Connector(Module):
    name = "model.connector"

    def __init__(self, ops: Ops, vision_size: int, text: Config, perceiver: Config) -> None:
        size = text.integer("hidden_size")
        eps = text.positive("rms_norm_eps", 1e-6)
        if perceiver.integer("hidden_size", 4096) == size:  # else it is taken from the text model
            eps = perceiver.positive("rms_norm_eps", 1e-6)
        self.projection = TowerFeedForward(
            ops,
            "modality_projection",
            ("gate_proj", "up_proj"),
            "down_proj",
            (vision_size, text.integer("intermediate_size"), size),
            read_activation(text, "hidden_act", "silu"),
            bias=False,
        )
        self.resampler = _Resampler(ops, size, perceiver, NormSpec(eps=eps))


class Idefics2Tower(PatchTower):
    merge = 1

    def __init__(self, config: Config, context: Context) -> None:
        text = Config(text_config(config), config.source)
        self.width = text.integer("hidden_size")
        self.encoder = IdeficsVision(context.ops, config.inner("vision_config").with_defaults(**_VISION))
        self.num_parts = len(self.encoder.blocks)
        perceiver = config.inner("perceiver_config").with_defaults(**_PERCEIVER)
        self.connector = _Idefics2Connector(context.ops, self.encoder.hidden_size, text, perceiver)
        self.num_each = perceiver.integer("resampler_n_latents")

    @property
    def patches(self) -> PatchEmbedding:
        return self.encoder.embeddings.patches

    def adapt(self, names: Collection[str]) -> None:
        """There is one spelling."""

    def in_parts(
        self, pixels: Sequence[Tensor], grids: Sequence[tuple[int, ...]], layout: None = None
    ) -> Parts[list[Tensor]]:
        squares = [each for picture in zip(pixels, grids, strict=True) for each in _squares_of(*picture)]
        x, lengths = yield from self.encoder.forward(squares, self.normalisation)
        features = self.connector.resampler.forward(self.connector.projection.forward(x), lengths)
        return list(features.split([len(picture) * self.num_each for picture in pixels]))

    # -- padded passes, of a square each ---------------------------------------------------------------------------

    def sides_of_pieces(self, shape: Sequence[int], grid: Sequence[int]) -> list[tuple[int, int]]:
        size = self.patches.patch_size
        return [(height // size, width // size) for height, width in zip(grid[::2], grid[1::2], strict=True)]

    def cut_pieces(self, pixels: Tensor, grid: Sequence[int]) -> list[Tensor]:
        return [self.patches.cut_pixels(square)[0] for square in _squares_of(pixels, grid)]

    def places_in(self, rows: int, columns: int) -> Tensor:
        return self.encoder.places_in_table(rows, columns)

    def num_rows(self, size: int) -> int:
        return self.num_each

    def order_of(self, shape: Sequence[int], grid: Sequence[int]) -> np.ndarray:
        return np.arange(shape[0] * self.num_each)

    def run(self, *tensors: Tensor) -> Tensor:
        patches, places, _, real = tensors
        rows, columns = places.unbind(1)
        positions = self.encoder.embeddings.positions.value[rows * self.encoder.side + columns]
        x = run_parts(self.encoder.through(self.embed_padded(patches) + positions, MaskedRows(real, len(real))))
        features = self.connector.resampler.forward_padded(self.connector.projection.forward(x), real)
        return torch.cat((features, torch.zeros_like(features[:1])))


def _squares_of(pixels: Tensor, grid: Sequence[int]) -> list[Tensor]:
    """Each `[1, height, width, 3]`."""
    sides = zip(grid[::2], grid[1::2], strict=True)
    return [pixels[number : number + 1, :height, :width] for number, (height, width) in enumerate(sides)]
