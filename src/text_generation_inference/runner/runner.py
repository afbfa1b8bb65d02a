"""One rank: executes plans, in order, and returns results.

A step: the slots are updated from the plan, passes are computed (`paged_steps`, or `bucketed_steps` where every pass
has a shape of a plan), tokens are chosen (on the device or on the host, where the slots are, or on the device for slots
of the host). `launch` returns at once; a step waits for the tokens of the one before only where a grammar, a watermark
or a budget of thoughts must see them, and for slots of the host penalties.
"""

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.failpoints import failpoint
from text_generation_inference.models.model import Model
from text_generation_inference.runner.ahead_sampling import AheadSampling
from text_generation_inference.runner.bucketed_steps import BucketedSteps
from text_generation_inference.runner.cross_pictures import CrossPictures
from text_generation_inference.runner.device_sampling import DeviceSampling
from text_generation_inference.runner.grammar import SlotGrammars
from text_generation_inference.runner.host_sampling import HostSampling, SampledRows
from text_generation_inference.runner.paged_steps import PagedSteps
from text_generation_inference.runner.pictures import SlotPictures
from text_generation_inference.runner.prompt_scores import OwedScores, read_scores
from text_generation_inference.runner.shapes import EXACT, BucketPlan, ShapePlan
from text_generation_inference.runner.slots import Slots
from text_generation_inference.runner.step_pass import ScoredPrompt, StepPass
from text_generation_inference.runner.thinking import ThinkingBudgetState
from text_generation_inference.sampling.mask import RowMasks
from text_generation_inference.sampling.sampled_tokens import SampledTokens
from text_generation_inference.text.grammar import GrammarCompiler
from text_generation_inference.types import GenerationRequest, StepPlan, StepResult, TopTokens


@dataclass(slots=True)
class _SampledPass:
    """The rows of one pass, and their tokens once the step is done."""

    slots: list[int]
    sampled: SampledTokens | SampledRows
    masks: RowMasks | None
    thinking: list[tuple[int, ThinkingBudgetState]]  # by row, of requests that had the slots then


