"""Integers of the host that a device reads, as one tensor: one copy brings them there.

Taken apart on the device, inside the graph that reads them: a part of another tensor is no input of its own there.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

Layout = tuple[tuple[str, tuple[int, ...], bool], ...]  # name, shape, whether it is of 64 bits: known by its value
_WIDTHS = (torch.int32, torch.int64)


def can_pack(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in _WIDTHS


def pack(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Layout]:
    """int32 words: ids, positions and places of a cache, none of which needs more."""
    words = torch.cat([tensor.reshape(-1).to(torch.int32) for tensor in tensors.values()])
    return words, tuple((name, tuple(x.shape), x.dtype is torch.int64) for name, x in tensors.items())


def unpack(words: Tensor, layout: Layout) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    first = 0
    for name, shape, is_wide in layout:
        count = 1
        for size in shape:
            count *= size
        part = words[first : first + count].view(shape)
        found[name] = part.long() if is_wide else part
        first += count
    return found
