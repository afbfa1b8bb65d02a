"""Fills a model's tensors from a checkpoint, or with seeded random numbers.

Strict both ways: a declared tensor that the checkpoint lacks, a different shape, and a checkpoint tensor that
nobody declared are all errors that name the tensor. Each rank reads only its slices.
"""

import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels.fp8 import E8M0
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Module, Number, Part, Read, Shapes
from text_generation_inference.weights.progress import Progress, silent
from text_generation_inference.weights.scratch import Scratch

_NO_SCRATCH = Scratch()
_HOST = torch.device("cpu")

_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, E8M0)


def load_checkpoint(
    model: Module,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    ignored: Iterable[str] = (),
    progress: Progress = silent,
    scratch: Scratch = _NO_SCRATCH,
    fp8_on_host: bool = False,  # see `Ops`
) -> None:
    """Read every declared tensor. `ignored` are patterns of checkpoint names that may be left over."""
    check_tensors(model, {name: checkpoint.shape(name) for name in checkpoint.names()}, ignored, str(checkpoint.folder))
    total = sum(len(declared.parts) for _, module in model.walk() for declared in module.declare())
    done = 0
    with scratch():
        checkpoint.announce(_order(model, checkpoint))
    for prefix, module in model.walk():
        for count in load_module(prefix, module, checkpoint, dtype, device, scratch, fp8_on_host):
            done += count
            progress("load weights", done, total)


def load_module(
    prefix: str,
    module: Module,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    scratch: Scratch = _NO_SCRATCH,
    fp8_on_host: bool = False,
) -> Iterator[int]:
    """Read what one module declares, and not what is below it; yields how many tensors have been read each time."""
    for declared in module.declare():
        on_host = fp8_on_host and declared.storage.holds_fp8
        with scratch():
            value = declared.storage.read(declared.named(prefix), checkpoint, dtype, _HOST if on_host else device)
        _keep(module, declared.attribute, value, device, scratch)
        del value
        yield len(declared.parts)
    _set_numbers(prefix, module, checkpoint)
    module.finish()


def _keep(module: Module, attribute: str, value: Any, device: torch.device, scratch: Scratch) -> None:
    """What was widened on the host goes to the device; what is in FP8 there goes when it is packed."""
    setattr(module, attribute, scratch.keep(value.to(device) if isinstance(value, Tensor) else value))


def _order(model: Module, checkpoint: Checkpoint) -> Iterator[Wanted]:
    """What `load_checkpoint` reads, in about its order."""
    for prefix, module in model.walk():
        for declared in module.declare():
            yield from declared.storage.list_reads(declared.named(prefix), checkpoint)
        for number, name in _find_numbers(prefix, module, checkpoint):
            if name is not None and not number.is_known:
                yield Wanted(name, on_host=True)


def weight_bytes(model: Module, dtype: torch.dtype) -> int:
    """What the declared tensors take on the device."""
    declared = (declared for _, module in model.walk() for declared in module.declare())
    return sum(each.storage.bytes(each.shape, dtype) for each in declared)


def count_parameters(model: Module) -> int:
    return sum(math.prod(declared.shape) for _, module in model.walk() for declared in module.declare())


def check_tensors(model: Module, stored: Mapping[str, tuple[int, ...]], ignored: Iterable[str], source: str) -> None:
    """Raise `ModelFormatError` unless every declared tensor is stored in its shape, and nothing is left over."""
    needed, optional = _expected_tensors(model)
    for name in needed:
        if name not in stored:
            raise ModelFormatError(f"{source} lacks the tensor {name}. Is the download complete?")
    for name, shapes in {**needed, **optional}.items():
        if name in stored and (found := tuple(stored[name])) not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise ModelFormatError(
                f"tensor {name} in {source} has shape {list(found)}, config.json makes it {expected}"
            )
    patterns = list(ignored)
    left_over = sorted(stored.keys() - needed.keys() - optional.keys())
    elsewhere = {prefix + name for prefix, module in model.walk() for name in module.elsewhere}
    left_over = [name for name in left_over if not _is_below(name, elsewhere)]
    left_over = [name for name in left_over if not any(fnmatch(name, pattern) for pattern in patterns)]
    if left_over:
        shown = ", ".join(left_over[:3]) + (f" and {len(left_over) - 3} more" if len(left_over) > 3 else "")
        raise ModelFormatError(
            f"{source} holds tensors that this architecture does not use: {shown}."
            " Is `architectures` in config.json right?"
        )