class Runner:
    def __init__(
        self,
        device: Device,
        model: Model,
        kv_cache: list[tuple[Tensor, ...]],
        num_slots: int,
        max_total_tokens: int,
        watermark: tuple[float, float] = (0.5, 2.0),
        grammars: GrammarCompiler | None = None,
        plan: ShapePlan = EXACT,
        limit_graphs: bool = False,  # where every pass is padded, prompts go without graphs
        own_pages: bool = False,  # requests give blocks back while they run: see `SlotState`
        picture_folder: Path | None = None,  # where pixels are
        max_pictures: int | None = None,  # of a request; None: as many as there is room for
        has_beside: bool = False,  # layers that read a window have blocks of their own: see `SlotState`
        max_features: int | None = None,  # of pictures, that are kept; None: as many as the longest request has tokens
    ) -> None:
        self.device, self.model, self.kv_cache = device, model, kv_cache
        num_blocks, block_size = kv_cache[0][0].shape[:2]
        if has_beside:  # those who keep all have not fewer
            num_blocks = max(tensors[0].shape[0] for tensors in kv_cache)
        self.pictures: SlotPictures | None = None
        if model.sight is not None:
            about = (device, model, model.sight, picture_folder)
            crosses = model.sight.cross_rows > 0
            self.pictures = (
                CrossPictures(*about, kv_cache, num_slots, max_pictures, plan)
                if crosses
                else SlotPictures(*about, max_total_tokens if max_features is None else max_features, plan)
            )
        shift_of = self.pictures.shift_of if self.pictures is not None else None
        with device.stream():  # what is filled here is read in this queue
            model.bind(kv_cache, max_total_tokens)
            about = (num_slots, max_total_tokens, num_blocks, block_size, plan.pads, own_pages, shift_of)
            keeps_tokens = device.limits.keeps_tokens and isinstance(plan, BucketPlan)
            self.slots = Slots(device, *about, model.vocab_size, has_beside, keeps_tokens)
        about = (device, self.slots, model.vocabulary, watermark)
        self.sampling: DeviceSampling | HostSampling
        if self.slots.on_device:
            self.sampling = DeviceSampling(*about)
        else:
            self.sampling = AheadSampling(*about) if keeps_tokens else HostSampling(*about, plan.pads)
        self.grammars = SlotGrammars(grammars, num_slots, model.vocab_size)
        self._owed = OwedScores()
        self._last: Future[StepResult] | None = None
        parts = (device, model, kv_cache, self.slots, self.sampling, self._owed, self.pictures)
        self.steps: PagedSteps | BucketedSteps
        if isinstance(plan, BucketPlan):
            self.steps = BucketedSteps(*parts, plan, limit_graphs)
        else:
            self.steps = PagedSteps(*parts, max_total_tokens, plan)

    def launch(self, plan: StepPlan) -> "Future[StepResult]":
        """Start a step; steps run in the order of launching."""
        previous = self._last
        self._last = self.device.launch(lambda: self._queue(plan, previous))
        if isinstance(self.sampling, DeviceSampling):
            self.sampling.read_by(self._last)
        return self._last

    def forget(self) -> None:
        """Every request, after a step that failed half way: the scheduler admits all anew, which fills the slots again.

        Nothing may be in flight.
        """
        self._last = None  # a failed one holds tensors
        everybody = range(self.slots.state.rows.shape[0])
        self.grammars.release(everybody)
        self.sampling.release(everybody)
        self._owed.forget()
        if self.pictures is not None:
            self.pictures.forget()
        self.device.free_bytes()  # gives back what an allocator keeps for later
        with torch.inference_mode(), self.device.stream():
            self.slots.forget()

    # -- one step --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _queue(self, plan: StepPlan, previous: "Future[StepResult] | None") -> Callable[[], StepResult]:
        if (failure := _failure_of(previous)) is not None:
            raise failure  # nothing can follow it; other ranks may not even have begun this one
        failpoint("engine.compute")
        if plan.admit or plan.release:
            followed = self.grammars.active or self.sampling.follows_tokens
            if followed or any(_follows_tokens(admission.request) for admission in plan.admit):
                _wait_for(previous)  # its tokens belong to whoever had the slots until now
        self._update(plan)
        encode_s = self._encode(plan)
        decode = self.slots.decode_slots if plan.decode else []
        rows, row_of_prompt = decode, dict[int, int]()
        if plan.chunks:
            row_of_prompt = {chunk.slot: len(decode) + number for number, chunk in enumerate(plan.chunks)}
            rows = decode + [chunk.slot for chunk in plan.chunks if chunk.samples]
        done: list[_SampledPass] = []
        prompts: list[ScoredPrompt] = []
        for made in self.steps.compute(plan):
            prompts += made.prompts
            if made.logits is not None:
                done.append(self._choose(made, previous))
        lost: dict[int, str] = {}  # by slot; slots may be others' when the step is done
        if self.pictures is not None:
            lost = {slot: text for slot in rows if (text := self.pictures.error_of(slot)) is not None}
        return lambda: self._finish(plan, rows, done, prompts, row_of_prompt, lost, encode_s())

    def _encode(self, plan: StepPlan) -> Callable[[], float]:
        """Features of pictures; what that took, once the step is done."""
        pictures = self.pictures
        if pictures is None or not (plan.encode_parts or plan.drop_features):
            return lambda: 0.0
        return self.device.timed(lambda: pictures.encode(plan))

    def _update(self, plan: StepPlan) -> None:
        if plan.release:
            self._owed.release(plan.release)
            self.grammars.release(plan.release)
            self.sampling.release(plan.release)
            if self.pictures is not None:
                self.pictures.release(plan.release)
        self.slots.update(plan)
        for admission in plan.admit:
            self.sampling.admit(admission)
            self.grammars.admit(admission)
            self._owed.admit(admission)
            if self.pictures is not None:
                self.pictures.admit(admission)

    def _choose(self, made: StepPass, previous: "Future[StepResult] | None") -> _SampledPass:
        grammars = self.grammars
        if grammars.active or self.sampling.follows_tokens or grammars.must_see(made.slots):
            _wait_for(previous)
        masks, thinking = grammars.masks(made.slots), grammars.thinking(made.slots)
        return _SampledPass(made.slots, self.sampling.choose(made, masks), masks, thinking)

    # -- when the device is past the step --------------------------------------------------------------------------

    def _finish(
        self,
        plan: StepPlan,
        rows: list[int],
        done: list[_SampledPass],
        prompts: list[ScoredPrompt],
        row_of_prompt: dict[int, int],
        lost: dict[int, str],
        encode_s: float,
    ) -> StepResult:
        scored = [read_scores(row_of_prompt[prompt.slot], prompt.start, prompt.parts) for prompt in prompts]
        token_ids: list[int] = []
        logprobs: list[float] = []
        tops: list[TopTokens] = []
        errors: dict[int, str] = {}
        slots = done[0].slots if len(done) == 1 else [slot for chosen in done for slot in chosen.slots]
        for chosen in done:
            first = len(token_ids)
            ids, values = chosen.sampled.read_tokens()
            token_ids += ids
            logprobs += values
            for found in chosen.sampled.read_tops():
                tops.append(TopTokens(first + found.row, found.token_ids, found.logprobs))
            if chosen.masks is not None:
                errors.update({first + row: text for row, text in chosen.masks.errors.items()})
                self.grammars.advance(chosen.slots, ids)
            for row, state in chosen.thinking:
                state.take(ids[row])
            self.sampling.advance(chosen.slots, ids)
        for row, logprob in enumerate(logprobs):
            if logprob != logprob:
                errors.setdefault(row, "the model produced scores that are not finite")
        if slots != rows:  # passes of a plan come in an order of their own
            order = {slot: row for row, slot in enumerate(rows)}
            places = [order[slot] for slot in slots]
            by_row = sorted(range(len(places)), key=places.__getitem__)
            token_ids, logprobs = [token_ids[n] for n in by_row], [logprobs[n] for n in by_row]
            tops = [TopTokens(places[top.row], top.token_ids, top.logprobs) for top in tops]
            errors = {places[n]: text for n, text in errors.items()}
        errors.update({row: lost[slot] for row, slot in enumerate(rows) if slot in lost} if lost else {})
        return StepResult(plan.step, token_ids, logprobs, tops, scored, list(errors.items()), encode_s=encode_s)


def _follows_tokens(request: GenerationRequest) -> bool:
    """Whether what a request may choose depends on the tokens that its slot is told."""
    return request.sampling.watermark or request.grammar is not None or request.sampling.thinking is not None


def _failure_of(step: "Future[StepResult] | None") -> BaseException | None:
    """What a step has raised, as far as is known."""
    return step.exception() if step is not None and step.done() else None


def _wait_for(step: "Future[StepResult] | None") -> None:
    """Until its tokens are known."""
    if step is not None:
        wait([step])
