"""What the ingress and Ray's router, in one process and two threads, know of replicas together.

The router is told which replicas there are and chooses by these books; the ingress writes down what it sends where.
"""

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from text_generation_inference.router import (
    NoReplicaError,
    PrefixRouter,
    PromptKey,
    ReplicaLoad,
    ReplicaState,
    Ticket,
)


class RoutingBooks:
    """A `PrefixRouter` for two threads: that of Ray's routers, and that of the ingress."""

    def __init__(self) -> None:
        self._router = PrefixRouter()
        self._lock = threading.Lock()
        self.addresses: dict[str, str] = {}  # by the replica's name; replaced, never changed

    def update(self, name: str, metadata: Mapping[str, Any], stats: Mapping[str, Any]) -> None:
        """A replica is there; what it said of itself first and last."""
        with self._lock:
            if name not in self.addresses:
                self._router.add(name, metadata.get("capacity_tokens") or None)
                self.addresses = {**self.addresses, name: metadata["address"]}
            is_up = bool(stats.get("ready", True))
            if is_up != (self._router.state(name) is ReplicaState.UP):
                self._router.set_state(name, ReplicaState.UP if is_up else ReplicaState.DOWN)
            queued_tokens, running = int(stats.get("queued_tokens", 0)), int(stats.get("running", 0))
            self._router.set_load(name, ReplicaLoad(queued_tokens, running, stats.get("kv_usage", 0.0)))

    def keep(self, names: Iterable[str]) -> None:
        """Others are gone, with what they held."""
        with self._lock:
            gone = set(self.addresses).difference(names)
            for name in gone:
                self._router.remove(name)
            if gone:
                self.addresses = {name: self.addresses[name] for name in self.addresses if name not in gone}

    def rank(self, key: PromptKey, among: list[str]) -> list[str]:
        """Best first; all of them, in any order, where none is up."""
        with self._lock:
            try:
                return self._router.rank(key, among)
            except NoReplicaError:
                return among

    def place(self, name: str, key: PromptKey) -> Ticket | None:
        with self._lock:
            return self._router.place_on(name, key) if name in self.addresses else None

    def first_token(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            with self._lock:
                ticket.first_token()

    def end(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            with self._lock:
                ticket.end()


_books: dict[str, RoutingBooks] = {}


def books_of(deployment: str) -> RoutingBooks:
    """Those of a deployment, in this process."""
    return _books.setdefault(deployment, RoutingBooks())
