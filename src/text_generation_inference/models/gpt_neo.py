"""GPT-Neo: GPT-2 with ordinary matrices, scores that are not scaled, and windows on every second layer."""

from dataclasses import replace
from itertools import islice
from typing import Any

from text_generation_inference.files import shorten
from text_generation_inference.layers.qkv import QkvLayout
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.gpt2 import NAMES as GPT2_NAMES
from text_generation_inference.models.gpt2 import read_gpt2_like
from text_generation_inference.models.model import Context, Model

DEFAULTS = {
    "vocab_size": 50257,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "window_size": 256,
    "attention_types": [[["global", "local"], 12]],
}
TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_layers": 3,
    "num_heads": 4,
    "max_position_embeddings": 512,
    "window_size": 24,
    "attention_types": [[["global", "local"], 1], [["global"], 1]],
}
_NAMES = replace(
    GPT2_NAMES,
    attention="attn.attention",
    qkv=("q_proj", "k_proj", "v_proj"),
    out="out_proj",
    transposed=False,
    ignored=("*.attn.attention.bias", "*.attn.attention.masked_bias"),
)


def build(config: Config, context: Context) -> Model:
    config = config.renamed(num_hidden_layers="num_layers", num_attention_heads="num_heads").with_defaults(**DEFAULTS)
    spec = read_gpt2_like(config, _NAMES, QkvLayout.SEPARATE, None)
    window, types = config.integer("window_size"), _attention_types(config, len(spec.layers))
    layers = tuple(
        replace(
            layer,
            attention=replace(
                layer.attention, qkv_bias=False, own_scale=1.0, window=window if kind == "local" else None
            ),
        )
        for layer, kind in zip(spec.layers, types, strict=True)
    )
    return CausalLM(replace(spec, layers=layers), context)


def _attention_types(config: Config, num_layers: int) -> list[str]:
    """By layer: lists of kinds, each with how often it comes."""
    given = config.get("attention_types")
    try:
        kinds_by_layer = (kind for kinds, times in given for _ in range(min(times, num_layers)) for kind in kinds)
        found = list(islice(kinds_by_layer, num_layers + 1))  # one more tells that there are too many
    except (TypeError, ValueError):
        found = []
    if len(found) != num_layers or any(kind not in ("global", "local") for kind in found):
        what = f'must be lists of "global" and "local" with how often they come, {num_layers} in all'
        raise config.wrong("attention_types", f"{what}, it is {shorten(given)}")
    return found
