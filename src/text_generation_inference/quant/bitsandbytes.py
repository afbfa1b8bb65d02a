"""Checkpoints of bitsandbytes: NF4 and FP4, with scales in 8 bits or not, and LLM.int8.

Which matrices are stored so is told by the tensors beside them, not by config.json, whose lists of skipped modules are
matched by tools in different ways. Inputs are never quantised: LLM.int8 multiplies the columns of large inputs apart,
and which those are depends on the other rows of a batch, so its answers do.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.quant.bitsandbytes_codes import (
    INT8_MAX,
    SCALES_TOGETHER,
    TABLES,
    BlockScheme,
    Int8Scheme,
)
from text_generation_inference.quant.config_fields import Fields
from text_generation_inference.quant.flat_groups import MIN_GROUP, group_of, scales_by_row
from text_generation_inference.quant.groups import KeptSlice, read_typed
from text_generation_inference.quant.low_bit import LowBit, LowBitScheme, StoredLowBit, choose_stored
from text_generation_inference.quant.method import Matrix, Method
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Beside, Part, Parts
from text_generation_inference.weights.load import read_scales

_BLOCKS = tuple(32 << power for power in range(8))  # values that have a scale in common: 32 to 4096
_STATE = "quant_state.bitsandbytes__"
_LARGEST_STATE = 1 << 16  # bytes; it has some hundred
_STORAGE_BYTES = (1, 2, 4, 8)  # of the type that codes are stored in


@dataclass(frozen=True, slots=True)
class BitsAndBytes(Quantization):
    """As config.json says, and, once `stored` is known, as the checkpoint has it."""

    scheme: LowBitScheme
    skipped: tuple[str, ...] = ()
    stored: Mapping[str, tuple[int, ...]] | None = None  # names and shapes of its tensors
    method: str = "bitsandbytes"
    may_leave: tuple[str, ...] = (f"*.{_STATE}*",)  # of any length; read where matrices are
    origin: str = "this checkpoint, which is stored with bitsandbytes,"

    @property
    def description(self) -> str:
        return f"matrices in {self.scheme.bits} bits, as the checkpoint has them (bitsandbytes)"

    def choose(self, matrix: Matrix, names: Sequence[str]) -> Method | None:
        if self.stored is not None:
            return choose_stored(
                matrix, [self._find(part, name) for part, name in zip(matrix.parts, names, strict=True)]
            )
        if any(f".{skipped}." in f".{name}." for skipped in self.skipped for name in names):
            return None
        return LowBit(self.scheme) if matrix.may_round and self.scheme.accepts(matrix.shape[1]) else None

    def named_as_in(self, stored: Mapping[str, tuple[int, ...]]) -> "BitsAndBytes":
        return replace(self, stored=stored)

    def _find(self, part: Part, name: str) -> StoredLowBit | None:
        """How a part is stored; None: plainly."""
        assert self.stored is not None
        if f"{name}.SCB" in self.stored:
            return StoredInt8(f"{name}.weight_format" in self.stored)
        weight = f"{name}.weight" if part.name.endswith(".weight") else name
        if f"{weight}.absmax" not in self.stored or weight not in self.stored:
            return None
        kind = next((kind for kind in TABLES if f"{weight}.{_STATE}{kind}" in self.stored), None)
        if kind is None:
            raise ModelFormatError(
                f"the checkpoint lacks the tensor {weight}.{_STATE}nf4 (or fp4). Is the download complete?"
            )
        (rows, columns), count = KeptSlice.of(part).shape, math.prod(self.stored[f"{weight}.absmax"])
        possible = [block for block in _BLOCKS if count == -(-rows * columns // block)]
        num_bytes, length = -(-rows * columns // 2), math.prod(self.stored[weight])
        storage = next((size for size in _STORAGE_BYTES if length * size == num_bytes), 1)
        has_groups = all(group_of(columns, block) >= MIN_GROUP for block in possible)
        return StoredBlocks(kind, f"{weight}.nested_absmax" in self.stored, storage, has_groups)


def detect(config: Mapping[str, Any], source: str) -> BitsAndBytes:
    """`config` is the section of config.json."""
    fields = Fields(config, f"{source}: `quantization_config`")
    four, eight = (fields.truth(f"load_in_{bits}bit", fields.truth(f"_load_in_{bits}bit", False)) for bits in (4, 8))
    if not four and not eight:
        raise ModelFormatError(f"{fields.place}: neither `load_in_4bit` nor `load_in_8bit` is true")
    kind = fields.text("bnb_4bit_quant_type", "fp4")
    if four and kind not in TABLES:
        raise fields.refuse("bnb_4bit_quant_type", "nf4 or fp4")
    skipped = fields.names("llm_int8_skip_modules") or ("lm_head",)
    return BitsAndBytes(BlockScheme(table=TABLES[kind]) if four else Int8Scheme(), skipped)


# -- 8 bits ----------------------------------------------------------------------------------------------------------


class StoredInt8(StoredLowBit):
    """int8 `[out, in]`, and the largest value of each row (`SCB`)."""

    def __init__(self, has_format: bool) -> None:
        super().__init__(Int8Scheme())
        self.has_format = has_format  # a number that tells the order of the values

    def holder(self, part: Part) -> tuple[str, tuple[int, ...]]:
        return part.name, KeptSlice.of(part).shape

    def declare(self, part: Part) -> dict[str, Beside]:
        rows, base = KeptSlice.of(part).shape[0], part.name.removesuffix("weight")
        found = {f"{base}SCB": Beside(((rows,), (rows, 1)))}
        return {**found, f"{base}weight_format": Beside(((), (1,)))} if self.has_format else found

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            yield KeptSlice.of(part).wanted(name, (0, 1, 1), (1, 1, 1))
            yield from (Wanted(beside, on_host=True) for beside in self.declare(replace(part, name=name)))

    def read_part(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> LowBitWeight:
        cut, base = KeptSlice.of(part), name.removesuffix("weight")
        if self.has_format and checkpoint.read(f"{base}weight_format", on_host=True).any():
            raise ModelFormatError(
                f"tensor {base}weight_format in {checkpoint.folder} says that values lie in an order which only old"
                " GPUs use. Save the model again with a current version of bitsandbytes."
            )
        codes = read_typed(cut.wanted(name, (0, 1, 1), (1, 1, 1)), checkpoint, torch.int8)
        codes = codes.to(device).view(torch.uint8) ^ 0x80
        scale = read_scales(f"{base}SCB", checkpoint).view(-1, 1)[slice(*cut.rows)].to(device) / INT8_MAX
        columns = codes.shape[1]
        codes, scale = part.arrange_rows(codes), part.arrange_rows(scale)
        return LowBitWeight(codes.contiguous(), scale.contiguous(), None, 8, columns, columns)


# -- 4 bits ----------------------------------------------------------------------------------------------------------


class StoredBlocks(StoredLowBit):
    """Two values in a byte, the upper half first: all rows one after the other, in blocks that have a scale each."""

    def __init__(self, quant_type: str, is_nested: bool, storage_bytes: int, has_groups: bool) -> None:
        super().__init__(BlockScheme(table=TABLES[quant_type]))
        self.quant_type = quant_type
        self.is_nested = is_nested  # scales are codes of 8 bits themselves
        self.storage_bytes = storage_bytes
        self.has_groups = has_groups  # rows hold whole groups of columns with a scale in common

    def holder(self, part: Part) -> tuple[str, tuple[int, ...]]:
        return part.name, (-(-math.prod(part.shape) // 2) // self.storage_bytes, 1)

    def declare(self, part: Part) -> dict[str, Beside]:
        counts = {-(-math.prod(part.shape) // block) for block in _BLOCKS}
        found = {
            f"{part.name}.absmax": Beside(tuple((count,) for count in sorted(counts))),
            f"{part.name}.quant_map": Beside(((16,),)),
        }
        if self.is_nested:
            groups = {-(-count // SCALES_TOGETHER) for count in counts}
            found[f"{part.name}.nested_absmax"] = Beside(tuple((count,) for count in sorted(groups)))
            found[f"{part.name}.nested_quant_map"] = Beside(((256,),))
        return found

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            yield Wanted(f"{name}.{_STATE}{self.quant_type}", on_host=True)
            yield from (Wanted(beside, on_host=True) for beside in self.declare(replace(part, name=name)))
            yield self._wanted(name, KeptSlice.of(part))

    def _wanted(self, name: str, cut: KeptSlice) -> Wanted:
        """All columns of this rank's rows, which lie together; the whole where rows do not end with a word."""
        _, columns = cut.shape
        if not cut.is_by_row or columns % (2 * self.storage_bytes):
            return Wanted(name)
        words = columns // (2 * self.storage_bytes)
        return Wanted(name, 0, cut.rows[0] * words, cut.rows[1] * words)

    def read_part(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> LowBitWeight:
        cut = KeptSlice.of(part)
        block, scale, table = self._read_scales(name, cut, checkpoint)
        codes = self._read_codes(name, cut, checkpoint, device)
        columns = cut.shape[1]
        codes = part.arrange_rows(codes.view(-1, columns // 2))
        scale = part.arrange_rows(scales_by_row(scale, block, cut).to(device))
        weight = LowBitWeight(codes, scale, None, 4, group_of(columns, block), columns, table=table.to(device))
        return low_bit.take_columns(weight, *cut.columns) if cut.is_by_column else weight

    def widen_part(
        self, name: str, part: Part, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Whatever rows and blocks have in common."""
        if self.has_groups:
            return super().widen_part(name, part, checkpoint, dtype, device)
        cut = KeptSlice.of(part)
        block, scale, table = self._read_scales(name, cut, checkpoint)
        whole = replace(cut, rows=(0, cut.shape[0]))
        codes = low_bit.unpack_codes(self._read_codes(name, whole, checkpoint, device)[None], 4)[0]
        values = table.to(device)[codes[: math.prod(cut.shape)].int()]
        values *= scale.to(device).repeat_interleave(block)[: len(values)]
        return part.arrange_rows(values.view(cut.shape)[slice(*cut.rows), slice(*cut.columns)].to(dtype))

    def _read_codes(self, name: str, cut: KeptSlice, checkpoint: Checkpoint, device: torch.device) -> Tensor:
        """uint8 `[bytes]` of this rank's rows, the lower half of a byte first."""
        if checkpoint.dtype(name).itemsize != self.storage_bytes:
            stored = str(checkpoint.dtype(name)).removeprefix("torch.")
            raise _wrong(name, checkpoint, f"has type {stored}, which does not fit its length")
        wanted = self._wanted(name, cut)
        codes = checkpoint.read(*wanted).to(device).view(torch.uint8).flatten()
        if wanted.dim is None and cut.is_by_row:
            columns = cut.shape[1]
            codes = codes[cut.rows[0] * columns // 2 : cut.rows[1] * columns // 2]
        return codes << 4 | codes >> 4

    def _read_scales(self, name: str, cut: KeptSlice, checkpoint: Checkpoint) -> tuple[int, Tensor, Tensor]:
        """Values in a block, the scale of each block of the whole matrix, and the table of codes."""
        state = _QuantState.read(f"{name}.{_STATE}{self.quant_type}", self.quant_type, self.is_nested, checkpoint)
        absmax = f"{name}.absmax"
        count = checkpoint.shape(absmax)[0]
        if list(state.shape) != list(cut.shape):
            raise _wrong(state.name, checkpoint, f"says `shape` {state.shape}, config.json makes it {list(cut.shape)}")
        if count != -(-math.prod(cut.shape) // state.blocksize):
            raise _wrong(state.name, checkpoint, f"says `blocksize` {state.blocksize}, but {absmax} has {count} scales")
        table = read_scales(f"{name}.quant_map", checkpoint)
        if not self.is_nested:
            return state.blocksize, read_scales(absmax, checkpoint), table
        codes = read_typed(Wanted(absmax, on_host=True), checkpoint, torch.uint8)
        nested = read_scales(f"{name}.nested_absmax", checkpoint)
        if len(nested) != -(-count // SCALES_TOGETHER):
            raise _wrong(f"{name}.nested_absmax", checkpoint, f"has {len(nested)} scales for {count} of {absmax}")
        scale = read_scales(f"{name}.nested_quant_map", checkpoint)[codes.int()]
        scale *= nested.repeat_interleave(SCALES_TOGETHER)[:count]
        return state.blocksize, scale + state.nested_offset, table


@dataclass(frozen=True, slots=True)
class _QuantState:
    """The JSON text that lies beside a matrix as a tensor of bytes."""

    name: str
    blocksize: int
    shape: Sequence[Any]
    nested_offset: float

    @classmethod
    def read(cls, name: str, quant_type: str, is_nested: bool, checkpoint: Checkpoint) -> "_QuantState":
        if math.prod(checkpoint.shape(name)) > _LARGEST_STATE:
            raise _wrong(name, checkpoint, f"has more than {_LARGEST_STATE} bytes")
        text = read_typed(Wanted(name, on_host=True), checkpoint, torch.uint8)
        try:
            found = json.loads(bytes(text.flatten().tolist()))
        except (ValueError, RecursionError):
            raise _wrong(name, checkpoint, "must be JSON") from None
        if not isinstance(found, dict):
            raise _wrong(name, checkpoint, "must be a JSON object")
        if found.get("quant_type") != quant_type:
            raise _wrong(name, checkpoint, f"says `quant_type` {str(found.get('quant_type'))[:40]!r}")
        if not isinstance(found.get("blocksize"), int) or found["blocksize"] not in _BLOCKS:
            raise _wrong(name, checkpoint, f"says `blocksize` {str(found.get('blocksize'))[:40]!r}")
        if not isinstance(found.get("shape"), list):
            raise _wrong(name, checkpoint, f"says `shape` {str(found.get('shape'))[:40]!r}")
        offset = found.get("nested_offset", 0)
        if is_nested and found.get("nested_blocksize") != SCALES_TOGETHER:
            raise _wrong(name, checkpoint, f"says `nested_blocksize` {str(found.get('nested_blocksize'))[:40]!r}")
        is_number = isinstance(offset, int | float) and not isinstance(offset, bool)
        if not is_number or not abs(offset) <= torch.finfo(torch.float32).max:
            raise _wrong(name, checkpoint, f"says `nested_offset` {str(offset)[:40]!r}")
        return cls(name, found["blocksize"], found["shape"], float(offset))


def _wrong(name: str, checkpoint: Checkpoint, what: str) -> ModelFormatError:
    return ModelFormatError(f"tensor {name} in {checkpoint.folder} {what}. Does config.json belong to these weights?")
