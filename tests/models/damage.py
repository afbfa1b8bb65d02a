"""Damages one tensor of a checkpoint, as a file that was cut, mixed up or written wrongly may have it."""

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

KINDS = ("missing", "name", "type", "shape", "scale")


def damage(
    tensors: dict[str, Tensor], suffixes: tuple[str, ...], scales: tuple[str, ...], data: st.DataObject
) -> tuple[str, tuple[int, int]]:
    """Changes a tensor whose name ends with one of `suffixes`, or of `scales`; its name, and a rank that reads it."""
    kind = data.draw(st.sampled_from(KINDS if scales else KINDS[:-1]))
    name = data.draw(st.sampled_from(sorted(n for n in tensors if n.endswith(scales if kind == "scale" else suffixes))))
    value = tensors[name]
    match kind:
        case "missing":
            del tensors[name]
        case "name":
            tensors[f"{name}x"] = tensors.pop(name)
        case "type":
            types = [each for each in (torch.int16, torch.bool) if each.itemsize != value.dtype.itemsize]
            tensors[name] = value.to(data.draw(st.sampled_from(types)))
        case "shape":
            shape = list(value.shape) or [1]
            place = data.draw(st.integers(0, len(shape) - 1))
            shape[place] += data.draw(st.sampled_from((-1, 1, shape[place])))
            tensors[name] = torch.zeros(shape, dtype=value.dtype)
        case _:
            wide = value.float().flatten().clone()
            bad = (
                (math.nan,) if value.dtype is torch.float8_e4m3fn else (math.inf, -math.inf, math.nan)
            )  # it has no other
            wide[data.draw(st.integers(0, len(wide) - 1))] = data.draw(st.sampled_from(bad))
            tensors[name] = wide.view(value.shape).to(value.dtype)
    # A rank of several may read the other half of scales.
    return name, (0, 1) if kind == "scale" else data.draw(st.sampled_from(((0, 1), (1, 2))))


def matrix_of(name: str) -> str:
    """The name without its last part, or parts: an error may name another tensor of the same matrix."""
    words = name.split(".")
    last = next(place for place, word in enumerate(words) if word.endswith("_proj") or word in ("w1", "w2", "w3"))
    return ".".join(words[: last + 1])
