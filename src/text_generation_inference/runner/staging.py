"""The one copy per step that brings a device the changes of its slots and the inputs of a step."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.devices.device import Device, Event
from text_generation_inference.kernels.slot_state import SlotState

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


class HostStaging:
    """The same where the slots are on the host: changes are made at once."""

    def __init__(self, state: SlotState) -> None:
        self._target = state.words.numpy()
        self._inputs: list[Words] = []

    def write(self, place: int, words: Words) -> None:
        self._target[place : place + len(words)] = words

    def put(self, words: Words) -> int:
        self._inputs.append(words)
        return len(self._inputs) - 1

    def send(self, state: SlotState) -> list[Tensor]:
        inputs, self._inputs = self._inputs, []
        return [torch.from_numpy(np.array(words, dtype=np.int32)) for words in inputs]  # pyright: ignore
