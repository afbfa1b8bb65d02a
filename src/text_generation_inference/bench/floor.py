"""The least time that a row can take on this GPU: what its own libraries need for the same work and nothing else.

The prompts' operations at a rate that the card's products reach; then, for every further token, one pass of
the model's own matrices through the library's products, captured as a graph, and the KV cache's bytes at the rate that
the card copies memory. Norms, rotations, scores of attention, choosing tokens and the host are left out, so no engine
reaches it.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.bench.results import Row
from text_generation_inference.engine.build import Engine
from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.models.spec import DecoderSpec

# Measured on an H200, which `--floor` is about; other cards differ.
READ_BYTES_PER_S = 4.2e12
OPERATIONS_PER_S = {torch.float8_e4m3fn: 1300e12}
OTHER_OPERATIONS_PER_S = 750e12

Matrix = Tensor | Fp8Weight


@dataclass(slots=True)
class FloorModel:
    """What of a model the floor depends on."""

    spec: DecoderSpec
    layers: list[Matrix]  # of all layers
    head: Matrix
    cache_element_bytes: int

    @classmethod
    def of(cls, engine: Engine) -> "FloorModel":
        runner: Any = engine.loop._runner
        model = runner.model
        layers = [
            linear.weight
            for layer in model.model.layers
            for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
        ]
        head = (model.head or model.model.embedding).weight
        return cls(model.spec, layers, head, runner.kv_cache[0][0].element_size())

    def cache_bytes(self, context: float) -> float:
        """Read by a decode step for one request."""
        spec = self.spec
        by_layer = 2 * spec.num_kv_heads * spec.head_dim * self.cache_element_bytes
        return sum(by_layer * min(context, window or context) for window in spec.windows)

    def prefill_seconds(self, row: Row) -> float:
        spec = self.spec
        products = sum(2 * matrix.shape[0] * matrix.shape[1] for matrix in self.layers)  # per token
        scores = 2 * row.inputs * spec.num_heads * spec.head_dim * spec.num_layers  # half of the square, twice
        rate = OPERATIONS_PER_S.get(_data(self.layers[0]).dtype, OTHER_OPERATIONS_PER_S)
        return row.requests * row.inputs * (products + scores) / rate


def measure_floor(model: FloorModel, row: Row) -> tuple[float, float]:
    """(ms of the average decode step, output tokens per second over the whole row)."""
    with torch.inference_mode():
        products = _products_ms(model, row.requests)
    step_ms = products + 1e3 * row.requests * model.cache_bytes(row.inputs + row.outputs / 2) / READ_BYTES_PER_S
    seconds = model.prefill_seconds(row) + (row.outputs - 1) * step_ms / 1e3
    return step_ms, row.requests * row.outputs / seconds


def _products_ms(model: FloorModel, num_rows: int) -> float:
    """The better of the exact number of rows and one rounded up to 16, which some products prefer."""
    times: list[float] = []
    failures: list[RuntimeError] = []
    for rows in sorted({num_rows, -(-num_rows // 16) * 16}):
        try:
            times.append(graph_ms(_pass(model, rows)))
        except RuntimeError as error:  # a library may refuse a size
            failures.append(error)
    if not times:
        raise failures[0]
    return min(times)


def _pass(model: FloorModel, rows: int) -> Callable[[], None]:
    matrices = [*model.layers, model.head]
    device = _data(model.head).device
    inputs: dict[tuple[int, torch.dtype], Tensor] = {}
    for matrix in matrices:
        data = _data(matrix)
        wanted = (data.shape[1], data.dtype)
        if wanted not in inputs:
            inputs[wanted] = torch.randn(rows, data.shape[1], device=device, dtype=torch.bfloat16).to(data.dtype)
    one = torch.ones((), device=device)

    def run() -> None:
        for matrix in matrices:
            data = _data(matrix)
            x = inputs[data.shape[1], data.dtype]
            if data.dtype == torch.float8_e4m3fn:
                torch._scaled_mm(x, data.t(), one, one, out_dtype=torch.bfloat16)  # pyright: ignore
            else:
                F.linear(x, data)

    return run


def _data(matrix: Matrix) -> Tensor:
    return matrix.data


def graph_ms(work: Callable[[], None], repeats: int = 10) -> float:
    """Median time of a replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
