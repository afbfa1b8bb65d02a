"""Which matrices of a layer are put into codes, and which tensors of the checkpoint they are.

A matrix may be stacked from several tensors, whose rows a model may want in an order of its own: what is written has
the tensors' names and the checkpoint's order. What the format has no form for stays as it is, and is told why.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_inference.layers.experts import StackedMatrix
from text_generation_inference.layers.linear import Linear
from text_generation_inference.make_quantized.settings import MakingSettings
from text_generation_inference.quant.method import Matrix
from text_generation_inference.weights.declare import Module, Part

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A tensor of the checkpoint, as rows of a matrix."""

    name: str  # without `.weight`
    start: int
    end: int
    order: Tensor | None  # [rows] int64: the row of the tensor that each row of the matrix is; None: as they come

    def to_stored(self, rows: Tensor) -> Tensor:
        """Rows of the matrix -> in the order of the tensor."""
        return rows if self.order is None else torch.empty_like(rows).index_copy_(0, self.order.to(rows.device), rows)

    def to_matrix(self, rows: Tensor) -> Tensor:
        """Rows of the tensor -> in the order of the matrix."""
        return rows if self.order is None else rows[self.order.to(rows.device)]


@dataclass(frozen=True, slots=True)
class RoundedMatrix:
    """A matrix that is put into codes; or, of several experts, all of theirs."""

    matrix: Matrix
    num_experts: int | None  # None: it is a single matrix
    pieces: tuple[StoredRows, ...]

    def of_expert(self, number: int) -> list[StoredRows]:
        rows = self.matrix.shape[0] // (self.num_experts or 1)
        return [piece for piece in self.pieces if number * rows <= piece.start < (number + 1) * rows]


@dataclass(frozen=True, slots=True)
class Kept:
    """Matrices that stay as they are."""

    names: tuple[str, ...]
    reason: str  # "" for those that no method rounds


def find_targets(layer: Module, prefix: str, settings: MakingSettings) -> tuple[list[RoundedMatrix], list[Kept]]:
    """Of a layer, whose tensors are below `prefix`."""
    targets: list[RoundedMatrix] = []
    kept: list[Kept] = []
    for below, module in layer.walk(prefix):
        if not isinstance(module, Matrix):
            continue
        reason = _why_kept(module, settings)
        if reason is not None:
            kept.append(Kept(tuple(dict.fromkeys(module.names(below))), reason))
            continue
        count = module.num_experts if isinstance(module, StackedMatrix) else None
        targets.append(RoundedMatrix(module, count, tuple(_list_pieces(module.parts, below))))
    return targets, kept


def _why_kept(matrix: Matrix, settings: MakingSettings) -> str | None:
    """None: it is put into codes."""
    if not matrix.may_round or not matrix.is_multiplied:
        return ""
    if not isinstance(matrix, Linear | StackedMatrix):
        return ""
    parts = matrix.parts
    is_whole = all(part.number is None and part.dim is None and part.name.endswith(_WEIGHT) for part in parts)
    if not is_whole:
        what = "the matrices of all experts" if isinstance(matrix, StackedMatrix) else "parts of it, in its own order,"
        return f"the checkpoint has {what} in one tensor, for which the format has no form"
    words = settings.word_codes
    if any(size % words for part in parts for size in part.local_shape):
        sizes = " x ".join(map(str, parts[0].local_shape))
        return f"{sizes} are no multiples of {words}, which {settings.bits} bits are packed by"
    return None


def _list_pieces(parts: Sequence[Part], prefix: str) -> list[StoredRows]:
    pieces: list[StoredRows] = []
    start = 0
    for part in parts:
        rows = part.local_shape[0]
        order = part.arrange_rows(torch.arange(rows)[:, None])[:, 0] if part.arrangement is not None else None
        pieces.append(StoredRows(prefix + part.name.removesuffix(_WEIGHT), start, start + rows, order))
        start += rows
    return pieces
