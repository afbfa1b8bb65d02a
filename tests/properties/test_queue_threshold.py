"""QUEUE_THRESHOLD_MS: overdue requests first, else shorter ones; nobody is lost, and nobody waits forever."""

from harness import Harness, check_outputs, make, policy, scenarios
from hypothesis import given, settings
from hypothesis import strategies as st

from text_generation_inference.scheduler.policy import BatchPolicy
from text_generation_inference.scheduler.queue import ShorterFirst, TakingTurns, make_queue
from text_generation_inference.scheduler.request import Request
from text_generation_inference.scheduler.scheduler import Scheduler

THRESHOLD_MS = 5
NS = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now * NS


def request(number: int, length: int, clock: Clock) -> Request:
    return Request(make(number, [0] * length, 1), number, clock())


def expected_order(returned: list[Request], waiting: list[Request], now_ms: int) -> list[Request]:
    """The rule, said once more and simply."""
    overdue = [r for r in waiting if now_ms - r.arrived_ns // NS > THRESHOLD_MS]
    others = [r for r in waiting if r not in overdue]
    return returned + sorted(overdue, key=lambda r: r.order) + sorted(others, key=lambda r: (len(r.tokens), r.order))


def anybody(caller: str) -> bool:
    return True


def take(queue: TakingTurns | ShorterFirst) -> Request:
    head = queue.head(anybody)
    assert head is not None
    queue.take(head)
    return head


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 6), st.sampled_from(["take", "wait", "take", "return", "late"])), max_size=60))
def test_order(actions: list[int | str]) -> None:
    clock = Clock()
    queue = ShorterFirst(THRESHOLD_MS, clock)
    returned: list[Request] = []
    waiting: list[Request] = []
    taken: list[Request] = []
    for number, action in enumerate(actions):
        if isinstance(action, int):
            waiting.append(request(number, action, clock))
            queue.append(waiting[-1])
        elif action == "wait":
            clock.now += 2
        elif action == "return" and taken:
            returned.insert(0, taken.pop())
            queue.appendleft(returned[0])
        elif action in ("take", "late") and queue:
            order = expected_order(returned, waiting, clock.now)
            assert queue.head(anybody) is order[0]
            if action == "late":
                clock.now += 100  # whatever became overdue since, the one that was looked at is taken
            queue.take(order[0])
            (returned if order[0] in returned else waiting).remove(order[0])
            taken.append(order[0])
        assert list(queue) == expected_order(returned, waiting, clock.now)
        assert (len(queue), bool(queue)) == (len(returned) + len(waiting), bool(returned or waiting))
    while queue:
        order = expected_order(returned, waiting, clock.now)
        assert take(queue) is order[0]
        (returned if order[0] in returned else waiting).remove(order[0])
    assert not returned and not waiting


def test_without_a_threshold_they_go_as_they_came() -> None:
    clock = Clock()
    queue = make_queue(None, clock)
    for number, length in enumerate((5, 1, 3)):
        queue.append(request(number, length, clock))
    assert [take(queue).order for _ in range(3)] == [0, 1, 2]


def test_what_is_gone_is_forgotten() -> None:
    """The heap of lengths does not grow while everybody is taken as overdue."""
    clock = Clock()
    queue = ShorterFirst(0, clock)
    for number in range(5000):
        queue.append(request(number, 1 + number % 7, clock))
        clock.now += 1
        assert take(queue).order == number
        assert len(queue._by_length) <= 100


class ThresholdHarness(Harness):
    def __init__(self, num_blocks: int, block_size: int, overlap: bool, policy: BatchPolicy, threshold_ms: int) -> None:
        super().__init__(num_blocks, block_size, True, overlap, policy)
        self.clock = Clock()
        self.scheduler = Scheduler(policy, self.pool, clock=self.clock, queue_threshold_ms=threshold_ms)
        self.started: list[int] = []

    def step(self) -> None:
        self.clock.now += 1
        super().step()

    def count_admissions(self, plan: object) -> None:
        super().count_admissions(plan)
        self.started += [admission.request.id for admission in plan.admit]


@settings(max_examples=100, deadline=None)
@given(scenarios(), st.integers(0, 30))
def test_random_traffic_gets_its_tokens(scenario: dict, threshold_ms: int) -> None:
    num_blocks = scenario["least_blocks"] + scenario["spare_blocks"]
    harness = ThresholdHarness(
        num_blocks, scenario["block_size"], scenario["overlap"], scenario["policy"], threshold_ms
    )
    for tick in range(45):
        for request, arrival, abort in zip(scenario["requests"], scenario["arrivals"], scenario["aborts"], strict=True):
            if arrival == tick:
                harness.scheduler.add(request)
            if abort is not None and abort == tick:
                harness.scheduler.abort(request.id)
        harness.step()
    harness.drain()
    check_outputs(scenario, harness)


def test_a_long_prompt_is_not_passed_by_forever() -> None:
    """One place, and a stream of short prompts: the long one has its turn once it is overdue."""
    harness = ThresholdHarness(100, 4, False, policy(max_batch_size=1), threshold_ms=20)
    harness.scheduler.add(make(0, [1] * 40, 2))
    harness.scheduler.add(make(1, [1] * 2, 2))
    for number in range(2, 60):
        harness.scheduler.add(make(number, [1] * 2, 2))
        harness.step()
    harness.drain()
    place = harness.started.index(0)
    assert harness.started[0] == 1  # the shorter one, although it came later
    assert 3 < place < 15
    # From then on everybody is overdue, and they go as they came.
    assert harness.started[place + 1 :] == sorted(harness.started[place + 1 :])
