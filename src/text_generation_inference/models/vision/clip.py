"""CLIP's picture encoder: a class token before the patches, learned positions, a norm before the blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.segments import Segments
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.vision.blocks import (
    Block,
    BlockSpec,
    Parameter,
    PatchEmbedding,
    TowerNorm,
    check_heads,
    read_activation,
    run_blocks,
)
from text_generation_inference.models.vision.encoder import Encoder
from text_generation_inference.models.vision.tower import Parts
from text_generation_inference.pictures.rule import Normalisation
from text_generation_inference.weights.declare import Module

DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
}


class _Embeddings(Module):
    name = "embeddings"

    def __init__(self, ops: Ops, hidden_size: int, patch_size: int, num_patches: int) -> None:
        self.first = Parameter("class_embedding", (hidden_size,))
        self.patches = PatchEmbedding(ops, "patch_embedding", patch_size, hidden_size, bias=False)
        self.positions = Parameter("position_embedding.weight", (num_patches + 1, hidden_size))

    def forward(self, pixels: Tensor, normalisation: Normalisation) -> Tensor:
        """-> `[pictures, 1 + patches, hidden]`."""
        count, patches = pixels.shape[0], self.patches.cut(pixels, normalisation).flatten(0, 2)
        x = self.patches.forward(patches).view(count, -1, self.first.value.shape[0])
        return torch.cat((self.first.value.expand(count, 1, -1), x), dim=1) + self.positions.value


class ClipVision(Encoder):
    num_class_tokens = 1

    def __init__(self, ops: Ops, config: Config, wanted: Sequence[int]) -> None:
        """wanted: the states to give, by number: those behind so many blocks. What is behind the last is not read."""
        config = config.with_defaults(**DEFAULTS)
        config.refuse("num_channels", 3)
        self.hidden_size, num_heads = check_heads(config, "hidden_size", "num_attention_heads")
        self.side = config.integer("image_size") // config.integer("patch_size")
        norm = NormSpec(eps=config.positive("layer_norm_eps", 1e-5), is_centred=True, bias=True)
        spec = BlockSpec(
            hidden_size=self.hidden_size,
            num_heads=num_heads,
            width=config.integer("intermediate_size"),
            activation=read_activation(config, "hidden_act", "quick_gelu"),
            norm=norm,
        )
        self.wanted = wanted
        self.num_states = len(wanted)
        self.embeddings = _Embeddings(ops, self.hidden_size, config.integer("patch_size"), self.side**2)
        self.norm = TowerNorm(ops, norm, "pre_layrnorm", self.hidden_size)
        self.blocks = [Block(ops, f"encoder.layers.{number}", spec) for number in range(max(wanted))]
        unused = range(max(wanted), config.integer("num_hidden_layers"))
        self.ignored = (
            "embeddings.position_ids",
            "post_layernorm.*",
            *(f"encoder.layers.{number}.*" for number in unused),
        )

    def states(self, pixels: Tensor, normalisation: Normalisation) -> Parts[list[Tensor]]:
        x = self.embeddings.forward(pixels, normalisation)
        count, length, _ = x.shape
        segments = Segments([length] * count, x.device)
        x = self.norm.forward(x.flatten(0, 1))
        states = yield from run_blocks(self.blocks, x, [segments] * len(self.blocks), wanted=self.wanted)
        return [states[number].view(count, length, -1) for number in self.wanted]
