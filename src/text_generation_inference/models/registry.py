"""Which architecture is built by which file.

One line per architecture; modules are imported when they are needed.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from text_generation_inference.errors import ModelFormatError, ModelNotFoundError
from text_generation_inference.files import read_json_object, shorten
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.ranks import check_ranks
from text_generation_inference.models.refused import find_refusal
from text_generation_inference.quant.choose import detect, quantization_beside
from text_generation_inference.quant.quantization import Quantization

ARCHITECTURES = {
    "BaiChuanForCausalLM": "baichuan",
    "BaichuanForCausalLM": "baichuan",
    "BloomForCausalLM": "bloom",
    "CodeGenForCausalLM": "codegen",
    "Cohere2ForCausalLM": "cohere2",
    "CohereForCausalLM": "cohere",
    "DbrxForCausalLM": "dbrx",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "FalconForCausalLM": "falcon",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GemmaForCausalLM": "gemma",
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "GPTJForCausalLM": "gptj",
    "GPTNeoForCausalLM": "gpt_neo",
    "GPTNeoXForCausalLM": "gpt_neox",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "InternLM2ForCausalLM": "internlm2",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "MPTForCausalLM": "mpt",
    "MptForCausalLM": "mpt",
    "Olmo2ForCausalLM": "olmo2",
    "OPTForCausalLM": "opt",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi",
    "PhiMoEForCausalLM": "phimoe",
    "PhimoeForCausalLM": "phimoe",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "RWForCausalLM": "falcon",
    "SmolLM3ForCausalLM": "smollm3",
    "StableLMEpochForCausalLM": "stablelm",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
}
SEEING = {  # with pictures; the files are in `vision/`
    "Gemma3ForConditionalGeneration": "gemma3",
    "Idefics2ForConditionalGeneration": "idefics2",
    "Idefics3ForConditionalGeneration": "idefics3",
    "InternVLForConditionalGeneration": "internvl",
    "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava_next",
    "Mistral3ForConditionalGeneration": "pixtral",
    "MllamaForConditionalGeneration": "mllama",
    "PaliGemmaForConditionalGeneration": "paligemma",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "SmolVLMForConditionalGeneration": "idefics3",
}
OTHERS = "transformers_fallback"  # what has no line
_FILES = ARCHITECTURES | {name: f"vision.{file}" for name, file in SEEING.items()}


def read_config(folder: Path) -> Config:
    path = folder / "config.json"
    try:
        fields = read_json_object(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFoundError(f"{folder} has no config.json: it is not a model folder") from None
    return Config({**fields, **quantization_beside(fields, folder)}, str(path))


def build(config: Config, context: Context | None = None) -> Model:
    """The model that a config describes, without its weights."""
    return _find_family(config).build(config, context or Context())


def read_quantization(config: Config) -> Quantization | None:
    """How the checkpoint of a model that is served stores its matrices; None: plainly."""
    found = detect(config.fields, config.source)
    if found is not None and find_module(config) == OTHERS:
        raise ModelFormatError(
            f"{config.source}: the model is stored in {found.method}, and {shorten(config.fields['architectures'][0])}"
            " is served through transformers, which takes plain weights here. Use a version in bfloat16 or float16."
        )
    return found


def judge(folder: Path, trusts_code: bool = False, num_ranks: int = 1, expert_parallel: bool = False) -> None:
    """Raise `StartError` if the model of a folder cannot be served by so many ranks, whatever its weights are."""
    config = read_config(folder)
    read_quantization(config)
    check_ranks(build(config, Context(trusts_code=trusts_code)), num_ranks, expert_parallel)


def _find_family(config: Config) -> Any:
    return import_module(f"text_generation_inference.models.{find_module(config)}")


def find_module(config: Config) -> str:
    """The file that builds a model; `OTHERS` for what has no line."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ModelFormatError(f"{config.source}: `architectures` is missing, so the model cannot be recognised")
    found = (_FILES[name] for name in architectures if isinstance(name, str) and name in _FILES)
    module = next(found, OTHERS)
    if module == OTHERS and (refusal := find_refusal(config)) is not None:
        name = shorten(architectures[0])
        raise ModelFormatError(
            f"{config.source}: architecture {name} is not supported: {refusal.reason}. {refusal.instead}"
        )
    return module
