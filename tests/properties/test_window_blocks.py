"""Requests of models whose layers all read a window of tokens, with the token oracle in place of the model.

Requests give the blocks behind their window back while they run, so pools here are far smaller than what a request grows
to. The oracle reads the window alone; whatever is free and holds nothing findable is spoilt before each step.
"""

import msgspec
import pytest
from harness import Harness, check_outputs, expected_output, make, policy, relaxed, scenarios
from hypothesis import given, settings
from hypothesis import strategies as st

from text_generation_inference.errors import ValidationError
from text_generation_inference.scheduler.blocks import BlockPool, least_blocks
from text_generation_inference.scheduler.prefix import WindowPrefixIndex
from text_generation_inference.types import StepResult

windows = st.sampled_from([1, 2, 3, 5, 8, 13])
some = settings(relaxed, max_examples=120)


def run(scenario: dict, window: int, prefix_caching: bool, spare_blocks: int) -> Harness:
    num_blocks = 1 + least_blocks(window, scenario["block_size"]) + spare_blocks
    about = (scenario["block_size"], prefix_caching, scenario["overlap"], scenario["policy"], window)
    harness = Harness(num_blocks, *about)
    harness.play(scenario)
    return harness


@some
@given(scenarios(), windows)
def test_every_request_gets_its_tokens_and_the_books_balance(scenario: dict, window: int) -> None:
    check_outputs(scenario, run(scenario, window, True, scenario["spare_blocks"]))


@some
@given(scenarios(), windows)
def test_a_pool_of_one_window_and_no_cache_change_nothing(scenario: dict, window: int) -> None:
    check_outputs(scenario, run(scenario, window, True, 0))
    check_outputs(scenario, run(scenario, window, False, 0))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_request_costs_its_window(overlap: bool) -> None:
    """A prompt of ten windows and an output of ten, alone in the least pool: nothing is computed twice."""
    window, size = 32, 4
    harness = Harness(1 + least_blocks(window, size), size, True, overlap, policy(max_total_tokens=1000), window)
    request = make(0, [n % 3 for n in range(320)], 320)
    harness.scheduler.add(request)
    harness.drain()
    assert harness.outputs[0] == expected_output(request, window)
    assert harness.scheduler.stats.num_preemptions == 0


def test_long_requests_run_beside_each_other() -> None:
    """Eight of 40 blocks each in a pool of 80, of which each holds its window of 8 and a few."""
    window, size = 32, 4
    harness = Harness(1 + 80, size, False, True, policy(max_total_tokens=1000), window)
    requests = [make(n, [n % 4] * 8, 152) for n in range(8)]
    for request in requests:
        harness.scheduler.add(request)
    most = 0
    while harness.scheduler.has_work:
        harness.step()
        most = max(most, harness.scheduler.num_running)
    assert most == 8
    assert harness.scheduler.stats.num_preemptions == 0
    assert all(harness.outputs[r.id] == expected_output(r, window) for r in requests)


def test_prompts_that_share_blocks_get_on() -> None:
    """What one of them gives back is still held by the other, so that there may be nothing for it in exchange."""
    preempted = 0
    for window, size, spare in ((3, 1, 1), (3, 1, 3), (8, 2, 1), (8, 2, 5), (13, 4, 2), (13, 4, 7)):
        harness = Harness(1 + least_blocks(window, size) + spare, size, True, True, policy(), window)
        requests = [make(n, [*(i % 3 for i in range(60)), *[n] * 8], 4) for n in range(3)]
        for request in requests:
            harness.scheduler.add(request)
        harness.drain()
        assert all(harness.outputs[r.id] == expected_output(r, window) for r in requests)
        preempted += harness.scheduler.stats.num_preemptions
    assert preempted > 0


def test_chunks_are_as_large_as_they_may_be_where_there_is_room() -> None:
    harness = Harness(200, 4, True, True, policy(max_total_tokens=2000, max_batch_prefill_tokens=64), 32)
    harness.scheduler.add(make(0, [1] * 1280, 1))
    harness.drain()
    assert harness.steps <= 1280 // 64 + 1


