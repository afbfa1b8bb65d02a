"""Steps that are taken back for lack of memory, with a token oracle in place of the model.

A failed step leaves arbitrary entries in every block that it was to write, as a pass that stops half way does.
"""

import random

from harness import Harness, OracleRunner, check_outputs, relaxed, scenarios
from hypothesis import given
from hypothesis import strategies as st

from text_generation_inference.config import least_blocks
from text_generation_inference.scheduler.blocks import BlockPool
from text_generation_inference.scheduler.policy import BatchPolicy
from text_generation_inference.scheduler.scheduler import Scheduler
from text_generation_inference.scheduler.step_limit import StepLimit
from text_generation_inference.types import GenerationRequest, SamplingParams, StepPlan, StepResult


class FaultyRunner(OracleRunner):
    """May fail a step, and is made to forget everything then."""

    def spoil(self, plan: StepPlan, seed: int) -> None:
        """As far as a step comes that fails: admissions are known, some of the cache is written."""
        rng = random.Random(seed)
        touched = [block for admission in plan.admit for block in admission.block_ids]
        touched += [block for slot in self.decode_set for block in self.tables[slot][-1:]]
        touched += [block for chunk in plan.chunks for block in self.tables.get(chunk.slot, [])]
        beside = [block for admission in plan.admit for block in admission.beside_ids]
        beside += [block for slot in self.decode_set for block in self.beside_tables[slot][-1:]]
        beside += [block for chunk in plan.chunks for block in self.beside_tables.get(chunk.slot, [])]
        for cache, blocks in ((self.cache, touched), (self.beside_cache, beside)):
            for block in blocks:
                if rng.random() < 0.7:
                    cache[block] = [rng.getrandbits(60) for _ in range(self.block_size)]

    def forget(self) -> None:
        self.tokens, self.tables, self.computed, self.decode_set, self.beside_tables = {}, {}, {}, [], {}


class FaultyHarness(Harness):
    """Fails chosen steps: when they are planned, or when their result is due and another one runs."""

    def __init__(self, *arguments: object, fail_plans: set[int], fail_results: set[int]) -> None:
        super().__init__(*arguments)
        old = self.runner
        about = (old.num_slots, old.tokens_per_row, old.window, old.beside)
        self.runner = FaultyRunner(len(old.cache), old.block_size, *about)
        self.fail_plans, self.fail_results = fail_plans, fail_results
        self.num_results = 0
        self.failed_plan = False

    def step(self) -> None:
        plan = None if self.failed_plan else self.scheduler.plan()
        self.scheduler.check()
        if plan is not None:
            self.steps += 1
            self.count_admissions(plan)
            if self.steps in self.fail_plans:
                self.failed_plan = True
                self.runner.spoil(plan, self.steps)
            else:
                self.pending.append(self.runner.execute(plan))
                self.compare_books()
        while self.pending and (len(self.pending) > self.overlap or plan is None or self.failed_plan):
            self.num_results += 1
            result = self.pending.popleft()
            if self.num_results in self.fail_results:
                self.rollback()
                return
            self.take(result)
        if self.failed_plan:
            self.rollback()

    def rollback(self) -> None:
        self.pending.clear()
        self.failed_plan = False
        self.runner.forget()
        out = self.scheduler.rollback("no memory")
        assert not out.token_ids
        for finish in out.finished:
            assert (finish.reason, finish.error) == ("error", "no memory")
            self.reasons[finish.request_id] = finish.reason
        self.scheduler.check()
        assert self.scheduler.num_running == 0
        for books in (self.pool, self.pool.beside):
            assert books is None or books.num_empty == books.num_usable


def apart(numbers: list[int]) -> set[int]:
    """No two in a row: a request that fails so when it is alone ends."""
    kept: set[int] = set()
    for number in sorted(numbers):
        if number - 1 not in kept:
            kept.add(number)
    return kept


