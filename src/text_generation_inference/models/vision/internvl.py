"""InternVL as `transformers` has it: tiles and the whole picture, of which squares of neighbours become one feature.

pixels: `[tiles + 1, side, side, 3]`, or the whole alone. grid: ().
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.files import shorten
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.segments import Segments
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.vision.blocks import (
    Block,
    BlockSpec,
    Parameter,
    PatchEmbedding,
    TowerFeedForward,
    TowerNorm,
    check_heads,
    read_activation,
    run_blocks,
)
from text_generation_inference.models.vision.encoder import Encoder, read_feature_layers
from text_generation_inference.models.vision.llava import DECODERS as DECODERS
from text_generation_inference.models.vision.llava import HEADS as HEADS
from text_generation_inference.models.vision.llava import PROJECTORS
from text_generation_inference.models.vision.padded import TileTower
from text_generation_inference.models.vision.see import see
from text_generation_inference.models.vision.text import read_text
from text_generation_inference.models.vision.tower import Parts, Tower, settle
from text_generation_inference.pictures.rule import Normalisation
from text_generation_inference.weights.declare import Module

_ENCODERS = ("vision_tower", "model.vision_tower")
_VISION = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "image_size": 448,
    "patch_size": 14,
}


def text_config(config: Config) -> dict[str, Any]:
    return read_text(config.with_defaults(tie_word_embeddings=True), "qwen2")


def build(config: Config, context: Context) -> Model:
    return see(config, context, text_config(config), tower(config, context), DECODERS, HEADS)


def tower(config: Config, context: Context) -> Tower:
    return InternTower(config, context)


class _InternVlEmbeddings(Module):
    name = "embeddings"

    def __init__(self, ops: Ops, hidden_size: int, patch_size: int, num_patches: int) -> None:
        self.first = Parameter("cls_token", (1, 1, hidden_size))
        self.patches = PatchEmbedding(ops, "patch_embeddings.projection", patch_size, hidden_size, bias=True)
        self.positions = Parameter("position_embeddings", (1, num_patches + 1, hidden_size))


class InternVision(Encoder):
    num_class_tokens = 1
    num_states = 1

    def __init__(self, ops: Ops, config: Config, wanted: int | None) -> None:
        """wanted: the number of blocks behind which the state is taken; None: the last one, behind its norm."""
        for name in ("num_channels", "use_mask_token", "use_absolute_position_embeddings"):
            config.refuse(name, {"num_channels": 3, "use_mask_token": False}.get(name, True))
        self.hidden_size, num_heads = check_heads(config, "hidden_size", "num_attention_heads")
        is_centred = config.choice("norm_type", ("layer_norm", "rms_norm"), "layer_norm") == "layer_norm"
        eps = config.positive("layer_norm_eps", 1e-6)
        spec = BlockSpec(
            hidden_size=self.hidden_size,
            num_heads=num_heads,
            width=config.integer("intermediate_size"),
            activation=read_activation(config, "hidden_act", "gelu"),
            norm=NormSpec(eps=eps, is_centred=is_centred, bias=is_centred),
            norms=("layernorm_before", "layernorm_after"),
            attention="attention",
            out="projection_layer",
            attention_bias=config.flag("attention_bias", False),
            out_bias=True,
            qk_norm=NormSpec(eps=1e-6) if config.flag("use_qk_norm", False) else None,
            scales=("lambda_1", "lambda_2"),
        )
        patch_size, num_layers = _read_side(config, "patch_size"), config.integer("num_hidden_layers")
        self.side = _read_side(config, "image_size") // patch_size
        num_used = num_layers if wanted is None else wanted
        self.embeddings = _InternVlEmbeddings(ops, self.hidden_size, patch_size, self.side**2)
        self.blocks = [Block(ops, f"encoder.layer.{number}", spec) for number in range(num_used)]
        self.norm: TowerNorm | None = None
        self.ignored = tuple(f"encoder.layer.{number}.*" for number in range(num_used, num_layers))
        if not config.flag("use_mean_pooling", True):
            centred = NormSpec(eps=eps, is_centred=True, bias=True)
            self.norm = TowerNorm(ops, centred, "layernorm", self.hidden_size) if wanted is None else None
            self.ignored += () if wanted is None else ("layernorm.*",)

    def states(self, pixels: Tensor, normalisation: Normalisation) -> Parts[list[Tensor]]:
        embeddings, count = self.embeddings, pixels.shape[0]
        patches = embeddings.patches.cut(pixels, normalisation).flatten(0, 2)
        x = embeddings.patches.forward(patches).view(count, -1, self.hidden_size)
        x = torch.cat((embeddings.first.value.expand(count, 1, -1), x), dim=1) + embeddings.positions.value
        length, x = x.shape[1], x.flatten(0, 1)
        segments = Segments([length] * count, x.device)
        states = yield from run_blocks(self.blocks, x, [segments] * len(self.blocks))
        x = states[len(self.blocks)]
        x = x if self.norm is None else self.norm.forward(x)
        return [x.view(count, length, -1)]


class _InternVlProjector(Module):
    name = PROJECTORS[0]

    def __init__(self, ops: Ops, in_features: int, width: int, activation: str) -> None:
        self.norm = TowerNorm(ops, NormSpec(eps=1e-5, is_centred=True, bias=True), "layer_norm", in_features)
        sizes = (in_features, width, width)
        self.mlp = TowerFeedForward(ops, "", ("linear_1",), "linear_2", sizes, activation, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp.forward(self.norm.forward(x))


class InternTower(TileTower):
    def __init__(self, config: Config, context: Context) -> None:
        ratio = config.positive("downsample_ratio", 0.5)
        self.scale = int(1 / min(max(ratio, 1e-3), 1.0))
        self.width = Config(text_config(config), config.source).integer("hidden_size")
        config.refuse("vision_feature_select_strategy", "default")
        vision = config.inner("vision_config").with_defaults(**_VISION)
        numbers = read_feature_layers(
            config.with_defaults(vision_feature_layer=-1), vision.integer("num_hidden_layers")
        )
        if len(numbers) != 1:
            raise config.wrong("vision_feature_layer", "must be one layer")
        is_last = config.get("vision_feature_layer") in (None, -1)
        self.encoder = InternVision(context.ops, vision, None if is_last else numbers[0])
        if ratio * self.scale != 1 or self.encoder.side % self.scale or not self.encoder.side:
            side = self.encoder.side
            raise config.wrong("downsample_ratio", f"is {ratio}: {side} rows of patches cannot be divided by 1 / that")
        self.num_parts = len(self.encoder.blocks)
        self.num_each = (self.encoder.side // self.scale) ** 2
        activation = read_activation(config, "projector_hidden_act", "gelu")
        joined = self.encoder.hidden_size * self.scale**2
        self.projector = _InternVlProjector(context.ops, joined, self.width, activation)

    def adapt(self, names: Collection[str]) -> None:
        self.ignored = self.encoder.adapt(_ENCODERS, names)
        settle(self.projector, PROJECTORS, names)

    def see(self, tiles: Tensor) -> Parts[Tensor]:
        scale, side = self.scale, self.encoder.side // self.scale
        (states,) = yield from self.encoder.states(tiles, self.normalisation)
        x = states[:, 1:].reshape(len(tiles), side, scale, side, scale, -1)
        return self.projector.forward(x.transpose(2, 3).reshape(len(tiles) * side**2, -1))


def _read_side(config: Config, name: str) -> int:
    """Of a square: one number, or two that are equal."""
    found = config.get(name)
    if not isinstance(found, Sequence) or isinstance(found, str):
        return config.integer(name)
    if len(found) != 2 or found[0] != found[1]:
        raise config.wrong(name, f"must be that of a square, it is {shorten(found)}")
    return Config({name: found[0]}, config.source, "vision_config.").integer(name)
