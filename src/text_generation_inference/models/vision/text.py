"""The text model inside a model that sees: which family it is of, and its fields.

A field that is not there means what it means to the text family's own class.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from text_generation_inference.files import shorten
from text_generation_inference.models.config import Config
from text_generation_inference.models.registry import ARCHITECTURES

_FAMILIES = {  # by `model_type` of the text model
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def read_text(config: Config, kind: str, **defaults: Any) -> dict[str, Any]:
    """Fields of `text_config`, as a config of the text model alone has them. kind: the family of one that names none.

    defaults: what missing fields mean where that is not what they mean to the family.
    """
    inner = config.inner("text_config").with_defaults(model_type=kind)
    architecture = _FAMILIES[inner.choice("model_type", _FAMILIES)]
    return as_text(config, {**defaults, **inner.fields}, architecture)


def as_text(config: Config, fields: dict[str, Any], architecture: str) -> dict[str, Any]:
    """With the family's defaults, and what stands outside: whether the head is the embedding."""
    family = import_module(f"text_generation_inference.models.{ARCHITECTURES[architecture]}")
    found = {**getattr(family, "DEFAULTS", {}), **fields, "architectures": [architecture]}
    inside, outside = (each.get("tie_word_embeddings") for each in (fields, config.fields))
    if inside is not None or outside is not None:  # files have it in either place, with false in the other
        found["tie_word_embeddings"] = bool(inside) or bool(outside)
    return found


def read_flat_text(config: Config, architecture: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """Where hub files have the fields of the text model outside, and newer ones in `text_config`.

    Rotation by sections (`read_sections`) is otherwise the default one.
    """
    fields = {**defaults, **_holder(config).fields}
    for name in ("rope_scaling", "rope_parameters"):
        settings = fields.get(name)
        if isinstance(settings, Mapping) and "mrope" in (settings.get("rope_type"), settings.get("type")):
            kept = {key: value for key, value in settings.items() if key != "type"}
            fields[name] = {**kept, "rope_type": "default"}
    return as_text(config, fields, architecture)


def read_sections(config: Config, default: Sequence[int]) -> tuple[int, ...]:
    """How many frequencies of a head the positions in time, rows and columns have."""
    holder = _holder(config)
    rope = holder.inner("rope_scaling" if holder.get("rope_scaling") else "rope_parameters")
    found = rope.get("mrope_section")
    if found is None:
        return tuple(default)
    are_counts = isinstance(found, Sequence) and all(isinstance(each, int) and each >= 0 for each in found)
    if not are_counts or len(found) != 3:
        raise rope.wrong("mrope_section", f"must be 3 numbers of frequencies, it is {shorten(found)}")
    return tuple(found)


def _holder(config: Config) -> Config:
    return config if config.get("text_config") is None else config.inner("text_config")
