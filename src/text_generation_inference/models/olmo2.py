"""OLMo2: Llama with norms after its parts rather than before them, and on all queries, and all keys, together."""

from dataclasses import replace

from text_generation_inference.layers.head_norm import HeadNormSpec, NormOver
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import Join, read_llama_like, with_layers

DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
TINY = {**LLAMA_TINY, "num_hidden_layers": 2}
VARIANTS = {"bias": {"attention_bias": True, "num_key_value_heads": 1}}


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS)
    bias = config.flag("attention_bias", False)
    norm = NormSpec(eps=config.positive("rms_norm_eps"), keeps_float32=True)
    qk_norm = HeadNormSpec(norm=norm, over=NormOver.ALL_HEADS)
    spec = read_llama_like(config, qkv_bias=bias, out_bias=bias, norm=norm, qk_norm=qk_norm)
    return CausalLM(replace(with_layers(spec, join=Join.POST)), context)
