"""Moves tensors from files to a device at the speed of the disk or of the bus, whichever is slower.

Several threads read pieces of tensors into buffers that the device copies from by itself. Who announces what
will be asked for has it read ahead while the tensors before are joined or converted. Everything is queued in the
stream that was current when the upload began: its caller computes there. Knows bytes of files, not what they mean.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from text_generation_inference.devices.copies import Copies, copies_to
from text_generation_inference.errors import ModelFormatError

_FEWEST_THREADS, _MOST_THREADS = 8, 16  # a disk wants several, however few cores there are
_SPARE_BUFFERS = 4  # that the device still copies from while every thread reads
_PIECE_BYTES = 16 << 20
_AHEAD_BYTES = 1 << 30  # on the device, of what nobody has asked for yet

_HOST = torch.device("cpu")

Identity = tuple[int, int, int, int]  # of a file: file system, number there, size, last change


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Bytes of a file that are a tensor."""

    path: Path
    identity: Identity  # of the file whose header was read: another one may have taken its place
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool = False  # stays in host memory

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A tensor that threads are filling."""

    span: FileSpan
    tensor: Tensor
    pieces: list[Future[None]]

    def cancel(self) -> None:
        for piece in self.pieces:
            piece.cancel()


class _Buffer:
    """Memory that a copy may still be reading from."""

    def __init__(self, num_bytes: int, copies: Copies) -> None:
        self._num_bytes, self._is_queued = num_bytes, copies.are_queued
        self._words: Tensor | None = None  # pinning takes time: only what is used
        self._copied = copies.event()

    def send(self, fill: Callable[[Tensor], None], target: Tensor) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        if self._words is None:
            self._words = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=self._is_queued)
        piece = self._words[: target.numel()]
        fill(piece)
        target.copy_(piece, non_blocking=self._is_queued)
        if self._copied is not None:
            self._copied.record()


class Upload:
    """`read` returns a span of a file on the device, a call a tensor of host memory. Use in a `with` statement.

    All calls come from one thread.
    """

    def __init__(self, device: torch.device, piece_bytes: int = _PIECE_BYTES, ahead_bytes: int = _AHEAD_BYTES) -> None:
        self._device, self._piece_bytes, self._ahead_bytes = device, piece_bytes, ahead_bytes
        self._announced: deque[FileSpan] = deque()
        self._started: list[_Arriving] = []  # that were announced, in this order
        self.waiting_bytes = 0  # of these
        num_threads = min(_MOST_THREADS, max(_FEWEST_THREADS, os.cpu_count() or 1))
        self._copies = copies_to(device)
        self._threads = ThreadPoolExecutor(num_threads, "tgi-upload", initializer=self._copies.join)
        self._buffers: SimpleQueue[_Buffer] = SimpleQueue()
        for _ in range(num_threads + _SPARE_BUFFERS):
            self._buffers.put(_Buffer(piece_bytes, self._copies))

    def announce(self, spans: Iterable[FileSpan]) -> None:
        """What will be read, in about this order."""
        self._announced.extend(spans)
        self._read_ahead()

    def read(self, span: FileSpan) -> Tensor:
        """Raises `ModelFormatError` if the file has changed or cannot be read."""
        arriving = self._take(span)
        self._read_ahead()
        return _wait(arriving)

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.nbytes < self._piece_bytes:
            return tensor.to(self._device)
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = (_bytes_of(each) for each in (tensor, result))
        pieces = [
            self._threads.submit(self._send, partial(_copy, source[some]), target[some]) for some in self._cut(target)
        ]
        for piece in pieces:
            piece.result()
        return result

    def _take(self, span: FileSpan) -> _Arriving:
        for place, arriving in enumerate(self._started):
            if arriving.span == span:
                self.waiting_bytes -= span.num_bytes
                return self._started.pop(place)
        if span in self._announced:  # the caller has left behind what is before it: nothing waits for that
            self._let_go()
            while self._announced.popleft() != span:
                pass
        return self._start(span)

    def _read_ahead(self) -> None:
        while self._announced:
            num_bytes = self.waiting_bytes + self._announced[0].num_bytes
            if self._started and num_bytes > self._ahead_bytes:
                return
            self._started.append(self._start(self._announced.popleft()))
            self.waiting_bytes = num_bytes

    def _start(self, span: FileSpan) -> _Arriving:
        tensor = torch.empty(span.shape, dtype=span.dtype, device=_HOST if span.on_host else self._device)
        target = _bytes_of(tensor)
        pieces: list[Future[None]] = []
        for some in self._cut(target):
            fill = partial(_fill, span, some.start)
            work = fill if span.on_host else partial(self._send, fill)
            pieces.append(self._threads.submit(work, target[some]))
        return _Arriving(span, tensor, pieces)

    def _cut(self, target: Tensor) -> list[slice]:
        size, total = self._piece_bytes, target.numel()
        return [slice(start, min(start + size, total)) for start in range(0, total, size)]

    def _send(self, fill: Callable[[Tensor], None], target: Tensor) -> None:
        buffer = self._buffers.get()
        try:
            buffer.send(fill, target)
        finally:
            self._buffers.put(buffer)

    def _let_go(self) -> None:
        for arriving in self._started:
            arriving.cancel()
        self._started.clear()
        self.waiting_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._announced.clear()
        self._let_go()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._copies.finish()


def identify(descriptor: int) -> Identity:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _wait(arriving: _Arriving) -> Tensor:
    try:
        for piece in arriving.pieces:
            piece.result()
    except BaseException:
        arriving.cancel()
        raise
    return arriving.tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _copy(source: Tensor, piece: Tensor) -> None:
    piece.copy_(source)


def _fill(span: FileSpan, start: int, piece: Tensor) -> None:
    """Read the bytes of a span from `start` on into memory."""
    try:
        # A descriptor of its own for each: the kernel reads ahead by descriptor.
        descriptor = os.open(span.path, os.O_RDONLY)
        try:
            is_whole = identify(descriptor) == span.identity and _read_at(descriptor, span.offset + start, piece)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ModelFormatError(
            f"{span.path}: cannot be read: {error.strerror}. Is the disk sound and still there?"
        ) from error
    if not is_whole:
        raise ModelFormatError(f"{span.path}: was changed while it was read. Start again when the file is complete.")


def _read_at(descriptor: int, offset: int, piece: Tensor) -> bool:
    """Whether there were as many bytes as there is room for."""
    memory = memoryview(piece.numpy())  # pyright: ignore[reportArgumentType]: arrays are buffers, their types do not say so
    while memory.nbytes:
        num_bytes = os.preadv(descriptor, [memory], offset)
        if num_bytes == 0:
            return False
        memory, offset = memory[num_bytes:], offset + num_bytes
    return True
