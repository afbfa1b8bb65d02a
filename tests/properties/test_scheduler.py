"""Random traffic through the scheduler with a token oracle in place of the model.

The oracle keeps a KV cache addressed exactly as a runner would. The entry of a position is a hash of the token, the
position and the entry before it, read back through the block table, as a real key depends on all that precedes it; the
next token is a hash of all entries. A wrong block, offset, order, slot, prefix or stale entry changes a token.

Where rows may yield several tokens in a step, each yields a number of them that only the runner knows, none included; what
it wrote beyond them, into the blocks that it has for all it may yield, is worth nothing.
"""

import gc

import msgspec
import pytest
from harness import Harness, OracleRunner, check_outputs, expected_output, make, policy, relaxed, scenarios
from hypothesis import given

from text_generation_inference.errors import ValidationError
from text_generation_inference.scheduler.blocks import BlockPool
from text_generation_inference.scheduler.prefix import PrefixIndex
from text_generation_inference.scheduler.request import Request
from text_generation_inference.scheduler.scheduler import Scheduler
from text_generation_inference.types import (
    PictureSpan,
    StepPlan,
    StepResult,
    TopTokens,
)


def run(scenario: dict, prefix_caching: bool, spare_blocks: int) -> Harness:
    num_blocks = scenario["least_blocks"] + spare_blocks
    harness = Harness(num_blocks, scenario["block_size"], prefix_caching, scenario["overlap"], scenario["policy"])
    harness.play(scenario)
    return harness


@relaxed
@given(scenarios())
def test_every_request_gets_its_tokens_and_the_books_balance(scenario: dict) -> None:
    check_outputs(scenario, run(scenario, True, scenario["spare_blocks"]))


@relaxed
@given(scenarios())
def test_the_smallest_pool_and_no_cache_change_nothing(scenario: dict) -> None:
    small = run(scenario, True, 0)
    large = run(scenario, False, 500)
    check_outputs(scenario, small)
    check_outputs(scenario, large)
    assert large.scheduler.stats.num_preemptions == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_pool_for_one_request_preempts_but_finishes_all(overlap: bool) -> None:
    harness = Harness(9, 4, True, overlap, policy(max_total_tokens=32))
    requests = [make(i, [i, 1, 2], 29) for i in range(4)]
    for request in requests:
        harness.scheduler.add(request)
    harness.drain()
    assert harness.scheduler.stats.num_preemptions > 0
    assert all(harness.outputs[r.id] == expected_output(r) for r in requests)


def result_of(plan: StepPlan, *rows: list[int]) -> StepResult:
    tokens = [token for row in rows for token in row]
    return StepResult(plan.step, tokens, [0.0] * len(tokens), counts=[len(row) for row in rows])


