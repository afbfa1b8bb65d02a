"""Fills a model's tensors from a checkpoint, or with seeded random numbers.

Strict both ways: a declared tensor that the checkpoint lacks, a different shape, and a checkpoint tensor that
nobody declared are all errors that name the tensor. Each rank reads only its slices.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch

import torch
from torch import Tensor

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Blocks, Declared, Module, Number, Part
from text_generation_inference.weights.fp8_matrix import (
    Parts,
    find_schemes,
    quantize_parts,
    quantize_static,
    read_fp8,
    read_number,
    read_part,
    scale_shapes,
    wanted_parts,
)
from text_generation_inference.weights.progress import Progress, silent
from text_generation_inference.weights.quantization import Quantization
from text_generation_inference.weights.scratch import Scratch

_NO_SCRATCH = Scratch()

Shapes = tuple[tuple[int, ...], ...]  # that a tensor may have


def load_checkpoint(
    model: Module,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    ignored: Iterable[str] = (),
    progress: Progress = silent,
    quantization: Quantization | None = None,
    scratch: Scratch = _NO_SCRATCH,
) -> None:
    """Read every declared tensor. `ignored` are patterns of checkpoint names that may be left over."""
    if quantization is not None:
        quantization = quantization.named_as_in(checkpoint.names())
    _check_names(model, checkpoint, ignored, quantization)
    total = sum(len(declared.parts) for _, module in model.walk() for declared in module.declare())
    done = 0
    with scratch():
        checkpoint.announce(_order(model, checkpoint, quantization))

    def read_plain(name: str, part: Part) -> Tensor:
        return read_part(name, part, checkpoint).to(device)

    for prefix, module in model.walk():
        for declared in module.declare():
            parts = [(prefix + part.name, part) for part in declared.parts]
            with scratch():
                schemes = find_schemes(declared, parts, checkpoint, quantization)
                value = None
                if any(schemes):
                    value = read_fp8(parts, schemes, checkpoint, dtype, device, declared.quantizable)
                elif quantization is not None and quantization.quantizes(declared, matrices_of(parts)):
                    value = _quantize(parts, read_plain, dtype, quantization)
                elif declared.packable and dtype is torch.float32:  # blocks stand for float32 values
                    value = _read_blocks(module, declared, parts, checkpoint)
                if value is None:
                    target = torch.float32 if declared.keep_float32 else dtype
                    value = _read(declared, parts, checkpoint, target, device)
            setattr(module, declared.attribute, scratch.keep(value))
            done += len(parts)
            progress("load weights", done, total)
        _read_numbers(prefix, module, checkpoint, quantization)
        module.finish()


def _order(model: Module, checkpoint: Checkpoint, quantization: Quantization | None) -> Iterator[Wanted]:
    """What `load_checkpoint` reads, in about its order. (A device with an upload keeps no matrix in blocks.)"""
    for prefix, module in model.walk():
        for declared in module.declare():
            parts = [(prefix + part.name, part) for part in declared.parts]
            yield from wanted_parts(parts, find_schemes(declared, parts, checkpoint, quantization))
        for _, name in _find_numbers(prefix, module, checkpoint):
            if name is not None:
                yield Wanted(name, on_host=True)


def matrices_of(parts: Parts) -> list[str]:
    return [name.removesuffix(".weight") for name, _ in parts]


def _quantize(
    parts: Parts, read: Callable[[str, Part], Tensor], dtype: torch.dtype, quantization: Quantization
) -> Tensor | Fp8Weight:
    scales = quantization.static.find(matrices_of(parts)) if quantization.static else None
    return quantize_parts(parts, read, dtype) if scales is None else quantize_static(parts, read, dtype, scales)


def expected_tensors(model: Module, quantization: Quantization | None) -> tuple[dict[str, Shapes], dict[str, Shapes]]:
    """The tensors that a checkpoint must have, and those that it may have, with the shapes they may have."""
    needed: dict[str, Shapes] = {}
    optional: dict[str, Shapes] = {}
    for prefix, module in model.walk():
        for declared in module.declare():
            for part in declared.parts:
                name = prefix + part.name
                needed[name] = (part.shape,)
                matrix = name.removesuffix(".weight")
                scheme = quantization.scheme_of(matrix) if quantization and len(part.shape) == 2 else None
                if scheme is not None:
                    scales = {f"{matrix}.{scale}": shapes for scale, shapes in scale_shapes(scheme, part).items()}
                    (needed if declared.quantizable else optional).update(scales)
        for number in module.declare_numbers():
            optional.update({prefix + name: ((), (1,)) for name in number.names})
    return needed, optional


def _check_names(
    model: Module, checkpoint: Checkpoint, ignored: Iterable[str], quantization: Quantization | None
) -> None:
    names = set(checkpoint.names())
    needed, optional = expected_tensors(model, quantization)
    for name in needed:
        if name not in names:
            raise ModelFormatError(f"{checkpoint.folder} lacks the tensor {name}. Is the download complete?")
    for name, shapes in {**needed, **optional}.items():
        if name in names and (found := tuple(checkpoint.shape(name))) not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise ModelFormatError(
                f"tensor {name} in {checkpoint.folder} has shape {list(found)}, config.json makes it {expected}"
            )
    patterns = [*ignored, *(quantization.may_leave if quantization else ())]
    left_over = sorted(names - needed.keys() - optional.keys())
    left_over = [name for name in left_over if not any(fnmatch(name, pattern) for pattern in patterns)]
    if left_over:
        shown = ", ".join(left_over[:3]) + (f" and {len(left_over) - 3} more" if len(left_over) > 3 else "")
        raise ModelFormatError(
            f"{checkpoint.folder} holds tensors that this architecture does not use: {shown}."
            " Is `architectures` in config.json right?"
        )


def _find_numbers(prefix: str, module: Module, checkpoint: Checkpoint) -> list[tuple[Number, str | None]]:
    """The module's numbers, and the tensor that each is in."""
    numbers = module.declare_numbers()
    names = set(checkpoint.names()) if numbers else set[str]()
    return [
        (number, next((prefix + name for name in number.names if prefix + name in names), None)) for number in numbers
    ]


