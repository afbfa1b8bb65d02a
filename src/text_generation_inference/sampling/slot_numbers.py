"""Numbers of requests, one per slot, on the host. Slot -1 is that of a padding row: its numbers are neutral."""

from collections.abc import Sequence

import numpy as np

from text_generation_inference.types import SamplingParams

_NEUTRAL = SamplingParams()


class SlotNumbers:
    """Fields of `SamplingParams`."""

    def __init__(self, names: Sequence[str], num_slots: int) -> None:
        self._names = names
        self._values = np.zeros((len(names), num_slots + 1), dtype=np.float32)  # the last one is never written
        self._values[:] = np.array([[float(getattr(_NEUTRAL, name))] for name in names], dtype=np.float32)

    def admit(self, slot: int, params: SamplingParams) -> None:
        self._values[:, slot] = [float(getattr(params, name)) for name in self._names]

    def of(self, slots: np.ndarray) -> list[np.ndarray]:
        """An array of each field."""
        return list(self._values[:, slots])
