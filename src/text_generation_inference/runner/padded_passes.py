"""The model's padded passes: through the device's graphs where they are, with figures of the shapes met.

Shared by the runners of devices that run ahead and of those that do not.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.block_lists import Key, key_of, row_length, spread_pictures
from text_generation_inference.models.model import Model
from text_generation_inference.runner.newest_tokens import NewestTokens
from text_generation_inference.runner.prompt_scores import LOGIT_ROWS, PromptScores, score_padded, take_padded
from text_generation_inference.runner.shapes import Bucket, BucketPlan, ShapeStats
from text_generation_inference.types import Chunk

SCORED_TOPS = (8, 100)  # best ids that are found in each place of a prompt that is scored; met in warming up: the first
GRAPH_TOKENS = 8192  # a pass of more is limited by computing, not by launching: a graph would only cost memory


class PaddedPasses:
    def __init__(
        self,
        device: Device,
        model: Model,
        kv_cache: list[tuple[Tensor, ...]],
        plan: BucketPlan,
        limit_graphs: bool = False,  # prompts go without
        outputs: Callable[[Batch], Tensor] | None = None,  # a long-lived place for the logits of a batch
        newest: NewestTokens | None = None,  # that the device has chosen and kept
    ) -> None:
        self.plan = plan
        self.shape_stats = ShapeStats(plan)
        self._model, self._kv_cache, self._outputs = model, kv_cache, outputs
        self._shallow = model.shallow()
        self._newest = newest
        self._device = device
        self._limit_graphs = limit_graphs
        self._has_graphs = device.limits.graphs
        self._without: set[Bucket] = set()  # shapes for whose graphs there was no room
        self._graphs = device.wrap_graphs(self._forward, self._first)
        self._scores = [device.wrap_graphs(partial(self._score, tops)) for tops in SCORED_TOPS]  # without graphs

    def find_prefill(self, chunks: Sequence[Chunk], pictures: int = 0) -> Bucket:
        """The shape for prompts that share a pass; a longer one than planned has a shape of its own. `pictures`: see
        `Bucket`."""
        length, context = max(chunk.end - chunk.start for chunk in chunks), max(chunk.start for chunk in chunks)
        found = self.plan.find("prefill", len(chunks), length, context, pictures)
        return found or Bucket("prefill", len(chunks), length, context, pictures=pictures)

    def group(self, chunks: Sequence[Chunk], pictures: Sequence[int] = ()) -> list[list[Chunk]]:
        """Prompts that share a pass; `pictures`: that each reads."""
        places = self.plan.group([(chunk.end - chunk.start, chunk.start) for chunk in chunks], pictures)
        return [[chunks[place] for place in together] for together in places]

    def find_decode(self, rows: int, blocks: np.ndarray, pictures: int = 0) -> Bucket:
        """The shape for so many rows whose tokens are in these blocks, and that read so many pictures."""
        found = self._find_decode(rows, blocks)
        return self.plan.where_read(found, pictures) or replace(found, pictures=pictures)

    def _find_decode(self, rows: int, blocks: np.ndarray) -> Bucket:
        count = len(blocks)
        listed = self.plan.find("decode", rows, count) or Bucket("decode", rows, count)
        if not self.plan.has_contiguous or len(np.unique(blocks)) < count:  # of two rows: looked at by each
            return listed
        return self.plan.choose_contiguous(listed, rows, int(blocks.max(initial=0)) + 1) or listed

    def captures(self, bucket: Bucket) -> bool:
        """Whether the shape has, or will have, a graph. What is not planned comes once."""
        if not self._has_graphs or bucket in self._without or bucket not in self.shape_stats.planned:
            return False
        return bucket.phase == "decode" or not (self._limit_graphs or bucket.num_tokens > GRAPH_TOKENS)

    def go_without(self, bucket: Bucket) -> None:
        """No graph for this shape: there is no room for it."""
        self._without.add(bucket)

    def logits(self, bucket: Bucket, batch: Batch, needed: int) -> Tensor:
        """`[batch, vocab]` float32 of this rank's ids, good until the next pass of the same phase.

        `needed` tokens are real.
        """
        bypass = not self.captures(bucket)
        self.shape_stats.on_pass(key_of(batch), bucket, needed, bypass and self._has_graphs)
        self._make_room(batch)
        return self._graphs(batch, bypass)

    def score(self, bucket: Bucket, batch: Batch, needed: int, num_top: int) -> Tensor:
        """float32: how likely what follows each token of the pass's first prompt is, and the best ids there, then the
        logits of its last one. Without a graph; one tensor, so that all there is to compute is in the pass."""
        size = next(size for size, tops in enumerate(SCORED_TOPS) if num_top <= tops)
        self.shape_stats.on_pass(_key_of_scores(batch, size), bucket, needed, self._has_graphs)
        self._make_room(batch)
        return self._scores[size](batch, True)

    def read_scores(self, found: Tensor, length: int, count: int, num_top: int) -> tuple[Tensor, PromptScores]:
        """Of what `score` has found: logits of the last token, and the first `count` tokens' scores."""
        end = found.shape[0] - self._model.vocabulary.width
        return self.last_logits(found), take_padded(found[:end].view(length, -1)[:count], num_top)

    def last_logits(self, found: Tensor) -> Tensor:
        """`[1, vocab]` of the last token. Not by [None]: programs tell strides apart, also where there is one row."""
        return found[found.shape[0] - self._model.vocabulary.width :].view(1, -1)

    def warm(self, bucket: Bucket, batch: Batch, few_layers: bool) -> Tensor:
        """Meet a shape for the first time.

        `few_layers`: where no graph is made, few layers are enough to load all that the shape needs.
        """
        self.shape_stats.warmed.add(key_of(batch))
        self._make_room(batch)
        if self.captures(bucket):
            return self._graphs(batch)
        return self._first(batch) if few_layers else self._graphs(batch, True)

    def warm_scores(self, batch: Batch, few_layers: bool) -> Tensor:
        """The same for a prompt whose tokens are scored."""
        self.shape_stats.warmed.add(_key_of_scores(batch, 0))
        self._make_room(batch)
        return self._score(SCORED_TOPS[0], batch, few_layers) if few_layers else self._scores[0](batch, True)

    def run_shallow(self, batch: Batch) -> None:
        """Run a shape through few layers, without a graph: to compile and load what it needs."""
        self._make_room(batch)
        self._first(batch)

    @property
    def num_captured(self) -> int:
        return self._graphs.num_captured

    def _make_room(self, batch: Batch) -> None:
        if self._newest is not None:
            self._newest.make_room(len(batch.seq_lens if batch.places is None else batch.places))

    def _prepare(self, batch: Batch) -> Batch:
        batch = self._device.prepare(batch)
        if batch.picture_lists is not None:
            batch = spread_pictures(batch, self._device.limits.block_size, self._device.prepare)
        return batch if self._newest is None else self._newest.read(batch)

    def _forward(self, batch: Batch) -> Tensor:
        return self._logits(batch, self._model.forward(self._prepare(batch), self._kv_cache))

    def _score(self, num_top: int, batch: Batch, few_layers: bool = False) -> Tensor:
        """`[length * (1 + 2 * num_top) + vocab]`: see `score`."""
        model = self._shallow if few_layers else self._model
        length = row_length(batch)
        wanted = torch.arange(length, device=batch.input_ids.device)  # all tokens of the first prompt
        assert batch.following is not None and batch.logit_tokens is not None
        hidden = model.forward(self._prepare(replace(batch, logit_tokens=wanted)), self._kv_cache)  # [length, hidden]
        found: list[Tensor] = []
        for start in range(0, length, LOGIT_ROWS):
            rows = slice(start, min(start + LOGIT_ROWS, length))
            scores = model.logits(hidden[rows]).float()
            found.append(score_padded(scores, batch.following[rows], num_top, model.vocabulary).flatten())
        last = hidden.index_select(0, batch.logit_tokens[:1])
        return torch.cat((*found, model.logits(last).float()[0]))

    def _first(self, batch: Batch) -> Tensor:
        return self._logits(batch, self._shallow.forward(self._prepare(batch), self._kv_cache))

    def _logits(self, batch: Batch, hidden: Tensor) -> Tensor:
        if self._outputs is not None:
            return self._model.logits(hidden, self._outputs(batch))
        return self._model.logits(hidden).float()


def _key_of_scores(batch: Batch, size: int) -> Key:
    """That of a pass which wants as many logits as a prompt has tokens, and how many of the best ids."""
    return tuple({**dict(key_of(batch)), "logit_tokens": (row_length(batch), SCORED_TOPS[size])}.items())
