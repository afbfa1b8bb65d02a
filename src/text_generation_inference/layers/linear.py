"""Matrix products whose weight may be split over ranks and fused from several checkpoint tensors."""

from torch import Tensor

from text_generation_inference.devices.device import Ops
from text_generation_inference.kernels.fp8 import Fp8Rows, Fp8Weight, ScaledRows
from text_generation_inference.parallel import Parallel
from text_generation_inference.weights.declare import Blocks, Declared, Module, Part


class Linear(Module):
    """Outputs are stacked from `parts`; each part says which rows or columns this rank keeps."""

    def __init__(
        self, ops: Ops, parts: list[Part], biases: list[Part] | None = None, reduce: Parallel | None = None
    ) -> None:
        self.ops = ops
        self.parts = parts
        self.bias_parts = biases
        self.reduce = reduce  # sum partial products over these ranks
        self.weight: Tensor | Blocks | Fp8Weight
        self.bias: Tensor | None = None
        self.delicate = False  # see `Declared`

    def declare(self) -> list[Declared]:
        declared = [Declared("weight", self.parts, packable=True, quantizable=True, delicate=self.delicate)]
        if self.bias_parts:
            declared.append(Declared("bias", self.bias_parts))
        return declared

    def accepts_blocks(self, kind: str) -> bool:
        return kind in self.ops.block_kinds

    def finish(self) -> None:
        weight = self.weight
        if isinstance(weight, Blocks):
            self.weight = self.ops.pack_blocks(weight.kind, weight.data, weight.shape[1])
        elif isinstance(weight, Fp8Weight):
            self.weight = self.ops.pack_fp8(weight)
        elif isinstance(weight, Tensor):
            self.weight = self.ops.pack_linear(weight)

    @property
    def fp8_weight(self) -> Fp8Weight | None:
        """The weight that the op before should quantise its result for; None: it should not."""
        weight = self.weight
        return weight if isinstance(weight, Fp8Weight) and weight.input_bound is None else None

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        """x `[tokens, in]` -> `[tokens, out]`."""
        weight = self.weight
        if isinstance(weight, Fp8Weight):
            if weight.input_bound is not None and isinstance(x, Tensor):
                x = x.clamp(-weight.input_bound, weight.input_bound)
            out = self.ops.linear(x, weight, self.bias, weight.dtype)
        else:
            out = self.ops.linear(x, weight, self.bias)
        return out if self.reduce is None else self.reduce.all_reduce(out)

    def linear_unscaled(self, x: Tensor | Fp8Rows) -> Tensor | ScaledRows:
        """Like `forward`; scales may be left to the op that comes next."""
        weight, product = self.weight, self.ops.linear_unscaled
        if product is None or self.reduce is not None or self.bias is not None or self.fp8_weight is None:
            return self.forward(x)
        assert isinstance(weight, Fp8Weight)
        return product(x, weight, weight.dtype)


def column_parts(names: list[str], sizes: list[int], in_features: int, ranges: list[tuple[int, int]]) -> list[Part]:
    """Weights `[size, in_features]`, of which this rank keeps the output rows in each range."""
    return [
        Part(f"{name}.weight", (size, in_features), 0, start, end)
        if (start, end) != (0, size)
        else Part(f"{name}.weight", (size, in_features))
        for name, size, (start, end) in zip(names, sizes, ranges, strict=True)
    ]


def bias_parts(names: list[str], sizes: list[int], ranges: list[tuple[int, int]]) -> list[Part]:
    return [Part(f"{n}.bias", (size,), 0, a, b) for n, size, (a, b) in zip(names, sizes, ranges, strict=True)]


def row_linear(
    ops: Ops, parallel: Parallel, name: str, in_features: int, out_features: int, kept: tuple[int, int], bias: bool
) -> Linear:
    """A weight whose input columns are split: each rank multiplies its part and the results are summed.

    The bias is added on one rank only, before the sum.
    """
    if parallel.world == 1:
        part = Part(f"{name}.weight", (out_features, in_features))
        biases = [Part(f"{name}.bias", (out_features,))] if bias else None
        return Linear(ops, [part], biases)
    part = Part(f"{name}.weight", (out_features, in_features), 1, *kept)
    biases = [Part(f"{name}.bias", (out_features,))] if bias else None
    return _RowLinear(ops, [part], biases, reduce=parallel)


class _RowLinear(Linear):
    def finish(self) -> None:
        super().finish()
        if self.bias is not None and self.reduce is not None and self.reduce.rank > 0:
            self.bias = None
