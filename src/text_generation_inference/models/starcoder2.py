"""StarCoder2: Llama's attention with biases, norms with a mean, and a plain feed-forward."""

from dataclasses import replace

from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import TensorNames, read_llama_like

DEFAULTS = {
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "hidden_act": "gelu_pytorch_tanh",
    "use_bias": True,
    "norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
TINY = {**LLAMA_TINY, "num_hidden_layers": 2, "sliding_window": 24}
VARIANTS = {"no-bias": {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False}}
_NAMES = TensorNames(gate_up=("c_fc",), down="c_proj")


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS)
    bias = config.flag("use_bias")
    windows = [config.optional_integer("sliding_window")] * config.integer("num_hidden_layers")
    norm = NormSpec(eps=config.positive("norm_epsilon"), is_centred=True, bias=True)
    spec = read_llama_like(
        config, qkv_bias=bias, out_bias=bias, mlp_bias=bias, windows=windows, is_gated=False, norm=norm
    )
    return CausalLM(replace(spec, names=_NAMES), context)
