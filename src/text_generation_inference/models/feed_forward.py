"""Feed-forwards as a spec describes them: dense, gated or not, or a mixture of experts."""

from dataclasses import replace

from text_generation_inference.kernels.matrices import Product, Rows
from text_generation_inference.layers.experts import (
    Experts,
    Router,
    SharedExpert,
    StackedMatrix,
    expert_parts,
    stacked_expert_parts,
)
from text_generation_inference.layers.feed_forward import FeedForward
from text_generation_inference.layers.linear import Linear, bias_parts, column_parts, row_linear
from text_generation_inference.models.model import Context
from text_generation_inference.models.spec import DenseSpec, ExpertsSpec, TensorNames
from text_generation_inference.quant.method import InputForm
from text_generation_inference.weights.declare import Part


class DenseMlp(FeedForward):
    """Two matrices, with an activation or a gate between them."""

    def __init__(self, context: Context, spec: DenseSpec, hidden_size: int, names: TensorNames) -> None:
        ops, parallel, width = context.ops, context.parallel, spec.width
        self.name = names.feed_forward
        self.activation = spec.activation
        self.is_gated = spec.is_gated
        kept = parallel.split(width, "the feed-forward width")
        parts = list(names.gate_up)
        times = 2 if spec.is_gated else 1
        sizes, ranges = [width] * times, [kept] * times
        offsets = [0] * times
        if spec.is_gated and len(parts) == 1:  # one tensor: gates, then values
            parts, sizes, offsets = parts * 2, [2 * width] * 2, [0, width]
        ranges = [(start + at, end + at) for (start, end), at in zip(ranges, offsets, strict=True)]
        if sizes[0] != width and parallel.world == 1:
            parts, sizes, ranges = parts[:1], sizes[:1], [(0, sizes[0])]
        biases = bias_parts(parts, sizes, ranges) if spec.bias else None
        self.gate_up = Linear(ops, column_parts(parts, sizes, hidden_size, ranges, names.transposed), biases)
        self.down = row_linear(ops, parallel, names.down, width, hidden_size, kept, spec.bias, names.transposed)
        gated = {"silu": ops.silu_mul, "gelu": ops.gelu_mul, "gelu_tanh": ops.gelu_tanh_mul}
        plain = {"silu": ops.silu, "gelu": ops.gelu, "gelu_tanh": ops.gelu_tanh, "relu": ops.relu}
        self.activate = (gated if spec.is_gated else plain)[spec.activation]

    @property
    def input_form(self) -> InputForm:
        return self.gate_up.input_form

    def forward(self, x: Rows) -> Product:
        rows = self.activate(self.gate_up.linear_unscaled(x), quantize_for=self.down.input_form)
        return self.down.linear_unscaled(rows)

    @property
    def kind(self) -> object:
        return self.activation, self.gate_up.kind, self.down.kind, self.down.shape

    def keep_precise(self) -> None:
        self.down.is_delicate = True


def build_feed_forward(
    context: Context, spec: DenseSpec | ExpertsSpec, hidden_size: int, names: TensorNames
) -> FeedForward:
    if isinstance(spec, DenseSpec):
        return DenseMlp(context, spec, hidden_size, names)
    ops, parallel = context.ops, context.parallel
    shared = None
    if spec.shared is not None:
        dense = DenseMlp(context, spec.shared, hidden_size, replace(names, feed_forward=spec.names.shared))
        dense.down.reduce = None  # what ranks have is summed once, with what the experts give
        gate = Linear(ops, [Part(f"{spec.names.shared_gate}.weight", (1, hidden_size))]) if spec.shared_gate else None
        shared = SharedExpert(dense, gate)
    kept = parallel.split(spec.width, "the width of an expert")
    find_parts = stacked_expert_parts if spec.names.is_stacked else expert_parts
    gate_up, down = find_parts(spec.names.gate_up_down, spec.num_experts, spec.width, hidden_size, kept)
    return Experts(
        ops,
        parallel,
        names.feed_forward,
        Router(ops, spec.names.router, spec.num_experts, hidden_size, spec.routing, spec.router_bias),
        StackedMatrix(ops, gate_up, spec.num_experts, spec.routing.top_k),
        StackedMatrix(ops, down, spec.num_experts, spec.routing.top_k),
        shared,
        spec.activation,
    )
