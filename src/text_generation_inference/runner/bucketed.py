"""One rank whose steps all have shapes of a bucket plan, for devices that make one graph for each shape.

The same contract as `runner.Runner`. Prompts and decode rows of a step are two padded passes. What is known of
each request is kept on the host: a pass gets tensors of its bucket's shape and nothing else, so nothing that happens
between passes has a shape of its own. A prompt is computed whole and nothing of it is cached before.
"""

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.devices.buckets import Bucket, BucketPlan
from text_generation_inference.devices.device import Device
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.block_lists import BlockLists, WholePrompts
from text_generation_inference.models.model import Model
from text_generation_inference.runner.grammar import SlotGrammars
from text_generation_inference.runner.padded_inputs import HostBooks, describe_decode, describe_prefill
from text_generation_inference.runner.padded_passes import PaddedPasses
from text_generation_inference.sampling.mask import RowMasks
from text_generation_inference.sampling.parts import KnownTokens
from text_generation_inference.sampling.sampled_tokens import SampledTokens
from text_generation_inference.sampling.sampler import Sampler
from text_generation_inference.text.grammar import GrammarCompiler
from text_generation_inference.types import BucketStats, Chunk, PromptLogprobs, StepPlan, StepResult, TopTokens


@dataclass(slots=True)
class _Pass:
    """Rows that were computed together, and their tokens."""

    slots: list[int]
    sampled: SampledTokens
    masks: RowMasks | None


