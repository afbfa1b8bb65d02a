"""The tower of Llama 3.2 Vision: all tiles of a picture attend together, missing ones too.

A picture has always as many tiles as an arrangement can have: those that it lacks are zero, take embeddings of their
place, and are looked at. Padding (missing tiles, and rows that fill a tile up to a multiple of 8) sees what is real;
what is real sees everything. So nothing is masked: real rows read all, padding reads real rows. In padded passes, of
one shape for all pictures, a mask says the same.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
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
from text_generation_inference.models.vision.padded import PaddedTower, Piece
from text_generation_inference.models.vision.tower import Parts, run_parts, settle
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


class _MaskedPadding:
    """The same without numbers of rows: who sees whom as a mask."""

    def __init__(self, is_real: Tensor) -> None:
        """is_real: `[pictures, rows]`. Where there is nothing real all see all, so that what comes of it is finite."""
        others = is_real | ~is_real.any(1, keepdim=True)
        self._seen = (is_real[:, :, None] | others[:, None])[:, None]

    def attend(self, ops: Ops, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pictures, _, rows, _ = self._seen.shape
        q, k, v = (each.view(pictures, rows, *each.shape[1:]).transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._seen)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)


class MllamaTower(PaddedTower):
    """Features are the rows of all tiles, missing ones too: `num_features` of each picture.

    None of them stands in the place of an embedding: layers of their own read them.
    """

    unit = "pictures"
    shares_passes = False  # each takes as much memory as there is

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
        spec, device = self.spec, pixels[0].device
        arrangements = torch.tensor([grid[0] for grid in grids], device=device)
        num_tiles = torch.tensor([len(picture) for picture in pixels])
        has_tile = torch.arange(spec.max_tiles) < num_tiles[:, None]
        there = has_tile.to(device)
        patches = self._patches(torch.cat(list(pixels)))
        x = patches.new_zeros(*there.shape, spec.num_rows - 1, spec.block.hidden_size)
        x[there] = patches
        rows = _RealAndPadding(self._real_rows(there))
        features = yield from self._through(x, rows, arrangements)
        return list(features)

    def _patches(self, tiles: Tensor) -> Tensor:
        """-> `[tiles, patches, hidden]`"""
        embedding = self.vision.patches
        rows = embedding.forward(embedding.cut(tiles, self.normalisation).flatten(0, 2))
        return rows.view(tiles.shape[0], -1, rows.shape[1])

    def _real_rows(self, has_tile: Tensor) -> Tensor:
        """`[pictures, rows]`"""
        place = torch.arange(self._padded_rows, device=has_tile.device)
        return (has_tile[:, :, None] & (place < self.spec.num_rows)).flatten(1)

    @property
    def _padded_rows(self) -> int:
        """Of a tile."""
        return -(-self.spec.num_rows // _UNIT) * _UNIT

    def _through(self, patches: Tensor, rows: _RealAndPadding | _MaskedPadding, arrangements: Tensor) -> Parts[Tensor]:
        """patches `[pictures, tiles, patches, hidden]`, zero in missing tiles -> `[pictures, features, width]`"""
        spec, vision, count = self.spec, self.vision, patches.shape[0]
        x = self._embed(patches, arrangements)
        tiles = (count, spec.max_tiles, self._padded_rows, -1)
        x = F.pad(x, (0, 0, 0, self._padded_rows - spec.num_rows)).flatten(0, 2)
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
        return features.view(count, self.num_features, -1)

    def _embed(self, patches: Tensor, arrangements: Tensor) -> Tensor:
        """-> `[pictures, tiles, rows, hidden]`"""
        vision = self.vision
        x = patches + vision.tiles_before.forward(arrangements)
        x = torch.cat((vision.first.value.expand(*x.shape[:2], 1, -1), x), dim=2)
        x = x + vision.positions.forward(arrangements)
        return vision.norm_before.forward(x.flatten(0, 2)).view(x.shape)

    # -- padded passes: a picture is one piece, of as many tiles as one can have -------------------------------------

    def sizes_of(self, shape: Sequence[int], grid: Sequence[int]) -> list[int]:
        return [1]

    def num_rows(self, size: int) -> int:
        return size * self.num_features

    def pieces_of(self, pixels: Tensor, grid: Sequence[int]) -> list[Piece]:
        """Tiles, those that are missing with no matter which pixels; the number of the arrangement; which are there."""
        missing = self.spec.max_tiles - pixels.shape[0]
        tiles = torch.cat((pixels, pixels.new_zeros((missing, *pixels.shape[1:]))))
        has_tile = torch.arange(self.spec.max_tiles) < pixels.shape[0]
        return [[tiles[None], torch.tensor(grid[:1], dtype=torch.int32), has_tile[None]]]

    def blank(self) -> Piece:
        spec = self.spec
        tiles = torch.zeros((0, spec.max_tiles, spec.image_size, spec.image_size, 3), dtype=torch.uint8)
        has_tile = torch.zeros((0, spec.max_tiles), dtype=torch.bool)
        return [tiles, torch.zeros(0, dtype=torch.int32), has_tile]

    def run(self, *tensors: Tensor) -> Tensor:
        tiles, arrangements, has_tile = tensors
        patches = self._patches(tiles.flatten(0, 1)).unflatten(0, tiles.shape[:2])
        patches = torch.where(has_tile[:, :, None, None], patches, 0)
        rows = _MaskedPadding(self._real_rows(has_tile))
        features = run_parts(self._through(patches, rows, arrangements.long())).flatten(0, 1)
        return torch.cat((features, torch.zeros_like(features[:1])))

    def order_of(self, shape: Sequence[int], grid: Sequence[int]) -> np.ndarray:
        return np.arange(self.num_features)
