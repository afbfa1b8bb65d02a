"""Feed-forwards as a spec describes them: dense, gated or not, or a mixture of experts."""

from dataclasses import replace
from functools import partial

from text_generation_inference.kernels.matrices import Product, Rows
from text_generation_inference.layers.experts import (
    Experts,
    ExpertSizes,
    ExpertTensors,
    Router,
    SharedExpert,
    StackedMatrix,
    expert_bias_parts,
    expert_parts,
    fused_bias_parts,
    fused_expert_parts,
    stacked_expert_parts,
)
from text_generation_inference.layers.feed_forward import FeedForward
from text_generation_inference.layers.linear import Linear, bias_parts, column_parts, row_linear
from text_generation_inference.models.model import Context
from text_generation_inference.models.spec import DenseSpec, ExpertLayout, ExpertNames, ExpertsSpec, TensorNames
from text_generation_inference.quant.method import InputForm
from text_generation_inference.weights.declare import Part


class DenseMlp(FeedForward):
    """Two matrices, with an activation or a gate between them."""

    def __init__(self, context: Context, spec: DenseSpec, hidden_size: int, names: TensorNames) -> None:
        ops, parallel, width = context.ops, context.parallel, spec.width
        self.name = names.feed_forward
        self.activation = spec.activation
        self.is_gated = spec.is_gated
        kept = parallel.split_width(width, context.width_step)
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
    first, end = parallel.split(spec.num_experts) if parallel.by_expert else (0, spec.num_experts)
    kept = (0, spec.width) if parallel.by_expert else parallel.split_width(spec.width, context.width_step)
    sizes = ExpertSizes(spec.num_experts, spec.width, hidden_size, range(first, end), kept)

    def find_tensors(stored: ExpertNames) -> ExpertTensors:
        name, layout = stored.feed_forward or names.feed_forward, stored.layout
        elsewhere: list[str] = []
        biases = None if stored.biases is None else fused_bias_parts(stored.biases, sizes)
        if layout is ExpertLayout.EACH:
            parts = expert_parts(stored.matrices, sizes)
            biases = expert_bias_parts(stored.matrices, sizes) if spec.names.biases is not None else None
            others = (number for number in range(spec.num_experts) if not first <= number < end)
            elsewhere = [matrix.format(number) for number in others for matrix in stored.matrices]
        elif layout is ExpertLayout.STACKED:
            parts = stacked_expert_parts(stored.matrices, sizes)
        else:
            transposed = layout is ExpertLayout.FUSED_TRANSPOSED
            parts = fused_expert_parts(stored.matrices, sizes, transposed, stored.alternating)
        return ExpertTensors(name, stored.router, *parts, elsewhere, biases)

    found, top_k, count = find_tensors(spec.names), spec.routing.top_k, end - first
    biases = found.biases or (None, None)
    gate_up = StackedMatrix(ops, found.gate_up, count, top_k, biases[0])
    gate_up.elsewhere = found.elsewhere
    return Experts(
        ops,
        parallel,
        found.name,
        Router(
            ops, found.router, spec.num_experts, hidden_size, spec.routing, spec.router_bias, spec.router_correction
        ),
        gate_up,
        StackedMatrix(ops, found.down, count, top_k, biases[1], adds_bias=parallel.by_expert or parallel.rank == 0),
        shared,
        spec.activation,
        spec.scale_inputs,
        tuple(partial(find_tensors, other) for other in spec.other_names),
        first,
    )
