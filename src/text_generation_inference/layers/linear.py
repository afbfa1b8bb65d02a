"""Matrix products whose weight may be split over ranks and fused from several checkpoint tensors."""

from collections.abc import Callable

from torch import Tensor

from text_generation_inference.kernels.matrices import Product, Rows
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.partial_sum import PartialSum
from text_generation_inference.parallel import Parallel
from text_generation_inference.quant.method import Matrix
from text_generation_inference.weights.declare import Declared, Part


class Linear(Matrix):
    """A matrix with what is added to its product: a bias, and the products of other ranks."""

    def __init__(
        self, ops: Ops, parts: list[Part], biases: list[Part] | None = None, reduce: Parallel | None = None
    ) -> None:
        super().__init__(ops, parts)
        self.bias_parts = biases
        self.reduce = reduce  # sum partial products over these ranks
        self._unscaled: Callable[[Rows], Product] | None = None

    def declare(self) -> list[Declared]:
        biases = [Declared("bias", self.bias_parts)] if self.bias_parts else []
        return [*super().declare(), *biases]

    def finish(self) -> None:
        super().finish()
        if self.reduce is None and self.bias is None:
            self._unscaled = self.method.unscaled(self)

    def forward(self, x: Rows) -> Tensor:
        """x `[tokens, in]` -> `[tokens, out]`."""
        out = self.method.apply(self, x)
        return out if self.reduce is None else self.reduce.all_reduce(out)

    def linear_unscaled(self, x: Rows) -> Product:
        """Like `forward`; scales, and the sum over ranks, may be left to the op that comes next."""
        if self._unscaled is not None:
            return self._unscaled(x)
        out = self.method.apply(self, x)
        return out if self.reduce is None else PartialSum(out, self.reduce)


def column_parts(
    names: list[str], sizes: list[int], in_features: int, ranges: list[tuple[int, int]], transposed: bool = False
) -> list[Part]:
    """Weights `[size, in_features]`, of which this rank keeps the output rows in each range."""
    return [
        _part(f"{name}.weight", (size, in_features), 0, kept, transposed)
        for name, size, kept in zip(names, sizes, ranges, strict=True)
    ]


def _part(name: str, shape: tuple[int, int], dim: int, kept: tuple[int, int], transposed: bool) -> Part:
    """Of a weight `[out, in]`, whichever way round it is stored, what this rank keeps of one dimension."""
    if transposed:
        shape, dim = (shape[1], shape[0]), 1 - dim
    return Part(name, shape, None if kept == (0, shape[dim]) else dim, *kept, transposed=transposed)


def bias_parts(names: list[str], sizes: list[int], ranges: list[tuple[int, int]]) -> list[Part]:
    return [Part(f"{n}.bias", (size,), 0, a, b) for n, size, (a, b) in zip(names, sizes, ranges, strict=True)]


def row_linear(
    ops: Ops,
    parallel: Parallel,
    name: str,
    in_features: int,
    out_features: int,
    kept: tuple[int, int],
    bias: bool,
    transposed: bool = False,
) -> Linear:
    """A weight whose input columns are split: each rank multiplies its part and the results are summed.

    The bias is added on one rank only, before the sum.
    """
    part = _part(f"{name}.weight", (out_features, in_features), 1, kept, transposed)
    biases = [Part(f"{name}.bias", (out_features,))] if bias else None
    if parallel.world == 1:
        return Linear(ops, [part], biases)
    return _RowLinear(ops, [part], biases, parallel)


class _RowLinear(Linear):
    def __init__(self, ops: Ops, parts: list[Part], biases: list[Part] | None, parallel: Parallel) -> None:
        super().__init__(ops, parts, biases, parallel)
        self._rank = parallel.rank  # whoever sums, even where `reduce` leaves it to others

    def finish(self) -> None:
        super().finish()
        if self._rank > 0:
            self.bias = None
