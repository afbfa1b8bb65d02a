"""Messages between the command and its client processes: msgpack with a length before each, over a socket pair.

Neither side ever waits for the other: what does not fit into the socket stays here until it does.
"""

import socket
import struct
from typing import Any

import msgspec

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18
_encode = msgspec.msgpack.Encoder().encode


class Link:
    """One end. `kinds` is the union of tagged structs that may arrive."""

    def __init__(self, sock: socket.socket, kinds: Any) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.is_open = True
        self._decode = msgspec.msgpack.Decoder(kinds).decode
        self._received = bytearray()
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: msgspec.Struct) -> None:
        data = _encode(message)
        self._unsent += _LENGTH.pack(len(data)) + data
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                sent = self.sock.send(memoryview(self._unsent)[:_READ_BYTES])
                del self._unsent[:sent]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._unsent.clear()
            self.is_open = False

    def receive(self) -> list[Any]:
        """Every whole message that is there; `is_open` tells whether more may come."""
        try:
            while True:
                data = self.sock.recv(_READ_BYTES)
                if not data:
                    self.is_open = False
                    break
                self._received += data
                if len(data) < _READ_BYTES:
                    break
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.is_open = False
        messages: list[Any] = []
        start = 0
        while len(self._received) - start >= 4:
            (length,) = _LENGTH.unpack_from(self._received, start)
            if len(self._received) - start - 4 < length:
                break
            messages.append(self._decode(bytes(self._received[start + 4 : start + 4 + length])))
            start += 4 + length
        del self._received[:start]
        return messages
