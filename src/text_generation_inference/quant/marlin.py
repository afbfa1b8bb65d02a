"""Marlin: symmetric codes of 4 bits in the order in which one kernel reads them, which is undone on loading.

Codes lie in tiles of 16 inputs and 64 outputs, 1024 codes each, so that each of 32 threads finds what it multiplies in
one place; scales are permuted likewise. Other kernels want other orders: `LowBitWeight` has none of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.errors import ModelFormatError, StartError
from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.quant.config_fields import Fields
from text_generation_inference.quant.groups import (
    InputGroups,
    KeptSlice,
    beside,
    guess_group_size,
    hold,
    read_scale,
    read_typed,
)
from text_generation_inference.quant.integer_fields import WAY_OUT, read_bits, read_group_size, read_names
from text_generation_inference.quant.low_bit import LowBitScheme, StoredLowBit, choose_stored
from text_generation_inference.quant.method import Matrix, Method
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Beside, Part, Parts

_INPUTS, _OUTPUTS = 16, 64  # of a tile
_WORDS = _INPUTS * _OUTPUTS // 8


def _tile_order() -> Tensor:
    """Where each code of a tile comes from: `[inputs, outputs]` of four squares of 16, one after the other."""
    places: list[int] = []
    for thread in range(32):
        rows = [2 * (thread % 4) + more for more in (0, 1, 8, 9)]
        own = [16 * row + thread // 4 + 8 * half for half in (0, 1) for row in rows]
        places.extend(place + 256 * square for square in range(4) for place in own)
    interleaved = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    return torch.tensor(places).view(-1, 8)[:, interleaved].flatten()


_TILE = _tile_order()
_BY_GROUP = torch.arange(64).view(8, 8).t().flatten()  # order of the scales of 64 outputs
_BY_ROW = torch.tensor([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)])  # of 32, without groups


class Marlin(StoredLowBit):
    def __init__(self, group_size: int | None) -> None:
        self.group_size = group_size
        super().__init__(LowBitScheme(4, group_size))

    def holder(self, part: Part) -> tuple[str, tuple[int, ...]]:
        rows, columns = KeptSlice.of(part).shape
        if rows % _OUTPUTS or columns % _INPUTS:
            raise ModelFormatError(
                f"{part.name}: [{rows}, {columns}] cannot be in Marlin, which has tiles of {_OUTPUTS} x {_INPUTS}"
            )
        return beside(part.name, "B"), (columns // _INPUTS, rows * _INPUTS // 8)

    def declare(self, part: Part) -> dict[str, Beside]:
        rows, columns = KeptSlice.of(part).shape
        groups = 1 if self.group_size is None else -(-columns // self.group_size)
        return {beside(part.name, "s"): Beside(((groups, rows),))}

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            yield from self._wanted(name, KeptSlice.of(part))

    def read_part(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> LowBitWeight:
        kept = KeptSlice.of(part)
        wanted, of_scales = self._wanted(name, kept)
        words = read_typed(wanted, checkpoint, torch.int32).to(device).contiguous()
        codes = low_bit.unpack_codes(words.view(torch.uint8), 4).view(len(words), -1, len(_TILE))
        codes = codes[..., _TILE.argsort().to(device)].view(len(words), -1, _INPUTS, 16)  # [tiles, squares, in, out]
        codes = codes.permute(1, 3, 0, 2).flatten(2).flatten(0, 1)
        scale = read_scale(of_scales, checkpoint, device)
        size = self.group_size or kept.shape[1]
        order = _BY_ROW if size == kept.shape[1] else _BY_GROUP
        scale = scale.view(len(scale), -1, len(order))[..., order.argsort().to(device)].flatten(1).t()
        (top, bottom), (left, right) = kept.rows, kept.columns
        rows = slice(top % _OUTPUTS, top % _OUTPUTS + bottom - top)
        codes = codes[rows, left % _INPUTS : left % _INPUTS + right - left]
        groups = InputGroups(scale[rows], None, size, left // size * size)
        return hold(codes, 4, groups, kept.columns, part)

    def _wanted(self, name: str, kept: KeptSlice) -> tuple[Wanted, Wanted]:
        size = self.group_size or kept.shape[1]
        return (
            kept.wanted(beside(name, "B"), (1, _OUTPUTS, _WORDS), (0, _INPUTS, 1)),
            kept.wanted(beside(name, "s"), (1, _OUTPUTS, _OUTPUTS), (0, size, 1)),
        )


@dataclass(frozen=True, slots=True)
class MarlinQuantization(Quantization):
    group_size: int | None = 128
    method: str = "marlin"
    origin: str = "this checkpoint, whose matrices are in Marlin,"
    may_leave: tuple[str, ...] = ("*.workspace",)
    plain: tuple[str, ...] = ()  # parts of the names of matrices that are not stored so
    shapes: Mapping[str, tuple[int, ...]] | None = None  # of a checkpoint's tensors; None: there is no checkpoint
    is_guessed: bool = False  # nothing but the tensors themselves tells how they are stored

    @property
    def description(self) -> str:
        return "matrices in few bits, as the checkpoint has them (marlin, 4 bits)"

    def named_as_in(self, stored: Mapping[str, tuple[int, ...]]) -> "MarlinQuantization":
        if any(name.endswith(".B_24") for name in stored):
            raise ModelFormatError(f"matrices of which half is left out (marlin_24) are not read. {WAY_OUT}")
        if not any(name.endswith(".B") for name in stored):
            if self.is_guessed:
                raise StartError(
                    "`quantize` marlin is for checkpoints in Marlin, which this one is not. Leave it out, or use one"
                    " that quantises on loading, such as bitsandbytes-nf4 or fp8."
                )
            raise ModelFormatError(
                "config.json says that matrices are in Marlin, but there is no tensor whose name ends in .B. Does"
                " config.json belong to these weights?"
            )
        return replace(self, shapes=stored)

    def choose(self, matrix: Matrix, names: Sequence[str]) -> Method | None:
        pairs = zip(matrix.parts, names, strict=True)
        return choose_stored(matrix, [self._find(matrix, part, name) for part, name in pairs])

    def _find(self, matrix: Matrix, part: Part, name: str) -> Marlin | None:
        if self.shapes is None:
            is_plain = not matrix.may_round or any(each in name for each in self.plain)
            return None if is_plain else Marlin(self.group_size)
        if f"{name}.B" not in self.shapes:
            return None
        if self.is_guessed:
            return Marlin(guess_group_size(name, KeptSlice.of(part).shape[1], self.shapes, "s"))
        return Marlin(self.group_size)


def detect(config: Mapping[str, Any], source: str) -> MarlinQuantization:
    """`config` is the section of config.json: of GPTQ whose `checkpoint_format` is marlin, or Marlin's own."""
    fields = Fields(config, f"{source}: `quantization_config`", WAY_OUT)
    name = "checkpoint_format" if fields.get("checkpoint_format") else "format"
    if fields.text(name, "marlin") not in ("marlin", "gptq"):  # `is_marlin_format` stands beside gptq
        raise fields.refuse(name, "marlin")
    read_bits(fields, "bits", 4)
    for name, meant in (("sym", True), ("desc_act", False)):
        if fields.truth(name, meant) is not meant:
            raise fields.refuse(name, "with Marlin " + str(meant).lower())
    return MarlinQuantization(read_group_size(fields, "group_size"), plain=read_names(fields, "modules_to_not_convert"))


UNTOLD = MarlinQuantization(origin="`quantize` marlin", is_guessed=True)
