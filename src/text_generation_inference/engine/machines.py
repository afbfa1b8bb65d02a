"""Ranks on other machines: how they come to the engine process of machine 0, and who they must be.

Each further machine runs the same command without HTTP (`launch.follower`). It connects to `--master-addr` over TCP:
once for itself, which is how it learns that the group has ended, and once for each of its ranks, whose process then has
that connection as a rank of machine 0 has its socket. Both ends prove that they know `--rank-token` before anything
else is read, by HMAC over numbers that are drawn for each connection; what is read then is msgpack. Nothing is
encrypted, as sums between machines are not either: that network is private. This listener closes once all ranks are
there; torch's store, where ranks look each other up, listens for as long as the group lives. Never torch.
"""

import errno
import fcntl
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import StartError
from text_generation_inference.version import __version__

_NONCE, _PROOF = 32, 32  # bytes
_MOST = 4096  # of what somebody says of himself
_HANDSHAKE_S = 5.0
_AT_ONCE = 64  # connections whose owner is not known yet
_LENGTH = struct.Struct("<I")
_SIOCGIFADDR = 0x8915


class Caller(msgspec.Struct, frozen=True):
    """Who connects."""

    version: str
    machine: int
    session: str  # of all connections of a machine that belong together
    rank: int | None = None  # None: the machine itself


class Verdict(msgspec.Struct, frozen=True):
    refusal: str = ""  # why not; empty: welcome


def ranks_of(config: ServerConfig, machine: int) -> range:
    """As many on each machine."""
    count = (config.num_shard or 1) // config.nnodes
    return range(machine * count, (machine + 1) * count)


# -- machine 0 -----------------------------------------------------------------------------------------------------


@dataclass
class _Machine:
    session: str
    control: socket.socket
    links: dict[int, socket.socket] = field(default_factory=dict[int, socket.socket])

    def close(self) -> None:
        for stream in (self.control, *self.links.values()):
            stream.close()