def _read_numbers(prefix: str, module: Module, checkpoint: Checkpoint, quantization: Quantization | None) -> None:
    numbers = _find_numbers(prefix, module, checkpoint)
    must_be_there = any(name for _, name in numbers) or (quantization is not None and quantization.has_kv_scales)
    for number, name in numbers:
        measured = _measured_number(prefix, number, quantization)
        if measured is not None:
            setattr(module, number.attribute, measured)
        elif name is not None:
            setattr(module, number.attribute, read_number(name, checkpoint).item())
        elif must_be_there:
            raise ModelFormatError(
                f"{checkpoint.folder} lacks the tensor {prefix}{number.names[0]}. Is the download complete?"
            )


def _measured_number(prefix: str, number: Number, quantization: Quantization | None) -> float | None:
    """Scales of caches come from a measurement where there is one."""
    attention, _, name = (prefix + number.names[0]).rpartition(".")
    if quantization is None or quantization.static is None or name not in ("k_scale", "v_scale"):
        return None
    return quantization.static.cache_scale(attention, name[0])


def _read(
    declared: Declared, parts: list[tuple[str, Part]], checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> Tensor:
    if len(parts) == 1:
        return read_part(*parts[0], checkpoint).to(device=device, dtype=dtype)
    value = torch.empty(declared.shape, dtype=dtype, device=device)  # once: never all parts and their sum
    first = 0
    for name, part in parts:
        tensor = read_part(name, part, checkpoint).to(device)
        value[first : first + tensor.shape[0]] = tensor
        first += tensor.shape[0]
    return value


def _read_blocks(
    module: Module, declared: Declared, parts: list[tuple[str, Part]], checkpoint: Checkpoint
) -> Blocks | None:
    """The tensor as quantised blocks, if all its parts exist in one kind that the module can use."""
    found: list[Tensor] = []
    kinds: set[str] = set()
    for name, part in parts:
        entry = checkpoint.ggml(name)
        if entry is None or part.dim not in (None, 0):
            return None
        kind, data = entry
        kinds.add(kind.lower())
        found.append(data if part.dim is None else data[part.start : part.end])
    if len(kinds) != 1 or not module.accepts_blocks(next(iter(kinds))):
        return None
    rows, columns = declared.shape
    return Blocks(kinds.pop(), torch.cat(found).contiguous(), (rows, columns))


def load_dummy(
    model: Module,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    quantization: Quantization | None = None,
    scratch: Scratch = _NO_SCRATCH,
) -> None:
    """Random weights that depend on the seed and on each tensor's name alone, small enough to keep outputs finite."""
    for prefix, module in model.walk():
        for declared in module.declare():
            target = torch.float32 if declared.keep_float32 else dtype
            parts = [(prefix + part.name, part) for part in declared.parts]

            def make(name: str, part: Part, target: torch.dtype = target) -> Tensor:
                return _random(name, part, target, device, seed)

            scheme = quantization.scheme_of(parts[0][0].removesuffix(".weight")) if quantization else None
            with scratch():
                if declared.quantizable and scheme:
                    value = quantize_parts(parts, make, dtype, scheme)
                elif quantization is not None and quantization.quantizes(declared, matrices_of(parts)):
                    value = _quantize(parts, make, dtype, quantization)
                else:
                    pieces = [make(name, part) for name, part in parts]
                    value = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            setattr(module, declared.attribute, scratch.keep(value))
        for number in module.declare_numbers():
            measured = _measured_number(prefix, number, quantization)
            if measured is not None:
                setattr(module, number.attribute, measured)
        module.finish()


def _random(name: str, part: Part, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    # The CPU generator looks at 32 bits of its seed only.
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    if len(part.shape) == 1:
        value = torch.ones(part.shape, dtype=dtype, device=device)
    else:
        value = torch.empty(part.shape, dtype=dtype, device=device)
        value.normal_(0, 0.02, generator=generator)
    return value if part.dim is None else value.narrow(part.dim, part.start, part.end - part.start).clone()
