"""A scheduler driven step by step against an oracle instead of a model, with its books checked after each."""

from collections import deque
from collections.abc import Iterable
from itertools import groupby

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from text_generation_inference.scheduler.blocks import BlockPool, WindowBlocks
from text_generation_inference.scheduler.policy import BatchPolicy
from text_generation_inference.scheduler.scheduler import Scheduler
from text_generation_inference.types import (
    GenerationRequest,
    PromptLogprobs,
    SamplingParams,
    StepPlan,
    StepResult,
    TopTokens,
)

EOS = 3


VOCAB = 4  # few: generated text often equals prompts


def make_entry(before: int, token: int, position: int) -> int:
    return hash((before, token, position))


def next_token(entries: list[int]) -> int:
    return hash(tuple(entries)) % VOCAB


def expected_output(request: GenerationRequest, window: int | None = None, beside: int | None = None) -> list[int]:
    """`beside`: the window of other layers, where these read all."""
    tokens = list(request.token_ids)
    entries: list[int] = []
    while len(tokens) < len(request.token_ids) + request.max_new_tokens:
        for position in range(len(entries), len(tokens)):
            entries.append(make_entry(entries[-1] if entries and window != 1 else 0, tokens[position], position))
        seen = entries if window is None else entries[-window:]
        tokens.append(next_token(seen if beside is None else [*seen, *entries[-beside:]]))
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens[len(request.token_ids) :]


