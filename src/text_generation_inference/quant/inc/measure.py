"""Measures a model while it runs: the largest values of every matrix, of its inputs, and of what attention multiplies.

`Recorder` looks at the matrices and caches of a model that computes in its own type; every pass afterwards
counts, whoever asked for it. Rows of padding do not. What was measured goes to the files of `files`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from text_generation_inference.errors import EngineError, StartError
from text_generation_inference.kernels.matrices import Rows, plain
from text_generation_inference.quant.cache_scales import CacheScales
from text_generation_inference.quant.inc.config import HEAD, KV_CACHE, LINEAR, MATMUL, CalibrationConfig
from text_generation_inference.quant.inc.files import Node, Nodes, check_writable, move_away, write_statistics
from text_generation_inference.quant.method import Matrix, Method

_ROWS_AT_A_TIME = 1024


class _Maxima:
    """The largest absolute values so far of one tensor: of all of it, or by its last dimension."""

    def __init__(self, by_channel: bool) -> None:
        self._by_channel = by_channel
        self._value: Tensor | None = None

    def add(self, x: Tensor, real: Tensor | None = None) -> None:
        """x `[rows, channels]`; of rows that are not `real` (`[rows]` bool) nothing is taken."""
        sizes = x.abs()
        if real is not None:
            sizes = sizes.masked_fill(~real[:, None], 0)
        found = (sizes.amax(0) if self._by_channel else sizes.amax()).float()
        self._value = found if self._value is None else torch.maximum(self._value, found)

    def read(self) -> list[float]:
        return [] if self._value is None else self._value.reshape(-1).tolist()


class _Measured:
    """One node: what goes into a module, what comes out, and its matrix."""

    def __init__(self, config: CalibrationConfig, num_inputs: int = 1) -> None:
        self._config = config
        self._num_inputs = num_inputs
        self.params: dict[str, list[float]] = {}
        self.reset()

    def reset(self) -> None:
        self.inputs, self.outputs = self._make("inputs", self._num_inputs), self._make("outputs", 1)

    def _make(self, what: str, count: int) -> list[_Maxima]:
        by_channel = self._config.observer != "maxabs"
        return [] if what in self._config.excluded else [_Maxima(by_channel) for _ in range(count)]

    def add(self, inputs: Sequence[Tensor], real: Tensor | None, outputs: Sequence[Tensor] = ()) -> None:
        for maxima, tensors in ((self.inputs, inputs), (self.outputs, outputs)):
            for each, x in zip(maxima, tensors, strict=False):
                each.add(x, real)

    def read(self) -> Node:
        inputs, outputs = ([each.read() for each in maxima] for maxima in (self.inputs, self.outputs))
        return Node(inputs if all(inputs) else [], [found for found in outputs if found], self.params)


class MeasuredModel(Protocol):
    forward: Any

    def walk(self) -> Any: ...

    def without_shortcuts(self) -> None: ...


class Recorder:
    """Created once, for a model whose passes are not captured."""

    def __init__(self, model: MeasuredModel, config: CalibrationConfig, block_size: int) -> None:
        self._config = config
        self._block_size = block_size
        self._nodes: dict[str, _Measured] = {}
        self._real = self._real_logits = torch.ones(0, dtype=torch.bool)  # rows of the present pass that are no padding
        self._has_backup = False
        self._num_saved = 0
        self.num_passes = 0
        model.without_shortcuts()  # tokens that nobody asked for are inputs of the last matrices as well
        check_writable(config.stats)
        self._watch(model)
        if not self._nodes:
            raise StartError(f"{config.source}: the lists leave nothing of this model to be measured")

    def reset(self) -> None:
        """Forget inputs and outputs; matrices stay as they are."""
        self.num_passes = self._num_saved = 0
        for node in self._nodes.values():
            node.reset()

    @property
    def is_due(self) -> bool:
        """Whether enough passes have been made since the last `save` for the next, where there is such a number."""
        every = self._config.save_every
        return every > 0 and self.num_passes - self._num_saved >= every

    @property
    def has_news(self) -> bool:
        return self.num_passes > self._num_saved

    def read(self) -> Nodes:
        nodes: Nodes = {}
        for path, measured in self._nodes.items():
            node = measured.read()
            values = [value for maxima in (*node.inputs, *node.outputs, *node.params.values()) for value in maxima]
            if not all(value < float("inf") for value in values):
                raise EngineError(f"{path} has values that are not finite: this model cannot be measured")
            nodes[path] = node
        return nodes

    def save(self) -> Path:
        """Write what was measured so far. Files of an earlier measurement are moved away first."""
        nodes = self.read()
        if not self._has_backup:
            move_away(self._config.stats)
            self._has_backup = True
        self._num_saved = self.num_passes
        return write_statistics(self._config.stats, self._config.observer, nodes)

    # -- between the modules ---------------------------------------------------------------------------------------

    def _watch(self, model: MeasuredModel) -> None:
        for prefix, module in model.walk():
            if isinstance(module, Matrix) and module.is_multiplied and module.is_measured:
                self._watch_matrix(module, prefix)
            elif any(isinstance(child, CacheScales) for child in module.children()):
                self._watch_attention(module, prefix + module.name)
            elif hasattr(module, "look_within"):
                self._watch_experts(module, prefix + module.name)
        forward = model.forward

        def counted(batch: Any, kv_cache: list[tuple[Tensor, ...]]) -> Tensor:
            self._real = self._real_logits = batch.kv_index >= self._block_size  # padding goes to the first block
            if batch.logit_tokens is not None:
                self._real_logits = self._real[batch.logit_tokens]
            self.num_passes += 1
            return forward(batch, kv_cache)

        model.forward = counted

    def _add(self, kind: str, path: str, num_inputs: int = 1) -> _Measured | None:
        if not self._config.selects(kind, path):
            return None
        if path not in self._nodes:  # experts of one tensor have one name
            self._nodes[path] = _Measured(self._config, num_inputs)
        return self._nodes[path]

    def _watch_matrix(self, matrix: Matrix, prefix: str) -> None:
        names = matrix.names(prefix) if matrix.may_round else [HEAD]
        sizes = [part.local_shape[0] for part in matrix.parts]
        nodes = [self._add(LINEAR, name) for name in names]
        for node, rows in zip(nodes, plain(matrix.weight).split(sizes), strict=True):
            self._take_weight(node, rows)
        matrix.method = _Observed(matrix.method, self, nodes, sizes)

    def _watch_experts(self, experts: Any, path: str) -> None:
        """All experts of a layer share one scale of inputs, so what goes into any counts for each: those that no token
        was for have one, too."""
        watched: list[list[_Measured]] = []
        for matrix in (experts.gate_up, experts.down):
            sizes = [part.local_shape[0] for part in matrix.parts]
            found = [self._add(LINEAR, name) for name in matrix.names(f"{path}.")]
            for node, rows in zip(found, plain(matrix.weight).split(sizes), strict=True):
                self._take_weight(node, rows)
            watched.append([node for node in found if node is not None])
        forward = experts.forward

        def measured(x: Tensor) -> Any:
            out = forward(x)
            *inputs, tokens = experts.look_within(x)
            real = self._real if self._real.shape[0] == x.shape[0] else torch.ones_like(x[:, 0], dtype=torch.bool)
            real = real[tokens.clamp(min=0)] & (tokens >= 0)
            for nodes, rows in zip(watched, inputs, strict=True):
                for node in nodes:
                    node.add([rows], real)
            return out

        experts.forward = measured

    def _watch_attention(self, attention: Any, path: str) -> None:
        """The cache, and both products: of queries and keys, of weights and values."""
        k_node, v_node = (self._add(KV_CACHE, f"{path}.{side}_cache") for side in ("k", "v"))
        qk_node, av_node = (self._add(MATMUL, f"{path}.{name}", 2) for name in ("matmul_qk", "matmul_av"))
        forward, attend = attention.forward, attention.ops.attention
        queries: list[Tensor] = []

        def seen(q: Tensor, *given: Any, **more: Any) -> Tensor:
            queries[:] = [q.flatten(1)]
            return attend(q, *given, **more)

        def measured(x: Any, batch: Any, cos_sin: Tensor, caches: tuple[Tensor, ...], wanted: Any = None) -> Any:
            out = forward(x, batch, cos_sin, caches, wanted)
            size, index = self._block_size, batch.kv_index
            keys, values = (
                cache[index // size, index % size].flatten(1) for cache in caches
            )  # keys as they are turned
            self._take(k_node, keys, keys, self._real)
            self._take(v_node, values, values, self._real)
            if queries and index.shape[0]:
                q, real = queries.pop(), self._real
                if qk_node is not None:
                    qk_node.add([q, keys], real)
                if av_node is not None:  # no weight is larger than 1, and that of a first token is 1
                    av_node.add([torch.ones_like(values[:, :1]), values], real)
            return out

        attention.ops, attention.forward = replace(attention.ops, attention=seen), measured

    def take_product(self, nodes: list[_Measured | None], sizes: list[int], x: Rows, out: Tensor) -> None:
        for node, columns in zip(nodes, out.split(sizes, dim=1), strict=True):
            self._take(node, x, columns, self._real)

    def take_logits(self, node: _Measured | None, hidden: Tensor, out: Tensor) -> None:
        self._take(node, hidden, out, self._real_logits)

    def _take(self, node: _Measured | None, x: Any, out: Tensor, real: Tensor) -> None:
        if node is None or not x.shape[0]:
            return
        known = real if real.shape[0] == x.shape[0] else None  # else it is a piece, which has no padding
        node.add([x], known, [out])

    def _take_weight(self, node: _Measured | None, weight: Tensor) -> None:
        if node is None or "params" in self._config.excluded:
            return
        # A channel of a matrix is one of its outputs. A few at a time: the cache has taken the memory there was.
        largest = torch.cat([rows.abs().amax(1).float() for rows in weight.split(_ROWS_AT_A_TIME)])
        largest = largest if self._config.observer != "maxabs" else largest.amax(0, True)
        if (known := node.params.get("weight")) is not None:
            largest = torch.maximum(largest, torch.tensor(known, device=largest.device))
        node.params["weight"] = largest.tolist()


class _Observed(Method):
    """A matrix's method, and what goes through it."""

    def __init__(self, method: Method, recorder: Recorder, nodes: list[_Measured | None], sizes: list[int]) -> None:
        self._method = method
        self._recorder = recorder
        self._nodes = nodes  # of the parts
        self._sizes = sizes

    def apply(self, matrix: Matrix, x: Rows) -> Tensor:
        out = self._method.apply(matrix, x)
        self._recorder.take_product(self._nodes, self._sizes, x, out)
        return out

    def logits(self, matrix: Matrix, hidden: Tensor, out: Tensor | None) -> Tensor:
        result = self._method.logits(matrix, hidden, out)
        self._recorder.take_logits(self._nodes[0], hidden, result)
        return result
