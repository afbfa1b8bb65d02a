"""Codes in words of 32 bits, as several formats have them."""

import torch
from torch import Tensor


def pack_words(codes: Tensor, bits: int, is_dense: bool) -> Tensor:
    """`[rows, codes]` -> int32 `[rows, words]`, through numbers of any size."""
    packed = []
    for row in codes.tolist():
        count = 32 // bits
        runs = [row] if is_dense else [row[first : first + count] for first in range(0, len(row), count)]
        numbers = [sum(code << bits * place for place, code in enumerate(run)) for run in runs]
        words = -(-len(row) * bits // 32) if is_dense else 1
        packed.append([number >> 32 * n & 0xFFFFFFFF for number in numbers for n in range(words)])
    return torch.tensor(packed, dtype=torch.int64).to(torch.int32)
