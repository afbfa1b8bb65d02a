"""Steps as one pass over rows with block tables: as they come, or padded to sizes that are captured.

Decode steps replay a captured pass over a padded number of rows; steps with few prompt tokens replay one over padded
numbers of rows and tokens; others are queued op by op. Where nothing is captured every step has its exact size.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.models.model import Model
from text_generation_inference.runner.cross_pictures import CrossPictures
from text_generation_inference.runner.device_sampling import DeviceSampling
from text_generation_inference.runner.host_sampling import HostSampling
from text_generation_inference.runner.mixed import MOST_CHUNKS, MixedSize, describe
from text_generation_inference.runner.pictures import Seen, SlotPictures
from text_generation_inference.runner.prompt_scores import OwedScores
from text_generation_inference.runner.shapes import Bucket, ShapePlan
from text_generation_inference.runner.slots import Slots
from text_generation_inference.runner.step_pass import ScoredPrompt, StepPass
from text_generation_inference.types import Chunk, StepPlan


@dataclass(slots=True)
class _Captured:
    replay: Callable[[], None]
    logits: Tensor  # [rows, vocab] of this rank's ids, where a replay leaves them


class PagedSteps:
    stats = None  # see `BucketedSteps`

    def __init__(
        self,
        device: Device,
        model: Model,
        kv_cache: list[tuple[Tensor, ...]],
        slots: Slots,
        sampling: DeviceSampling | HostSampling,
        owed: OwedScores,
        pictures: SlotPictures | None,
        max_total_tokens: int,
        plan: ShapePlan,
    ) -> None:
        self.plan = plan
        self._device, self._model, self._kv_cache = device, model, kv_cache
        self._slots, self._sampling, self._owed = slots, sampling, owed
        self._pictures = pictures
        self._max_total_tokens = max_total_tokens
        self._cross = pictures if isinstance(pictures, CrossPictures) else None
        self._captured: dict[tuple[Bucket, bool], _Captured] = {}  # with layers of cross-attention, and without
        self._without: set[Bucket] = set()  # shapes for which there was no room
        num_slots = slots.state.rows.shape[0]
        mixed = [bucket for bucket in plan.shapes if bucket.phase == "mixed"]
        self._mixed = {bucket: MixedSize.of(bucket.batch, bucket.length, num_slots) for bucket in mixed}
        num_words = max((size.num_words for size in self._mixed.values()), default=0)
        self._pads_decode = plan.find("decode", 1, 0) is not None
        num_logits = num_slots if self._pads_decode else 0
        with device.stream():  # what is filled here is read in this queue
            shape = (num_logits, model.vocabulary.width)
            self._logits = torch.zeros(shape, dtype=torch.float32, device=device.torch_device)  # of padded passes
            self._mixed_words = torch.zeros(num_words, dtype=torch.int32, device=device.torch_device)

    # -- before the first request ----------------------------------------------------------------------------------

    def take_news(self) -> list[str]:
        return self._pictures.take_news() if self._pictures is not None else []

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    def captures(self, bucket: Bucket) -> bool:
        return bucket not in self._without

    def go_without(self, bucket: Bucket) -> None:
        """No capture of this shape: there is no room for it."""
        self._without.add(bucket)

    def warm(self, bucket: Bucket, scored: bool = False) -> None:
        """Capture a shape. One that goes without is queued op by op: there is nothing to meet."""
        if not self.captures(bucket):
            return
        with torch.inference_mode():
            if bucket.phase == "mixed":
                size = self._mixed[bucket]
                with self._device.stream():
                    self._mixed_words[: size.num_words].copy_(torch.from_numpy(size.blank()))
            captured = {(bucket, crosses): self._capture(bucket, crosses) for crosses in self._ways(bucket)}
            if bucket.phase == "decode" and isinstance(self._sampling, DeviceSampling):
                self._sampling.capture_draws(bucket.batch, captured[bucket, False].logits)
        self._captured |= captured

    def run_shallow(self, bucket: Bucket) -> None:
        """Run a shape through few layers, without capturing it."""
        with torch.inference_mode(), self._device.stream():
            for crosses in self._ways(bucket):
                self._padded_pass(bucket, self._model.shallow(), crosses)

    @contextmanager
    def few_layers(self) -> Generator[None, None, None]:
        """Inside, steps that are not captured go through few layers: what they compute means nothing."""
        model, self._model = self._model, self._model.shallow()
        try:
            yield
        finally:
            self._model = model

    def _ways(self, bucket: Bucket) -> Sequence[bool]:
        """Without layers that read pictures, and, where rows may have some, with them."""
        return (False, True) if self._cross is not None and bucket.batch else (False,)

    def _capture(self, bucket: Bucket, crosses: bool) -> _Captured:
        self.run_shallow(bucket)  # loads kernels and makes workspaces, which a capture may not
        return _Captured(*self._device.capture(lambda: self._padded_pass(bucket, self._model, crosses)))

    def _padded_pass(self, bucket: Bucket, model: Model, crosses: bool) -> Tensor:
        if bucket.phase == "decode":
            return self._decode_pass(bucket.batch, model, crosses)
        return self._mixed_padded_pass(self._mixed[bucket], model, crosses)

    # -- one step --------------------------------------------------------------------------------------------------

    def compute(self, plan: StepPlan) -> Iterator[StepPass]:
        """Plain rows of slots on the device have their tokens then."""
        decode = self._slots.decode_slots if plan.decode else []
        if plan.chunks:
            yield self._mixed_step(decode, plan.chunks)
            return
        self._slots.send()
        if decode:
            bucket = self.plan.find("decode", len(decode), 0)
            size = bucket.batch if bucket is not None else len(decode)
            crosses = self._cross is not None and self._cross.reads(decode)
            captured = self._captured.get((bucket, crosses)) if bucket is not None else None
            if captured is not None:
                captured.replay()
            logits = captured.logits if captured is not None else self._decode_pass(size, self._model, crosses)
            yield StepPass(decode, logits, self._slots.state.rows[:size], is_decode=True)

    def _mixed_step(self, decode: list[int], chunks: list[Chunk]) -> StepPass:
        sampling = decode + [chunk.slot for chunk in chunks if chunk.samples]
        scored = [chunk for chunk in chunks if chunk.slot in self._owed]
        bucket = None
        seen = self._see(len(decode), chunks)
        if not scored and not seen and len(chunks) <= MOST_CHUNKS:
            bucket = self.plan.find("mixed", len(decode), sum(chunk.end - chunk.start for chunk in chunks))
        crosses = self._cross is not None and self._cross.reads(decode)
        captured = self._captured.get((bucket, crosses)) if bucket is not None else None
        if bucket is not None and captured is not None:
            size = self._mixed[bucket]
            self._slots.put(size.fill(decode, chunks, sampling))
            (words,) = self._slots.send()
            self._mixed_words[: words.shape[0]].copy_(words)
            captured.replay()
            return StepPass(sampling, captured.logits if sampling else None, size.split(self._mixed_words)[2])
        hidden, row_slots = self._mixed_pass(decode, chunks, sampling, scored, seen)
        prompts = self._score(scored, hidden[len(sampling) :])
        logits = None
        if sampling:
            logits = self._sampling.take_best(self._own_logits(self._model, hidden[: len(sampling)]), row_slots)
        return StepPass(sampling, logits, row_slots, prompts)

    def _see(self, num_decode: int, chunks: list[Chunk]) -> list[Seen]:
        """All chunks of a pass, if pictures concern one of them."""
        pictures = self._pictures
        if pictures is None or not any(pictures.concerns(chunk.slot, chunk.start, chunk.end) for chunk in chunks):
            return []
        found: list[Seen] = []
        token = num_decode
        for chunk in chunks:
            found.append(Seen(chunk.slot, chunk.start, chunk.end, token))
            token += chunk.end - chunk.start
        return found

    # -- passes ----------------------------------------------------------------------------------------------------

    def _decode_pass(self, size: int, model: Model, crosses: bool) -> Tensor:
        """Logits `[size, vocab]` of the decode set's next tokens, from what is in the slots alone."""
        row_slots = self._slots.state.rows[:size]
        longest = self._max_total_tokens if self._pads_decode else self._longest(self._slots.decode_slots)
        batch = self._batch(row_slots, None, row_slots, size, longest)
        if self._cross is not None and crosses:
            batch.cross = self._cross.of_rows(row_slots, is_all=True)
        return self._sampling.take_best(self._logits_of(batch, size, model), row_slots)

    def _mixed_padded_pass(self, size: MixedSize, model: Model, crosses: bool) -> Tensor:
        """Logits of a step with prompt tokens, from what is on the device alone."""
        token_slots, at, row_slots, logit_tokens, tiles = size.split(self._mixed_words)
        batch = self._batch(token_slots, at, token_slots[: size.rows], size.rows, self._max_total_tokens)
        batch.logit_tokens = logit_tokens.long()
        batch.meta.prefill_tiles = tiles.view(-1, 5)
        batch.meta.num_prefix_tiles = batch.meta.prefill_tiles.shape[0]  # any of them may be
        if self._cross is not None and crosses:
            batch.cross = self._cross.of_rows(token_slots[: size.rows], is_all=False)
        return self._sampling.take_best(self._logits_of(batch, size.logits, model), row_slots)

    def _mixed_pass(
        self, decode: list[int], chunks: list[Chunk], sampling: list[int], scored: list[Chunk], seen: list[Seen]
    ) -> tuple[Tensor, Tensor]:
        """Hidden states of the sampling rows, then of every token of `scored`; and the slots of the former."""
        inputs = describe(decode, chunks, scored)
        self._slots.put(inputs.token_slots, inputs.positions, inputs.rows, sampling, inputs.logit_tokens, inputs.tiles)
        token_slots, at, rows, row_slots, logit_tokens, tiles = self._slots.send()
        longest = max(self._longest(decode), *(chunk.end for chunk in chunks))
        batch = self._batch(token_slots, at, rows, len(decode), longest)
        batch.logit_tokens, prefill_tiles = self._slots.move((logit_tokens.long(), tiles.view(-1, 5)))
        batch.meta.chunk_starts_cpu = [chunk.start for chunk in chunks]
        batch.meta.chunk_ends_cpu = [chunk.end for chunk in chunks]
        batch.meta.prefill_tiles = prefill_tiles
        batch.meta.num_prefix_tiles = inputs.num_prefix_tiles
        if self._pictures is not None and seen:
            self._pictures.put_into(batch, seen)
        if self._cross is not None and self._cross.reads(inputs.rows):
            batch.cross = self._cross.of_chunks(rows[: len(decode)], decode, seen)
        return self._model.forward(self._device.prepare(batch), self._kv_cache), row_slots

    def _batch(
        self, token_slots: Tensor, at: Tensor | None, row_slots: Tensor, num_decode: int, max_seq_len: int
    ) -> Batch:
        """Tokens of these slots, decode rows first, read from the slots; nothing is said of prompts."""
        ids, positions, kv_index, seq_lens = self._slots.gather(token_slots, at)
        tables, table_rows = self._slots.find_tables(row_slots, max_seq_len)
        # `seq_lens` are those of decode rows; chunks have theirs in the tiles.
        meta = PagedMeta(tables, num_decode, [], [], max_seq_len, table_rows)
        batch = Batch(ids, positions, kv_index, seq_lens, meta)
        if self._slots.state.beside is not None:
            batch.window_index = self._slots.gather_beside(token_slots, at)
            meta.window_tables = self._slots.find_beside(row_slots, max_seq_len)
        return batch

    def _logits_of(self, batch: Batch, count: int, model: Model) -> Tensor:
        """Those of padded passes stay where they are until the next one."""
        hidden = model.forward(self._device.prepare(batch), self._kv_cache)
        return model.logits(hidden, self._logits[:count]) if self._pads_decode else self._own_logits(model, hidden)

    def _own_logits(self, model: Model, hidden: Tensor) -> Tensor:
        """Ops on slots of the device take any type; what samples on the host takes float32."""
        logits = model.logits(hidden)
        return logits if self._slots.on_device else logits.float()

    def _score(self, chunks: list[Chunk], hidden: Tensor) -> list[ScoredPrompt]:
        prompts: list[ScoredPrompt] = []
        first = 0
        for chunk in chunks:
            end = first + chunk.end - chunk.start
            targets = self._slots.state.history(chunk.slot, chunk.end + 1)
            model = self._model
            parts = self._owed.score_chunk(chunk, hidden[first:end], model.logits, model.vocabulary, targets)
            if parts:
                prompts.append(ScoredPrompt(chunk.slot, chunk.start + 1, parts))
            first = end
        return prompts

    def _longest(self, slots: list[int]) -> int:
        return int(self._slots.lengths_cpu[slots].max()) if slots else 0
