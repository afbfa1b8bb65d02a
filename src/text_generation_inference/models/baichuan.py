"""Baichuan and Baichuan2: Llama with one tensor for q, k, v. The 13B has ALiBi; Baichuan2 a head of unit rows."""

from dataclasses import replace

from text_generation_inference.layers.alibi import alibi_slopes
from text_generation_inference.layers.qkv import QkvLayout
from text_generation_inference.layers.rotary import NO_ROTATION
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import TensorNames, read_llama_like, with_attention

DEFAULTS = {
    "vocab_size": 125696,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}
_ROTARY_SIZE = 4096  # of the 7B: configs have no flag
SECOND_VOCAB = 125696
TINY = {**LLAMA_TINY, "num_hidden_layers": 2}
_NAMES = TensorNames(qkv=("W_pack",))


def build(config: Config, context: Context) -> Model:
    config = config.renamed(max_position_embeddings="model_max_length").with_defaults(**DEFAULTS)
    config = Config({**config.fields, "num_key_value_heads": None}, config.source)  # every head has keys of its own
    spec = with_attention(read_llama_like(config), qkv_layout=QkvLayout.STACKED)
    is_first = "BaiChuanForCausalLM" in (config.get("architectures") or ())  # 7B of the first generation
    if not is_first and spec.hidden_size != _ROTARY_SIZE:
        spec = with_attention(spec, rope=NO_ROTATION, slopes=alibi_slopes(spec.layers[0].attention.num_heads))
    return CausalLM(replace(spec, normed_head=spec.vocab_size == SECOND_VOCAB, names=_NAMES), context)
