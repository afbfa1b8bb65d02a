"""One rank on a device that runs ahead: queues steps without waiting for any.

The same contract as `runner.Runner`. Decode steps replay a captured pass over a padded number of rows; steps
with few prompt tokens replay one over padded numbers of rows and tokens, others are queued op by op. A pass ends with
the tokens of the rows that take their best one; for rows that ask for more the choice follows, captured too where they
only draw. What a step needs from the host goes in one copy, tokens come back in another, best ids in a third.
A step waits for the tokens of the one before only where a grammar must see them.
"""

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.devices.buckets import round_up
from text_generation_inference.devices.device import Device
from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.kernels.choice import Tops
from text_generation_inference.models.model import Model
from text_generation_inference.runner.grammar import SlotGrammars
from text_generation_inference.runner.mixed import MixedSize, describe, find_size
from text_generation_inference.runner.prompt_scores import PromptScores, read_scores, score
from text_generation_inference.runner.resident import ResidentSlots, Staging
from text_generation_inference.runner.result_words import ResultWords
from text_generation_inference.runner.sampling_needs import SlotNeeds
from text_generation_inference.sampling.mask import RowMasks
from text_generation_inference.sampling.sampled_tokens import SampledTokens
from text_generation_inference.text.grammar import GrammarCompiler
from text_generation_inference.types import Chunk, StepPlan, StepResult

_FEW_ROWS = 8  # above them the two kernels of a draw without filters are queued: a graph takes the device longer
_LOGIT_ROWS = 128  # prompt positions whose logits are held at a time


@dataclass(slots=True)
class _Captured:
    replay: Callable[[], None]
    logits: Tensor  # [rows, vocab], where a replay leaves them


