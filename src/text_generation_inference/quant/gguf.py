"""Quantised blocks of a GGUF file, kept exactly as they are where the device's ops compute from them.

The values are those of the float32 file beside them, so this is for a model in float32 only. Parts of one matrix may be
stored in different types: files that are called Q4_K_M have the values of attention in more bits than queries and keys.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from text_generation_inference.kernels.matrices import BlockPieces
from text_generation_inference.quant.method import Matrix, Method
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Parts


class GgufBlocks(Method):
    def __init__(self, block_types: Sequence[str], rows: Sequence[int]) -> None:
        self.block_types = tuple(block_types)  # of each part: ggml type in small letters, such as "q4_1"
        self.rows = tuple(rows)

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        yield from ()  # they are in a file of their own

    def read(self, parts: Parts, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
        pieces: list[tuple[str, list[torch.Tensor]]] = []
        for (name, part), kind in zip(parts, self.block_types, strict=True):
            blocks = checkpoint.blocks(name)
            if not pieces or pieces[-1][0] != kind:
                pieces.append((kind, []))
            pieces[-1][1].append(part.arrange_rows(blocks if part.dim is None else blocks[part.start : part.end]))
        stored = [(kind, torch.cat(blocks).contiguous()) for kind, blocks in pieces]
        return BlockPieces(stored, torch.Size((sum(self.rows), parts[0][1].shape[1])))

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        sizes = [GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]] for kind in self.block_types]
        columns = math.prod(shape[1:])
        return sum(rows * columns // size * num for rows, (size, num) in zip(self.rows, sizes, strict=True))

    def finish(self, matrix: Matrix) -> None:
        stored = matrix.weight
        assert isinstance(stored, BlockPieces)
        matrix.weight = matrix.pack(stored)

    def kind(self, matrix: Matrix) -> object:
        return self.block_types


def detect(
    matrix: Matrix, tensors: Sequence[str], block_types: Mapping[str, str], computed: Collection[str]
) -> Method | None:
    """If all parts are there in types that are `computed`. `block_types` are those of a file, by tensor name."""
    kinds = [block_types.get(name, "").lower() for name in tensors]
    by_row = all(part.dim in (None, 0) and not part.transposed for part in matrix.parts)
    if not by_row or not set(kinds) <= set(computed):
        return None
    return GgufBlocks(kinds, [part.local_shape[0] for part in matrix.parts])