def test_a_row_ends_in_the_middle_of_its_tokens() -> None:
    """By a stop token, by its length, by an error; what it yielded behind that is nobody's."""
    scheduler = Scheduler(policy(tokens_per_row=4), BlockPool(100, 4), clock=lambda: 0)
    stopping = msgspec.structs.replace(make(0, [5, 5, 5], 20), stop_token_ids=[9])
    for request in (stopping, make(1, [6], 3), make(2, [7], 20), make(3, [8], 20)):
        scheduler.add(request)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(StepResult(plan.step, [1, 1, 1, 1], [0.0] * 4))
    plan = scheduler.plan()
    assert plan is not None
    result = result_of(plan, [2, 9, 3, 3], [2, 3, 4, 4], [], [4, 5, 6])
    out = scheduler.apply(msgspec.structs.replace(result, errors=[(3, "bad")], top_tokens=[TopTokens(4, [2], [-1.0])]))
    assert list(zip(out.request_ids, out.token_ids, strict=True)) == [(0, 2), (0, 9), (1, 2), (1, 3)]
    assert [(f.request_id, f.reason) for f in out.finished] == [(3, "error"), (0, "eos_token"), (1, "length")]
    assert [(top.row, top.token_ids) for top in out.top_tokens] == [(2, [2])]
    assert scheduler.num_running == 1
    scheduler.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_have_blocks_for_all_that_they_may_yield(overlap: bool) -> None:
    """And for no more than the request's length: its pool has room for exactly that."""
    for block_size, tokens_per_row in ((1, 4), (2, 3), (4, 4), (16, 2)):
        blocks = 1 + -(-32 // block_size)
        harness = Harness(blocks, block_size, True, overlap, policy(max_total_tokens=32, tokens_per_row=tokens_per_row))
        request = make(0, [1, 2, 3], 29)
        harness.scheduler.add(request)
        harness.drain()
        assert harness.outputs[0] == expected_output(request)
        assert harness.scheduler.stats.num_preemptions == 0


def test_generated_tokens_are_found_again_where_rows_yield_several() -> None:
    harness = Harness(100, 4, True, True, policy(tokens_per_row=4))
    first = make(0, [1, 2, 3], 30)
    harness.scheduler.add(first)
    harness.drain()
    again = make(1, [1, 2, 3, *harness.outputs[0]], 5)
    harness.scheduler.add(again)
    harness.drain()
    assert harness.scheduler.stats.num_cached_prompt_tokens == 32
    assert harness.outputs[1] == expected_output(again)


def test_what_a_step_in_flight_may_not_compute_is_not_found() -> None:
    """A row that yields nothing leaves no key of its last token; when it goes, its block does not pass for a full one."""
    pool = BlockPool(100, 4)
    scheduler = Scheduler(policy(tokens_per_row=2), pool, clock=lambda: 0)
    scheduler.add(make(0, [1, 2, 3], 20))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(StepResult(plan.step, [4], [0.0]))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.abort(0)
    assert pool.match([1, 2, 3, 4]) == []
    assert not scheduler.apply(result_of(plan, [])).token_ids
    scheduler.check()


def test_equal_prompts_in_one_step_share_blocks() -> None:
    harness = Harness(100, 4, True, True, policy())
    for number in range(3):
        harness.scheduler.add(make(number, list(range(17)), 3))
    harness.step()
    assert harness.pool.num_usable - harness.pool.num_free == 5 + 1 + 1
    harness.drain()
    assert harness.scheduler.stats.num_cached_prompt_tokens == 2 * 16


def test_salt_separates_prefixes() -> None:
    harness = Harness(100, 4, True, True, policy())
    for number, salt in enumerate(["a", "b", "a"]):
        harness.scheduler.add(make(number, list(range(9)), 2, cache_salt=salt))
        harness.drain()
    assert harness.scheduler.stats.num_cached_prompt_tokens == 8


def test_whatever_else_decides_the_cache_separates_prefixes() -> None:
    sources = [
        make(0, [1], 1),
        make(1, [1], 1, cache_salt="a"),
        make(2, [1], 1, adapter="a"),
        make(3, [1], 1, pictures=[PictureSpan("a0", [(0, 1)], [], [])]),
        make(4, [1], 1, pictures=[PictureSpan("b0", [(0, 1)], [], [])]),
    ]
    pool = BlockPool(100, 1)
    for number, source in enumerate(sources):
        request = Request(source, number, 0)
        assert pool.match(request.tokens, request.root) == []
        request.blocks = pool.try_take(1) or []
        pool.publish(request, 1)
        assert pool.match(request.tokens, request.root) == request.blocks


def test_least_recently_used_prefix_is_evicted_first() -> None:
    harness = Harness(1 + 6, 4, True, True, policy(max_batch_size=1, max_total_tokens=24))
    a, b, c = ([n] * 9 for n in (1, 2, 3))
    number = iter(range(100))

    def cached_after(tokens: list[int]) -> int:
        before = harness.scheduler.stats.num_cached_prompt_tokens
        harness.scheduler.add(make(next(number), tokens, 1))
        harness.drain()
        return harness.scheduler.stats.num_cached_prompt_tokens - before

    assert [cached_after(a), cached_after(b), cached_after(a)] == [0, 0, 8]
    assert cached_after(c) == 0  # needs 3 of 6 blocks; b's are older than a's
    assert cached_after(a) == 8
    assert cached_after(b) < 8


def test_decode_steps_carry_only_changes() -> None:
    harness = Harness(200, 16, True, True, policy(max_batch_prefill_tokens=1000))
    for number in range(8):
        harness.scheduler.add(make(number, [number] * 4, 60))
    harness.step()
    harness.step()
    plans: list[StepPlan] = []
    execute = harness.runner.execute
    harness.runner.execute = lambda plan: plans.append(plan) or execute(plan)  # type: ignore[method-assign]
    for _ in range(10):
        harness.step()
    assert all(p.decode and not (p.admit or p.chunks or p.join or p.leave or p.release or p.grow) for p in plans)


def test_a_failing_request_ends_alone_and_its_blocks_are_not_reused() -> None:
    harness = Harness(50, 4, True, False, policy())
    for number in range(3):
        harness.scheduler.add(make(number, [number] * 9, 5))
    plan = harness.scheduler.plan()
    assert plan is not None
    result = harness.runner.execute(plan)
    out = harness.scheduler.apply(
        StepResult(result.step, result.token_ids, result.logprobs, errors=[(1, "bad logits")])
    )
    assert [(f.request_id, f.reason, f.error) for f in out.finished] == [(1, "error", "bad logits")]
    assert harness.pool.match([1] * 8) == []
    harness.scheduler.check()
    harness.outputs = {i: [t] for i, t in zip(out.request_ids, out.token_ids, strict=True)}
    harness.drain()
    for number in (0, 2):
        assert harness.outputs[number] == expected_output(make(number, [number] * 9, 5))


def test_the_oldest_is_never_preempted_and_order_is_kept() -> None:
    harness = Harness(1 + 10, 4, False, True, policy(max_total_tokens=40))
    requests = [make(i, [i] * 5, 30) for i in range(5)]
    for request in requests:
        harness.scheduler.add(request)
    harness.drain()
    assert harness.scheduler.stats.num_preemptions > 3
    assert harness.admissions[0] == 1
    assert list(harness.reasons) == [0, 1, 2, 3, 4], "requests of one size end in the order they came"
    assert all(harness.outputs[r.id] == expected_output(r) for r in requests)


def test_newcomers_leave_a_spare_block_for_each_running_request() -> None:
    harness = Harness(1 + 9, 4, False, False, policy(max_total_tokens=32))
    for number in range(4):
        harness.scheduler.add(make(number, [number] * 12, 2))
    harness.step()
    assert harness.scheduler.num_running == 2  # 3 + 3 blocks; a third would leave none to grow
    harness.drain()
    assert harness.scheduler.stats.num_preemptions == 0


def test_nothing_grows_without_bound() -> None:
    harness = Harness(100, 4, True, True, policy(max_batch_prefill_tokens=200))
    for number in range(600):
        harness.scheduler.add(make(number, [number % 7, number % 5, number % 3] * 3, 1 + number % 9))
        if number % 3 == 0:
            harness.scheduler.abort(number - 1)
        harness.step()
    harness.drain()
    scheduler = harness.scheduler
    assert not scheduler.has_work and not scheduler._waiting
    assert not scheduler._decoding.has_entries
    assert len(harness.pool._index) <= harness.pool.num_usable


def count_requests() -> int:
    return sum(type(thing) is Request for thing in gc.get_objects())


@pytest.mark.parametrize("threshold_ms", [None, 5])
def test_requests_that_end_while_they_wait_do_not_stay(threshold_ms: int | None) -> None:
    """The only slot is taken for as long as anybody cares to send requests and to leave again."""
    gc.collect()
    before = count_requests()  # of tests before this one
    scheduler = Scheduler(policy(max_batch_size=1), BlockPool(100, 4), lambda: 0, queue_threshold_ms=threshold_ms)
    scheduler.add(make(1, [1, 2], 50))
    scheduler.plan()
    for number in range(2, 8):
        scheduler.add(make(number, [number], 5))
    for number in range(10, 1000):
        scheduler.add(make(number, [1] * 40, 5))
        assert scheduler.abort(number)
    assert count_requests() - before < 200
    assert [request.id for request in scheduler._waiting if not request.finished] == list(range(2, 8))
    scheduler.check()


def test_requests_that_end_early_leave_nothing_behind() -> None:
    """Blocks taken ahead and calendar entries for tokens that never come."""
    harness = Harness(1 + 500, 4, True, True, policy(max_total_tokens=2000, max_batch_prefill_tokens=400))
    for number in range(40):
        source = make(number, [number % 4, number % 3, 1], 1500)
        harness.scheduler.add(msgspec.structs.replace(source, stop_token_ids=[0, 1, 2, 3]))
    harness.drain()
    assert not harness.scheduler._decoding.has_entries


def test_blocks_taken_ahead_are_given_back_to_newcomers() -> None:
    harness = Harness(1 + 64, 4, False, False, policy(max_total_tokens=250, max_batch_prefill_tokens=250))
    harness.scheduler.add(make(0, [1] * 4, 200))
    for _ in range(4):
        harness.step()
    assert harness.pool.num_usable - harness.pool.num_free > 10, "blocks abound, so some are taken ahead"
    harness.scheduler.add(make(1, [2] * 200, 4))
    harness.step()
    assert harness.admissions == {0: 1, 1: 1}
    assert harness.scheduler.stats.num_preemptions == 0
    harness.drain()
    for number, tokens, new in ((0, [1] * 4, 200), (1, [2] * 200, 4)):
        assert harness.outputs[number] == expected_output(make(number, tokens, new))


def test_blocks_taken_ahead_do_not_evict_prefixes() -> None:
    harness = Harness(1 + 40, 4, True, True, policy(max_total_tokens=160, max_batch_prefill_tokens=100))
    for number in range(3):
        harness.scheduler.add(make(number, [number] * 33, 1))
    harness.drain()
    harness.scheduler.add(make(9, [3] * 3, 40))
    for _ in range(5):
        harness.step()
    assert [len(harness.pool.match([number] * 33)) for number in range(3)] == [8, 8, 8]


def test_top_tokens_keep_their_row_when_an_earlier_row_is_gone() -> None:
    harness = Harness(50, 4, True, False, policy())
    for number in range(2):
        harness.scheduler.add(make(number, [number] * 3, 5))
    plan = harness.scheduler.plan()
    assert plan is not None
    result = harness.runner.execute(plan)
    harness.scheduler.abort(0)
    out = harness.scheduler.apply(
        StepResult(result.step, result.token_ids, result.logprobs, top_tokens=[TopTokens(1, [2], [-0.5])])
    )
    assert (out.request_ids, [top.row for top in out.top_tokens]) == ([1], [0])


def test_a_request_that_can_never_run_is_refused() -> None:
    harness = Harness(1 + 5, 4, True, True, policy(max_total_tokens=100))
    with pytest.raises(ValidationError, match="must be <= 20"):
        harness.scheduler.add(make(0, [1] * 15, 6))
    harness.scheduler.add(make(1, [1] * 15, 5))
    with pytest.raises(ValidationError, match="adapter is not supported"):
        harness.scheduler.add(make(2, [1], 1, adapter="x"))
    with pytest.raises(ValidationError, match="already in use"):
        harness.scheduler.add(make(1, [1], 1))
    harness.drain()


def test_finish_tells_cached_tokens_and_times() -> None:
    now = iter(range(10**6))
    pool = BlockPool(100, 4)
    scheduler = Scheduler(policy(), pool, clock=lambda: next(now))
    finishes = []
    for number in range(2):
        scheduler.add(make(number, [1] * 9, 1))
        plan = scheduler.plan()
        assert plan is not None
        finishes += scheduler.apply(StepResult(plan.step, [1], [0.0])).finished
    assert [f.num_cached_tokens for f in finishes] == [0, 8]
    assert all(f.queue_ns == 1 and f.inference_ns == 1 for f in finishes)


def test_identities_are_never_reused() -> None:
    index = PrefixIndex()
    index.insert(index.insert("", (1,), 1), (2,), 2)
    index.remove(1)
    assert index.find(index.insert("", (9,), 1), (2,)) is None


def test_the_end_of_a_prefix_is_evicted_before_its_start() -> None:
    harness = Harness(1 + 4, 4, True, True, policy(max_total_tokens=16))
    harness.scheduler.add(make(0, [1] * 12, 2))
    harness.drain()
    assert harness.pool.try_take(2) is not None
    assert len(harness.pool.match([1] * 12)) == 2


def test_an_abort_while_two_steps_are_in_flight() -> None:
    """The newest computed token is not known yet: its block must not be published as if it were."""
    for steps in range(1, 10):
        harness = Harness(100, 4, True, True, policy())
        harness.scheduler.add(make(0, [1, 2, 3], 30))
        for _ in range(steps):
            harness.step()
        plan = harness.scheduler.plan()
        assert plan is not None
        harness.pending.append(harness.runner.execute(plan))
        harness.scheduler.abort(0)
        harness.scheduler.check()
        harness.drain()


def test_callers_take_turns() -> None:
    """A caller with many requests delays another by one of them."""
    scheduler = Scheduler(policy(max_batch_size=1), BlockPool(100, 4), lambda: 0)
    runner = OracleRunner(100, 4, 1)
    for number in range(20):
        scheduler.add(msgspec.structs.replace(make(number, [1, 2, number % 7], 2), caller="flood"))
    for number in (100, 101):
        scheduler.add(msgspec.structs.replace(make(number, [3, 4], 2), caller="honest"))
    ended: list[int] = []
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        ended += [finish.request_id for finish in scheduler.apply(runner.execute(plan)).finished]
        scheduler.check()
    assert ended == [0, 100, 1, 101, *range(2, 20)]
