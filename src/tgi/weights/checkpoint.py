"""Reads a model folder's safetensors files, one tensor or one slice at a time, through memory mapping.

`load` asks it for exactly the slices this rank needs. It knows names, shapes and files, and nothing of what a tensor
means. Only safetensors are read: other weight formats are Python pickles, which run code when they are opened.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tgi.errors import ModelFormatError
from tgi.weights.model_files import BLOCKS, INDEX, WEIGHTS, explain_pickles

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
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


class Checkpoint:
    """The tensors of one model folder."""

    def __init__(self, folder: Path, files: dict[str, Any], blocks: Any | None) -> None:
        self.folder = folder
        self._files = files  # tensor name -> open safetensors file
        self._blocks = blocks
        self._block_types: dict[str, str] = (blocks.metadata() or {}) if blocks is not None else {}
        self.upload: Callable[[Tensor], Tensor] | None = None  # where large tensors go as soon as they are read

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open every weight file; raises `ModelFormatError` naming the file that is missing, damaged or refused."""
        listed = _read_index(folder) if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file() else {}
        files: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for path in _weight_files(folder, listed):
            opened = _open(path)
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                if name in files:
                    raise ModelFormatError(
                        f"{path}: tensor {name!r} is also in {origins[name]}. Remove the file that does not belong."
                    )
                kind = str(opened.get_slice(name).get_dtype())
                if kind not in _DTYPES:
                    raise ModelFormatError(
                        f"{path}: tensor {name!r} has the unsupported type {kind}. Use a version of the model in "
                        "bfloat16, float16 or float32."
                    )
                files[name], origins[name] = opened, path.name
        for name, file_name in listed.items():
            if origins.get(name) != file_name:
                raise ModelFormatError(
                    f"{folder / file_name}: lacks tensor {name!r} that {INDEX} places there. Download the model again."
                )
        blocks = folder / BLOCKS
        return cls(folder, files, _open(blocks) if blocks.is_file() else None)

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The stored shape."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The stored type."""
        return _DTYPES[str(self._file(name).get_slice(name).get_dtype())]

    @property
    def total_bytes(self) -> int:
        """Size of all tensors as stored."""
        return sum(torch.Size(self.shape(name)).numel() * self.dtype(name).itemsize for name in self._files)

    def read(self, name: str, dim: int | None = None, start: int | None = None, end: int | None = None) -> Tensor:
        """One tensor, or its half-open range `start` to `end` along `dim`; no other bytes are read."""
        tensor = self._map(name, dim, start, end)
        return tensor if self.upload is None else self.upload(tensor)

    def _map(self, name: str, dim: int | None, start: int | None, end: int | None) -> Tensor:
        file = self._file(name)
        if dim is None:
            return file.get_tensor(name)
        part = file.get_slice(name)
        shape = part.get_shape()
        first, last = start or 0, shape[dim] if end is None else end
        if not 0 <= first <= last <= shape[dim]:
            raise ValueError(f"{name}: {first} to {last} is no range of dimension {dim} of {shape}")
        return part[(slice(None),) * (dim % len(shape)) + (slice(first, last),)]

    def ggml(self, name: str) -> tuple[str, Tensor] | None:
        """The type and quantised blocks of a converted GGUF matrix, if they were kept."""  # uint8 [rows, bytes]
        if self._blocks is None or name not in self._block_types:
            return None
        return self._block_types[name], self._blocks.get_tensor(name)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            raise ModelFormatError(f"{self.folder}: has no tensor {name!r}. Does config.json belong to these weights?")
        return self._files[name]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt").__enter__()
    except (SafetensorError, OSError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise ModelFormatError(
            f"{path}: is not a sound safetensors file: {cause}. Download or copy the file again."
        ) from error


def _weight_files(folder: Path, listed: dict[str, str]) -> list[Path]:
    if listed:
        paths = [folder / name for name in sorted(set(listed.values()))]
        for path in paths:
            if not path.is_file():
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
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: is not valid JSON ({error}). Download the file again.") from error
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise ModelFormatError(f"{path}: has no `weight_map`. Download the file again.")
    for name in listed.values():
        # A path out of the folder would open files the model's author has no business with.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelFormatError(f"{path}: lists {str(name)[:60]!r}, which is no .safetensors file of this folder.")
    return listed
