"""Quantised blocks of GGUF files as matrices in few bits: for each type of block its form, and how it is read.

A block says `scale * number - offset` of each of its weights. Numbers that fit into 4 bits are held so, all others, and
those of a matrix whose parts have different forms, in 8. In 8 bits values are those of the `gguf` package bit for bit.
In 4, where Q4_1 and Q4_K have numbers from 0 to 15 and codes are read as -8 to 7, the difference goes into the offset:
the values are the same unless an offset is more than a hundred times its scale, and then to the last bit of it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.quant.low_bit import LowBitScheme
from text_generation_inference.quant.mxfp4 import SCHEME as MXFP4
from text_generation_inference.quant.mxfp4 import powers_of_two

_IQ4 = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)
_WIDE, _CENTER, _SHIFT = torch.float32, 128, 8

# Of blocks uint8 `[blocks, bytes]`: numbers (or codes of a table) int8 or uint8 `[blocks, weights]`, scales
# `[blocks, groups]`, offsets alike.
_Parts = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class BlockForm:
    scheme: LowBitScheme
    take_apart: Callable[[Tensor], _Parts]
    is_shifted: bool = False  # numbers are 0 to 15, which 4 bits hold as -8 to 7

    def read(self, kind: str, stored: Tensor, bits: int) -> LowBitWeight:
        """stored uint8 `[rows, bytes]` -> the matrix, in as many bits or as few as its own form has."""
        weights, size = block_size(kind)
        rows, columns = stored.shape[0], stored.shape[1] // size * weights
        numbers, scale, offset = self.take_apart(stored.reshape(-1, size))
        table = None if self.scheme.table is None else torch.tensor(self.scheme.table, device=stored.device)
        if bits == 4:
            assert self.scheme.bits == 4
            if self.is_shifted:
                assert offset is not None
                offset = offset - _SHIFT * scale.float()
                numbers = numbers - _SHIFT
            codes = numbers if table is not None else numbers + _SHIFT
        else:
            if table is not None:
                factor = 1 if float(table.abs().max()) > 100 else 2  # half numbers have whole ones, and half the scale
                numbers, scale, table = (table * factor).to(torch.int8)[numbers.int()], scale.float() / factor, None
            codes = numbers.to(torch.int16) + _CENTER
        codes = low_bit.pack_codes(codes.to(torch.uint8).view(rows, columns), bits)
        groups = None if offset is None else offset.view(rows, -1)
        size = self.scheme.group_size or columns
        return LowBitWeight(codes, scale.reshape(rows, -1), groups, bits, size, columns, table=table)


def block_size(kind: str) -> tuple[int, int]:
    """Weights and bytes of a block."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]


# -- pieces of blocks --------------------------------------------------------------------------------------------------


