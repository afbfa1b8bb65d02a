"""Sets of ids as bits: bit i of word j is id 32 j + i."""

import numpy as np
import torch
from torch import Tensor


def spread(words: Tensor, zero: float, one: float, count: int) -> Tensor:
    """`[rows, words]` int32 -> `[rows, count]` float32: `one` where an id's bit is set, else `zero`.

    Eight ids at a time: a table of all bytes is much faster than a shift for every id.
    """
    device = words.device
    is_set = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    table = torch.where(is_set != 0, one, zero)
    bytes_ = (words[:, :, None] >> torch.arange(0, 32, 8, dtype=torch.int32, device=device)) & 255
    return table.index_select(0, bytes_.flatten()).view(words.shape[0], -1)[:, :count]


def pack(is_in: np.ndarray) -> np.ndarray:
    """`[ids]` bool -> `[words]` int32."""
    bits = np.zeros(-(-len(is_in) // 32) * 32, dtype=np.uint8)
    bits[: len(is_in)] = is_in
    return np.packbits(bits, bitorder="little").view(np.int32)
