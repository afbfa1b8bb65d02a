"""A client of the engine as the engine sees it: who it is, what it asked for, and what it has not taken yet.

The engine never waits for a client. What a socket does not take stays here, up to a limit; a client that does
not read for so long has its requests ended, with an error that it finds behind the tokens it was sent. Nothing is lost
in between, and other clients notice nothing.
"""

import os
from collections import deque

import zmq

MAX_OUTBOX_BYTES = 64 * 2**20


class ClientLink:
    def __init__(self, socket: "zmq.Socket[bytes]", address: bytes, number: int, pid: int) -> None:
        self.address, self.number, self.pid = address, number, pid
        self.requests: set[int] = set()  # engine-wide ids
        self._socket = socket
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self.gone = False  # its end of the socket is closed

    @property
    def alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    @property
    def is_behind(self) -> bool:
        return bool(self._waiting)

    @property
    def is_full(self) -> bool:
        return self._num_bytes > MAX_OUTBOX_BYTES

    @property
    def is_lost(self) -> bool:
        """It is gone, or sends and sends without ever reading."""
        return self.gone or self._num_bytes > 2 * MAX_OUTBOX_BYTES

    def send(self, payload: bytes) -> None:
        """At once if the socket takes it, else as soon as it does."""
        self._waiting.append(payload)
        self._num_bytes += len(payload)
        self.flush()

    def flush(self) -> None:
        while self._waiting:
            try:
                self._socket.send_multipart([self.address, self._waiting[0]], zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self.gone = True
                self._waiting.clear()
                self._num_bytes = 0
                return
            self._num_bytes -= len(self._waiting.popleft())
