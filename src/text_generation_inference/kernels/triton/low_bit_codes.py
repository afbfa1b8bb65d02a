# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""Matrices in few bits in the order that kernels read them in, and how a kernel makes numbers of codes.

Words of 32 bits lie in tiles of 8 rows and 16 words of each: one load of a warp is one tile, of which a thread has 4
words of one row. What they hold are the columns that the thread wants for its part of a product on tensor cores, so
that nothing goes from thread to thread: of 4 bits a tile has 128 columns, of 8 bits 64.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from text_generation_inference.kernels.low_bit import LowBitWeight, pack_codes, unpack_codes
from text_generation_inference.kernels.matrices import PackedWeight

TILE_ROWS = tl.constexpr(8)
TILE_WORDS = tl.constexpr(16)  # of a row
_VALUES_AT_A_TIME = 1 << 26

_TWO_NUMBERS = {
    # The two halves of a word become numbers 128 + code or 1024 + code, less that and the center.
    tl.bfloat16: ("0x43004300", "add.rn.bf16x2 t, t, {}", "0xC308C308"),
    tl.float16: ("0x64006400", "add.rn.f16x2 t, t, {}", "0xE408E408"),
}
_OLDER = "fma.rn.bf16x2 t, t, o, {}"  # GPUs before capability 9.0 multiply by one


def _assembly(kind: tl.dtype, zeros: bool, older: bool = False) -> str:
    """`zeros`: what is subtracted is given (`_negated`)."""
    exponent, add, center = _TWO_NUMBERS[kind]
    subtract = (_OLDER if older else add).format("$9" if zeros else "c")
    lines = [f".reg .b32 t, s, e, o, c; mov.b32 e, {exponent}; mov.b32 o, 0x3F803F80; mov.b32 c, {center};"]
    for number in range(4):
        source = "$8"
        if number:
            lines.append(f"shr.u32 s, $8, {4 * number};")
            source = "s"
        lines.append(f"lop3.b32 t, {source}, 0x000f000f, e, 0xEA; {subtract};")
        lines.append(f"mov.b32 {{${2 * number}, ${2 * number + 1}}}, t;")
    return "{ " + " ".join(lines) + " }"


_FLOAT_BITS = {
    # Where exponent and fraction go, and by how much the numbers are then too small.
    tl.bfloat16: (6, "0x01C001C0", "0x7E807E80"),
    tl.float16: (9, "0x0E000E00", "0x74007400"),
}
_TIMES = {
    tl.bfloat16: "mul.rn.bf16x2 t, t, {}",
    tl.float16: "mul.rn.f16x2 t, t, {}",
}
_OLDER_TIMES = "fma.rn.bf16x2 t, t, {}, z"


def _float_assembly(kind: tl.dtype, older: bool = False) -> str:
    """Floats of 4 bits (e2m1): their bits are put where those of the wider type are."""
    place, mask, power = _FLOAT_BITS[kind]
    times = (_OLDER_TIMES if older else _TIMES[kind]).format("p")
    lines = [f".reg .b32 t, s, m, p, z; mov.b32 p, {power}; mov.b32 z, 0x80008000;"]
    for number in range(4):
        move, sign = place - 4 * number, 12 - 4 * number
        lines.append(f"{'shl.b32' if move >= 0 else 'shr.u32'} m, $8, {abs(move)}; and.b32 m, m, {mask};")
        lines.append(f"shl.b32 s, $8, {sign}; lop3.b32 t, s, 0x80008000, m, 0xEA; {times};")
        lines.append(f"mov.b32 {{${2 * number}, ${2 * number + 1}}}, t;")
    return "{ " + " ".join(lines) + " }"


