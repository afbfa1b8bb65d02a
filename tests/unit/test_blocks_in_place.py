"""Blocks that stay among the first of the cache, and which decode shape reads them."""

import pytest

from text_generation_inference.config import ServerConfig, reads_in_place
from text_generation_inference.runner.shapes.buckets import Bucket, BucketSettings, PlanLimits, plan_buckets
from text_generation_inference.scheduler.blocks import BlockPool
from text_generation_inference.scheduler.policy import BatchPolicy
from text_generation_inference.scheduler.scheduler import Scheduler
from text_generation_inference.types import GenerationRequest, Limits, SamplingParams, StepResult

LIMITS = PlanLimits(1024, 2048, 32, 2048, 128, 300)


def test_the_lowest_free_blocks_are_taken() -> None:
    pool = BlockPool(10, 4, False, lowest_first=True)
    assert pool.try_take(3) == [1, 2, 3]
    assert pool.try_take(3) == [4, 5, 6]
    pool.free([2, 5])
    assert pool.try_take(3) == [2, 5, 7]
    pool.free([3])
    pool.forget()
    assert pool.try_take(1) == [3]


def test_what_is_promised_is_nobody_elses() -> None:
    pool = BlockPool(10, 4, False, lowest_first=True)
    assert pool.try_take(2, num_later=5) == [1, 2]
    assert pool.num_free == 2
    assert pool.try_take(3) is None
    assert pool.try_take(2) == [3, 4]
    assert pool.take_promised(1) == [5]
    pool.break_promise(4)
    assert pool.num_free == 4
    pool.verify([[1, 2, 3, 4, 5]])


def test_requests_that_decode_together_lie_together() -> None:
    """Room for all that a request may become is kept for it, but not between the blocks of others."""
    plan = plan_buckets(PlanLimits(8, 64, 4, 32, 4, 64), BucketSettings(contiguous=True))
    pool = BlockPool(65, 4, False, lowest_first=True)
    policy = BatchPolicy(max_batch_prefill_tokens=32, max_batch_size=4, max_total_tokens=64)
    scheduler = Scheduler(policy, pool, clock=lambda: 0, shapes=plan)
    for number in range(4):
        scheduler.add(GenerationRequest(
            id=number, token_ids=[1] * 8, sampling=SamplingParams(), max_new_tokens=56, stop_token_ids=[], seed=0
        ))  # fmt: skip
    held = []
    while scheduler.has_work:
        planned = scheduler.plan()
        scheduler.check()
        if planned is None:
            break
        rows = 4 if planned.decode else sum(chunk.samples for chunk in planned.chunks)
        running = [request for request in scheduler._requests.values() if request.running]
        held.append(
            (max(block for request in running for block in request.blocks), sum(len(r.blocks) for r in running))
        )
        scheduler.apply(StepResult(planned.step, [2] * rows, [0.0] * rows, [], [], []))
    assert held[0] == (8, 8)
    assert all(highest == count for highest, count in held)
    assert scheduler.stats.num_preemptions == 0 and pool.num_free == pool.num_usable


def test_the_shape_that_moves_fewer_bytes_is_chosen() -> None:
    """A block that is gathered is read, written and read again."""
    plan = plan_buckets(LIMITS, BucketSettings(contiguous=True))
    listed = plan.find("decode", 32, 100)
    assert listed == Bucket("decode", 32, 128)
    assert plan.choose_contiguous(listed, 32, 110) == Bucket("decode", 32, 128, contiguous=True)
    assert plan.choose_contiguous(listed, 32, 301) == Bucket("decode", 32, 301, contiguous=True)  # all there are
    few = plan.find("decode", 1, 4)
    assert few is not None and plan.choose_contiguous(few, 1, 290) is None
    assert not plan_buckets(LIMITS, BucketSettings()).has_contiguous


def test_rows_that_share_blocks_list_them_all() -> None:
    """There are 300 blocks; 32 rows of 16 may list 512."""
    assert plan_buckets(LIMITS, BucketSettings()).find("decode", 32, 400) is None
    assert plan_buckets(LIMITS, BucketSettings(reuse=True)).find("decode", 32, 400) == Bucket("decode", 32, 512)


@pytest.mark.parametrize(
    ("prefixes", "asked", "expected"),
    [(True, None, False), (False, None, True), (True, True, True), (False, False, False)],
)
def test_by_default_as_vllm_gaudi_has_it(prefixes: bool, asked: bool | None, expected: bool) -> None:
    config = ServerConfig(prefix_caching=prefixes, vllm_contiguous_pa=asked)
    numbers = {"block_size": 128, "max_batch_size": 1, "max_batch_prefill_tokens": 1, "memory_share": 1.0}
    card = Limits(dtypes=[], buckets=True, reads_in_place=True, **numbers)
    assert reads_in_place(config, card) is expected
    assert not reads_in_place(config, Limits(dtypes=[], buckets=True, **numbers))