def _half(blocks: Tensor, at: int) -> Tensor:
    """float16 `[blocks, 1]`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _planes(stored: Tensor, run: int, bits: int) -> Tensor:
    """uint8 `[blocks, bytes]` -> `[blocks, 8 / bits * bytes]`: of each run of bytes the lowest bits, then others."""
    runs = stored.unflatten(1, (-1, run))
    mask = (1 << bits) - 1
    return torch.stack([runs >> shift & mask for shift in range(0, 8, bits)], 2).flatten(1)


def _single_bits(stored: Tensor) -> Tensor:
    """uint8 `[blocks, bytes]` -> `[blocks, 8 * bytes]`, one after the other."""
    return torch.stack([stored >> shift & 1 for shift in range(8)], -1).flatten(1)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K: the scales and offsets of 8 groups, each of 6 bits and both factors in front."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, high & 15 | low >> 2 & 48), 1)
    offsets = torch.cat((middle & 63, high >> 4 | middle >> 2 & 48), 1)
    return _half(blocks, 0).float() * scales, _half(blocks, 2).float() * offsets


# -- types of blocks ---------------------------------------------------------------------------------------------------


def _q4_0(blocks: Tensor) -> _Parts:
    return _planes(blocks[:, 2:], 16, 4).to(torch.int8) - 8, _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> _Parts:
    return _planes(blocks[:, 4:], 16, 4).to(torch.int8), _half(blocks, 0), -_half(blocks, 2).float()


def _q5_0(blocks: Tensor) -> _Parts:
    numbers = _planes(blocks[:, 6:], 16, 4) | _single_bits(blocks[:, 2:6]) << 4
    return numbers.to(torch.int8) - 16, _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> _Parts:
    numbers = _planes(blocks[:, 8:], 16, 4) | _single_bits(blocks[:, 4:8]) << 4
    return numbers.to(torch.int8), _half(blocks, 0), -_half(blocks, 2).float()


def _q8_0(blocks: Tensor) -> _Parts:
    return blocks[:, 2:].view(torch.int8), _half(blocks, 0), None


def _iq4_nl(blocks: Tensor) -> _Parts:
    return _planes(blocks[:, 2:], 16, 4), _half(blocks, 0), None


def _iq4_xs(blocks: Tensor) -> _Parts:
    high = _planes(blocks[:, 2:4], 1, 2)  # 8 groups, two bits each
    scales = (_planes(blocks[:, 4:8], 1, 4) | high << 4).to(torch.int8) - 32
    return _planes(blocks[:, 8:], 16, 4), _half(blocks, 0).float() * scales, None


def _mxfp4(blocks: Tensor) -> _Parts:
    return _planes(blocks[:, 1:], 16, 4), powers_of_two(blocks[:, :1]), None


def _q2_k(blocks: Tensor) -> _Parts:
    both, numbers = blocks[:, :16], _planes(blocks[:, 16:80], 32, 2)
    return numbers.to(torch.int8), _half(blocks, 80).float() * (both & 15), _half(blocks, 82).float() * (both >> 4)


def _q3_k(blocks: Tensor) -> _Parts:
    high = _planes(blocks[:, :32], 32, 1)
    numbers = (_planes(blocks[:, 32:96], 32, 2) | high << 2).to(torch.int8) - 4
    scales = _planes(blocks[:, 96:104], 8, 4) | _planes(blocks[:, 104:108], 4, 2) << 4
    return numbers, _half(blocks, 108).float() * (scales.to(torch.int8) - 32), None


def _q4_k(blocks: Tensor) -> _Parts:
    return _planes(blocks[:, 16:], 32, 4).to(torch.int8), *_k_scales(blocks)


def _q5_k(blocks: Tensor) -> _Parts:
    numbers = _planes(blocks[:, 48:], 32, 4) | _planes(blocks[:, 16:48], 32, 1) << 4
    return numbers.to(torch.int8), *_k_scales(blocks)


def _q6_k(blocks: Tensor) -> _Parts:
    numbers = _planes(blocks[:, :128], 64, 4) | _planes(blocks[:, 128:192], 32, 2) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return numbers.to(torch.int8) - 32, _half(blocks, 208).float() * scales, None


FORMS = {
    "q4_0": BlockForm(LowBitScheme(4, 32), _q4_0),
    "q4_1": BlockForm(LowBitScheme(4, 32, False, has_whole_zeros=False), _q4_1, is_shifted=True),
    "q5_0": BlockForm(LowBitScheme(8, 32), _q5_0),
    "q5_1": BlockForm(LowBitScheme(8, 32, False), _q5_1),
    "q8_0": BlockForm(LowBitScheme(8, 32), _q8_0),
    "iq4_nl": BlockForm(LowBitScheme(4, 32, table=_IQ4), _iq4_nl),
    "iq4_xs": BlockForm(LowBitScheme(4, 32, table=_IQ4, scale_dtype=_WIDE), _iq4_xs),
    "mxfp4": BlockForm(MXFP4, _mxfp4),
    "q2_k": BlockForm(LowBitScheme(4, 16, False, scale_dtype=_WIDE, has_whole_zeros=False), _q2_k),
    "q3_k": BlockForm(LowBitScheme(4, 16, scale_dtype=_WIDE), _q3_k),
    "q4_k": BlockForm(LowBitScheme(4, 32, False, scale_dtype=_WIDE, has_whole_zeros=False), _q4_k, is_shifted=True),
    "q5_k": BlockForm(LowBitScheme(8, 32, False, scale_dtype=_WIDE), _q5_k),
    "q6_k": BlockForm(LowBitScheme(8, 16, scale_dtype=_WIDE), _q6_k),
}


def common_scheme(kinds: set[str]) -> LowBitScheme:
    """Of a matrix whose parts are in blocks of these types."""
    schemes = {FORMS[kind].scheme for kind in kinds}
    first = next(iter(schemes))
    if len(schemes) == 1:
        return first
    is_alike = len({(scheme.bits, scheme.table) for scheme in schemes}) == 1
    return LowBitScheme(
        first.bits if is_alike else 8,
        min(scheme.group_size or 0 for scheme in schemes),
        all(scheme.is_symmetric for scheme in schemes),
        first.table if is_alike else None,
        scale_dtype=first.scale_dtype if len({scheme.scale_dtype for scheme in schemes}) == 1 else _WIDE,
        has_whole_zeros=all(scheme.has_whole_zeros for scheme in schemes),
    )
