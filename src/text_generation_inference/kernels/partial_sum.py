"""Products whose parts lie with several ranks, left unsummed so that the op that comes next can sum on its way."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from text_generation_inference.kernels.fp8 import Fp8Weight
    from text_generation_inference.kernels.matrices import Rows
    from text_generation_inference.kernels.ops import Ops


class Sums(Protocol):
    """Ranks that sum."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks; `x` may be overwritten."""
        ...

    def all_reduce_add_rms_norm(
        self,
        ops: "Ops",
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        quantize_for: "Fp8Weight | None" = None,
    ) -> "tuple[Rows, Tensor]":
        """`ops.add_rms_norm` of the sum over ranks: (normalised, new residual)."""
        ...


@dataclass(slots=True)
class PartialSum:
    """This rank's part: the value is the sum of `data` over ranks. It is summed once, for `data` may be overwritten."""

    data: Tensor
    ranks: Sums

    def total(self) -> Tensor:
        return self.ranks.all_reduce(self.data)
