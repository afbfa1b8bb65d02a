"""Rotary position tables: one row of cosines and sines per position.

Each kind is a way to choose the frequencies and a factor on the result; the table is all the model sees.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_inference.errors import ModelFormatError


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Facts of a rotary embedding, named as in Hugging Face configs."""

    kind: str = "default"  # one of KINDS
    theta: float = 10000.0
    rotary_dim: int = 0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    short_factors: tuple[float, ...] = ()  # longrope: for each frequency
    long_factors: tuple[float, ...] = ()


KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
NO_ROTATION = RopeSpec(kind="none", rotary_dim=2)  # by an angle of 0: for layers that know no positions


def build_table(spec: RopeSpec, num_positions: int, device: torch.device) -> Tensor:
    """`[num_positions, rotary_dim]` float32: cosines, then sines."""
    frequencies, factor = _frequencies(spec, num_positions)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1).to(device)


def is_finite(spec: RopeSpec) -> bool:
    """Whether there is a table, of any length."""
    try:
        found = [_frequencies(spec, length) for length in (1, spec.original_max_positions + 1)]
    except (ArithmeticError, ValueError):  # by logarithms of 1 and quotients beyond what a float holds
        return False
    return all(bool(torch.isfinite(each).all()) and math.isfinite(factor) for each, factor in found)


def mix_axes(table: Tensor, positions: Tensor, axes: Tensor) -> Tensor:
    """`[tokens, rotary_dim]`: each frequency of a table turned by one of a token's positions `[axes, tokens]`. `axes
    [rotary_dim]` says by which, for its cosine and its sine."""
    rows = table[positions]  # [axes, tokens, rotary_dim]
    return rows.gather(0, axes.expand(1, *rows.shape[1:]))[0]


def _frequencies(spec: RopeSpec, num_positions: int) -> tuple[Tensor, float]:
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).float() / spec.rotary_dim
    base = 1.0 / (spec.theta**exponents)
    match spec.kind:
        case "none":
            return torch.zeros_like(base), 1.0
        # "dynamic" stretches only sequences beyond the positions the model was made for, which are not served.
        case "default" | "dynamic":
            return base, 1.0
        case "linear":
            return base / spec.factor, 1.0
        case "llama3":
            return _llama3(spec, base), 1.0
        case "yarn":
            return _yarn(spec, base)
        case "longrope":
            return _longrope(spec, base, num_positions)
        case _:
            pass
    raise ModelFormatError(f"rope type {spec.kind!r} is not supported; known: {', '.join(KINDS)}")


def _llama3(spec: RopeSpec, base: Tensor) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended: none in Llama 4 Scout."""
    wavelengths = 2 * math.pi / base
    longest_kept = spec.original_max_positions / spec.high_freq_factor
    shortest_slowed = spec.original_max_positions / spec.low_freq_factor
    span = spec.high_freq_factor - spec.low_freq_factor or 1.0
    share = (spec.original_max_positions / wavelengths - spec.low_freq_factor) / span
    blended = (1 - share) * base / spec.factor + share * base
    slowed = torch.where(wavelengths > shortest_slowed, base / spec.factor, base)
    between = (wavelengths <= shortest_slowed) & (wavelengths >= longest_kept)
    return torch.where(between, blended, slowed)


def _yarn(spec: RopeSpec, base: Tensor) -> tuple[Tensor, float]:
    """Dimensions that turn often are kept, those that turn seldom interpolated, with a ramp between."""

    def dimension_of(turns: float) -> float:
        positions = spec.original_max_positions / (turns * 2 * math.pi)
        return spec.rotary_dim * math.log(positions) / (2 * math.log(spec.theta))

    low, high = dimension_of(spec.beta_fast), dimension_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = base / spec.factor * ramp + base * (1 - ramp)
    return frequencies, _yarn_factor(spec)


def _yarn_factor(spec: RopeSpec) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * mscale * math.log(spec.factor) + 1.0

    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return scale(spec.mscale) / scale(spec.mscale_all_dim)
    return scale(1.0)


def _longrope(spec: RopeSpec, base: Tensor, num_positions: int) -> tuple[Tensor, float]:
    """One list of factors for sequences of the original length, one for longer ones.

    Which one is decided by the longest sequence served, once: keys in the cache stay what they are, and a request gets
    the same answer whatever it is batched with.
    """
    factors = spec.long_factors if num_positions > spec.original_max_positions else spec.short_factors
    frequencies = base / torch.tensor(factors, dtype=torch.float32)
    if spec.attention_factor is not None:
        return frequencies, spec.attention_factor
    if spec.factor <= 1:
        return frequencies, 1.0
    return frequencies, math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_positions))