_BF16_FLOATS_ASSEMBLY = tl.constexpr(_float_assembly(tl.bfloat16))
_OLDER_BF16_FLOATS_ASSEMBLY = tl.constexpr(_float_assembly(tl.bfloat16, older=True))
_FP16_FLOATS_ASSEMBLY = tl.constexpr(_float_assembly(tl.float16))
_BF16_ASSEMBLY = tl.constexpr(_assembly(tl.bfloat16, False))
_OLDER_BF16_ASSEMBLY = tl.constexpr(_assembly(tl.bfloat16, False, older=True))
_FP16_ASSEMBLY = tl.constexpr(_assembly(tl.float16, False))
_BF16_ZEROS_ASSEMBLY = tl.constexpr(_assembly(tl.bfloat16, True))
_OLDER_BF16_ZEROS_ASSEMBLY = tl.constexpr(_assembly(tl.bfloat16, True, older=True))
_FP16_ZEROS_ASSEMBLY = tl.constexpr(_assembly(tl.float16, True))
_HALVES = tl.constexpr((tl.int16,) * 8)
_OUTPUTS = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r")
_ZEROS_OUTPUTS = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r")
# Each lane holds the number of one code, twice in a warp: one instruction asks the lane of a code for it.
_OWN_NUMBER = tl.constexpr(
    "{ .reg .u32 lane; .reg .u64 at; mov.u32 lane, %laneid; and.b32 lane, lane, 15;"
    " mad.wide.u32 at, lane, 4, $1; ld.global.nc.b32 $0, [at]; }"
)


def _asking_lanes() -> str:
    lines = [".reg .b32 s;"]
    for place, shift in enumerate((0, 16, 4, 20, 8, 24, 12, 28)):
        source = "$8"
        if shift:
            lines.append(f"shr.u32 s, $8, {shift};")
            source = "s"
        lines.append(f"shfl.sync.idx.b32 ${place}, $9, {source}, 31, -1;")  # the lowest five bits count
    return "{ " + " ".join(lines) + " }"


_LOOK_UP = tl.constexpr(_asking_lanes())
_WORDS = tl.constexpr((tl.int32,) * 8)
_WORD_OUTPUTS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r")
# Orders of the 32 columns of a word of 4 bits: as they are; as tensor cores of capability 9.0 take left operands from
# registers; with pairs and halves exchanged.
NATURAL, PAIRED, CROSSED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# What codes stand for: themselves less a center, any 16 numbers, or floats of 4 bits, of which kernels make numbers
# without looking them up.
NO_TABLE, NUMBERS, FLOATS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NO_OFFSETS, OFFSETS, ZERO_POINTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _code(words, shift: tl.constexpr, table, BITS: tl.constexpr, TABLE: tl.constexpr, kind: tl.constexpr):
    """The number that one code in each word stands for: exact, as codes fit the fraction of a float32."""
    MASK: tl.constexpr = (1 << BITS) - 1
    code = (words >> shift) & MASK
    if TABLE:
        return tl.load(table + code).to(kind)
    else:
        wide = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + (1 << (BITS - 1)))
        return wide.to(kind)


@triton.jit
def lookup_of(table, TABLE: tl.constexpr, ASM: tl.constexpr):
    """What `unpack` wants of a table `[16]` in float32: with ASM each lane's own number, else the table itself."""
    if TABLE == NUMBERS and ASM:
        return tl.inline_asm_elementwise(_OWN_NUMBER, "=r,l", [table], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return table


@triton.jit
def _numbers_of(words, own, kind: tl.constexpr):
    a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
        _LOOK_UP, _WORD_OUTPUTS, [words, own], dtype=_WORDS, is_pure=True, pack=1
    )
    return (
        a.to(tl.float32, bitcast=True).to(kind), b.to(tl.float32, bitcast=True).to(kind),
        c.to(tl.float32, bitcast=True).to(kind), d.to(tl.float32, bitcast=True).to(kind),
        e.to(tl.float32, bitcast=True).to(kind), f.to(tl.float32, bitcast=True).to(kind),
        g.to(tl.float32, bitcast=True).to(kind), h.to(tl.float32, bitcast=True).to(kind),
    )  # fmt: skip


