"""The folder that a quantised checkpoint is made in: finished layers while it is made, then a model folder.

Every file is written under another name and renamed when it is whole; config.json, without which a folder is no model,
comes last. Finished layers lie in `.making`, with what they were made from: a run that ended early goes on after the
last of them, and only with the same settings, model and text.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from text_generation_inference.errors import ResourceError, StartError
from text_generation_inference.files import read_json_object
from text_generation_inference.weights.checkpoint import DTYPES, Checkpoint
from text_generation_inference.weights.model_files import BLOCKS, CONFIG, INDEX, QUANTIZATION_BESIDE, WEIGHTS
from text_generation_inference.weights.progress import Progress
from text_generation_inference.weights.safetensors_layout import SafetensorsLayout

QUANTIZE_CONFIG = "quantize_config.json"
_MAKING = ".making"
_ABOUT = "about.json"
_NOTES = "notes"
_COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")  # files of a model that are no weights
_NEVER_COPIED = {CONFIG, INDEX, BLOCKS, "complete.json", *QUANTIZATION_BESIDE}
_TYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Fingerprint = Mapping[str, Any]


class Output:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._making = folder / _MAKING

    def check_free(self) -> None:
        """Raise `StartError` where a model is already, or weights that were not made here, and where there can be no
        folder."""
        there = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise StartError(f"Cannot write to {self.folder}: {there} is no folder that may be written to")
        is_begun = (self._making / _ABOUT).exists()
        if (self.folder / CONFIG).exists() or (not is_begun and any(self.folder.glob("*.safetensors"))):
            raise StartError(f"{self.folder} holds a model already: name another folder, or remove it")

    @contextmanager
    def opened(self, about: Fingerprint) -> Generator[None]:
        """For one process at a time. `about`: all that finished layers depend on.

        Raises `StartError` where there is something else already, `ResourceError` where nothing can be written.
        """
        self.check_free()
        try:
            self._making.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._making / "lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise StartError(f"another process makes a model in {self.folder}") from None
        except OSError as error:
            raise ResourceError(f"Cannot write to {self.folder}: {error.strerror}") from error
        try:
            self._begin(about)
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ResourceError(
                    f"Not enough disk space in {self.folder}. Free some and run the same command again: it goes on"
                    " after the last finished layer."
                ) from error
            raise
        finally:
            lock.release()
        if (self.folder / CONFIG).exists():
            shutil.rmtree(self._making, ignore_errors=True)

    def _begin(self, about: Fingerprint) -> None:
        path = self._making / _ABOUT
        if not path.exists():
            _write_whole(path, lambda file: file.write(msgspec.json.encode(about)))
            return
        before = read_json_object(path)
        now = msgspec.json.decode(msgspec.json.encode(about))
        changed = [_name_change(key, before.get(key), value) for key, value in now.items() if before.get(key) != value]
        if changed:
            raise StartError(
                f"{self.folder} holds layers that were made otherwise: {', '.join(changed)}. Give the same as then to"
                f" go on with them, or remove {self._making}."
            )

    # -- layers ----------------------------------------------------------------------------------------------------

    def _layer(self, number: int) -> Path:
        return self._making / f"layer-{number:05d}.safetensors"

    def has_layer(self, number: int) -> bool:
        return self._layer(number).exists()

    def write_layer(self, number: int, tensors: Mapping[str, Tensor], notes: list[str]) -> None:
        data = save(dict(tensors), {"format": "pt", _NOTES: json.dumps(notes)})
        _write_whole(self._layer(number), lambda file: file.write(data))

    def read_layer(self, number: int) -> tuple[dict[str, Tensor], list[str]]:
        with safe_open(self._layer(number), framework="pt") as file:
            notes = json.loads((file.metadata() or {}).get(_NOTES, "[]"))
            return {name: file.get_tensor(name) for name in file.keys()}, notes  # noqa: SIM118

    # -- the whole -------------------------------------------------------------------------------------------------

    def finish(
        self,
        source: Path,
        checkpoint: Checkpoint,
        num_layers: int,
        quantization: Mapping[str, Any],
        dtype: torch.dtype | None,
        max_shard_bytes: int,
        progress: Progress,
    ) -> int:
        """Write the model folder; `dtype`: of what is not in codes, None: as it was. Returns bytes of weights."""
        with _opened_layers([self._layer(number) for number in range(num_layers)]) as layers:
            made = {name: file for file in layers for name in file.keys()}  # noqa: SIM118
            replaced = {f"{name.removesuffix('.qweight')}.weight" for name in made if name.endswith(".qweight")}
            readers: dict[str, Callable[[], Tensor]] = {}
            sizes: dict[str, tuple[str, tuple[int, ...], int]] = {}
            for name in checkpoint.names():
                if name in replaced:
                    continue
                kind = checkpoint.dtype(name)
                if dtype is not None and kind in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
                    kind = dtype
                shape = checkpoint.shape(name)
                readers[name] = lambda name=name, kind=kind: checkpoint.read(name).to(kind)
                sizes[name] = _size(kind, shape)
            for name, file in made.items():
                part = file.get_slice(name)
                readers[name] = lambda name=name, file=file: file.get_tensor(name)
                sizes[name] = _size(DTYPES[part.get_dtype()], tuple(part.get_shape()))
            total = sum(num_bytes for _, _, num_bytes in sizes.values())
            self._write_shards(list(_plan_shards(sizes, max_shard_bytes)), readers, total, progress)
        self._copy_files(source)
        self._write_json(QUANTIZE_CONFIG, quantization)
        config = read_json_object(source / CONFIG)
        if dtype is not None:
            config |= {name: str(dtype).removeprefix("torch.") for name in ("dtype", "torch_dtype") if name in config}
        self._write_json(CONFIG, {**config, "quantization_config": quantization})
        return total

    def _write_shards(
        self,
        shards: list[dict[str, tuple[str, tuple[int, ...], int]]],
        readers: Mapping[str, Callable[[], Tensor]],
        total: int,
        progress: Progress,
    ) -> None:
        names = [WEIGHTS] if len(shards) == 1 else [_shard_name(number, len(shards)) for number in range(len(shards))]
        for path in self.folder.glob("model*.safetensors*"):  # of an interrupted run with files of another size
            if path.name not in names:
                path.unlink()
        done = 0
        for name, shard in zip(names, shards, strict=True):
            layout = SafetensorsLayout(shard, {"format": "pt"})

            def fill(file: BinaryIO, shard: Mapping[str, Any] = shard, layout: SafetensorsLayout = layout) -> None:
                nonlocal done
                file.write(layout.header)
                for tensor in shard:
                    data = readers[tensor]().contiguous().reshape(-1).view(torch.uint8).numpy()
                    file.write(data.data)
                    done += data.nbytes
                    progress("write model", done, total)

            _write_whole(self.folder / name, fill)
        if len(shards) > 1:
            placed = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            self._write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": placed})

    def _copy_files(self, source: Path) -> None:
        for path in sorted(source.iterdir()):
            is_licence = path.name.upper().startswith(("LICENSE", "NOTICE"))
            wanted = path.suffix in _COPIED or is_licence
            if wanted and path.is_file() and path.name not in _NEVER_COPIED and not path.name.startswith("."):
                data = path.read_bytes()
                _write_whole(self.folder / path.name, lambda file, data=data: file.write(data))

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        _write_whole(self.folder / name, lambda file: file.write(text.encode()))


def _name_change(key: str, before: object, now: object) -> str:
    """What differs from the run that was interrupted, in a few words."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return f"from another {key}"
    others = ((name, before.get(name), value) for name, value in now.items() if before.get(name) != value)
    return ", ".join(f"{name} {old}, now {new}" for name, old, new in others)


def _shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], int]:
    return _TYPE_NAMES[dtype], shape, torch.Size(shape).numel() * dtype.itemsize


def _plan_shards(
    sizes: Mapping[str, tuple[str, tuple[int, ...], int]], most: int
) -> Iterator[dict[str, tuple[str, tuple[int, ...], int]]]:
    """Tensors in the order of their names, as many in each file as fit."""
    shard: dict[str, tuple[str, tuple[int, ...], int]] = {}
    held = 0
    for name in sorted(sizes):
        if shard and held + sizes[name][2] > most:
            yield shard
            shard, held = {}, 0
        shard[name] = sizes[name]
        held += sizes[name][2]
    yield shard


@contextmanager
def _opened_layers(paths: list[Path]) -> Generator[list[Any]]:
    yield [safe_open(path, framework="pt").__enter__() for path in paths]


def _write_whole(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        fill(file)
    _publish(temporary, path)


def _publish(temporary: Path, path: Path) -> None:
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
