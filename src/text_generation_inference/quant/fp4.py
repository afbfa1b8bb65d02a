"""Matrices in floats of 4 bits (e2m1) with a scale for each group of columns: NVFP4 and MXFP4.

NVFP4 has a scale in FP8 for 16 values and one number for all of them, by which `compressed-tensors` divides and
ModelOpt multiplies; MXFP4 a power of two for 32. Inputs stay in the type of the model, whatever a checkpoint says of
them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels.fp8 import E8M0
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.quant.groups import KeptSlice, read_typed
from text_generation_inference.quant.integers import ONE, beside, check_whole
from text_generation_inference.quant.low_bit import LowBitScheme, StoredLowBit
from text_generation_inference.quant.mxfp4 import VALUES
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Beside, Part, Parts
from text_generation_inference.weights.load import read_number

NVFP4_GROUP, MXFP4_GROUP = 16, 32
_BIAS = 127  # of the exponent that a scale of MXFP4 is


@dataclass(frozen=True, slots=True)
class Floats:
    """What a checkpoint has of such a matrix."""

    group_size: int
    values: str = "weight_packed"
    global_scale: str | None = None  # None: there is none
    multiplies: bool = False  # by the global scale; else divides
    input_scales: tuple[str, ...] = ()  # that may be there, and are not needed


NVFP4 = Floats(NVFP4_GROUP, global_scale="weight_global_scale", input_scales=("input_global_scale", "input_scale"))
MXFP4 = Floats(MXFP4_GROUP, input_scales=("input_global_scale", "input_scale"))
MODELOPT_NVFP4 = Floats(NVFP4_GROUP, "weight", "weight_scale_2", True, ("input_scale",))


class StoredFp4(StoredLowBit):
    def __init__(self, stored: Floats, drops_inputs: bool = False) -> None:
        self.stored = stored
        self.drops_inputs = drops_inputs  # the checkpoint says how inputs are rounded, which they are not
        is_power = stored.global_scale is None
        scale_dtype = torch.bfloat16 if is_power else torch.float32
        super().__init__(LowBitScheme(4, stored.group_size, table=VALUES, scale_dtype=scale_dtype))

    def holder(self, part: Part) -> tuple[str, tuple[int, ...]]:
        check_whole(part)
        rows, columns = part.shape
        if columns % self.stored.group_size:
            raise ModelFormatError(
                f"{part.name}: {columns} columns cannot be in the groups of {self.stored.group_size} of config.json"
            )
        return beside(part.name, self.stored.values), (rows, columns // 2)

    def declare(self, part: Part) -> dict[str, Beside]:
        rows, columns = part.shape
        stored = self.stored
        found = {beside(part.name, "weight_scale"): Beside(((rows, columns // stored.group_size),))}
        if stored.global_scale is not None:
            found[beside(part.name, stored.global_scale)] = Beside(ONE)
        return {**found, **{beside(part.name, name): Beside(ONE, needed=False) for name in stored.input_scales}}

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            yield from self._wanted(name, part)

    def _wanted(self, name: str, part: Part) -> tuple[Wanted, Wanted]:
        values, scale, size = beside(name, self.stored.values), beside(name, "weight_scale"), self.stored.group_size
        if part.dim is None:
            return Wanted(values), Wanted(scale, on_host=True)
        if part.dim == 0:
            return part.wanted(values), Wanted(scale, 0, part.start, part.end, on_host=True)
        if part.start % 2 or part.end % 2:
            raise ModelFormatError(
                f"{name}: its {part.shape[1]} columns, two in a byte, cannot be split over ranks at {part.start}."
                " Use fewer ranks."
            )
        return (
            Wanted(values, 1, part.start // 2, part.end // 2),
            Wanted(scale, 1, part.start // size, -(-part.end // size), on_host=True),
        )

    def read_part(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> LowBitWeight:
        values, scales = self._wanted(name, part)
        codes = read_typed(values, checkpoint, torch.uint8).to(device)
        (start, end), stored = KeptSlice.of(part).columns, self.stored.group_size
        size = gcd(stored, start)  # a slice may begin in a group
        groups = torch.arange(start, end, size) // stored
        scale = self._read_scale(name, scales, checkpoint)[:, groups - groups[0]]
        scale = part.arrange_rows(scale).contiguous().to(device)
        codes = part.arrange_rows(codes).contiguous()
        return LowBitWeight(codes, scale, None, 4, size, end - start, table=torch.tensor(VALUES, device=device))

    def _read_scale(self, name: str, wanted: Wanted, checkpoint: Checkpoint) -> Tensor:
        if self.stored.global_scale is None:
            exponents = read_typed(wanted, checkpoint, torch.uint8, *([] if E8M0 is None else [E8M0])).view(torch.uint8)
            scale = torch.exp2(exponents.float() - _BIAS).bfloat16()  # 255, which is none, is beyond all numbers
        else:
            scale = read_typed(wanted, checkpoint, torch.float8_e4m3fn).float()
            whole = read_number(beside(name, self.stored.global_scale), checkpoint)
            scale = scale * whole if self.stored.multiplies else scale / whole
        if not bool(torch.isfinite(scale).all()):
            raise ModelFormatError(f"tensor {wanted.name} in {checkpoint.folder} holds a scale that is not finite")
        return scale
