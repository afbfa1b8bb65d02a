"""Tokens of slots that are on the host, chosen on a device that keeps them for the next pass: the host learns them when
the step is done, which may be after the next one was queued.

They are told on the thread that reads results and put into the slots on the one that queues steps, before the next
choice. Penalties and watermarks depend on them: a choice with such waits for the step before, while the pass runs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from text_generation_inference.devices.device import Device
from text_generation_inference.runner.host_sampling import HostSampling
from text_generation_inference.runner.slots import Slots
from text_generation_inference.runner.step_pass import StepPass
from text_generation_inference.sampling.mask import RowMasks
from text_generation_inference.sampling.sampled_tokens import PaddedTokens, SampledTokens
from text_generation_inference.sampling.vocabulary import VocabularyPart
from text_generation_inference.types import Admission, TopTokens


@dataclass(slots=True)
class _Rows:
    """Those that sampled in a pass."""

    slots: np.ndarray
    holders: np.ndarray  # who had the slots then, by number
    places: np.ndarray  # of the tokens among those of the requests


@dataclass(slots=True)
class AheadTokens:
    """`SampledTokens` that the slots are told when they are read."""

    sampled: SampledTokens | PaddedTokens
    rows: _Rows
    tell: Callable[[tuple[_Rows, list[int]]], None]

    def read_tokens(self) -> tuple[list[int], list[float]]:
        token_ids, logprobs = self.sampled.read_tokens()
        count = len(self.rows.slots)
        self.tell((self.rows, token_ids[:count]))
        return token_ids[:count], logprobs[:count]

    def read_tops(self) -> list[TopTokens]:
        return self.sampled.read_tops()


class AheadSampling(HostSampling):
    def __init__(
        self, device: Device, slots: Slots, vocabulary: VocabularyPart, watermark: tuple[float, float]
    ) -> None:
        super().__init__(device, slots, vocabulary, watermark, pads=True)
        num_slots = slots.state.rows.shape[0]
        self._holders = np.zeros(num_slots, dtype=np.int64)
        self._following: set[int] = set()  # slots whose scores depend on tokens
        self._told: deque[tuple[_Rows, list[int]]] = deque()

    @property
    def follows_tokens(self) -> bool:
        return bool(self._following)

    def admit(self, admission: Admission) -> None:
        super().admit(admission)
        slot, params = admission.slot, admission.request.sampling
        self._holders[slot] += 1
        if params.watermark or params.penalises:
            self._following.add(slot)

    def release(self, slots: Sequence[int]) -> None:
        self._holders[list(slots)] += 1
        self._following.difference_update(slots)

    def choose(self, made: StepPass, masks: RowMasks | None) -> AheadTokens:
        """Queue the choice for a pass's sampling rows, and the tokens' way to the host."""
        assert made.logits is not None
        self._learn()
        sampled = self._sampler.choose(made.logits, made.slots, masks)
        slots, lengths = np.array(made.slots, dtype=np.int64), self._slots.lengths_cpu
        rows = _Rows(slots, self._holders[slots], lengths[slots])
        lengths[slots] += 1
        return AheadTokens(sampled, rows, self._told.append)

    def _learn(self) -> None:
        """What was told since: for requests that still have their slots, as others have their blocks otherwise."""
        state = self._slots.state
        last, tables, pages = state.last_tokens.numpy(), state.page_tables.numpy(), state.pages.numpy()
        while self._told:
            rows, token_ids = self._told.popleft()
            stays = self._holders[rows.slots] == rows.holders
            last[rows.slots[stays]] = np.array(token_ids)[stays]
            # One whose block is not there yet is put into its place by the pass that computes it.
            stays &= rows.places < self._slots.rooms[rows.slots]
            slots, places = rows.slots[stays], rows.places[stays]
            size = state.block_size
            pages[tables[slots, places // size], places % size] = np.array(token_ids)[stays]
