"""Reads a model folder's safetensors files, one tensor or one slice at a time: mapped, or through an `Upload`.

`load` asks it for exactly the slices this rank needs. It knows names, shapes and files, and nothing of what a tensor
means. Only safetensors are read: other weight formats are Python pickles, which run code when they are opened.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.files import check_plain_file, read_json_object
from text_generation_inference.kernels.fp8 import E8M0
from text_generation_inference.weights.headers import Headers
from text_generation_inference.weights.model_files import BLOCKS, INDEX, WEIGHTS, explain_pickles
from text_generation_inference.weights.upload import FileSpan, Identity, Upload, identify

_ROWS_AT_ONCE = 4096
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    **({} if E8M0 is None else {"F8_E8M0": E8M0}),
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Wanted(NamedTuple):
    """What `Checkpoint.read` is asked for."""

    name: str
    dim: int | None = None
    start: int | None = None
    end: int | None = None
    on_host: bool = False
    number: int | None = None  # along the first dimension: the others alone are then counted by `dim`
    is_blocks: bool = False  # of a matrix in quantised blocks: uint8 [rows, bytes] rather than its values


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    opened: Any  # by safetensors, which has found it sound
    identity: Identity
    data_start: int
    tensors: dict[str, dict[str, Any]]  # as in its header


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor of a file."""

    file: _File
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint:
    """The tensors of one model folder."""

    def __init__(self, folder: Path, stored: dict[str, _Stored], blocks: _File | None) -> None:
        self.folder = folder
        self._stored = stored
        self._blocks = {} if blocks is None else _list_tensors(blocks)
        self._block_types: dict[str, str] = {} if blocks is None else blocks.opened.metadata() or {}
        self.upload: Upload | None = None  # where tensors go as they are read

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open every weight file; raises `ModelFormatError` naming the file that is missing, damaged or refused."""
        listed = _read_index(folder) if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file() else {}
        stored: dict[str, _Stored] = {}
        for path in _weight_files(folder, listed):
            file = _open(path)
            for name, tensor in _list_tensors(file).items():
                if name in stored:
                    raise ModelFormatError(
                        f"{path}: tensor {name!r} is also in {stored[name].file.path.name}."
                        " Remove the file that does not belong."
                    )
                stored[name] = tensor
        for name, file_name in listed.items():
            if name not in stored or stored[name].file.path.name != file_name:
                raise ModelFormatError(
                    f"{folder / file_name}: lacks tensor {name!r} that {INDEX} places there. Download the model again."
                )
        blocks = folder / BLOCKS
        return cls(folder, stored, _open(blocks) if blocks.is_file() else None)

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """The stored shape."""
        return self._find(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The stored type."""
        return self._find(name).dtype

    @property
    def headers(self) -> Headers:
        return Headers(
            {name: stored.shape for name, stored in self._stored.items()},
            {name: stored.file.tensors[name]["dtype"] for name, stored in self._stored.items()},
        )

    def are_equal(self, one: str, other: str) -> bool:
        """Whether two tensors have the same values; those of different shapes or types are not compared."""
        if one not in self or other not in self:  # matrices that lie in other tensors
            return False
        if self.shape(one) != self.shape(other) or self.dtype(one) != self.dtype(other):
            return True
        for start in range(0, self.shape(one)[0], _ROWS_AT_ONCE):
            end = min(start + _ROWS_AT_ONCE, self.shape(one)[0])
            first, second = (self._map(Wanted(name, 0, start, end)).view(torch.uint8) for name in (one, other))
            if not torch.equal(first, second):
                return False
        return True

    def announce(self, wanted: Iterable[Wanted]) -> None:
        """What will be read, in about this order: an upload reads ahead."""
        if self.upload is not None:
            spans = (self._span(each) for each in wanted)
            self.upload.announce(span for span in spans if span is not None)

    def read(
        self,
        name: str,
        dim: int | None = None,
        start: int | None = None,
        end: int | None = None,
        on_host: bool = False,
        number: int | None = None,
        is_blocks: bool = False,
    ) -> Tensor:
        """One tensor, or its half-open range `start` to `end` along `dim`; no other bytes are read.

        With `number` all this is of one of the tensors that it consists of. Where there is an upload it is on the
        device, unless it is wanted `on_host`.
        """
        wanted = Wanted(name, dim, start, end, on_host, number, is_blocks)
        if self.upload is None:
            return self._map(wanted)
        span = self._span(wanted)
        if span is not None:
            return self.upload.read(span)
        return self._map(wanted) if on_host else self.upload(self._map(wanted))

    def _span(self, wanted: Wanted) -> FileSpan | None:
        """Where the bytes are, if they are all in one place."""
        stored = self._find(wanted.name, wanted.is_blocks)
        file, offset, shape = stored.file, stored.offset, stored.shape
        if wanted.number is not None:
            shape = shape[1:]
            offset += wanted.number * torch.Size(shape).numel() * stored.dtype.itemsize
        if wanted.dim is not None:
            dim = wanted.dim % len(shape)
            first, last = _range(wanted, shape)
            if dim == 0:
                offset += first * torch.Size(shape[1:]).numel() * stored.dtype.itemsize
                shape = (last - first, *shape[1:])
            elif (first, last) != (0, shape[dim]):
                return None
        return FileSpan(file.path, file.identity, offset, shape, stored.dtype, wanted.on_host)

    def _map(self, wanted: Wanted) -> Tensor:
        stored = self._find(wanted.name, wanted.is_blocks)
        if wanted.dim is None and wanted.number is None:
            return stored.file.opened.get_tensor(wanted.name)
        part = stored.file.opened.get_slice(wanted.name)
        shape = stored.shape if wanted.number is None else stored.shape[1:]
        place = () if wanted.number is None else (wanted.number,)
        if wanted.dim is not None:
            place = (*place, *(slice(None),) * (wanted.dim % len(shape)), slice(*_range(wanted, shape)))
        return part[place]

    @property
    def block_types(self) -> dict[str, str]:
        """Matrices whose quantised blocks of a GGUF file were kept, and the type of each."""
        return self._block_types

    def _find(self, name: str, is_blocks: bool = False) -> _Stored:
        tensors = self._blocks if is_blocks else self._stored
        if name not in tensors:
            raise ModelFormatError(f"{self.folder}: has no tensor {name!r}. Does config.json belong to these weights?")
        return tensors[name]


