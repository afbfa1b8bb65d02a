"""Random traffic with pictures: features are there when they are read, never more than there is room for, prefixes of
other pictures are never found, and nobody waits for ever. The oracle's tokens stand for features: a picture's are made of
its digest."""

from collections.abc import Sequence

import msgspec
import pytest
from harness import Harness, OracleRunner, expected_output, make, policy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from text_generation_inference.config import least_blocks
from text_generation_inference.errors import ValidationError
from text_generation_inference.scheduler.scheduler import Scheduler
from text_generation_inference.types import (
    GenerationRequest,
    PicturePolicy,
    PictureSpan,
    StepPlan,
    StepResult,
    group_neighbours,
    name_group,
)

ROOM = 12  # features
SIZES = {"a0": [5], "b1": [5], "c2": [2, 3], "d3": [ROOM], "e4": [1]}  # runs of each picture, text between them
CROSS_ROWS = 4  # features of each picture that layers of cross-attention read


def seen(request: GenerationRequest, crosses: bool = False) -> GenerationRequest:
    """With tokens that tell the pictures apart. `crosses`: the first one depends on all that come after it."""
    tokens = list(request.token_ids)
    if crosses and request.pictures and request.pictures[0].start > 0:
        tokens[0] = hash((tokens[0], *(span.digest for span in request.pictures))) % 1000 + 10
    for span in request.pictures:
        places = [place for start, count in span.runs for place in range(start, start + count)]
        for number, place in enumerate(places):
            tokens[place] = hash((span.digest, number)) % 1000 + 10
    return msgspec.structs.replace(request, token_ids=tokens)


