"""The tower of Llama 3.2 Vision: all tiles of a picture attend together, missing ones too.

A picture has always as many tiles as an arrangement can have: those that it lacks are zero, take embeddings of their
place, and are looked at. Padding (missing tiles, and rows that fill a tile up to a multiple of 8) sees what is real;
what is real sees everything. So nothing is masked: real rows read all, padding reads real rows.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.segments import Segments
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.vision.blocks import (
    Block,
    BlockSpec,
    Parameter,
    PatchEmbedding,
    TowerNorm,
    linear,
    run_blocks,
)
from text_generation_inference.models.vision.tower import Parts, Tower, settle
from text_generation_inference.weights.declare import Module

_ENCODERS = ("vision_model", "model.vision_model")
_PROJECTORS = ("", "model")
_UNIT = 8  # a tile has a multiple of so many rows


@dataclass(frozen=True, slots=True, kw_only=True)
class MllamaVisionSpec:
    block: BlockSpec
    num_layers: int
    num_global_layers: int
    kept: tuple[int, ...]  # numbers of the layers whose states are part of a feature
    image_size: int
    patch_size: int
    max_tiles: int
    num_arrangements: int
    width: int  # of features

    @property
    def num_rows(self) -> int:
        """Of a tile, with its class token."""
        return (self.image_size // self.patch_size) ** 2 + 1


class _TileEmbedding(Module):
    """A vector for each tile of an arrangement."""

    def __init__(self, name: str, spec: MllamaVisionSpec) -> None:
        self.name = name
        size = spec.block.hidden_size
        self.shape = (-1, spec.max_tiles, 1, size)
        self.table = Parameter("embedding.weight", (spec.num_arrangements + 1, spec.max_tiles * size))
        self.gate = Parameter("gate", (1,))

    def forward(self, arrangements: Tensor) -> Tensor:
        """-> `[pictures, tiles, 1, hidden]`."""
        return self.table.value[arrangements].view(self.shape) * self.gate.value.tanh()


class _Positions(Module):
    """A vector for each row of a tile, and one for each row of each tile of an arrangement."""

    name = "gated_positional_embedding"

    def __init__(self, spec: MllamaVisionSpec) -> None:
        size = spec.block.hidden_size
        self.shape = (-1, spec.max_tiles, spec.num_rows, size)
        self.rows = Parameter("embedding", (spec.num_rows, size))
        all_tiles = (spec.num_arrangements + 1, spec.max_tiles * spec.num_rows * size)
        self.table = Parameter("tile_embedding.weight", all_tiles)
        self.gate = Parameter("gate", (1,))

    def forward(self, arrangements: Tensor) -> Tensor:
        """-> `[pictures, tiles, rows, hidden]`."""
        share = self.gate.value.tanh()
        return (1 - share) * self.rows.value + share * self.table.value[arrangements].view(self.shape)


class _Vision(Module):
    name = _ENCODERS[0]

    def __init__(self, ops: Ops, spec: MllamaVisionSpec) -> None:
        size, norm = spec.block.hidden_size, NormSpec(eps=1e-5, is_centred=True, bias=True)
        gated = replace(spec.block, gates=("gate_attn", "gate_ffn"))
        self.patches = PatchEmbedding(ops, "patch_embedding", spec.patch_size, size, bias=False)
        self.first = Parameter("class_embedding", (size,))
        self.positions = _Positions(spec)
        self.tiles_before = _TileEmbedding("pre_tile_positional_embedding", spec)
        self.tiles_behind = _TileEmbedding("post_tile_positional_embedding", spec)
        self.norm_before = TowerNorm(ops, norm, "layernorm_pre", size)
        self.norm_behind = TowerNorm(ops, norm, "layernorm_post", size)
        self.layers = [Block(ops, f"transformer.layers.{n}", spec.block) for n in range(spec.num_layers)]
        layers = range(spec.num_global_layers)
        self.global_layers = [Block(ops, f"global_transformer.layers.{n}", gated) for n in layers]


class _MllamaProjector(Module):
    def __init__(self, ops: Ops, in_features: int, width: int) -> None:
        self.projection = linear(ops, ["multi_modal_projector"], [width], in_features, bias=True)


class _RealAndPadding:
    """Real rows attend to all rows of their picture, padding to its real rows."""

    def __init__(self, is_real: Tensor) -> None:
        """is_real: `[pictures, rows]`."""
        device, num_rows = is_real.device, is_real.shape[1]
        counts = is_real.sum(1).tolist()
        self.real, self.padding = (each.flatten().nonzero().flatten() for each in (is_real, ~is_real))
        self.of_real = Segments(counts, device, [num_rows] * len(counts))
        self.of_padding = Segments([num_rows - count for count in counts], device, counts)

    def attend(self, ops: Ops, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not len(self.padding):
            return ops.segment_attention(q, k, v, self.of_real)
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        out[self.real] = ops.segment_attention(q[self.real], k, v, self.of_real)
        out[self.padding] = ops.segment_attention(q[self.padding], k[self.real], v[self.real], self.of_padding)
        return out


class MllamaTower(Tower):
    """Features are the rows of all tiles, missing ones too: `num_features` of each picture.

    None of them stands in the place of an embedding: layers of their own read them.
    """

    def __init__(self, ops: Ops, spec: MllamaVisionSpec) -> None:
        self.spec = spec
        self.width = spec.width
        self.num_parts = spec.num_layers + spec.num_global_layers
        self.vision = _Vision(ops, spec)
        self.projector = _MllamaProjector(ops, spec.block.hidden_size * (1 + len(spec.kept)), spec.width)

    @property
    def num_features(self) -> int:
        """Of each picture."""
        return self.spec.max_tiles * self.spec.num_rows

    def adapt(self, names: Collection[str]) -> None:
        settle(self.vision, _ENCODERS, names)
        settle(self.projector, _PROJECTORS, names)

    def in_parts(
        self, pixels: Sequence[Tensor], grids: Sequence[tuple[int, ...]], layout: None = None
    ) -> Parts[list[Tensor]]:
        spec, vision, device = self.spec, self.vision, pixels[0].device
        arrangements = torch.tensor([grid[0] for grid in grids], device=device)
        num_tiles = torch.tensor([len(picture) for picture in pixels])
        has_tile = torch.arange(spec.max_tiles) < num_tiles[:, None]
        x = self._embed(torch.cat(list(pixels)), has_tile.to(device), arrangements)
        padded = -(-spec.num_rows // _UNIT) * _UNIT
        is_real = has_tile[:, :, None] & (torch.arange(padded) < spec.num_rows)
        rows = _RealAndPadding(is_real.flatten(1).to(device))
        tiles = (len(pixels), spec.max_tiles, padded, -1)
        x = F.pad(x, (0, 0, 0, padded - spec.num_rows)).flatten(0, 2)
        wanted = [number + 1 for number in spec.kept]
        states = yield from run_blocks(vision.layers, x, [rows] * len(vision.layers), wanted=wanted)
        x = states[len(vision.layers)]
        x = vision.norm_behind.forward(x).view(tiles) + vision.tiles_behind.forward(arrangements)
        of_all = yield from run_blocks(vision.global_layers, x.flatten(0, 2), [rows] * len(vision.global_layers))
        x = of_all[len(vision.global_layers)]
        # Channels of the layers that are kept take turns.
        inner = torch.stack([states[number] for number in wanted], dim=-1).flatten(1)
        x = torch.cat((x, inner), dim=1).view(tiles)[:, :, : spec.num_rows].flatten(0, 2)
        features = self.projector.projection.forward(x)
        return list(features.view(len(pixels), self.num_features, -1))

    def _embed(self, tiles: Tensor, has_tile: Tensor, arrangements: Tensor) -> Tensor:
        """-> `[pictures, tiles, rows, hidden]`, missing tiles as if their patches were zero."""
        vision, size = self.vision, self.spec.block.hidden_size
        patches = vision.patches.forward(vision.patches.cut(tiles, self.normalisation).flatten(0, 2))
        x = patches.new_zeros(*has_tile.shape, self.spec.num_rows - 1, size)
        x[has_tile] = patches.view(len(tiles), -1, size)
        x = x + vision.tiles_before.forward(arrangements)
        x = torch.cat((vision.first.value.expand(*has_tile.shape, 1, -1), x), dim=2)
        x = x + vision.positions.forward(arrangements)
        return vision.norm_before.forward(x.flatten(0, 2)).view(x.shape)
