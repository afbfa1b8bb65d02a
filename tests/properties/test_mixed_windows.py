"""Requests of models of which some layers read a window of tokens and others all, with the token oracle in place of both.

Layers with a window have blocks of their own; requests give those behind the window back while they run, so that pool is
far smaller here than what a request grows to. The oracle reads all of one kind of block and the window of the other;
whatever is free in either and holds nothing findable is spoilt before each step.
"""

import msgspec
import pytest
from harness import Harness, check_outputs, expected_output, make, policy, relaxed, scenarios
from hypothesis import given, settings
from hypothesis import strategies as st

from text_generation_inference.errors import ValidationError
from text_generation_inference.scheduler.blocks import BlockPool, WindowBlocks, least_blocks
from text_generation_inference.types import StepResult

windows = st.sampled_from([1, 2, 3, 5, 8, 13])
some = settings(relaxed, max_examples=150)


def run(scenario: dict, window: int, prefix_caching: bool, spare_blocks: int, spare_beside: int) -> Harness:
    beside = (1 + least_blocks(window, scenario["block_size"]) + spare_beside, window)
    about = (scenario["block_size"], prefix_caching, scenario["overlap"], scenario["policy"], None, beside)
    harness = Harness(scenario["least_blocks"] + spare_blocks, *about)
    harness.play(scenario)
    return harness


@some
@given(scenarios(), windows, st.integers(0, 30))
def test_every_request_gets_its_tokens_and_the_books_balance(scenario: dict, window: int, spare_beside: int) -> None:
    check_outputs(scenario, run(scenario, window, True, scenario["spare_blocks"], spare_beside))


@some
@given(scenarios(), windows, st.sampled_from([(True, 0, 0), (False, 0, 0), (True, 200, 0), (True, 0, 200)]))
def test_pools_of_one_request_and_no_cache_change_nothing(
    scenario: dict, window: int, room: tuple[bool, int, int]
) -> None:
    check_outputs(scenario, run(scenario, window, *room))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_request_costs_its_window(overlap: bool) -> None:
    """A prompt of ten windows and an output of ten, alone, with the least of blocks that there can be beside."""
    window, size = 32, 4
    beside = (1 + least_blocks(window, size), window)
    harness = Harness(1 + 160, size, True, overlap, policy(max_total_tokens=1000), None, beside)
    request = make(0, [n % 3 for n in range(320)], 320)
    harness.scheduler.add(request)
    harness.drain()
    assert harness.outputs[0] == expected_output(request, None, window)
    assert harness.scheduler.stats.num_preemptions == 0


def test_long_requests_run_beside_each_other() -> None:
    """Eight of 40 blocks each, for which there are 80 beside: each holds its window of 8 and a few."""
    window, size = 32, 4
    harness = Harness(1 + 400, size, False, True, policy(max_total_tokens=1000), None, (1 + 80, window))
    requests = [make(n, [n % 4] * 8, 152) for n in range(8)]
    for request in requests:
        harness.scheduler.add(request)
    most = 0
    while harness.scheduler.has_work:
        harness.step()
        most = max(most, harness.scheduler.num_running)
    assert most == 8
    assert harness.scheduler.stats.num_preemptions == 0
    assert all(harness.outputs[r.id] == expected_output(r, None, window) for r in requests)


def test_who_lacks_blocks_of_either_kind_waits() -> None:
    for num_blocks, num_beside in ((1 + 12, 1 + 100), (1 + 100, 1 + 12)):
        harness = Harness(num_blocks, 4, True, True, policy(), None, (num_beside, 60))
        requests = [make(n, [n % 4] * 30, 8) for n in range(3)]
        for request in requests:
            harness.scheduler.add(request)
        harness.step()
        assert harness.scheduler.num_running == 1
        harness.drain()
        assert all(harness.outputs[r.id] == expected_output(r, None, 60) for r in requests)


def test_chunks_are_as_large_as_they_may_be_where_there_is_room() -> None:
    about = policy(max_total_tokens=2000, max_batch_prefill_tokens=64)
    harness = Harness(400, 4, True, True, about, None, (1 + 8 + 17, 32))
    harness.scheduler.add(make(0, [1] * 1280, 1))
    harness.drain()
    assert harness.steps <= 1280 // 64 + 1


