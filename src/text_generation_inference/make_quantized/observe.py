"""What goes into the matrices of a layer while it computes.

`Observer` takes the place of the method of matrices that are put into codes, and of the op that multiplies experts.
Layers compute with plain matrices, in the order that they have; a pass ends where the matrix in question has got its
inputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.kernels.experts import GATES
from text_generation_inference.kernels.matrices import Rows, Weight, plain
from text_generation_inference.make_quantized.solver import Inputs
from text_generation_inference.make_quantized.targets import RoundedMatrix
from text_generation_inference.quant.method import Matrix, Method


class Reached(Exception):
    """The matrix that is looked at has got its inputs: nothing after it matters."""


class Observer(Method):
    """For the matrices of one model."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._target: RoundedMatrix | None = None
        self._seen: list[Matrix] | None = None
        self.inputs: list[Inputs] = []  # one for each expert, or one

    def look_at(self, target: RoundedMatrix) -> None:
        """From now on passes end there, and what comes in is added up."""
        self._target = target
        columns = target.matrix.shape[1]
        self.inputs = [Inputs(columns, self._device) for _ in range(target.num_experts or 1)]

    def look_away(self) -> None:
        self._target = None
        self.inputs = []

    def note_order(self) -> list[Matrix]:
        """The matrices that the next pass multiplies are put into this list, in its order."""
        self._seen = []
        return self._seen

    def stop_noting(self) -> None:
        self._seen = None

    # -- as a method of matrices -----------------------------------------------------------------------------------

    def finish(self, matrix: Matrix) -> None:
        """Matrices stay plain."""

    def apply(self, matrix: Matrix, x: Rows) -> Tensor:
        assert isinstance(x, Tensor)
        self._note(matrix)
        if self._target is not None and matrix is self._target.matrix:
            self.inputs[0].add(x)
            raise Reached
        return F.linear(x, plain(matrix.weight), matrix.bias)

    # -- as an op of experts ---------------------------------------------------------------------------------------

    def experts(
        self,
        pair: tuple[Matrix, Matrix],
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate: str,
        biases: tuple[Tensor, Tensor] | None,
        scale_inputs: bool,
    ) -> Tensor:
        """What `kernels.experts` defines, one expert after the other; `pair`: the matrices of gates and values, and
        down."""
        gate_up, down = pair
        self._note(gate_up)
        self._note(down)
        sought = None if self._target is None else self._target.matrix
        count = gate_up.shape[0] // (2 * down.shape[1])
        first, second = (plain(matrix.weight).view(count, -1, matrix.shape[1]) for matrix in pair)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for number in range(count):
            tokens, places = (ids == number).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            share = weights[tokens, places, None]
            rows = (x[tokens].float() * share).to(x.dtype) if scale_inputs else x[tokens]
            if sought is gate_up:
                self.inputs[number].add(rows)
                continue
            made = F.linear(rows, first[number], None if biases is None else biases[0][number])
            made = GATES[gate](*made.chunk(2, -1))
            if sought is down:
                self.inputs[number].add(made)
                continue
            made = F.linear(made, second[number], None if biases is None else biases[1][number]).float()
            out.index_add_(0, tokens, made if scale_inputs else made * share)
        if sought is gate_up or sought is down:
            raise Reached
        return out.to(x.dtype)

    def _note(self, matrix: Matrix) -> None:
        if self._seen is not None and matrix not in self._seen:
            self._seen.append(matrix)


class ObservedExperts:
    """`Ops.experts` of one mixture of experts."""

    def __init__(self, observer: Observer, pair: tuple[Matrix, Matrix]) -> None:
        self._observer, self._pair = observer, pair

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Weight,
        down: Weight,
        gate: str = "silu",
        biases: tuple[Tensor, Tensor] | None = None,
        scale_inputs: bool = False,
    ) -> Tensor:
        return self._observer.experts(self._pair, x, ids, weights, gate, biases, scale_inputs)
