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
        # Of each write four numbers: where to, which part of what is sent, where in that, how many words.
        self._headers: list[int] = []
        self._block_headers: list[np.ndarray] = []
        self._writes: list[Words] = []
        self._inputs: list[Words] = []

    def write(self, place: int, words: Words) -> None:
        """Change the state from `place` on."""
        if len(words):
            self._headers += (place, len(self._writes), 0, len(words))
            self._writes.append(words)

    def write_blocks(self, places: np.ndarray, blocks: np.ndarray) -> None:
        """Change the state from each of the places on: `blocks[n]` goes to `places[n]`."""
        count, size = blocks.shape
        if count == 1:  # as most are, and for one there is a shorter way
            self.write(int(places[0]), blocks[0])
            return
        headers = np.empty((count, 4), dtype=np.int64)
        headers[:, 0], headers[:, 1], headers[:, 3] = places, len(self._writes), size
        headers[:, 2] = np.arange(count) * size
        self._block_headers.append(headers)
        self._writes.append(blocks.reshape(-1))

    def put(self, words: Words) -> int:
        """An input of this step: its number among what `send` returns."""
        self._inputs.append(words)
        return len(self._inputs) - 1

    def send(self, state: SlotState) -> list[Tensor]:
        """Queue the copy and the changes; return the inputs on the device, good until the next `send`."""
        writes, inputs = self._writes, self._inputs
        if not writes and not inputs:
            return []
        changes = np.concatenate([np.array(self._headers, dtype=np.int64).reshape(-1, 4), *self._block_headers])
        self._headers, self._block_headers, self._writes, self._inputs = [], [], [], []
        parts = writes + inputs
        num_writes = len(changes)
        # Each part begins at 16 bytes: kernels are compiled for aligned inputs, once.
        starts = np.cumsum([4 * num_writes, *(-(-len(part) // 4) * 4 for part in parts)])
        host = self._take_host(int(starts[-1]))
        words = host.numpy()
        headers = words[: 4 * num_writes].reshape(-1, 4)
        places, part_of, inside, counts = changes.T
        headers[:, 0] = (places & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
        headers[:, 1] = places >> 32
        headers[:, 2] = starts[part_of] + inside
        headers[:, 3] = counts
        for start, part in zip(starts, parts, strict=False):
            words[start : start + len(part)] = part
        total = int(starts[-1])
        if self._words.shape[0] < total:
            self._words = torch.zeros(2 * total, dtype=torch.int32, device=self._words.device)
        self._words[:total].copy_(host[:total], non_blocking=True)
        self._events[self._next] = self._device.event()
        self._next = (self._next + 1) % _NUM_BUFFERS
        self._device.ops.apply_writes(state.words, self._words, num_writes)
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

    def write_blocks(self, places: np.ndarray, blocks: np.ndarray) -> None:
        self._target[places[:, None] + np.arange(blocks.shape[1])] = blocks

    def put(self, words: Words) -> int:
        self._inputs.append(words)
        return len(self._inputs) - 1

    def send(self, state: SlotState) -> list[Tensor]:
        inputs, self._inputs = self._inputs, []
        return [torch.from_numpy(np.array(words, dtype=np.int32)) for words in inputs]  # pyright: ignore
