"""The tensors of the GPTQ format (version 1), from codes and back.

Codes are a stream of bits that fills words of 32 from the lowest bit on: along the inputs in `qweight`, along the
outputs in `qzeros`, which holds zero points less 1.
"""

import torch
from torch import Tensor

from text_generation_inference.make_quantized.solver import Solved

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
_WORD = 32


def pack(solved: Solved, bits: int) -> dict[str, Tensor]:
    """By the last part of their names."""
    return {
        "qweight": pack_words(solved.codes.t(), bits),
        "qzeros": pack_words(solved.zero - 1, bits).t().contiguous(),
        "scales": solved.scale.t().contiguous(),
        "g_idx": solved.group_of.contiguous(),
    }


def unpack(tensors: dict[str, Tensor], bits: int) -> Solved:
    codes = unpack_words(tensors["qweight"], bits).t().contiguous()
    zero = unpack_words(tensors["qzeros"].t(), bits)
    return Solved(codes, tensors["scales"].t().contiguous(), (zero + 1).contiguous(), tensors["g_idx"])


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """uint8 `[count, others]` -> int32 `[count * bits / 32, others]`."""
    words = torch.zeros((codes.shape[0] * bits // _WORD, codes.shape[1]), dtype=torch.int64, device=codes.device)
    place = torch.arange(codes.shape[0], device=codes.device) * bits
    word, shift = place // _WORD, place % _WORD
    words.index_add_(0, word, (codes.long() << shift[:, None]) & 0xFFFFFFFF)
    crossing = shift + bits > _WORD
    words.index_add_(0, word[crossing] + 1, codes[crossing].long() >> (_WORD - shift[crossing, None]))
    return torch.where(words >= 1 << 31, words - (1 << _WORD), words).to(torch.int32)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """The other way round."""
    wide = words.long() & 0xFFFFFFFF
    place = torch.arange(words.shape[0] * _WORD // bits, device=words.device) * bits
    word, shift = place // _WORD, place % _WORD
    codes = wide[word] >> shift[:, None]
    crossing = shift + bits > _WORD
    codes[crossing] |= wide[word[crossing] + 1] << (_WORD - shift[crossing, None])
    return (codes & ((1 << bits) - 1)).to(torch.uint8)
