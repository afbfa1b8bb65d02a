"""Messages between the command and its client processes: msgspec structs as msgpack over a pair of ZeroMQ sockets.

Neither side ever waits for the other: what the other has not taken yet stays in the sender's queue.
"""

from typing import Any

import msgspec
import zmq

_RECONNECT_MS = 5
_encode = msgspec.msgpack.Encoder().encode


class Channel:
    """One end: the client process binds, the command connects. `kinds` is the union of structs that may arrive."""

    def __init__(self, endpoint: str, kinds: Any, bind: bool) -> None:
        self._decode = msgspec.msgpack.Decoder(kinds).decode
        self.socket = zmq.Context.instance().socket(zmq.PAIR)
        for option, value in (
            (zmq.SNDHWM, 0),  # no limit
            (zmq.RCVHWM, 0),
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
        ):
            self.socket.setsockopt(option, value)
        (self.socket.bind if bind else self.socket.connect)(endpoint)

    def fileno(self) -> int:
        """Becomes readable when something may have happened: ask `receive` until it is empty before waiting for it."""
        return self.socket.get(zmq.FD)

    def send(self, message: msgspec.Struct) -> None:
        self.socket.send(_encode(message))

    def receive(self) -> list[Any]:
        """Every message that is there."""
        messages: list[Any] = []
        while self.socket.get(zmq.EVENTS) & zmq.POLLIN:
            messages.append(self._decode(self.socket.recv()))
        return messages

    def close(self) -> None:
        self.socket.close()