@triton.jit
def _negated(zeros, kind: tl.constexpr):
    """Zero points of 4 bits as what is added to 128 + code or 1024 + code, twice in a word."""
    twice = zeros.to(tl.int32) * 65537
    if kind == tl.bfloat16:
        return twice | -0x3CFF3D00  # 0xC300C300
    else:
        return twice | -0x1BFF1C00  # 0xE400E400


@triton.jit
def unpack(
    words, zeros, table, BN: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr, ZEROS: tl.constexpr,
    kind: tl.constexpr, ASM: tl.constexpr, ORDER: tl.constexpr = 0,
):  # fmt: skip
    """words `[BN, 16]` -> numbers of type `kind`, `[128 or 64, BN]`. ASM: see `generation_of`.

    `table`: see `lookup_of`. ZEROS: of 4 bits, less `zeros` `[BN]` instead of the center.
    ORDER: of columns, of 4 bits: NATURAL, PAIRED or CROSSED.
    """
    words = tl.reshape(words, (BN, 4, 4))  # rows, threads, words of a thread
    if BITS == 8:
        even = tl.join(_code(words, 0, table, 8, TABLE, kind), _code(words, 16, table, 8, TABLE, kind))
        odd = tl.join(_code(words, 8, table, 8, TABLE, kind), _code(words, 24, table, 8, TABLE, kind))
        return tl.reshape(tl.permute(tl.join(even, odd), (2, 1, 3, 4, 0)), (64, BN))
    else:
        if ASM and not TABLE and (kind == tl.bfloat16 or kind == tl.float16):
            if ZEROS:
                BF16_TEXT: tl.constexpr = _BF16_ZEROS_ASSEMBLY if ASM >= 9 else _OLDER_BF16_ZEROS_ASSEMBLY
                TEXT: tl.constexpr = BF16_TEXT if kind == tl.bfloat16 else _FP16_ZEROS_ASSEMBLY
                added = tl.broadcast_to(_negated(zeros, kind)[:, None, None], (BN, 4, 4))
                a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                    TEXT, _ZEROS_OUTPUTS, [words, added], dtype=_HALVES, is_pure=True, pack=1
                )
            else:
                BF16_PLAIN: tl.constexpr = _BF16_ASSEMBLY if ASM >= 9 else _OLDER_BF16_ASSEMBLY
                PLAIN: tl.constexpr = BF16_PLAIN if kind == tl.bfloat16 else _FP16_ASSEMBLY
                a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                    PLAIN, _OUTPUTS, [words], dtype=_HALVES, is_pure=True, pack=1
                )
        elif ASM and TABLE == FLOATS and (kind == tl.bfloat16 or kind == tl.float16):
            BF16_FLOATS: tl.constexpr = _BF16_FLOATS_ASSEMBLY if ASM >= 9 else _OLDER_BF16_FLOATS_ASSEMBLY
            FLOATS_TEXT: tl.constexpr = BF16_FLOATS if kind == tl.bfloat16 else _FP16_FLOATS_ASSEMBLY
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                FLOATS_TEXT, _OUTPUTS, [words], dtype=_HALVES, is_pure=True, pack=1
            )
        elif ASM and TABLE == NUMBERS:
            a, b, c, d, e, f, g, h = _numbers_of(words, table, kind)
        else:
            a, b = _code(words, 0, table, 4, TABLE, kind), _code(words, 16, table, 4, TABLE, kind)
            c, d = _code(words, 4, table, 4, TABLE, kind), _code(words, 20, table, 4, TABLE, kind)
            e, f = _code(words, 8, table, 4, TABLE, kind), _code(words, 24, table, 4, TABLE, kind)
            g, h = _code(words, 12, table, 4, TABLE, kind), _code(words, 28, table, 4, TABLE, kind)
        even = tl.join(tl.join(a, b), tl.join(e, f))
        odd = tl.join(tl.join(c, d), tl.join(g, h))
        apart = tl.join(even, odd)  # row, thread, word, column of a pair, upper half, pair
        if ORDER == PAIRED:
            apart = tl.permute(apart, (2, 4, 5, 1, 3, 0))
        elif ORDER == CROSSED:
            apart = tl.permute(apart, (2, 5, 1, 4, 3, 0))
        else:
            apart = tl.permute(apart, (2, 4, 1, 5, 3, 0))
        tile = tl.reshape(apart, (128, BN))
        if tile.dtype == tl.int16:
            return tile.to(kind, bitcast=True)
        elif ZEROS:
            return tile + (8 - zeros.to(tl.int32)).to(kind)[None, :]
        else:
            return tile


