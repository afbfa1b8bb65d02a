"""What the codes of bitsandbytes stand for, and how matrices are put into them when they are loaded.

Of 4 bits (NF4, FP4) the matrix is one row of blocks, each with its largest value as scale. Those scales are then
themselves put into 8 bits (double quantisation) and back, as TGI did: the same values at little cost.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.kernels.low_bit import LowBitWeight, pack_codes
from text_generation_inference.quant.flat_groups import MIN_GROUP, group_of
from text_generation_inference.quant.low_bit import LowBitOnLoading, LowBitScheme, quantize_rows

_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_FP4 = tuple(sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3))
TABLES = {"nf4": _NF4, "fp4": _FP4}
BLOCK = 64  # values that have a scale in common
SCALES_TOGETHER = 256  # scales that have a scale in common
INT8_MAX = 127
_SMALLEST = 1e-38
_VALUES_AT_A_TIME = 1 << 22


@dataclass(frozen=True, slots=True)
class BlockScheme(LowBitScheme):
    """4 bits in blocks of 64."""

    group_size: int | None = BLOCK
    scale_dtype: torch.dtype = torch.float32
    puts_rows_apart: bool = False

    def accepts(self, columns: int) -> bool:
        return group_of(columns, BLOCK) >= MIN_GROUP

    def quantize(self, weight: Tensor) -> LowBitWeight:
        assert self.table is not None
        rows, columns = weight.shape
        table = torch.tensor(self.table, device=weight.device)
        flat = weight.reshape(-1)
        pieces = [_quantize_blocks(piece, self.table) for piece in flat.split(_VALUES_AT_A_TIME)]
        codes = torch.cat([piece[0] for piece in pieces]).view(rows, columns // 2)
        scale = round_scales(torch.cat([piece[1] for piece in pieces]))
        group = group_of(columns, BLOCK)
        scale = scale.repeat_interleave(BLOCK // group)[: rows * columns // group].view(rows, -1)
        return LowBitWeight(codes, scale, None, 4, group, columns, weight.dtype, table)


def _quantize_blocks(flat: Tensor, table: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """-> codes, two in a byte, and the scale of each block."""
    blocks = F.pad(flat.float(), (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1)
    scaled = (blocks * (1 / scale.clamp(min=_SMALLEST))[:, None]).clamp_(-1, 1).view(-1)[: flat.numel()]
    values, places = torch.tensor(table).sort(stable=True)
    codes = torch.zeros(scaled.shape, dtype=torch.uint8, device=flat.device)
    for bound in ((values[1:] + values[:-1]) / 2).tolist():  # on a CPU quicker than a search in so few
        codes += scaled > bound
    codes = places.to(flat.device, torch.uint8).index_select(0, codes.int())
    return pack_codes(codes[None], 4)[0], scale


def round_scales(scale: Tensor) -> Tensor:
    """float32 `[blocks]`, put into 8 bits and back."""
    table = dynamic_map().to(scale.device)
    offset = scale.mean()
    shifted = F.pad(scale - offset, (0, -scale.numel() % SCALES_TOGETHER)).view(-1, SCALES_TOGETHER)
    largest = shifted.abs().amax(1, keepdim=True)
    normed = (shifted * (1 / largest.clamp(min=_SMALLEST))).clamp(-1, 1)
    codes = torch.bucketize(normed, (table[1:] + table[:-1]) / 2, out_int32=True)
    return (table[codes] * largest).view(-1)[: scale.numel()] + offset


@cache
def dynamic_map() -> Tensor:
    """Values of 8 bits for numbers from -1 to 1: seven decades, each with twice as many steps as the one below."""
    found = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2**decade + 1)
        means = 10 ** (decade - 6) * ((bounds[1:] + bounds[:-1]) / 2)
        found += [means, -means]
    return torch.cat(found).sort().values


@dataclass(frozen=True, slots=True)
class Int8Scheme(LowBitScheme):
    """8 bits with a scale per row, from values in float16."""

    bits: int = 8
    group_size: int | None = None
    scale_dtype: torch.dtype = torch.float32

    def quantize(self, weight: Tensor) -> LowBitWeight:
        def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
            half = rows.to(torch.float16)
            largest = half.abs().amax(1, keepdim=True).float()
            codes = (half.float() * (INT8_MAX / largest.clamp(min=_SMALLEST))).round() + (INT8_MAX + 1)
            return codes.to(torch.uint8), largest / INT8_MAX

        return quantize_rows(weight, quantize)


ON_LOADING = {
    "bitsandbytes": LowBitOnLoading("bitsandbytes", Int8Scheme(), "matrices in 8 bits, quantised on loading"),
    **{
        f"bitsandbytes-{kind}": LowBitOnLoading(
            f"bitsandbytes-{kind}",
            BlockScheme(table=table),
            f"matrices in 4 bits ({kind.upper()} of bitsandbytes), quantised on loading",
        )
        for kind, table in TABLES.items()
    },
}
