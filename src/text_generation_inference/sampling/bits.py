"""Sets of ids as bits: bit i of word j is id 32 j + i."""

from functools import cache

import numpy as np
import torch
from torch import Tensor


def spread(words: Tensor, zero: float, one: float, count: int) -> Tensor:
    """`[rows, words]` int32 -> `[rows, count]` float32: `one` where an id's bit is set, else `zero`.

    Eight ids at a time: a table of all bytes is much faster than a shift for every id.
    """
    device = words.device
    if device.type == "cpu" and not torch.compiler.is_compiling():
        table, bytes_ = _kept_table(zero, one), words.view(torch.uint8).int()
    else:  # a graph keeps no tensor of ours, and may not look at words as bytes
        table = _table(zero, one, device)
        bytes_ = (words[:, :, None] >> torch.arange(0, 32, 8, dtype=torch.int32, device=device)) & 255
    return table.index_select(0, bytes_.flatten()).view(words.shape[0], -1)[:, :count]


def _table(zero: float, one: float, device: torch.device) -> Tensor:
    """`[256, 8]`: the eight values of each byte."""
    is_set = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return torch.where(is_set != 0, one, zero)


@cache
def _kept_table(zero: float, one: float) -> Tensor:
    return _table(zero, one, torch.device("cpu"))


def cut(words: np.ndarray, start: int, end: int) -> np.ndarray:
    """Of sets `[..., words]` int32 the ids from start to end, as sets in which `start` is the first id.

    What is past the last word is in no set; past the end there may be anything.
    """
    first, shift = divmod(start, 32)
    count = -(-(end - start) // 32)
    taken = np.zeros((*words.shape[:-1], count + 1), dtype=np.uint32)
    found = words[..., first : first + count + 1]
    taken[..., : found.shape[-1]] = found.view(np.uint32)
    if shift:
        taken[..., :-1] = (taken[..., :-1] >> shift) | (taken[..., 1:] << (32 - shift))
    return np.ascontiguousarray(taken[..., :-1]).view(np.int32)


def pack(is_in: np.ndarray) -> np.ndarray:
    """`[ids]` bool -> `[words]` int32."""
    bits = np.zeros(-(-len(is_in) // 32) * 32, dtype=np.uint8)
    bits[: len(is_in)] = is_in
    return np.packbits(bits, bitorder="little").view(np.int32)
