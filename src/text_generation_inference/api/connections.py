"""What all connections together may take: descriptors, and bytes of bodies that are not complete yet.

One `Connections` per api process. Beyond its limit a new connection takes the place of one that is idle; if
none is, it may still ask for what has no body (`/health`, `/metrics`), out of a small reserve. One `BodyBudget` counts
the bytes of bodies that are still arriving. Every refusal is counted, and logged once in a while.
"""

import fcntl
import logging
import resource
import socket
import struct
import termios
import time
from typing import Protocol

from text_generation_inference.api.logs import fields
from text_generation_inference.api.metrics import Metrics

log = logging.getLogger("text_generation_inference.api")

MAX_CONNECTIONS = 16_384  # unless asked for more: each takes memory as well
_OTHER_DESCRIPTORS = 128  # for everything that is no connection
_MAX_SPARE = 256
_LOG_EVERY_S = 10.0
_TCP_CLOSED = 7  # first byte of TCP_INFO

MAX_BODY_BYTES = 256_000_000  # of all bodies together, unless a single one may be larger
SMALL_BODY = 64_000  # bytes; an eighth of the budget is kept for bodies up to this


def raise_descriptor_limit() -> int:
    """As many descriptors as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            log.debug("The limit of open files is raised", extra=fields(before=soft, now=hard))
        except (OSError, ValueError) as error:
            log.warning("The limit of open files stays as it is: %s", error, extra=fields(limit=soft))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def derive_limits(descriptors: int, asked: int | None) -> tuple[int, int]:
    """How many connections may be open, and how many more there may be of each kind that `Connections` has beyond."""
    usable = max(descriptors - _OTHER_DESCRIPTORS, descriptors // 2)
    spare = min(usable // 16, _MAX_SPARE)
    return max(1, min(asked or MAX_CONNECTIONS, usable - 3 * spare)), max(1, spare)


class Refusals:
    """Counts what is turned away, and says so at most every few seconds."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._told: dict[str, float] = {}
        self._since: dict[str, int] = {}

    def add(self, reason: str, text: str) -> None:
        """`reason`: connections, body_bytes, malformed or not_reading."""
        self._metrics.refuse_http(reason)
        self._since[reason] = self._since.get(reason, 0) + 1
        now = time.monotonic()
        if now - self._told.get(reason, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._told[reason] = now
            level = logging.DEBUG if reason == "malformed" else logging.WARNING
            log.log(level, "%s", text, extra=fields(reason=reason, count=self._since.pop(reason)))


class Member(Protocol):
    """A connection, as far as this file is concerned."""

    def evict(self) -> None: ...
    def drain(self) -> None: ...
    def check_progress(self, now: float) -> None: ...


Group = dict[Member, None]  # in the order in which they came into it


class Connections:
    """All open connections. Beyond `limit` there may be `spare` whose request has not come yet, as many whose request
    without a body is answered, and as many whose refusal is on its way; where there are more the oldest goes."""

    def __init__(self, limit: int, spare: int, metrics: Metrics) -> None:
        self.limit, self.spare = limit, spare
        self.refusals = Refusals(metrics)
        self.draining = False
        self._metrics = metrics
        self._members: Group = {}
        self._idle: Group = {}  # of the members, those that ask nothing
        self._unheard: Group = {}
        self._heard: Group = {}
        self._leaving: Group = {}

    def enter(self, member: Member) -> bool:
        """Whether a new connection may do anything, or only what has no body."""
        if len(self._members) >= self.limit and self._idle:
            oldest = next(iter(self._idle))
            self.leave(oldest)
            self._metrics.evict_connection()
            oldest.evict()
        if len(self._members) < self.limit:
            self._members[member] = self._idle[member] = None
            self._metrics.connections(len(self._members))
            return True
        self._join(self._unheard, member)
        return False

    def may_ask(self, member: Member, has_body: bool) -> bool:
        """Whether a connection beyond the limit gets an answer to its request."""
        if has_body or len(self._heard) >= self.spare:
            self.refuse_one()
            return False
        self._unheard.pop(member, None)
        self._heard[member] = None
        return True

    def set_leaving(self, member: Member) -> None:
        """A connection that was refused, if it is beyond the limit."""
        if member not in self._members:
            self._unheard.pop(member, None)
            self._join(self._leaving, member)

    def _join(self, group: Group, member: Member) -> None:
        if len(group) >= self.spare:
            oldest = next(iter(group))
            self.leave(oldest)
            if group is self._unheard:
                self.refuse_one()
            oldest.evict()
        group[member] = None

    def refuse_one(self) -> None:
        self.refusals.add("connections", "Connections are refused: too many are open")

    def leave(self, member: Member) -> None:
        for group in (self._members, self._idle, self._unheard, self._heard, self._leaving):
            group.pop(member, None)
        self._metrics.connections(len(self._members))

    def set_idle(self, member: Member, idle: bool) -> None:
        if not idle:
            self._idle.pop(member, None)
        elif member in self._members:
            self._idle[member] = None

    def drain(self) -> None:
        """From now on each connection ends with the answer it gets, and says so where it still can."""
        self.draining = True
        for member in self._all():
            member.drain()

    def check_progress(self) -> None:
        """End the connections whose clients do not take what is written for them. To be called every few seconds."""
        now = time.monotonic()
        for member in self._all():
            member.check_progress(now)

    def _all(self) -> list[Member]:
        return [*self._members, *self._unheard, *self._heard, *self._leaving]


class BodyBudget:
    """Bytes of request bodies in memory, over all connections."""

    def __init__(self, payload_limit: int, metrics: Metrics) -> None:
        self._limit = max(MAX_BODY_BYTES, 2 * payload_limit)
        self._refusals, self._metrics = Refusals(metrics), metrics
        self.used = 0

    def take(self, count: int, size: int) -> bool:
        """Room for `count` more bytes of a body that then has `size`."""
        limit = self._limit if size <= SMALL_BODY else self._limit - self._limit // 8
        if self.used + count > limit:
            self._refusals.add("body_bytes", "Bodies are refused: too many bytes of others wait")
            return False
        self.used += count
        self._metrics.buffered_bodies(self.used)
        return True

    def give_back(self, count: int) -> None:
        self.used -= count
        self._metrics.buffered_bodies(self.used)


# -- what the kernel knows of a connection -----------------------------------------------------------------------------


def num_unacknowledged(sock: socket.socket) -> int:
    """Bytes that the kernel keeps for the other end."""
    return struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))[0]


def is_reset(sock: socket.socket) -> bool:
    """Whether the other end has answered something that was written to it with a reset."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSED
