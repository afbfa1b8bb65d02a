"""Renders chats where a template can do no harm: a process of its own, with little time and memory.

Templates come with models and are programs. The operating system bounds what one rendering takes: a timer of processor
time that ends the process, and a limit on its memory. The next rendering starts another. Both ends are here: `serve` is
the process, `TemplateProcess` its owner. Between them go frames of JSON over a socket, each answered before the next.
Every frame carries the templates, which the process keeps compiled: a new process lacks nothing.
"""

import asyncio
import functools
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from typing import Any

import msgspec

from text_generation_inference.errors import OverloadedError, TemplateError
from text_generation_inference.text.template_rendering import Conversation, Renderer, Templates

MAX_CPU_SECONDS = 2.0  # for one rendering
MAX_BYTES = 1 << 30  # of address space
_MAX_SECONDS = 20.0  # on a clock, for a machine that is busy with other things
_MAX_ERROR_CHARS = 10_000  # of what a template says when it refuses
_OUT_OF_MEMORY = 12  # exit status
_PIECE = 1 << 18  # bytes read at once
_LENGTH = struct.Struct("<I")


class Job(msgspec.Struct, frozen=True):
    templates: msgspec.Raw
    conversation: Conversation | None  # None: only compile


class Rendering(msgspec.Struct, frozen=True):
    text: str = ""
    error: str | None = None
    names: dict[str, list[str]] = {}  # variables by template
    broken: dict[str, str] = {}  # by template, why it does not compile


class TemplateProcess:
    """The owner's end: one rendering at a time. The process is started when it is first needed, and after it ended."""

    def __init__(self, max_cpu_seconds: float = MAX_CPU_SECONDS, max_bytes: int = MAX_BYTES) -> None:
        self._max_cpu_seconds, self._max_bytes = max_cpu_seconds, max_bytes
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that watches the socket
        self._answer: asyncio.Future[Rendering] | None = None  # of what was started
        self._deadline: asyncio.TimerHandle | None = None
        self._incoming = _Incoming()
        self._unsent = memoryview(b"")

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def exchange(self, frame: bytes) -> Rendering:
        """Wait for the answer to a `Job`. Raises `TemplateError` when the process did not survive it."""
        with self._lock:
            connection = self._connect()
            connection.settimeout(_MAX_SECONDS)
            try:
                connection.sendall(_LENGTH.pack(len(frame)) + frame)
                return msgspec.json.decode(_read(connection), type=Rendering)
            except (EOFError, OSError) as error:
                raise self._failure(error) from None
            except BaseException:  # interrupted: what is still to come would answer the next one
                self.close()
                raise

    def start(self, frame: bytes) -> "asyncio.Future[Rendering]":
        """The same beside an event loop. The next may start when the future is done, whoever still waits for it."""
        loop = asyncio.get_running_loop()
        connection = self._connect()
        if self._loop is None:
            connection.setblocking(False)
            loop.add_reader(connection, self._receive)
            self._loop = loop
        answer = self._answer = loop.create_future()
        self._incoming = _Incoming()
        self._unsent = memoryview(_LENGTH.pack(len(frame)) + frame)
        self._deadline = loop.call_later(_MAX_SECONDS, lambda: self._end(TimeoutError()))
        self._send()  # which may find that the process has just ended: then the answer is there, and `_answer` is not
        return answer

    def _send(self) -> None:
        assert self._socket is not None and self._loop is not None
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            self._loop.remove_writer(self._socket)
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._send)
        except OSError as error:
            self._end(error)

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            data = self._incoming.add(self._socket.recv(_PIECE))
        except BlockingIOError:
            return
        except (EOFError, OSError) as error:
            self._end(error)
            return
        if data is not None:
            self._end(msgspec.json.decode(data, type=Rendering))

    def _end(self, outcome: Rendering | Exception) -> None:
        answer, self._answer = self._answer, None
        if self._deadline is not None:
            self._deadline.cancel()
        if isinstance(outcome, Exception):
            outcome = self._failure(outcome)
        if answer is None or answer.done():  # it ended while nothing was asked, or nobody wants to know any more
            return
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    def close(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._process is not None and self._socket is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._socket)
                self._loop.remove_writer(self._socket)
            self._socket.close()
            self._process.kill()
            self._process.wait()
        self._process = self._socket = self._loop = None

    def _connect(self) -> socket.socket:
        if self._socket is None or self._process is None or self._process.poll() is not None:
            self.close()
            self._socket, theirs = socket.socketpair()
            command = [sys.executable, "-P", "-m", __name__, str(self._max_cpu_seconds), str(self._max_bytes)]
            with theirs:
                self._process = subprocess.Popen(command, stdin=theirs.fileno())
        return self._socket

    def _failure(self, error: Exception) -> Exception:
        """Why there is no answer. The process is gone afterwards."""
        process = self._process
        assert process is not None
        if isinstance(error, TimeoutError):
            self.close()
            return OverloadedError(f"a chat template was not rendered within {_MAX_SECONDS:g} seconds")
        status = process.wait()
        self.close()
        if status == -signal.SIGPROF:
            return TemplateError(f"the template takes more than {self._max_cpu_seconds:g} seconds")
        if status == _OUT_OF_MEMORY:
            return TemplateError(f"the template takes more than {self._max_bytes >> 20} MiB of memory")
        return TemplateError(f"the template ended the process that rendered it, with status {status}")


class _Incoming:
    """One frame as it comes in, in pieces."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, piece: bytes) -> bytes | None:
        """The frame when it is complete. Raises `EOFError` at the end of the connection."""
        if not piece:
            raise EOFError
        self._data += piece
        if len(self._data) < _LENGTH.size or len(self._data) < _LENGTH.size + _LENGTH.unpack_from(self._data)[0]:
            return None
        return bytes(memoryview(self._data)[_LENGTH.size :])


def _read(connection: socket.socket) -> bytes:
    incoming = _Incoming()
    while (frame := incoming.add(connection.recv(_PIECE))) is None:
        pass
    return frame


@functools.cache
def shared_process() -> TemplateProcess:
    """For all who have none of their own."""
    return TemplateProcess()


def encode_job(templates: msgspec.Raw, conversation: Conversation | None) -> bytes:
    """Raises `TemplateError` for a conversation that cannot be data."""
    try:
        return msgspec.json.encode(Job(templates, conversation), enc_hook=_type_name)
    except RecursionError:
        raise TemplateError("the messages, tools or template variables are nested too deeply") from None
    except (ValueError, TypeError) as error:  # half a surrogate pair; a key that is no text
        raise TemplateError(f"the messages, tools or template variables are no data: {error}") from None


def _type_name(value: Any) -> str:
    return f"<{type(value).__name__}>"


# -- the process ----------------------------------------------------------------------------------------------------


def serve(max_cpu_seconds: float, max_bytes: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides; at its end the socket closes
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as connection:
        try:
            while True:
                frame = _read(connection)
                signal.setitimer(signal.ITIMER_PROF, max_cpu_seconds)  # its signal ends the process
                try:
                    answer = msgspec.json.encode(_answer(frame))
                except UnicodeEncodeError:
                    answer = msgspec.json.encode(Rendering(error="the template makes half a surrogate pair: no text"))
                signal.setitimer(signal.ITIMER_PROF, 0)
                connection.sendall(_LENGTH.pack(len(answer)) + answer)
        except (EOFError, ConnectionError):
            return
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)  # what is left of a template may be much: nothing else is rendered beside it


def _answer(frame: bytes) -> Rendering:
    try:
        job = msgspec.json.decode(frame, type=Job)
        renderer = _compiled(bytes(job.templates))
        if job.conversation is None:
            return Rendering(names=renderer.names, broken=renderer.broken)
        return Rendering(renderer.render(job.conversation, len(frame)))
    except TemplateError as error:
        return Rendering(error=str(error)[:_MAX_ERROR_CHARS])
    except RecursionError:
        return Rendering(error="the messages, tools or template variables are nested too deeply")


@functools.lru_cache(maxsize=4)
def _compiled(templates: bytes) -> Renderer:
    return Renderer(msgspec.json.decode(templates, type=Templates))


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))