def test_the_next_turn_of_a_chat_finds_its_window_after_the_rest_is_gone() -> None:
    """The pool has room for two windows; the chat is ten long."""
    window, size = 16, 4
    harness = Harness(1 + 12, size, True, True, policy(max_total_tokens=1000), window)
    first = make(0, [1, 2, 3] * 20, 101)
    harness.scheduler.add(first)
    harness.drain()
    conversation = [*first.token_ids, *harness.outputs[0]]
    harness.scheduler.add(again := make(1, [*conversation, 3, 3], 20))
    harness.drain()
    assert harness.outputs[1] == expected_output(again, window)
    assert harness.scheduler.stats.num_cached_prompt_tokens == 160  # all that was computed, in whole blocks
    harness.scheduler.add(diverged := make(2, [*conversation[:80], 9, 9], 20))  # what was there is gone
    harness.drain()
    assert harness.scheduler.stats.num_cached_prompt_tokens == 160
    assert harness.outputs[2] == expected_output(diverged, window)


def test_blocks_left_behind_are_found_until_somebody_takes_them() -> None:
    window, size = 8, 4
    harness = Harness(1 + 50, size, True, True, policy(max_total_tokens=1000), window)
    harness.scheduler.add(make(0, list(range(40)), 40))
    while len(harness.outputs.get(0, [])) < 30:
        harness.step()
    harness.scheduler.add(other := make(1, [*range(40), 7], 5))  # behind the window of the one that runs
    harness.drain()
    assert harness.scheduler.stats.num_cached_prompt_tokens == 40
    assert harness.outputs[1] == expected_output(other, window)


def test_what_a_failed_request_left_behind_is_not_found() -> None:
    window, size = 8, 4
    harness = Harness(1 + 50, size, True, False, policy(max_batch_prefill_tokens=8), window)
    harness.scheduler.add(make(0, list(range(40)), 5))
    result = StepResult(0, [], [])
    while not result.token_ids:
        plan = harness.scheduler.plan()
        assert plan is not None
        result = harness.runner.execute(plan)
        if not result.token_ids:
            harness.take(result)
    assert harness.pool.match(list(range(40)))
    harness.take(msgspec.structs.replace(result, errors=[(0, "bad logits")]))
    assert harness.reasons == {0: "error"}
    assert harness.pool.match(list(range(40))) == []
    assert harness.pool.num_empty == harness.pool.num_usable


def test_a_pool_smaller_than_the_window_refuses_what_it_cannot_hold() -> None:
    harness = Harness(1 + 5, 4, True, True, policy(), 32)
    harness.scheduler.add(make(0, [1] * 10, 10))
    with pytest.raises(ValidationError, match="must be <= 20"):
        harness.scheduler.add(make(1, [1] * 10, 11))
    harness.drain()
    assert harness.outputs[0] == expected_output(make(0, [1] * 10, 10), 32)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=60))
def test_entries_stay_as_long_as_a_block_behind_them(actions: list[tuple[int, int]]) -> None:
    """The index against a plain statement: which chains of tokens have a block, or one behind them."""
    index = WindowPrefixIndex()
    chains: dict[int, tuple[int, ...]] = {}  # block -> tokens to it
    for block, (choice, token) in enumerate(actions, 1):
        if choice < 3 and chains:
            gone = sorted(chains)[choice % len(chains)]
            index.remove(gone)
            del chains[gone]
        else:
            base = sorted(chains)[choice % len(chains)] if chains and choice % 2 else None
            chain = (*chains[base], token) if base is not None else (token,)
            parent: object = "root"
            for each in chain[:-1]:
                hit = index.find(parent, (each,))
                assert hit is not None
                parent = hit[1]
            found = index.find(parent, (token,))
            if found is None or not found[0]:
                index.insert(parent, (token,), block)
                chains[block] = chain
        index.check(1)
        known = {chain[:n] for chain in chains.values() for n in range(1, len(chain) + 1)}
        by_chain = {chain: block for block, chain in chains.items()}
        assert len(index) == len(chains)
        for chain in known:
            parent = "root"
            for n, each in enumerate(chain, 1):
                hit = index.find(parent, (each,))
                assert hit is not None and hit[0] == by_chain.get(chain[:n], 0)
                parent = hit[1]
        assert len(index._entries) == len(known)


def test_a_pool_without_a_window_has_no_more_to_do() -> None:
    assert BlockPool(10, 4).num_behind(1000) == 0
    assert BlockPool(10, 4, window=9).num_behind(1000) == (1000 - 8) // 4
