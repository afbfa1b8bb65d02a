"""Checkpoints of torchao in safetensors: integers of 8 bits, of fewer in bytes of their own, of 4 two in a byte.

A matrix lies in tensors named after it (`_weight_qdata`, `_weight_scale`, `_weight_zero_point`), and its form is told
by their shapes. Packings that are made for one kind of device, and can be made only on it, are refused. Inputs are not
quantised, also where torchao would: products are those of the weights alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.quant.config_fields import Fields
from text_generation_inference.quant.flat_groups import MIN_GROUP
from text_generation_inference.quant.groups import KeptSlice, read_scale, read_typed
from text_generation_inference.quant.low_bit import LowBit, LowBitScheme, StoredLowBit, choose_stored
from text_generation_inference.quant.method import Matrix, Method
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Beside, Part, Parts

_SERVED = {
    "Int8WeightOnlyConfig": 8,
    "Int8DynamicActivationInt8WeightConfig": 8,
    "Int8StaticActivationInt8WeightConfig": 8,
    "IntxWeightOnlyConfig": 8,
    "Int8DynamicActivationIntxWeightConfig": 8,
    "Int4WeightOnlyConfig": 4,
}
_WITH_ZEROS = ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig")  # always; others may do without
_MIXED = ("FqnToConfig", "ModuleFqnToConfig")
_WAY_OUT = (
    f"Served are {', '.join(_SERVED)}, of 4 bits in the plain packing. Quantise the model with one of them, or use the"
    " unquantised model with `quantize` bitsandbytes-nf4, eetq or fp8."
)
_ZERO_DTYPES = (torch.int8, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class TorchAo(Quantization):
    """As config.json says, and, once `stored` is known, as the checkpoint has it."""

    bits: int  # 4: codes in bytes of their own are of 4 bits, too
    plain: tuple[str, ...] = ()
    needs_zeros: bool = False  # every matrix has zero points
    stored: Mapping[str, tuple[int, ...]] | None = None  # names and shapes of its tensors
    method: str = "torchao"
    may_leave: tuple[str, ...] = ("*._weight_act_quant_scale", "*._weight_act_quant_zero_point")
    origin: str = "this checkpoint, which is stored with torchao,"

    @property
    def description(self) -> str:
        return f"matrices in {self.bits} bits, as the checkpoint has them (torchao)"

    def choose(self, matrix: Matrix, names: Sequence[str]) -> Method | None:
        if self.stored is not None:
            parts = zip(matrix.parts, names, strict=True)
            return choose_stored(matrix, [self._find(part, name) for part, name in parts])
        is_plain = any(f".{plain}." in f".{name}." for plain in self.plain for name in names)
        scheme = LowBitScheme(self.bits, None, self.bits == 8, scale_dtype=torch.float32)
        return LowBit(scheme) if matrix.may_round and not is_plain and scheme.accepts(matrix.shape[1]) else None

    def named_as_in(self, stored: Mapping[str, tuple[int, ...]]) -> "TorchAo":
        return replace(self, stored=stored)

    def _find(self, part: Part, name: str) -> StoredLowBit | None:
        """How a part is stored; None: plainly."""
        assert self.stored is not None
        data, scale, zero, inputs = (
            self.stored.get(f"{name}._weight_{each}") for each in ("qdata", "scale", "zero_point", "act_pre_scale")
        )
        if data is None:
            return None
        rows, columns = KeptSlice.of(part).shape
        if inputs is not None:
            raise ModelFormatError(f"{name}._weight_act_pre_scale: inputs that are scaled are not served. {_WAY_OUT}")
        if data == (rows, columns):
            by_group = scale is not None and len(scale) == 2 and scale[0] == rows and 1 < scale[1] <= columns
            group = columns // scale[1] if scale is not None and by_group else None
            bits = 4 if self.bits == 4 and columns % 2 == 0 else 8
            return AoBytes(bits, group, self.needs_zeros or zero is not None)
        groups = scale[0] if scale is not None and len(scale) == 2 else 0
        if data == (rows, columns // 2) and groups and columns % groups == 0:
            return AoHalves(columns // groups)
        raise ModelFormatError(
            f"{name}._weight_qdata has shape {list(data)}: it is in a packing for one kind of device. {_WAY_OUT}"
        )


def detect(config: Mapping[str, Any], source: str) -> TorchAo:
    """`config` is the section of config.json."""
    fields = Fields(config, f"{source}: `quantization_config`", _WAY_OUT)
    kinds = list(_configs(fields.get("quant_type")))
    if isinstance(fields.get("quant_type"), str):  # older: always pickles, which are refused when they are found
        return TorchAo(4 if "int4" in fields.text("quant_type", "") else 8)
    if not kinds:
        raise fields.refuse("quant_type", "the configuration of torchao that it was quantised with")
    packings, widths = set[str](), set[int]()
    for kind in kinds:
        name = str(kind["_type"])
        if name not in _SERVED:
            raise ModelFormatError(f"{fields.place}: `quant_type` {name[:60]} is not supported. {_WAY_OUT}")
        settings = kind.get("_data")
        settings = settings if isinstance(settings, Mapping) else {}
        packings.add(_word(settings.get("int4_packing_format", "plain")))
        width = _word(settings.get("weight_dtype", f"int{_SERVED[name]}")).removeprefix("int")
        widths.add(int(width) if width.isdecimal() else 8)
    if packings != {"plain"}:
        other = next(packing for packing in sorted(packings) if packing != "plain")
        raise ModelFormatError(
            f"{fields.place}: `int4_packing_format` {other[:40]} is one for the kind of device that made it. {_WAY_OUT}"
        )
    needs_zeros = all(kind["_type"] in _WITH_ZEROS for kind in kinds)
    return TorchAo(4 if max(widths) <= 4 else 8, fields.names("modules_to_not_convert") or ("lm_head",), needs_zeros)


def _configs(value: Any) -> Iterator[Mapping[str, Any]]:
    """Those of matrices, one for all or some for some."""
    if not isinstance(value, Mapping):
        return
    kind = value.get("_type")
    if isinstance(kind, str) and kind.endswith("Config") and kind not in _MIXED:
        yield value
        return
    for each in value.values():
        yield from _configs(each)


def _word(value: Any) -> str:
    """Of an enumeration or a type."""
    return str(value.get("_data") if isinstance(value, Mapping) else value).lower()


class AoBytes(StoredLowBit):
    """int8 `[out, in]`, with a scale, and perhaps a zero point, for a group of columns, a row, or all of it."""

    def __init__(self, bits: int, group_size: int | None, has_zero: bool) -> None:
        super().__init__(LowBitScheme(bits, group_size, not has_zero, scale_dtype=torch.float32))
        self.has_zero = has_zero
        self.has_groups = group_size is None or group_size >= MIN_GROUP

    def holder(self, part: Part) -> tuple[str, tuple[int, ...]]:
        return _beside(part.name, "qdata"), KeptSlice.of(part).shape

    def declare(self, part: Part) -> dict[str, Beside]:
        rows, columns = KeptSlice.of(part).shape
        size = self.scheme.group_size
        shapes = ((rows, 1), (1, 1), (rows,), ()) if size is None else ((rows, columns // size),)
        names = ("scale", "zero_point") if self.has_zero else ("scale",)
        return {_beside(part.name, name): Beside(shapes) for name in names}

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            yield KeptSlice.of(part).wanted(_beside(name, "qdata"), (0, 1, 1), (1, 1, 1))
            yield from (Wanted(beside, on_host=True) for beside in self.declare(replace(part, name=name)))

    def read_part(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> LowBitWeight:
        cut, data = KeptSlice.of(part), _beside(name, "qdata")
        (left, right), size = cut.columns, self.scheme.group_size
        bits = 8 if left % 2 or right % 2 else self.scheme.bits
        codes = read_typed(cut.wanted(data, (0, 1, 1), (1, 1, 1)), checkpoint, torch.int8).to(device)
        center = 1 << (bits - 1)
        if bits == 4 and codes.numel() and not -center <= int(codes.min()) <= int(codes.max()) < center:
            raise ModelFormatError(
                f"tensor {data} in {checkpoint.folder} holds values beyond the 4 bits that config.json says"
            )
        groups, skipped = (slice(None), 0) if size is None else (slice(left // size, -(-right // size)), left % size)

        def by_group(tensor: Tensor) -> Tensor:
            whole = tensor.view(-1, 1) if tensor.dim() < 2 else tensor
            return part.arrange_rows(whole.expand(cut.shape[0], -1)[slice(*cut.rows), groups].to(device)).contiguous()

        scale = by_group(read_scale(Wanted(_beside(name, "scale"), on_host=True), checkpoint, torch.device("cpu")))
        offset = None
        if self.has_zero:
            wanted = Wanted(_beside(name, "zero_point"), on_host=True)
            zero = read_typed(wanted, checkpoint, *_ZERO_DTYPES).float()
            offset = by_group(zero) * scale.float() if zero.any() else None
        shifted = part.arrange_rows((codes.to(torch.int16) + center).to(torch.uint8))
        shifted = torch.nn.functional.pad(shifted, (skipped, 0))  # so that groups are whole; cut off again
        columns = shifted.shape[1]
        packed = low_bit.pack_codes(shifted, bits).contiguous()
        weight = LowBitWeight(packed, scale, offset, bits, size or columns, columns)
        return low_bit.take_columns(weight, skipped, columns) if skipped else weight


class AoHalves(StoredLowBit):
    """Signed codes of 4 bits `[out, in / 2]`, the lower half first; scales and what is added then `[groups, out]`."""

    def __init__(self, group_size: int) -> None:
        super().__init__(LowBitScheme(4, group_size, is_symmetric=False, has_whole_zeros=False))
        self.group_size = group_size

    def holder(self, part: Part) -> tuple[str, tuple[int, ...]]:
        rows, columns = KeptSlice.of(part).shape
        return _beside(part.name, "qdata"), (rows, columns // 2)

    def declare(self, part: Part) -> dict[str, Beside]:
        rows, columns = KeptSlice.of(part).shape
        shapes = ((columns // self.group_size, rows),)
        return {_beside(part.name, name): Beside(shapes) for name in ("scale", "zero_point")}

    def _wanted(self, name: str, cut: KeptSlice) -> Iterator[Wanted]:
        yield cut.wanted(_beside(name, "qdata"), (0, 1, 1), (1, self.group_size, self.group_size // 2))
        for each in ("scale", "zero_point"):
            yield cut.wanted(_beside(name, each), (1, 1, 1), (0, self.group_size, 1))

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            yield from self._wanted(name, KeptSlice.of(part))

    def read_part(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> LowBitWeight:
        cut, size = KeptSlice.of(part), self.group_size
        data, scale, zero = self._wanted(name, cut)
        codes = read_typed(data, checkpoint, torch.int8, torch.uint8).to(device).view(torch.uint8) ^ 0x88
        scales, added = (part.arrange_rows(read_scale(each, checkpoint, device).t()) for each in (scale, zero))
        columns = codes.shape[1] * 2  # of whole groups
        weight = LowBitWeight(
            part.arrange_rows(codes).contiguous(), scales.contiguous(), -added.float().contiguous(), 4, size, columns
        )
        start = cut.columns[0] % size
        end = start + cut.columns[1] - cut.columns[0]
        return weight if (start, end) == (0, columns) else low_bit.take_columns(weight, start, end)


def _beside(name: str, tensor: str) -> str:
    return f"{name.removesuffix('weight')}_weight_{tensor}"
