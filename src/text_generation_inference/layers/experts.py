"""A mixture of experts as a feed-forward: a router, the matrices of all experts, and what every token passes besides.

Ranks split each expert by width, so that every rank has a part of all of them, or have whole ones, some each. Either
way the router is on all of them and the sums over ranks come last.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from text_generation_inference.kernels.experts import look_within
from text_generation_inference.kernels.fp8 import apply_scales
from text_generation_inference.kernels.fused_decode import FusedExperts
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.kernels.matrices import BlockPieces, Product, Rows, Weight
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.partial_sum import PartialSum
from text_generation_inference.kernels.routing import Routed, Routing
from text_generation_inference.layers.feed_forward import FeedForward
from text_generation_inference.layers.linear import Linear
from text_generation_inference.parallel import Parallel
from text_generation_inference.quant.method import InputForm, Matrix
from text_generation_inference.weights.declare import Arrangement, Declared, Float32Tensors, Module, Part

_CORRECTION = "e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """What a checkpoint has of a mixture of experts, and where."""

    name: str  # of the feed-forward
    router: str
    gate_up: list[Part]
    down: list[Part]
    elsewhere: Collection[str] = ()  # matrices that other ranks have
    biases: tuple[list[Part], list[Part]] | None = None


class StackedMatrix(Matrix):
    """The matrices of all experts, one below the other: any method that stores a matrix stores these."""

    is_stacked = True
    is_measured = False  # by itself: see `Experts.look_within`

    def __init__(
        self,
        ops: Ops,
        parts: list[Part],
        num_experts: int,
        top_k: int,
        biases: list[Part] | None = None,
        adds_bias: bool = True,  # else another rank does
    ) -> None:
        super().__init__(ops, parts)
        self.num_experts = num_experts
        self.top_k = top_k
        self.bias_parts = biases
        self.adds_bias = adds_bias

    def declare(self) -> list[Declared]:
        biases = [Declared("bias", self.bias_parts)] if self.bias_parts else []
        return [*super().declare(), *biases]

    def finish(self) -> None:
        super().finish()
        if self.bias is not None:
            self.bias = self.bias.view(self.num_experts, -1)
            if not self.adds_bias:
                self.bias = torch.zeros_like(self.bias)

    @property
    def layer_class(self) -> str:
        return "Linear" if self.parts[0].number is None else ""  # else one tensor of the layer has all experts

    @property
    def outputs_per_token(self) -> int:
        return self.shape[0] // self.num_experts * self.top_k

    def pack(self, weight: Tensor | BlockPieces | LowBitWeight) -> Weight:
        if isinstance(weight, LowBitWeight):
            return self.ops.pack_low_bit(weight, self.num_experts)
        return self.ops.pack_experts(weight, self.num_experts)


class Router(Matrix):
    """Scores of all experts, and which of them are chosen. Never rounded: a score decides where a token goes."""

    is_measured = False

    def __init__(
        self,
        ops: Ops,
        name: str,
        num_experts: int,
        hidden_size: int,
        routing: Routing,
        bias: bool = False,
        correction: bool = False,  # the rule has one
    ) -> None:
        super().__init__(ops, [Part(f"{name}.weight", (num_experts, hidden_size))], may_round=False)
        self.routing = routing
        self.bias_part = Part(f"{name}.bias", (num_experts,)) if bias else None
        self.correction_part = Part(f"{name}.{_CORRECTION}", (num_experts,)) if correction else None
        self.correction: Tensor | None = None

    def rename(self, name: str) -> None:
        self.parts = [replace(self.parts[0], name=f"{name}.weight")]
        if self.bias_part is not None:
            self.bias_part = replace(self.bias_part, name=f"{name}.bias")
        if self.correction_part is not None:
            self.correction_part = replace(self.correction_part, name=f"{name}.{_CORRECTION}")

    def declare(self) -> list[Declared]:
        biases = [] if self.bias_part is None else [Declared("bias", [self.bias_part])]
        if self.correction_part is not None:
            biases.append(Declared("correction", [self.correction_part], Float32Tensors()))
        return [*super().declare(), *biases]

    def forward(self, x: Tensor) -> Routed:
        """x `[tokens, hidden]` -> experts and weights `[tokens, k]`."""
        scores = self.method.logits(self, x, None).float()
        if self.bias is not None:
            scores = scores + self.bias.float()
        return self.ops.route(scores, self.routing, self.correction)


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
        others: tuple[Callable[[], ExpertTensors], ...] = (),
        first: int = 0,
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
        self._others = others  # ways in which a checkpoint may have it instead
        self._first = first  # of this rank's experts
        self._has_all = gate_up.num_experts == router.shape[0]

    def adapt(self, prefix: str, names: Collection[str]) -> None:
        """Take the tensors that a checkpoint has, which are below `prefix`."""
        if _is_there(f"{prefix}{self.name}.{self.gate_up.parts[0].name}", names):
            return
        for make in self._others:
            other = make()
            if _is_there(f"{prefix}{other.name}.{other.gate_up[0].name}", names):
                self.name, self.gate_up.parts, self.down.parts = other.name, other.gate_up, other.down
                self.gate_up.elsewhere = other.elsewhere
                self.gate_up.bias_parts, self.down.bias_parts = other.biases or (None, None)
                self.router.rename(other.router)
                return

    @property
    def input_form(self) -> InputForm:
        return None  # the router reads what the experts read

    def keep_precise(self) -> None:
        self.gate_up.is_delicate = self.down.is_delicate = True  # an op may want both in the same form
        if self.shared is not None:
            self.shared.dense.keep_precise()

    @property
    def kind(self) -> object:
        shared = None if self.shared is None else (self.shared.dense.kind, self.shared.gate is None)
        return (self.router.routing, self.gate_up.kind, self.down.kind, self.down.shape, shared)

    def as_fused(self) -> FusedExperts | None:
        """For a pass that fuses all layers, without the shared ones; None: it cannot be computed so."""
        router = self.router
        if self.scale_inputs:
            return None
        return FusedExperts(router.weight, router.bias, router.correction, router.routing, self.gate)

    def forward(self, x: Rows) -> Product:
        assert isinstance(x, Tensor)
        ids, weights = self._route(x)
        gate_up, down = self.gate_up, self.down
        biases = None if gate_up.bias is None or down.bias is None else (gate_up.bias, down.bias)
        out = self.ops.experts(x, ids, weights, gate_up.weight, down.weight, self.gate, biases, self.scale_inputs)
        if self.shared is not None:
            out = out + self.shared.forward(x)
        return out if self.parallel.world == 1 else PartialSum(out, self.parallel)

    def look_within(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For those who measure: what goes into the first matrices of this rank's experts and into the second, a row
        for each token and expert, and whose token each row is; -1 where it is another rank's."""
        ids, weights = self._route(x)
        gate_up = self.gate_up
        about = (gate_up.weight, gate_up.num_experts, self.gate, gate_up.bias, self.scale_inputs)
        within = look_within(x, ids, weights, *about)
        tokens = within.order // ids.shape[1]
        if not self._has_all:
            tokens = torch.where(weights.reshape(-1)[within.order] > 0, tokens, -1)
        return within.rows, within.gated, tokens

    def _route(self, x: Tensor) -> Routed:
        ids, weights = self.router.forward(x)
        return (ids, weights) if self._has_all else self._own(ids, weights)

    def _own(self, ids: Tensor, weights: Tensor) -> Routed:
        """By the numbers that experts have on this rank; nothing is wanted of those that others have."""
        ids = ids - self._first
        is_own = (ids >= 0) & (ids < self.gate_up.num_experts)
        return torch.where(is_own, ids, 0), torch.where(is_own, weights, 0)


