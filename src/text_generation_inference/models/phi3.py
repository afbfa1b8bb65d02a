"""Phi-3, 3.5 and 4: Llama with one tensor for q, k, v and one for gate and up, and long contexts by longrope."""

from dataclasses import replace
from typing import Any

from text_generation_inference.layers.qkv import QkvLayout
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.rope_config import read_rope
from text_generation_inference.models.spec import TensorNames, read_llama_like, with_attention

DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
TINY = {**LLAMA_TINY, "num_hidden_layers": 2, "sliding_window": 24, "pad_token_id": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    "longrope": {
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            "partial_rotary_factor": 0.75,
        },
        "sliding_window": None,
        "tie_word_embeddings": True,
    }
}
_NAMES = TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS)
    windows = [config.optional_integer("sliding_window")] * config.integer("num_hidden_layers")
    plain = Config({**config.fields, "rope_scaling": None, "rope_parameters": None}, config.source)
    spec = read_llama_like(plain, windows=windows)
    rope = read_rope(config, spec.layers[0].attention.head_dim, spec.max_positions, renames={"yarn": "longrope"})
    spec = with_attention(spec, rope=rope, qkv_layout=QkvLayout.STACKED)
    return CausalLM(replace(spec, names=_NAMES), context)