@triton.jit
def rows_at(words, n, BLOCKS: tl.constexpr):
    """Where the words of rows `n` begin, `[len(n), 16]`, in a matrix of so many tiles side by side."""
    tile = (n // TILE_ROWS)[:, None].to(tl.int64) * (BLOCKS * TILE_ROWS * TILE_WORDS)
    return words + tile + (n % TILE_ROWS)[:, None] * TILE_WORDS + tl.arange(0, TILE_WORDS)[None, :]


def generation_of(x: Tensor) -> int:
    """The GPUs whose instructions a kernel may use: 8 or 9 for capabilities from 8.0 or 9.0 on, 0 without a GPU."""
    return _generation(x.device) if x.is_cuda else 0


@lru_cache
def _generation(device: torch.device) -> int:
    return min(9, torch.cuda.get_device_capability(device)[0])


@dataclass(slots=True)
class TritonLowBit(PackedWeight):
    """Of one matrix, or of those of several experts, each with its rows filled up to whole tiles."""

    shape: torch.Size  # [out, in]; of all experts
    words: Tensor  # int32 [experts, tiles of rows, tiles of columns, 8, 16]
    scale: Tensor  # [experts, groups, out of one]
    offset: Tensor | None  # the same: float32, or zero points in uint8, of which numbers are `scale * (code - zero)`
    bits: int
    group_size: int
    columns: int
    dtype: torch.dtype
    table: Tensor | None  # [16] float32
    order: Tensor | None  # [columns], or [experts, columns], int32
    quantizes_inputs: bool
    input_scale: Tensor | None
    wide: Tensor | None = None  # [out, in]: its values, for many rows
    codes_are: int = NO_TABLE.value  # or NUMBERS or FLOATS: those of `table`

    @property
    def num_experts(self) -> int:
        return self.words.shape[0]

    @property
    def block(self) -> int:
        """Columns of a tile."""
        return TILE_WORDS.value * 32 // self.bits

    @property
    def spreads(self) -> bool:
        """Whether groups end within tiles of columns, so that each number is scaled before it is multiplied."""
        return _spreads(self.group_size, self.columns, self.block)

    @property
    def offsets(self) -> int:
        """NO_OFFSETS, OFFSETS or ZERO_POINTS."""
        if self.offset is None:
            return NO_OFFSETS.value
        return ZERO_POINTS.value if self.offset.dtype is torch.uint8 else OFFSETS.value


def _spreads(group_size: int, columns: int, block: int) -> bool:
    return group_size < columns and group_size % block != 0


def _find_zeros(weight: LowBitWeight) -> Tensor | None:
    """Zero points in uint8 `[out, groups]`, if that is what makes the offsets."""
    if weight.offset is None or weight.table is not None or weight.bits != 4:
        return None
    scale = weight.scale.float()
    zeros = torch.where(scale == 0, 0.0, weight.offset / scale).round()
    exact = torch.equal(scale * zeros, weight.offset) and bool(((zeros >= -8) & (zeros < 120)).all())
    return (zeros + 8).to(torch.uint8) if exact else None


def pack_low_bit(weight: LowBitWeight, num_experts: int = 1) -> TritonLowBit:
    """See `Ops.pack_low_bit`. A few rows at a time: what is made on the way is larger."""
    rows, columns = weight.codes.shape[0] // num_experts, weight.columns
    per_tile = TILE_WORDS.value * 32 // weight.bits
    row_tiles, column_tiles = triton.cdiv(rows, TILE_ROWS.value), triton.cdiv(columns, per_tile)
    words = torch.empty(
        (num_experts, row_tiles, column_tiles, TILE_ROWS.value, TILE_WORDS.value),
        dtype=torch.int32,
        device=weight.codes.device,
    )
    step = max(1, _VALUES_AT_A_TIME // (columns * TILE_ROWS.value))
    for expert, codes in enumerate(weight.codes.view(num_experts, rows, -1)):
        for first in range(0, row_tiles, step):
            part = codes[first * TILE_ROWS.value : (first + step) * TILE_ROWS.value]
            words[expert, first : first + step] = _arrange(unpack_codes(part, weight.bits), weight.bits)

    def by_group(values: Tensor) -> Tensor:
        return values.view(num_experts, rows, -1).transpose(1, 2).contiguous()

    zeros = None if _spreads(weight.group_size, columns, per_tile) else _find_zeros(weight)
    offset = weight.offset if zeros is None else zeros
    return TritonLowBit(
        weight.shape, words, by_group(weight.scale), None if offset is None else by_group(offset),
        weight.bits, weight.group_size, columns, weight.dtype, weight.table, weight.order, weight.quantizes_inputs,
        weight.input_scale, codes_are=_name_codes(weight.table),
    )  # fmt: skip


def _name_codes(table: Tensor | None) -> int:
    if table is None:
        return NO_TABLE.value
    floats = torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=table.device)
    return (FLOATS if torch.equal(table, floats) else NUMBERS).value


def _arrange(codes: Tensor, bits: int) -> Tensor:
    """uint8 `[rows, columns]` -> int32 `[tiles of rows, tiles of columns, 8, 16]`."""
    per_tile = TILE_WORDS.value * 32 // bits
    codes = F.pad(codes, (0, -codes.shape[1] % per_tile, 0, -codes.shape[0] % TILE_ROWS.value))
    tiles = codes.view(codes.shape[0] // TILE_ROWS.value, TILE_ROWS.value, codes.shape[1] // per_tile, per_tile)
    if bits == 8:  # word, thread, byte
        apart = tiles.unflatten(3, (4, 4, 4)).permute(0, 2, 1, 4, 3, 5)
    else:  # word, upper half of its columns, thread, pair, column of a pair: pairs are the halves of bytes
        apart = tiles.unflatten(3, (4, 2, 4, 2, 2))
        apart = apart[..., 0, :] | apart[..., 1, :] << 4
        apart = apart.permute(0, 2, 1, 5, 3, 6, 4)
    return apart.reshape(*apart.shape[:3], -1).view(torch.int32)


def unpack_low_bit(weight: TritonLowBit) -> LowBitWeight:
    """What was packed: for ops that have no kernel for it."""

    def by_row(values: Tensor) -> Tensor:
        return values.transpose(1, 2).reshape(weight.shape[0], -1)

    experts, row_tiles, column_tiles = weight.words.shape[:3]
    apart = weight.words.view(torch.uint8)
    if weight.bits == 8:
        apart = apart.unflatten(4, (4, 4, 4)).permute(0, 1, 3, 2, 5, 4, 6)
    else:
        apart = apart.unflatten(4, (4, 4, 2, 2)).permute(0, 1, 3, 2, 5, 7, 4, 6)
        apart = torch.stack((apart & 15, apart >> 4), -2)
    codes = apart.reshape(experts, row_tiles * TILE_ROWS.value, column_tiles * weight.block)
    codes = codes[:, : weight.shape[0] // experts, : weight.columns].reshape(weight.shape[0], -1)
    scale, offset = by_row(weight.scale), None if weight.offset is None else by_row(weight.offset)
    if offset is not None and weight.offsets == ZERO_POINTS.value:
        offset = scale.float() * (offset.float() - 8)
    return LowBitWeight(
        pack_codes(codes, weight.bits), scale, offset, weight.bits, weight.group_size, weight.shape[1],
        weight.dtype, weight.table, weight.order, weight.quantizes_inputs, weight.input_scale,
    )  # fmt: skip
