"""Checkpoints of HQQ in safetensors: codes of 8 to 1 bits in groups, with zero points that are no whole numbers.

Beside the codes (`W_q`), scales and zero points lie a dozen tensors of one number each, of which some are read and
the others left. Groups run along the inputs (`axis` 1), or gather values from rows far apart (0), which are widened.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.quant.config_fields import Fields
from text_generation_inference.quant.flat_groups import MIN_GROUP, group_of, scales_by_row
from text_generation_inference.quant.groups import KeptSlice, read_scale, read_typed
from text_generation_inference.quant.low_bit import LowBit, LowBitScheme, StoredLowBit, choose_stored
from text_generation_inference.quant.method import Matrix, Method
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Beside, Part, Parts

_PACKINGS = {"8bit_u8": 1, "4bit_u8": 2, "2bit_u8": 4, "1bit_u8": 8, "3bit_32": 10}  # codes in a byte or word
_NUMBERS = {"axis", "channel_wise", "compute_dtype", "encoded_state_dict", "group_size", "nbits", "offload_meta"} | {
    *("optimize", "packing", "quant_scale", "quant_zero", "round_zero", "shape", "stores_quant_config"),
    *("unpack_view_dtype", "view_as_float"),
}
_VIEWS = (Fraction(1), Fraction(1, 2), Fraction(1, 4), Fraction(2))  # of bytes as floats, of words as halves
_CHECKED = ("axis", "group_size", "shape", "quant_scale", "quant_zero")
_LARGEST_NUMBER = 64


@dataclass(frozen=True, slots=True)
class Hqq(Quantization):
    """As config.json says, and, once `stored` is known, as the checkpoint has it."""

    scheme: LowBitScheme
    plain: tuple[str, ...] = ()
    stored: Mapping[str, tuple[int, ...]] | None = None  # names and shapes of its tensors
    method: str = "hqq"
    may_leave: tuple[str, ...] = tuple(f"*.{name}" for name in sorted(_NUMBERS))
    origin: str = "this checkpoint, which is stored with HQQ,"

    @property
    def description(self) -> str:
        return "matrices in few bits, as the checkpoint has them (HQQ)"

    def choose(self, matrix: Matrix, names: Sequence[str]) -> Method | None:
        if self.stored is not None:
            parts = zip(matrix.parts, names, strict=True)
            return choose_stored(matrix, [self._find(part, name) for part, name in parts])
        if any(f".{plain}." in f".{name}." for plain in self.plain for name in names):
            return None
        return LowBit(self.scheme) if matrix.may_round and self.scheme.accepts(matrix.shape[1]) else None

    def named_as_in(self, stored: Mapping[str, tuple[int, ...]]) -> "Hqq":
        return replace(self, stored=stored)

    def _find(self, part: Part, name: str) -> StoredLowBit | None:
        """How a part is stored; None: plainly."""
        assert self.stored is not None
        codes, scale = self.stored.get(f"{name}.W_q"), self.stored.get(f"{name}.scale")
        if codes is None:
            return None
        if scale is None or len(scale) != 2 or 1 not in scale:
            raise ModelFormatError(
                f"{name}.scale: scales that are missing, or quantised themselves, are not read from HQQ. Quantise the"
                " model with a current version of it, or use the unquantised one with `quantize` bitsandbytes-nf4."
            )
        rows, columns = KeptSlice.of(part).shape
        count, by_column = max(scale), scale[0] == 1 and scale[1] > 1
        size = rows * columns // count
        if size * count != rows * columns:
            raise ModelFormatError(f"{name}.scale has {count} scales, which {rows * columns} values cannot share")
        height, width = (size, count) if by_column else (count, size)
        view = next((view for view in _VIEWS if len(codes) == 2 and width * view == codes[1]), Fraction(1))
        fold = next((fold for fold in _PACKINGS.values() if codes[:1] == (-(-height // fold),)), 1)
        fits = group_of(columns, size) >= MIN_GROUP and (fold == 1 or columns % 2 == 0)
        return HqqCodes(fold, view, size, by_column, fits)


def detect(config: Mapping[str, Any], source: str) -> Hqq:
    """`config` is the section of config.json."""
    fields = Fields(config, f"{source}: `quantization_config`")
    found = fields.get("quant_config")
    settings = found.get("weight_quant_params") if isinstance(found, Mapping) else None
    bits, size = (settings.get(name) if isinstance(settings, Mapping) else None for name in ("nbits", "group_size"))
    held = 8 if isinstance(bits, int) and bits > 4 else 4
    group_size = size if isinstance(size, int) and size > 0 else 64
    scheme = LowBitScheme(held, group_size, is_symmetric=False, has_whole_zeros=False)
    return Hqq(scheme, fields.names("skip_modules") or ("lm_head",))


class HqqCodes(StoredLowBit):
    """Codes `[groups, values]`, or the other way round, folded: the first of them in the uppermost bits, and so on."""

    def __init__(self, fold: int, view: Fraction, size: int, by_column: bool, fits: bool) -> None:
        super().__init__(LowBitScheme(8 if fold == 1 else 4, size, is_symmetric=False, has_whole_zeros=False))
        self.fold = fold  # codes in a byte, or in a word of 32 bits
        self.view = view  # how many values of the type it is stored in a byte or word is
        self.size = size  # values of a group
        self.by_column = by_column  # a group is a column of the codes
        self.has_groups = fits and not by_column

    def _folded(self, part: Part) -> tuple[int, int]:
        """Rows and columns of the codes before they are folded."""
        count = math.prod(part.shape) // self.size
        return (self.size, count) if self.by_column else (count, self.size)

    def holder(self, part: Part) -> tuple[str, tuple[int, ...]]:
        rows, columns = self._folded(part)
        return _beside(part.name, "W_q"), (-(-rows // self.fold), int(columns * self.view))

    def declare(self, part: Part) -> dict[str, Beside]:
        count = math.prod(part.shape) // self.size
        shapes = ((1, count) if self.by_column else (count, 1),)
        return {_beside(part.name, name): Beside(shapes) for name in ("scale", "zero")}

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            numbers = (_beside(name, each) for each in ("packing", *_CHECKED))
            yield from (Wanted(number, on_host=True) for number in numbers if number in checkpoint)
            yield Wanted(_beside(name, "W_q"))
            yield from (Wanted(beside, on_host=True) for beside in self.declare(replace(part, name=name)))

    def read_part(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> LowBitWeight:
        cut, bits = KeptSlice.of(part), self.scheme.bits
        codes = self._read_codes(name, part, checkpoint, device).view(cut.shape)[slice(*cut.rows)]
        scale, zero = (scales_by_row(each, self.size, cut).to(device) for each in self._read_scales(name, checkpoint))
        center, columns = 1 << (bits - 1), cut.shape[1]
        offset = part.arrange_rows(scale.float() * (zero.float() - center)).contiguous()
        packed = low_bit.pack_codes(part.arrange_rows(codes), bits).contiguous()
        scale = part.arrange_rows(scale).contiguous()
        weight = LowBitWeight(packed, scale, offset, bits, group_of(columns, self.size), columns)
        return low_bit.take_columns(weight, *cut.columns) if cut.is_by_column else weight

    def widen_part(
        self, name: str, part: Part, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        cut = KeptSlice.of(part)
        values = self._read_codes(name, part, checkpoint, device).float()
        scale, zero = (each.float().to(device) for each in self._read_scales(name, checkpoint))
        values = (values - zero) * scale if self.by_column else (values - zero[:, None]) * scale[:, None]
        return part.arrange_rows(values.view(cut.shape)[slice(*cut.rows), slice(*cut.columns)].to(dtype))

    def _read_codes(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> Tensor:
        """uint8, all of them, as they were before they were folded."""
        self._check_numbers(name, part, checkpoint)
        holder, unit = _beside(name, "W_q"), torch.int32 if self.fold == _PACKINGS["3bit_32"] else torch.uint8
        if checkpoint.dtype(holder).itemsize * self.view != unit.itemsize:
            stored = str(checkpoint.dtype(holder)).removeprefix("torch.")
            raise _wrong(holder, checkpoint, f"has type {stored}, which does not fit its shape")
        words = checkpoint.read(holder).to(device).contiguous().view(unit)
        bits = 3 if unit is torch.int32 else 8 // self.fold
        codes = [words >> bits * place & (1 << bits) - 1 for place in reversed(range(self.fold))]
        return torch.cat(codes)[: self._folded(part)[0]].to(torch.uint8)

    def _read_scales(self, name: str, checkpoint: Checkpoint) -> Iterator[Tensor]:
        """Scales and zero points of all groups, on the host."""
        for each in ("scale", "zero"):
            yield read_scale(Wanted(_beside(name, each), on_host=True), checkpoint, torch.device("cpu")).flatten()

    def _check_numbers(self, name: str, part: Part, checkpoint: Checkpoint) -> None:
        """What is said beside the codes must be what their shapes tell."""
        packing = _beside(name, "packing")
        text = read_typed(Wanted(packing, on_host=True), checkpoint, torch.uint8).flatten()[:_LARGEST_NUMBER]
        said = bytes(text.tolist()).decode(errors="replace")
        if _PACKINGS.get(said) != self.fold:
            raise _wrong(packing, checkpoint, f"says {said!r}, which does not fit the shape of W_q")
        expected = ([0 if self.by_column else 1], [self.size], list(KeptSlice.of(part).shape), [0], [0])
        for each, value in zip(_CHECKED, expected, strict=True):
            number = _beside(name, each)
            if number not in checkpoint:
                continue
            found = checkpoint.read(number, on_host=True).flatten()[:_LARGEST_NUMBER].tolist()
            if found != value:
                raise _wrong(number, checkpoint, f"says {found}, but the tensors beside it make it {value}")


def _beside(name: str, tensor: str) -> str:
    return f"{name.removesuffix('weight')}{tensor}"


def _wrong(name: str, checkpoint: Checkpoint, what: str) -> ModelFormatError:
    return ModelFormatError(f"tensor {name} in {checkpoint.folder} {what}. Does config.json belong to these weights?")
