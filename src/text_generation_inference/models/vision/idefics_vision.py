"""The picture encoder of Idefics2, Idefics3 and SmolVLM: SigLIP's for pictures of any proportions.

A patch takes the learned position that is as far down and to the right in the table as the patch is in its picture.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.segments import Segments
from text_generation_inference.models.config import Config
from text_generation_inference.models.vision.blocks import Attends, Block, TowerNorm, run_blocks
from text_generation_inference.models.vision.siglip import SiglipEmbeddings, read_block
from text_generation_inference.models.vision.tower import Parts
from text_generation_inference.pictures.rule import Normalisation
from text_generation_inference.weights.declare import Module

SPELLING = "model.vision_model"


class IdeficsVision(Module):
    name = SPELLING

    def __init__(self, ops: Ops, config: Config) -> None:
        config.refuse("num_channels", 3)
        spec = read_block(config)
        self.hidden_size = spec.hidden_size
        self.side = config.integer("image_size") // config.integer("patch_size")
        self.embeddings = SiglipEmbeddings(ops, self.hidden_size, config.integer("patch_size"), self.side**2)
        self._placed_for: tuple[int, int, torch.device] | None = None
        self._places: Tensor
        layers = range(config.integer("num_hidden_layers"))
        self.blocks = [Block(ops, f"encoder.layers.{number}", spec) for number in layers]
        self.norm = TowerNorm(ops, spec.norm, "post_layernorm", self.hidden_size)

    def forward(self, pixels: Sequence[Tensor], normalisation: Normalisation) -> Parts[tuple[Tensor, list[int]]]:
        """uint8, each `[pictures, height, width, 3]` -> `[patches of all, hidden]`, and how many patches each has."""
        embeddings, positions = self.embeddings, self.embeddings.positions.value
        embedded: list[Tensor] = []
        lengths: list[int] = []
        for alike in pixels:
            patches = embeddings.patches.cut(alike, normalisation)
            count, rows, columns, _ = patches.shape
            places = self.places_of_grid(rows, columns, positions.device)
            x = embeddings.patches.forward(patches.flatten(0, 2)).view(count, rows * columns, -1)
            embedded.append((x + positions[places]).flatten(0, 1))
            lengths += [rows * columns] * count
        x = torch.cat(embedded)
        return (yield from self.through(x, Segments(lengths, x.device))), lengths

    def through(self, x: Tensor, rows: Segments | Attends) -> Parts[Tensor]:
        """Embedded patches with their positions, `[patches, hidden]`."""
        states = yield from run_blocks(self.blocks, x, [rows] * len(self.blocks))
        return self.norm.forward(states[len(self.blocks)])

    def places_of_grid(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """Of the patches of a picture; those of the last grid are kept."""
        if (rows, columns, device) != self._placed_for:
            pairs = self.places_in_table(rows, columns)
            self._placed_for = (rows, columns, device)
            self._places = (pairs[:, 0] * self.side + pairs[:, 1]).to(device)
        return self._places

    def places_in_table(self, rows: int, columns: int) -> Tensor:
        """Row and column, in the square table, of each patch of a picture: `[patches, 2]`.

        In float32, and by search: the rounding is what a model was trained with.
        """
        ends = torch.arange(1 / self.side, 1.0, 1 / self.side)

        def along(count: int) -> Tensor:
            share = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
            return torch.bucketize(share.clamp(max=1.0 - 1e-6), ends, right=True)

        return torch.cartesian_prod(along(rows), along(columns))
