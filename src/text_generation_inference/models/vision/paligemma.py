"""PaliGemma 1 and 2: a square, projected; the text is Gemma or Gemma 2, whose prompts attend both ways.

pixels: `[1, side, side, 3]`. grid: ().
"""

from collections.abc import Collection
from typing import Any

from torch import Tensor

from text_generation_inference.kernels.ops import Ops
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.vision.blocks import linear
from text_generation_inference.models.vision.llava import DECODERS as DECODERS
from text_generation_inference.models.vision.llava import ENCODERS, PROJECTORS
from text_generation_inference.models.vision.llava import HEADS as HEADS
from text_generation_inference.models.vision.padded import TileTower
from text_generation_inference.models.vision.see import see
from text_generation_inference.models.vision.sight import Sight
from text_generation_inference.models.vision.siglip import SiglipVision
from text_generation_inference.models.vision.text import read_text
from text_generation_inference.models.vision.tower import Parts, Tower, settle
from text_generation_inference.weights.declare import Module

_VISION = {  # what a config means that says nothing of its encoder
    "intermediate_size": 4096,
    "hidden_size": 1152,
    "patch_size": 14,
    "image_size": 224,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
}
_TEXT = {  # or of its text model
    "hidden_size": 2048,
    "num_hidden_layers": 18,
    "intermediate_size": 16384,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "vocab_size": 257152,
}


def text_config(config: Config) -> dict[str, Any]:
    fields = read_text(config, "gemma", **(_TEXT if config.get("text_config") is None else {}))
    fields.pop("use_bidirectional_attention", None)  # of prompts, in every one of them: not a matter of the layers
    return fields


def build(config: Config, context: Context) -> Model:
    made = tower(config, context)
    return see(config, context, text_config(config), made, DECODERS, HEADS, Sight(made.width, whole_prompts=True))


def tower(config: Config, context: Context) -> Tower:
    return PaliGemmaTower(config, context)


class _PaliGemmaProjector(Module):
    name = PROJECTORS[0]

    def __init__(self, ops: Ops, hidden_size: int, width: int) -> None:
        self.projection = linear(ops, ["linear"], [width], hidden_size, bias=True)


class PaliGemmaTower(TileTower):
    def __init__(self, config: Config, context: Context) -> None:
        self.width = config.integer("projection_dim", 2048)
        vision = config.inner("vision_config")
        if config.get("vision_config") is None:
            vision = vision.with_defaults(**_VISION)
        vision.choice("model_type", ("siglip_vision_model",), "siglip_vision_model")
        self.encoder = SiglipVision(context.ops, vision)
        self.num_parts = len(self.encoder.blocks)
        self.num_each = self.encoder.side**2
        self.projector = _PaliGemmaProjector(context.ops, self.encoder.hidden_size, self.width)

    def adapt(self, names: Collection[str]) -> None:
        self.ignored = self.encoder.adapt(ENCODERS, names)
        settle(self.projector, PROJECTORS, names)

    def see(self, tiles: Tensor) -> Parts[Tensor]:
        (states,) = yield from self.encoder.states(tiles, self.normalisation)
        return self.projector.projection.forward(states.flatten(0, 1))
