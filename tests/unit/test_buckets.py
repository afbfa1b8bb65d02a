"""The bucket plan: every batch within the limits finds a shape that holds it, the same on every machine."""

import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import ROUND_CEILING, Decimal, localcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from text_generation_inference.api.metrics import Metrics
from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import ResourceError, StartError
from text_generation_inference.runner.shapes import CapturedShapes, ShapePlan, ShapeStats
from text_generation_inference.runner.shapes.buckets import (
    Axis,
    Bucket,
    BucketSettings,
    PlanLimits,
    nearest,
    num_sizes,
    plan_buckets,
    spread,
    steps_up_to,
)
from text_generation_inference.runner.shapes.captured import decode_sizes, mixed_sizes, plan_captured
from text_generation_inference.runner.shapes.plan import choose_settings, choose_strategy, plan_padded
from text_generation_inference.runner.warm.record import WarmRecord, read_record, record_path, write_record
from text_generation_inference.runner.warm.warm_up import Prediction, WarmUp
from text_generation_inference.types import BucketStats, EngineLoad, ModelFacts

LENGTHS_TO_1024 = list(range(128, 1025, 128))
# max input / max total / batch / prefill tokens of published command lines: axes of the exponential plan, and how many
# shapes it has. The backend whose strategy it is computes in floating point and finds 9 and 17 where 8 and 16 are meant.
PUBLISHED = {
    (512, 1024, 4, 2048): ([1, 2, 4], [128, 256, 384, 512], [1, 2, 4], [128, 160], 12, 6, 3),
    (1024, 2048, 32, 2048): (
        [1, 2, 4, 8, 16, 32],
        LENGTHS_TO_1024,
        [1, 2, 4, 8, 16, 32],
        [128, 256, 384, 512, 640],
        23,
        30,
        10,
    ),
    (512, 1536, 256, 131072): (
        [1, 2, 4, 8, 16, 32, 64, 128, 256],
        [128, 256, 384, 512],
        [1, 2, 4, 8, 16, 32, 64, 128, 256],
        [*range(128, 1153, 128), 1536, 1920, 2560, 3200],
        36,
        116,
        37,
    ),
    (4096, 8192, 4, 16384): (
        [1, 2, 4],
        [*LENGTHS_TO_1024, 1408, 1792, 2304, 3072, 4096],
        [1, 2, 4],
        [128, 256, 384],
        39,
        9,
        4,
    ),
}


def float_spread(minimum: int, step: int, maximum: int, count: int) -> list[int]:
    """The same formula in floating point, as that backend has it."""
    taken: list[int] = []
    for i in range(count):
        raw = minimum * (maximum / minimum) ** ((1 / (count - 1)) * i)
        size = maximum if i == count - 1 else min(maximum, math.ceil(raw / step) * step)
        if size in taken:
            free = [x for x in sorted({*range(minimum, maximum + 1, step), maximum}) if x not in taken]
            if not free:
                break
            size = min(free, key=lambda x: abs(x - raw))
        taken.append(size)
    return sorted(taken)


