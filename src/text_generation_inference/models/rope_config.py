"""Rotary settings of a config, in all the forms that files have them in."""

from collections.abc import Mapping
from typing import Any

from text_generation_inference.files import shorten
from text_generation_inference.layers.rotary import KINDS, RopeSpec
from text_generation_inference.models.config import Config

_OLD_NAMES = {"su": "longrope"}
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_rope(
    config: Config,
    head_dim: int,
    max_positions: int,
    *,
    theta: float = 10000.0,  # where none is given
    share: float = 1.0,  # of a head that is rotated, where none is given
    layer_type: str | None = None,  # for families whose settings may be nested by type of layer
    renames: Mapping[str, str] = {},  # kinds that mean another in this family
) -> RopeSpec:
    """From `rope_parameters` (newer configs), or `rope_theta` and `rope_scaling` (older ones), which wins."""
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = _unnest(config, field, layer_type)
    kind_field = "rope_type" if scaling.get("rope_type") is not None else "type"
    kind = scaling.get(kind_field) or "default"
    kind = {**_OLD_NAMES, **renames}.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in KINDS:
        what = f"rope type {shorten(kind)} is not supported; known: {', '.join(KINDS)}"
        raise scaling.wrong(kind_field, f"cannot be read: {what}")
    name = "partial_rotary_factor"
    shares = _holder(name, scaling, config)
    rotary_dim = int(head_dim * min(shares.positive(name, share), 2.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise shares.wrong(name, f"cannot be: {rotary_dim} of {head_dim} dimensions of a head cannot be rotated")
    name = "original_max_position_embeddings"
    original_max = _holder(name, config, scaling).integer(name, max_positions)
    is_stretched = kind in ("yarn", "longrope")  # by default from the original length to the present one
    factor = scaling.positive("factor", max_positions / original_max if is_stretched else 1.0)
    return RopeSpec(
        kind=kind,
        theta=_holder("rope_theta", scaling, config).positive("rope_theta", theta),
        rotary_dim=rotary_dim,
        factor=factor,
        original_max_positions=original_max,
        low_freq_factor=scaling.positive("low_freq_factor", 1.0),
        high_freq_factor=scaling.positive("high_freq_factor", 4.0),
        beta_fast=scaling.positive("beta_fast", 32.0),
        beta_slow=scaling.positive("beta_slow", 1.0),
        attention_factor=scaling.optional_number("attention_factor"),
        mscale=scaling.optional_number("mscale"),
        mscale_all_dim=scaling.optional_number("mscale_all_dim"),
        truncate=scaling.flag("truncate", True),
        short_factors=scaling.numbers("short_factor", rotary_dim // 2) if kind == "longrope" else (),
        long_factors=scaling.numbers("long_factor", rotary_dim // 2) if kind == "longrope" else (),
    )


def _holder(name: str, first: Config, second: Config) -> Config:
    """Which of two has a field."""
    return first if first.get(name) is not None else second


def _unnest(config: Config, field: str, layer_type: str | None) -> Config:
    """The settings of a type of layer; those of all where they are not nested."""
    scaling = config.inner(field)
    nested: dict[str, Any] = {name: value for name, value in scaling.fields.items() if name in LAYER_TYPES}
    if not nested:
        return scaling
    if layer_type is None:
        raise config.wrong(field, f"has settings by type of layer ({', '.join(nested)}), which this family has not")
    return scaling.inner(layer_type)
