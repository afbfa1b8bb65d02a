"""StarCoder and SantaCoder (`gpt_bigcode`): GPT-2 with ordinary matrices, and mostly one key for all queries."""

from dataclasses import replace

from text_generation_inference.layers.qkv import QkvLayout
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.gpt2 import NAMES as GPT2_NAMES
from text_generation_inference.models.gpt2 import TINY as GPT2_TINY
from text_generation_inference.models.gpt2 import read_gpt2_like
from text_generation_inference.models.model import Context, Model

TINY = {**GPT2_TINY, "vocab_size": 320}
VARIANTS = {"all-heads": {"multi_query": False}}
_NAMES = replace(GPT2_NAMES, transposed=False)


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(activation_function="gelu_pytorch_tanh")
    is_shared = config.flag("multi_query", True)
    layout = QkvLayout.STACKED if is_shared else QkvLayout.GROUPED
    return CausalLM(read_gpt2_like(config, _NAMES, layout, 1 if is_shared else None), context)
