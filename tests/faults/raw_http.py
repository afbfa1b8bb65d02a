"""Raw requests from files, and answers as they come over a socket. For the corpus in http_corpus/, and for floods.

A case is lines of `name: value`, then `---`, then what is sent: each line end is CRLF, unless a backslash stands before
it; `\\n`, `\\r`, `\\t` and `\\xNN` are bytes; `{repeat:N:text}` is text N times.

    why      what the case is about
    answers  the statuses that come back, in order
    end      `open`: another request on the same connection is answered; `close`: the connection is closed
    text     what the answers contain
    absent   what they do not contain
    head     1: the answers have no bodies
    eof      1: the sending side is closed behind what is sent
    nginx    what may differ with nginx in front: `repaired` (it makes sense of it, so 2xx or 404 may come), `refused` (any
             status of 400 or more), `any`; without this line the first answer has the same status
"""

import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "http_corpus"
_REPEAT = re.compile(r"\{repeat:(\d+):([^}]*)\}")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|[nrt])")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass
class Case:
    name: str
    raw: bytes
    answers: list[int]
    stays_open: bool
    text: bytes = b""
    absent: bytes = b""
    head: bool = False
    eof: bool = False
    nginx: str = ""


def load(path: Path) -> Case:
    top, _, raw = path.read_text().partition("---\n")
    values = dict(line.split(": ", 1) for line in top.replace(":\n", ": \n").splitlines())
    assert set(values) <= {"why", "answers", "end", "text", "absent", "head", "eof", "nginx"}, path
    assert values["why"] and values["end"] in ("open", "close")
    raw = raw.replace("\\\n", "").replace("\n", "\r\n")
    raw = _REPEAT.sub(lambda found: found[2] * int(found[1]), raw)
    raw = _ESCAPE.sub(lambda found: _ESCAPES.get(found[1]) or chr(int(found[1][1:], 16)), raw)
    return Case(
        path.stem,
        raw.encode("latin-1"),
        [int(status) for status in values["answers"].split()],
        values["end"] == "open",
        values.get("text", "").encode(),
        values.get("absent", "").encode(),
        "head" in values,
        "eof" in values,
        values.get("nginx", ""),
    )


CASES = [load(path) for path in sorted(FOLDER.glob("*.txt"))]


def connect(port: int, timeout_s: float = 20.0) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class Answers:
    """The answers on a connection, one after the other."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.data, self._unread = sock, b"", b""

    def read(self, head_only: bool = False) -> int:
        """The status of the next answer, or 0 if the connection is closed."""
        while b"\r\n\r\n" not in self._unread:
            if not self._more():
                assert not self._unread, f"half an answer: {self._unread[:200]!r}"
                return 0
        head, _, self._unread = self._unread.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        status = int(lines[0].split()[1])
        fields = {name.lower(): value.strip() for name, value in (line.split(b":", 1) for line in lines[1:])}
        if status < 200 or head_only:
            return status
        if fields.get(b"transfer-encoding") == b"chunked":
            while size := int(self._take_line(), 16):
                self._take(size + 2)
            self._take_line()
        else:
            self._take(int(fields[b"content-length"]))
        return status

    def _more(self) -> bool:
        try:
            piece = self.sock.recv(65536)
        except ConnectionError:
            piece = b""
        self.data += piece
        self._unread += piece
        return bool(piece)

    def _take(self, size: int) -> bytes:
        while len(self._unread) < size:
            assert self._more(), "half an answer"
        taken, self._unread = self._unread[:size], self._unread[size:]
        return taken

    def _take_line(self) -> bytes:
        while b"\r\n" not in self._unread:
            assert self._more(), "half an answer"
        line, _, self._unread = self._unread.partition(b"\r\n")
        return line


@dataclass
class Outcome:
    statuses: list[int]
    data: bytes
    stays_open: bool


def exchange(port: int, case: Case, expected: int) -> Outcome:
    """Send a case, read at most `expected` answers, and try another request on the same connection."""
    with connect(port) as sock:
        with suppress(ConnectionError):  # it may be refused before it is complete
            sock.sendall(case.raw)
            if case.eof:
                sock.shutdown(socket.SHUT_WR)
        answers = Answers(sock)
        statuses = []
        while len(statuses) < expected and (status := answers.read(case.head)):
            if status >= 200 or 100 in case.answers:
                statuses.append(status)
        data = answers.data
        last = 0
        with suppress(ConnectionError):
            if not case.eof:
                sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: corpus\r\n\r\n")
            last = answers.read()
            while last == 100:
                last = answers.read()
        is_next = last == 200 and b'"object"' in answers.data[len(data) :]
        if last and not is_next:
            statuses.append(last)
        return Outcome(statuses, data, is_next)
