"""Matrices in FP8: from a checkpoint that has them, or quantised when they have been read.

`load` asks for one matrix of this rank at a time. The parts of a fused matrix keep their scales: one for a
whole part becomes one for each of its rows, which is exact. Where parts cannot be joined in FP8 (squares that do
not line up, or parts that are stored plainly) the matrix is widened to the model's type.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from text_generation_inference.errors import ModelFormatError, StartError
from text_generation_inference.kernels.fp8 import FP8, SQUARE, Fp8Weight, quantize_weight
from text_generation_inference.weights.calibration import MatrixScales
from text_generation_inference.weights.calibration_scales import quantize, weight_scale
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Declared, Part
from text_generation_inference.weights.quantization import Fp8Scheme, Quantization

_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e8m0fnu)
_DUMMY_INPUT_SCALE = 0.1
_SAME_MAXIMUM = 0.02  # largest values of the same weights differ by less, whatever type they were measured in

Parts = list[tuple[str, Part]]  # full names
Schemes = list[Fp8Scheme | None]  # of the parts; None: stored plainly


def find_schemes(
    declared: Declared, parts: Parts, checkpoint: Checkpoint, quantization: Quantization | None
) -> Schemes:
    """How each part is stored. What it is stored as and what config.json says must agree."""
    schemes: Schemes = []
    for name, part in parts:
        stored = checkpoint.dtype(name)
        scheme = None
        if quantization is not None and len(part.shape) == 2:
            scheme = quantization.scheme_of(name.removesuffix(".weight"))
        if stored is FP8 and scheme is None:
            raise ModelFormatError(
                f"tensor {name} in {checkpoint.folder} is stored in FP8, but config.json does not say that it is"
                " quantised. Does config.json belong to these weights?"
            )
        if stored is not FP8 and scheme is not None and declared.quantizable:
            raise ModelFormatError(
                f"tensor {name} in {checkpoint.folder} has type {_name(stored)}, config.json makes it float8_e4m3fn."
                " Does config.json belong to these weights?"
            )
        if stored is not FP8 and (not stored.is_floating_point or stored.itemsize < 2):
            raise ModelFormatError(
                f"tensor {name} in {checkpoint.folder} has type {_name(stored)}. Use a version of the model in"
                " bfloat16, float16, float32 or FP8 (e4m3)."
            )
        # Embeddings and heads are often stored plainly without a word about it.
        schemes.append(scheme if stored is FP8 else None)
    return schemes


def scale_shapes(scheme: Fp8Scheme, part: Part) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The tensors beside a matrix and the shapes that each may have."""
    rows, columns = part.shape
    one: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {scheme.scale_name: (*one, (rows, 1), (rows,))}
    if scheme.by_square:
        shapes = {scheme.scale_name: ((math.ceil(rows / SQUARE), math.ceil(columns / SQUARE)),)}
    if scheme.input_scale_name is not None:
        shapes[scheme.input_scale_name] = one
    return shapes


