"""Matrices of `compressed-tensors` in integers of 1 to 8 bits: packed into words of 32 bits, or one in a byte.

A code is a value plus half the number of codes. Codes lie along the columns of a row; those of zero points, which are
packed alike, along the rows. Bits that do not divide 32 are packed in two ways: older files leave the rest of a word
empty, newer ones put 32 codes into as many words as a code has bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.quant.groups import (
    INDICES,
    InputGroups,
    KeptSlice,
    held_bits,
    hold,
    read_index,
    read_scale,
    read_typed,
)
from text_generation_inference.quant.low_bit import LowBitScheme, StoredLowBit
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Beside, Part, Parts
from text_generation_inference.weights.load import read_number

WORD = 32
ONE: tuple[tuple[int, ...], ...] = ((), (1,))
_ROWS_AT_A_TIME = 1024


@dataclass(frozen=True, slots=True)
class Integers:
    """What a checkpoint has of such a matrix."""

    bits: int
    is_packed: bool
    strategy: str = "group"  # how many values have a scale: those of a `group`, of a row (`channel`), all (`tensor`)
    group_size: int | None = None  # of `group`
    is_symmetric: bool = True  # else there are zero points
    has_group_index: bool = False  # which inputs a group has is listed
    inputs: str | None = None  # rounded to integers too: by a scale of each row (`dynamic`) or the file's (`static`)
    drops_inputs: bool = False  # it says how inputs are rounded, and they are not
    has_input_scales: bool = False  # scales and zero points of inputs may be there


class StoredIntegers(StoredLowBit):
    def __init__(self, stored: Integers) -> None:
        self.stored = stored
        super().__init__(
            LowBitScheme(
                bits=held_bits(stored.bits, columns=2),
                group_size=stored.group_size,
                is_symmetric=stored.is_symmetric,
                quantizes_inputs=stored.inputs is not None,
            )
        )

    @property
    def drops_inputs(self) -> bool:
        return self.stored.drops_inputs

    def holder(self, part: Part) -> tuple[str, tuple[int, ...]]:
        check_whole(part)
        shapes = self._code_shapes(part)
        if len(shapes) == 1:
            return self._codes_name(part.name), shapes[0]
        return beside(part.name, "weight_scale"), self._scale_shapes(part)[0]  # codes lie in one of two ways

    def declare(self, part: Part) -> dict[str, Beside]:
        stored = self.stored
        found = {
            self._codes_name(part.name): Beside(self._code_shapes(part)),
            beside(part.name, "weight_scale"): Beside(self._scale_shapes(part)),
        }
        if stored.is_packed:
            found[beside(part.name, "weight_shape")] = Beside(((2,),), needed=False)
        if not stored.is_symmetric:
            found[beside(part.name, "weight_zero_point")] = Beside(self._zero_shapes(part))
        if stored.has_group_index:
            found[beside(part.name, "weight_g_idx")] = Beside(((part.shape[1],),))
        if stored.has_input_scales:
            found[beside(part.name, "input_scale")] = Beside(ONE, needed=stored.inputs == "static")
            found[beside(part.name, "input_zero_point")] = Beside(ONE, needed=False)
            found[beside(part.name, "input_global_scale")] = Beside(ONE, needed=False)
        return found

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            yield self._codes(name, part, checkpoint)[0]
            yield self._scales(name, KeptSlice.of(part))

    def read_part(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> LowBitWeight:
        stored, kept = self.stored, KeptSlice.of(part)
        codes = self._read_codes(name, part, checkpoint, device)
        scale = self._read_scale(name, kept, checkpoint, device)
        first, zero = self._first_group(kept), None
        if not stored.is_symmetric:
            zero = self._read_zero(name, kept, checkpoint)[slice(*kept.rows), first : first + scale.shape[1]].to(device)
        size = stored.group_size or kept.shape[1]
        index = self._read_group_index(name, kept, checkpoint)
        weight = hold(codes, stored.bits, InputGroups(scale, zero, size, first * size, index), kept.columns, part)
        weight.quantizes_inputs = stored.inputs is not None
        if stored.inputs == "static":
            weight.input_scale = read_number(beside(name, "input_scale"), checkpoint).to(device)
        return weight

    # -- codes ---------------------------------------------------------------------------------------------------------

    def _codes_name(self, name: str) -> str:
        return beside(name, "weight_packed") if self.stored.is_packed else name

    def _code_shapes(self, part: Part) -> tuple[tuple[int, ...], ...]:
        rows, columns = part.shape
        if not self.stored.is_packed:
            return (part.shape,)
        return tuple(dict.fromkeys((rows, count) for count in _word_counts(columns, self.stored.bits)))

    def _codes(self, name: str, part: Part, checkpoint: Checkpoint) -> tuple[Wanted, int, bool]:
        """What is read of the codes, how many columns of it come before this rank's, and whether words are full."""
        codes, bits, kept = self._codes_name(name), self.stored.bits, KeptSlice.of(part)
        if not self.stored.is_packed:
            return part.wanted(codes), 0, True
        is_dense = checkpoint.shape(codes)[1] == _word_counts(kept.shape[1], bits)[0]
        # Codes after which a word begins, and the words that they take.
        run, words = (WORD // gcd(WORD, bits), bits // gcd(WORD, bits)) if is_dense else (WORD // bits, 1)
        wanted = kept.wanted(codes, (0, 1, 1), (1, run, words))
        if wanted.end is not None:
            wanted = wanted._replace(end=min(wanted.end, checkpoint.shape(codes)[wanted.dim or 0]))
        return wanted, kept.columns[0] % run, is_dense

    def _read_codes(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> Tensor:
        """-> uint8, two in a byte where they are stored so."""
        bits, (start, end) = self.stored.bits, KeptSlice.of(part).columns
        wanted, skip, is_dense = self._codes(name, part, checkpoint)
        columns, half = end - start, 1 << (bits - 1)
        if not self.stored.is_packed:
            values = read_typed(wanted, checkpoint, torch.int8).to(device)
            if bits < 8 and not bool(((values >= -half) & (values < half)).all()):
                raise ModelFormatError(
                    f"tensor {name} in {checkpoint.folder} holds values that {bits} bits do not hold"
                )
            return values.view(torch.uint8) + half
        self._check_shape(name, part, checkpoint)
        words = read_typed(wanted, checkpoint, torch.int32).to(device).contiguous()
        if bits == 8 or (bits == 4 and skip % 2 == columns % 2 == 0):  # as `LowBitWeight` has them
            first = skip * bits // 8
            return words.view(torch.uint8)[:, first : first + columns * bits // 8]
        pieces = words.split(_ROWS_AT_A_TIME)
        return torch.cat([unpack(piece, bits, skip, columns, is_dense) for piece in pieces])

    def _check_shape(self, name: str, part: Part, checkpoint: Checkpoint) -> None:
        shape = beside(name, "weight_shape")
        if shape not in checkpoint:
            return
        found = read_typed(Wanted(shape, on_host=True), checkpoint, *INDICES).tolist()
        if found != list(part.shape):
            raise ModelFormatError(
                f"tensor {shape} in {checkpoint.folder} says {found}, config.json makes it {list(part.shape)}"
            )

    # -- scales, zero points, groups -----------------------------------------------------------------------------------

    def _groups(self, columns: int) -> int:
        size = self.stored.group_size
        return 1 if size is None else -(-columns // size)

    def _first_group(self, kept: KeptSlice) -> int:
        """That of the scales which are read: a listed one may be any."""
        size = self.stored.group_size
        return 0 if size is None or self.stored.has_group_index else kept.columns[0] // size

    def _scale_shapes(self, part: Part) -> tuple[tuple[int, ...], ...]:
        rows, columns = part.shape
        if self.stored.strategy == "tensor":
            return ((1,), (), (1, 1))
        if self.stored.strategy == "channel":
            return ((rows, 1), (rows,))
        return ((rows, self._groups(columns)),)

    def _scales(self, name: str, kept: KeptSlice) -> Wanted:
        """This rank's rows or groups of columns."""
        scale, size = beside(name, "weight_scale"), self.stored.group_size
        if self.stored.strategy == "tensor":
            return Wanted(scale)
        if kept.is_by_row:
            return Wanted(scale, 0, *kept.rows)
        if not kept.is_by_column or size is None or self.stored.has_group_index:
            return Wanted(scale)
        return Wanted(scale, 1, self._first_group(kept), -(-kept.columns[1] // size))

    def _read_scale(self, name: str, kept: KeptSlice, checkpoint: Checkpoint, device: torch.device) -> Tensor:
        found = read_scale(self._scales(name, kept), checkpoint, device)
        by_row = found.reshape(-1, found.shape[1] if self.stored.strategy == "group" else 1)
        return by_row.expand(kept.rows[1] - kept.rows[0], -1)

    def _zero_shapes(self, part: Part) -> tuple[tuple[int, ...], ...]:
        if not self._packs_zeros:
            return self._scale_shapes(part)
        rows, columns = part.shape
        return tuple(dict.fromkeys((count, self._groups(columns)) for count in _word_counts(rows, self.stored.bits)))

    @property
    def _packs_zeros(self) -> bool:
        return self.stored.is_packed and self.stored.strategy != "tensor"

    def _read_zero(self, name: str, kept: KeptSlice, checkpoint: Checkpoint) -> Tensor:
        """Codes of all of the matrix, uint8 `[rows, groups]`, on the host: few, and packed across ranks."""
        wanted, bits, rows = Wanted(beside(name, "weight_zero_point"), on_host=True), self.stored.bits, kept.shape[0]
        if not self._packs_zeros:
            found = read_typed(wanted, checkpoint, torch.int8).reshape(-1, self._groups(kept.shape[1]))
            return (found.view(torch.uint8) + (1 << (bits - 1))).expand(rows, -1)
        words = read_typed(wanted, checkpoint, torch.int32)
        is_dense = words.shape[0] == _word_counts(rows, bits)[0]
        return unpack(words.t().contiguous(), bits, 0, rows, is_dense).t()

    def _read_group_index(self, name: str, kept: KeptSlice, checkpoint: Checkpoint) -> Tensor | None:
        """The group of each of this rank's columns; None: they come one after the other."""
        if not self.stored.has_group_index:
            return None
        index = beside(name, "weight_g_idx")
        if bool((read_typed(Wanted(index, on_host=True), checkpoint, *INDICES) == -1).all()):  # was never set
            return None
        return read_index(index, self._groups(kept.shape[1]), checkpoint)[slice(*kept.columns)]


def _word_counts(codes: int, bits: int) -> tuple[int, int]:
    """How many words so many codes take: one bit after the other, and with whole codes in each word."""
    return -(-codes * bits // WORD), -(-codes // (WORD // bits))


def unpack(words: Tensor, bits: int, skip: int, count: int, is_dense: bool) -> Tensor:
    """int32 `[rows, words]` -> uint8 `[rows, count]`: the codes after the first `skip`."""
    places = torch.arange(skip, skip + count, device=words.device)
    if is_dense:
        word, shift = places * bits // WORD, places * bits % WORD
    else:
        word, shift = places // (WORD // bits), places % (WORD // bits) * bits
    wide = words.long() & 0xFFFFFFFF
    low = wide[:, word] >> shift
    following = (word + 1).clamp(max=wide.shape[1] - 1)
    return ((low | wide[:, following] << (WORD - shift)) & ((1 << bits) - 1)).to(torch.uint8)


# -- what formats have in common ---------------------------------------------------------------------------------------


def beside(name: str, tensor: str) -> str:
    return f"{name.removesuffix('weight')}{tensor}"


def check_whole(part: Part) -> None:
    KeptSlice.of(part)
    if part.transposed:
        raise ModelFormatError(
            f"{part.name}: its rows lie as columns, which is not read in few bits. Use an unquantised version of the"
            " model."
        )