class QueuedRunner:
    def __init__(
        self,
        device: Device,
        model: Model,
        kv_cache: list[tuple[Tensor, Tensor]],
        num_slots: int,
        max_total_tokens: int,
        watermark: tuple[float, float] = (0.5, 2.0),
        grammars: GrammarCompiler | None = None,
        capture_sizes: list[int] | None = None,  # None: the device's choice; empty: nothing is captured
        most_tokens: int = 0,  # of a captured step with prompt tokens
    ) -> None:
        self.device = device
        self.model = model
        self.kv_cache = kv_cache
        self._max_total_tokens = max_total_tokens
        shape = (num_slots, model.vocab_size)
        with device.stream():  # what is filled here is read in this queue
            model.bind(kv_cache, max_total_tokens)
            self.slots = ResidentSlots(num_slots, max_total_tokens, kv_cache[0][0].shape[1], device.torch_device)
            self.sampling_needs = SlotNeeds(device, self.slots, num_slots, model.vocab_size, watermark)
            self._staging = Staging(device)
            self._logits = torch.zeros(shape, dtype=torch.float32, device=device.torch_device)  # of decode steps
            self._out = torch.zeros(2 * num_slots, dtype=torch.int32, device=device.torch_device)
            self._tops = torch.zeros(num_slots, dtype=torch.int32, device=device.torch_device)
        self.grammars = SlotGrammars(grammars, num_slots, model.vocab_size)
        self._results = ResultWords(device, num_slots)
        self._last: Future[StepResult] | None = None
        # slot -> prompt tokens and how many of the best ids in their places, while they are owed
        self._prompt_logprobs: dict[int, tuple[int, int]] = {}
        self.sizes = device.decode_sizes(num_slots)
        wanted = self.sizes if capture_sizes is None else capture_sizes
        self._to_capture = {size for size in wanted if 0 < size <= num_slots}
        self.sizes = sorted({*self.sizes, *self._to_capture})
        self._captured: dict[int, _Captured] = {}
        self._captured_draws: dict[int, Callable[[], None]] = {}
        mixed = device.mixed_sizes(num_slots, most_tokens) if self._to_capture else []
        self._mixed_sizes = [MixedSize.of(rows, tokens, num_slots) for rows, tokens in mixed]
        num_words = max((size.num_words for size in self._mixed_sizes), default=0)
        with device.stream():
            self._mixed_words = torch.zeros(num_words, dtype=torch.int32, device=device.torch_device)
        self._captured_mixed: dict[MixedSize, _Captured] = {}

    def prepare(self, progress: Callable[[str, int, int], None] = lambda *_: None) -> None:
        """Capture steps, the largest first: smaller ones fit into its memory."""
        shallow = self.model.shallow()
        mixed, decode = self._mixed_sizes[::-1], sorted(self._to_capture, reverse=True)
        total = len(mixed) + len(decode)
        with torch.inference_mode():
            for done, size in enumerate(mixed, 1):
                with self.device.stream():
                    self._mixed_words[: size.num_words].copy_(torch.from_numpy(size.blank()))
                self._captured_mixed[size] = self._capture(self._padded_mixed_pass, size, shallow)
                progress("capture steps", done, total)
            for done, size in enumerate(decode, len(mixed) + 1):
                self._captured[size] = self._capture(self._decode_pass, size, shallow)
                self._captured_draws[size] = self._capture_draws(size)
                progress("capture steps", done, total)

    def _capture(self, compute: Callable[[Any, Model], Tensor], size: object, shallow: Model) -> _Captured:
        with self.device.stream():  # loads kernels and makes workspaces, which a capture may not
            compute(size, shallow)
        return _Captured(*self.device.capture(lambda: compute(size, self.model)))

    def _capture_draws(self, size: int) -> Callable[[], None]:
        """The choice behind the captured pass of a decode step, for batches that ask for nothing but draws."""
        logits, slots = self._captured[size].logits, self.slots.state.rows[:size]

        def draw() -> Tensor:
            self.device.ops.choose_into(logits, slots, self.slots.state, self._out_of(size))
            return logits

        with self.device.stream():  # as above
            draw()
        return self.device.capture(draw)[0]

    def launch(self, plan: StepPlan) -> "Future[StepResult]":
        """Queue a step; steps run in the order of launching."""
        previous = self._last
        self._last = self.device.launch(lambda: self._queue(plan, previous))
        self._results.read_by(self._last)
        return self._last

    # -- one step --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _queue(self, plan: StepPlan, previous: "Future[StepResult] | None") -> Callable[[], StepResult]:
        followed = self.grammars.active or self.sampling_needs.follows_tokens
        if (followed and (plan.admit or plan.release)) or any(a.request.sampling.watermark for a in plan.admit):
            _wait_for(previous)  # its tokens belong to whoever had the slots until now
        self._update(plan)
        rows = self._decoding(plan) + [chunk.slot for chunk in plan.chunks if chunk.samples]
        logits, row_slots, prompts = self._compute(plan, rows)
        masks, sampled = None, None
        if logits is not None and rows:
            if self.grammars.active or self.sampling_needs.follows_tokens:
                _wait_for(previous)
            masks = self.grammars.masks(rows)
            captured = None if plan.chunks else self._captured_draws.get(row_slots.shape[0])
            sampled = self._choose(logits, rows, row_slots, masks, captured)
            self.slots.lengths_cpu[rows] += 1
        return lambda: self._finish(plan, rows, sampled, masks, prompts)

    def _decoding(self, plan: StepPlan) -> list[int]:
        """Slots of the step's decode rows."""
        return self.slots.decode_slots if plan.decode else []

    def _compute(
        self, plan: StepPlan, rows: list[int]
    ) -> tuple[Tensor | None, Tensor, list[tuple[int, int, list[PromptScores]]]]:
        """(logits of the sampling rows, perhaps of padding after them; their slots on the device; scored prompts).

        Plain rows have their tokens then.
        """
        if plan.chunks:
            prompt_chunks = [chunk for chunk in plan.chunks if chunk.slot in self._prompt_logprobs]
            num_decode = len(self._decoding(plan))
            size = None if prompt_chunks else find_size(self._mixed_sizes, num_decode, plan.chunks)
            if size is not None and size in self._captured_mixed:
                return *self._replay_mixed(size, plan, rows), []
            hidden, row_slots = self._mixed_pass(plan, rows, prompt_chunks)
            prompts = self._score_prompts(plan, prompt_chunks, hidden[len(rows) :])
            if not rows:
                return None, row_slots, prompts
            return self._take_best(self.model.logits(hidden[: len(rows)]), row_slots), row_slots, prompts
        self._staging.send(self.slots.state)
        if not rows:
            return None, self.slots.state.rows[:0], []
        size = round_up(self.sizes, len(rows))
        captured = self._captured.get(size)
        if captured is not None:
            captured.replay()
            logits = captured.logits
        else:
            logits = self._decode_pass(size, self.model)
        return logits, self.slots.state.rows[:size], []

    def _update(self, plan: StepPlan) -> None:
        for slot in plan.release:
            self._prompt_logprobs.pop(slot, None)
        self.grammars.release(plan.release)
        self.sampling_needs.release(plan.release)
        self.slots.update(plan, self._staging)
        for admission in plan.admit:
            self.sampling_needs.admit(admission)
            self.grammars.admit(admission)
            if admission.request.sampling.decoder_input_details and not admission.output_ids:
                wanted = (len(admission.request.token_ids), admission.request.sampling.prompt_top_n_tokens)
                self._prompt_logprobs[admission.slot] = wanted

    def _decode_pass(self, size: int, model: Model) -> Tensor:
        """Logits `[size, vocab]` of the decode set's next tokens, from what is on the device alone."""
        slots = self.slots.state.rows[:size]
        return self._take_best(self._logits_of(self._resident_batch(slots, None, size), size, model), slots)

    def _take_best(self, logits: Tensor, row_slots: Tensor) -> Tensor:
        """The tokens of plain rows go into the slots and to where all results of the step are."""
        size = row_slots.shape[0]
        self.device.ops.greedy_into(logits[:size], row_slots, self.slots.state, self._out_of(size))
        return logits

    def _out_of(self, size: int) -> Tensor:
        """`[2, size]`: where the ops leave what they chose. It stays where it is."""
        return self._out[: 2 * size].view(2, size)

    def _resident_batch(self, slots: Tensor, at: Tensor | None, num_decode: int) -> Batch:
        """Tokens of these slots, decode rows first, read from what is on the device; nothing is said of prompts."""
        state = self.slots.state
        ids, positions, kv_index, seq_lens = self.device.ops.gather_inputs(state, slots, at)
        return Batch(
            input_ids=ids,
            positions=positions,
            kv_index=kv_index,
            seq_lens=seq_lens,  # of decode rows; chunks have theirs in the tiles
            meta=PagedMeta(state.block_tables, num_decode, [], [], self._max_total_tokens, slots[:num_decode]),
        )

    def _logits_of(self, batch: Batch, count: int, model: Model) -> Tensor:
        """Where they stay until the next pass."""
        return model.logits(model.forward(batch, self.kv_cache), self._logits[:count])

    def _replay_mixed(self, size: MixedSize, plan: StepPlan, rows: list[int]) -> tuple[Tensor | None, Tensor]:
        self._staging.put(size.fill(self._decoding(plan), plan.chunks, rows))
        (words,) = self._staging.send(self.slots.state)
        self._mixed_words[: words.shape[0]].copy_(words)
        captured = self._captured_mixed[size]
        captured.replay()
        return captured.logits if rows else None, size.split(self._mixed_words)[2]

    def _padded_mixed_pass(self, size: MixedSize, model: Model) -> Tensor:
        """Logits of a step with prompt tokens, from what is on the device alone."""
        token_slots, at, row_slots, logit_tokens, tiles = size.split(self._mixed_words)
        tiles = tiles.view(-1, 5)
        batch = self._resident_batch(token_slots, at, size.rows)
        batch.logit_tokens = logit_tokens.long()
        batch.meta.prefill_tiles = tiles
        batch.meta.num_prefix_tiles = tiles.shape[0]  # any of them may be
        return self._take_best(self._logits_of(batch, size.logits, model), row_slots)

    def _mixed_pass(self, plan: StepPlan, rows: list[int], prompt_chunks: list[Chunk]) -> tuple[Tensor, Tensor]:
        """Hidden states of the sampling rows, then of every token of `prompt_chunks`; and the slots of the former."""
        decode = self._decoding(plan)
        inputs = describe(decode, plan.chunks, prompt_chunks)
        for words in (inputs.token_slots, inputs.positions, inputs.rows, rows, inputs.logit_tokens, inputs.tiles):
            self._staging.put(words)
        token_slots, at, row_slots, sampling_slots, logit_tokens, tiles = self._staging.send(self.slots.state)
        longest = int(self.slots.lengths_cpu[decode].max()) if decode else 0
        batch = self._resident_batch(token_slots, at, len(decode))
        batch.logit_tokens = logit_tokens.long()
        batch.meta = PagedMeta(
            block_tables=self.slots.state.block_tables,
            num_decode=len(decode),
            chunk_starts_cpu=[chunk.start for chunk in plan.chunks],
            chunk_ends_cpu=[chunk.end for chunk in plan.chunks],
            max_seq_len=max(longest, *(chunk.end for chunk in plan.chunks)),
            table_rows=row_slots,
            prefill_tiles=tiles.view(-1, 5),
            num_prefix_tiles=inputs.num_prefix_tiles,
        )
        return self.model.forward(batch, self.kv_cache), sampling_slots

    def _choose(
        self,
        logits: Tensor,
        rows: list[int],
        row_slots: Tensor,
        masks: RowMasks | None,
        captured_draws: Callable[[], None] | None,
    ) -> SampledTokens:
        """Queue the choice of tokens for rows that are not plain, and the way of all tokens to the host."""
        size = row_slots.shape[0]
        needs = self.sampling_needs.find(rows, size, masks)
        if needs is None:
            return self._results.fetch(self._out_of(size), len(rows))
        worth_it = needs.sampling.filters or size <= _FEW_ROWS
        if captured_draws is not None and needs.only_draws and worth_it:
            captured_draws()
            return self._results.fetch(self._out_of(size), len(rows))
        self.sampling_needs.bring(needs, masks)
        tops = None
        if needs.top_table is not None:
            count = len(needs.top_rows) * (1 + 2 * needs.top_room)
            if self._tops.shape[0] < count:
                self._tops = torch.zeros(2 * count, dtype=torch.int32, device=self._tops.device)
            tops = self._tops[:count].view(len(needs.top_rows), -1)
            needs.sampling.tops = Tops(needs.top_table, tops)
        self.device.ops.choose_into(logits[:size], row_slots, self.slots.state, self._out_of(size), needs.sampling)
        return self._results.fetch(self._out_of(size), len(rows), needs.top_rows, needs.top_limits, tops)

    def _score_prompts(
        self, plan: StepPlan, chunks: list[Chunk], hidden: Tensor
    ) -> list[tuple[int, int, list[PromptScores]]]:
        """Log-probabilities of the prompt tokens that follow each chunk token: (row, first position, values)."""
        num_decode = len(self._decoding(plan))
        row_of = {chunk.slot: num_decode + number for number, chunk in enumerate(plan.chunks)}
        scored: list[tuple[int, int, list[PromptScores]]] = []
        first = 0
        for chunk in chunks:
            num_tokens, num_top = self._prompt_logprobs[chunk.slot]
            last = min(chunk.end, num_tokens - 1)
            parts: list[PromptScores] = []
            for start in range(chunk.start, last, _LOGIT_ROWS):
                end = min(start + _LOGIT_ROWS, last)
                rows = hidden[first + start - chunk.start : first + end - chunk.start]
                scores = self.model.logits(rows).float()
                parts.append(score(scores, self.slots.tokens[chunk.slot, start + 1 : end + 1].long(), num_top))
            if parts:
                scored.append((row_of[chunk.slot], chunk.start + 1, parts))
            if chunk.samples:
                del self._prompt_logprobs[chunk.slot]
            first += chunk.end - chunk.start
        return scored

    # -- on the thread that waits for the device -------------------------------------------------------------------

    def _finish(
        self,
        plan: StepPlan,
        rows: list[int],
        sampled: SampledTokens | None,
        masks: RowMasks | None,
        prompts: list[tuple[int, int, list[PromptScores]]],
    ) -> StepResult:
        scored = [read_scores(row, start, parts) for row, start, parts in prompts]
        if sampled is None:
            return StepResult(plan.step, [], [], prompt_logprobs=scored)
        token_ids, logprobs = sampled.read_tokens()
        errors = {
            row: "the model produced scores that are not finite"
            for row, logprob in enumerate(logprobs)
            if logprob != logprob
        }
        if masks is not None:
            errors.update(masks.errors)
            self.grammars.advance(rows, token_ids)
        self.sampling_needs.advance(rows, token_ids)
        return StepResult(plan.step, token_ids, logprobs, sampled.read_tops(), scored, list(errors.items()))


def _wait_for(step: "Future[StepResult] | None") -> None:
    """Until its tokens are known."""
    if step is not None:
        wait([step])
