"""How many threads bring bytes from host memory to a device: at once, or queued behind what the device does."""

from typing import Protocol

import torch


class CopyEvent(Protocol):
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Copies:
    """At once."""

    are_queued = False  # they then read pinned memory

    def join(self) -> None:
        """Called in each thread that copies."""

    def event(self) -> CopyEvent | None:
        """Recorded behind a copy, it tells when that is done; None: they are done when they return."""
        return None

    def finish(self) -> None:
        """Until all are done."""


class _QueuedCopies(Copies):
    """In the stream that is current where this is made."""

    are_queued = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)

    def join(self) -> None:
        torch.cuda.set_stream(self._stream)

    def event(self) -> CopyEvent:
        return torch.cuda.Event(blocking=True)

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)


def copies_to(device: torch.device) -> Copies:
    return _QueuedCopies(device) if device.type == "cuda" else Copies()
