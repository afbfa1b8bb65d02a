"""Fills a model's tensors from a checkpoint, or with seeded random numbers.

Level 2. Strict both ways: a declared tensor that the checkpoint lacks, a different shape, and a checkpoint tensor that
nobody declared are all errors that name the tensor. Each rank reads only its slices.
"""

import zlib
from collections.abc import Iterable
from fnmatch import fnmatch

import torch
from torch import Tensor

from tgi.errors import ModelFormatError
from tgi.weights.checkpoint import Checkpoint
from tgi.weights.declare import Blocks, Declared, Module, Part
from tgi.weights.progress import Progress, silent


def load_checkpoint(
    model: Module,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    ignored: Iterable[str] = (),
    progress: Progress = silent,
) -> None:
    """Read every declared tensor. `ignored` are patterns of checkpoint names that may be left over."""
    used: set[str] = set()
    names = set(checkpoint.names())
    total = sum(len(declared.parts) for _, module in model.walk() for declared in module.declare())
    for prefix, module in model.walk():
        for declared in module.declare():
            parts = [(prefix + part.name, part) for part in declared.parts]
            for name, part in parts:
                _check_part(name, part, names, checkpoint)
            used.update(name for name, _ in parts)
            value = None
            if declared.packable and dtype is torch.float32:  # blocks stand for float32 values
                value = _read_blocks(module, declared, parts, checkpoint)
            if value is None:
                target = torch.float32 if declared.keep_float32 else dtype
                value = _read(parts, checkpoint, target, device)
            setattr(module, declared.attribute, value)
            progress("load weights", len(used), total)
        module.finish()
    left_over = sorted(n for n in names - used if not any(fnmatch(n, pattern) for pattern in ignored))
    if left_over:
        shown = ", ".join(left_over[:3]) + (f" and {len(left_over) - 3} more" if len(left_over) > 3 else "")
        raise ModelFormatError(
            f"{checkpoint.folder} holds tensors that this architecture does not use: {shown}."
            " Is `architectures` in config.json right?"
        )


def _check_part(name: str, part: Part, names: set[str], checkpoint: Checkpoint) -> None:
    if name not in names:
        raise ModelFormatError(f"{checkpoint.folder} lacks the tensor {name}. Is the download complete?")
    shape = tuple(checkpoint.shape(name))
    if shape != part.shape:
        raise ModelFormatError(
            f"tensor {name} in {checkpoint.folder} has shape {list(shape)}, config.json makes it {list(part.shape)}"
        )


def _read(parts: list[tuple[str, Part]], checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Tensor:
    tensors = [
        checkpoint.read(name, part.dim, part.start, part.end) if part.dim is not None else checkpoint.read(name)
        for name, part in parts
    ]
    tensors = [tensor.to(device=device, dtype=dtype) for tensor in tensors]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


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


def load_dummy(model: Module, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """Random weights that depend on the seed and on each tensor's name alone, small enough to keep outputs finite."""
    for prefix, module in model.walk():
        for declared in module.declare():
            target = torch.float32 if declared.keep_float32 else dtype
            pieces = [_random(prefix + part.name, part, target, device, seed) for part in declared.parts]
            setattr(module, declared.attribute, pieces[0] if len(pieces) == 1 else torch.cat(pieces))
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