def _is_there(tensor: str, names: Collection[str]) -> bool:
    """As it is, or in place of its weight what a quantised checkpoint has."""
    matrix = tensor.removesuffix("weight")
    return tensor in names or (matrix != tensor and any(name.startswith(matrix) for name in names))


@dataclass(frozen=True, slots=True)
class Alternating(Arrangement):
    """Gates and values that take turns -> gates, then values."""

    def apply(self, x: Tensor) -> Tensor:
        return torch.cat((x[0::2], x[1::2]))


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Of all experts, and what this rank keeps of them."""

    num_experts: int
    width: int
    hidden: int
    numbers: range  # of the experts
    kept: tuple[int, int]  # of the width

    @property
    def is_whole(self) -> bool:
        return self.kept == (0, self.width)


def expert_parts(names: tuple[str, ...], sizes: ExpertSizes) -> tuple[list[Part], list[Part]]:
    """Of gate, up and down projections that a checkpoint has for each expert: what this rank keeps.

    `names` have a place for the expert's number. Two of them: gates and values take turns in the rows of the first.
    """
    numbers, width, hidden_size = sizes.numbers, sizes.width, sizes.hidden
    columns = (None, 0, 0) if sizes.is_whole else (1, *sizes.kept)
    *pair, down = (f"{name}.weight" for name in names)
    gate_up = [_gate_up_part(name.format(number), sizes, len(pair), hidden_size) for number in numbers for name in pair]
    return gate_up, [Part(down.format(number), (hidden_size, width), *columns) for number in numbers]


def expert_bias_parts(names: tuple[str, ...], sizes: ExpertSizes) -> tuple[list[Part], list[Part]]:
    """The biases beside these."""
    *pair, down = (f"{name}.bias" for name in names)
    gate_up = [_gate_up_part(name.format(number), sizes, len(pair)) for number in sizes.numbers for name in pair]
    return gate_up, [Part(down.format(number), (sizes.hidden,)) for number in sizes.numbers]


def _gate_up_part(name: str, sizes: ExpertSizes, count: int, *columns: int) -> Part:
    """Rows of a gate or an up projection, or of both in turns where there is `count` of 1."""
    (start, end), times = sizes.kept, 3 - count
    rows = (None, 0, 0) if sizes.is_whole else (0, times * start, times * end)
    return Part(name, (times * sizes.width, *columns), *rows, arrangement=Alternating() if count == 1 else None)


def stacked_expert_parts(names: tuple[str, ...], sizes: ExpertSizes) -> tuple[list[Part], list[Part]]:
    """The same where a checkpoint has one `[experts * width, hidden]` for each; down projections lie transposed."""
    gate, up, down = names
    starts = [number * sizes.width for number in sizes.numbers]
    shape, (start, end) = (sizes.num_experts * sizes.width, sizes.hidden), sizes.kept

    def part(name: str, at: int, transposed: bool = False) -> Part:
        inside = (at, at + sizes.width)
        return Part(name, shape, 0, at + start, at + end, transposed=transposed, inside=inside)

    return [part(name, at) for at in starts for name in (gate, up)], [part(down, at, True) for at in starts]


def fused_expert_parts(
    names: tuple[str, ...],
    sizes: ExpertSizes,
    transposed: bool = False,  # stored `[experts, hidden, 2 * width]` and `[experts, width, hidden]`
    alternating: bool = False,  # gates and values take turns
) -> tuple[list[Part], list[Part]]:
    """The same where one tensor `[experts, 2 * width, hidden]` has all gates and values, one all down projections."""
    pair, down = names
    num_experts, width, hidden_size = sizes.num_experts, sizes.width, sizes.hidden
    whole, (start, end) = sizes.is_whole, sizes.kept
    if whole:
        ranges: list[tuple[int | None, int, int]] = [(None, 0, 0)]
    elif alternating:
        ranges = [(int(transposed), 2 * start, 2 * end)]
    else:
        ranges = [(int(transposed), start, end), (int(transposed), width + start, width + end)]
    arrangement = Alternating() if alternating else None
    shape = (hidden_size, 2 * width) if transposed else (2 * width, hidden_size)
    down_shape = (width, hidden_size) if transposed else (hidden_size, width)
    down_range = (None, 0, 0) if whole else (1 - int(transposed), start, end)
    gate_up = [
        Part(pair, (num_experts, *shape), *each, transposed, arrangement, number=number)
        for number in sizes.numbers
        for each in ranges
    ]
    return gate_up, [
        Part(down, (num_experts, *down_shape), *down_range, transposed, number=number) for number in sizes.numbers
    ]


def fused_bias_parts(names: tuple[str, str], sizes: ExpertSizes) -> tuple[list[Part], list[Part]]:
    """Biases `[experts, 2 * width]`, in which gates and values take turns, and `[experts, hidden]`."""
    pair, down = names
    count, (start, end) = sizes.num_experts, sizes.kept
    gate_up = [
        Part(pair, (count, 2 * sizes.width), 0, 2 * start, 2 * end, arrangement=Alternating(), number=number)
        for number in sizes.numbers
    ]
    return gate_up, [Part(down, (count, sizes.hidden), number=number) for number in sizes.numbers]
