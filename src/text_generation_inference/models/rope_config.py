"""Rotary settings of a config, in all the forms that files have them in."""

from collections.abc import Mapping
from typing import Any

from text_generation_inference.files import shorten
from text_generation_inference.layers.rotary import KINDS, RopeSpec, is_finite
from text_generation_inference.models.config import Config

_OLD_NAMES = {"su": "longrope"}
_SCALES = ("factor", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor")  # of some kinds, not of all
_ORIGINAL = "original_max_position_embeddings"
_MOST_POSITIONS = 2**62
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
    kind = _read_kind(scaling, renames)
    name = "partial_rotary_factor"
    shares = _holder(name, scaling, config)
    rotary_dim = int(head_dim * min(shares.positive(name, share), 2.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise shares.wrong(name, f"cannot be: {rotary_dim} of {head_dim} dimensions of a head cannot be rotated")
    originals = _holder(_ORIGINAL, config, scaling)
    original_max = originals.integer(_ORIGINAL, max_positions)
    thetas = _holder("rope_theta", scaling, config)
    spec = RopeSpec(
        kind=kind,
        theta=thetas.positive("rope_theta", theta),
        rotary_dim=rotary_dim,
        factor=_read_factor(scaling, kind, max_positions, original_max),
        original_max_positions=original_max,
        low_freq_factor=scaling.positive("low_freq_factor") if kind == "llama3" else 1.0,
        high_freq_factor=scaling.positive("high_freq_factor") if kind == "llama3" else 4.0,
        beta_fast=scaling.optional_positive("beta_fast") or 32.0,
        beta_slow=scaling.optional_positive("beta_slow") or 1.0,
        attention_factor=scaling.optional_number("attention_factor"),
        mscale=scaling.optional_number("mscale"),
        mscale_all_dim=scaling.optional_number("mscale_all_dim"),
        truncate=scaling.flag("truncate", True),
        short_factors=scaling.numbers("short_factor", rotary_dim // 2) if kind == "longrope" else (),
        long_factors=scaling.numbers("long_factor", rotary_dim // 2) if kind == "longrope" else (),
    )
    if kind == "llama3" and spec.high_freq_factor < spec.low_freq_factor:
        raise scaling.wrong("high_freq_factor", f"is {spec.high_freq_factor}, `low_freq_factor` is greater")
    if not is_finite(spec):
        if kind == "longrope" and original_max == 1:
            raise originals.wrong(_ORIGINAL, "is 1, which this rope type cannot stretch")
        if kind in ("default", "dynamic") or spec.theta <= 1:
            raise thetas.wrong("rope_theta", f"is {spec.theta}, which gives no finite frequencies as rope type {kind}")
        raise config.wrong(field, f"gives no finite frequencies as rope type {kind}")
    return spec


def read_length(config: Config, rope: RopeSpec, max_positions: int) -> int:
    """Of sequences that a model was made for: files whose rotation was stretched later say the one before."""
    scaling = config.inner("rope_scaling" if config.get("rope_scaling") else "rope_parameters")
    if rope.kind == "yarn" and _holder(_ORIGINAL, config, scaling).get(_ORIGINAL) is not None:
        return max(max_positions, int(min(rope.original_max_positions * rope.factor, _MOST_POSITIONS)))
    if rope.kind == "linear":
        return max(max_positions, config.optional_integer("max_sequence_length") or 0)
    return max_positions


def _read_kind(scaling: Config, renames: Mapping[str, str]) -> str:
    field = "rope_type" if scaling.get("rope_type") is not None else "type"
    kind = scaling.get(field)
    if kind is None:
        given = [name for name in _SCALES if scaling.get(name) is not None]
        if given:
            raise scaling.wrong("rope_type", f"is missing, so it is not known what `{given[0]}` means")
        return "default"
    kind = {**_OLD_NAMES, **renames}.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in KINDS:
        what = f"rope type {shorten(kind)} is not supported; known: {', '.join(KINDS)}"
        raise scaling.wrong(field, f"cannot be read: {what}")
    return kind


def _read_factor(scaling: Config, kind: str, max_positions: int, original_max: int) -> float:
    """Of kinds that stretch, by default from the original length to the present one; of those that always scale it is
    there."""
    if kind in ("linear", "llama3") or (kind == "yarn" and original_max == max_positions):
        return scaling.positive("factor")
    return scaling.optional_positive("factor") or (
        max_positions / original_max if kind in ("yarn", "longrope") else 1.0
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
