"""Replicas, what each has to do, and which one a request goes to.

The choice: of the replicas that are up, the one believed to hold the longest prefix of the prompt, if that is a good
part of it; of several, the one with the least to do; of several still, the one that holds the fewest tokens, then the
one that was chosen longest ago. What a replica has to do is counted in tokens: prompt tokens that wait there,
`running_tokens` for each request that runs, and those that the prompt would displace from its cache, since they may be
needed again. The choice falls back to the replica with the least to do where the one with the prefix is too busy: where
more waits and runs there by more than the prefix spares and `imbalance_tokens` beside, and also by a factor of
`imbalance_ratio`; or where requests wait for its full cache and another's is not. What a prefix spares is computing it,
and what it would displace elsewhere. `RoutingPolicy` has these numbers.

What this router has under way itself it counts by tickets. What replicas report is needed where others send them
requests as well; the larger of both counts, so that a report may be late.
"""

import enum
from collections.abc import Collection
from dataclasses import dataclass
from itertools import count

from text_generation_inference.errors import TgiError
from text_generation_inference.router.held_prefixes import MAX_BLOCKS, HeldPrefixes
from text_generation_inference.router.prompt_key import PromptKey


class NoReplicaError(TgiError):
    """No replica is up."""

    status = 503
    error_type = "unhealthy"


