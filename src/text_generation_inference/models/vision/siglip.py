"""SigLIP's picture encoder: patches alone, learned positions, a norm behind the blocks."""

from collections.abc import Sequence

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
    "patch_size": 16,
}


class SiglipEmbeddings(Module):
    name = "embeddings"

    def __init__(self, ops: Ops, hidden_size: int, patch_size: int, num_patches: int) -> None:
        self.patches = PatchEmbedding(ops, "patch_embedding", patch_size, hidden_size, bias=True)
        self.positions = Parameter("position_embedding.weight", (num_patches, hidden_size))


def read_block(config: Config) -> BlockSpec:
    hidden_size, num_heads = check_heads(config, "hidden_size", "num_attention_heads")
    return BlockSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        width=config.integer("intermediate_size"),
        activation=read_activation(config, "hidden_act", "gelu_pytorch_tanh"),
        norm=NormSpec(eps=config.positive("layer_norm_eps", 1e-6), is_centred=True, bias=True),
    )


class SiglipVision(Encoder):
    def __init__(self, ops: Ops, config: Config, wanted: Sequence[int] | None = None) -> None:
        """wanted: states to give, by number: those behind so many blocks; None: the last one, behind its norm."""
        config = config.with_defaults(**DEFAULTS)
        config.refuse("num_channels", 3)
        spec = read_block(config)
        self.hidden_size = spec.hidden_size
        self.side = config.integer("image_size") // config.integer("patch_size")
        num_layers = config.integer("num_hidden_layers")
        num_used = num_layers if wanted is None else max(wanted)
        self.wanted = wanted
        self.num_states = 1 if wanted is None else len(wanted)
        self.embeddings = SiglipEmbeddings(ops, self.hidden_size, config.integer("patch_size"), self.side**2)
        self.blocks = [Block(ops, f"encoder.layers.{number}", spec) for number in range(num_used)]
        self.norm = TowerNorm(ops, spec.norm, "post_layernorm", self.hidden_size) if wanted is None else None
        self.ignored = (
            "embeddings.position_ids",
            "head.*",
            *(() if wanted is None else ("post_layernorm.*",)),
            *(f"encoder.layers.{number}.*" for number in range(num_used, num_layers)),
        )

    def states(self, pixels: Tensor, normalisation: Normalisation) -> Parts[list[Tensor]]:
        count, patches = pixels.shape[0], self.embeddings.patches.cut(pixels, normalisation).flatten(0, 2)
        x = self.embeddings.patches.forward(patches).view(count, -1, self.hidden_size)
        length = x.shape[1]
        segments = Segments([length] * count, x.device)
        wanted = [len(self.blocks)] if self.wanted is None else self.wanted
        x = (x + self.embeddings.positions.value).flatten(0, 1)
        states = yield from run_blocks(self.blocks, x, [segments] * len(self.blocks), wanted=wanted)
        found = [states[number] for number in wanted]
        if self.norm is not None:
            found = [self.norm.forward(each) for each in found]
        return [each.view(count, length, -1) for each in found]
