"""The slots of a device that runs ahead, and the one copy per step that brings it the plan's changes.

The host keeps lengths (to size what is not captured) and which slots are in the decode set.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.devices.device import Device, Event
from text_generation_inference.kernels.slot_state import ADJUSTED, DRAWS, NUMBER_FIELDS, PLAIN, SlotState
from text_generation_inference.types import Admission, GenerationRequest, StepPlan

_NUM_BUFFERS = 4  # steps whose copy may still be under way
_FIRST_WORDS = 1 << 16

Words = Sequence[int] | np.ndarray


class Staging:
    """Collects int32 words on the host and sends them in one copy: changes of the state, and inputs of this step."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._hosts = [device.pinned_int32(_FIRST_WORDS) for _ in range(_NUM_BUFFERS)]
        self._events: list[Event | None] = [None] * _NUM_BUFFERS
        self._next = 0
        self._words = torch.zeros(_FIRST_WORDS, dtype=torch.int32, device=device.torch_device)
        self._places: list[int] = []
        self._writes: list[Words] = []
        self._inputs: list[Words] = []

    def write(self, place: int, words: Words) -> None:
        """Change the state from `place` on."""
        if len(words):
            self._places.append(place)
            self._writes.append(words)

    def put(self, words: Words) -> int:
        """An input of this step: its number among what `send` returns."""
        self._inputs.append(words)
        return len(self._inputs) - 1

    def send(self, state: SlotState) -> list[Tensor]:
        """Queue the copy and the changes; return the inputs on the device, good until the next `send`."""
        places, writes, inputs = self._places, self._writes, self._inputs
        self._places, self._writes, self._inputs = [], [], []
        if not writes and not inputs:
            return []
        parts = writes + inputs
        # Each part begins at 16 bytes: kernels are compiled for aligned inputs, once.
        starts = np.cumsum([4 * len(writes), *(-(-len(part) // 4) * 4 for part in parts)])
        host = self._take_host(int(starts[-1]))
        words = host.numpy()
        headers = words[: 4 * len(writes)].reshape(-1, 4)
        where = np.array(places, dtype=np.int64)
        headers[:, 0] = (where & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
        headers[:, 1] = where >> 32
        headers[:, 2] = starts[: len(writes)]
        headers[:, 3] = [len(part) for part in writes]
        for start, part in zip(starts, parts, strict=False):
            words[start : start + len(part)] = part
        total = int(starts[-1])
        if self._words.shape[0] < total:
            self._words = torch.zeros(2 * total, dtype=torch.int32, device=self._words.device)
        self._words[:total].copy_(host[:total], non_blocking=True)
        self._events[self._next] = self._device.event()
        self._next = (self._next + 1) % _NUM_BUFFERS
        self._device.ops.apply_writes(state.words, self._words, len(writes))
        firsts = starts[len(writes) : len(parts)].tolist()
        return [self._words[first : first + len(part)] for first, part in zip(firsts, inputs, strict=True)]

    def _take_host(self, count: int) -> Tensor:
        event = self._events[self._next]
        if event is not None:
            event.wait()
        if self._hosts[self._next].shape[0] < count:
            self._hosts[self._next] = self._device.pinned_int32(2 * count)
        return self._hosts[self._next]


class ResidentSlots:
    def __init__(self, num_slots: int, max_tokens: int, block_size: int, device: torch.device) -> None:
        self.device = device
        self.state = SlotState(num_slots, max_tokens, block_size, device)
        self.tokens, self.lengths, self.num_prompt = self.state.tokens, self.state.lengths, self.state.num_prompt
        self.lengths_cpu = np.zeros(num_slots, dtype=np.int64)
        self.decode_slots: list[int] = []

    def update(self, plan: StepPlan, staging: Staging) -> None:
        """Stage the plan's changes to who is where."""
        state = self.state
        if plan.leave or plan.join:
            before = len(self.decode_slots)
            leaving = set(plan.leave)
            self.decode_slots = [slot for slot in self.decode_slots if slot not in leaving] + plan.join
            staging.write(state.rows_at, self.decode_slots + [-1] * (before - len(self.decode_slots)))
        for admission in plan.admit:
            self._fill(admission, staging)
        max_blocks = state.block_tables.shape[1]
        for slot, start, blocks in plan.grow:
            staging.write(state.tables_at + slot * max_blocks + start, blocks)

    def _fill(self, admission: Admission, staging: Staging) -> None:
        slot, request, state = admission.slot, admission.request, self.state
        known = request.token_ids + admission.output_ids
        self.lengths_cpu[slot] = len(known)
        record = _record(len(known), request)
        staging.write(slot * state.RECORD, record)
        staging.write(state.tokens_at + slot * state.tokens.shape[1], known)
        staging.write(state.tables_at + slot * state.block_tables.shape[1], admission.block_ids)


def sampling_mode_of(request: GenerationRequest) -> float:
    """How the request's tokens are chosen, see `kernels.slot_state`."""
    params = request.sampling
    if params.samples:
        return DRAWS
    masked = request.grammar is not None or params.min_tokens > 0
    more = masked or params.watermark or params.penalises or params.logit_bias or params.top_n_tokens
    return ADJUSTED if more else PLAIN


def _record(length: int, request: GenerationRequest) -> np.ndarray:
    record = np.zeros(SlotState.RECORD, dtype=np.int32)
    seed = request.seed
    record.view(np.int64)[:3] = length, len(request.token_ids), seed - 2**64 if seed >= 2**63 else seed
    numbers = {name: float(getattr(request.sampling, name)) for name in NUMBER_FIELDS if name != "sampling_mode"}
    numbers["sampling_mode"] = sampling_mode_of(request)
    record.view(np.float32)[SlotState.NUMBERS :][: len(NUMBER_FIELDS)] = [numbers[name] for name in NUMBER_FIELDS]
    return record
