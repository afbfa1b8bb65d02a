"""Steps as one pass over rows with block tables: as they come, or padded to sizes that are captured.

Decode steps replay a captured pass over a padded number of rows; steps with few prompt tokens replay one over padded
numbers of rows and tokens; others are queued op by op. Where nothing is captured every step has its exact size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.devices.buckets import round_up
from text_generation_inference.devices.device import Device
from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.models.model import Model
from text_generation_inference.runner.device_sampling import DeviceSampling
from text_generation_inference.runner.host_sampling import HostSampling
from text_generation_inference.runner.mixed import MixedSize, describe, find_size
from text_generation_inference.runner.prompt_scores import OwedScores
from text_generation_inference.runner.slots import Slots
from text_generation_inference.runner.step_pass import ScoredPrompt, StepPass
from text_generation_inference.types import Chunk, StepPlan


@dataclass(slots=True)
class _Captured:
    replay: Callable[[], None]
    logits: Tensor  # [rows, vocab], where a replay leaves them


class PagedSteps:
    def __init__(
        self,
        device: Device,
        model: Model,
        kv_cache: list[tuple[Tensor, Tensor]],
        slots: Slots,
        sampling: DeviceSampling | HostSampling,
        owed: OwedScores,
        max_total_tokens: int,
        capture_sizes: list[int] | None = None,  # None: the device's choice; empty: nothing is captured
        most_tokens: int = 0,  # of a captured step with prompt tokens
    ) -> None:
        self._device, self._model, self._kv_cache = device, model, kv_cache
        self._slots, self._sampling, self._owed = slots, sampling, owed
        self._max_total_tokens = max_total_tokens
        num_slots = slots.state.rows.shape[0]
        sizes = device.decode_sizes(num_slots)
        wanted = sizes if capture_sizes is None else capture_sizes
        self._to_capture = {size for size in wanted if 0 < size <= num_slots} if sizes else set[int]()
        self._sizes = sorted({*sizes, *self._to_capture})
        self._captured: dict[int, _Captured] = {}
        mixed = device.mixed_sizes(num_slots, most_tokens) if self._to_capture else []
        self.mixed_sizes = [MixedSize.of(rows, tokens, num_slots) for rows, tokens in mixed]
        self._captured_mixed: dict[MixedSize, _Captured] = {}
        num_words = max((size.num_words for size in self.mixed_sizes), default=0)
        num_logits = num_slots if sizes else 0
        with device.stream():  # what is filled here is read in this queue
            shape = (num_logits, model.vocab_size)
            self._logits = torch.zeros(shape, dtype=torch.float32, device=device.torch_device)  # of padded passes
            self._mixed_words = torch.zeros(num_words, dtype=torch.int32, device=device.torch_device)

    # -- before the first request ----------------------------------------------------------------------------------

    def prepare(self, progress: Callable[[str, int, int], None] = lambda *_: None) -> None:
        """Capture steps, the largest first: smaller ones fit into its memory."""
        shallow = self._model.shallow()
        mixed, decode = self.mixed_sizes[::-1], sorted(self._to_capture, reverse=True)
        total = len(mixed) + len(decode)
        with torch.inference_mode():
            for done, size in enumerate(mixed, 1):
                with self._device.stream():
                    self._mixed_words[: size.num_words].copy_(torch.from_numpy(size.blank()))
                self._captured_mixed[size] = self._capture(self._padded_mixed_pass, size, shallow)
                progress("capture steps", done, total)
            for done, size in enumerate(decode, len(mixed) + 1):
                captured = self._captured[size] = self._capture(self._decode_pass, size, shallow)
                if isinstance(self._sampling, DeviceSampling):
                    self._sampling.capture_draws(size, captured.logits)
                progress("capture steps", done, total)

    def _capture(self, compute: Callable[[Any, Model], Tensor], size: object, shallow: Model) -> _Captured:
        with self._device.stream():  # loads kernels and makes workspaces, which a capture may not
            compute(size, shallow)
        return _Captured(*self._device.capture(lambda: compute(size, self._model)))

    # -- one step --------------------------------------------------------------------------------------------------

    def compute(self, plan: StepPlan) -> Iterator[StepPass]:
        """Plain rows of slots on the device have their tokens then."""
        decode = self._slots.decode_slots if plan.decode else []
        if plan.chunks:
            yield self._mixed_step(decode, plan.chunks)
            return
        self._slots.send()
        if decode:
            size = round_up(self._sizes, len(decode)) if self._sizes else len(decode)
            captured = self._captured.get(size)
            if captured is not None:
                captured.replay()
            logits = captured.logits if captured is not None else self._decode_pass(size, self._model)
            yield StepPass(decode, logits, self._slots.state.rows[:size], is_decode=True)

    def _mixed_step(self, decode: list[int], chunks: list[Chunk]) -> StepPass:
        sampling = decode + [chunk.slot for chunk in chunks if chunk.samples]
        scored = [chunk for chunk in chunks if chunk.slot in self._owed]
        size = None if scored else find_size(self.mixed_sizes, len(decode), chunks)
        captured = self._captured_mixed.get(size) if size is not None else None
        if size is not None and captured is not None:
            self._slots.put(size.fill(decode, chunks, sampling))
            (words,) = self._slots.send()
            self._mixed_words[: words.shape[0]].copy_(words)
            captured.replay()
            return StepPass(sampling, captured.logits if sampling else None, size.split(self._mixed_words)[2])
        hidden, row_slots = self._mixed_pass(decode, chunks, sampling, scored)
        prompts = self._score(scored, hidden[len(sampling) :])
        logits = None
        if sampling:
            logits = self._sampling.take_best(self._own_logits(self._model, hidden[: len(sampling)]), row_slots)
        return StepPass(sampling, logits, row_slots, prompts)

    # -- passes ----------------------------------------------------------------------------------------------------

    def _decode_pass(self, size: int, model: Model) -> Tensor:
        """Logits `[size, vocab]` of the decode set's next tokens, from what is in the slots alone."""
        row_slots = self._slots.state.rows[:size]
        longest = self._max_total_tokens if self._sizes else self._longest(self._slots.decode_slots)
        batch = self._batch(row_slots, None, row_slots, size, longest)
        return self._sampling.take_best(self._logits_of(batch, size, model), row_slots)

    def _padded_mixed_pass(self, size: MixedSize, model: Model) -> Tensor:
        """Logits of a step with prompt tokens, from what is on the device alone."""
        token_slots, at, row_slots, logit_tokens, tiles = size.split(self._mixed_words)
        batch = self._batch(token_slots, at, token_slots[: size.rows], size.rows, self._max_total_tokens)
        batch.logit_tokens = logit_tokens.long()
        batch.meta.prefill_tiles = tiles.view(-1, 5)
        batch.meta.num_prefix_tiles = batch.meta.prefill_tiles.shape[0]  # any of them may be
        return self._sampling.take_best(self._logits_of(batch, size.logits, model), row_slots)

    def _mixed_pass(
        self, decode: list[int], chunks: list[Chunk], sampling: list[int], scored: list[Chunk]
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
        return self._model.forward(self._device.prepare(batch), self._kv_cache), row_slots

    def _batch(
        self, token_slots: Tensor, at: Tensor | None, row_slots: Tensor, num_decode: int, max_seq_len: int
    ) -> Batch:
        """Tokens of these slots, decode rows first, read from the slots; nothing is said of prompts."""
        ids, positions, kv_index, seq_lens = self._slots.gather(token_slots, at)
        tables, table_rows = self._slots.find_tables(row_slots, max_seq_len)
        # `seq_lens` are those of decode rows; chunks have theirs in the tiles.
        meta = PagedMeta(tables, num_decode, [], [], max_seq_len, table_rows)
        return Batch(ids, positions, kv_index, seq_lens, meta)

    def _logits_of(self, batch: Batch, count: int, model: Model) -> Tensor:
        """Those of padded passes stay where they are until the next one."""
        hidden = model.forward(self._device.prepare(batch), self._kv_cache)
        return model.logits(hidden, self._logits[:count]) if self._sizes else self._own_logits(model, hidden)

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
            parts = self._owed.score_chunk(chunk, hidden[first:end], self._model.logits, targets)
            if parts:
                prompts.append(ScoredPrompt(chunk.slot, chunk.start + 1, parts))
            first = end
        return prompts

    def _longest(self, slots: list[int]) -> int:
        return int(self._slots.lengths_cpu[slots].max()) if slots else 0
