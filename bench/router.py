"""What routing by prefix costs and brings: microseconds per request; hit rate and time to first token of conversations.

    .venv-ray/bin/python bench/router.py            # beside Ray's own router by prefixes
    python bench/router.py                          # without it

Four replicas without a model: the real scheduler and the real books of blocks, steps that take 8 ms, 50 us for each
prompt token and 50 us for each running request on a clock of their own. Conversations of several turns begin one after
the other; each has a text of its own, behind instructions that all share or none, and the next turn comes some seconds
after the answer. The conversations that go on at a time need more than one cache has room for. Every router gets the
same conversations at the same times.
"""

import argparse
import heapq
import random
import statistics
import time
from importlib.util import find_spec
from itertools import count, product
from typing import Any, ClassVar

from ray_prefix_policy import RayPrefixPolicy

from text_generation_inference.router import PrefixRouter, key_of_text, key_of_tokens
from text_generation_inference.scheduler.blocks import BlockPool
from text_generation_inference.scheduler.policy import BatchPolicy
from text_generation_inference.scheduler.scheduler import Scheduler
from text_generation_inference.types import GenerationRequest, SamplingParams, StepResult

REPLICAS = ("0", "1", "2", "3")
CACHE_TOKENS = 48_000
OWN, QUESTION, ANSWER, TURNS = 1_000, 60, 120, 8
PAUSE_S = 12.0
STEP_S, PROMPT_TOKEN_S, ROW_S = 0.008, 50e-6, 50e-6


class ReplicaDouble:
    """A scheduler with its blocks; steps take their time on a clock that is handed in."""

    def __init__(self) -> None:
        self.pool = BlockPool(CACHE_TOKENS // 16 + 1, 16)
        policy = BatchPolicy(max_batch_prefill_tokens=2_048, max_batch_size=128, max_total_tokens=8_192)
        self.scheduler = Scheduler(policy, self.pool)
        self._num_decoding: set[int] = set()
        self._plan = None
        self.num_requests = 0  # under way

    def begin(self) -> float | None:
        """Seconds that the next step takes; None: nothing to do, or a step is under way."""
        if self._plan is not None or not self.scheduler.has_work:
            return None
        plan = self.scheduler.plan()
        if plan is None:
            return None
        self._plan = plan
        self._num_decoding -= set(plan.leave)
        self._num_decoding |= set(plan.join)
        num_prompt = sum(chunk.end - chunk.start for chunk in plan.chunks)
        return STEP_S + PROMPT_TOKEN_S * num_prompt + ROW_S * len(self._num_decoding)

    def end(self):
        plan, self._plan = self._plan, None
        num_rows = len(self._num_decoding) if plan.decode else 0
        num_rows += sum(chunk.samples for chunk in plan.chunks)
        return self.scheduler.apply(StepResult(plan.step, [random.randrange(2, 30_000)] * num_rows, [0.0] * num_rows))


# -- routers -------------------------------------------------------------------------------------------------------


class RoundRobin:
    name = "round robin"

    def __init__(self, replicas) -> None:
        self._turn = count()

    def choose(self, tokens, now):
        return str(next(self._turn) % len(REPLICAS)), None

    def first_token(self, ticket) -> None:
        pass

    def end(self, ticket, place, tokens) -> None:
        pass


class LeastLoaded(RoundRobin):
    name = "fewest requests"

    def __init__(self, replicas) -> None:
        self._replicas = replicas

    def choose(self, tokens, now):
        return min(REPLICAS, key=lambda name: (self._replicas[name].num_requests, random.random())), None


class Ours(RoundRobin):
    name = "ours"

    def __init__(self, replicas) -> None:
        self._router = PrefixRouter()
        for name in REPLICAS:
            self._router.add(name, CACHE_TOKENS)

    def choose(self, tokens, now):
        ticket = self._router.place(key_of_tokens(tokens))
        return ticket.choice.name, ticket

    def first_token(self, ticket) -> None:
        ticket.first_token()

    def end(self, ticket, place, tokens) -> None:
        ticket.end()
        self._router.note(place, key_of_tokens(tokens))


class OursByText(Ours):
    """As where tokens are not known, nor answers: a character for each four of which a token is counted."""

    name = "ours, by text"

    def choose(self, tokens, now):
        ticket = self._router.place(key_of_text("".join(chr(32 + token) * 4 for token in tokens)))
        return ticket.choice.name, ticket

    def end(self, ticket, place, tokens) -> None:
        ticket.end()


class Rays(RoundRobin):
    """Ray's own class with its defaults. A character for each token."""

    name = "Ray's, defaults"
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, replicas) -> None:
        self._policy = RayPrefixPolicy(REPLICAS, lambda name: replicas[name].num_requests, **self.settings)

    def choose(self, tokens, now):
        return self._policy.place("".join(chr(32 + token) for token in tokens), now), None


