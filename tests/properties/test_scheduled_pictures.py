"""Random traffic with pictures: features are there when they are read, never more than there is room for, and prefixes
of other pictures are never found. The oracle's tokens stand for features: a picture's are made of its digest."""

from collections.abc import Sequence

import msgspec
import pytest
from harness import Harness, OracleRunner, expected_output, make, policy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from text_generation_inference.errors import ValidationError
from text_generation_inference.scheduler.blocks import BlockPool
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
    num_computed = 0

    def execute(self, plan: StepPlan) -> StepResult:
        for slot in plan.release:
            del self.pictures[slot]
        self.pictures |= {admission.slot: admission.request.pictures for admission in plan.admit}
        for digest in plan.drop_features:
            del self.features[digest]
        for slot, number in plan.encode:
            digest, count = self.made_of(self.pictures[slot], number)
            assert digest not in self.features, "computed twice"
            self.features[digest] = count
            self.num_computed += 1
        assert sum(self.features.values()) <= ROOM
        if self.rules.cross_rows:
            self.check_readers(plan)
        else:
            self.check_chunks(plan)
        crosses = self.rules.cross_rows > 0
        admit = [msgspec.structs.replace(each, request=seen(each.request, crosses)) for each in plan.admit]
        return super().execute(msgspec.structs.replace(plan, admit=admit))

    def made_of(self, spans: list[PictureSpan], number: int) -> tuple[str, int]:
        """What is computed for a picture, and its features."""
        if not self.rules.cross_rows:
            return spans[number].digest, spans[number].num_features
        (group,) = (group for group in group_neighbours(spans) if group[0] == number)
        return name_group(spans, group), len(group) * CROSS_ROWS

    def check_readers(self, plan: StepPlan) -> None:
        """All pictures of whoever computes anything are there."""
        decoding = [slot for slot in (*self.decode_set, *plan.join) if slot not in plan.leave] if plan.decode else []
        for slot in (*decoding, *(chunk.slot for chunk in plan.chunks)):
            spans = self.pictures[slot]
            for group in group_neighbours(spans):
                assert name_group(spans, group) in self.features, "features that are not there are read"

    def check_chunks(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            for span in self.pictures[chunk.slot]:
                for start, count in span.runs:
                    if start < chunk.end and start + count > chunk.start:
                        assert span.digest in self.features, "features that are not there are read"
                        whole = chunk.start <= start and start + count <= chunk.end
                        assert whole or not self.rules.whole_runs, "a run is cut"

    def forget(self) -> None:
        self.tokens, self.tables, self.computed, self.decode_set = {}, {}, {}, []
        self.pictures, self.features = {}, {}


class PictureHarness(Harness):
    def __init__(self, num_blocks: int, block_size: int, overlap: bool, tokens: int, rules: PicturePolicy) -> None:
        about = policy(max_batch_prefill_tokens=tokens, max_batch_size=4)
        super().__init__(num_blocks, block_size, True, overlap, about)
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(about, self.pool, clock=lambda: 0, pictures=rules)
        self.runner = PictureRunner(num_blocks, block_size, about.max_batch_size)
        self.runner.pictures, self.runner.features, self.runner.rules = {}, {}, rules
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
            self.pending.append(self.runner.execute(plan))
        while self.pending and (len(self.pending) > self.overlap or plan is None):
            self.take(self.pending.popleft())


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
        spans.append(PictureSpan(part, runs, [], []))
    return make(number, tokens, new, pictures=spans)


prompts = st.lists(st.one_of(st.sampled_from(sorted(SIZES)), st.integers(1, 6)), min_size=1, max_size=5)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_pictures_in_random_traffic(data: st.DataObject) -> None:
    whole = data.draw(st.booleans(), "whole runs")
    tokens = data.draw(st.integers(ROOM if whole else 1, 40), "tokens of a step")
    asked = data.draw(st.lists(st.tuples(prompts, st.integers(1, 8)), min_size=1, max_size=8), "requests")
    requests = [with_pictures(number, *each) for number, each in enumerate(asked)]
    size = data.draw(st.integers(1, 5), "block size")
    longest = max(len(request.token_ids) + request.max_new_tokens for request in requests)
    num_blocks = 2 + -(-longest // size) + data.draw(st.integers(0, 30), "spare blocks")
    overlap = data.draw(st.booleans(), "overlap")
    harness = PictureHarness(num_blocks, size, overlap, tokens, PicturePolicy(ROOM, whole_runs=whole))
    arrivals = [data.draw(st.integers(0, 12)) for _ in requests]
    aborts = [data.draw(st.one_of(st.none(), st.none(), st.integers(0, 20))) for _ in requests]
    harness.play({"requests": requests, "arrivals": arrivals, "aborts": aborts})
    for request, arrival, abort in zip(requests, arrivals, aborts, strict=True):
        output, expected = harness.outputs.get(request.id, []), expected_output(seen(request))
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
    harness = PictureHarness(num_blocks, size, overlap, tokens, PicturePolicy(ROOM, cross_rows=CROSS_ROWS))
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