class Machines:
    """The other machines of a group, while they come and until the group ends."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._token = (config.rank_token or "").encode()
        self._lock = threading.Lock()
        self._found: dict[int, _Machine] = {}
        self._unknown = threading.BoundedSemaphore(_AT_ONCE)

    def gather(self, progress: Callable[[str, int, int], None]) -> dict[int, socket.socket]:
        """Waits until all ranks of other machines are there, however long that takes; their sockets.

        Raises `StartError` if the address cannot be taken.
        """
        listener = _listen(self._config)
        needed = [rank for machine in range(1, self._config.nnodes) for rank in ranks_of(self._config, machine)]
        try:
            while True:
                with self._lock:
                    self._forget_lost()
                    links = {rank: link for machine in self._found.values() for rank, link in machine.links.items()}
                if len(links) == len(needed):
                    return links
                progress("wait for other machines", len(links), len(needed))
                ready, _, _ = select.select([listener], [], [], 0.25)
                if ready and self._unknown.acquire(timeout=_HANDSHAKE_S):
                    stream, _ = listener.accept()
                    threading.Thread(target=self._receive, args=(stream,), daemon=True).start()
        finally:
            listener.close()

    def _receive(self, stream: socket.socket) -> None:
        try:
            caller = _meet_caller(stream, self._token)
            if caller is not None:
                self._admit(caller, stream)
            else:
                stream.close()
        except (OSError, msgspec.MsgspecError):  # it left, or is none of ours
            stream.close()
        finally:
            self._unknown.release()

    def _admit(self, caller: Caller, stream: socket.socket) -> None:
        refusal = self._find_refusal(caller)
        with self._lock:
            present = self._found.get(caller.machine)
            if not refusal and caller.rank is not None and (present is None or present.session != caller.session):
                refusal = "its machine has come again"
            _send(stream, msgspec.msgpack.encode(Verdict(refusal)))
            if refusal:
                stream.close()
            elif caller.rank is None:
                if present is not None:
                    present.close()
                self._found[caller.machine] = _Machine(caller.session, stream)
            elif present is not None:
                present.links[caller.rank] = stream

    def _find_refusal(self, caller: Caller) -> str:
        if caller.version != __version__:
            return f"machine 0 has version {__version__}, this one {caller.version}"
        if not 0 < caller.machine < self._config.nnodes:
            return f"machine 0 has `nnodes` {self._config.nnodes}, this one is `node_rank` {caller.machine}"
        if caller.rank is not None and caller.rank not in ranks_of(self._config, caller.machine):
            return f"machine 0 has `num_shard` {self._config.num_shard}, which has no rank {caller.rank} there"
        return ""

    def _forget_lost(self) -> None:
        """Machines that have left again before all were there."""
        for number, machine in list(self._found.items()):
            if any(_is_closed(stream) for stream in (machine.control, *machine.links.values())):
                machine.close()
                del self._found[number]

    def end(self) -> None:
        """Tells the machines that the group has ended: they kill their ranks, whatever those do."""
        with self._lock:
            for machine in self._found.values():
                machine.control.close()
            self._found.clear()


def _listen(config: ServerConfig) -> socket.socket:
    host, port = config.master_addr, config.master_port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise StartError(f"`master_addr` {host} cannot be found: {error.strerror}") from None
    family, address = found[0], found[4]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("::" if family == socket.AF_INET6 else "", port))  # it is an address in front of this one
        listener.listen(_AT_ONCE)
    except OSError as error:
        listener.close()
        way_out = "choose another `master_port` on every machine" if error.errno == errno.EADDRINUSE else "is it ours?"
        raise StartError(f"machines cannot meet at {host}:{port}: {error.strerror}; {way_out}") from None
    return listener


def _meet_caller(stream: socket.socket, token: bytes) -> Caller | None:
    """None: it does not know the token."""
    stream.settimeout(_HANDSHAKE_S)
    mine = secrets.token_bytes(_NONCE)
    stream.sendall(mine)
    theirs = _receive_exactly(stream, _NONCE)
    said = _receive(stream)
    if not hmac.compare_digest(_receive_exactly(stream, _PROOF), _prove(token, b"caller", mine, theirs, said)):
        return None
    stream.sendall(_prove(token, b"machine 0", mine, theirs, said))
    caller = msgspec.msgpack.decode(said, type=Caller)
    _keep_alive(stream)
    return caller


# -- other machines ------------------------------------------------------------------------------------------------


class Refused(StartError):
    """Machine 0 does not take this one; trying again would not help."""


def call(config: ServerConfig, session: str, rank: int | None = None, version: str = __version__) -> socket.socket:
    """A connection to machine 0. Raises `OSError` while nobody answers there, `Refused` if it says why not."""
    stream = socket.create_connection((config.master_addr, config.master_port), _HANDSHAKE_S)
    try:
        token = (config.rank_token or "").encode()
        theirs = _receive_exactly(stream, _NONCE)
        mine = secrets.token_bytes(_NONCE)
        said = msgspec.msgpack.encode(Caller(version, config.node_rank, session, rank))
        stream.sendall(mine + _LENGTH.pack(len(said)) + said + _prove(token, b"caller", theirs, mine, said))
        try:
            proof = _receive_exactly(stream, _PROOF)
        except ConnectionError:
            raise Refused("machine 0 has another `rank_token`, or is none of ours") from None
        if not hmac.compare_digest(proof, _prove(token, b"machine 0", theirs, mine, said)):
            raise Refused("whoever answers at `master_addr` does not know `rank_token`")
        verdict = msgspec.msgpack.decode(_receive(stream), type=Verdict)
        if verdict.refusal:
            raise Refused(verdict.refusal)
        _keep_alive(stream)
        return stream
    except BaseException:
        stream.close()
        raise


def has_ended(control: socket.socket, seconds: float) -> bool:
    """Whether the group has ended, after waiting for that."""
    ready, _, _ = select.select([control], [], [], seconds)
    return bool(ready) and _is_closed(control)


# -- both ----------------------------------------------------------------------------------------------------------


def find_interface(host: str) -> str | None:
    """The network interface from which a host is reached: that is where sums go as well."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        own = probe.getsockname()[0]
        if own.startswith("127."):
            return "lo"
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                request = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]) == own:
                    return name
    return None


def free_port(host: str) -> int:
    """One that nobody listens on."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def new_session() -> str:
    return f"{os.getpid()}-{time.time_ns()}"


def _prove(token: bytes, who: bytes, *parts: bytes) -> bytes:
    return hmac.new(token, b"\0".join((b"tgi ranks", who, *parts)), hashlib.sha256).digest()


def _keep_alive(stream: socket.socket) -> None:
    """A machine that is gone without a word is noticed within seconds, also when nobody says anything."""
    stream.settimeout(None)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _is_closed(stream: socket.socket) -> bool:
    try:
        return stream.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _send(stream: socket.socket, said: bytes) -> None:
    stream.sendall(_LENGTH.pack(len(said)) + said)


def _receive(stream: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_receive_exactly(stream, _LENGTH.size))
    if length > _MOST:
        raise ConnectionError("it says too much")
    return _receive_exactly(stream, length)


def _receive_exactly(stream: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = stream.recv(count - len(received))
        if not part:
            raise ConnectionError("the other end has left")
        received += part
    return received
