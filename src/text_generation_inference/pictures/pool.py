"""The owner's end of worker processes: starts them when needed, ends those that hang, replaces those that died.

One picture at a time for each. Whatever becomes of a worker, one picture fails, and the next one finds another. Calls
block, so they are made from threads; `loader` has as many as there are workers.
"""

import logging
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import msgspec

from text_generation_inference.config import decoder_environment
from text_generation_inference.errors import OverloadedError, ValidationError
from text_generation_inference.pictures.frames import (
    OUT_OF_MEMORY,
    PictureJob,
    PictureRefused,
    PreparedPicture,
    WorkerSettings,
    receive_answer,
    send,
)

log = logging.getLogger("text_generation_inference.pictures")

_SHUTTING_DOWN = OverloadedError("the server is shutting down")
_MODULE = "text_generation_inference.pictures.worker"


class WorkerPool:
    def __init__(self, settings: WorkerSettings, num_workers: int, max_seconds: float) -> None:
        """`max_seconds`: on a clock, for one picture."""
        # The one that was idle last is taken first, so that no more are started than are needed.
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        self._workers = [Worker(settings, max_seconds) for _ in range(num_workers)]
        for worker in self._workers:
            self._idle.put(worker)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers if worker.pid is not None]

    @property
    def num_lost(self) -> int:
        """Workers that ended, or were ended, with a picture in hand."""
        return sum(worker.num_lost for worker in self._workers)

    def prepare(self, job: PictureJob, data: bytes | bytearray) -> PreparedPicture:
        """Wait for a worker and its answer. Raises `ValidationError` or `OverloadedError`. For several threads."""
        worker = self._idle.get()
        try:
            answer = worker.exchange(job, data)
        finally:
            self._idle.put(worker)
        if isinstance(answer, PreparedPicture):
            return answer
        if answer.detail:
            log.info("A picture is refused: %s", answer.detail)
        if not answer.text:
            raise OverloadedError("there is no room for more pictures")
        raise ValidationError(answer.text)

    def close(self) -> None:
        """Whoever waits for an answer gets an error."""
        for worker in self._workers:
            worker.end()
        idle: list[Worker] = []
        with suppress(queue.Empty):
            while True:
                idle.append(self._idle.get_nowait())
        for worker in idle:  # others are closed by the threads that wait for them
            worker.close()
            self._idle.put(worker)


class Worker:
    """One process. The calls are one thread's at a time, but for `end`."""

    def __init__(self, settings: WorkerSettings, max_seconds: float) -> None:
        self._settings, self._max_seconds = settings, max_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._is_ended = False
        self._lock = threading.RLock()
        self.num_lost = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def exchange(self, job: PictureJob, data: bytes | bytearray) -> PreparedPicture | PictureRefused:
        """Raises `ValidationError` or `OverloadedError` when the process did not survive it."""
        started = time.monotonic()
        connection = self._connect()
        connection.settimeout(self._max_seconds)
        try:
            send(connection, job, data)
            connection.settimeout(max(0.01, started + self._max_seconds - time.monotonic()))
            return receive_answer(connection)
        except TimeoutError:
            self.close()
            self.num_lost += 1
            log.warning("A picture took longer than %g seconds: its worker is ended", self._max_seconds)
            raise OverloadedError(f"a picture was not prepared within {self._max_seconds:g} seconds") from None
        except (EOFError, OSError, msgspec.MsgspecError):
            raise self._explain() from None
        except BaseException:  # interrupted: what is still to come would answer the next one
            self.close()
            raise

    def end(self) -> None:
        with self._lock:  # not while one is being started, which nobody would end
            self._is_ended = True
            if self._process is not None:
                self._process.kill()  # which closes its end of the socket, and so wakes who waits there

    def _connect(self) -> socket.socket:
        with self._lock:
            if self._is_ended:
                raise _SHUTTING_DOWN
            if self._connection is None or self._process is None or self._process.poll() is not None:
                self.close()
                self._connection, theirs = socket.socketpair()
                self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
                command = [sys.executable, "-P", "-m", _MODULE, msgspec.json.encode(self._settings).decode()]
                with theirs:
                    # Our standard output is the launcher's, who believes what is said there.
                    self._process = subprocess.Popen(
                        command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=decoder_environment()
                    )
            return self._connection

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self._process = self._connection = None

    def _explain(self) -> Exception:
        """Why there is no answer. The process is gone afterwards."""
        assert self._process is not None
        if self._is_ended:
            self.close()
            return _SHUTTING_DOWN
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:  # it lives, and does not talk
            status = None
        self.close()
        self.num_lost += 1
        if status == -signal.SIGPROF:
            why = f"it takes more than {self._settings.max_cpu_seconds:g} seconds to decode"
        elif status == OUT_OF_MEMORY:
            why = "it takes too much memory to decode"
        else:
            why = "it cannot be decoded"
        log.warning("A worker for pictures ended with status %s: %s", status, why)
        return ValidationError(f"invalid image: {why}")