class ReplicaState(enum.Enum):
    UP = "up"
    DRAINING = "draining"  # ends what it has, gets nothing new
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a replica reports of itself."""

    queued_tokens: int = 0  # prompt tokens that are not computed yet
    running: int = 0  # requests
    kv_usage: float = 0.0  # share of its cache that running requests hold


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """When a prefix is not worth waiting for."""

    running_tokens: int = 128  # of prompts, that a running request counts as
    imbalance_tokens: int = 512
    imbalance_ratio: float = 1.25
    full: float = 0.95  # of a cache: whoever goes there displaces others
    not_full: float = 0.80
    min_match: float = 0.25  # of a prompt: less is as good as nothing, and load decides


@dataclass(frozen=True, slots=True)
class ReplicaChoice:
    name: str
    num_matched_tokens: int  # that the replica is believed to hold
    by_prefix: bool = False  # that is why it was chosen
    fell_back: bool = False  # another one holds more, and has too much to do


class _Replica:
    __slots__ = ("chosen", "held", "name", "queued_tokens", "reported", "running", "state")

    def __init__(self, name: str, held: HeldPrefixes) -> None:
        self.name = name
        self.held = held
        self.state = ReplicaState.UP
        self.reported = ReplicaLoad()
        self.queued_tokens = self.running = 0  # of this router's own requests
        self.chosen = 0  # when last

    @property
    def queued(self) -> int:
        return max(self.queued_tokens, self.reported.queued_tokens)

    def work(self, running_tokens: int) -> int:
        """In tokens."""
        return self.queued + running_tokens * max(self.running, self.reported.running)


class Ticket:
    """A request under way to a replica. Whoever has it says when its first token came and when it ended, however."""

    __slots__ = ("_replica", "_waiting", "choice")

    def __init__(self, choice: ReplicaChoice, replica: _Replica, num_uncached: int) -> None:
        self.choice = choice
        self._replica: _Replica | None = replica
        self._waiting = num_uncached
        replica.queued_tokens += num_uncached
        replica.running += 1

    def first_token(self) -> None:
        if self._replica is not None:
            self._replica.queued_tokens -= self._waiting
            self._waiting = 0

    def end(self) -> None:
        """Once or more often."""
        self.first_token()
        if self._replica is not None:
            self._replica.running -= 1
            self._replica = None


class PrefixRouter:
    """Not for use by several threads."""

    def __init__(self, policy: RoutingPolicy | None = None, max_blocks: int = MAX_BLOCKS) -> None:
        """`max_blocks` of prompts are remembered for each replica."""
        self.policy = policy or RoutingPolicy()
        self._max_blocks = max_blocks
        self._replicas: dict[str, _Replica] = {}
        self._clock = count(1)

    # -- replicas --------------------------------------------------------------------------------------------------

    def add(self, name: str, capacity_tokens: int | None = None) -> None:
        """A replica is up and holds nothing: for the first time, or again. `capacity_tokens`: of its cache."""
        self._replicas[name] = _Replica(name, HeldPrefixes(capacity_tokens, self._max_blocks))

    def remove(self, name: str) -> None:
        """A replica is gone, with what it held; tickets for it may still be ended."""
        self._replicas.pop(name, None)

    def set_state(self, name: str, state: ReplicaState) -> None:
        """One that is down holds nothing when it comes up again."""
        replica = self._replicas[name]
        replica.state = state
        if state is ReplicaState.DOWN:
            replica.held.forget()

    def set_load(self, name: str, load: ReplicaLoad) -> None:
        self._replicas[name].reported = load

    def forget(self, name: str) -> None:
        """It lives, but holds nothing any more."""
        self._replicas[name].held.forget()

    @property
    def names(self) -> list[str]:
        return list(self._replicas)

    def state(self, name: str) -> ReplicaState:
        replica = self._replicas.get(name)
        return ReplicaState.DOWN if replica is None else replica.state

    def held_tokens(self, name: str) -> int:
        return self._replicas[name].held.num_tokens

    def running(self, name: str) -> int:
        """Requests under way there."""
        return self._replicas[name].running

    def queued_tokens(self, name: str) -> int:
        """Prompt tokens of those that have no token yet, less those that it holds."""
        return self._replicas[name].queued

    def work(self, name: str) -> int:
        """What it has to do, in tokens."""
        return self._replicas[name].work(self.policy.running_tokens)

    # -- requests --------------------------------------------------------------------------------------------------

    def choose(self, key: PromptKey, among: Collection[str] | None = None) -> ReplicaChoice:
        """Where a request should go; nothing is changed. Raises `NoReplicaError`."""
        return self._choose(key, among)[1]

    def place(self, key: PromptKey, among: Collection[str] | None = None) -> Ticket:
        """Choose, and count on the request being sent there."""
        replica, choice = self._choose(key, among)
        return self._send(replica, choice, key)

    def place_on(self, name: str, key: PromptKey) -> Ticket:
        """The same where somebody else has chosen."""
        replica = self._replicas[name]
        return self._send(replica, ReplicaChoice(name, key.tokens_at(replica.held.match(key))), key)

    def rank(self, key: PromptKey, among: Collection[str] | None = None) -> list[str]:
        """All replicas that are up: the one that would be chosen, then those with the least to do."""
        first = self._choose(key, among)[0]
        running_tokens = self.policy.running_tokens
        others = [replica for replica in self._candidates(among) if replica is not first]
        others.sort(key=lambda replica: (replica.work(running_tokens), replica.held.num_tokens, replica.chosen))
        return [first.name, *(replica.name for replica in others)]

    def note(self, name: str, key: PromptKey) -> None:
        """A replica holds this: a prompt with its answer, or what another router has sent."""
        replica = self._replicas.get(name)
        if replica is not None and replica.state is not ReplicaState.DOWN:
            replica.held.note(key)

    def _send(self, replica: _Replica, choice: ReplicaChoice, key: PromptKey) -> Ticket:
        replica.chosen = next(self._clock)
        replica.held.note(key)
        return Ticket(choice, replica, key.num_tokens - choice.num_matched_tokens)

    def _candidates(self, among: Collection[str] | None) -> list[_Replica]:
        return [
            replica
            for replica in self._replicas.values()
            if replica.state is ReplicaState.UP and (among is None or replica.name in among)
        ]

    def _choose(self, key: PromptKey, among: Collection[str] | None) -> tuple[_Replica, ReplicaChoice]:
        replicas = self._candidates(among)
        if not replicas:
            raise NoReplicaError("no replica is up")
        policy = self.policy
        least_match = policy.min_match * key.num_tokens
        best = least = None
        best_matched = best_displaced = 0
        for replica in replicas:
            matched = key.tokens_at(replica.held.match(key))
            worth = matched if matched >= least_match else 0
            work = replica.work(policy.running_tokens)
            displaced = replica.held.displaced(key.num_tokens - matched)
            rest = (work + displaced, replica.held.num_tokens, replica.chosen)
            if best is None or (-worth, *rest) < best[0]:
                best, best_matched, best_displaced = ((-worth, *rest), replica), matched, displaced
            if least is None or rest < least[0]:
                least = (rest, replica, matched, displaced)
        assert best is not None and least is not None
        chosen, other = best[1], least[1]
        num_spared = best_matched - least[2] + least[3] - best_displaced
        if chosen is not other and self._is_too_busy(chosen, other, num_spared):
            return other, ReplicaChoice(other.name, least[2], fell_back=True)
        return chosen, ReplicaChoice(chosen.name, best_matched, by_prefix=best[0][0] < 0)

    def _is_too_busy(self, chosen: _Replica, other: _Replica, num_spared: int) -> bool:
        """Whether the prefix is not worth it: `num_spared` tokens fewer are computed and displaced there."""
        policy = self.policy
        work, least = chosen.work(policy.running_tokens), other.work(policy.running_tokens)
        if work - least > num_spared + policy.imbalance_tokens and work > policy.imbalance_ratio * least:
            return True
        is_full = chosen.reported.kv_usage >= policy.full and chosen.queued > 0
        return is_full and other.reported.kv_usage <= policy.not_full

    def check(self) -> None:
        """Raise AssertionError unless the books balance."""
        for replica in self._replicas.values():
            replica.held.check()
            assert replica.queued_tokens >= 0 and replica.running >= 0
            assert replica.state is not ReplicaState.DOWN or not len(replica.held)
