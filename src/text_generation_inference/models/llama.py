"""Llama and everything that says `LlamaForCausalLM`."""

from text_generation_inference.models.spec import Config, DecoderSpec, read_llama_like

TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def read_spec(config: Config) -> DecoderSpec:
    attention_bias = config.flag("attention_bias", False)
    return read_llama_like(
        config, qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=config.flag("mlp_bias", False)
    )
