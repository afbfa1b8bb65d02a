"""Llama 3.2 Vision (Mllama): layers of cross-attention between those of a Llama 3.1 read what its tower makes.

pixels: `[tiles, side, side, 3]`. grid: (number of the arrangement, from 1; its rows, its columns).
"""

from collections.abc import Sequence
from typing import Any

from text_generation_inference.files import shorten
from text_generation_inference.layers.embedding import VocabWeight
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import read_activation as read_text_activation
from text_generation_inference.models.spec import read_sizes
from text_generation_inference.models.vision.blocks import BlockSpec, check_heads, read_activation
from text_generation_inference.models.vision.mllama_cross import CrossLayer, CrossSpec
from text_generation_inference.models.vision.mllama_vision import MllamaTower, MllamaVisionSpec
from text_generation_inference.models.vision.see import see
from text_generation_inference.models.vision.sight import Sight
from text_generation_inference.models.vision.text import as_text

DECODERS = ("language_model.model", "model.language_model")  # what checkpoints call the text model
HEADS = ("language_model.lm_head", "lm_head")
NUM_MORE_EMBEDDINGS = 8  # rows of the embedding that the head has not: the token of a picture is the first
_ARRANGEMENTS = 8  # of up to four tiles
_VISION = {
    "hidden_size": 1280,
    "num_hidden_layers": 32,
    "num_global_layers": 8,
    "attention_heads": 16,
    "intermediate_size": 5120,
    "image_size": 448,
    "patch_size": 14,
    "max_num_tiles": 4,
}
_KEPT = (3, 7, 15, 23, 30)
_CROSS = (3, 8, 13, 18, 23, 28, 33, 38)
_TEXT = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}


def text_config(config: Config) -> dict[str, Any]:
    """Of all layers, those of cross-attention too."""
    return as_text(config, {**_TEXT, **config.inner("text_config").fields}, "LlamaForCausalLM")


def cross_layers(config: Config) -> tuple[int, ...]:
    """Numbers of the layers that read pictures."""
    text = Config(text_config(config), config.source)
    return _read_numbers(text, "cross_attention_layers", _CROSS, text.integer("num_hidden_layers"))


def tower(config: Config, context: Context) -> MllamaTower:
    vision = config.inner("vision_config").renamed(attention_heads="num_attention_heads").with_defaults(**_VISION)
    vision.refuse("num_channels", 3)
    hidden_size, num_heads = check_heads(vision, "hidden_size", "attention_heads")
    num_layers = vision.integer("num_hidden_layers")
    kept = _read_numbers(vision, "intermediate_layers_indices", _KEPT, num_layers)
    vision.refuse("vision_output_dim", hidden_size * (1 + len(kept)))
    arrangements = vision.get("supported_aspect_ratios")
    return MllamaTower(
        context.ops,
        MllamaVisionSpec(
            block=BlockSpec(
                hidden_size=hidden_size,
                num_heads=num_heads,
                width=vision.integer("intermediate_size"),
                activation=read_activation(vision, "hidden_act", "gelu"),
                norm=NormSpec(eps=vision.positive("norm_eps", 1e-5), is_centred=True, bias=True),
                norms=("input_layernorm", "post_attention_layernorm"),
                out="o_proj",
                attention_bias=False,
            ),
            num_layers=num_layers,
            num_global_layers=vision.integer("num_global_layers"),
            kept=kept,
            image_size=vision.integer("image_size"),
            patch_size=vision.integer("patch_size"),
            max_tiles=vision.integer("max_num_tiles"),
            num_arrangements=len(arrangements) if isinstance(arrangements, Sequence) else _ARRANGEMENTS,
            width=Config(text_config(config), config.source).integer("hidden_size"),
        ),
    )


def _read_numbers(config: Config, name: str, default: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    found = default if config.get(name) is None else config.get(name)
    are_layers = isinstance(found, Sequence) and all(isinstance(n, int) and 0 <= n < num_layers for n in found)
    if not are_layers or not found or len(set(found)) != len(found):
        raise config.wrong(name, f"must be numbers of {num_layers} layers, it is {shorten(found)}")
    return tuple(found)


def build(config: Config, context: Context) -> Model:
    text = Config({**text_config(config), "tie_word_embeddings": False}, config.source)
    numbers = cross_layers(config)
    if 0 in numbers:
        raise text.wrong("cross_attention_layers", "has layer 0: the first one must be of self-attention")
    seeing = tower(config, context)
    vocab_size, size = text.integer("vocab_size"), text.integer("hidden_size")
    rows, tile_rows = seeing.num_features, seeing.spec.num_rows
    sight = Sight(size, cross_rows=rows, tile_rows=tile_rows, cross_layer=numbers[0], num_more_ids=NUM_MORE_EMBEDDINGS)
    model = see(config, context, dict(text.fields), seeing, DECODERS, HEADS, sight)
    spec, names = _read_cross(text), model.spec.names
    for number in numbers:
        name = names.layer.format(number)
        model.model.layers[number] = CrossLayer(context, spec, model.spec.layers[number], name, number)
    num_embeddings = vocab_size + NUM_MORE_EMBEDDINGS
    model.model.embedding = VocabWeight(
        context.ops, context.parallel, names.embedding, num_embeddings, size, is_head=False
    )
    return model


def _read_cross(text: Config) -> CrossSpec:
    sizes = read_sizes(text)
    return CrossSpec(
        hidden_size=sizes.hidden,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        width=text.integer("intermediate_size"),
        activation=read_text_activation(text, default="silu"),
        eps=text.positive("rms_norm_eps"),
    )
