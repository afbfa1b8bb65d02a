"""What the libraries of a GPU need for the work of a row and nothing else: a mark to measure an engine by.

The prompts' operations at a rate that the card's products reach; then, for every further token, one pass of
the model's own matrices through the library's products, captured as a graph, and the KV cache's bytes at the rate that
the card copies memory. Norms, rotations, scores of attention, choosing tokens and the host are left out, so an engine
that uses the same products stays above it; one whose products are faster than the library's can pass it, as ours does
for a single row. Rates are known for cards on which they were measured, and for no other.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.bench.results import Row
from text_generation_inference.engine.build import Engine
from text_generation_inference.errors import StartError
from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.layers.cache import AnyCacheSpec, CrossCacheSpec
from text_generation_inference.quant import method as quant_method

Matrix = Tensor | Fp8Weight


class Rates(NamedTuple):
    """Of a card, as measured: copying memory, and large products."""

    read_bytes_per_s: float
    operations_per_s: float
    fp8_operations_per_s: float


# By the name that the driver gives a card.
RATES = {"NVIDIA H200": Rates(4.2e12, 750e12, 1300e12)}


def find_rates(gpu: str) -> Rates:
    """Raises `StartError` for a card that nobody has measured."""
    if gpu not in RATES:
        raise StartError(f"--floor: the rates of {gpu} are unknown; they were measured on {', '.join(RATES)}")
    return RATES[gpu]


@dataclass(slots=True)
class FloorModel:
    """What of a model the floor depends on."""

    caches: Sequence[AnyCacheSpec]
    query_width: int  # of all heads of all layers
    layers: list[Matrix]  # of all layers
    head: Matrix
    rates: Rates

    @classmethod
    def of(cls, engine: Engine, rates: Rates) -> "FloorModel":
        runner: Any = engine.rank.runner
        model = runner.model
        if any(matrix.is_stacked for _, matrix in model.walk() if isinstance(matrix, quant_method.Matrix)):
            raise StartError("--floor is for models without experts: which of them a step reads depends on its tokens")
        if any(isinstance(cache, CrossCacheSpec) for cache in model.caches(model.dtype)):
            raise StartError("--floor is for models without cross-attention: texts pass it by")
        layers = [
            linear.weight
            for layer in model.model.layers
            for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
        ]
        head = (model.head or model.model.embedding).weight
        heads = [layer.attention.heads for layer in model.model.layers]
        query_width = sum(layout.num_heads * layout.head_dim for layout in heads)
        return cls(model.caches(runner.kv_cache[0][0].dtype), query_width, layers, head, rates)

    def cache_bytes(self, context: float) -> float:
        """Read by a decode step for one request."""
        return sum(cache.bytes_per_token * min(context, cache.window or context) for cache in self.caches)

    def prefill_seconds(self, row: Row) -> float:
        products = sum(2 * matrix.shape[0] * matrix.shape[1] for matrix in self.layers)  # per token
        scores = 2 * row.inputs * self.query_width  # half of the square, twice
        in_fp8 = _data(self.layers[0]).dtype == torch.float8_e4m3fn
        rate = self.rates.fp8_operations_per_s if in_fp8 else self.rates.operations_per_s
        return row.requests * row.inputs * (products + scores) / rate


def measure_floor(model: FloorModel, row: Row) -> tuple[float, float]:
    """(ms of the average decode step, output tokens per second over the whole row)."""
    with torch.inference_mode():
        products = _products_ms(model, row.requests)
    cache_bytes = row.requests * model.cache_bytes(row.inputs + row.outputs / 2)
    step_ms = products + 1e3 * cache_bytes / model.rates.read_bytes_per_s
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


def graph_ms(work: Callable[[], object], repeats: int = 10, calls: int = 1) -> float:
    """Median over replays of a graph, for each of the calls that it holds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return statistics.median(times)
