"""The towers of Qwen2-VL and Qwen2.5-VL: patches of any grid, rotated by row and column, merged by neighbours.

Patches lie block by block: those that are merged into one feature follow each other. In Qwen2.5 most blocks attend
within windows of a picture, for which the units of one window are brought together, until the features are made.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.segments import Segments
from text_generation_inference.models.vision.blocks import (
    Attends,
    Block,
    BlockSpec,
    MaskedRows,
    PatchEmbedding,
    TowerFeedForward,
    TowerNorm,
    run_blocks,
)
from text_generation_inference.models.vision.grid import ByGrid, frequencies_of, places_of, rotation_of
from text_generation_inference.models.vision.patches import PatchTower
from text_generation_inference.models.vision.tower import Parts, run_parts, settle
from text_generation_inference.weights.declare import Module

SPELLINGS = ("visual", "model.visual")


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVisionSpec:
    block: BlockSpec
    depth: int
    patch_size: int
    num_frames: int  # that a patch spans; those of a still picture are alike
    merge_size: int  # neighbours in each direction that become one feature
    width: int  # of features
    theta: float  # of the rotation
    window: int | None = None  # of merged units in each direction; None: all blocks see all of a picture
    full_blocks: frozenset[int] = frozenset()  # those that do so even if there is a window


class _Qwen2Merger(Module):
    name = "merger"

    def __init__(self, ops: Ops, spec: QwenVisionSpec) -> None:
        self.norm = TowerNorm(ops, spec.block.norm, "ln_q", spec.block.hidden_size)
        self.size = spec.block.hidden_size * spec.merge_size**2
        self.mlp = TowerFeedForward(ops, "mlp", ("0",), "2", (self.size, self.size, spec.width), "gelu", bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp.forward(self.norm.forward(x).view(-1, self.size))


class _Qwen2Visual(Module):
    name = SPELLINGS[0]

    def __init__(self, ops: Ops, spec: QwenVisionSpec) -> None:
        self.patches = PatchEmbedding(
            ops, "patch_embed.proj", spec.patch_size, spec.block.hidden_size, False, spec.num_frames
        )
        self.blocks = [Block(ops, f"blocks.{number}", spec.block) for number in range(spec.depth)]
        self.merger = _Qwen2Merger(ops, spec)


@dataclass(frozen=True, slots=True)
class _Layout:
    """How blocks see the patches of a grid."""

    rotation: Tensor
    order: Tensor | None = None  # where there are windows: which unit is at which place
    windows: Sequence[int] = ()  # how many patches each has


@dataclass(frozen=True, slots=True)
class _Qwen2Pass:
    """How blocks see those of all pictures of a pass."""

    rotation: Tensor
    full: Segments
    windowed: Segments
    order: Tensor | None = None


class QwenTower(PatchTower):
    def __init__(self, ops: Ops, spec: QwenVisionSpec) -> None:
        self.spec = spec
        self.width = spec.width
        self.visual = _Qwen2Visual(ops, spec)
        self.merge, self.window = spec.merge_size, spec.window
        self.num_parts = spec.depth
        self._layout_of = ByGrid(self._make_layout)

    @property
    def patches(self) -> PatchEmbedding:
        return self.visual.patches

    def adapt(self, names: Collection[str]) -> None:
        settle(self.visual, SPELLINGS, names)

    def lay_out(
        self, shapes: Sequence[tuple[int, ...]], grids: Sequence[tuple[int, ...]], device: torch.device
    ) -> _Qwen2Pass:
        layout = self._lay_out(shapes, device)
        layout.full.get_ready()
        layout.windowed.get_ready()
        return layout

    def _lay_out(self, shapes: Sequence[Sequence[int]], device: torch.device) -> _Qwen2Pass:
        sides, unit = self.sides_of(shapes), self.merge**2
        each = [self._layout_of(*side, device) for side in sides]
        rotation = torch.cat([layout.rotation for layout in each])
        full = Segments([rows * columns for rows, columns in sides], device)
        orders = [layout.order for layout in each if layout.order is not None]
        if not orders:
            return _Qwen2Pass(rotation, full, full)
        starts = accumulate((length // unit for length in full.queries[:-1]), initial=0)
        order = torch.cat([order + start for order, start in zip(orders, starts, strict=True)])
        return _Qwen2Pass(rotation, full, Segments([n for layout in each for n in layout.windows], device), order)

    def in_parts(
        self, pixels: Sequence[Tensor], grids: Sequence[tuple[int, ...]], layout: _Qwen2Pass | None = None
    ) -> Parts[list[Tensor]]:
        embedded, unit = [self.embed(picture) for picture in pixels], self.merge**2
        if layout is None:
            layout = self._lay_out([picture.shape for picture in pixels], pixels[0].device)
        x, order = torch.cat(embedded), layout.order
        if order is not None:
            x = _reorder(x, order, unit)
        x = yield from self._through(x, layout.full, layout.windowed, layout.rotation)
        features = self.visual.merger.forward(x)
        if order is not None:
            features = torch.empty_like(features).index_copy_(0, order, features)
        return list(features.split([rows.shape[0] // unit for rows in embedded]))

    def _through(
        self, x: Tensor, full: Segments | Attends, windowed: Segments | Attends, rotation: Tensor
    ) -> Parts[Tensor]:
        blocks = self.visual.blocks
        rows = [full if number in self.spec.full_blocks else windowed for number in range(len(blocks))]
        states = yield from run_blocks(blocks, x, rows, rotation)
        return states[len(blocks)]

    def _make_layout(self, rows: int, columns: int, device: torch.device) -> _Layout:
        spec, merge = self.spec, self.merge
        frequencies = frequencies_of(spec.theta, spec.block.hidden_size // spec.block.num_heads // 2, device)
        rotation = rotation_of(places_of([(rows, columns)], merge).to(device), frequencies, frequencies)
        if spec.window is None:
            return _Layout(rotation)
        units, windows = _by_window(rows // merge, columns // merge, spec.window)
        order = units.to(device)
        return _Layout(_reorder(rotation, order, merge**2), order, [count * merge**2 for count in windows])

    def run(self, *tensors: Tensor) -> Tensor:
        spec, (patches, places, _, real) = self.spec, tensors
        x = self.embed_padded(patches)
        frequencies = frequencies_of(spec.theta, spec.block.hidden_size // spec.block.num_heads // 2, x.device)
        rotation = rotation_of(places, frequencies, frequencies)
        full = windowed = MaskedRows(real, x.shape[0])
        if spec.window is not None:
            windowed = MaskedRows(real, self.step)
        features = self.visual.merger.forward(run_parts(self._through(x, full, windowed, rotation)))
        return torch.cat((features, torch.zeros_like(features[:1])))


def _by_window(rows: int, columns: int, window: int) -> tuple[Tensor, list[int]]:
    """Which unit is at which place when those of a window are together, and how many units each window has."""
    numbers = torch.arange(rows * columns).view(rows, columns)
    units = [one.flatten() for band in numbers.split(window) for one in band.split(window, dim=1)]
    return torch.cat(units), [len(each) for each in units]


def _reorder(x: Tensor, order: Tensor, unit: int) -> Tensor:
    return x.unflatten(0, (-1, unit))[order].flatten(0, 1)
