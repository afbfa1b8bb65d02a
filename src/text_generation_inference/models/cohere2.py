"""Cohere2 (Command R7B, Command A): Cohere with windows; every fourth layer sees all tokens and knows no positions."""

from dataclasses import replace

from text_generation_inference.layers.rotary import NO_ROTATION
from text_generation_inference.models.cohere import DEFAULTS as COHERE_DEFAULTS
from text_generation_inference.models.cohere import TINY as COHERE_TINY
from text_generation_inference.models.cohere import read_cohere_like
from text_generation_inference.models.config import Config, windows_by_layer
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.model import Context, Model

TINY = {
    **COHERE_TINY,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
    "head_dim": 16,
}


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**COHERE_DEFAULTS, sliding_window=4096)
    num_layers, every = config.integer("num_hidden_layers"), config.integer("sliding_window_pattern", 4)
    has_window = [bool((layer + 1) % every) for layer in range(num_layers)]
    # A token sees itself and the `sliding_window - 1` tokens before it.
    windows = windows_by_layer(config, num_layers, has_window, config.integer("sliding_window"))
    spec = read_cohere_like(config, windows, 10000.0)
    layers = (
        layer
        if layer.attention.window is not None
        else replace(layer, attention=replace(layer.attention, rope=NO_ROTATION))
        for layer in spec.layers
    )
    return CausalLM(replace(spec, layers=tuple(layers)), context)
