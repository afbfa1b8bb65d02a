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
from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.quant.low_bit import LowBitScheme, SortedColumns, StoredLowBit, sort_columns
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Beside, Part, Parts
from text_generation_inference.weights.load import read_number

WORD = 32
ONE: tuple[tuple[int, ...], ...] = ((), (1,))
_SCALES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
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
                bits=_held_bits(stored.bits),
                group_size=stored.group_size,
                is_symmetric=stored.is_symmetric,
                quantizes_inputs=stored.inputs is not None,
            )
        )

    @property
    def drops_inputs(self) -> bool:
        return self.stored.drops_inputs

    def holder(self, part: Part) -> tuple[str, tuple[int, ...]]:
        shapes = self._code_shapes(part)
        if len(shapes) == 1:
            return self._codes_name(part.name), shapes[0]
        return beside(part.name, "weight_scale"), self._scale_shapes(part)[0]  # codes lie in one of two ways

    def declare(self, part: Part) -> dict[str, Beside]:
        check_whole(part)
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
            yield self._scales(name, part)

    def read_part(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> LowBitWeight:
        stored = self.stored
        rows, (start, end) = ranges(part)
        codes, bits = self._read_codes(name, part, checkpoint, device)
        scale = self._read_scale(name, part, checkpoint)
        zero = None if stored.is_symmetric else self._read_zero(name, part, checkpoint)[slice(*rows)]
        index = self._read_group_index(name, part, checkpoint)
        size, groups, order = end - start, torch.zeros(1, dtype=torch.long), None
        if index is not None:
            columns = sort_columns(index, stored.group_size or size)
            size, groups, order = columns.size, columns.groups, columns.order.to(device)
            codes, bits = _sort_codes(codes, bits, columns, zero)
        elif stored.group_size is not None:
            size, groups = groups_of(stored.group_size, start, end)
        scale = scale[:, groups - self._first_group(part)]
        offset = None if zero is None else scale.float() * zero[:, groups]
        weight = LowBitWeight(
            part.arrange_rows(codes),
            part.arrange_rows(scale).contiguous().to(device),
            None if offset is None else part.arrange_rows(offset).contiguous().to(device),
            bits,
            size,
            end - start,
            order=order,
            quantizes_inputs=stored.inputs is not None,
        )
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
        codes = self._codes_name(name)
        if not self.stored.is_packed:
            return part.wanted(codes), 0, True
        bits, (start, end) = self.stored.bits, ranges(part)[1]
        is_dense = checkpoint.shape(codes)[1] == _word_counts(part.shape[1], bits)[0]
        if part.dim != 1:
            return part.wanted(codes), 0, is_dense
        if is_dense:
            run = WORD // gcd(WORD, bits)  # codes after which a word begins
            first, last = start // run * run, -(-end * bits // WORD)
            return Wanted(codes, 1, first * bits // WORD, last), start - first, True
        run = WORD // bits
        return Wanted(codes, 1, start // run, -(-end // run)), start % run, False

    def _read_codes(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> tuple[Tensor, int]:
        """-> uint8 as `LowBitWeight` has them, and the bits of each."""
        bits, (start, end) = self.stored.bits, ranges(part)[1]
        wanted, skip, is_dense = self._codes(name, part, checkpoint)
        check_dtype(wanted.name, checkpoint, torch.int32 if self.stored.is_packed else torch.int8)
        if self.stored.is_packed:
            self._check_shape(name, part, checkpoint)
        found, columns = checkpoint.read(*wanted).to(device), end - start
        held = _held_bits(bits) if columns % 2 == 0 else 8
        if not self.stored.is_packed:
            low = 1 << (bits - 1)
            if bits < 8 and not bool(((found >= -low) & (found < low)).all()):
                raise ModelFormatError(
                    f"tensor {name} in {checkpoint.folder} holds values that {bits} bits do not hold"
                )
            return low_bit.pack_codes((found.view(torch.uint8) + (1 << (held - 1))), held), held
        found = found.contiguous()
        if bits in (4, 8) and bits == held and skip * bits % 8 == 0:  # as they are
            first = skip * bits // 8
            return found.view(torch.uint8)[:, first : first + columns * bits // 8].contiguous(), held
        more = (1 << (held - 1)) - (1 << (bits - 1))
        pieces = (unpack(piece, bits, skip, columns, is_dense) + more for piece in found.split(_ROWS_AT_A_TIME))
        return torch.cat([low_bit.pack_codes(piece, held) for piece in pieces]), held

    def _check_shape(self, name: str, part: Part, checkpoint: Checkpoint) -> None:
        shape = beside(name, "weight_shape")
        if shape not in checkpoint.names():
            return
        check_dtype(shape, checkpoint, torch.int64, torch.int32)
        found = checkpoint.read(shape, on_host=True).tolist()
        if found != list(part.shape):
            raise ModelFormatError(
                f"tensor {shape} in {checkpoint.folder} says {found}, config.json makes it {list(part.shape)}"
            )

    # -- scales, zero points, groups -----------------------------------------------------------------------------------

    def _groups(self, part: Part) -> int:
        size = self.stored.group_size
        return 1 if size is None else -(-part.shape[1] // size)

    def _scale_shapes(self, part: Part) -> tuple[tuple[int, ...], ...]:
        rows = part.shape[0]
        if self.stored.strategy == "tensor":
            return ((1,), (), (1, 1))
        if self.stored.strategy == "channel":
            return ((rows, 1), (rows,))
        return ((rows, self._groups(part)),)

    def _scales(self, name: str, part: Part) -> Wanted:
        """This rank's rows or groups of columns."""
        scale, size = beside(name, "weight_scale"), self.stored.group_size
        if part.dim == 0 and self.stored.strategy != "tensor":
            return Wanted(scale, 0, part.start, part.end, on_host=True)
        if part.dim != 1 or size is None or self.stored.has_group_index:
            return Wanted(scale, on_host=True)
        return Wanted(scale, 1, self._first_group(part), -(-part.end // size), on_host=True)

    def _first_group(self, part: Part) -> int:
        """That of the scales which are read: a listed one may be any."""
        size = self.stored.group_size
        return part.start // size if part.dim == 1 and size is not None and not self.stored.has_group_index else 0

    def _read_scale(self, name: str, part: Part, checkpoint: Checkpoint) -> Tensor:
        wanted = self._scales(name, part)
        check_dtype(wanted.name, checkpoint, *_SCALES)
        found = checkpoint.read(*wanted)
        if not bool(torch.isfinite(found).all()):
            raise ModelFormatError(f"tensor {wanted.name} in {checkpoint.folder} holds a scale that is not finite")
        found = found.float() if found.dtype is torch.float64 else found
        (first, last), _ = ranges(part)
        return found.reshape(-1, found.shape[1] if self.stored.strategy == "group" else 1).expand(last - first, -1)

    def _zero_shapes(self, part: Part) -> tuple[tuple[int, ...], ...]:
        if not self._packs_zeros:
            return self._scale_shapes(part)
        counts = _word_counts(part.shape[0], self.stored.bits)
        return tuple(dict.fromkeys((count, self._groups(part)) for count in counts))

    @property
    def _packs_zeros(self) -> bool:
        return self.stored.is_packed and self.stored.strategy != "tensor"

    def _read_zero(self, name: str, part: Part, checkpoint: Checkpoint) -> Tensor:
        """float32 `[rows, groups]` of the whole matrix."""
        zero, bits, rows = beside(name, "weight_zero_point"), self.stored.bits, part.shape[0]
        check_dtype(zero, checkpoint, torch.int32 if self._packs_zeros else torch.int8)
        found = checkpoint.read(zero, on_host=True)
        if not self._packs_zeros:
            return found.float().reshape(-1, self._groups(part)).expand(rows, -1)
        is_dense = found.shape[0] == _word_counts(rows, bits)[0]
        codes = unpack(found.t().contiguous(), bits, 0, rows, is_dense)
        return (codes.float() - (1 << (bits - 1))).t()

    def _read_group_index(self, name: str, part: Part, checkpoint: Checkpoint) -> Tensor | None:
        """The group of each of this rank's columns; None: they come one after the other."""
        if not self.stored.has_group_index:
            return None
        index = beside(name, "weight_g_idx")
        check_dtype(index, checkpoint, torch.int32, torch.int64)
        found = checkpoint.read(index, on_host=True).long()
        if bool((found == -1).all()):  # was never set
            return None
        if int(found.min()) < 0 or int(found.max()) >= self._groups(part):
            raise ModelFormatError(
                f"tensor {index} in {checkpoint.folder} names groups from {int(found.min())} to {int(found.max())},"
                f" there are {self._groups(part)}"
            )
        return found[slice(*ranges(part)[1])]


def _held_bits(bits: int) -> int:
    return 4 if bits <= 4 else 8


def _word_counts(codes: int, bits: int) -> tuple[int, int]:
    """How many words so many codes take: one bit after the other, and with whole codes in each word."""
    return -(-codes * bits // WORD), -(-codes // (WORD // bits))


def _sort_codes(codes: Tensor, bits: int, columns: SortedColumns, zero: Tensor | None) -> tuple[Tensor, int]:
    """As `LowBitWeight` has them, in the order of columns; `zero` `[rows, groups]` is the value that stands for 0."""
    order, is_filler = columns.order.long(), columns.is_filler
    found = low_bit.unpack_codes(codes, bits)[:, order.to(codes.device)]
    held = bits if found.shape[1] % 2 == 0 else 8
    found += (1 << (held - 1)) - (1 << (bits - 1))
    if bool(is_filler.any()):
        groups = columns.groups.repeat_interleave(columns.size)[: len(order)][is_filler]
        fill = torch.zeros(codes.shape[0], len(groups)) if zero is None else zero[:, groups]
        found[:, is_filler.to(codes.device)] = (fill + (1 << (held - 1))).to(torch.uint8).to(codes.device)
    return low_bit.pack_codes(found, held), held


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


def ranges(part: Part) -> tuple[tuple[int, int], tuple[int, int]]:
    """The rows and the columns that are this rank's."""
    rows, columns = (0, part.shape[0]), (0, part.shape[1])
    if part.dim is None:
        return rows, columns
    mine = (part.start, part.end)
    return (mine, columns) if part.dim == 0 else (rows, mine)


def groups_of(size: int, start: int, end: int) -> tuple[int, Tensor]:
    """Columns from `start` to `end` in groups that begin there: their size, and the stored group that each is of."""
    held = gcd(size, start) if start % size else size
    return held, torch.arange(start, end, held) // size


def check_whole(part: Part) -> None:
    if part.number is not None or part.transposed:
        raise ModelFormatError(
            f"{part.name}: {'its experts lie in one tensor' if part.number is not None else 'its rows lie as columns'},"
            " which is not read in few bits. Use a version of the model with a tensor for each expert, or an"
            " unquantised one."
        )


def check_dtype(name: str, checkpoint: Checkpoint, *allowed: torch.dtype) -> None:
    stored = checkpoint.dtype(name)
    if stored not in allowed:
        expected = " or ".join(str(each).removeprefix("torch.") for each in allowed)
        raise ModelFormatError(
            f"tensor {name} in {checkpoint.folder} has type {str(stored).removeprefix('torch.')}, config.json makes it"
            f" {expected}. Does config.json belong to these weights?"
        )
