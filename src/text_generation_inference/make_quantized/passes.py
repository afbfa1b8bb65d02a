"""A model's layers, one at a time, over windows of a text.

`Layers` holds one layer of a checkpoint, plain and in float32, and what goes into it for every window: the memory of
one layer and of the residual stream, never that of a model. Ops are those that define what a model computes.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.errors import StartError
from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.kernels.fp8 import apply_scales
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.layers.embedding import RowsOf
from text_generation_inference.layers.experts import Experts
from text_generation_inference.make_quantized.observe import ObservedExperts, Observer, Reached
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.layer import DecoderLayer
from text_generation_inference.models.model import Context
from text_generation_inference.models.registry import build
from text_generation_inference.runner import kv_cache
from text_generation_inference.weights.checkpoint import Checkpoint
from text_generation_inference.weights.declare import Module
from text_generation_inference.weights.load import check_tensors, load_module

_DTYPE = torch.float32


def open_model(config: Config, checkpoint: Checkpoint, device: torch.device, trusts_code: bool = False) -> CausalLM:
    """Without its weights. Raises `StartError` if it has no decoder of its own here."""
    model = build(config, Context(Ops(), device=device, dtype=_DTYPE, trusts_code=trusts_code))
    if not isinstance(model, CausalLM):
        raise StartError("a model that is served through transformers cannot be quantised")
    if model.sight is not None and model.sight.cross_rows:
        raise StartError("a model with layers of cross-attention cannot be quantised: no text reaches them")
    model.adapt(checkpoint.names(), checkpoint.are_equal)
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    check_tensors(model, shapes, model.ignored, str(checkpoint.folder))
    return model


class Layers:
    def __init__(
        self, model: CausalLM, checkpoint: Checkpoint, device: Device, windows: Sequence[Sequence[int]], rows: int
    ) -> None:
        """`windows` are token ids; `rows`: so many windows are computed together."""
        self._model, self._checkpoint, self._device = model, checkpoint, device
        self.observer = Observer(device.torch_device)
        self._prefixes = {id(module): prefix for prefix, module in model.walk()}
        self._windows = [windows[start : start + rows] for start in range(0, len(windows), rows)]
        self._streams: list[Tensor] = []  # of each pass, on the host
        for layer in model.model.layers:
            if isinstance(layer.mlp, Experts):
                pair = (layer.mlp.gate_up, layer.mlp.down)
                layer.mlp.ops = replace(layer.mlp.ops, experts=ObservedExperts(self.observer, pair))
        model.bind([], max(map(len, windows)))

    def __len__(self) -> int:
        return len(self._model.model.layers)

    @property
    def num_passes(self) -> int:
        return len(self._windows)

    def get(self, number: int) -> DecoderLayer:
        return self._model.model.layers[number]

    def prefix(self, number: int) -> str:
        """Of the names of a layer's tensors: the layer's own name comes after it."""
        return self._prefixes[id(self.get(number))]

    def embed(self) -> None:
        """What goes into the first layer."""
        decoder = self._model.model
        embedding = decoder.embedding.head if isinstance(decoder.embedding, RowsOf) else decoder.embedding
        needed = (embedding, decoder.positions, decoder.embedding_norm, decoder.project_in)
        modules = [module for module in needed if module is not None]
        with self._loaded(modules), torch.inference_mode():
            self._streams = [decoder.embed(make_batch(windows, self._device)).cpu() for windows in self._windows]

    @contextmanager
    def loaded(self, number: int) -> Generator[DecoderLayer]:
        """A layer with its weights, and without them afterwards."""
        layer = self.get(number)
        with self._loaded([module for _, module in layer.walk()]), torch.inference_mode():
            spec = self._model.caches(_DTYPE)[layer.number]
            size = self._device.limits.block_size
            blocks = max(sum(-(-len(window) // size) for window in windows) for windows in self._windows)
            (self._cache,) = kv_cache.allocate(self._device, [spec], 1 + blocks)
            yield layer

    @contextmanager
    def _loaded(self, modules: Sequence[Module]) -> Generator[None]:
        device = self._device.torch_device
        try:
            for module in modules:
                for _ in load_module(self._prefixes[id(module)], module, self._checkpoint, _DTYPE, device):
                    pass
            yield
        finally:
            for module in modules:
                for declared in module.declare():
                    setattr(module, declared.attribute, None)

    def look(self, layer: DecoderLayer, only_first: bool = False) -> None:
        """Run all windows as far as the observer wants; what comes out is dropped."""
        for number in range(1 if only_first else self.num_passes):
            try:
                self._run(layer, number)
            except Reached:
                continue

    def advance(self, layer: DecoderLayer) -> None:
        """What the layer makes of all windows goes into the next."""
        for number in range(self.num_passes):
            self._streams[number] = self._run(layer, number).cpu()

    def _run(self, layer: DecoderLayer, number: int) -> Tensor:
        batch = make_batch(self._windows[number], self._device)
        stream = self._streams[number].to(self._device.torch_device)
        table = self._model.tables[layer.number]
        x, residual = layer.forward(stream, None, batch, table, self._cache, None)
        return apply_scales(x) if residual is None else residual + apply_scales(x)


def make_batch(windows: Sequence[Sequence[int]], device: Device) -> Batch:
    """Whole prompts beside each other, in blocks from the second on."""
    size, target = device.limits.block_size, device.torch_device
    counts = [-(-len(window) // size) for window in windows]
    table = torch.zeros((len(windows), max(counts)), dtype=torch.int32)
    places: list[Tensor] = []
    first = 1
    for row, (window, count) in enumerate(zip(windows, counts, strict=True)):
        table[row, :count] = torch.arange(first, first + count)
        places.append(first * size + torch.arange(len(window)))
        first += count
    lengths = [len(window) for window in windows]
    meta = PagedMeta(table.to(target), 0, [0] * len(windows), lengths, max(lengths))
    return device.prepare(
        Batch(
            input_ids=torch.cat([torch.tensor(window) for window in windows]).to(target),
            positions=torch.cat([torch.arange(length) for length in lengths]).to(target),
            kv_index=torch.cat(places).to(target),
            seq_lens=torch.tensor(lengths, dtype=torch.int32).to(target),
            meta=meta,
        )
    )
