"""Reads the GGUF file format: metadata and the place of every tensor, with the values left in the mapped file.

First step of `.gguf` -> `gguf_model`, `gguf_tokenizer` -> `convert`. Knows the format and nothing of any architecture.
Every count, length and offset is checked against the file before it is used, so that a damaged or hostile file ends in
one `ModelFormatError`: `gguf.GGUFReader` trusts them, and may loop for ever or fail with an arbitrary error. The
constants and the dequantisation are those of the `gguf` package.
"""

import math
import mmap
import re
import struct
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from text_generation_inference.errors import ModelFormatError, ModelNotFoundError
from text_generation_inference.files import check_plain_file

AGAIN = "Download or copy the file again"
UNSUPPORTED = "Use a GGUF file of another kind, or the original model with safetensors weights"

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_HEADER_BYTES = 256 * 2**20  # vocabularies of 256k tokens need about 20 MB
_MAX_STRINGS = 2**22  # in all arrays together: each costs far more in memory than its 8 bytes in the file
_MAX_KEYS = 2**16
_MAX_TENSORS = 2**18
_MAX_DIMS = 4
_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies in the file and how it is stored."""

    name: str
    type_name: str  # "F32", "Q4_1", ...
    shape: tuple[int, ...]  # in torch order: the last dimension is contiguous
    start: int  # byte position in the file
    num_bytes: int
    part: int = 0  # of a split model


@dataclass(frozen=True)
class GgufFile:
    """One open GGUF file, or all parts of a split one. A mapping lives as long as an array made by `rows` does."""

    path: Path  # of the first part, which has the metadata
    metadata: dict[str, Any]  # numbers, bools, str, list[str], or numpy arrays for arrays of numbers
    tensors: dict[str, GgufTensor]
    _data: tuple[np.ndarray, ...] = field(repr=False)  # of each part

    @classmethod
    def open(cls, path: Path) -> "GgufFile":
        """Map `path` and read its header; raises `ModelFormatError` for anything that is not a sound GGUF file."""
        paths = find_parts(path)
        data: list[np.ndarray] = []
        metadata: dict[str, Any] = {}
        tensors: dict[str, GgufTensor] = {}
        for number, each in enumerate(paths):
            mapped = _map(each)
            header = _Header(each, mapped, len(mapped))
            values, found = header.read()
            place = tuple(
                _whole(values.get(key, default)) for key, default in (("split.no", number), ("split.count", 1))
            )
            if place == (0, 0):  # so llama.cpp marks parts that were put together again
                place = (0, 1)
            if place != (number, len(paths)):
                header.fail(
                    f"is part {place[0] + 1} of {place[1]} by its metadata, but not by its name",
                    "Names of parts end in -00001-of-00003.gguf",
                )
            if twice := tensors.keys() & found.keys():
                header.fail(f"tensor {min(twice)[:60]!r} is in another part too")
            metadata = metadata or values
            tensors |= {name: replace(tensor, part=number) for name, tensor in found.items()}
            data.append(np.frombuffer(mapped, dtype=np.uint8))
        return cls(paths[0], metadata, tensors, tuple(data))

    def rows(self, tensor: GgufTensor) -> np.ndarray:
        """The stored bytes, one row of the tensor per row, as a view of the mapped file."""  # uint8 [rows, bytes]
        num_rows = math.prod(tensor.shape[:-1])
        return self._data[tensor.part][tensor.start : tensor.start + tensor.num_bytes].reshape(num_rows, -1)

    def fail(self, cause: str, advice: str = AGAIN) -> NoReturn:
        """Refuse the file."""
        raise ModelFormatError(f"{self.path}: {cause}. {advice}.")

    def integer(self, key: str, default: int | None = None) -> int:
        """A non-negative whole number. An array stands for its value when all entries agree."""
        value = self.metadata.get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, np.ndarray):
            self.fail(f"`{key}` differs from layer to layer, which is not supported", UNSUPPORTED)
        if value is None:
            self.fail(f"metadata key `{key}` is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self.fail(f"metadata key `{key}` should be a whole number, but is {_shorten(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, as the shortest decimal that is the same float32."""
        value = self.metadata.get(key, default)
        if value is None:
            self.fail(f"metadata key `{key}` is missing")
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            self.fail(f"metadata key `{key}` should be a finite number, but is {_shorten(value)}")
        if abs(value) > np.finfo(np.float32).max:
            self.fail(f"metadata key `{key}` is too large: {value}")
        return float(str(np.float32(value)))

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.metadata.get(key, default)
        if value is None:
            self.fail(f"metadata key `{key}` is missing")
        if not isinstance(value, str):
            self.fail(f"metadata key `{key}` should be a string, but is {_shorten(value)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            self.fail(f"metadata key `{key}` should be true or false, but is {_shorten(value)}")
        return value

    def texts(self, key: str) -> list[str]:
        """An array of strings."""
        value = self.metadata.get(key)
        if value is None:
            self.fail(f"metadata key `{key}` is missing")
        if not isinstance(value, list):
            self.fail(f"metadata key `{key}` should be an array of strings, but is {_shorten(value)}")
        return value

    def numbers(self, key: str, length: int) -> np.ndarray | None:
        """An array of `length` numbers, or None without the key."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray):
            self.fail(f"metadata key `{key}` should be an array of numbers, but is {_shorten(value)}")
        if value.size != length:
            self.fail(f"metadata key `{key}` has {value.size} entries where {length} are expected")
        return value


def find_parts(path: Path) -> list[Path]:
    """The files of a split model in their order, by the name of any of them; of one that is not split, itself."""
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    stem, count = named[1], int(named[2])
    paths = [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := next((each for each in paths if not each.exists()), None):
        raise ModelFormatError(
            f"{path}: is part of a split model, of which {missing.name} is not there. Put all parts into one folder."
        )
    return paths or [path]


def _map(path: Path) -> mmap.mmap:
    try:
        check_plain_file(path)
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise ModelFormatError(f"{path}: holds {size} bytes, too few for a GGUF file. {AGAIN}.")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{path}: there is no such file.") from error
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read: {error.strerror}. Check the path and its rights.") from error


def to_float32(rows: np.ndarray, type_name: str) -> np.ndarray:
    """The exact values of stored rows."""  # uint8 [rows, bytes] -> float32 [rows, columns]
    with np.errstate(all="ignore"):  # a scale may legally be inf or nan
        return dequantize(rows, GGMLQuantizationType[type_name])


@cache
def _convertible(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except (NotImplementedError, KeyError):
        return False
    return True


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else -1


def _shorten(value: Any) -> str:
    text = f"an array of {len(value)}" if isinstance(value, list | np.ndarray) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Header:
    """A cursor over the header that never leaves the file."""

    def __init__(self, path: Path, mapped: mmap.mmap, size: int) -> None:
        self.path = path
        self.mapped = mapped
        self.size = size
        self.limit = min(size, _MAX_HEADER_BYTES)
        self.position = 0
        self.strings_left = _MAX_STRINGS

    def fail(self, cause: str, advice: str = AGAIN) -> NoReturn:
        raise ModelFormatError(f"{self.path}: {cause}. {advice}.")

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self.mapped[:4] != b"GGUF":
            self.fail("is not a GGUF file (it does not begin with `GGUF`)", "Give the path of a .gguf file")
        self.position = 4
        version = self.unpack("I")
        if version & 0xFFFF == 0:
            self.fail("is a big-endian GGUF file", "Use the little-endian file")
        if version not in (2, 3):
            self.fail(f"is GGUF version {version}; versions 2 and 3 can be read", "Convert the model again")
        num_tensors, num_keys = self.unpack("Q"), self.unpack("Q")
        if num_keys > _MAX_KEYS or num_tensors > _MAX_TENSORS:
            self.fail(f"the header claims {num_keys} metadata keys and {num_tensors} tensors: it is damaged")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            if key in metadata:
                self.fail(f"metadata key {_shorten(key)} appears twice: the header is damaged")
            metadata[key] = self.value(key)
        entries = [self.tensor_entry() for _ in range(num_tensors)]
        return metadata, self.place(entries, self.data_start(metadata))

    def take(self, num_bytes: int) -> int:
        """Step over `num_bytes` and return where they begin."""
        start = self.position
        if num_bytes > self.limit - start:
            whole = self.limit == self.size
            self.fail("ends inside its header: it is truncated or damaged" if whole else "has an absurdly long header")
        self.position = start + num_bytes
        return start

    def unpack(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.mapped, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        length = self.unpack("Q")
        start = self.take(length)
        try:
            return self.mapped[start : start + length].decode()
        except UnicodeDecodeError:
            self.fail(f"the string at byte {start} is not UTF-8: the header is damaged")

    def value(self, key: str) -> Any:
        kind = self.unpack("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            self.fail(f"metadata key {_shorten(key)} has the unknown type {kind}: the header is damaged")
        return self.unpack(_SCALARS[kind])

    def array(self, key: str) -> Any:
        kind, count = self.unpack("I"), self.unpack("Q")
        if kind == _STRING:
            # Each string takes at least its 8 bytes of length, so a count beyond that is known to be false at once.
            if count > self.strings_left or count * 8 > self.limit - self.position:
                self.fail(f"metadata key {_shorten(key)} claims {count} strings: the header is damaged")
            self.strings_left -= count
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            self.fail(f"metadata key {_shorten(key)} is an array of the unsupported type {kind}")
        dtype = np.dtype("<" + _SCALARS[kind])
        start = self.take(count * dtype.itemsize)
        return np.frombuffer(self.mapped, dtype=dtype, count=count, offset=start)

    def tensor_entry(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self.string()
        num_dims = self.unpack("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            self.fail(f"tensor {_shorten(name)} has {num_dims} dimensions: the header is damaged")
        shape = tuple(self.unpack("Q") for _ in range(num_dims))[::-1]
        kind, offset = self.unpack("I"), self.unpack("Q")
        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            self.fail(f"tensor {_shorten(name)} has the unknown type {kind}", UNSUPPORTED)
        if not _convertible(known):
            self.fail(f"tensor {_shorten(name)} has the unsupported type {known.name}", UNSUPPORTED)
        return name, known, shape, offset

    def data_start(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            self.fail(f"`general.alignment` should be a power of two, but is {_shorten(alignment)}")
        return -(-self.position // alignment) * alignment

    def place(
        self, entries: list[tuple[str, GGMLQuantizationType, tuple[int, ...], int]], data_start: int
    ) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        end = data_start
        for name, kind, shape, offset in sorted(entries, key=lambda entry: entry[3]):
            if name in tensors:
                self.fail(f"tensor {_shorten(name)} appears twice: the header is damaged")
            block_size, block_bytes = GGML_QUANT_SIZES[kind]
            if math.prod(shape) == 0 or shape[-1] % block_size:
                self.fail(f"tensor {_shorten(name)} has the impossible shape {shape} for {kind.name}")
            num_bytes = math.prod(shape) // block_size * block_bytes
            start = data_start + offset
            if start < end:
                self.fail(f"tensor {_shorten(name)} overlaps another: the header is damaged")
            end = start + num_bytes
            if end > self.size:
                self.fail(
                    f"tensor {_shorten(name)} ends at byte {end} of {self.size}: the file is truncated or damaged"
                )
            tensors[name] = GgufTensor(name, kind.name, shape, start, num_bytes)
        return tensors
