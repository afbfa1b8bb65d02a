"""Tokens of slots that are on the device: chosen there, and read by the host when a step is done.

A pass ends with the tokens of the rows that take their best one (`take_best`); for rows that ask for more the choice
follows, captured too where they only draw. Tokens come back in one copy, best ids in another.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.kernels.choice import EVERY_FILTER, SamplingNeeds, Tops
from text_generation_inference.runner.result_words import ResultWords
from text_generation_inference.runner.sampling_needs import SlotNeeds
from text_generation_inference.runner.slots import Slots
from text_generation_inference.runner.step_pass import StepPass
from text_generation_inference.sampling.mask import RowMasks
from text_generation_inference.sampling.sampled_tokens import SampledTokens
from text_generation_inference.sampling.vocabulary import VocabularyPart
from text_generation_inference.types import Admission, StepResult

_FEW_ROWS = 8  # above them the two kernels of a draw without filters are queued: a graph takes the device longer


class DeviceSampling:
    def __init__(
        self, device: Device, slots: Slots, vocabulary: VocabularyPart, watermark: tuple[float, float]
    ) -> None:
        self._device, self._slots, self._vocabulary = device, slots, vocabulary
        num_slots = slots.state.rows.shape[0]
        with device.stream():  # what is filled here is read in this queue
            self._needs = SlotNeeds(device, slots, num_slots, vocabulary, watermark)
            self._out = torch.zeros(2 * num_slots, dtype=torch.int32, device=device.torch_device)
            self._tops = torch.zeros(num_slots, dtype=torch.int32, device=device.torch_device)
        self._out_by_size: dict[int, Tensor] = {}
        self._results = ResultWords(device, num_slots)
        self.captured_draws: dict[int, Callable[[], None]] = {}  # by rows

    @property
    def follows_tokens(self) -> bool:
        """Whether some slot's scores depend on tokens that the host must have seen."""
        return self._needs.follows_tokens

    def admit(self, admission: Admission) -> None:
        self._needs.admit(admission)

    def release(self, slots: Sequence[int]) -> None:
        self._needs.release(list(slots))

    def advance(self, slots: list[int], token_ids: list[int]) -> None:
        self._needs.advance(slots, token_ids)

    def take_best(self, logits: Tensor, row_slots: Tensor) -> Tensor:
        """The tokens of plain rows go into the slots and to where all results of the step are."""
        size = row_slots.shape[0]
        state, out = self._slots.state, self._out_of(size)
        self._device.ops.greedy_into(logits[:size], row_slots, state, out, self._vocabulary)
        return logits

    def capture_draws(self, size: int, logits: Tensor) -> None:
        """The choice behind a captured pass of a decode step, for batches that ask for nothing but draws.

        With filters too, unless ranks share the vocabulary: which rows must be gathered is said by the batch.
        """
        row_slots = self._slots.state.rows[:size]
        needs = EVERY_FILTER if self._vocabulary.is_whole else SamplingNeeds()

        def draw() -> Tensor:
            state, out = self._slots.state, self._out_of(size)
            self._device.ops.choose_into(logits, row_slots, state, out, needs, self._vocabulary)
            return logits

        with self._device.stream():  # loads kernels and makes workspaces, which a capture may not
            draw()
        self.captured_draws[size] = self._device.capture(draw)[0]

    def choose(self, made: StepPass, masks: RowMasks | None) -> SampledTokens:
        """Queue the choice of tokens for rows that are not plain, and the way of all tokens to the host."""
        assert made.logits is not None
        sampled = self._choose(made, made.logits, masks)
        self._slots.lengths_cpu[made.slots] += 1
        return sampled

    def _choose(self, made: StepPass, logits: Tensor, masks: RowMasks | None) -> SampledTokens:
        slots, size = made.slots, made.row_slots.shape[0]
        needs = self._needs.find(slots, size, masks)
        if needs is None:
            return self._results.fetch(self._out_of(size), len(slots))
        captured = self.captured_draws.get(size) if made.is_decode else None
        if captured is not None and needs.only_draws and (needs.sampling.filters or size <= _FEW_ROWS):
            captured()
            return self._results.fetch(self._out_of(size), len(slots))
        self._needs.bring(needs, masks)
        tops = None
        if needs.top_table is not None:
            count = len(needs.top_rows) * (1 + 2 * needs.top_room)
            if self._tops.shape[0] < count:
                self._tops = torch.zeros(2 * count, dtype=torch.int32, device=self._tops.device)
            tops = self._tops[:count].view(len(needs.top_rows), -1)
            needs.of_order.tops = Tops(needs.top_table, tops)
        state, out = self._slots.state, self._out_of(size)
        self._device.ops.choose_into(logits[:size], made.row_slots, state, out, needs.sampling, self._vocabulary)
        return self._results.fetch(self._out_of(size), len(slots), needs.top_rows, needs.top_limits, tops)

    def warm(self, logits: Tensor) -> None:
        """Kernels of the choice do not depend on the shapes of passes."""

    def read_by(self, reader: "Future[StepResult]") -> None:
        """Whose end frees what the last step fetched into."""
        self._results.read_by(reader)

    def _out_of(self, size: int) -> Tensor:
        """`[2, size]`: where the ops leave what they chose. It stays where it is."""
        found = self._out_by_size.get(size)
        if found is None:
            found = self._out_by_size[size] = self._out[: 2 * size].view(2, size)
        return found
