"""How each family of models wants its pictures: one file for each way, and the table of which model has which."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from text_generation_inference.pictures.rule import PictureRule
from text_generation_inference.pictures.rules.settings import read_files

FAMILIES = {
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
    "Qwen2_5_VLForConditionalGeneration": "qwen2_vl",
    "Qwen3VLForConditionalGeneration": "qwen2_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen2_vl",
    "SmolVLMForConditionalGeneration": "idefics3",
}


def find_rule(folder: Path, config: Mapping[str, Any]) -> PictureRule | None:
    """What a model does with pictures; None for one that sees none, or whose folder does not say how.

    Raises `ModelFormatError` for settings that are wrong or cannot be followed.
    """
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    module = next((FAMILIES[name] for name in names if isinstance(name, str) and name in FAMILIES), None)
    if module is None or (files := read_files(folder, config)) is None:
        return None
    rule: PictureRule = import_module(f"text_generation_inference.pictures.rules.{module}").make(files)
    return rule
