"""EETQ: plain matrices put into 8 bits with a scale per row as they are loaded, and multiplied in the model's type.

There is no such format of checkpoints. A row's largest value becomes 128, of which codes reach 127 alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.quant.low_bit import LowBitOnLoading, LowBitScheme, quantize_rows

_LARGEST = 128
_SMALLEST_HALF = 2.0**-14  # above it float16 has all its bits
_SMALLEST = 1e-38


@dataclass(frozen=True, slots=True)
class EetqScheme(LowBitScheme):
    bits: int = 8
    group_size: int | None = None
    scale_dtype: torch.dtype = torch.float32

    def quantize(self, weight: Tensor) -> LowBitWeight:
        """Codes come from the exact scale, values from the one in float16, which EETQ keeps."""

        def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
            wide = rows.float()
            exact = wide.abs().amax(1, keepdim=True) / _LARGEST
            codes = _round_half_away(wide / exact.clamp(min=_SMALLEST)).clamp(-_LARGEST, _LARGEST - 1) + _LARGEST
            # below that rows of small values would vanish
            return codes.to(torch.uint8), torch.where(exact < _SMALLEST_HALF, exact, exact.half().float())

        return quantize_rows(weight, quantize)


def _round_half_away(x: Tensor) -> Tensor:
    whole = x.trunc()
    return torch.where((x - whole).abs() >= 0.5, whole + x.sign(), whole)


ON_LOADING = LowBitOnLoading("eetq", EetqScheme(), "matrices in 8 bits (EETQ), quantised on loading")
