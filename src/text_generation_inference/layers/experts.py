"""A mixture of experts as a feed-forward: a router, the matrices of all experts, and what every token passes besides.

Ranks split each expert by width, so every rank has a part of all of them and the sums over ranks come last.
"""

from torch import Tensor

from text_generation_inference.kernels.fp8 import apply_scales
from text_generation_inference.kernels.matrices import BlockPieces, Product, Rows, Weight
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.routing import Routed, Routing
from text_generation_inference.layers.feed_forward import FeedForward
from text_generation_inference.layers.linear import Linear
from text_generation_inference.parallel import Parallel
from text_generation_inference.quant.method import InputForm, Matrix
from text_generation_inference.weights.declare import Declared, Module, Part


class StackedMatrix(Matrix):
    """The matrices of all experts, one below the other: any method that stores a matrix stores these."""

    is_stacked = True
    is_measured = False

    def __init__(self, ops: Ops, parts: list[Part], num_experts: int, top_k: int) -> None:
        super().__init__(ops, parts)
        self.num_experts = num_experts
        self.top_k = top_k

    @property
    def outputs_per_token(self) -> int:
        return self.shape[0] // self.num_experts * self.top_k

    def pack(self, weight: Tensor | BlockPieces) -> Weight:
        return self.ops.pack_experts(weight, self.num_experts)


class Router(Matrix):
    """Scores of all experts, and which of them are chosen. Never rounded: a score decides where a token goes."""

    is_measured = False

    def __init__(
        self, ops: Ops, name: str, num_experts: int, hidden_size: int, routing: Routing, bias: bool = False
    ) -> None:
        super().__init__(ops, [Part(f"{name}.weight", (num_experts, hidden_size))], may_round=False)
        self.routing = routing
        self.bias_part = Part(f"{name}.bias", (num_experts,)) if bias else None

    def declare(self) -> list[Declared]:
        biases = [] if self.bias_part is None else [Declared("bias", [self.bias_part])]
        return [*super().declare(), *biases]

    def forward(self, x: Tensor) -> Routed:
        """x `[tokens, hidden]` -> experts and weights `[tokens, k]`."""
        scores = self.method.logits(self, x, None).float()
        if self.bias is not None:
            scores = scores + self.bias.float()
        return self.ops.route(scores, self.routing)


class SharedExpert(Module):
    """What every token passes beside the experts chosen for it, scaled by a gate of its own where there is one."""

    def __init__(self, dense: FeedForward, gate: Linear | None) -> None:
        self.dense = dense
        self.gate = gate
        if gate is not None:  # one row, which decides for all of an expert, as a router does
            gate.may_round = gate.is_measured = False

    def forward(self, x: Tensor) -> Tensor:
        out = apply_scales(self.dense.forward(x))
        return out if self.gate is None else self.gate.forward(x).sigmoid() * out


class Experts(FeedForward):
    def __init__(
        self,
        ops: Ops,
        parallel: Parallel,
        name: str,
        router: Router,
        gate_up: StackedMatrix,
        down: StackedMatrix,
        shared: SharedExpert | None = None,
        gate: str = "silu",
        scale_inputs: bool = False,
    ) -> None:
        self.ops = ops
        self.parallel = parallel
        self.name = name
        self.router = router
        self.gate_up = gate_up
        self.down = down
        self.shared = shared
        self.gate = gate
        self.scale_inputs = scale_inputs

    @property
    def input_form(self) -> InputForm:
        return None  # the router reads what the experts read

    def keep_precise(self) -> None:
        self.gate_up.is_delicate = self.down.is_delicate = True  # an op may want both in the same form
        if self.shared is not None:
            self.shared.dense.keep_precise()

    @property
    def kind(self) -> object:
        return (self.router.routing, self.gate_up.kind, self.down.kind, self.down.shape)

    def forward(self, x: Rows) -> Product:
        assert isinstance(x, Tensor)
        ids, weights = self.router.forward(x)
        out = self.ops.experts(
            x, ids, weights, self.gate_up.weight, self.down.weight, self.gate, scale_inputs=self.scale_inputs
        )
        if self.shared is not None:
            out = out + self.shared.forward(x)
        return self.parallel.all_reduce(out)


def expert_parts(
    names: tuple[str, str, str], num_experts: int, width: int, hidden_size: int, kept: tuple[int, int]
) -> tuple[list[Part], list[Part]]:
    """Of gate, up and down projections that a checkpoint has for each expert: this rank's part of the width.

    `names` have a place for the expert's number.
    """
    whole = kept == (0, width)
    rows, columns = (None, 0, 0) if whole else (0, *kept), (None, 0, 0) if whole else (1, *kept)
    gate, up, down = (f"{name}.weight" for name in names)
    gate_up = [
        Part(name.format(number), (width, hidden_size), *rows) for number in range(num_experts) for name in (gate, up)
    ]
    return gate_up, [Part(down.format(number), (hidden_size, width), *columns) for number in range(num_experts)]


def stacked_expert_parts(
    names: tuple[str, str, str], num_experts: int, width: int, hidden_size: int, kept: tuple[int, int]
) -> tuple[list[Part], list[Part]]:
    """The same where a checkpoint has one `[experts * width, hidden]` for each; down projections lie transposed."""
    gate, up, down = names
    starts = range(0, num_experts * width, width)

    def part(name: str, at: int, transposed: bool = False) -> Part:
        return Part(name, (num_experts * width, hidden_size), 0, at + kept[0], at + kept[1], transposed=transposed)

    return [part(name, at) for at in starts for name in (gate, up)], [part(down, at, True) for at in starts]
