"""Moves tensors from mapped files to a device at the speed of the disk or of the bus, whichever is slower.

Level 2. Pieces of a tensor are read by several threads into buffers that the device copies from by itself.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

_MOST_THREADS = 8
_PIECE_BYTES = 16 << 20


class _Buffer:
    """Memory that a copy may still be reading from."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.words = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._copied = torch.cuda.Event(blocking=True) if on_gpu else None

    def send(self, source: Tensor, target: Tensor) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        piece = self.words[: source.numel()]
        piece.copy_(source)
        target.copy_(piece, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class Upload:
    """Called with a tensor in host memory it returns the same on the device. Use in a `with` statement."""

    def __init__(self, device: torch.device, piece_bytes: int = _PIECE_BYTES) -> None:
        self._device, self._piece_bytes = device, piece_bytes
        num_threads = min(_MOST_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tgi-upload")
        self._buffers: Queue[_Buffer] = Queue()
        for _ in range(2 * num_threads):
            self._buffers.put(_Buffer(piece_bytes, device))

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.nbytes < self._piece_bytes:
            return tensor.to(self._device)
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = (each.reshape(-1).view(torch.uint8) for each in (tensor, result))
        size = self._piece_bytes
        pieces = [
            self._threads.submit(self._send, source[start : start + size], target[start : start + size])
            for start in range(0, source.numel(), size)
        ]
        for piece in pieces:
            piece.result()
        return result

    def _send(self, source: Tensor, target: Tensor) -> None:
        buffer = self._buffers.get()
        try:
            buffer.send(source, target)
        finally:
            self._buffers.put(buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
