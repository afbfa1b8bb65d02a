"""What `pool` and `worker` say to each other: msgpack over a socket, each message with the bytes that belong to it."""

import socket
import struct

import msgspec

from text_generation_inference.pictures.rule import PictureLayout

MAX_FRAMES = 512  # of a video
OUT_OF_MEMORY = 12  # exit status of a worker
_LENGTHS = struct.Struct("<IQ")  # of a message, and of the bytes that follow it
_PIECE = 1 << 20  # bytes read at once


class WorkerSettings(msgspec.Struct, frozen=True):
    model_folder: str
    max_pixels: int
    max_bytes: int  # of memory, beyond what an idle process has
    max_cpu_seconds: float  # for one picture


class FrameJob(msgspec.Struct, frozen=True, array_like=True):
    """A part of the bytes that follow, which is a frame of a video."""

    num_bytes: int
    format: str | None = None
    is_base64: bool = False
    size: tuple[int, int] | None = None


class PictureJob(msgspec.Struct, frozen=True, array_like=True):
    """What the bytes that follow are."""

    output: str  # the file to write pixels to; it is not there yet
    format: str | None = None  # Pillow's name of the only one allowed
    is_base64: bool = False
    size: tuple[int, int] | None = None  # width and height: the bytes are pixels, RGB
    frames: list[FrameJob] = []  # of a video: the bytes are theirs, one after the other
    is_animation: bool = False  # the one has all frames of a video
    fps: float | None = None


class PreparedPicture(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The pixels are in the file."""

    digest: str
    width: int
    height: int
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    expansion: tuple[str | int, ...]
    num_bytes: int  # of the file

    @property
    def layout(self) -> PictureLayout:
        return PictureLayout(self.shape, self.grid, self.expansion)


class PictureRefused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    text: str  # for the client; empty: nothing is wrong with the picture, but the file cannot be written
    detail: str  # for the log


def send(
    connection: socket.socket, message: PictureJob | PreparedPicture | PictureRefused, data: bytes | bytearray = b""
) -> None:
    encoded = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTHS.pack(len(encoded), len(data)) + encoded)
    if data:
        connection.sendall(data)


def receive_job(connection: socket.socket) -> tuple[PictureJob, bytearray]:
    message, data = _receive(connection)
    return msgspec.msgpack.decode(message, type=PictureJob), data


def receive_answer(connection: socket.socket) -> PreparedPicture | PictureRefused:
    return msgspec.msgpack.decode(_receive(connection)[0], type=PreparedPicture | PictureRefused)


def _receive(connection: socket.socket) -> tuple[bytearray, bytearray]:
    """Raises `EOFError` when the other end is gone."""
    message_size, data_size = _LENGTHS.unpack(_read(connection, _LENGTHS.size))
    return _read(connection, message_size), _read(connection, data_size)


def _read(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view, min(len(view), _PIECE))
        if not count:
            raise EOFError
        view = view[count:]
    return data
