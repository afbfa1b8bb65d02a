"""SmolLM3: Llama in which every fourth layer knows no positions."""

from collections.abc import Sequence
from dataclasses import replace

from text_generation_inference.files import shorten
from text_generation_inference.layers.rotary import NO_ROTATION
from text_generation_inference.models.config import Config, windows_by_layer
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import read_llama_like

DEFAULTS = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
TINY = {**LLAMA_TINY, "num_hidden_layers": 2, "no_rope_layers": [1, 0], "pad_token_id": 0}
VARIANTS = {
    "windows": {
        "use_sliding_window": True,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": False,
    }
}


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS)
    num_layers = config.integer("num_hidden_layers")
    rotated = _rotated_layers(config, num_layers)
    windows = None
    if config.flag("use_sliding_window", False):
        has_window = [not each for each in rotated]
        windows = windows_by_layer(config, num_layers, has_window, config.optional_integer("sliding_window"))
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    spec = read_llama_like(config, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias, windows=windows, theta=2000000.0)
    layers = (
        layer if is_rotated else replace(layer, attention=replace(layer.attention, rope=NO_ROTATION))
        for layer, is_rotated in zip(spec.layers, rotated, strict=True)
    )
    return CausalLM(replace(spec, layers=tuple(layers)), context)


def _rotated_layers(config: Config, num_layers: int) -> list[bool]:
    found, every = config.get("no_rope_layers"), config.integer("no_rope_layer_interval", 4)
    if found is None:
        return [bool((layer + 1) % every) for layer in range(num_layers)]
    if not isinstance(found, Sequence) or len(found) != num_layers or any(each not in (0, 1) for each in found):
        raise config.wrong("no_rope_layers", f"must be a list of {num_layers} zeros and ones, it is {shorten(found)}")
    return [bool(each) for each in found]