@pytest.mark.parametrize("given_limits", list(PUBLISHED))
def test_exponential_plans_of_published_configurations(given_limits: tuple[int, int, int, int]) -> None:
    longest, total, rows, prefill = given_limits
    prompt_batches, lengths, batches, blocks, num_prefill, num_product, num_decode = PUBLISHED[given_limits]
    extra = -(-128 * 128 // rows)
    most_blocks = max(128, rows * (-(-total // 128) * 128 + extra) // 128)
    assert spread(1, 1, rows, num_sizes(rows)) == prompt_batches == batches
    assert spread(128, 128, longest, num_sizes(longest)) == lengths
    assert spread(128, 128, most_blocks, num_sizes(most_blocks)) == blocks
    plan = plan_buckets(PlanLimits(longest, total, rows, prefill, 128), BucketSettings())
    assert len(plan.prefill) == num_prefill
    assert {b.length for b in plan.prefill} == set(lengths)
    assert all(bucket.num_tokens <= prefill for bucket in plan.prefill)
    # The backend prepares the whole product, except where rows would be without a block.
    assert len([1 for batch in batches for length in blocks if length >= batch]) == num_product
    # Ours leaves out what rows of at most `total` tokens cannot reach.
    assert len(plan.decode) == num_decode
    assert {b.batch for b in plan.decode} == set(batches)
    assert {b.length for b in plan.decode} <= set(blocks)


def test_the_same_formula_in_floating_point() -> None:
    """It reproduces the published tables, and shows where rounding errors are the only difference."""
    assert float_spread(1, 1, 32, 6) == [1, 2, 4, 9, 17, 32]
    for longest, total, rows, _ in PUBLISHED:
        blocks = max(128, rows * (total + -(-128 * 128 // rows)) // 128)
        for axis in ((128, 128, longest), (128, 128, blocks)):
            assert float_spread(*axis, num_sizes(axis[2])) == spread(*axis, num_sizes(axis[2]))
        if rows != 32:
            assert float_spread(1, 1, rows, num_sizes(rows)) == spread(1, 1, rows, num_sizes(rows))


def test_powers_of_two_are_exact() -> None:
    for exponent in range(1, 14):
        assert spread(1, 1, 2**exponent, exponent + 1) == [2**i for i in range(exponent + 1)]


# The same command lines with the sizes that the documents name: BATCH_BUCKET_SIZE, PREFILL_BATCH_BUCKET_SIZE,
# PAD_SEQUENCE_TO_MULTIPLE_OF.
LINEAR_PUBLISHED = {
    # the README's first command line: 4 does not fit the prefill budget, so the most that does is the only size
    ((1024, 2048, 8, 2048), (8, 4, 128)): (
        {
            128: [4, 8],
            256: [4, 8],
            384: [4, 5],
            512: [4],
            640: [3],
            768: [2],
            896: [2],
            1024: [2],
        },
        {8: 8 * 16},
    ),
    ((512, 1536, 256, 131072), (64, 64, 256)): (
        {256: [64, 128, 192, 256], 512: [64, 128, 192, 256]},
        {64: 768, 128: 1536, 192: 2304, 256: 3072},
    ),
    ((4096, 8192, 4, 16384), (1, 1, 1024)): (
        {1024: [1, 2, 3, 4], 2048: [1, 2, 3, 4], 3072: [1, 2, 3, 4], 4096: [1, 2, 3, 4]},
        {1: 64, 2: 128, 3: 192, 4: 256},
    ),
    ((1000, 1100, 10, 4000), (8, 4, 0)): ({1000: [4]}, {8: 72, 10: 90}),
}


@pytest.mark.parametrize("case", list(LINEAR_PUBLISHED))
def test_linear_plans(case: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    limits, (decode_step, prefill_step, length_step) = case
    plan = plan_buckets(PlanLimits(*limits, 128), BucketSettings("linear", decode_step, prefill_step, length_step))
    prefill, decode = LINEAR_PUBLISHED[case]
    assert set(plan.prefill) == {Bucket("prefill", b, length) for length, batches in prefill.items() for b in batches}
    assert set(plan.decode) == {Bucket("decode", batch, blocks) for batch, blocks in decode.items()}


def test_settings_of_one_axis() -> None:
    limits = PlanLimits(512, 1024, 100, 4096, 128, 700)
    plan = plan_buckets(limits, BucketSettings("linear", decode_batches=Axis(1, 32, 64), decode_blocks=Axis(step=256)))
    assert sorted({b.batch for b in plan.decode}) == [1, 2, 4, 8, 16, 32, 64, 100]
    assert sorted({b.length for b in plan.decode}) == [128, 256, 512, 700]
    assert Bucket("decode", 8, 128) in plan.decode
    assert Bucket("decode", 8, 256) not in plan.decode, "8 requests of 1024 tokens have 64 blocks"
    plan = plan_buckets(limits, BucketSettings(prompt_batches=Axis(count=3), decode_blocks=Axis(count=2)))
    assert sorted({b.batch for b in plan.prefill if b.length == 128}) == [1, 10]
    assert sorted({b.length for b in plan.decode}) == [128, 700]


def test_more_shapes_than_anybody_waits_for() -> None:
    limits = PlanLimits(4095, 4096, 256, 131072, 16)
    with pytest.raises(ValueError, match=r"more than 20,000 shapes of prefill"):
        plan_buckets(limits, BucketSettings("linear", 1, 1, 8))
    with pytest.raises(StartError, match=r"not usable: .* of decode steps.*`batch_bucket_size`"):
        plan_padded(ServerConfig(batch_bucket_size=1, vllm_decode_block_bucket_step=1), limits)


def test_the_smallest() -> None:
    plan = plan_buckets(PlanLimits(1, 2, 1, 1, 128), BucketSettings())
    assert plan.shapes == (Bucket("prefill", 1, 1), Bucket("decode", 1, 128))
    assert plan_buckets(PlanLimits(1, 2, 1, 1, 128), BucketSettings(reuse=True)).shapes == plan.shapes
    assert not plan.in_parts and not plan.cuts


# -- prompts after tokens in the cache -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "before", "after", "contexts"),
    [
        ((512, 1024, 4, 2048), 12, 11, [512]),
        ((1024, 2048, 32, 2048), 23, 15, [1024]),
        ((512, 1536, 256, 131072), 36, 22, [512]),
        ((4096, 8192, 4, 16384), 39, 35, [1024, 4096]),
    ],
)
def test_shapes_after_cached_tokens(limits: tuple[int, ...], before: int, after: int, contexts: list[int]) -> None:
    """Of the published configurations: how many more there are to warm up for reuse."""
    plan = plan_buckets(PlanLimits(*limits, 128), BucketSettings(reuse=True))
    found = [bucket for bucket in plan.prefill if bucket.context]
    assert (len(plan.prefill) - len(found), len(found)) == (before, after)
    assert sorted({bucket.context for bucket in found}) == contexts
    assert plan.in_parts and not plan.cuts
    assert [b for b in plan.prefill if not b.context] == list(
        plan_buckets(PlanLimits(*limits, 128), BucketSettings()).prefill
    )


def test_lengths_after_cached_tokens() -> None:
    plan = plan_buckets(PlanLimits(512, 1536, 256, 131072, 128), BucketSettings(reuse=True))
    batches: dict[int, list[int]] = {}
    for bucket in plan.prefill:
        if bucket.context:
            batches.setdefault(bucket.length, []).append(bucket.batch)
    # One prompt of 96 tokens takes as long as two: there is a shape for two alone.
    assert batches == {
        96: [2, 4, 8, 16, 32, 64],
        192: [1, 2, 4, 8, 16, 32],
        384: [1, 2, 4, 8, 16],
        512: [1, 2, 4, 8, 16],
    }
    assert plan.find("prefill", 1, 40, 130) == Bucket("prefill", 2, 96, 512)


def test_many_prompts_after_cached_tokens_are_several_passes() -> None:
    plan = plan_buckets(PlanLimits(512, 1536, 256, 16384, 128), BucketSettings(reuse=True))
    assert plan.prompts_fit(42, 384, 128) and not plan.prompts_fit(43, 384, 128)  # 16384 tokens in all
    groups = plan.group([(384, 128)] * 42)
    assert [len(group) for group in groups] == [16, 16, 10] and sorted(
        place for group in groups for place in group
    ) == list(range(42))
    mixed = plan.group([(384, 128), (60, 256)] * 20)
    assert sorted(place for group in mixed for place in group) == list(range(40))
    assert all(len({place % 2 for place in group}) == 1 for group in mixed)


def test_prompts_longer_than_a_step_are_cut() -> None:
    plan = plan_buckets(PlanLimits(1000, 1200, 4, 256, 128), BucketSettings())
    assert plan.in_parts and plan.cuts and plan.longest == 1000
    assert max(bucket.length for bucket in plan.prefill) == 256
    assert plan.find("prefill", 1, 232, 768) == Bucket("prefill", 1, 256, 1024)
    assert plan.find("prefill", 1, 257) is None


def test_settings_of_contexts() -> None:
    limits = PlanLimits(4096, 8192, 4, 16384, 128)
    contexts = lambda settings: sorted({b.context // 128 for b in plan_buckets(limits, settings).prefill if b.context})  # noqa: E731
    assert contexts(BucketSettings("linear", prompt_contexts=Axis(2, 16), reuse=True)) == [2, 4, 8, 16, 32]
    assert contexts(BucketSettings(prompt_contexts=Axis(count=4), reuse=True)) == [1, 4, 11, 32]
    assert choose_settings(ServerConfig(vllm_prompt_ctx_bucket_limit=4)).prompt_contexts == Axis(count=4)
    assert not choose_settings(ServerConfig(prefix_caching=False)).reuse


@given(st.data())
def test_every_part_of_a_prompt_has_a_shape(data: st.DataObject) -> None:
    draw = data.draw
    size, longest = draw(st.sampled_from([1, 8, 16, 128])), draw(st.integers(1, 900))
    limits = PlanLimits(longest, longest + 50, draw(st.integers(1, 9)), draw(st.integers(1, 1200)), size)
    wanted = BucketSettings(
        draw(st.sampled_from(["linear", "exponential"])), length_step=draw(st.integers(0, 200)),
        prompt_contexts=draw(axes()), reuse=True,
    )  # fmt: skip
    plan = plan_buckets(limits, wanted)
    start = draw(st.integers(0, longest - 1))
    count = draw(st.integers(1, min(longest - start, limits.max_batch_prefill_tokens)))
    found = plan.find("prefill", 1, count, start)
    assert found is not None and found.length >= count and found.context >= start and found.context % size == 0
    assert plan.group([(count, start)] * 2) in ([[0, 1]], [[0], [1]])


def test_steps_include_the_maximum() -> None:
    assert steps_up_to(8, 32) == [8, 16, 24, 32]
    assert steps_up_to(8, 30) == [8, 16, 24, 30]
    assert steps_up_to(8, 3) == [3]
    assert steps_up_to(1, 3) == [1, 2, 3]


@st.composite
def axes(draw: st.DrawFn) -> Axis:
    numbers = st.none() | st.integers(1, 40)
    return Axis(draw(numbers), draw(numbers), draw(numbers), draw(st.none() | st.integers(1, 8)))


@st.composite
def bucket_settings(draw: st.DrawFn) -> BucketSettings:
    steps = [draw(st.integers(1, 40)), draw(st.integers(1, 40)), draw(st.integers(0, 200))]
    return BucketSettings(
        draw(st.sampled_from(["linear", "exponential"])), *steps, *(draw(axes() | st.just(Axis())) for _ in range(4))
    )


@st.composite
def plan_limits(draw: st.DrawFn) -> PlanLimits:
    total = draw(st.integers(2, 2000))
    longest = draw(st.integers(1, total - 1))
    block_size = draw(st.sampled_from([1, 16, 128]))
    return PlanLimits(
        longest,
        total,
        draw(st.integers(1, 100)),
        draw(st.integers(longest, 8 * longest + 200)),
        block_size,
        draw(st.none() | st.integers(-(-total // block_size), 2500)),
    )


@given(st.data(), plan_limits(), bucket_settings())
def test_everything_permitted_has_a_shape(data: st.DataObject, limits: PlanLimits, wanted: BucketSettings) -> None:
    try:
        plan = plan_buckets(limits, wanted)
    except ValueError as error:
        assert "more than 20,000 shapes" in str(error)
        reject()
    assert len(set(plan.shapes)) == len(plan.shapes)
    assert all(bucket.num_tokens <= limits.max_batch_prefill_tokens for bucket in plan.prefill)
    rows = data.draw(st.integers(1, limits.max_batch_size))
    room = limits.num_blocks or limits.max_batch_size * limits.blocks_per_row
    most = min(room, rows * limits.blocks_per_row)
    rows = min(rows, most)
    blocks = data.draw(st.integers(rows, most))
    found = plan.find("decode", rows, blocks)
    assert found in plan.decode and found.batch >= rows and found.length >= blocks
    longest = data.draw(st.integers(1, limits.max_input_tokens))
    found = plan.find("prefill", 1, longest)
    assert found in plan.prefill and found.length >= longest
    assert plan.find("prefill", 1, limits.max_input_tokens) is not None
    assert plan.find("prefill", 1, limits.max_input_tokens + 1) is None
    assert plan.find("decode", limits.max_batch_size + 1, 1) is None
    more = data.draw(st.integers(1, limits.max_batch_size))
    found = plan.find("prefill", more, longest)
    assert found is None or (found in plan.prefill and found.batch >= more and found.length >= longest)


@given(plan_limits(), st.integers(1, 12), st.integers(1, 12), st.integers(1, 200))
def test_linear_sizes_are_the_next_multiples(limits: PlanLimits, decode: int, prefill: int, length: int) -> None:
    plan = plan_buckets(limits, BucketSettings("linear", decode, prefill, length))
    for rows in (1, limits.max_batch_size // 2 + 1, limits.max_batch_size):
        found = plan.find("decode", rows, min(rows, limits.num_blocks or rows))
        assert found is not None and found.batch == min(-(-rows // decode) * decode, limits.max_batch_size)
    for tokens in (1, limits.max_input_tokens // 2 + 1, limits.max_input_tokens):
        padded = min(-(-tokens // length) * length, limits.max_input_tokens)
        most = min(limits.max_batch_size, limits.max_batch_prefill_tokens // padded)
        found = plan.find("prefill", most, tokens)  # as many rows as fit with padding
        assert found == Bucket("prefill", most, padded)
        assert plan.find("prefill", most + 1, tokens) is None
        assert plan.find("prefill", 1, tokens) == Bucket("prefill", min(prefill, most), padded)


def test_prompts_of_like_length_share_a_pass() -> None:
    plan = plan_buckets(PlanLimits(1024, 2048, 8, 8192, 128), BucketSettings())
    assert plan.group([]) == []
    assert plan.group([(700, 0), (3, 0), (5, 0)]) == [[1, 2], [0]]  # 2 x 128 and 768 rather than 4 x 768
    assert plan.group([(100, 0), (120, 0)]) == [[0, 1]]
    assert plan.group([(200, 0), (120, 0)]) == [[0, 1]], "128 tokens saved are worth less than another pass"
    assert plan.group([(1024, 0)] * 9) == [list(range(8)), [8]], "no shape holds all of them"
    assert plan.group([(5, 0), (2000, 0)]) == [[0], [1]], "longer than any shape"


@given(st.data(), plan_limits(), st.integers(0, 40), st.integers(0, 40), bucket_settings())
def test_pictures_that_are_read_have_a_shape(
    data: st.DataObject, limits: PlanLimits, cached: int, allowed: int, wanted: BucketSettings
) -> None:
    """As many as a request may have, in prompts that are alone; one in each prompt of a pass; while decoding as many as
    there is room for, or one for each row."""
    limits, wanted = replace(limits, cached_pictures=cached), replace(wanted, pictures=allowed)
    try:
        plan = plan_buckets(limits, wanted)
    except ValueError:
        reject()
    plain = plan_buckets(replace(limits, cached_pictures=0), wanted)
    assert [bucket for bucket in plan.shapes if not bucket.pictures] == list(plain.shapes)
    assert len(set(plan.shapes)) == len(plan.shapes)
    most_each = min(cached, allowed, limits.max_input_tokens)
    assert bool(plan.reading) == bool(most_each)
    if not most_each:
        return
    decode = data.draw(st.sampled_from(plan.decode))
    rows = data.draw(st.integers(1, decode.batch))
    count = data.draw(st.integers(1, min(rows * most_each, plan.most_read)))
    found = plan.where_read(decode, count)
    assert found is not None and replace(found, pictures=0) == decode and found.pictures >= count
    assert most_each <= plan.most_read <= max(cached, limits.max_batch_size)
    prompts = data.draw(st.sampled_from(plan.prefill))
    assert plan.where_read(prompts, 1) == replace(prompts, pictures=1)
    read = data.draw(st.integers(1, most_each))
    found = plan.find("prefill", 1, prompts.length, prompts.context, read)
    assert found is not None and found.pictures >= read and found.length >= prompts.length
    assert plan.where_read(decode, plan.most_read + 1) is None


def test_prompts_with_several_pictures_are_alone() -> None:
    limits = PlanLimits(1024, 2048, 8, 8192, 128, cached_pictures=16)
    plan = plan_buckets(limits, BucketSettings(pictures=8))
    assert {bucket.pictures for bucket in plan.prefill} == {0}
    assert plan.group([(100, 0)] * 4, [1] * 4) == [[0, 1, 2, 3]]
    assert plan.group([(100, 0)] * 4, [1, 3, 1, 8]) == [[0, 2], [1], [3]]
    assert plan.group([(100, 0)] * 4, [0, 1, 0, 1]) == [[0, 2], [1, 3]], "whoever reads none is spared their time"
    assert plan.find("prefill", 2, 100, 0, 3) is None
    assert str(plan.find("prefill", 1, 100, 0, 3)) == "1 prompts of 128 tokens with up to 4 pictures each"
    assert str(plan.where_read(plan.decode[0], 1)) == "1 requests with 128 blocks and up to 1 pictures"
    # As documented: Llama 3.2 Vision with 2048 tokens of 4096, 8 requests, and the default number of pictures or one.
    for pictures, prompts, decode in ((32, 140, 14), (1, 71, 5)):
        limits = PlanLimits(2048, 4096, 8, 4096, 128, 256, max(8, pictures))
        plan = plan_buckets(limits, BucketSettings(reuse=True, pictures=pictures))
        assert (len(plan.prefill), len(plan.decode)) == (71, 5)
        phases = [bucket.phase for bucket in plan.reading]
        assert (phases.count("prefill"), phases.count("decode")) == (prompts, decode)


@given(st.lists(st.integers(1, 96), min_size=1, max_size=9), st.integers(0, 60), st.integers(1, 5), st.integers(1, 40))
def test_sharing_passes_never_computes_more(lengths: list[int], cost: int, batch: int, step: int) -> None:
    plan = plan_buckets(PlanLimits(96, 160, 9, 9 * 96, 16), BucketSettings("linear", 4, batch, step))
    plan.pass_tokens = cost
    groups = plan.group([(length, 0) for length in lengths])
    assert sorted(place for places in groups for place in places) == list(range(len(lengths)))
    found = [plan.find("prefill", len(places), max(lengths[place] for place in places)) for places in groups]
    together = plan.find("prefill", len(lengths), max(lengths))
    assert together is not None
    assert sum(bucket.num_tokens + cost for bucket in found if bucket is not None) <= together.num_tokens + cost
    assert None not in found


@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 5000), st.integers(1, 16))
def test_spread_rounds_up_exactly(minimum: int, step: int, maximum: int, count: int) -> None:
    sizes = spread(minimum, step, maximum, count)
    assert sizes == sorted(set(sizes)) and sizes[-1] == maximum and len(sizes) <= count
    if count > 1 and minimum < maximum:
        assert len(sizes) == min(count, len({*range(minimum, maximum + 1, step), maximum})) or minimum % step


@pytest.mark.timeout(20)
def test_more_sizes_than_there_are() -> None:
    """`VLLM_..._BUCKET_LIMIT` may be any number."""
    assert spread(1, 1, 256, 10**9) == list(range(1, 257))
    assert spread(128, 128, 1000, 10**9) == [*range(128, 1000, 128), 1000]


@given(st.integers(1, 5), st.integers(1, 64), st.integers(1, 3000), st.integers(2, 20))
def test_spread_against_many_digits(steps: int, step: int, more: int, count: int) -> None:
    minimum, maximum = steps * step, steps * step + more
    with localcontext(prec=80):
        ratio = (Decimal(maximum) / minimum).ln() / (count - 1)
        free = sorted({*range(minimum, maximum + 1, step), maximum})
        taken: set[int] = set()
        for i in range(count):
            raw = minimum * (ratio * i).exp()
            raw = raw.quantize(Decimal(10) ** -40)  # what is whole is whole again
            size = min(maximum, int((raw / step).to_integral_value(ROUND_CEILING)) * step)
            if size in taken:
                if not (left := [x for x in free if x not in taken]):
                    break
                size = min(left, key=lambda x: abs(x - raw))
            taken.add(size)
    assert spread(minimum, step, maximum, count) == sorted(taken)


def test_the_nearest_of_sizes() -> None:
    assert [nearest([2, 6], 2, power) for power in (1, 15, 16, 17, 99)] == [2, 2, 2, 6, 6]


@given(st.integers(1, 3000))
def test_decode_sizes_reach_the_maximum_with_little_padding(maximum: int) -> None:
    sizes = decode_sizes(maximum)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == maximum
    assert sizes[0] == 1
    for small, large in pairwise(sizes):
        assert large - small <= max(1, small if small <= 8 else 8 if small < 64 else 16 if small < 256 else 64)
    plan = plan_captured(maximum, 0, None)
    for rows in {1, (maximum + 1) // 2, maximum}:
        found = plan.find("decode", rows, 0)
        assert found == Bucket("decode", min(size for size in sizes if size >= rows), 0)
    assert plan.find("decode", maximum + 1, 0) is None


@given(st.integers(1, 2000), st.integers(1, 20_000))
def test_mixed_sizes_stay_within_a_step(max_rows: int, max_tokens: int) -> None:
    sizes = mixed_sizes(max_rows, max_tokens)
    assert [sum(size) for size in sizes] == sorted(sum(size) for size in sizes)
    assert len(set(sizes)) == len(sizes) <= (36 if max_tokens <= 1024 else 60)
    assert all(rows < max_rows and rows + tokens <= max_tokens for rows, tokens in sizes)
    assert max((tokens for _, tokens in sizes), default=0) <= 2048
    if max_tokens >= 512:
        assert max(rows for rows, _ in sizes) == min(max_rows - 1, 256)
        assert (0, 256) in sizes


def test_captured_shapes_come_largest_first() -> None:
    plan = plan_captured(40, 300, None)
    mixed = [bucket for bucket in plan.shapes if bucket.phase == "mixed"]
    decode = [bucket.batch for bucket in plan.shapes if bucket.phase == "decode"]
    assert plan.shapes == (*mixed, *plan.decode[::-1]) and decode == decode_sizes(40)[::-1]
    assert [bucket.cost for bucket in mixed] == sorted((bucket.cost for bucket in mixed), reverse=True)
    assert mixed[0].num_tokens <= 300 and not plan.pads
    some = plan_captured(40, 300, [2, 5, 41, 0])
    assert [bucket.batch for bucket in some.shapes if bucket.phase == "decode"] == [5, 2]
    assert some.find("decode", 5, 0) == Bucket("decode", 5, 0)  # beside those that are padded to in any case
    assert some.find("decode", 6, 0) == Bucket("decode", 8, 0)
    none = plan_captured(40, 300, [0])
    assert none.shapes == () and none.find("decode", 6, 0) == Bucket("decode", 8, 0)
    assert none.find("mixed", 1, 1) is None
    exact = CapturedShapes()
    assert exact.shapes == () and exact.find("decode", 1, 0) is exact.find("mixed", 0, 1) is None


# -- settings ------------------------------------------------------------------------------------------------------


def test_which_strategy() -> None:
    assert choose_strategy(ServerConfig()) == "exponential"
    assert choose_strategy(ServerConfig(batch_bucket_size=16)) == "linear"
    assert choose_strategy(ServerConfig(pad_sequence_to_multiple_of=0)) == "linear"
    assert choose_strategy(ServerConfig(vllm_exponential_bucketing=False)) == "linear"
    assert choose_strategy(ServerConfig(bucket_strategy="exponential", batch_bucket_size=16)) == "exponential"


def test_settings_become_a_plan() -> None:
    chosen = choose_settings(ServerConfig(batch_bucket_size=16, vllm_decode_block_bucket_step=64))
    assert (chosen.batch_step, chosen.prefill_batch_step, chosen.length_step) == (16, 4, 128)
    assert chosen.decode_blocks == Axis(step=64)
    assert choose_settings(ServerConfig(pad_sequence_to_multiple_of=0)).length_step == 0


@pytest.mark.parametrize("base", [64, 2048, 4096, 9000])
def test_the_shortest_prompts_of_models_that_see(base: int) -> None:
    """BASE_IMAGE_TOKENS; the linear lengths are those of TGI."""
    limits = PlanLimits(4096, 8192, 4, 16384, 128)
    linear = ServerConfig(base_image_tokens=base, pad_sequence_to_multiple_of=256)
    exponential = ServerConfig(base_image_tokens=base, bucket_strategy="exponential")
    for config in (linear, exponential):
        prompts = plan_padded(config, limits, sees=True).prefill
        lengths = sorted({bucket.length for bucket in prompts if not bucket.context})
        assert (lengths[0], lengths[-1]) == (min(base, 4096), 4096)
        assert plan_padded(config, limits).prefill[0].length < 2048  # of other models
        if base == 2048 and config is linear:
            assert lengths == [2048, 2304, 2816, 3840, 4096]


# -- warming up ----------------------------------------------------------------------------------------------------


class FakeRunner:
    """Takes 1 MB for anything, and 1 MB per token while it runs; a graph keeps 2 MB per token."""

    def __init__(self, plan: ShapePlan, room: int) -> None:
        self.plan, self.room = plan, room
        self.without: set[Bucket] = set()
        self.graphs: set[Bucket] = set()
        self.order: list[Bucket] = []

    @property
    def num_captured(self) -> int:
        return len(self.graphs)

    def captures(self, bucket: Bucket) -> bool:
        return bucket not in self.without and bucket.num_tokens <= 8192

    def go_without(self, bucket: Bucket) -> None:
        self.without.add(bucket)

    def warm(self, bucket: Bucket, scored: bool = False) -> None:
        self.order.append(bucket)
        size = bucket.num_tokens if bucket.phase == "prefill" else bucket.batch + bucket.length
        self.last = 1_000_000 * (1 + size)
        if self.captures(bucket):
            self.graphs.add(bucket)
            self.last += 2_000_000 * size
            self.room -= 2_000_000 * size
        assert self.last <= self.room or self.captures(bucket), "the prediction came too late"

    def free(self) -> int:
        return self.room

    def used_by(self, work: Callable[[], object]) -> int:
        work()
        return self.last


PLAN = plan_buckets(PlanLimits(512, 1024, 4, 2048, 128), BucketSettings())


def test_smallest_first_and_told_how_far() -> None:
    runner = FakeRunner(PLAN, 10**12)
    told: list[tuple[str, int, int]] = []
    WarmUp(runner, runner, lambda *progress: told.append(progress)).run()
    assert set(runner.order) == set(PLAN.shapes)
    prompts = [bucket.num_tokens for bucket in runner.order if bucket.phase == "prefill"]
    assert prompts == sorted(prompts)
    assert [done for _, done, _ in told] == list(range(len(PLAN.shapes) + 1))
    assert {total for _, _, total in told} == {len(PLAN.shapes)}


def test_a_shape_without_room_for_its_graph_goes_without() -> None:
    runner = FakeRunner(PLAN, 9 * 10**9)
    work = WarmUp(runner, runner, reserve=2049 * 10**6)
    work.run()
    assert set(runner.order) == set(PLAN.shapes)
    assert runner.without
    assert max(b.num_tokens for b in runner.graphs if b.phase == "prefill") <= min(
        bucket.num_tokens for bucket in runner.without
    )
    assert {shape.bucket for shape in work.shapes if not shape.captured} == runner.without


def test_a_report_instead_of_a_lack_of_memory() -> None:
    runner = FakeRunner(PLAN, 2 * 10**9)
    runner.without = set(PLAN.prefill)
    with pytest.raises(ResourceError) as failure:
        WarmUp(runner, runner).run()
    text = str(failure.value)
    assert "Warm-up stopped before" in text and "prompts of" in text and "are free" in text
    assert f"of {len(PLAN.shapes)} shapes" in text and "`max_batch_prefill_tokens`" in text


def test_a_device_that_lacks_memory_all_the_same() -> None:
    class Broken(FakeRunner):
        def warm(self, bucket: Bucket, scored: bool = False) -> None:
            if bucket.num_tokens >= 512 and bucket.phase == "prefill":
                raise RuntimeError("CUDA error: out of memory")
            super().warm(bucket, scored)

    runner = Broken(PLAN, 10**12)
    with pytest.raises(ResourceError, match="1 prompts of 512 tokens"):
        WarmUp(runner, None).run()


@pytest.mark.parametrize("plan", [PLAN, plan_captured(40, 300, None)], ids=["padded", "captured"])
def test_a_graph_for_which_the_device_lacks_memory_is_left_out(plan: ShapePlan) -> None:
    """Others are made as ever, and nothing is tried twice but the shape itself."""

    class NoRoomForLarge(FakeRunner):
        def warm(self, bucket: Bucket, scored: bool = False) -> None:
            if bucket.cost >= 200 and self.captures(bucket):
                self.order.append(bucket)
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().warm(bucket, scored)

    runner = NoRoomForLarge(plan, 10**12)
    work = WarmUp(runner)
    work.run()
    large = [bucket for bucket in plan.shapes if bucket.cost >= 200]
    assert large and work.num_lacking == len(large) < len(plan.shapes)
    assert runner.without == set(large) and runner.graphs == set(plan.shapes) - set(large)
    assert runner.order == [bucket for bucket in plan.shapes for _ in range(1 + (bucket.cost >= 200))]
    assert [shape.captured for shape in work.shapes] == [bucket.cost < 200 for bucket in plan.shapes]


@pytest.mark.parametrize("rooms", [(9 * 10**9, 20 * 10**9), (10**12, 9 * 10**9)])
def test_ranks_go_without_the_same_graphs(rooms: tuple[int, int]) -> None:
    """The one that has least decides, whichever it is; a second one lacks what nobody predicted."""

    class LacksOne(FakeRunner):
        def warm(self, bucket: Bucket, scored: bool = False) -> None:
            if bucket == PLAN.decode[1] and self.captures(bucket):
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().warm(bucket, scored)

    runners = [FakeRunner(PLAN, rooms[0]), LacksOne(PLAN, rooms[1])]
    barrier, said = threading.Barrier(2, timeout=20), [0, 0]

    def warm(rank: int) -> WarmUp:
        def minimum(number: int) -> int:
            said[rank] = number
            barrier.wait()
            least = min(said)
            barrier.wait()
            return least

        work = WarmUp(runners[rank], runners[rank], reserve=2049 * 10**6, minimum=minimum)
        work.run()
        return work

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(warm, range(2))
    assert runners[0].without == runners[1].without and PLAN.decode[1] in runners[0].without
    assert len(runners[0].without) > 1 and runners[0].graphs >= runners[1].graphs
    assert first.num_lacking == second.num_lacking == 1


def test_predictions_are_in_proportion() -> None:
    prediction = Prediction()
    assert prediction.predict(100) == 0
    prediction.add(1, 50)
    assert prediction.predict(1000) == 50
    prediction.add(10, 150)
    assert prediction.predict(10) == 150
    assert prediction.predict(40) == 50 + 39 * 100 // 9


def test_the_record_of_a_warm_up(tmp_path: Path) -> None:
    runner = FakeRunner(PLAN, 10**12)
    work = WarmUp(runner, runner)
    work.run()
    settings_ = {"model_id": "a", "device": "cpu"}
    path = record_path(tmp_path, settings_)
    assert path != record_path(tmp_path, {**settings_, "model_id": "b"})
    assert read_record(path) is None
    write_record(path, work.record, settings_)
    record = read_record(path)
    assert isinstance(record, WarmRecord)
    assert {shape.bucket for shape in record.shapes} == set(PLAN.shapes)
    assert json.loads(path.read_text())["settings"] == settings_
    # The next start knows how long each shape takes, and needs no guess of its memory.
    for shape in record.shapes:
        shape.seconds = 0.5
    told: list[tuple[str, int, int]] = []
    again = FakeRunner(PLAN, 10**12)
    WarmUp(again, again, lambda *progress: told.append(progress), record).run()
    assert told[-1][1] == told[-1][2] == 500 * len(PLAN.shapes)
    path.write_text("{")
    assert read_record(path) is None
    write_record(Path("/proc/none/x.json"), work.record, settings_)  # a folder that cannot be made costs nothing


# -- counting ------------------------------------------------------------------------------------------------------


def test_misses_are_counted_and_told_once_each() -> None:
    book = ShapeStats(PLAN)
    planned, other = PLAN.prefill[0], Bucket("prefill", 1, 9999)
    known, new = ((128,), None), ((9999,), None)
    book.warmed.add(known)
    book.on_pass(known, planned, 100, bypassed=True)
    for _ in range(3):
        book.on_pass(new, other, 9000, bypassed=False)
    news = book.take_news()
    assert len(news) == 1 and "1 prompts of 9999 tokens is not in the bucket plan" in news[0]
    book.on_pass(((4,), None), PLAN.decode[0], 1, bypassed=False)
    assert "was not warmed up" in book.take_news()[0] and book.take_news() == []
    stats = book.stats(7)
    assert (stats.num_unplanned, stats.num_bypassed, stats.num_captured) == (2, 1, 7)
    assert (stats.prefill_computed, stats.prefill_needed) == (128 + 3 * 9999, 100 + 3 * 9000)


def test_counters_of_the_server() -> None:
    metrics = Metrics(100, 200)
    facts = ModelFacts(
        model_id="m", dtype="float32", vocab_size=9, max_input_tokens=1, max_total_tokens=2, num_blocks=5,
        block_size=16, device="cpu",
    )  # fmt: skip
    metrics.engine_ready(facts)
    metrics.load(EngineLoad(0, 0, 4, 0, 0, 0))
    assert b"tgi_bucket" not in metrics.render()
    metrics.load(EngineLoad(0, 0, 4, 0, 0, 0, BucketStats(9, 10, 8, 3, 1, 200, 150, 80, 70)))
    metrics.engine_ready(facts)  # it was started again and counts from zero
    metrics.load(EngineLoad(0, 0, 4, 0, 0, 0, BucketStats(9, 10, 8, 2, 0, 20, 15, 8, 7)))
    text = metrics.render().decode()
    for line in (
        'tgi_bucket_shapes{state="planned"} 9',
        'tgi_bucket_shapes{state="warmed"} 10',
        'tgi_bucket_shapes{state="captured"} 8',
        "tgi_bucket_bypassed 5",
        "tgi_bucket_unplanned 1",
        'tgi_bucket_tokens_computed{method="prefill"} 220',
        'tgi_bucket_tokens_needed{method="decode"} 77',
    ):
        assert f"\n{line}\n" in text, line
