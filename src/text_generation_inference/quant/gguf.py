"""Matrices that a GGUF file has in quantised blocks: held as those, as codes of few bits, or widened on reading.

Ops that compute from blocks take them exactly as they are. Their values are those of the float32 file beside them, so
this is for a model in float32. Others may take codes of few bits, which are read from blocks without the float32 file.
Parts of one matrix may be stored in different types: files that are called Q4_K_M have the values of attention in more
bits than queries and keys.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.kernels.matrices import BlockPieces
from text_generation_inference.quant.gguf_low_bit import FORMS, block_size, common_scheme
from text_generation_inference.quant.low_bit import StoredLowBit, WidenedLowBit, as_held
from text_generation_inference.quant.method import Matrix, Method
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Part, Parts


class GgufBlocks(Method):
    """As they are."""

    def __init__(self, block_types: Sequence[str], rows: Sequence[int]) -> None:
        self.block_types = tuple(block_types)  # of each part: ggml type in small letters, such as "q4_1"
        self.rows = tuple(rows)

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        yield from ()  # they are in a file of their own

    def read(self, parts: Parts, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
        pieces: list[tuple[str, list[torch.Tensor]]] = []
        for (name, part), kind in zip(parts, self.block_types, strict=True):
            blocks = checkpoint.read(*_wanted(name, part, kind))
            if not pieces or pieces[-1][0] != kind:
                pieces.append((kind, []))
            pieces[-1][1].append(part.arrange_rows(blocks))
        stored = [(kind, torch.cat(blocks).contiguous()) for kind, blocks in pieces]
        return BlockPieces(stored, torch.Size((sum(self.rows), parts[0][1].local_shape[1])))

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        sizes = [block_size(kind) for kind in self.block_types]
        columns = math.prod(shape[1:])
        return sum(rows * columns // size * num for rows, (size, num) in zip(self.rows, sizes, strict=True))

    def finish(self, matrix: Matrix) -> None:
        stored = matrix.weight
        assert isinstance(stored, BlockPieces)
        matrix.weight = matrix.pack(stored)

    def kind(self, matrix: Matrix) -> object:
        return self.block_types


class GgufLowBit(StoredLowBit):
    """The same blocks as codes of few bits, their values in whatever type a product wants."""

    def __init__(self, kinds: Mapping[str, str], bits: int | None = None) -> None:
        """`kinds` of parts by name. `bits` 8: none is rounded by an offset."""
        super().__init__(common_scheme(set(kinds.values())))
        self.kinds = dict(kinds)
        self.bits = bits or self.scheme.bits

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            yield _wanted(name, part, self.kinds[part.name])

    def read_part(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> LowBitWeight:
        kind = self.kinds[part.name]
        blocks = part.arrange_rows(checkpoint.read(*_wanted(name, part, kind)).to(device))
        weight = FORMS[kind].read(kind, blocks, self.bits)
        if part.dim != 1:
            return weight
        first = part.start // block_size(kind)[0] * block_size(kind)[0]
        return low_bit.take_columns(weight, part.start - first, part.end - first)


def _wanted(name: str, part: Part, kind: str) -> Wanted:
    """Blocks of a part; of a slice of columns all that have some of it."""
    if part.dim != 1:
        return part.wanted(name)._replace(is_blocks=True)
    weights, size = block_size(kind)
    return Wanted(name, 1, part.start // weights * size, -(-part.end // weights) * size, is_blocks=True)


def _is_whole(part: Part, kind: str) -> bool:
    """Whether it is made of blocks, none of them cut."""
    return not part.transposed and (part.dim != 1 or (part.start | part.end) % block_size(kind)[0] == 0)


def detect(
    matrix: Matrix, tensors: Sequence[str], block_types: Mapping[str, str], computed: Collection[str]
) -> Method | None:
    """By what a file has of its parts. `block_types` are by tensor name; ops take those `computed` as they are."""
    kinds = [block_types.get(name, "").lower() for name in tensors]
    if set(kinds) <= set(computed) and all(map(_is_whole, matrix.parts, kinds)):
        return GgufBlocks(kinds, [part.local_shape[0] for part in matrix.parts])
    readable = {
        part.name: kind
        for part, kind in zip(matrix.parts, kinds, strict=True)
        if kind in FORMS and not part.transposed and part.number is None
    }
    if not readable:
        return None
    stored = GgufLowBit(readable)
    is_even = all(part.dim != 1 or (part.start | part.end) % 2 == 0 for part in matrix.parts)
    is_whole = is_even and all(part.name in readable for part in matrix.parts)
    if is_whole and matrix.may_round and as_held(stored, matrix) is stored:
        return stored
    return WidenedLowBit(dict.fromkeys(readable, GgufLowBit(readable, bits=8)))
