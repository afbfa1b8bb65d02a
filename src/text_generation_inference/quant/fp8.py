"""FP8: matrices that a checkpoint has in FP8, and plain ones that are quantised when they have been read.

The parts of a fused matrix keep their scales: one for a whole part becomes one for each of its rows, which is exact.
Where parts cannot be joined in FP8 (squares that do not line up, or parts that are stored plainly) the matrix is
widened to the model's type. How config.json says what is stored how is read in `fp8_formats`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels.fp8 import FP8, SQUARE, Fp8Weight, quantize_weight
from text_generation_inference.kernels.matrices import Product, Rows
from text_generation_inference.quant.method import InputForm, Matrix, Method
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Beside, Part, Parts, Read, read_plain, stack
from text_generation_inference.weights.load import read_number, read_scales

_DUMMY_INPUT_SCALE = 0.1


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """The tensors beside a matrix in FP8."""

    scale_name: str = "weight_scale"
    by_square: bool = False  # a scale per 128 x 128 values; else one for all, or one per output row
    input_scale_name: str | None = None  # inputs have one scale, which the checkpoint knows; None: each has its own
    input_bound: float | None = None
    quantizes_inputs: bool = True  # else the product is that of the widened matrix

    def declare(self, part: Part, needed: bool = True) -> dict[str, Beside]:
        if part.number is not None:
            raise ModelFormatError(
                f"{part.name}: its experts lie in one tensor, which is not read in FP8. Use a version of the model with"
                " a tensor for each expert, or one in bfloat16 with `quantize` fp8."
            )
        rows, columns = part.shape
        one = ((), (1,), (1, 1))
        shapes = (*one, (rows, 1), (rows,))
        if self.by_square:
            shapes = ((math.ceil(rows / SQUARE), math.ceil(columns / SQUARE)),)
        found = {_beside(part.name, self.scale_name): Beside(shapes, needed)}
        if self.input_scale_name is not None:
            found[_beside(part.name, self.input_scale_name)] = Beside(one, needed)
        return found

    def list_scales(self, name: str) -> Iterator[Wanted]:
        yield Wanted(_beside(name, self.scale_name), on_host=True)
        if self.input_scale_name is not None:
            yield Wanted(_beside(name, self.input_scale_name), on_host=True)


class Fp8(Method):
    """A matrix in FP8, multiplied with inputs in FP8. Quantises a plain one; the scales are those of its rows."""

    holds_fp8 = True

    def read(self, parts: Parts, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
        return self.make(parts, lambda name, part: read_plain(name, part, checkpoint, device), dtype)

    def make(self, parts: Parts, make: Read, dtype: torch.dtype) -> Any:
        return quantize_parts(parts, make, dtype)

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return math.prod(shape)

    def finish(self, matrix: Matrix) -> None:
        matrix.weight = matrix.ops.pack_fp8(_weight(matrix))

    def apply(self, matrix: Matrix, x: Rows) -> Tensor:
        weight = _weight(matrix)
        if weight.input_bound is not None and isinstance(x, Tensor):
            x = x.clamp(-weight.input_bound, weight.input_bound)
        return matrix.ops.linear(x, weight, matrix.bias, weight.dtype)

    def logits(self, matrix: Matrix, hidden: Tensor, out: Tensor | None) -> Tensor:
        result = matrix.ops.linear(hidden, _weight(matrix), None, torch.float32)  # rounded, near scores would be equal
        return result if out is None else out.copy_(result)

    def unscaled(self, matrix: Matrix) -> Callable[[Rows], Product] | None:
        weight = _weight(matrix)
        product = matrix.ops.linear_unscaled
        if product is None or weight.input_bound is not None:
            return None
        return lambda x: product(x, weight, weight.dtype)

    def input_form(self, matrix: Matrix) -> InputForm:
        weight = _weight(matrix)
        return weight if weight.input_bound is None else None

    def kind(self, matrix: Matrix) -> object:
        weight = _weight(matrix)
        return (Fp8, weight.by_square, weight.input_scale is None, weight.input_bound)


def _weight(matrix: Matrix) -> Fp8Weight:
    assert isinstance(matrix.weight, Fp8Weight)
    return matrix.weight


class OnLoading(Quantization):
    """A plain checkpoint whose matrices are put into FP8, with scales that they and their inputs give."""

    method = "fp8"
    origin = "`quantize` fp8"
    needs_fp8 = True

    @property
    def rounds_plain(self) -> bool:
        return True

    @property
    def description(self) -> str:
        return "matrices in FP8, quantised on loading"

    def choose(self, matrix: Matrix, names: Sequence[str]) -> Method | None:
        return Fp8() if matrix.may_round and not matrix.is_delicate else None


ON_LOADING = OnLoading()


class StoredFp8(Fp8):
    """As a checkpoint has it."""

    def __init__(self, scheme: Fp8Scheme) -> None:
        self.scheme = scheme

    def declare(self, part: Part) -> dict[str, Beside]:
        return self.scheme.declare(part)

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            yield part.wanted(name)
            yield from self.scheme.list_scales(name)

    def read(self, parts: Parts, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
        scheme = self.scheme
        data = [_arrange_fp8(part, _read_fp8(name, part, checkpoint, device)) for name, part in parts]
        scales = [_local_scale(part, _read_scale(name, part, scheme, checkpoint)) for name, part in parts]
        if not scheme.by_square:  # else rows stay within their squares: `_can_join`
            scales = [part.arrange_rows(scale) for (_, part), scale in zip(parts, scales, strict=True)]
        input_scale = None
        if scheme.input_scale_name is not None:
            found = [read_number(_beside(name, scheme.input_scale_name), checkpoint) for name, _ in parts]
            input_scale = torch.stack(found).amax().to(device)
        scale = torch.cat(scales).contiguous().to(device)
        return Fp8Weight(join(data), scale, input_scale, dtype, scheme.input_bound)

    def make(self, parts: Parts, make: Read, dtype: torch.dtype) -> Any:
        weight = quantize_parts(parts, make, dtype, self.scheme.by_square)
        if self.scheme.input_scale_name is not None:
            weight.input_scale = torch.tensor(_DUMMY_INPUT_SCALE, device=weight.data.device)
        weight.input_bound = self.scheme.input_bound
        return weight


class WidenedFp8(Method):
    """Stored in FP8, all of it or some parts, and widened to the model's type when it is read."""

    holds_fp8 = True

    def __init__(self, schemes: dict[str, Fp8Scheme], is_certain: bool) -> None:
        self.schemes = schemes  # by the part's name; of others there are none
        self.is_certain = is_certain  # else parts may be stored plainly without a word: embeddings and heads often are

    def declare(self, part: Part) -> dict[str, Beside]:
        scheme = self.schemes.get(part.name)
        return {} if scheme is None else scheme.declare(part, needed=self.is_certain)

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            yield part.wanted(name)
            scheme = self._scheme_of(name, part, checkpoint)
            if scheme is not None:
                yield from scheme.list_scales(name)

    def read(self, parts: Parts, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
        def widen(name: str, part: Part) -> Tensor:
            scheme = self._scheme_of(name, part, checkpoint)
            if scheme is None:
                return read_plain(name, part, checkpoint, device)
            return _widen(name, part, scheme, checkpoint, dtype, device)

        return stack(parts, widen, dtype, device)

    def _scheme_of(self, name: str, part: Part, checkpoint: Checkpoint) -> Fp8Scheme | None:
        is_plain = not self.is_certain and checkpoint.dtype(name) is not FP8
        return None if is_plain else self.schemes.get(part.name)


def choose_stored(matrix: Matrix, schemes: Sequence[Fp8Scheme | None]) -> Method | None:
    """For a matrix whose parts are stored so; None: plainly."""
    by_name = {part.name: scheme for part, scheme in zip(matrix.parts, schemes, strict=True) if scheme is not None}
    if not by_name:
        return None
    if matrix.may_round and _can_join(matrix.parts, schemes):
        return StoredFp8(next(iter(by_name.values())))
    return WidenedFp8(by_name, is_certain=matrix.may_round)


def quantize_parts(parts: Parts, read: Read, dtype: torch.dtype, by_square: bool = False) -> Fp8Weight:
    """A matrix in FP8 from plain parts, which are read one after the other: only one is ever held as it was."""
    pieces = [quantize_weight(read(name, part), by_square) for name, part in parts]
    data, scale = join([piece.data for piece in pieces]), torch.cat([piece.scale for piece in pieces])
    return Fp8Weight(data, scale, dtype=dtype)


def join(data: list[Tensor]) -> Tensor:
    return data[0] if len(data) == 1 else torch.cat([part.view(torch.uint8) for part in data]).view(FP8)


def _read_fp8(name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> Tensor:
    stored = checkpoint.dtype(name)
    if stored is not FP8:
        raise ModelFormatError(
            f"tensor {name} in {checkpoint.folder} has type {str(stored).removeprefix('torch.')}, config.json makes it"
            " float8_e4m3fn. Does config.json belong to these weights?"
        )
    if part.transposed:
        raise ModelFormatError(f"tensor {name} in {checkpoint.folder} is stored in FP8 with its columns as rows")
    return checkpoint.read(*part.wanted(name)).to(device)


def _can_join(parts: Sequence[Part], schemes: Sequence[Fp8Scheme | None]) -> bool:
    first = schemes[0]
    if first is None or not first.quantizes_inputs or any(scheme != first for scheme in schemes):
        return False
    if not first.by_square:
        return True
    if any(part.arrangement is not None and not part.arrangement.stays_within(SQUARE) for part in parts):
        return False
    starts = (part.start if part.dim is not None else 0 for part in parts)
    heights = (part.local_shape[0] for part in parts[:-1])
    return all(start % SQUARE == 0 for start in starts) and all(height % SQUARE == 0 for height in heights)


def _widen(
    name: str, part: Part, scheme: Fp8Scheme, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> Tensor:
    value = _read_fp8(name, part, checkpoint, device)
    if scheme.input_scale_name is not None:
        read_number(_beside(name, scheme.input_scale_name), checkpoint)  # as strict as where it is used
    scale = _read_scale(name, part, scheme, checkpoint)
    if scheme.by_square:
        ranges = [range(size) for size in part.shape]
        if part.dim is not None:
            ranges[part.dim] = range(part.start, part.end)
        rows, columns = (torch.tensor(indices) // SQUARE for indices in ranges)
        scale = scale[rows][:, columns]
    else:
        scale = _local_scale(part, scale)[:, None]
    return part.arrange_rows((value.float() * scale.to(device)).to(dtype))


def _arrange_fp8(part: Part, data: Tensor) -> Tensor:
    return data if part.arrangement is None else part.arrange_rows(data.view(torch.uint8)).view(FP8)


def _local_scale(part: Part, scale: Tensor) -> Tensor:
    """This rank's scales, of rows or of squares that start where the rank's slice does."""
    if part.dim is None or (part.dim == 1 and scale.ndim == 1):
        return scale
    if scale.ndim == 1:
        return scale[part.start : part.end]
    first, last = part.start // SQUARE, math.ceil(part.end / SQUARE)
    return scale[first:last] if part.dim == 0 else scale[:, first:last]


def _read_scale(name: str, part: Part, scheme: Fp8Scheme, checkpoint: Checkpoint) -> Tensor:
    """float32: by row of the whole tensor, or by square."""
    scale_name = _beside(name, scheme.scale_name)
    scale = read_scales(scale_name, checkpoint)
    if bool((scale < 0).any()) or not bool(scale.any()):  # some may be 0: a row of zeros has no scale of its own
        raise ModelFormatError(
            f"tensor {scale_name} in {checkpoint.folder} must hold scales above 0. Is the download complete?"
        )
    if scheme.by_square:
        return scale
    return scale.reshape(-1).expand(part.shape[0])


def _beside(name: str, scale_name: str) -> str:
    return f"{name.removesuffix('weight')}{scale_name}"
