"""Qwen2.5-VL: most blocks of its tower attend within windows; the text is Qwen2 with positions in three dimensions.

pixels: `[height, width, 3]`, which whole features fill. grid: (1, rows, columns) of patches; the pixels say it too.
"""

from collections.abc import Sequence

from text_generation_inference.files import shorten
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.vision.blocks import BlockSpec, check_heads, read_activation
from text_generation_inference.models.vision.grid import read_theta
from text_generation_inference.models.vision.qwen2_vision import QwenTower, QwenVisionSpec
from text_generation_inference.models.vision.qwen2_vl import DECODERS as DECODERS
from text_generation_inference.models.vision.qwen2_vl import HEADS as HEADS
from text_generation_inference.models.vision.qwen2_vl import sections as sections
from text_generation_inference.models.vision.qwen2_vl import text_config as text_config
from text_generation_inference.models.vision.see import axes_in_order, see
from text_generation_inference.models.vision.sight import Sight
from text_generation_inference.models.vision.tower import Tower

_VISION = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
}


def build(config: Config, context: Context) -> Model:
    made = tower(config, context)
    merge = config.inner("vision_config").integer("spatial_merge_size", 2)
    sight = Sight(made.width, rope_axes=axes_in_order(sections(config)), merge=merge)
    return see(config, context, text_config(config), made, DECODERS, HEADS, sight)


def tower(config: Config, context: Context) -> Tower:
    vision = config.inner("vision_config").with_defaults(**_VISION)
    vision.refuse("in_channels", 3)
    vision.refuse("in_chans", 3)
    hidden_size, num_heads = check_heads(vision, "hidden_size", "num_heads")
    patch_size, merge_size = vision.integer("patch_size"), vision.integer("spatial_merge_size")
    window = vision.integer("window_size") // merge_size // patch_size
    if not window:
        raise vision.wrong("window_size", f"must be at least one merged patch, {merge_size * patch_size}")
    return QwenTower(
        context.ops,
        QwenVisionSpec(
            block=BlockSpec(
                hidden_size=hidden_size,
                num_heads=num_heads,
                width=vision.integer("intermediate_size"),
                activation=read_activation(vision, "hidden_act", "silu"),
                norm=NormSpec(eps=1e-6),
                norms=("norm1", "norm2"),
                attention="attn",
                qkv=("qkv",),
                out="proj",
                up=("gate_proj", "up_proj"),
                down="down_proj",
            ),
            depth=vision.integer("depth"),
            patch_size=patch_size,
            num_frames=vision.integer("temporal_patch_size"),
            merge_size=merge_size,
            width=vision.integer("out_hidden_size"),
            theta=read_theta(vision),
            window=window,
            full_blocks=_read_full_blocks(vision),
        ),
    )


def _read_full_blocks(vision: Config) -> frozenset[int]:
    found = vision.get("fullatt_block_indexes")
    if not isinstance(found, Sequence) or not all(isinstance(number, int) for number in found):
        raise vision.wrong("fullatt_block_indexes", f"must be a list of numbers of blocks, it is {shorten(found)}")
    return frozenset(found)
