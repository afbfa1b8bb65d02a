"""One rank: executes plans, in order, and returns results.

Holds the model, the cache, the slots and their grammars. `launch` returns at once; the result is waited for
later, so that the next plan is made while this one runs.
"""

from concurrent.futures import Future

import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.failpoints import failpoint
from text_generation_inference.models.model import Model
from text_generation_inference.runner.grammar import SlotGrammars
from text_generation_inference.runner.inputs import build_batch
from text_generation_inference.runner.prompt_scores import PromptScores, read_scores, score
from text_generation_inference.runner.slots import Slots
from text_generation_inference.sampling.parts import KnownTokens
from text_generation_inference.sampling.sampler import Sampler
from text_generation_inference.text.grammar import GrammarCompiler
from text_generation_inference.types import Chunk, PromptLogprobs, StepPlan, StepResult

_LOGIT_ROWS = 128  # prompt positions whose logits are held at a time


class Runner:
    def __init__(
        self,
        device: Device,
        model: Model,
        kv_cache: list[tuple[Tensor, Tensor]],
        num_slots: int,
        max_total_tokens: int,
        watermark: tuple[float, float] = (0.5, 2.0),
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.device = device
        self.model = model
        self.kv_cache = kv_cache
        model.bind(kv_cache, max_total_tokens)
        self.slots = Slots(num_slots, max_total_tokens, kv_cache[0][0].shape[1], device.torch_device)
        known = KnownTokens(self.slots.tokens.numpy(), self.slots.lengths_cpu)
        self.sampler = Sampler(device.ops, device.torch_device, known, model.vocab_size, watermark)
        self.grammars = SlotGrammars(grammars, num_slots, model.vocab_size)
        # slot -> prompt tokens and how many of the best ids in their places, while they are owed
        self._prompt_logprobs: dict[int, tuple[int, int]] = {}

    def launch(self, plan: StepPlan) -> "Future[StepResult]":
        """Start a step; steps run in the order of launching."""
        return self.device.submit(lambda: self.execute(plan))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        failpoint("engine.compute")
        self._update(plan)
        prompt_chunks = [chunk for chunk in plan.chunks if chunk.slot in self._prompt_logprobs]
        batch = build_batch(plan, self.slots, prompt_chunks)
        hidden = self.model.forward(batch, self.kv_cache)
        rows = list(self.slots.decode_slots) if plan.decode else []
        rows += [chunk.slot for chunk in plan.chunks if chunk.samples]
        prompts = self._score_prompts(plan, prompt_chunks, hidden[len(rows) :])
        if not rows:
            return StepResult(plan.step, [], [], prompt_logprobs=prompts)
        index = self.slots.decode_index
        if not (plan.decode and len(rows) == index.shape[0]):
            index = torch.tensor(rows, dtype=torch.int64, device=self.slots.device)
        logits = self.model.logits(hidden[: len(rows)]).float()
        masks = self.grammars.masks(rows)
        sampled = self.sampler.choose(logits, rows, masks)
        self.slots.append(rows, index, sampled.token_ids)
        token_ids, logprobs = sampled.read_tokens()
        errors = {
            row: "the model produced scores that are not finite"
            for row, logprob in enumerate(logprobs)
            if logprob != logprob
        }
        if masks is not None:
            errors.update(masks.errors)
            self.grammars.advance(rows, token_ids)
        return StepResult(plan.step, token_ids, logprobs, sampled.read_tops(), prompts, list(errors.items()))

    def _update(self, plan: StepPlan) -> None:
        for slot in plan.release:
            self._prompt_logprobs.pop(slot, None)
        self.grammars.release(plan.release)
        self.slots.update(plan)
        for admission in plan.admit:
            self.sampler.admit(admission)
            self.grammars.admit(admission)
            if admission.request.sampling.decoder_input_details and not admission.output_ids:
                wanted = (len(admission.request.token_ids), admission.request.sampling.prompt_top_n_tokens)
                self._prompt_logprobs[admission.slot] = wanted

    def _score_prompts(self, plan: StepPlan, chunks: list[Chunk], hidden: Tensor) -> list[PromptLogprobs]:
        """Log-probabilities of the prompt tokens that follow each chunk token. hidden `[chunk tokens, hidden]`."""
        scored: list[PromptLogprobs] = []
        num_decode = len(self.slots.decode_slots) if plan.decode else 0
        row_of = {chunk.slot: num_decode + number for number, chunk in enumerate(plan.chunks)}
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
                scored.append(read_scores(row_of[chunk.slot], chunk.start + 1, parts))
            if chunk.samples:
                del self._prompt_logprobs[chunk.slot]
            first += chunk.end - chunk.start
        return scored
