"""The bucket plan: every batch within the limits finds a shape that holds it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi.devices.buckets import Bucket, BucketSteps, decode_sizes, find_bucket, plan_buckets, round_up, steps_up_to


def test_steps_include_the_maximum() -> None:
    assert steps_up_to(8, 32) == [8, 16, 24, 32]
    assert steps_up_to(8, 30) == [8, 16, 24, 30]
    assert steps_up_to(8, 3) == [3]
    assert steps_up_to(1, 3) == [1, 2, 3]


def test_plan_of_a_small_server() -> None:
    plan = plan_buckets(64, 96, 4, 128, 16, BucketSteps(prefill_batch=2, decode_batch=2, length=32))
    assert plan == [
        Bucket("prefill", 1, 32),
        Bucket("prefill", 2, 32),
        Bucket("prefill", 4, 32),
        Bucket("prefill", 1, 64),
        Bucket("prefill", 2, 64),
        Bucket("decode", 2, 2),
        Bucket("decode", 2, 4),
        Bucket("decode", 2, 6),
        Bucket("decode", 4, 2),
        Bucket("decode", 4, 4),
        Bucket("decode", 4, 6),
    ]


positive = st.integers(1, 64)


@given(st.data(), positive, positive, positive, st.integers(1, 300), st.integers(2, 400), st.integers(1, 40))
def test_everything_permitted_has_a_bucket(
    data: st.DataObject, pb: int, db: int, length: int, prefill_tokens: int, total: int, max_batch: int
) -> None:
    max_input = data.draw(st.integers(1, total - 1))
    block_size = data.draw(st.sampled_from([1, 16, 128]))
    plan = plan_buckets(max_input, total, max_batch, prefill_tokens, block_size, BucketSteps(pb, db, length))
    assert len(set(plan)) == len(plan)
    rows, blocks = data.draw(st.integers(1, max_batch)), data.draw(st.integers(1, -(-total // block_size)))
    found = find_bucket(plan, "decode", rows, blocks)
    assert found is not None and found.batch >= rows and found.length >= blocks
    assert found.batch - rows < db and (found.length - blocks) * block_size < length + block_size
    tokens = data.draw(st.integers(1, max_input))
    assert find_bucket(plan, "prefill", 1, tokens) is not None
    padded = round_up(steps_up_to(length, max_input), tokens)
    most = max(1, min(max_batch, prefill_tokens // padded))
    found = find_bucket(plan, "prefill", most, tokens)
    assert found is not None
    assert found.batch == 1 or found.batch * found.length <= prefill_tokens


def test_beyond_the_plan_there_is_none() -> None:
    plan = plan_buckets(64, 96, 4, 128, 16, BucketSteps(2, 2, 32))
    assert find_bucket(plan, "decode", 5, 1) is None
    with pytest.raises(ValueError, match="exceeds the largest bucket"):
        round_up([1, 2], 3)


@given(st.integers(1, 3000))
def test_decode_sizes_reach_the_maximum_with_little_padding(maximum: int) -> None:
    sizes = decode_sizes(maximum)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == maximum
    assert sizes[0] == 1
    for small, large in pairwise(sizes):
        assert large - small <= max(1, small if small <= 8 else 8 if small < 64 else 16 if small < 256 else 64)
