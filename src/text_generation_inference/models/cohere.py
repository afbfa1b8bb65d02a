"""Cohere (Command R, Aya): attention beside the feed-forward behind one norm, neighbours rotated together."""

from dataclasses import replace

from text_generation_inference.layers.head_norm import HeadNormSpec, NormOver
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import DecoderSpec, Join, read_llama_like, with_attention, with_layers

DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}
TINY = {
    **LLAMA_TINY,
    "num_hidden_layers": 2,
    "logit_scale": 0.7,
    "pad_token_id": 0,
    "bos_token_id": 5,
    "eos_token_id": 6,
}
VARIANTS = {"qk-norm": {"use_qk_norm": True, "attention_bias": True}}


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS)
    spec = read_cohere_like(config, None, 500000.0)
    if config.flag("use_qk_norm", False):
        spec = with_attention(spec, qk_norm=HeadNormSpec(norm=spec.norm, over=NormOver.OWN_HEAD))
    return CausalLM(spec, context)


def read_cohere_like(config: Config, windows: list[int | None] | None, theta: float) -> DecoderSpec:
    bias = config.flag("attention_bias", False)
    norm = NormSpec(eps=config.positive("layer_norm_eps"), is_centred=True)
    spec = read_llama_like(config, qkv_bias=bias, out_bias=bias, windows=windows, norm=norm, theta=theta)
    spec = with_layers(with_attention(spec, interleaved=True), join=Join.PARALLEL)
    # Command R says 8192 positions, for which `transformers` once made a mask, and what it was made for beside it.
    length = max(spec.max_positions, config.optional_integer("model_max_length") or 0)
    return replace(spec, max_positions=length, logits_factor=config.positive("logit_scale"))