def _range(wanted: Wanted, shape: tuple[int, ...]) -> tuple[int, int]:
    assert wanted.dim is not None
    size = shape[wanted.dim]
    first, last = wanted.start or 0, size if wanted.end is None else wanted.end
    if not 0 <= first <= last <= size:
        raise ValueError(f"{wanted.name}: {first} to {last} is no range of dimension {wanted.dim} of {list(shape)}")
    return first, last


def _open(path: Path) -> _File:
    try:
        check_plain_file(path)
        with path.open("rb") as file:  # which tells why a file cannot be read; safetensors says that it is not there
            opened = safe_open(path, framework="pt").__enter__()
            identity = identify(file.fileno())
            header_bytes = int.from_bytes(file.read(8), "little")
            tensors = json.loads(file.read(header_bytes).decode(), object_pairs_hook=_without_duplicates)
    except (SafetensorError, OSError, ValueError, RecursionError, MemoryError) as error:
        cause = " ".join(str(error).split())
        raise ModelFormatError(
            f"{path}: is not a sound safetensors file: {cause}. Download or copy the file again."
        ) from error
    tensors.pop("__metadata__", None)
    if not all(isinstance(entry, dict) for entry in tensors.values()):
        raise ModelFormatError(f"{path}: its header has entries in an unusual form. Save the file again.")
    return _File(path, opened, identity, 8 + header_bytes, tensors)


def _list_tensors(file: _File) -> dict[str, _Stored]:
    found: dict[str, _Stored] = {}
    for name, entry in file.tensors.items():
        kind = entry["dtype"]
        if kind not in DTYPES:
            raise ModelFormatError(
                f"{file.path}: tensor {name!r} has the unsupported type {kind}. Use a version of the model in "
                "bfloat16, float16 or float32."
            )
        offset = file.data_start + entry["data_offsets"][0]
        found[name] = _Stored(file, offset, tuple(entry["shape"]), DTYPES[kind])
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """One name for two places would be read here as one of them and by safetensors as the other."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is in its header twice")
    return found


def _weight_files(folder: Path, listed: dict[str, str]) -> list[Path]:
    if listed:
        paths = [folder / name for name in sorted(set(listed.values()))]
        for path in paths:
            if not path.exists():
                raise ModelFormatError(f"{path}: is listed in {INDEX} but missing. Download the model again.")
        return paths
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    paths = sorted(path for path in folder.glob("*.safetensors") if path.name != BLOCKS)
    if paths:
        return paths
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise ModelFormatError(f"{folder}: its only weights are {pickles[0]}. {explain_pickles(str(folder))}")
    raise ModelFormatError(f"{folder}: holds no .safetensors file. Download the model again, with its weights.")


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    listed = read_json_object(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ModelFormatError(f"{path}: has no `weight_map`. Download the file again.")
    for name in listed.values():
        # A path out of the folder would open files the model's author has no business with.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelFormatError(f"{path}: lists {str(name)[:60]!r}, which is no .safetensors file of this folder.")
    return listed
