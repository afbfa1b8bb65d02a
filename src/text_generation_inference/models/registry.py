"""Which architecture is read by which file.

One line per architecture; modules are imported when they are needed.
"""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

from text_generation_inference.errors import ModelFormatError, ModelNotFoundError
from text_generation_inference.files import read_json_object, shorten
from text_generation_inference.models.spec import Config, DecoderSpec
from text_generation_inference.quant.choose import detect, quantization_beside

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
}


def read_config(folder: Path) -> Config:
    path = folder / "config.json"
    try:
        fields = read_json_object(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFoundError(f"{folder} has no config.json: it is not a model folder") from None
    return Config({**fields, **quantization_beside(fields, folder)}, str(path))


def read_spec(config: Config) -> DecoderSpec:
    """The dimensions of the model a config describes."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ModelFormatError(f"{config.source}: `architectures` is missing, so the model cannot be recognised")
    for name in architectures:
        if isinstance(name, str) and name in ARCHITECTURES:
            quantization = detect(config.fields, config.source)
            spec = import_module(f"text_generation_inference.models.{ARCHITECTURES[name]}").read_spec(config)
            return replace(spec, quantization=quantization)
    name = shorten(architectures[0])
    raise ModelFormatError(
        f"{config.source}: architecture {name} is not supported. Supported: {', '.join(ARCHITECTURES)}"
    )
