"""Pixtral (`llava` with Pixtral's encoder), and Mistral 3 which merges its patches before it projects them.

pixels: `[height, width, 3]`. grid: (rows, columns) of patches before they are merged; the pixels say it too.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.kernels.ops import Ops
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.vision.blocks import (
    MaskedRows,
    PatchEmbedding,
    TowerLinear,
    TowerNorm,
    activation_of,
    linear,
    read_activation,
)
from text_generation_inference.models.vision.encoder import read_feature_layers
from text_generation_inference.models.vision.grid import by_block
from text_generation_inference.models.vision.patches import PatchTower
from text_generation_inference.models.vision.pixtral_vision import PixtralPass, PixtralVision
from text_generation_inference.models.vision.see import see
from text_generation_inference.models.vision.text import read_text
from text_generation_inference.models.vision.tower import Parts, Tower, run_parts, settle
from text_generation_inference.weights.declare import Module

DECODERS = ("language_model.model", "model.language_model")  # what checkpoints call the text model
HEADS = ("language_model.lm_head", "lm_head")
_ENCODERS = ("vision_tower", "model.vision_tower")
_PROJECTORS = ("multi_modal_projector", "model.multi_modal_projector")
_MISTRAL3_VISION = {"patch_size": 14}  # what a Mistral 3 means that says nothing of its encoder
_MISTRAL3_TEXT = {  # or of its text model
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e9,
    "sliding_window": None,
    "vocab_size": 131072,
}


def text_config(config: Config) -> dict[str, Any]:
    if not _merges(config):
        return read_text(config, "llama")
    config = config.with_defaults(tie_word_embeddings=True)
    return read_text(config, "mistral", **(_MISTRAL3_TEXT if config.get("text_config") is None else {}))


def build(config: Config, context: Context) -> Model:
    return see(config, context, text_config(config), tower(config, context), DECODERS, HEADS)


def tower(config: Config, context: Context) -> Tower:
    return PixtralTower(config, context)


def _merges(config: Config) -> bool:
    return "Mistral3ForConditionalGeneration" in (config.get("architectures") or ())


class _PixtralProjector(Module):
    name = _PROJECTORS[0]

    def __init__(self, ops: Ops, config: Config, hidden_size: int, num_states: int, text: Config) -> None:
        self.width = text.integer("hidden_size")
        self.merge = config.integer("spatial_merge_size", 2) if _merges(config) else 1
        self.activation = activation_of(ops, read_activation(config, "projector_hidden_act", "gelu"))
        self.norm: TowerNorm | None = None
        self.merger: TowerLinear | None = None
        if _merges(config):
            self.norm = TowerNorm(ops, NormSpec(eps=text.positive("rms_norm_eps", 1e-6)), "norm", hidden_size)
            joined = hidden_size * self.merge**2
            self.merger = linear(ops, ["patch_merger.merging_layer"], [hidden_size], joined, bias=False)
        bias = config.flag("multimodal_projector_bias", not _merges(config))
        self.first = linear(ops, ["linear_1"], [self.width], hidden_size * num_states, bias)
        self.second = linear(ops, ["linear_2"], [self.width], self.width, bias)

    def forward(self, x: Tensor) -> Tensor:
        """x `[patches, hidden]`: those that become one feature follow each other."""
        if self.norm is not None and self.merger is not None:
            blocks = self.norm.forward(x).unflatten(0, (-1, self.merge**2))
            x = self.merger.forward(blocks.transpose(1, 2).flatten(1))
        return self.second.forward(self.activation(self.first.forward(x)))


class PixtralTower(PatchTower):
    def __init__(self, config: Config, context: Context) -> None:
        vision = config.inner("vision_config")
        if config.get("vision_config") is None and _merges(config):
            vision = vision.with_defaults(**_MISTRAL3_VISION)
        if _merges(config):
            config = config.with_defaults(vision_feature_layer=-1)
        elif config.choice("vision_feature_select_strategy", ("default", "full"), "default") != "full":
            raise config.wrong("vision_feature_select_strategy", "must be full: Pixtral's encoder has no class token")
        wanted = read_feature_layers(config, vision.integer("num_hidden_layers", 24))
        self.encoder = PixtralVision(context.ops, vision, wanted)
        self.num_parts = len(self.encoder.blocks)
        text = Config(text_config(config), config.source)
        self.projector = _PixtralProjector(context.ops, config, self.encoder.hidden_size, len(wanted), text)
        self.width, self.merge = self.projector.width, self.projector.merge

    @property
    def patches(self) -> PatchEmbedding:
        return self.encoder.patches

    def adapt(self, names: Collection[str]) -> None:
        settle(self.encoder, _ENCODERS, names)
        settle(self.projector, _PROJECTORS, names)
        self.ignored = tuple(f"{self.encoder.name}.{pattern}" for pattern in self.encoder.ignored)

    def lay_out(
        self, shapes: Sequence[tuple[int, ...]], grids: Sequence[tuple[int, ...]], device: torch.device
    ) -> PixtralPass:
        layout = self.encoder.lay_out(shapes, device)
        layout.segments.get_ready()
        return layout

    def in_parts(
        self, pixels: Sequence[Tensor], grids: Sequence[tuple[int, ...]], layout: PixtralPass | None = None
    ) -> Parts[list[Tensor]]:
        layout = layout or self.encoder.lay_out([picture.shape for picture in pixels], pixels[0].device)
        states = yield from self.encoder.forward(pixels, self.normalisation, layout)
        features = self.projector.forward(self._in_blocks(torch.cat(states, dim=1), layout.sides))
        return list(features.split([rows * columns // self.merge**2 for rows, columns in layout.sides]))

    def _in_blocks(self, x: Tensor, sides: Sequence[tuple[int, int]]) -> Tensor:
        if self.merge == 1:
            return x
        each = x.split([rows * columns for rows, columns in sides])
        return torch.cat([by_block(part.view(*side, -1), self.merge) for part, side in zip(each, sides, strict=True)])

    def run(self, *tensors: Tensor) -> Tensor:
        patches, places, _, real = tensors
        x, rotation = self.embed_padded(patches), self.encoder.rotation_at(places)
        states = run_parts(self.encoder.through(x, MaskedRows(real, x.shape[0]), rotation))
        features = self.projector.forward(torch.cat(states, dim=1))
        return torch.cat((features, torch.zeros_like(features[:1])))
