"""CodeGen: GPT-J with queries, values and keys in one tensor, a quarter of the heads at a time."""

from dataclasses import replace

from text_generation_inference.layers.qkv import QkvLayout
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.gptj import NAMES as GPTJ_NAMES
from text_generation_inference.models.gptj import TINY as GPTJ_TINY
from text_generation_inference.models.gptj import read_gptj_like
from text_generation_inference.models.model import Context, Model

TINY = {**GPTJ_TINY, "n_head": 8}  # two in a quarter
_NAMES = replace(GPTJ_NAMES, qkv=("qkv_proj",), ignored=("*.attn.causal_mask", *GPTJ_NAMES.ignored))


def build(config: Config, context: Context) -> Model:
    spec = read_gptj_like(config, _NAMES, QkvLayout.QUARTERS)
    if (heads := spec.layers[0].attention.num_heads) % 4:
        raise config.renamed(num_attention_heads="n_head").wrong(
            "num_attention_heads", f"is {heads}, which 4 do not divide"
        )
    return CausalLM(spec, context)
