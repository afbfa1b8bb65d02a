"""StableLM: Llama with norms that subtract a mean, and a part of each head rotated; the larger ones side by side."""

from dataclasses import replace

from text_generation_inference.layers.head_norm import HeadNormSpec, NormOver
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import Join, TensorNames, read_llama_like, with_layers

DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
}
TINY = {**LLAMA_TINY, "num_hidden_layers": 2, "use_qkv_bias": True}
# A rank has norms of its own heads only.
_NAMES = TensorNames(ignored=("*.rotary_emb.inv_freq", "*_layernorm.norms.*.weight"))
VARIANTS = {"parallel-qk-norm": {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": False}}


def build(config: Config, context: Context) -> Model:
    config = config.renamed(partial_rotary_factor="rope_pct", layer_norm_eps="norm_eps").with_defaults(**DEFAULTS)
    eps = config.positive("layer_norm_eps")
    qk_norm = HeadNormSpec(
        norm=NormSpec(eps=eps, is_centred=True),
        over=NormOver.OWN_HEAD,
        names=("q_layernorm", "k_layernorm"),
        one_tensor_each=True,
    )
    spec = read_llama_like(
        config,
        qkv_bias=config.flag("use_qkv_bias", False),
        norm=NormSpec(eps=eps, is_centred=True, bias=True),
        qk_norm=qk_norm if config.flag("qk_layernorm", False) else None,
        share=0.25,
    )
    join = Join.PARALLEL if config.flag("use_parallel_residual", False) else Join.PRE
    return CausalLM(replace(with_layers(spec, join=join), names=_NAMES), context)
