"""Llama and everything that says `LlamaForCausalLM`."""

from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import read_llama_like

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS)
    bias = config.flag("attention_bias", False)
    spec = read_llama_like(config, qkv_bias=bias, out_bias=bias, mlp_bias=config.flag("mlp_bias", False))
    return CausalLM(spec, context)