class RaysTuned(Rays):
    """The same with load looked at, and with no more remembered than a replica's cache holds."""

    name = "Ray's, threshold 10, evicting"
    settings: ClassVar[dict[str, Any]] = {
        "imbalanced_threshold": 10,
        "do_eviction": True,
        "eviction_threshold_chars": CACHE_TOKENS,
        "eviction_target_chars": CACHE_TOKENS * 9 // 10,
    }


# -- conversations -------------------------------------------------------------------------------------------------


def simulate(make_router, rate: float, num_shared: int, num_conversations: int, seed: int) -> dict[str, float]:
    """Conversations that begin at `rate` a second; figures of those in the middle of the run."""
    random.seed(seed)
    rng = random.Random(seed)
    replicas = {name: ReplicaDouble() for name in REPLICAS}
    router = make_router(replicas)
    shared = [rng.randrange(2, 30_000) for _ in range(num_shared)]
    events: list[tuple] = []
    order = count()
    start = 0.0
    for number in range(num_conversations):
        start += rng.expovariate(rate)
        texts = [
            [rng.randrange(2, 30_000) for _ in range(QUESTION + (OWN if turn == 0 else 0))] for turn in range(TURNS)
        ]
        pauses = [rng.expovariate(1 / PAUSE_S) for _ in range(TURNS)]
        heapq.heappush(events, (start, next(order), "turn", (number, 0, list(shared), texts, pauses)))
    measured = range(num_conversations // 5, num_conversations * 4 // 5)
    waiting: dict[int, tuple] = {}
    first_tokens: list[float] = []
    num_prompt = num_cached = 0
    routing: list[float] = []

    def step(name: str, now: float) -> None:
        seconds = replicas[name].begin()
        if seconds is not None:
            heapq.heappush(events, (now + seconds, next(order), "step", name))

    while events:
        now, _, kind, what = heapq.heappop(events)
        if kind == "turn":
            number, turn, known, texts, pauses = what
            tokens = known + texts[turn]
            begin = time.perf_counter()
            place, ticket = router.choose(tokens, now)
            routing.append(time.perf_counter() - begin)
            request_id = number * TURNS + turn
            waiting[request_id] = (now, place, ticket, tokens, [], what)
            replicas[place].num_requests += 1
            replicas[place].scheduler.add(
                GenerationRequest(
                    id=request_id,
                    token_ids=list(tokens),
                    sampling=SamplingParams(),
                    max_new_tokens=ANSWER,
                    stop_token_ids=[],
                    seed=0,
                )
            )
            step(place, now)
            continue
        out = replicas[what].end()
        for admitted in out.admitted:
            if admitted.request_id // TURNS in measured:
                num_cached += admitted.num_cached_tokens
                num_prompt += len(waiting[admitted.request_id][3])
        for request_id, token in zip(out.request_ids, out.token_ids, strict=True):
            arrived, place, ticket, _, answer, _ = waiting[request_id]
            if not answer:
                router.first_token(ticket)
                if request_id // TURNS in measured:
                    first_tokens.append(now - arrived)
            answer.append(token)
        for finish in out.finished:
            _, place, ticket, tokens, answer, (number, turn, _, texts, pauses) = waiting.pop(finish.request_id)
            replicas[place].num_requests -= 1
            router.end(ticket, place, tokens + answer[:-1])
            if turn + 1 < TURNS:
                due = now + pauses[turn]
                heapq.heappush(events, (due, next(order), "turn", (number, turn + 1, tokens + answer, texts, pauses)))
        step(what, now)
    first_tokens.sort()
    return {
        "hit rate": num_cached / num_prompt,
        "p50, ms": 1e3 * first_tokens[len(first_tokens) // 2],
        "mean, ms": 1e3 * statistics.fmean(first_tokens),
        "p95, ms": 1e3 * first_tokens[len(first_tokens) * 95 // 100],
        "routing, us": 1e6 * statistics.median(routing),
    }


# -- microseconds --------------------------------------------------------------------------------------------------


def measure_cost(num_tokens: int, num_replicas: int, is_known: bool) -> tuple[float, float]:
    """(hashing alone, hashing and placing) one prompt, microseconds; medians of 2,000."""
    rng = random.Random(0)
    router = PrefixRouter()
    for number in range(num_replicas):
        router.add(str(number))
    hashing: list[float] = []
    placing: list[float] = []
    same = [rng.randrange(128_000) for _ in range(num_tokens)]
    for _ in range(2_000 if num_tokens <= 10_000 else 200):
        prompt = list(same) if is_known else [rng.randrange(128_000) for _ in range(num_tokens)]
        begin = time.perf_counter()
        key = key_of_tokens(prompt, ("", None, ()))
        middle = time.perf_counter()
        ticket = router.place(key)
        ticket.first_token()
        ticket.end()
        placing.append(time.perf_counter() - begin)
        hashing.append(middle - begin)
    return 1e6 * statistics.median(hashing), 1e6 * statistics.median(placing)


def measure_ray(num_tokens: int, is_known: bool) -> float:
    """The same for Ray's class, its tree in an actor as Ray has it; microseconds. Needs a cluster."""
    rng = random.Random(0)
    policy = RayPrefixPolicy(REPLICAS, lambda name: 0, with_actor=True)
    same = "".join(chr(32 + rng.randrange(30_000)) for _ in range(num_tokens))
    took: list[float] = []
    for _ in range(200):
        text = same if is_known else "".join(chr(32 + rng.randrange(30_000)) for _ in range(num_tokens))
        begin = time.perf_counter()
        policy.place(text)
        took.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(took)


def print_costs(with_ray: bool) -> None:
    print("| prompt tokens | replicas | prompt is | hashing, us | in all, us |\n|---|---|---|---|---|")
    for num_tokens, num_replicas in ((200, 4), (2_000, 2), (2_000, 4), (2_000, 64), (20_000, 4)):
        for is_known in (False, True):
            hashing, all_us = measure_cost(num_tokens, num_replicas, is_known)
            word = "known" if is_known else "new"
            print(f"| {num_tokens:,} | {num_replicas} | {word} | {hashing:.1f} | {all_us:.1f} |", flush=True)
    if not with_ray:
        return
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    for num_tokens in (200, 2_000, 20_000):
        for is_known in (False, True):
            word = "known" if is_known else "new"
            print(f"| {num_tokens:,} | 4, Ray's | {word} | | {measure_ray(num_tokens, is_known):.0f} |", flush=True)
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.6, 1.2], help="conversations begun a second")
    parser.add_argument("--shared", type=int, nargs="+", default=[200, 0], help="tokens that all prompts begin with")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    has_ray = find_spec("ray") is not None
    print_costs(has_ray)
    routers = [RoundRobin, LeastLoaded, Ours, OursByText, *([Rays, RaysTuned] if has_ray else [])]
    columns = ("hit rate", "p50, ms", "mean, ms", "p95, ms", "routing, us")
    print(f"\n| shared | conversations/s | router | {' | '.join(columns)} |\n|---|---|---|{'---|' * len(columns)}")
    for num_shared, rate in product(options.shared, options.rates):
        for make_router in routers:
            seeds = range(options.seeds)
            runs = [simulate(make_router, rate, num_shared, options.conversations, seed) for seed in seeds]
            means = {column: statistics.fmean(run[column] for run in runs) for column in columns}
            cells = [f"{means['hit rate']:.1%}", *(f"{means[column]:.0f}" for column in columns[1:])]
            print(f"| {num_shared} | {rate:g} | {make_router.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
