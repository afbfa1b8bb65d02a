"""Llava 1.5: one square picture, an inner state of its encoder, two products to the decoder's width.

pixels: `[1, side, side, 3]`. grid: ().
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.kernels.ops import Ops
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.vision import pixtral
from text_generation_inference.models.vision.blocks import TowerFeedForward, read_activation
from text_generation_inference.models.vision.clip import ClipVision
from text_generation_inference.models.vision.encoder import Encoder, read_feature_layers
from text_generation_inference.models.vision.padded import TileTower
from text_generation_inference.models.vision.see import see
from text_generation_inference.models.vision.siglip import SiglipVision
from text_generation_inference.models.vision.text import read_text
from text_generation_inference.models.vision.tower import Parts, Tower, settle

DECODERS = ("language_model.model", "model.language_model")  # what checkpoints call the text model
HEADS = ("language_model.lm_head", "lm_head")
ENCODERS = ("vision_tower.vision_model", "vision_tower", "model.vision_tower", "model.vision_tower.vision_model")
PROJECTORS = ("multi_modal_projector", "model.multi_modal_projector")
_VISION = {  # what a config means that says nothing of its encoder
    "model_type": "clip_vision_model",
    "intermediate_size": 4096,
    "hidden_size": 1024,
    "patch_size": 14,
    "image_size": 336,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}


def text_config(config: Config) -> dict[str, Any]:
    return read_text(config, "llama")


def build(config: Config, context: Context) -> Model:
    return see(config, context, text_config(config), tower(config, context), DECODERS, HEADS)


def tower(config: Config, context: Context) -> Tower:
    if config.inner("vision_config").get("model_type") == "pixtral":
        return pixtral.tower(config, context)
    return LlavaTower(config, context)


class LlavaTower(TileTower):
    def __init__(self, config: Config, context: Context) -> None:
        ops = context.ops
        self.encoder = read_encoder(config, ops)
        self.num_parts = len(self.encoder.blocks)
        self.keeps_first = config.choice("vision_feature_select_strategy", ("default", "full"), "default") == "full"
        self.num_each = self.encoder.side**2 + self.encoder.num_class_tokens - (not self.keeps_first)
        self.width = Config(text_config(config), config.source).integer("hidden_size")
        self.projector = TowerFeedForward(
            ops,
            PROJECTORS[0],
            ("linear_1",),
            "linear_2",
            (self.encoder.hidden_size * self.encoder.num_states, self.width, self.width),
            read_activation(config, "projector_hidden_act", "gelu"),
            config.flag("multimodal_projector_bias", True),
        )

    def adapt(self, names: Collection[str]) -> None:
        self.ignored = self.encoder.adapt(ENCODERS, names)
        settle(self.projector, PROJECTORS, names)

    def see(self, tiles: Tensor) -> Parts[Tensor]:
        found = yield from self.encoder.states(tiles, self.normalisation)
        states = torch.cat(found, dim=-1)
        if not self.keeps_first:
            states = states[:, 1:]
        return self.projector.forward(states.flatten(0, 1))


def read_encoder(config: Config, ops: Ops) -> Encoder:
    """With the states that the projector reads."""
    vision = config.inner("vision_config")
    if config.get("vision_config") is None:
        vision = vision.with_defaults(**_VISION)
    kind = vision.choice("model_type", _KINDS, "clip_vision_model")
    num_layers = vision.integer("num_hidden_layers", 12)
    return _KINDS[kind](ops, vision, read_feature_layers(config, num_layers))


_KINDS = {"clip_vision_model": ClipVision, "siglip_vision_model": SiglipVision}
