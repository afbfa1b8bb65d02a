"""Which file of this package knows the tower of which architecture, and the text model beside it.

A file has `tower(config, context)`, `text_config(config)` (fields of the text model as its own family reads them), and
what checkpoints call the text model (`DECODERS`) and its head (`HEADS`); those with positions in three dimensions have
`sections(config)` too.
"""

from importlib import import_module
from typing import Any

from text_generation_inference.models.config import Config
from text_generation_inference.models.registry import SEEING


def find_family(config: Config) -> Any | None:
    """The module of a model that sees; None for others."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    found = next((SEEING[name] for name in names if isinstance(name, str) and name in SEEING), None)
    return None if found is None else import_module(f"text_generation_inference.models.vision.{found}")