class BucketedRunner:
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
        self.device = device
        self.model = model
        model.bind(kv_cache, max_total_tokens)
        self.passes = PaddedPasses(device, model, kv_cache, plan, limit_graphs)
        self.books = HostBooks(num_slots, max_total_tokens, kv_cache[0][0].shape[1])
        self._tokens = np.zeros((num_slots, max_total_tokens), dtype=np.int64)
        vocab_size = model.vocab_size
        known = KnownTokens(self._tokens, self.books.lengths)
        self.sampler = Sampler(device.ops, device.torch_device, known, vocab_size, watermark, pads=True)
        self.grammars = SlotGrammars(grammars, num_slots, vocab_size)
        self._decode_slots: list[int] = []
        self._prompt_logprobs: set[int] = set()  # slots whose prompt is to be scored

    @property
    def bucket_stats(self) -> BucketStats:
        return self.passes.stats

    def launch(self, plan: StepPlan) -> "Future[StepResult]":
        """Start a step; steps run in the order of launching."""
        return self.device.submit(lambda: self.execute(plan))

    def warm(self, bucket: Bucket, scored: bool = False) -> None:
        """Meet a shape with a pass that is all padding, and the choice of tokens that follows it.

        Where steps run, as there is what they will find: on some devices each thread has its own.
        """
        self.device.submit(lambda: self._warm(bucket, scored)).result()

    @torch.inference_mode()
    def _warm(self, bucket: Bucket, scored: bool) -> None:
        batch = self._prefill_batch(bucket, []) if bucket.phase == "prefill" else self._decode_batch(bucket, [])
        few_layers = not self.device.limits.graphs  # then nothing is compiled, layer by layer or as a whole
        self.sampler.warm(self.passes.warm(bucket, batch, few_layers))
        if scored:
            self.passes.warm_scores(batch, few_layers).tolist()

    @torch.inference_mode()
    def touch(self, bucket: Bucket) -> None:
        """Run a shape through few layers, without a graph."""
        batch = self._prefill_batch(bucket, []) if bucket.phase == "prefill" else self._decode_batch(bucket, [])
        self.passes.touch(batch)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        self._update(plan)
        done: list[_Pass] = []
        rows: list[int] = []
        if plan.decode:
            rows += self._decode_slots
            done.append(self._decode(rows))
        num_decode = len(rows)
        rows += [chunk.slot for chunk in plan.chunks]
        prompts: list[PromptLogprobs] = []
        for chunks in self._share_passes(plan.chunks):
            slots = [chunk.slot for chunk in chunks]
            scored = slots[0] in self._prompt_logprobs
            ran, logprobs = self._prefill(slots, scored)
            done.append(ran)
            if scored:
                prompts.append(PromptLogprobs(rows.index(slots[0], num_decode), 1, logprobs))
        return self._finish(plan, rows, done, prompts)

    def forget_slots(self) -> None:
        """Every request is admitted anew, after a step that failed half way. Nothing may be in flight."""
        self._decode_slots = []
        self._prompt_logprobs.clear()
        self.grammars.release(range(len(self.books.lengths)))

    def _update(self, plan: StepPlan) -> None:
        self._prompt_logprobs.difference_update(plan.release)
        self.grammars.release(plan.release)
        if plan.leave or plan.join:
            leaving = set(plan.leave)
            self._decode_slots = [slot for slot in self._decode_slots if slot not in leaving] + plan.join
        self.books.update(plan)
        for admission in plan.admit:
            known = admission.request.token_ids + admission.output_ids
            self._tokens[admission.slot, : len(known)] = known
            self.sampler.admit(admission)
            self.grammars.admit(admission)
            if admission.request.sampling.decoder_input_details and not admission.output_ids:
                self._prompt_logprobs.add(admission.slot)

    def _share_passes(self, chunks: list[Chunk]) -> list[list[Chunk]]:
        """Prompts that are computed together; one that is scored is alone."""
        alone = [[chunk] for chunk in chunks if chunk.slot in self._prompt_logprobs]
        together = [chunk for chunk in chunks if chunk.slot not in self._prompt_logprobs]
        return [*self.passes.group(together), *alone]

    # -- passes ----------------------------------------------------------------------------------------------------

    def _decode(self, slots: list[int]) -> _Pass:
        bucket = self.passes.find_decode(len(slots), self.books.num_blocks(slots))
        logits = self.passes.logits(bucket, self._decode_batch(bucket, slots), len(slots))
        return self._choose(logits, slots)

    def _prefill(self, slots: list[int], scored: bool) -> tuple[_Pass, list[float]]:
        lengths = self.books.lengths[slots]
        longest = int(lengths.max())
        bucket = self.passes.find_prefill(len(slots), longest) or self.passes.find_alone(longest)
        batch = self._prefill_batch(bucket, slots)
        if not scored:
            return self._choose(self.passes.logits(bucket, batch, int(lengths.sum())), slots), []
        scores = self.passes.score(bucket, batch, longest).cpu()
        self._prompt_logprobs.remove(slots[0])
        return self._choose(scores[None, bucket.length :], slots), scores[: longest - 1].tolist()

    def _prefill_batch(self, bucket: Bucket, slots: list[int]) -> Batch:
        arrays = describe_prefill(bucket, slots, self.books)
        ids = np.where(arrays.token_slots >= 0, self._tokens[arrays.token_slots, arrays.positions], 0)
        input_ids, positions, kv_index, last = self._send(
            np.int64, ids, arrays.positions, arrays.kv_index, arrays.last_tokens
        )
        (seq_lens,) = self._send(np.int32, arrays.seq_lens)
        return Batch(input_ids, positions, kv_index, seq_lens, WholePrompts(), last)

    def _decode_batch(self, bucket: Bucket, slots: list[int]) -> Batch:
        arrays = describe_decode(bucket, slots, self.books)
        ids = np.where(arrays.slots >= 0, self._tokens[arrays.slots, arrays.positions], 0)
        input_ids, positions, kv_index = self._send(np.int64, ids, arrays.positions, arrays.kv_index)
        seq_lens, *lists = self._send(
            np.int32, arrays.seq_lens, arrays.block_list, arrays.block_groups, arrays.block_usage, arrays.row_starts
        )
        return Batch(input_ids, positions, kv_index, seq_lens, BlockLists(*lists))

    def _send(self, dtype: type[np.integer], *arrays: np.ndarray) -> list[Tensor]:
        where = self.device.torch_device
        return [torch.from_numpy(array.astype(dtype)).to(where) for array in arrays]  # pyright: ignore

    def _choose(self, logits: Tensor, slots: list[int]) -> _Pass:
        masks = self.grammars.masks(slots)
        return _Pass(slots, self.sampler.choose(logits, slots, masks), masks)

    # -- the result ------------------------------------------------------------------------------------------------

    def _finish(self, plan: StepPlan, rows: list[int], done: list[_Pass], prompts: list[PromptLogprobs]) -> StepResult:
        row_of = {slot: row for row, slot in enumerate(rows)}
        token_ids, logprobs = [0] * len(rows), [0.0] * len(rows)
        tops: list[TopTokens] = []
        errors: dict[int, str] = {}
        for ran in done:
            for slot, token_id, logprob in zip(ran.slots, *ran.sampled.read_tokens(), strict=False):
                row = row_of[slot]
                token_ids[row], logprobs[row] = token_id, logprob
                if logprob != logprob:
                    errors[row] = "the model produced scores that are not finite"
            tops += [TopTokens(row_of[ran.slots[t.row]], t.token_ids, t.logprobs) for t in ran.sampled.read_tops()]
            if ran.masks is not None:
                errors.update({row_of[ran.slots[row]]: text for row, text in ran.masks.errors.items()})
        self._tokens[rows, self.books.lengths[rows]] = token_ids
        self.books.lengths[rows] += 1
        self.grammars.advance(rows, token_ids)
        return StepResult(plan.step, token_ids, logprobs, tops, prompts, list(errors.items()))
