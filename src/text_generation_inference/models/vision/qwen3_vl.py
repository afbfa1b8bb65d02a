"""Qwen3-VL: features of several levels (DeepStack); the text is Qwen3 with positions in three dimensions, interleaved.

pixels: `[height, width, 3]`, which whole features fill. grid: (1, rows, columns) of patches; the pixels say it too.
"""

from collections.abc import Sequence
from math import isqrt
from typing import Any

from text_generation_inference.files import shorten
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.vision.blocks import BlockSpec, check_heads, read_activation
from text_generation_inference.models.vision.grid import read_theta
from text_generation_inference.models.vision.qwen3_vision import Qwen3Tower, Qwen3VisionSpec
from text_generation_inference.models.vision.see import axes_in_turns, see
from text_generation_inference.models.vision.sight import Sight
from text_generation_inference.models.vision.text import read_flat_text, read_sections
from text_generation_inference.models.vision.tower import Tower

DECODERS = ("model.language_model", "model", "language_model.model")  # what checkpoints call the text model
HEADS = ("lm_head", "language_model.lm_head")
_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}
_TEXT = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rope_theta": 5e5,
}


def text_config(config: Config) -> dict[str, Any]:
    return read_flat_text(config, "Qwen3ForCausalLM", _TEXT)


def sections(config: Config) -> tuple[int, ...]:
    """Of a head's frequencies those of time, rows and columns: in turns, as long as rows and columns have some."""
    return read_sections(config, (24, 20, 20))


def build(config: Config, context: Context) -> Model:
    made = tower(config, context)
    merge = config.inner("vision_config").integer("spatial_merge_size", 2)
    sight = Sight(made.width, rope_axes=axes_in_turns(sections(config)), merge=merge)
    return see(config, context, text_config(config), made, DECODERS, HEADS, sight)


def tower(config: Config, context: Context) -> Tower:
    vision = config.inner("vision_config").with_defaults(**_VISION)
    vision.refuse("in_channels", 3)
    hidden_size, num_heads = check_heads(vision, "hidden_size", "num_heads")
    num_positions, depth = vision.integer("num_position_embeddings"), vision.integer("depth")
    if isqrt(num_positions) ** 2 != num_positions:
        raise vision.wrong("num_position_embeddings", f"must be a square, it is {num_positions}")
    return Qwen3Tower(
        context.ops,
        Qwen3VisionSpec(
            block=BlockSpec(
                hidden_size=hidden_size,
                num_heads=num_heads,
                width=vision.integer("intermediate_size"),
                activation=read_activation(vision, "hidden_act", "gelu_pytorch_tanh"),
                norm=NormSpec(eps=1e-6, is_centred=True, bias=True),
                norms=("norm1", "norm2"),
                attention="attn",
                qkv=("qkv",),
                out="proj",
                up=("linear_fc1",),
                down="linear_fc2",
            ),
            depth=depth,
            patch_size=vision.integer("patch_size"),
            num_frames=vision.integer("temporal_patch_size"),
            merge_size=vision.integer("spatial_merge_size"),
            width=vision.integer("out_hidden_size"),
            theta=read_theta(vision),
            side=isqrt(num_positions),
            levels=_read_levels(vision, depth),
        ),
    )


def _read_levels(vision: Config, depth: int) -> tuple[int, ...]:
    found = vision.get("deepstack_visual_indexes")
    are_blocks = isinstance(found, Sequence) and all(isinstance(each, int) and 0 <= each < depth for each in found)
    if not are_blocks or len(set(found)) != len(found):
        raise vision.wrong("deepstack_visual_indexes", f"must be numbers of {depth} blocks, it is {shorten(found)}")
    return tuple(found)