class PictureRunner(OracleRunner):
    """Knows which features it has."""

    pictures: dict[int, list[PictureSpan]]
    features: dict[str, int]
    rules: PicturePolicy
    batch: dict[str, int]  # under way
    left = 0  # parts of it
    num_computed = 0
    seconds_of_part = 0.0  # any at all if it is not said

    def execute(self, plan: StepPlan) -> StepResult:
        for slot in plan.release:
            del self.pictures[slot]
        self.pictures |= {admission.slot: admission.request.pictures for admission in plan.admit}
        if self.rules.cross_rows:
            self.check_readers([admission.slot for admission in plan.admit])
        for digest in plan.drop_features:
            if self.features.pop(digest, None) is None:
                assert digest in self.batch or not self.batch, "neither there nor under way"
                self.batch = {}
        if plan.encode:
            self.begin(plan.encode)
        if plan.encode_parts:
            assert self.batch and plan.encode_parts <= self.left
            self.left -= plan.encode_parts
            if not self.left:
                self.features |= self.batch
                self.batch = {}
        assert sum(self.features.values()) + sum(self.batch.values()) <= ROOM
        if self.rules.cross_rows:
            decoding = [slot for slot in (*self.decode_set, *plan.join) if slot not in plan.leave]
            self.check_readers([*(decoding if plan.decode else []), *(chunk.slot for chunk in plan.chunks)])
        else:
            self.check_chunks(plan)
        crosses = self.rules.cross_rows > 0
        admit = [msgspec.structs.replace(each, request=seen(each.request, crosses)) for each in plan.admit]
        result = super().execute(msgspec.structs.replace(plan, admit=admit))
        each = self.seconds_of_part or hash((plan.step, 7)) % 40 / 1000
        return msgspec.structs.replace(result, encode_s=plan.encode_parts * each)

    def begin(self, spans: list[PictureSpan]) -> None:
        assert not self.batch, "two batches at a time"
        if self.rules.cross_rows:
            assert len(group_neighbours(spans)) == 1, "pictures that are not read together"
            self.batch = {name_group(spans): len(spans) * CROSS_ROWS}
        else:
            assert len(spans) == 1 or sum(span.num_pixels for span in spans) <= self.rules.batch_pixels
            self.batch = {span.digest: span.num_features for span in spans}
            assert len(self.batch) == len(spans)
        assert not self.batch.keys() & self.features, "computed twice"
        self.left = self.rules.num_parts * (len(spans) if self.rules.cross_rows else 1)
        self.num_computed += len(self.batch)

    def check_readers(self, slots: Sequence[int]) -> None:
        """All pictures of whoever comes, and of whoever computes anything, are there."""
        for slot in slots:
            for group in group_neighbours(self.pictures[slot]):
                assert name_group(group) in self.features, "features that are not there are read"

    def check_chunks(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            for span in self.pictures[chunk.slot]:
                for start, count in span.runs:
                    if start < chunk.end and start + count > chunk.start:
                        assert span.digest in self.features, "features that are not there are read"
                        whole = chunk.start <= start and start + count <= chunk.end
                        assert whole or not self.rules.whole_runs, "a run is cut"

    def forget(self) -> None:
        self.tokens, self.tables, self.computed, self.decode_set, self.beside_tables = {}, {}, {}, [], {}
        self.pictures, self.features, self.batch = {}, {}, {}


class _AreaShapes:
    """Of at most so many tokens, or of one prompt."""

    longest = 10_000

    def __init__(self, tokens: int, in_parts: bool) -> None:
        self.tokens, self.in_parts = tokens, in_parts

    def prompts_fit(self, rows: int, longest: int, context: int = 0, /) -> bool:
        return rows * longest <= max(self.tokens, longest)


class PictureHarness(Harness):
    plans: list[StepPlan]

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        overlap: bool,
        tokens: int,
        rules: PicturePolicy,
        by_shapes: bool = False,
        in_parts: bool = True,
        beside: tuple[int, int] | None = None,
        window: int | None = None,
        **more: int,
    ) -> None:
        about = policy(max_batch_prefill_tokens=tokens, max_batch_size=4, **more)
        super().__init__(num_blocks, block_size, in_parts, overlap, about, window, beside)
        shapes = _AreaShapes(tokens, in_parts) if by_shapes else None
        self.scheduler = Scheduler(about, self.pool, clock=lambda: 0, pictures=rules, shapes=shapes)
        self.runner = PictureRunner(num_blocks, block_size, about.max_batch_size, window=window, beside=beside)
        self.runner.pictures, self.runner.features, self.runner.rules = {}, {}, rules
        self.runner.batch, self.plans = {}, []
        self.fails: set[int] = set()  # steps for which the device has no memory

    def step(self) -> None:
        plan = self.scheduler.plan()
        self.scheduler.check()
        if plan is not None and plan.step in self.fails:
            self.pending.clear()
            self.runner.forget()
            for finish in self.scheduler.rollback("no memory").finished:
                self.reasons[finish.request_id] = finish.reason
            self.scheduler.check()
            return
        if plan is not None:
            self.spoil()
            self.plans.append(plan)
            self.pending.append(self.runner.execute(plan))
        while self.pending and (len(self.pending) > self.overlap or plan is None):
            result = self.pending.popleft()
            self.take(result, result.encode_s + hash((result.step, 5)) % 30 / 1000)


def with_pictures(number: int, parts: Sequence[str | int], new: int, crosses: bool = False) -> GenerationRequest:
    """parts: digests of pictures, and numbers of tokens of text. `crosses`: one token stands for each picture."""
    tokens: list[int] = []
    spans: list[PictureSpan] = []
    for part in parts:
        if isinstance(part, int):
            tokens += [place % 3 for place in range(part)]
            continue
        runs: list[tuple[int, int]] = []
        if crosses:
            runs, tokens = [(len(tokens), 1)], [*tokens, 0]
        for count in () if crosses else SIZES[part]:
            runs.append((len(tokens), count))
            tokens += [0] * count + [1]
        spans.append(PictureSpan(part, runs, [], [10 * sum(SIZES[part]), 3]))
    return make(number, tokens, new, pictures=spans)


