"""The runner of a device that runs ahead, with steps that all have shapes of a bucket plan.

Slots, tokens and their choice are `QueuedRunner`'s; the model's pass becomes one padded pass for prompts and
one for decode rows. What a pass reads beside the slots goes in the step's one copy.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from text_generation_inference.devices.buckets import Bucket, BucketPlan
from text_generation_inference.devices.device import Device
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.block_lists import BlockLists, WholePrompts
from text_generation_inference.models.model import Model
from text_generation_inference.runner.padded_inputs import HostBooks, describe_decode, describe_prefill
from text_generation_inference.runner.padded_passes import PaddedPasses
from text_generation_inference.runner.prompt_scores import PromptScores
from text_generation_inference.runner.queued import QueuedRunner
from text_generation_inference.text.grammar import GrammarCompiler
from text_generation_inference.types import BucketStats, Chunk, StepPlan


class BucketedQueuedRunner(QueuedRunner):
    def __init__(
        self,
        device: Device,
        model: Model,
        kv_cache: list[tuple[Tensor, Tensor]],
        num_slots: int,
        max_total_tokens: int,
        plan: BucketPlan,
        watermark: tuple[float, float] = (0.5, 2.0),
        grammars: GrammarCompiler | None = None,
        limit_graphs: bool = False,
    ) -> None:
        super().__init__(device, model, kv_cache, num_slots, max_total_tokens, watermark, grammars, [])
        self.books = HostBooks(num_slots, max_total_tokens, kv_cache[0][0].shape[1])
        self.books.lengths = self.slots.lengths_cpu  # kept by the slots
        most = max((bucket.batch for bucket in plan.prefill), default=1)
        with device.stream():
            self._prompt_logits = torch.zeros((most, model.vocab_size), dtype=torch.float32, device=device.torch_device)
        self.passes = PaddedPasses(device, model, kv_cache, plan, limit_graphs, self._place_for)

    @property
    def bucket_stats(self) -> BucketStats:
        return self.passes.stats

    def prepare(self, progress: Callable[[str, int, int], None] = lambda *_: None) -> None:
        """Shapes are warmed up one by one."""

    def warm(self, bucket: Bucket, scored: bool = False) -> None:
        """Meet a shape with a pass that is all padding. Without a graph few layers load all there is to load."""
        with torch.inference_mode(), self.device.stream():
            batch = self._prefill_batch(bucket, []) if bucket.phase == "prefill" else self._decode_batch(bucket, [])
            self.passes.warm(bucket, batch, few_layers=True)
            if scored:
                self.passes.warm_scores(batch, few_layers=True)

    def touch(self, bucket: Bucket) -> None:
        """Run a shape through few layers, without a graph."""
        with torch.inference_mode(), self.device.stream():
            batch = self._prefill_batch(bucket, []) if bucket.phase == "prefill" else self._decode_batch(bucket, [])
            self.passes.touch(batch)

    # -- one step --------------------------------------------------------------------------------------------------

    def _update(self, plan: StepPlan) -> None:
        super()._update(plan)
        self.books.update(plan)

    def _compute(
        self, plan: StepPlan, rows: list[int]
    ) -> tuple[Tensor | None, Tensor, list[tuple[int, int, list[PromptScores]]]]:
        if not rows and not plan.chunks:
            return super()._compute(plan, rows)
        if not plan.chunks:
            logits = self._decode_logits(rows)
            row_slots = self.slots.state.rows[: logits.shape[0]]
            return self._take_best(logits, row_slots), row_slots, []
        parts: list[Tensor] = []
        slots: list[int] = []
        if plan.decode:
            slots += self.slots.decode_slots
            parts.append(self._decode_logits(slots)[: len(slots)])
        scored = [chunk for chunk in plan.chunks if chunk.slot in self._prompt_logprobs]
        plain = [chunk for chunk in plan.chunks if chunk.slot not in self._prompt_logprobs]
        for chunks in self.passes.group(plain):
            slots += [chunk.slot for chunk in chunks]
            parts.append(self._prompt_pass(chunks)[: len(chunks)].clone())  # the next one overwrites it
        prompts: list[tuple[int, int, list[PromptScores]]] = []
        for chunk in scored:
            logits, logprobs = self._scored_pass(chunk)
            slots.append(chunk.slot)
            parts.append(logits)
            prompts.append((rows.index(chunk.slot), 1, [PromptScores(logprobs)]))
            del self._prompt_logprobs[chunk.slot]
        logits = torch.cat(parts)
        place = {slot: row for row, slot in enumerate(slots)}
        order = [place[slot] for slot in rows]
        self._staging.put(rows)
        self._staging.put(order)
        row_slots, index = self._staging.send(self.slots.state)
        if order != list(range(len(order))):
            logits = logits[index.long()]
        return self._take_best(logits, row_slots), row_slots, prompts

    # -- passes ----------------------------------------------------------------------------------------------------

    def _decode_logits(self, slots: list[int]) -> Tensor:
        bucket = self.passes.find_decode(len(slots), self.books.num_blocks(slots))
        return self.passes.logits(bucket, self._decode_batch(bucket, slots), len(slots))

    def _prompt_pass(self, chunks: list[Chunk]) -> Tensor:
        longest = max(chunk.end for chunk in chunks)
        bucket = self.passes.find_prefill(len(chunks), longest) or self.passes.find_alone(longest)
        batch = self._prefill_batch(bucket, [chunk.slot for chunk in chunks])
        return self.passes.logits(bucket, batch, sum(chunk.end for chunk in chunks))

    def _scored_pass(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Logits of a prompt's last token `[1, vocab]`, and the log-probabilities of those after the first."""
        bucket = self.passes.find_alone(chunk.end)
        scores = self.passes.score(bucket, self._prefill_batch(bucket, [chunk.slot]), chunk.end)
        return scores[None, bucket.length :], scores[: chunk.end - 1]

    def _prefill_batch(self, bucket: Bucket, slots: list[int]) -> Batch:
        arrays = describe_prefill(bucket, slots, self.books)
        for words in (arrays.token_slots, arrays.positions, arrays.seq_lens, arrays.last_tokens):
            self._staging.put(words)
        token_slots, at, seq_lens, last_tokens = self._staging.send(self.slots.state)
        ids, positions, kv_index, _ = self.device.ops.gather_inputs(self.slots.state, token_slots, at)
        return Batch(ids, positions, kv_index, seq_lens, WholePrompts(), last_tokens.long())

    def _decode_batch(self, bucket: Bucket, slots: list[int]) -> Batch:
        arrays = describe_decode(bucket, slots, self.books)
        for words in (arrays.slots, arrays.block_list, arrays.block_groups, arrays.block_usage, arrays.row_starts):
            self._staging.put(words)
        rows, *lists = self._staging.send(self.slots.state)
        ids, positions, kv_index, seq_lens = self.device.ops.gather_inputs(self.slots.state, rows, None)
        return Batch(ids, positions, kv_index, seq_lens, BlockLists(*lists))

    def _place_for(self, batch: Batch) -> Tensor:
        """Where the logits of a pass go; what is in the place of the other phase stays."""
        rows = batch.seq_lens.shape[0]
        place = self._prompt_logits if isinstance(batch.meta, WholePrompts) else self._logits
        if rows <= place.shape[0]:
            return place[:rows]
        return torch.zeros((rows, place.shape[1]), dtype=torch.float32, device=place.device)
