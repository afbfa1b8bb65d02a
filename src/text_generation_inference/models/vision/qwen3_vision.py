"""The tower of Qwen3-VL: learned positions resampled to each grid beside the rotation, and features of several levels.

DeepStack: states of some blocks are merged too, to be added to what the first layers of the decoder make of a picture.
A feature is the merged state of the last block, then those of the levels: `width` is `1 + levels` times the decoder's.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.segments import Segments
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.vision.blocks import (
    Attends,
    Block,
    BlockSpec,
    MaskedRows,
    Parameter,
    PatchEmbedding,
    TowerFeedForward,
    TowerNorm,
    run_blocks,
)
from text_generation_inference.models.vision.grid import ByGrid, frequencies_of, places_of, rotation_of
from text_generation_inference.models.vision.patches import PatchTower
from text_generation_inference.models.vision.tower import Parts, run_parts, settle
from text_generation_inference.weights.declare import Module

_SPELLINGS = ("model.visual", "visual")


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VisionSpec:
    block: BlockSpec
    depth: int
    patch_size: int
    num_frames: int  # that a patch spans; those of a still picture are alike
    merge_size: int  # neighbours in each direction that become one feature
    width: int  # of a level of features
    theta: float  # of the rotation
    side: int  # of the square table of positions
    levels: tuple[int, ...]  # numbers of the blocks whose states are merged too


class _Qwen3Merger(Module):
    def __init__(self, ops: Ops, name: str, spec: Qwen3VisionSpec, norms_joined: bool) -> None:
        """norms_joined: neighbours are normed together, rather than each by itself."""
        self.name = name
        self.size = spec.block.hidden_size * spec.merge_size**2
        self.normed = self.size if norms_joined else spec.block.hidden_size
        self.norm = TowerNorm(ops, NormSpec(eps=1e-6, is_centred=True, bias=True), "norm", self.normed)
        sizes = (self.size, self.size, spec.width)
        self.mlp = TowerFeedForward(ops, "", ("linear_fc1",), "linear_fc2", sizes, "gelu", bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp.forward(self.norm.forward(x.view(-1, self.normed)).view(-1, self.size))


class _Qwen3Visual(Module):
    name = _SPELLINGS[0]

    def __init__(self, ops: Ops, spec: Qwen3VisionSpec) -> None:
        size = spec.block.hidden_size
        self.patches = PatchEmbedding(ops, "patch_embed.proj", spec.patch_size, size, True, spec.num_frames)
        self.positions = Parameter("pos_embed.weight", (spec.side**2, size))
        self.blocks = [Block(ops, f"blocks.{number}", spec.block) for number in range(spec.depth)]
        self.merger = _Qwen3Merger(ops, "merger", spec, norms_joined=False)
        levels = range(len(spec.levels))
        self.deep = [_Qwen3Merger(ops, f"deepstack_merger_list.{number}", spec, norms_joined=True) for number in levels]


@dataclass(frozen=True, slots=True)
class _Qwen3Pass:
    """Of all pictures of a pass: places and counts, as `_positions` has them, and how blocks see them."""

    places: Tensor
    counts: Tensor
    rotation: Tensor
    segments: Segments


class Qwen3Tower(PatchTower):
    def __init__(self, ops: Ops, spec: Qwen3VisionSpec) -> None:
        self.spec = spec
        self.num_levels = len(spec.levels)
        self.width = spec.width * (1 + self.num_levels)
        self.visual = _Qwen3Visual(ops, spec)
        self.merge = spec.merge_size
        self.num_parts = spec.depth
        self._layout_of = ByGrid(self._make_layout)

    @property
    def patches(self) -> PatchEmbedding:
        return self.visual.patches

    def adapt(self, names: Collection[str]) -> None:
        settle(self.visual, _SPELLINGS, names)

    def lay_out(
        self, shapes: Sequence[tuple[int, ...]], grids: Sequence[tuple[int, ...]], device: torch.device
    ) -> _Qwen3Pass:
        layout = self._lay_out(shapes, device)
        layout.segments.get_ready()
        return layout

    def _lay_out(self, shapes: Sequence[Sequence[int]], device: torch.device) -> _Qwen3Pass:
        sides = self.sides_of(shapes)
        each = [self._layout_of(*side, device) for side in sides]
        places, counts, rotation = (torch.cat(of_all) for of_all in zip(*each, strict=True))
        return _Qwen3Pass(places, counts, rotation, Segments([rows * columns for rows, columns in sides], device))

    def in_parts(
        self, pixels: Sequence[Tensor], grids: Sequence[tuple[int, ...]], layout: _Qwen3Pass | None = None
    ) -> Parts[list[Tensor]]:
        embedded = [self.embed(picture) for picture in pixels]
        if layout is None:
            layout = self._lay_out([picture.shape for picture in pixels], pixels[0].device)
        x = torch.cat(embedded)
        x = x + self._positions(layout.places, layout.counts).to(x.dtype)
        features = yield from self._through(x, layout.segments, layout.rotation)
        return list(features.split([rows.shape[0] // self.merge**2 for rows in embedded]))

    def run(self, *tensors: Tensor) -> Tensor:
        patches, places, counts, real = tensors
        x = self.embed_padded(patches)
        x = x + self._positions(places, counts).to(x.dtype)
        features = run_parts(self._through(x, MaskedRows(real, x.shape[0]), self._rotation(places)))
        return torch.cat((features, torch.zeros_like(features[:1])))

    def _make_layout(self, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Places and counts, as `_positions` has them, and the rotation."""
        places = places_of([(rows, columns)], self.merge).to(device)
        counts = torch.tensor([(rows, columns)], device=device).expand(len(places), 2)
        return places, counts, self._rotation(places)

    def _rotation(self, places: Tensor) -> Tensor:
        spec = self.spec
        frequencies = frequencies_of(spec.theta, spec.block.hidden_size // spec.block.num_heads // 2, places.device)
        return rotation_of(places, frequencies, frequencies)

    def _through(self, x: Tensor, segments: Segments | Attends, rotation: Tensor) -> Parts[Tensor]:
        """`[patches, hidden]` -> features of all levels."""
        spec, visual = self.spec, self.visual
        wanted = [number + 1 for number in sorted(spec.levels)]
        states = yield from run_blocks(visual.blocks, x, [segments] * len(visual.blocks), rotation, wanted)
        deep = [visual.deep[spec.levels.index(number - 1)].forward(states[number]) for number in wanted]
        return torch.cat((visual.merger.forward(states[len(visual.blocks)]), *deep), dim=1)

    def _positions(self, places: Tensor, counts: Tensor) -> Tensor:
        """Where a patch is between the four rows of the table around it; corners are corners.

        places and counts: `[patches, 2]`, row and column of how many.
        """
        side = self.spec.side
        exact = places.float() * (side - 1) / (counts - 1).clamp(min=1)
        low = exact.floor()
        share = exact - low
        low = low.long()
        high = (low + 1).clamp(max=side - 1)
        table = self.visual.positions.value
        found = torch.zeros((), device=table.device)
        for row, row_weight in ((low[:, 0], 1 - share[:, 0]), (high[:, 0], share[:, 0])):
            for column, weight in ((low[:, 1], 1 - share[:, 1]), (high[:, 1], share[:, 1])):
                found = found + table[row * side + column] * (row_weight * weight)[:, None]
        return found
