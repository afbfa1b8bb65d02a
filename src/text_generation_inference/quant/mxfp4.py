"""MXFP4: experts that a checkpoint has in values of 4 bits, 32 of which share a power of two (GPT-OSS).

They stay as they are, or, where `quantize` fp8 is asked for, are put into FP8 when they are read. All other matrices of
such a checkpoint are plain.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.quant.fp8 import ON_LOADING, Fp8, quantize_parts
from text_generation_inference.quant.low_bit import LowBitScheme, StoredLowBit
from text_generation_inference.quant.method import Matrix, Method
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Beside, Part, Parts

GROUP = 32  # values that share a scale
_NOT_A_NUMBER = 255  # among the exponents of scales
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))
SCHEME = LowBitScheme(4, GROUP, table=VALUES, scale_dtype=torch.bfloat16)


class Mxfp4(StoredLowBit):
    """Two tensors for a part: its values, two in a byte, the lower half first; and the exponents of its scales."""

    def __init__(self) -> None:
        super().__init__(SCHEME)

    def holder(self, part: Part) -> tuple[str, tuple[int, ...]]:
        rows, columns = _sizes(part)
        return f"{part.name}_blocks", (*part.shape[:-2], rows, columns // GROUP, GROUP // 2)

    def declare(self, part: Part) -> dict[str, Beside]:
        rows, columns = _sizes(part)
        return {f"{part.name}_scales": Beside(((*part.shape[:-2], rows, columns // GROUP),))}

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            yield from _wanted(name, part)

    def read_part(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> LowBitWeight:
        blocks, exponents = (part.arrange_rows(_read(wanted, checkpoint, device)) for wanted in _wanted(name, part))
        if bool((exponents == _NOT_A_NUMBER).any()):
            raise ModelFormatError(f"tensor {name}_scales in {checkpoint.folder} holds a scale that is not finite")
        codes = blocks.flatten(1)
        table = torch.tensor(VALUES, device=device)
        columns = 2 * codes.shape[1]
        weight = LowBitWeight(codes, powers_of_two(exponents), None, 4, GROUP, columns, table=table)
        by_column = part.dim is not None and not part.is_by_row
        return low_bit.take_columns(weight, part.start, part.end) if by_column else weight


class Mxfp4IntoFp8(Fp8):
    """Stored so, and held in FP8."""

    _stored = Mxfp4()

    def holder(self, part: Part) -> tuple[str, tuple[int, ...]]:
        return self._stored.holder(part)

    def declare(self, part: Part) -> dict[str, Beside]:
        return self._stored.declare(part)

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        return self._stored.list_reads(parts, checkpoint)

    def read(self, parts: Parts, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
        def widen(name: str, part: Part) -> Tensor:
            weight = self._stored.read_part(name, part, checkpoint, device)
            weight.dtype = dtype
            return low_bit.widen(weight)

        return quantize_parts(parts, widen, dtype)


@dataclass(frozen=True, slots=True)
class Mxfp4Experts(Quantization):
    needs_fp8: bool = False  # experts are put into it, and so are all other matrices
    method: str = "mxfp4"
    origin: str = "this checkpoint, whose experts are in MXFP4,"

    @property
    def rounds_plain(self) -> bool:
        return self.needs_fp8

    @property
    def width_step(self) -> int:
        return GROUP

    @property
    def description(self) -> str:
        return f"experts stored in MXFP4, computed in {'FP8' if self.needs_fp8 else 'the type of the model'}"

    def choose(self, matrix: Matrix, names: Sequence[str]) -> Method | None:
        plain = ON_LOADING.choose(matrix, names) if self.needs_fp8 else None
        if not matrix.is_stacked:
            return plain
        return Mxfp4() if plain is None else Mxfp4IntoFp8()


def detect(config: Mapping[str, Any], source: str) -> Mxfp4Experts:
    """`config` is the section of config.json."""
    return Mxfp4Experts()


def powers_of_two(exponents: Tensor) -> Tensor:
    """2 to the power of each uint8 less 127: the exponents of bfloat16, whose smallest number is written otherwise."""
    return torch.where(exponents == 0, 1 << 6, exponents.to(torch.int16) << 7).view(torch.bfloat16)


def _sizes(part: Part) -> tuple[int, int]:
    """Rows and columns of the whole matrix, whichever way round a plain checkpoint would store it."""
    *_, rows, columns = part.shape
    rows, columns = (columns, rows) if part.transposed else (rows, columns)
    if columns % GROUP:
        raise ModelFormatError(f"{part.name}: {columns} columns cannot be in MXFP4, which has groups of {GROUP}")
    return rows, columns


def _wanted(name: str, part: Part) -> Iterator[Wanted]:
    """What is read of values and scales: a slice of rows; of columns, which groups may reach across, all."""
    for suffix in ("blocks", "scales"):
        if part.is_by_row:
            yield Wanted(f"{name}_{suffix}", 0, part.start, part.end, number=part.number)
        else:
            yield Wanted(f"{name}_{suffix}", number=part.number)


def _read(wanted: Wanted, checkpoint: Checkpoint, device: torch.device) -> Tensor:
    stored = checkpoint.dtype(wanted.name)
    if stored is not torch.uint8:
        raise ModelFormatError(
            f"tensor {wanted.name} in {checkpoint.folder} has type {str(stored).removeprefix('torch.')}, config.json"
            " makes it uint8. Does config.json belong to these weights?"
        )
    return checkpoint.read(*wanted).to(device)
