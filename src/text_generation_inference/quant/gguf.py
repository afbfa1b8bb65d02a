"""Quantised blocks of a GGUF file, kept exactly as they are where the device's ops compute from them.

The values are those of the float32 file beside them, so this is for a model in float32 only.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from text_generation_inference.quant.method import Matrix, Method
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Parts


class GgufBlocks(Method):
    def __init__(self, block_type: str) -> None:
        self.block_type = block_type  # ggml type in small letters, such as "q4_1"

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        yield from ()  # they are in a file of their own

    def read(self, parts: Parts, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
        found = [checkpoint.blocks(name) for name, _ in parts]
        pieces = [
            blocks if part.dim is None else blocks[part.start : part.end]
            for blocks, (_, part) in zip(found, parts, strict=True)
        ]
        return torch.cat(pieces).contiguous()  # [rows, bytes per row] uint8

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.block_type.upper()]]
        return math.prod(shape) // block_size * block_bytes

    def finish(self, matrix: Matrix) -> None:
        matrix.weight = matrix.ops.pack_blocks(self.block_type, matrix.weight, matrix.shape[1])

    def kind(self, matrix: Matrix) -> object:
        return self.block_type


def detect(
    matrix: Matrix, tensors: Sequence[str], block_types: Mapping[str, str], computed: Collection[str]
) -> Method | None:
    """If all parts are there in one type that is `computed`. `block_types` are those of a file, by tensor name."""
    kinds = {block_types.get(name, "").lower() for name in tensors}
    by_row = all(part.dim in (None, 0) for part in matrix.parts)
    return GgufBlocks(kinds.pop()) if by_row and len(kinds) == 1 and kinds <= set(computed) else None