def test_the_next_turn_of_a_chat_finds_its_window_after_the_rest_is_gone() -> None:
    """There are blocks for two windows beside; the chat is ten long."""
    window, size = 16, 4
    harness = Harness(1 + 200, size, True, True, policy(max_total_tokens=1000), None, (1 + 12, window))
    first = make(0, [1, 2, 3] * 20, 101)
    harness.scheduler.add(first)
    harness.drain()
    conversation = [*first.token_ids, *harness.outputs[0]]
    harness.scheduler.add(again := make(1, [*conversation, 3, 3], 20))
    harness.drain()
    assert harness.outputs[1] == expected_output(again, None, window)
    assert harness.scheduler.stats.num_cached_prompt_tokens == 160  # all that was computed, in whole blocks
    harness.scheduler.add(diverged := make(2, [*conversation[:80], 9, 9], 20))  # its window is gone, the rest is not
    harness.drain()
    assert harness.scheduler.stats.num_cached_prompt_tokens == 160
    assert harness.outputs[2] == expected_output(diverged, None, window)
    harness.scheduler.add(repeated := make(3, [*conversation[:80], 9, 9], 20))  # and was computed anew
    harness.drain()
    assert harness.scheduler.stats.num_cached_prompt_tokens == 240
    assert harness.outputs[3] == expected_output(repeated, None, window)


def test_a_prefix_is_found_as_far_as_both_have_it() -> None:
    """Blocks of the first pool are gone, too, in their turn; what is beside them is not found then, and is free."""
    window, size = 8, 4
    harness = Harness(1 + 14, size, True, False, policy(max_total_tokens=1000), None, (1 + 100, window))
    beside = harness.pool.beside
    assert beside is not None
    harness.scheduler.add(make(0, list(range(40)), 4))
    harness.drain()
    blocks, seen = harness.pool.match_both(list(range(40)))
    assert len(blocks) == len(seen) == 10
    assert seen[:8] == [0] * 8 and all(seen[8:])  # a window of 7 tokens before the next
    harness.scheduler.add(make(1, [3] * 30, 4))  # takes blocks of the end of the first one
    harness.drain()
    blocks, seen = harness.pool.match_both(list(range(40)))
    assert 0 < len(blocks) == len(seen) < 10
    assert all(seen[-2:]) and not any(seen[:-2])
    assert beside.num_free == beside.num_usable
    # A prefix may not end in what is computed at once: then it ends before, where its window is there too.
    shorter, seen = harness.pool.match_both(list(range(40)), may_end=lambda number: number < len(blocks))
    assert len(shorter) == len(seen) == len(blocks) - 1 and all(seen[-2:])


def until_tokens(harness: Harness) -> StepResult:
    """The first result with tokens, which the scheduler has not seen yet."""
    while True:
        plan = harness.scheduler.plan()
        assert plan is not None
        result = harness.runner.execute(plan)
        if result.token_ids:
            return result
        harness.take(result)


def test_what_a_failed_request_left_behind_is_not_found() -> None:
    window, size = 8, 4
    about = policy(max_batch_prefill_tokens=8)
    harness = Harness(1 + 50, size, True, False, about, None, (1 + 50, window))
    harness.scheduler.add(make(0, list(range(40)), 5))
    result = until_tokens(harness)
    assert harness.pool.match_both(list(range(40)))[0]
    harness.take(msgspec.structs.replace(result, errors=[(0, "bad logits")]))
    assert harness.reasons == {0: "error"}
    assert harness.pool.match_both(list(range(40))) == ([], [])
    for books in (harness.pool, harness.pool.beside):
        assert books is not None and books.num_empty == books.num_usable


def test_what_a_failed_request_computed_beside_anothers_prefix_is_not_found() -> None:
    """Of the other one's prefix only what is beside was lost, and computed anew by the one that failed."""
    window, size = 8, 4
    harness = Harness(1 + 50, size, True, False, policy(max_batch_prefill_tokens=8), None, (1 + 5, window))
    prompt = [place % 3 for place in range(40)]
    harness.scheduler.add(make(0, prompt, 4))
    harness.drain()
    harness.scheduler.add(make(1, [3] * 40, 4))
    harness.drain()
    assert len(harness.pool.match(prompt)) == 10 and harness.pool.match_both(prompt) == ([], [])
    harness.scheduler.add(make(2, [*prompt, 9], 4))
    result = until_tokens(harness)
    harness.take(msgspec.structs.replace(result, errors=[(0, "bad logits")]))
    beside = harness.pool.beside
    assert beside is not None and beside.num_empty == beside.num_usable


def test_pools_smaller_than_the_window_refuse_what_they_cannot_hold() -> None:
    harness = Harness(1 + 50, 4, True, True, policy(), None, (1 + 5, 32))
    harness.scheduler.add(make(0, [1] * 10, 10))
    with pytest.raises(ValidationError, match="must be <= 20"):
        harness.scheduler.add(make(1, [1] * 10, 11))
    harness.drain()
    assert harness.outputs[0] == expected_output(make(0, [1] * 10, 10), None, 32)


def test_what_is_left_is_told_of_the_pool_that_has_less() -> None:
    beside = WindowBlocks(1 + 10, 4, 9)
    pool = BlockPool(1 + 100, 4, beside=beside)
    assert pool.num_free_of_all == 100
    beside.try_take(4)
    assert pool.num_free_of_all == 60
    pool.try_take(70)
    assert pool.num_free_of_all == 30
