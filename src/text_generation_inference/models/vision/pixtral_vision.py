"""Pixtral's picture encoder: patches of any grid, a norm before the blocks, rotation by row and column."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.segments import Segments
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.vision.blocks import (
    Attends,
    Block,
    BlockSpec,
    PatchEmbedding,
    TowerNorm,
    check_heads,
    read_activation,
    run_blocks,
)
from text_generation_inference.models.vision.grid import ByGrid, frequencies_of, places_of, read_theta, rotation_of
from text_generation_inference.models.vision.tower import Parts
from text_generation_inference.pictures.rule import Normalisation
from text_generation_inference.weights.declare import Module

DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
}


@dataclass(frozen=True, slots=True)
class PixtralPass:
    """How blocks see the patches of all pictures of a pass."""

    sides: list[tuple[int, int]]  # rows and columns of each picture
    rotation: Tensor
    segments: Segments


class PixtralVision(Module):
    def __init__(self, ops: Ops, config: Config, wanted: Sequence[int]) -> None:
        """wanted: the states to give, by number: those behind so many blocks. What is behind the last is not read."""
        config = config.with_defaults(**DEFAULTS)
        config.refuse("num_channels", 3)
        self.hidden_size, num_heads = check_heads(config, "hidden_size", "num_attention_heads")
        self.head_dim = self.hidden_size // num_heads
        config.refuse("head_dim", self.head_dim)
        spec = BlockSpec(
            hidden_size=self.hidden_size,
            num_heads=num_heads,
            width=config.integer("intermediate_size"),
            activation=read_activation(config, "hidden_act", "gelu"),
            norm=NormSpec(eps=1e-5),
            norms=("attention_norm", "ffn_norm"),
            attention="attention",
            out="o_proj",
            attention_bias=False,
            feed_forward="feed_forward",
            up=("gate_proj", "up_proj"),
            down="down_proj",
            feed_forward_bias=False,
        )
        self.theta = read_theta(config)
        self.wanted = wanted
        self._rotation_of = ByGrid(self._make_rotation)
        self.patches = PatchEmbedding(ops, "patch_conv", config.integer("patch_size"), self.hidden_size, bias=False)
        self.norm = TowerNorm(ops, spec.norm, "ln_pre", self.hidden_size)
        self.blocks = [Block(ops, f"transformer.layers.{number}", spec) for number in range(max(wanted))]
        unused = range(max(wanted), config.integer("num_hidden_layers"))
        self.ignored = tuple(f"transformer.layers.{number}.*" for number in unused)

    def _make_rotation(self, rows: int, columns: int, device: torch.device) -> Tensor:
        return self.rotation_at(places_of([(rows, columns)], 1).to(device))

    def rotation_at(self, places: Tensor) -> Tensor:
        """places: row and column of each patch, `[patches, 2]`."""
        frequencies = frequencies_of(self.theta, self.head_dim, places.device)
        return rotation_of(places, frequencies[0::2], frequencies[1::2])

    def lay_out(self, shapes: Sequence[Sequence[int]], device: torch.device) -> PixtralPass:
        """shapes: of pixels, `(height, width, 3)`."""
        size = self.patches.patch_size
        sides = [(height // size, width // size) for height, width, _ in shapes]
        rotation = torch.cat([self._rotation_of(*each, device) for each in sides])
        return PixtralPass(sides, rotation, Segments([rows * columns for rows, columns in sides], device))

    def forward(
        self, pixels: Sequence[Tensor], normalisation: Normalisation, layout: PixtralPass
    ) -> Parts[list[Tensor]]:
        """uint8, each `[height, width, 3]` -> states `[patches of all, hidden]`."""
        cut = [self.patches.cut(picture[None], normalisation)[0] for picture in pixels]
        x = self.patches.forward(torch.cat([patches.flatten(0, 1) for patches in cut]))
        return (yield from self.through(x, layout.segments, layout.rotation))

    def through(self, x: Tensor, rows: Segments | Attends, rotation: Tensor) -> Parts[list[Tensor]]:
        """Embedded patches `[patches, hidden]`, in any order -> states."""
        x = self.norm.forward(x)
        states = yield from run_blocks(self.blocks, x, [rows] * len(self.blocks), rotation, self.wanted)
        return [states[number] for number in self.wanted]
