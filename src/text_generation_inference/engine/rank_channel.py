"""The channel between the engine process and the processes of further ranks: what is said on it, and how.

One stream socket for each rank, in both directions; to other machines it is TCP (`machines`). An order goes to all
ranks as the same bytes with the same number; orders are numbered without gaps, and a rank that finds one ends. Reports
carry the number of the order that they are about. Nothing is a pickle, and on one machine nothing listens: both ends of
a socket are made before the process that gets one.

A frame is its length and its number (little-endian, 4 and 8 bytes), then msgpack.
"""

import socket
import struct
import zlib
from array import array
from pathlib import Path
from typing import Any

import msgspec

from text_generation_inference import errors
from text_generation_inference.config import Resolved, ServerConfig
from text_generation_inference.errors import EngineError, TgiError
from text_generation_inference.types import Grammar, Limits, Place, StepPlan, StepResult
from text_generation_inference.weights.source import ModelFolder

_HEAD = struct.Struct("<IQ")
_AT_A_TIME = 1 << 18
_LARGEST = 1 << 30  # bytes of a frame: more is no frame
LACK = "memory"  # kind of a failure: a step lacked memory
SUM_EVERY = 32  # orders: then a rank tells the sum of its tokens, if that one was a step


# -- orders --------------------------------------------------------------------------------------------------------


class BeginRank(msgspec.Struct, frozen=True, tag="begin"):
    """The first one, and the only one that differs between ranks: open the device."""

    config: ServerConfig
    source: ModelFolder
    place: Place


class JoinRanks(msgspec.Struct, frozen=True, tag="join"):
    """Meet the other ranks."""

    address: str  # see `open_collectives`


class LoadWeights(msgspec.Struct, frozen=True, tag="load"):
    pass


class MeasureSteps(msgspec.Struct, frozen=True, tag="measure"):
    pass


class AllocateCache(msgspec.Struct, frozen=True, tag="allocate"):
    """What the shapes of passes follow from is said, so that they are the same on all ranks."""

    resolved: Resolved
    limits: Limits
    quantized: bool
    is_capturable: bool
    sees: bool
    picture_sizes: list[int]
    vocab_size: int


class WarmShapes(msgspec.Struct, frozen=True, tag="warm"):
    pass


class CheckFit(msgspec.Struct, frozen=True, tag="fits"):
    pass


class ReleaseCache(msgspec.Struct, frozen=True, tag="release"):
    pass


class ShowPixels(msgspec.Struct, frozen=True, tag="show"):
    """Of a picture that the next step begins to compute: all ranks compute what rank 0 has read. Not answered."""

    digest: str
    pixels: bytes  # none: they are not there


class RunStep(msgspec.Struct, frozen=True, tag="step"):
    """Answered with `RankDone` now and then, and with `RankFailed` if it fails."""

    plan: StepPlan


class CompileGrammar(msgspec.Struct, frozen=True, tag="compile"):
    """Of a request that will come, beside the steps. Not answered."""

    grammar: Grammar


class ForgetRequests(msgspec.Struct, frozen=True, tag="forget"):
    """Answered with the number of collectives begun so far."""


class PingRank(msgspec.Struct, frozen=True, tag="ping"):
    """Answered with the number of collectives begun so far, whatever else is under way."""


class ProfileAsked(msgspec.Struct, frozen=True):
    """A profile of steps: see `StepProfiler`."""

    folder: str
    ranks: list[int]
    num_steps: int | None
    wait: int
    warm_up: int
    record_shapes: bool


class ProfileRank(msgspec.Struct, frozen=True, tag="profile"):
    """Begin one, or end it. Answered with `ProfileAnswer`."""

    asked: ProfileAsked | None


class ProfileAnswer(msgspec.Struct, frozen=True):
    path: str | None = None  # of a trace that was written now
    error: str | None = None


class CloseRank(msgspec.Struct, frozen=True, tag="close"):
    """The last one."""


RankOrder = (
    BeginRank
    | JoinRanks
    | LoadWeights
    | MeasureSteps
    | AllocateCache
    | WarmShapes
    | CheckFit
    | ReleaseCache
    | ShowPixels
    | RunStep
    | CompileGrammar
    | ForgetRequests
    | PingRank
    | ProfileRank
    | CloseRank
)


# -- reports -------------------------------------------------------------------------------------------------------


class RankAnswer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    value: msgspec.Raw


class RankFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    error: str
    kind: str  # name of the class in `errors`, or `LACK`


class RankDone(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Steps up to this one are."""

    checksum: int  # of all their tokens


RankReport = RankAnswer | RankFailed | RankDone


def error_from(report: RankFailed, rank: int) -> TgiError:
    """What a rank reported, as the error that it was there."""
    kind = getattr(errors, report.kind, EngineError)
    return kind(f"rank {rank}: {report.error}")


class TokenSum:
    """Of the tokens of all steps: equal on ranks that chose the same ones."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, result: StepResult) -> int:
        self.value = zlib.crc32(array("q", result.token_ids), self.value)
        return self.value


def _encode_path(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value))


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(kind)


encode = msgspec.msgpack.Encoder(enc_hook=_encode_path).encode
decode_order = msgspec.msgpack.Decoder(RankOrder, dec_hook=_decode_path).decode
decode_report = msgspec.msgpack.Decoder(RankReport).decode


# -- frames --------------------------------------------------------------------------------------------------------


class Link:
    """One end of a rank's socket."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._left = bytearray()  # of a frame that is not there to its end

    def fileno(self) -> int:
        return self._stream.fileno()

    def send(self, number: int, payload: bytes) -> None:
        """Raises `OSError` if the other end is gone, or takes nothing for as long as the socket waits."""
        self._stream.sendall(_HEAD.pack(len(payload), number) + payload)

    def read(self) -> list[tuple[int, bytes]] | None:
        """The frames that are there, after waiting for something; None: the other end is gone."""
        try:
            data = self._stream.recv(_AT_A_TIME)
        except ConnectionError:
            return None
        if not data:
            return None
        left = self._left
        left += data
        frames: list[tuple[int, bytes]] = []
        start = 0
        while len(left) - start >= _HEAD.size:
            length, number = _HEAD.unpack_from(left, start)
            if length > _LARGEST:
                raise EngineError(f"a frame of {length} bytes on the channel of a rank")
            end = start + _HEAD.size + length
            if end > len(left):
                break
            frames.append((number, bytes(memoryview(left)[start + _HEAD.size : end])))
            start = end
        if start:
            del left[:start]
        return frames

    def close(self) -> None:
        self._stream.close()


class OrderReader:
    """What a rank is told, in order, nothing left out."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._next = 0
        self._frames: list[tuple[int, bytes]] = []

    def receive(self) -> tuple[int, RankOrder] | None:
        """Waits for the next order and its number; None: whoever gives them is gone. Raises `EngineError` on a gap."""
        while not self._frames:
            frames = self._link.read()
            if frames is None:
                return None
            self._frames = frames
        number, payload = self._frames.pop(0)
        if number != self._next:
            raise EngineError(f"order {number} came where {self._next} was due")
        self._next += 1
        return number, decode_order(payload)