def _is_below(name: str, modules: Collection[str]) -> bool:
    """Whether a tensor belongs to one of these."""
    words = name.split(".") if modules else []
    return any(".".join(words[:count]) in modules for count in range(1, len(words)))


def _expected_tensors(model: Module) -> tuple[dict[str, Shapes], dict[str, Shapes]]:
    """The tensors that a checkpoint must have, and those that it may have, with the shapes they may have."""
    needed: dict[str, Shapes] = {}
    optional: dict[str, Shapes] = {}
    for prefix, module in model.walk():
        for declared in module.declare():
            for part in declared.parts:
                holder, shape = declared.storage.holder(part)
                needed[prefix + holder] = (shape,)
                for name, beside in declared.storage.declare(part).items():
                    (needed if beside.needed else optional)[prefix + name] = beside.shapes
        for number in module.declare_numbers():
            optional.update({prefix + name: ((), (1,)) for name in number.names})
    return needed, optional


# -- single numbers --------------------------------------------------------------------------------------------------


def _find_numbers(prefix: str, module: Module, checkpoint: Checkpoint) -> list[tuple[Number, str | None]]:
    """The module's numbers, and the tensor that each is in."""
    numbers = module.declare_numbers()
    names = set(checkpoint.names()) if numbers else set[str]()
    return [
        (number, next((prefix + name for name in number.names if prefix + name in names), None)) for number in numbers
    ]


def _set_numbers(prefix: str, module: Module, checkpoint: Checkpoint) -> None:
    """Where one number of a module is there, all must be."""
    numbers = _find_numbers(prefix, module, checkpoint)
    is_one_there = any(name for _, name in numbers)
    for number, name in numbers:
        if number.is_known:
            continue
        if name is not None:
            setattr(module, number.attribute, read_number(name, checkpoint).item())
        elif is_one_there or number.needed:
            raise ModelFormatError(
                f"{checkpoint.folder} lacks the tensor {prefix}{number.names[0]}. Is the download complete?"
            )


def read_number(name: str, checkpoint: Checkpoint) -> Tensor:
    """A single number above 0, as `[]` float32."""
    value = read_scales(name, checkpoint)
    if value.numel() != 1 or not value.item() > 0:
        raise ModelFormatError(
            f"tensor {name} in {checkpoint.folder} must be one number above 0, it is {value.tolist()}"
        )
    return value.reshape(())


def read_scales(name: str, checkpoint: Checkpoint) -> Tensor:
    """Finite numbers as float32, on the host."""
    stored = checkpoint.dtype(name)
    if stored not in _SCALE_DTYPES:
        raise ModelFormatError(
            f"tensor {name} in {checkpoint.folder} has type {str(stored).removeprefix('torch.')}, but scales are"
            " float32, bfloat16 or float16"
        )
    value = checkpoint.read(name, on_host=True).float()
    if not bool(torch.isfinite(value).all()):
        raise ModelFormatError(f"tensor {name} in {checkpoint.folder} holds a scale that is not finite")
    return value


# -- random numbers --------------------------------------------------------------------------------------------------


def load_dummy(
    model: Module,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    scratch: Scratch = _NO_SCRATCH,
    fp8_on_host: bool = False,
) -> None:
    """Random weights that depend on the seed and on each tensor's name alone, small enough to keep outputs finite."""

    def make_on(where: torch.device) -> Read:
        return lambda name, part: _random(name, part, dtype, where, seed)

    for prefix, module in model.walk():
        for declared in module.declare():
            on_host = fp8_on_host and declared.storage.holds_fp8
            with scratch():
                value = declared.storage.make(declared.named(prefix), make_on(_HOST if on_host else device), dtype)
            _keep(module, declared.attribute, value, device, scratch)
            del value
        module.finish()


def _generator(device: torch.device) -> torch.Generator:
    try:
        return torch.Generator(device)
    except RuntimeError:  # not every device makes numbers of its own
        return torch.Generator(_HOST)


def _random(name: str, part: Part, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    # The CPU generator looks at 32 bits of its seed only.
    number = "" if part.number is None else f".{part.number}"
    generator = _generator(device).manual_seed(zlib.crc32(f"{seed} {name}{number}".encode()))
    if len(part.whole_shape) == 1:
        value = torch.ones(part.whole_shape, dtype=dtype, device=generator.device)
    else:
        value = torch.empty(part.whole_shape, dtype=dtype, device=generator.device)
        value.normal_(0, part.random_std, generator=generator)
    if part.dim is not None:
        value = value.narrow(part.dim, part.start, part.end - part.start).clone()
    return part.arrange(value).to(device)