class OracleRunner:
    """Executes plans as a runner would, with token values for keys and values."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        tokens_per_row: int = 1,
        window: int | None = None,
        beside: tuple[int, int] | None = None,  # blocks and window of other layers, which keep the same of a token
    ) -> None:
        self.tokens_per_row = tokens_per_row
        self.window = window
        self.cache = [[-1] * block_size for _ in range(num_blocks)]
        self.beside = beside
        self.beside_cache = [[-1] * block_size for _ in range(beside[0] if beside is not None else 0)]
        self.beside_tables: dict[int, list[int]] = {}
        self.block_size = block_size
        self.num_slots = num_slots
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.limits: dict[int, int] = {}
        self.wants_prompt: dict[int, bool] = {}
        self.decode_set: list[int] = []

    def execute(self, plan: StepPlan) -> StepResult:
        for slot in plan.leave:
            self.decode_set.remove(slot)
        for slot in plan.release:
            assert slot not in self.decode_set
            del self.tokens[slot], self.tables[slot], self.beside_tables[slot]
            self.computed.pop(slot, None)  # none, if it was waiting for a picture all the time
        for admission in plan.admit:
            assert admission.slot not in self.tokens and 0 <= admission.slot < self.num_slots
            self.tokens[admission.slot] = [*admission.request.token_ids, *admission.output_ids]
            self.tables[admission.slot] = list(admission.block_ids)
            self.beside_tables[admission.slot] = list(admission.beside_ids)
            self.limits[admission.slot] = len(admission.request.token_ids) + admission.request.max_new_tokens
            sampling = admission.request.sampling
            self.wants_prompt[admission.slot] = sampling.decoder_input_details and not admission.output_ids
        self.decode_set += plan.join
        for slot, start, blocks in plan.grow:
            assert start <= len(self.tables[slot])
            self.tables[slot][start:] = blocks
        for slot, start, blocks in plan.grow_beside:
            assert start <= len(self.beside_tables[slot])
            self.beside_tables[slot][start:] = blocks
        decode = self.decode_set if plan.decode else []
        # A layer writes all keys of a step before any query reads; here a shared prefix may be written in this very step.
        for chunk in sorted(plan.chunks, key=lambda chunk: chunk.start):
            assert chunk.start < chunk.end, "a row without a token"
            for position in range(chunk.start, chunk.end):
                self.write(chunk.slot, position)
            self.computed[chunk.slot] = chunk.end
        sampled = [self.decode(slot, plan.step) for slot in decode]
        prompts: list[PromptLogprobs] = []
        for row, chunk in enumerate(plan.chunks, len(decode)):
            if self.wants_prompt.get(chunk.slot):
                places = [float(place) for place in range(chunk.start, chunk.end)]
                prompts.append(PromptLogprobs(row, chunk.start, places))
            if chunk.samples:
                assert len(self.tokens[chunk.slot]) == chunk.end
                sampled.append([self.add_token(chunk.slot)])
        tokens = [token for row in sampled for token in row]
        tops = [TopTokens(place, [token], [-0.5]) for place, token in enumerate(tokens) if place % 3 == 0]
        counts = None if self.tokens_per_row == 1 else [len(row) for row in sampled]
        return StepResult(plan.step, tokens, [0.0] * len(tokens), tops, prompts, counts=counts)

    def decode(self, slot: int, step: int) -> list[int]:
        """The tokens that a row of the decode set yields."""
        start, left = self.computed[slot], self.limits[slot] - len(self.tokens[slot])
        assert len(self.tokens[slot]) == start + 1
        if self.tokens_per_row == 1:
            self.write(slot, start)
            self.computed[slot] += 1
            return [self.add_token(slot)]
        for position in range(start, min(start + self.tokens_per_row, self.limits[slot] - 1)):
            block = self.tables[slot][position // self.block_size]
            assert block != 0
            self.cache[block][position % self.block_size] = hash((step, position, "a guess"))
            if self.beside is not None:
                block = self.beside_tables[slot][position // self.block_size]
                assert block != 0
                self.beside_cache[block][position % self.block_size] = hash((step, position, "a guess"))
        tokens: list[int] = []
        for _ in range(min(left, hash((step, slot, start)) % (self.tokens_per_row + 1))):
            self.write(slot, self.computed[slot])
            self.computed[slot] += 1
            tokens.append(self.add_token(slot))
        return tokens

    def write(self, slot: int, position: int) -> None:
        block = self.tables[slot][position // self.block_size]
        assert block != 0
        before = self.entry(slot, position - 1) if position and self.window != 1 else 0
        entry = make_entry(before, self.tokens[slot][position], position)
        self.cache[block][position % self.block_size] = entry
        if self.beside is not None:
            block = self.beside_tables[slot][position // self.block_size]
            assert block != 0
            self.beside_cache[block][position % self.block_size] = entry

    def add_token(self, slot: int) -> int:
        length = self.computed[slot]
        assert length < self.limits[slot], "a token past the length was computed"
        token = next_token(self.read(slot, length))
        self.tokens[slot].append(token)
        return token

    def read(self, slot: int, length: int) -> list[int]:
        """Of the first so many tokens those that the last of them sees."""
        first = 0 if self.window is None else max(0, length - self.window)
        seen = [self.entry(slot, position) for position in range(first, length)]
        if self.beside is None:
            return seen
        return [*seen, *(self.entry_beside(slot, at) for at in range(max(0, length - self.beside[1]), length))]

    def entry_beside(self, slot: int, position: int) -> int:
        block = self.beside_tables[slot][position // self.block_size]
        assert block != 0, "a block that was never held is read"
        return self.beside_cache[block][position % self.block_size]

    def entry(self, slot: int, position: int) -> int:
        block = self.tables[slot][position // self.block_size]
        assert block != 0, "a block that was never held is read"
        return self.cache[block][position % self.block_size]

    def spoil_blocks(self, blocks: Iterable[int], beside: Iterable[int] = ()) -> None:
        """What holds nothing may hold anything."""
        for cache, spoilt in ((self.cache, blocks), (self.beside_cache, beside)):
            for block in spoilt:
                cache[block] = [hash((block, place, "nothing")) for place in range(self.block_size)]


class Harness:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        overlap: bool,
        policy: BatchPolicy,
        window: int | None = None,
        beside: tuple[int, int] | None = None,  # blocks and window of other layers
    ) -> None:
        blocks = None if beside is None else WindowBlocks(beside[0], block_size, beside[1])
        self.pool = BlockPool(num_blocks, block_size, prefix_caching, window, blocks)
        self.scheduler = Scheduler(policy, self.pool, clock=lambda: 0)
        about = (policy.max_batch_size, policy.tokens_per_row, window, beside)
        self.runner = OracleRunner(num_blocks, block_size, *about)
        self.overlap = overlap
        self.pending: deque[StepResult] = deque()
        self.outputs: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.prompts: dict[int, dict[int, float]] = {}
        self.admissions: dict[int, int] = {}
        self.steps = 0

    def step(self) -> None:
        plan = self.scheduler.plan()
        self.scheduler.check()
        if plan is not None:
            self.steps += 1
            num_prefill = sum(chunk.end - chunk.start for chunk in plan.chunks)
            assert num_prefill <= self.scheduler.policy.max_batch_prefill_tokens
            if plan.decode and plan.chunks:
                num_decode = len(self.scheduler._in_flight[-1].decode_rows) * self.scheduler.policy.tokens_per_row
                assert num_prefill + num_decode <= self.scheduler.policy.max_batch_prefill_tokens
            self.count_admissions(plan)
            self.spoil()
            self.pending.append(self.runner.execute(plan))
            self.compare_books()
        while self.pending and (len(self.pending) > self.overlap or plan is None):
            result = self.pending.popleft()
            step_s = hash((result.step, 5)) % 30 / 1000  # any at all: how long steps take never changes a token
            self.take(result, step_s)

    def spoil(self) -> None:
        beside = self.pool.beside
        self.runner.spoil_blocks(self.pool._empty, () if beside is None else beside._empty)

    def take(self, result: StepResult, step_s: float = 0.0) -> None:
        out = self.scheduler.apply(result, step_s)
        self.scheduler.check()
        for request_id, token in zip(out.request_ids, out.token_ids, strict=True):
            assert request_id not in self.reasons, "a token after the end"
            self.outputs.setdefault(request_id, []).append(token)
        assert len([key for key, _ in groupby(out.request_ids)]) == len(set(out.request_ids)), "they stand together"
        for top in out.top_tokens:
            assert top.token_ids == [out.token_ids[top.row]]
        for prompt in out.prompt_logprobs:
            self.prompts.setdefault(prompt.row, {}).update(enumerate(prompt.logprobs, prompt.start))
        for finish in out.finished:
            self.reasons[finish.request_id] = finish.reason

    def count_admissions(self, plan: StepPlan) -> None:
        for admission in plan.admit:
            number = admission.request.id
            self.admissions[number] = self.admissions.get(number, 0) + 1

    def compare_books(self) -> None:
        """What the runner was told must be what the scheduler holds."""
        scheduler = self.scheduler
        running = [r for r in scheduler._requests.values() if r.running]
        for request in running:
            assert self.runner.tables[request.slot][request.num_behind : len(request.blocks)] == request.held
            told = self.runner.beside_tables[request.slot][request.num_beside_behind : len(request.beside)]
            assert told == request.held_beside
        in_set = [r.slot for r in scheduler._decoding.rows]
        left = set(scheduler._decoding.leaving)
        assert [slot for slot in self.runner.decode_set if slot not in left] == in_set

    def play(self, scenario: dict) -> None:
        """Its requests come and go at their ticks, until all are done."""
        for tick in range(45):
            for request, arrival, abort in zip(
                scenario["requests"], scenario["arrivals"], scenario["aborts"], strict=True
            ):
                if arrival == tick:
                    self.scheduler.add(request)
                if abort is not None and abort == tick:
                    self.scheduler.abort(request.id)
                    self.scheduler.check()
            self.step()
        self.drain()

    def drain(self) -> None:
        for _ in range(5000):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "the scheduler does not make progress"
        self.scheduler.check()
        for books in (self.pool, self.pool.beside):
            assert books is None or books.num_free == books.num_usable, "a block is still held"


token_lists = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24)


@st.composite
def scenarios(draw: st.DrawFn) -> dict:
    block_size = draw(st.integers(1, 5))
    requests = [
        GenerationRequest(
            id=number,
            token_ids=draw(token_lists),
            sampling=SamplingParams(decoder_input_details=draw(st.booleans()) and draw(st.booleans())),
            max_new_tokens=draw(st.integers(1, 20)),
            stop_token_ids=draw(st.sampled_from([[], [], [EOS], [EOS, 0]])),
            seed=0,
            cache_salt=draw(st.sampled_from(["", "", "a"])),
            caller=draw(st.sampled_from(["", "one", "two"])),
        )
        for number in range(draw(st.integers(1, 14)))
    ]
    longest = max(len(r.token_ids) + r.max_new_tokens for r in requests)
    least_blocks = -(-longest // block_size)
    return {
        "requests": requests,
        "arrivals": [draw(st.integers(0, 25)) for _ in requests],
        "aborts": [draw(st.one_of(st.none(), st.none(), st.integers(0, 40))) for _ in requests],
        "block_size": block_size,
        "least_blocks": least_blocks + 1,
        "spare_blocks": draw(st.integers(0, 30)),
        "overlap": draw(st.booleans()),
        "policy": BatchPolicy(
            max_batch_prefill_tokens=draw(st.integers(1, 40)),
            max_batch_size=draw(st.integers(1, 8)),
            max_total_tokens=longest,
            max_step_ms=draw(st.sampled_from([0, 1, 10])),
            tokens_per_row=draw(st.sampled_from([1, 1, 2, 4])),
        ),
    }


def check_outputs(scenario: dict, harness: Harness) -> None:
    window, beside = harness.pool.window, harness.pool.beside
    for request, arrival, abort in zip(scenario["requests"], scenario["arrivals"], scenario["aborts"], strict=True):
        expected = expected_output(request, window, None if beside is None else beside.window)
        output = harness.outputs.get(request.id, [])
        if abort is not None and abort >= arrival:
            assert output == expected[: len(output)]
            continue
        assert output == expected
        by_length = len(output) == request.max_new_tokens
        assert harness.reasons[request.id] == ("length" if by_length else "eos_token")
        if request.sampling.decoder_input_details:
            assert harness.prompts[request.id] == {p: float(p) for p in range(len(request.token_ids))}


relaxed = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def make(number: int, tokens: list[int], new: int, **kwargs: object) -> GenerationRequest:
    return GenerationRequest(
        id=number, token_ids=tokens, sampling=SamplingParams(), max_new_tokens=new, stop_token_ids=[], seed=0, **kwargs
    )


def policy(**kwargs: object) -> BatchPolicy:
    return BatchPolicy(**{"max_batch_prefill_tokens": 64, "max_batch_size": 8, "max_total_tokens": 100, **kwargs})
