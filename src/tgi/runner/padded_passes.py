"""The model's padded passes: through the device's graphs where they are, with a book of the shapes met.

Level 6. Shared by the runners of devices that run ahead and of those that do not.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tgi.devices.buckets import Bucket, BucketPlan
from tgi.devices.device import Device, has_graphs, wrap_graphs
from tgi.kernels.padded import PaddedBatch
from tgi.models.decoder import CausalLM
from tgi.runner.shape_book import ShapeBook
from tgi.types import BucketStats

GRAPH_TOKENS = 8192  # a pass of more is limited by computing, not by launching: a graph would only cost memory


class PaddedPasses:
    def __init__(
        self,
        device: Device,
        model: CausalLM,
        kv_cache: list[tuple[Tensor, Tensor]],
        plan: BucketPlan,
        limit_graphs: bool = False,  # prompts go without
        outputs: Callable[[PaddedBatch], Tensor] | None = None,  # a long-lived place for the logits of a batch
    ) -> None:
        self.plan = plan
        self.book = ShapeBook(plan)
        self._model, self._kv_cache, self._outputs = model, kv_cache, outputs
        self._shallow = model.shallow()
        self._shallow_cache = kv_cache[: len(self._shallow.model.layers)]
        self._limit_graphs = limit_graphs
        self._has_graphs = has_graphs(device)
        self._without: set[Bucket] = set()  # shapes for whose graphs there was no room
        self._graphs = wrap_graphs(device, self._forward, self._first)

    def find_prefill(self, rows: int, longest: int) -> Bucket | None:
        return self.plan.find_prefill(rows, longest)

    def find_alone(self, length: int) -> Bucket:
        """The shape for one prompt; a longer one than planned has a shape of its own."""
        return self.plan.find_prefill(1, length) or Bucket("prefill", 1, length)

    def find_decode(self, rows: int, blocks: int) -> Bucket:
        return self.plan.find_decode(rows, blocks) or Bucket("decode", rows, blocks)

    def captures(self, bucket: Bucket) -> bool:
        """Whether the shape has, or will have, a graph."""
        if not self._has_graphs or bucket in self._without:
            return False
        return bucket.phase == "decode" or not (self._limit_graphs or bucket.num_tokens > GRAPH_TOKENS)

    def go_without(self, bucket: Bucket) -> None:
        """No graph for this shape: there is no room for it."""
        self._without.add(bucket)

    def logits(self, bucket: Bucket, batch: PaddedBatch, needed: int) -> Tensor:
        """`[batch, vocab]` float32, good until the next pass of the same phase; `needed` tokens are real."""
        bypass = not self.captures(bucket)
        self.book.on_pass(batch.key(), bucket, needed, bypass and self._has_graphs)
        return self._graphs(batch, bypass)

    def hidden(self, bucket: Bucket, batch: PaddedBatch, needed: int) -> Tensor:
        """`[tokens, hidden]` of all tokens of prompts, without a graph: to score them."""
        self.book.on_pass(batch.key(), bucket, needed, self._has_graphs)
        return self._model.forward(batch, self._kv_cache)

    def warm(self, bucket: Bucket, batch: PaddedBatch, scored: PaddedBatch | None, few_layers: bool) -> None:
        """Meet a shape for the first time; `scored`: the same with the hidden states of all tokens wanted.

        `few_layers`: where no graph is made, few layers are enough to load all that the shape needs.
        """
        self.book.warmed.add(batch.key())
        if self.captures(bucket):
            self._graphs(batch)
        elif few_layers:
            self._first(batch)
        else:
            self._graphs(batch, True)
        if scored is not None:
            self.book.warmed.add(scored.key())
            model, cache = (self._shallow, self._shallow_cache) if few_layers else (self._model, self._kv_cache)
            model.forward(scored, cache)

    def touch(self, batch: PaddedBatch) -> None:
        """Run a shape through few layers, without a graph: to compile and load what it needs."""
        self._first(batch)

    @property
    def stats(self) -> BucketStats:
        return self.book.stats(self._graphs.num_captured)

    def _forward(self, batch: PaddedBatch) -> Tensor:
        hidden = self._model.forward(batch, self._kv_cache)
        if self._outputs is not None:
            return self._model.logits(hidden, self._outputs(batch))
        return self._model.logits(hidden).float()

    def _first(self, batch: PaddedBatch) -> Tensor:
        hidden = self._shallow.forward(batch, self._shallow_cache)
        return self._model.logits(hidden, None if self._outputs is None else self._outputs(batch))


def score_all(batch: PaddedBatch) -> PaddedBatch:
    """The same prompts with the hidden states of all tokens wanted."""
    wanted = torch.arange(batch.input_ids.shape[0], device=batch.input_ids.device)
    return PaddedBatch(batch.input_ids, batch.positions, batch.kv_index, batch.seq_lens, wanted)
