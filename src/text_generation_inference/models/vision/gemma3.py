"""Gemma 3: a square and crops of it, whose patches are averaged to a smaller grid, normed and projected.

pixels: `[1 + crops, side, side, 3]`. grid: (). Tokens of one square attend to each other both ways in the decoder.
"""

from collections.abc import Collection
from typing import Any

from torch import Tensor

from text_generation_inference.kernels.ops import Ops
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.vision.blocks import TowerLinear, TowerNorm
from text_generation_inference.models.vision.llava import DECODERS as DECODERS
from text_generation_inference.models.vision.llava import ENCODERS, PROJECTORS
from text_generation_inference.models.vision.llava import HEADS as HEADS
from text_generation_inference.models.vision.padded import TileTower
from text_generation_inference.models.vision.see import see
from text_generation_inference.models.vision.sight import Sight
from text_generation_inference.models.vision.siglip import SiglipVision
from text_generation_inference.models.vision.text import read_text
from text_generation_inference.models.vision.tower import Parts, Tower, settle
from text_generation_inference.weights.declare import Module, Part


def text_config(config: Config) -> dict[str, Any]:
    return read_text(config, "gemma3_text")


def build(config: Config, context: Context) -> Model:
    made = tower(config, context)
    return see(config, context, text_config(config), made, DECODERS, HEADS, Sight(made.width, whole_runs=True))


def tower(config: Config, context: Context) -> Tower:
    return Gemma3Tower(config, context)


class _Gemma3Projector(Module):
    name = PROJECTORS[0]

    def __init__(self, ops: Ops, hidden_size: int, width: int, eps: float) -> None:
        self.norm = TowerNorm(ops, NormSpec(eps=eps, plus=1.0), "mm_soft_emb_norm", hidden_size)
        stored = Part("mm_input_projection_weight", (hidden_size, width), transposed=True)
        self.projection = TowerLinear(ops, [stored])


class Gemma3Tower(TileTower):
    def __init__(self, config: Config, context: Context) -> None:
        self.width = Config(text_config(config), config.source).integer("hidden_size")
        vision = config.inner("vision_config")
        vision.choice("model_type", ("siglip_vision_model",), "siglip_vision_model")
        self.encoder = SiglipVision(context.ops, vision)
        self.num_parts = len(self.encoder.blocks)
        num_tokens = config.integer("mm_tokens_per_image", 256)
        self.side = int(num_tokens**0.5)
        if self.side**2 != num_tokens or self.encoder.side % self.side:
            patches = self.encoder.side**2
            raise config.wrong("mm_tokens_per_image", f"is {num_tokens}: no grid that {patches} patches divide into")
        self.num_each = num_tokens
        eps = vision.positive("layer_norm_eps", 1e-6)
        self.projector = _Gemma3Projector(context.ops, self.encoder.hidden_size, self.width, eps)

    def adapt(self, names: Collection[str]) -> None:
        self.ignored = self.encoder.adapt(ENCODERS, names)
        settle(self.projector, PROJECTORS, names)

    def see(self, tiles: Tensor) -> Parts[Tensor]:
        (states,) = yield from self.encoder.states(tiles, self.normalisation)
        each = self.encoder.side // self.side
        x = states.view(len(tiles), self.side, each, self.side, each, -1).mean((2, 4)).flatten(0, 2)
        return self.projector.projection.forward(self.projector.norm.forward(x))