@relaxed
@given(
    scenarios(),
    st.lists(st.integers(1, 60), max_size=6),
    st.booleans(),
    st.sampled_from([None, None, 3, 8]),
    st.booleans(),
)
def test_no_rollback_changes_a_token(
    scenario: dict, numbers: list[int], at_results: bool, window: int | None, others_keep_all: bool
) -> None:
    failures = apart(numbers)
    size = scenario["block_size"]
    beside = None
    if window is not None and others_keep_all:
        beside, window = (1 + least_blocks(window, size) + scenario["spare_blocks"] // 2, window), None
    least = scenario["least_blocks"] if window is None else 1 + least_blocks(window, size)
    harness = FaultyHarness(
        least + scenario["spare_blocks"],
        size,
        True,
        scenario["overlap"],
        scenario["policy"],
        window,
        beside,
        fail_plans=set() if at_results else failures,
        fail_results=failures if at_results else set(),
    )
    harness.play(scenario)
    check_outputs(scenario, harness)


def limit_for(rows: int, tokens: int) -> StepLimit:
    return StepLimit(BatchPolicy(max_batch_prefill_tokens=tokens, max_batch_size=rows, max_total_tokens=100))


@given(st.integers(1, 64), st.integers(1, 4096), st.data())
def test_limits_shrink_to_one_request_and_grow_back(rows: int, tokens: int, data: st.DataObject) -> None:
    limit = limit_for(rows, tokens)
    most = (limit.rows, limit.tokens)
    failures = 0
    while True:
        step_rows = data.draw(st.integers(1, limit.rows))
        step_tokens = data.draw(st.integers(step_rows, max(step_rows, limit.tokens)))
        failures += 1
        before = (limit.rows, limit.tokens)
        if not limit.shrink(step_rows, step_tokens):
            break
        assert limit.rows <= before[0] and limit.tokens <= max(32, before[1])
        assert failures < 40
    for _ in range(40):
        limit.on_step(limit.rows, limit.tokens, True)
    assert (limit.rows, limit.tokens) == most


@given(st.integers(1, 1024), st.integers(64, 1 << 15), st.integers(1, 4))
def test_after_a_lack_that_has_passed_the_limit_is_back_within_a_few_steps(
    rows: int, tokens: int, failures: int
) -> None:
    limit = limit_for(rows, tokens)
    most = (limit.rows, limit.tokens)
    for _ in range(failures):
        limit.shrink(limit.rows, limit.tokens)
    steps = 0
    while (limit.rows, limit.tokens) != most:
        limit.on_step(limit.rows, limit.tokens, True)
        steps += 1
        if steps == failures:
            assert limit.tokens >= most[1] >> failures, "at least what fits is allowed at once"
    assert steps <= 8 + 2 * failures


@given(st.integers(1, 1024), st.integers(64, 1 << 15), st.data())
def test_a_lack_that_stays_costs_few_failures_and_little_of_each_step(
    rows: int, tokens: int, data: st.DataObject
) -> None:
    """A device that has room for so many tokens a step, fewer than are permitted, for ever."""
    limit = limit_for(rows, tokens)
    room = data.draw(st.integers(33, max(33, limit.tokens - 1)))
    failures = computed = 0
    for _ in range(4000):
        step_rows = min(limit.rows, limit.tokens // 2)
        if limit.tokens > room:
            failures += 1
            assert limit.shrink(step_rows, limit.tokens)
        else:
            computed += limit.tokens
            limit.on_step(step_rows, limit.tokens, True)
    assert failures <= 30
    assert computed >= 0.7 * 4000 * min(room, limit.tokens)


def test_the_wait_is_of_the_size_that_failed() -> None:
    """Trying 1,024 tokens in vain for long does not make a later lack that goes deeper last."""
    limit = limit_for(64, 1024)
    for _ in range(3000):
        if limit.tokens > 1000:
            limit.shrink(64, limit.tokens)
        else:
            limit.on_step(64, limit.tokens, True)
    for _ in range(4):
        limit.shrink(64, limit.tokens)
    assert limit.tokens == 48  # of 768
    for _ in range(20):
        limit.on_step(min(limit.rows, 16), limit.tokens, True)
    assert limit.tokens == 1024


def test_a_request_whose_tokens_never_fit_ends() -> None:
    """Its prompt fits in parts, the step with logits does not: trying again for ever would help nobody."""
    policy = BatchPolicy(max_batch_prefill_tokens=64, max_batch_size=4, max_total_tokens=512)
    scheduler = Scheduler(policy, BlockPool(64, 16))
    prompt = list(range(100))
    scheduler.add(
        GenerationRequest(
            id=1, token_ids=prompt, sampling=SamplingParams(), max_new_tokens=5, stop_token_ids=[], seed=0
        )
    )
    finished = []
    for _ in range(100):
        plan = scheduler.plan()
        if plan is None:
            break
        if plan.decode or any(chunk.samples for chunk in plan.chunks):
            finished += scheduler.rollback("no memory").finished
        else:
            scheduler.apply(StepResult(plan.step, [], []))
    assert [(finish.request_id, finish.error) for finish in finished] == [(1, "no memory")]
    assert not scheduler.has_work


def test_one_lack_of_memory_does_not_leave_small_steps_behind() -> None:
    """64 prompts fill a step, which fails once: a few steps later all run together again."""
    policy = BatchPolicy(max_batch_prefill_tokens=1024, max_batch_size=64, max_total_tokens=100)
    scheduler = Scheduler(policy, BlockPool(1000, 16))
    for number in range(64):
        scheduler.add(
            GenerationRequest(
                id=number,
                token_ids=[number] * 16,
                sampling=SamplingParams(),
                max_new_tokens=80,
                stop_token_ids=[],
                seed=0,
            )
        )
    plan = scheduler.plan()
    assert plan is not None and len(plan.chunks) == 64
    scheduler.rollback("no memory")
    sizes: list[int] = []
    while scheduler.num_running < 64:
        plan = scheduler.plan()
        assert plan is not None
        sizes.append(len(plan.chunks))
        scheduler.apply(StepResult(plan.step, [0] * scheduler.num_running, [0.0] * scheduler.num_running))
    assert sizes == [32, 32]