prompts = st.lists(st.one_of(st.sampled_from(sorted(SIZES)), st.integers(1, 6)), min_size=1, max_size=5)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_pictures_in_random_traffic(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["", "", "runs", "prompts", "shapes", "parts"]), "what is computed at once")
    whole, whole_prompts, by_shapes = kind == "runs", kind == "prompts", kind in ("shapes", "parts")
    tokens = data.draw(st.integers(ROOM if whole else 100 if kind else 1, 120 if kind else 40), "tokens of a step")
    asked = data.draw(st.lists(st.tuples(prompts, st.integers(1, 8)), min_size=1, max_size=8), "requests")
    requests = [with_pictures(number, *each) for number, each in enumerate(asked)]
    size = data.draw(st.integers(1, 5), "block size")
    longest = max(len(request.token_ids) + request.max_new_tokens for request in requests)
    num_blocks = 2 + -(-longest // size) + data.draw(st.integers(0, 30), "spare blocks")
    overlap = data.draw(st.booleans(), "overlap")
    rules = PicturePolicy(
        ROOM,
        whole_runs=whole,
        whole_prompts=whole_prompts,
        num_parts=data.draw(st.integers(1, 6), "parts"),
        batch_pixels=data.draw(st.integers(0, 200), "pixels of a batch"),
    )
    limits = {"max_step_ms": data.draw(st.sampled_from([0, 20, 100]), "ms of a step")}
    every = None if kind else data.draw(st.sampled_from([None, None, 2, 4, 9]), "window of all layers")
    window = None
    if not by_shapes and every is None:
        window = data.draw(st.sampled_from([None, 1, 4, 9]), "window of some layers")
    if every is not None:  # a request holds no more than its window and a chunk
        num_blocks = 2 + least_blocks(every, size) + data.draw(st.integers(0, 12), "spare blocks of windows")
    beside = None
    if window is not None:  # as sizes are chosen: a chunk and the window before it, or all that there is for others
        least = 1 + least_blocks(window, size) + (-(-tokens // size) if kind else 0)
        beside = (min(num_blocks, least + data.draw(st.integers(0, 20), "spare blocks beside")), window)
    in_parts = kind != "shapes"
    harness = PictureHarness(num_blocks, size, overlap, tokens, rules, by_shapes, in_parts, beside, every, **limits)
    if by_shapes or whole_prompts:
        requests = [request for request in requests if can_run(harness.scheduler, request)]
    arrivals = [data.draw(st.integers(0, 12)) for _ in requests]
    aborts = [data.draw(st.one_of(st.none(), st.none(), st.integers(0, 20))) for _ in requests]
    harness.play({"requests": requests, "arrivals": arrivals, "aborts": aborts})
    for request, arrival, abort in zip(requests, arrivals, aborts, strict=True):
        output, expected = harness.outputs.get(request.id, []), expected_output(seen(request), every, window)
        assert output == (expected[: len(output)] if abort is not None and abort >= arrival else expected)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_pictures_of_cross_attention_in_random_traffic(data: st.DataObject) -> None:
    """They are there in every step of a request, are shared, and are gone with the last that reads them."""
    parts = st.lists(st.one_of(st.sampled_from(sorted(SIZES)), st.integers(1, 6)), min_size=1, max_size=6)
    fitting = parts.filter(lambda found: sum(isinstance(part, str) for part in found) * CROSS_ROWS <= ROOM)
    asked = data.draw(st.lists(st.tuples(fitting, st.integers(1, 8)), min_size=1, max_size=8), "requests")
    requests = [with_pictures(number, *each, crosses=True) for number, each in enumerate(asked)]
    size, tokens = data.draw(st.integers(1, 5), "block size"), data.draw(st.integers(1, 40), "tokens of a step")
    longest = max(len(request.token_ids) + request.max_new_tokens for request in requests)
    num_blocks = 2 + -(-longest // size) + data.draw(st.integers(0, 30), "spare blocks")
    overlap = data.draw(st.booleans(), "overlap")
    rules = PicturePolicy(
        ROOM,
        cross_rows=CROSS_ROWS,
        num_parts=data.draw(st.integers(1, 4), "parts"),
        batch_pixels=data.draw(st.integers(0, 200), "pixels of a batch"),
    )
    limits = {"max_step_ms": data.draw(st.sampled_from([0, 20, 100]), "ms of a step")}
    by_shapes, in_parts = data.draw(
        st.sampled_from([(False, True), (True, False), (True, True)]), "by shapes, in parts"
    )
    harness = PictureHarness(num_blocks, size, overlap, tokens, rules, by_shapes, in_parts, **limits)
    harness.fails = data.draw(st.sets(st.integers(1, 40), max_size=3), "steps without memory")
    arrivals = [data.draw(st.integers(0, 12)) for _ in requests]
    aborts = [data.draw(st.one_of(st.none(), st.none(), st.integers(0, 20))) for _ in requests]
    harness.play({"requests": requests, "arrivals": arrivals, "aborts": aborts})
    for request, arrival, abort in zip(requests, arrivals, aborts, strict=True):
        output, expected = harness.outputs.get(request.id, []), expected_output(seen(request, crosses=True))
        may_end = (abort is not None and abort >= arrival) or harness.reasons.get(request.id) == "error"
        assert output == (expected[: len(output)] if may_end else expected)


def test_a_cached_prefix_that_ends_before_a_run_does_not_end_within_another() -> None:
    harness = PictureHarness(20, 3, False, 12, PicturePolicy(ROOM, whole_runs=True))
    for number in range(2):
        harness.scheduler.add(request := with_pictures(number, [3, "a0", 3, "e4", "c2"], 1))
        harness.drain()
        assert harness.outputs[number] == expected_output(seen(request))


def can_run(scheduler: Scheduler, request: GenerationRequest) -> bool:
    try:
        scheduler.add(request)
    except ValidationError:
        return False
    return scheduler.abort(request.id)


def test_steps_of_others_go_on_while_a_large_picture_is_computed() -> None:
    """Who decodes gets a token in each step, whose time is bounded; who comes later is let in and ends before."""
    rules = PicturePolicy(ROOM, num_parts=40, batch_pixels=1)
    harness = PictureHarness(100, 4, True, 40, rules, max_step_ms=100)
    harness.runner.seconds_of_part = 0.02
    running, large, later = make(0, [1, 2], 30), with_pictures(1, [2, "d3"], 2), make(2, [2, 1], 3)
    harness.scheduler.add(running)
    harness.step()
    harness.scheduler.add(large)
    for _ in range(4):
        harness.step()
    harness.scheduler.add(later)
    while not {1, 2} <= harness.reasons.keys():
        harness.step()
    work = [plan for plan in harness.plans if plan.encode_parts]
    assert sum(plan.encode_parts for plan in work) == 40
    assert all(plan.decode for plan in work)
    assert max(plan.encode_parts for plan in work) * 0.02 <= 0.1 < 40 * 0.02
    assert len({plan.encode_parts for plan in work}) > 1  # more than the least, once it is known how long parts take
    assert list(harness.reasons).index(2) < list(harness.reasons).index(1)
    assert harness.outputs[1] == expected_output(seen(large))


def test_a_large_picture_is_not_passed_by_small_ones_for_ever() -> None:
    """All room is held by others when it is asked for, and there is always another small one."""
    rules = PicturePolicy(ROOM, num_parts=2, batch_pixels=1)
    harness = PictureHarness(200, 4, False, 40, rules, max_step_ms=1)
    harness.runner.seconds_of_part = 1.0
    for number in range(120):
        small = make(number, [number % 4, *[0] * 5, 1], 4, pictures=[PictureSpan(f"f{number:03}", [(1, 5)], [], [9])])
        harness.scheduler.add(small)
        if number == 2:
            harness.scheduler.add(with_pictures(1000, ["d3"], 2))
        harness.step()
    assert 1000 in harness.reasons, "it never had its turn"


def test_who_waits_holds_no_room_that_the_next_one_lacks() -> None:
    """What the shorter one needs is there, so it holds it before the longer one's turn comes, and then waits for it."""
    rules = PicturePolicy(ROOM, cross_rows=CROSS_ROWS)
    harness, now = PictureHarness(11, 4, False, 100, rules), [0]
    about = (harness.scheduler.policy, harness.pool, lambda: now[0])
    harness.scheduler = Scheduler(*about, queue_threshold_ms=10, pictures=rules)
    harness.scheduler.add(with_pictures(0, ["c2", "d3", 2], 1, crosses=True))
    harness.drain()
    harness.scheduler.add(make(1, [2] * 30, 8))
    harness.step()
    harness.scheduler.add(with_pictures(2, [20, "a0", "b1"], 2, crosses=True))
    harness.scheduler.add(with_pictures(3, [16, "c2", "d3"], 2, crosses=True))
    harness.step()
    now[0] = 10**9
    for _ in range(30):
        harness.step()
    assert list(harness.reasons) == [0, 1, 2, 3]


def test_what_nobody_wants_any_more_is_not_computed_to_its_end() -> None:
    harness = PictureHarness(100, 4, False, 40, PicturePolicy(ROOM, num_parts=10, batch_pixels=100), max_step_ms=100)
    harness.scheduler.add(with_pictures(0, ["a0"], 2))
    harness.scheduler.add(with_pictures(1, ["d3"], 2))
    harness.step()
    assert harness.runner.batch
    harness.scheduler.abort(0)
    harness.scheduler.check()
    while harness.scheduler.has_work:
        harness.step()
    assert "a0" not in harness.runner.features and "d3" in harness.runner.features
    assert not harness.runner.batch


def test_pictures_for_which_there_is_no_memory_end_those_who_need_them() -> None:
    harness = PictureHarness(100, 4, False, 40, PicturePolicy(ROOM, num_parts=2, batch_pixels=1000))
    scheduler = harness.scheduler
    scheduler.add(with_pictures(0, ["a0"], 2))
    scheduler.add(with_pictures(1, ["b1"], 2))
    sizes: list[int] = []
    ended: dict[int, str | None] = {}
    while len(ended) < 2:
        plan = scheduler.plan()
        assert plan is not None and plan.encode
        sizes.append(len(plan.encode))
        ended |= {end.request_id: end.error for end in scheduler.rollback("too large").finished}
        scheduler.check()
    assert ended == {0: "too large", 1: "too large"}
    assert sizes[0] == 2 and set(sizes[1:]) == {1}  # one by one, and only who needs the one ends
    scheduler.add(with_pictures(2, ["c2"], 2))
    while scheduler.has_work:
        harness.step()
    assert harness.reasons.keys() == {2}


def test_what_can_never_be_computed_is_refused() -> None:
    harness = PictureHarness(100, 4, False, 10, PicturePolicy(ROOM - 1, whole_runs=True))
    with pytest.raises(ValidationError, match="an image must have at most 11 tokens. Given: 12"):
        harness.scheduler.add(with_pictures(0, ["d3"], 1))
    harness = PictureHarness(100, 4, False, 4, PicturePolicy(ROOM, whole_runs=True))
    with pytest.raises(ValidationError, match=r"`max_batch_prefill_tokens` \(4\) tokens. Given: 5"):
        harness.scheduler.add(with_pictures(0, ["a0"], 1))
    harness = PictureHarness(100, 4, False, 10, PicturePolicy())
    with pytest.raises(ValidationError, match="at most 0 tokens"):
        harness.scheduler.add(with_pictures(0, ["a0"], 1))
    harness = PictureHarness(100, 4, False, 10, PicturePolicy(ROOM, cross_rows=CROSS_ROWS))
    with pytest.raises(ValidationError, match="the prompt has 4 images, and there is memory for 3 at a time"):
        harness.scheduler.add(with_pictures(0, ["a0", "b1", "c2", "d3"], 1, crosses=True))