def read_fp8(
    parts: Parts, schemes: Schemes, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, quantizable: bool
) -> Tensor | Fp8Weight:
    """One matrix of which at least one part is stored in FP8."""
    if not quantizable or not _can_join(parts, schemes):
        pieces = [
            _widen(name, part, scheme, checkpoint, dtype, device)
            for (name, part), scheme in zip(parts, schemes, strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    scheme = schemes[0]
    assert scheme is not None
    data = [read_part(name, part, checkpoint).to(device) for name, part in parts]
    scales = [_local_scale(part, _read_scale(name, part, scheme, checkpoint)) for name, part in parts]
    input_scale = None
    if scheme.input_scale_name is not None:
        found = [read_number(_beside(name, scheme.input_scale_name), checkpoint) for name, _ in parts]
        input_scale = torch.stack(found).amax().to(device)
    return Fp8Weight(
        _join(data),
        torch.cat(scales).contiguous().to(device),
        input_scale,
        dtype,
        scheme.input_bound,
    )


def quantize_parts(
    parts: Parts, read: Callable[[str, Part], Tensor], dtype: torch.dtype, scheme: Fp8Scheme | None = None
) -> Tensor | Fp8Weight:
    """A matrix in FP8 from plain parts, which are read one after the other: only one is ever held as it was."""
    schemes: Schemes = [scheme or Fp8Scheme()] * len(parts)
    if not _can_join(parts, schemes):
        return torch.cat([read(name, part).to(dtype) for name, part in parts])
    pieces = [quantize_weight(read(name, part), bool(scheme and scheme.by_square)) for name, part in parts]
    data, scale = _join([piece.data for piece in pieces]), torch.cat([piece.scale for piece in pieces])
    if scheme is None:
        return Fp8Weight(data, scale, dtype=dtype)
    input_scale = torch.tensor(_DUMMY_INPUT_SCALE, device=data.device) if scheme.input_scale_name else None
    return Fp8Weight(data, scale, input_scale, dtype, scheme.input_bound)


def quantize_static(
    parts: Parts, read: Callable[[str, Part], Tensor], dtype: torch.dtype, scales: list[MatrixScales]
) -> Fp8Weight:
    """A matrix in FP8 from plain parts, with the scales that were measured for each."""
    data: list[Tensor] = []
    rows: list[Tensor] = []
    for (name, part), found in zip(parts, scales, strict=True):
        value = read(name, part)
        largest = value.abs().amax().item()
        measured = found.measured_maximum
        # A slice of a matrix may have a smaller one.
        if measured is not None and not (
            largest <= measured * (1 + _SAME_MAXIMUM)
            and (part.dim is not None or largest >= measured * (1 - _SAME_MAXIMUM))
        ):
            raise StartError(
                f"the measurement belongs to other weights: the largest value of {name} was {measured:.6g}, here it is"
                f" {largest:.6g}. Measure this model."
            )
        scale = weight_scale(value, found.weight, found.generation).expand(value.shape[0])
        data.append(quantize(value, scale[:, None], found.generation))
        rows.append(scale)
    input_scale = torch.tensor(max(found.input_scale for found in scales), device=data[0].device)
    return Fp8Weight(_join(data), torch.cat(rows), input_scale, dtype)


def _join(data: list[Tensor]) -> Tensor:
    return data[0] if len(data) == 1 else torch.cat([part.view(torch.uint8) for part in data]).view(FP8)


def read_part(name: str, part: Part, checkpoint: Checkpoint) -> Tensor:
    return checkpoint.read(*_wanted(name, part))


def wanted_parts(parts: Parts, schemes: Schemes) -> Iterator[Wanted]:
    """What a matrix of these parts is read from."""
    for (name, part), scheme in zip(parts, schemes, strict=True):
        yield _wanted(name, part)
        if scheme is not None:
            for beside in scale_shapes(scheme, part):
                yield Wanted(_beside(name, beside), on_host=True)


def _wanted(name: str, part: Part) -> Wanted:
    return Wanted(name) if part.dim is None else Wanted(name, part.dim, part.start, part.end)


def _can_join(parts: Parts, schemes: Schemes) -> bool:
    first = schemes[0]
    if first is None or not first.quantizes_inputs or any(scheme != first for scheme in schemes):
        return False
    if not first.by_square:
        return True
    starts = (part.start if part.dim is not None else 0 for _, part in parts)
    heights = (part.local_shape[0] for _, part in parts[:-1])
    return all(start % SQUARE == 0 for start in starts) and all(height % SQUARE == 0 for height in heights)


def _widen(
    name: str, part: Part, scheme: Fp8Scheme | None, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> Tensor:
    value = read_part(name, part, checkpoint).to(device)
    if scheme is None:
        return value.to(dtype)
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
    return (value.float() * scale.to(device)).to(dtype)


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
    scale = _read_numbers(scale_name, checkpoint)
    if bool((scale < 0).any()) or not bool(scale.any()):  # some may be 0: a row of zeros has no scale of its own
        raise ModelFormatError(
            f"tensor {scale_name} in {checkpoint.folder} must hold scales above 0. Is the download complete?"
        )
    if scheme.by_square:
        return scale
    return scale.reshape(-1).expand(part.shape[0])


def read_number(name: str, checkpoint: Checkpoint) -> Tensor:
    """A single number above 0, as `[]` float32."""
    value = _read_numbers(name, checkpoint)
    if value.numel() != 1 or not value.item() > 0:
        raise ModelFormatError(
            f"tensor {name} in {checkpoint.folder} must be one number above 0, it is {value.tolist()}"
        )
    return value.reshape(())


def _read_numbers(name: str, checkpoint: Checkpoint) -> Tensor:
    stored = checkpoint.dtype(name)
    if stored not in _SCALE_DTYPES:
        raise ModelFormatError(
            f"tensor {name} in {checkpoint.folder} has type {_name(stored)}, but scales are float32, bfloat16"
            " or float16"
        )
    value = checkpoint.read(name, on_host=True).float()
    if not bool(torch.isfinite(value).all()):
        raise ModelFormatError(f"tensor {name} in {checkpoint.folder} holds a scale that is not finite")
    return value


def _beside(name: str, scale_name: str) -> str:
    return f"{name.removesuffix('weight')}{scale_name}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
