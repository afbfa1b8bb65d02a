"""Qwen2-VL: all blocks of its tower see all of a picture; the text is Qwen2 with positions in three dimensions.

pixels: `[height, width, 3]`, which whole features fill. grid: (1, rows, columns) of patches; the pixels say it too.
"""

from typing import Any

from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.vision.blocks import BlockSpec, check_heads, read_activation
from text_generation_inference.models.vision.grid import read_theta
from text_generation_inference.models.vision.qwen2_vision import QwenTower, QwenVisionSpec
from text_generation_inference.models.vision.see import axes_in_order, see
from text_generation_inference.models.vision.sight import Sight
from text_generation_inference.models.vision.text import read_flat_text, read_sections
from text_generation_inference.models.vision.tower import Tower

DECODERS = ("model", "model.language_model", "language_model.model")  # what checkpoints call the text model
HEADS = ("lm_head", "language_model.lm_head")
_VISION = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_TEXT = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "rope_theta": 1e6,
}


def text_config(config: Config) -> dict[str, Any]:
    return read_flat_text(config, "Qwen2ForCausalLM", _TEXT)


def sections(config: Config) -> tuple[int, ...]:
    """Of a head's frequencies those of time, then of rows, then of columns."""
    return read_sections(config, (16, 24, 24))


def build(config: Config, context: Context) -> Model:
    made = tower(config, context)
    merge = config.inner("vision_config").integer("spatial_merge_size", 2)
    sight = Sight(made.width, rope_axes=axes_in_order(sections(config)), merge=merge)
    return see(config, context, text_config(config), made, DECODERS, HEADS, sight)


def tower(config: Config, context: Context) -> Tower:
    vision = config.inner("vision_config").with_defaults(**_VISION)
    vision.refuse("in_channels", 3)
    vision.refuse("in_chans", 3)
    hidden_size, num_heads = check_heads(vision, "embed_dim", "num_heads")
    return QwenTower(
        context.ops,
        QwenVisionSpec(
            block=BlockSpec(
                hidden_size=hidden_size,
                num_heads=num_heads,
                width=int(hidden_size * min(vision.positive("mlp_ratio", 4), 1024)),
                activation=read_activation(vision, "hidden_act", "quick_gelu"),
                norm=NormSpec(eps=1e-6, is_centred=True, bias=True),
                norms=("norm1", "norm2"),
                attention="attn",
                qkv=("qkv",),
                out="proj",
            ),
            depth=vision.integer("depth"),
            patch_size=vision.integer("patch_size"),
            num_frames=vision.integer("temporal_patch_size"),
            merge_size=vision.integer("spatial_merge_size"),
            width=vision.integer("hidden_size"),
            theta=read_theta(vision),
        ),
    )
