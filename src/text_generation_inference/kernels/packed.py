"""Numbers of the host that a device reads, as one tensor: one copy brings them there.

Taken apart on the device, inside the graph that reads them: a part of another tensor is no input of its own there, so
one that a graph does not read costs nothing but its bytes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

Layout = tuple[tuple[str, tuple[int, ...], str], ...]  # name, shape, type: known by its value
_TYPES = {torch.int32: "int32", torch.int64: "int64", torch.float32: "float32", torch.bool: "bool"}


def can_pack(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in _TYPES


def pack(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Layout]:
    """int32 words: ids, positions and places of a cache, none of which needs more, and the bits of float32."""
    words = torch.cat([_as_words(tensor.reshape(-1)) for tensor in tensors.values()])
    return words, tuple((name, tuple(x.shape), _TYPES[x.dtype]) for name, x in tensors.items())


def _as_words(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int32) if numbers.dtype is torch.float32 else numbers.to(torch.int32)


def unpack(words: Tensor, layout: Layout) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    first = 0
    for name, shape, kind in layout:
        count = 1
        for size in shape:
            count *= size
        part = words[first : first + count].view(shape)
        if kind == "int64":
            part = part.long()
        elif kind == "float32":
            part = part.view(torch.float32)
        elif kind == "bool":
            part = part != 0
        found[name] = part
        first += count
    return found
