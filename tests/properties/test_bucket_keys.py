"""After warm-up no traffic within the limits makes a new graph key, whatever the strategy and the settings.

Prompts share prefixes, and may be longer than a step, so that they are computed in parts. Everything is real except the
model: scheduler, plan, runner, sampler, and a device whose graphs are found as those of a
Gaudi are, by the shapes of all tensors, and leave their result where the one before was. In place of the model stands an
oracle that keeps its own entries in the KV cache: the next token is a sum over the entries of all tokens before, found
through the tensors of the padded pass alone. A wrong block, offset, row or length changes a token.
"""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from text_generation_inference.devices.at_once import AtOnce
from text_generation_inference.errors import ValidationError
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.block_lists import BlockLists, context_of, key_of, row_length
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.runner.runner import Runner
from text_generation_inference.runner.shapes.buckets import Axis, BucketPlan, BucketSettings, PlanLimits, plan_buckets
from text_generation_inference.runner.warm.warm_up import WarmUp
from text_generation_inference.sampling.vocabulary import VocabularyPart
from text_generation_inference.scheduler.blocks import BlockPool
from text_generation_inference.scheduler.policy import BatchPolicy
from text_generation_inference.scheduler.scheduler import Scheduler
from text_generation_inference.types import GenerationRequest, SamplingParams, StepResult

VOCAB = 23
EXAMPLES = int(os.environ.get("TGI_BUCKET_EXAMPLES", "25"))  # of traffic; each has up to 60 requests


def entry(token: int, position: int) -> int:
    return (token + 1) * (position % 97 + 7)


def expected_output(request: GenerationRequest) -> list[int]:
    tokens = list(request.token_ids)
    total = sum(entry(token, position) for position, token in enumerate(tokens))
    while len(tokens) < len(request.token_ids) + request.max_new_tokens:
        tokens.append(total % VOCAB)
        total += entry(tokens[-1], len(tokens) - 1)
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens[len(request.token_ids) :]


class OracleModel:
    """Hidden states are sums of entries; logits prefer that sum modulo the vocabulary."""

    sight = None

    def __init__(self) -> None:
        self.vocab_size = VOCAB
        self.vocabulary = VocabularyPart.whole(VOCAB)
        self.keys: set[object] = set()

    def bind(self, kv_cache: list[tuple[Tensor, Tensor]], num_positions: int) -> None:
        pass

    def shallow(self) -> "OracleModel":
        return self

    def forward(self, batch: Batch, kv_cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        self.keys.add(key_of(batch))
        cache = kv_cache[0][0]
        size = cache.shape[1]
        entries = ((batch.input_ids + 1) * (batch.positions % 97 + 7)).double()
        cache[batch.kv_index // size, batch.kv_index % size, 0, 0] = entries
        if not isinstance(batch.meta, BlockLists):
            assert batch.logit_tokens is not None
            sums = entries.unflatten(0, (len(batch.seq_lens), row_length(batch))).cumsum(1)
            context = context_of(batch, size)
            if context is not None:
                before = cache[context.blocks.long(), :, 0, 0].flatten(1)
                sums = sums + before.where(context.seen, 0.0).sum(1, keepdim=True)
            return sums.flatten()[batch.logit_tokens][:, None]
        lists = batch.meta
        blocks = slice(len(lists.block_groups)) if lists.block_list is None else lists.block_list.long()
        found = cache[blocks, :, 0, 0]
        used = (torch.arange(size) < lists.block_usage[:, None]) & (lists.block_groups >= 0)[:, None]
        sums = torch.zeros(len(batch.seq_lens), dtype=torch.float64)
        return sums.index_add(0, lists.block_groups.clamp(min=0).long(), found.where(used, 0.0).sum(1))[:, None]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0].long() % VOCAB, VOCAB).float() * 9


class ShapeGraphs:
    """What is captured belongs to a shape; a replay overwrites the result of the one before."""

    def __init__(self, forward: Callable[[Batch], Tensor]) -> None:
        self._forward = forward
        self.results: dict[object, Tensor] = {}

    @property
    def num_captured(self) -> int:
        return len(self.results)

    def __call__(self, batch: Batch, bypass: bool = False) -> Tensor:
        if bypass:
            return self._forward(batch)
        result = self._forward(batch)
        return self.results.setdefault(key_of(batch), torch.empty_like(result)).copy_(result)


class GraphDevice(AtOnce):
    torch_device = torch.device("cpu")
    limits = SimpleNamespace(graphs=True, runs_ahead=False, keeps_tokens=False)

    def __init__(self) -> None:
        super().__init__("graphs")
        self.ops = Ops()

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def launch(self, queue: Callable[[], Callable[[], Any]]) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(queue()())
        return done

    def wrap_graphs(self, forward: Callable[[Batch], Tensor], first: object = None) -> ShapeGraphs:
        return ShapeGraphs(forward)


class KeepingDevice(GraphDevice):
    """Keeps the tokens of a step for the next one: the host has garbage until another thread has read the step."""

    limits = SimpleNamespace(graphs=True, runs_ahead=False, keeps_tokens=True)

    def __init__(self) -> None:
        super().__init__()
        self._reader = ThreadPoolExecutor(max_workers=1)
        self._coming: list[tuple[Tensor, Tensor]] = []

    def fetch(self, found: Tensor) -> Tensor:
        self._coming.append((torch.full_like(found, -7), found.clone()))
        return self._coming[-1][0]

    def launch(self, queue: Callable[[], Callable[[], Any]]) -> "Future[Any]":
        finish = queue()
        coming, self._coming = self._coming, []

        def end() -> Any:
            with torch.inference_mode():
                for there, found in coming:
                    there.copy_(found)
            return finish()

        return self._reader.submit(end)

    def close(self) -> None:
        super().close()
        self._reader.shutdown()


@dataclass
class Traffic:
    limits: PlanLimits
    wanted: BucketSettings
    overlap: bool
    limit_graphs: bool
    keeps_tokens: bool
    arrivals: list[tuple[int, GenerationRequest]]  # at which step
    aborts: list[tuple[int, int]]


@st.composite
def traffic(draw: st.DrawFn) -> Traffic:
    block_size = draw(st.sampled_from([1, 4, 16]))
    total = draw(st.integers(2, 70))
    longest = draw(st.integers(1, total - 1))
    rows = draw(st.integers(1, 9))
    per_row = -(-total // block_size)
    limits = PlanLimits(
        longest,
        total,
        rows,
        draw(st.integers(1, 4 * longest + 30)),
        block_size,
        draw(st.integers(per_row, rows * per_row + 3)),
    )
    axis = st.builds(Axis, *[st.none() | st.integers(1, 12)] * 3, st.none() | st.integers(1, 5)) | st.just(Axis())
    wanted = BucketSettings(
        draw(st.sampled_from(["linear", "exponential"])),
        draw(st.integers(1, 5)),
        draw(st.integers(1, 4)),
        draw(st.integers(0, 24)),
        *(draw(axis) for _ in range(5)),
        reuse=draw(st.booleans()),
        contiguous=draw(st.booleans()),
    )
    count = draw(st.integers(1, 60))
    known = [[draw(st.integers(0, VOCAB - 1)) for _ in range(longest)] for _ in range(2)]  # what prompts begin with
    rng = draw(st.randoms(use_true_random=False))
    arrivals: list[tuple[int, GenerationRequest]] = []
    for number in range(count):
        length = rng.choice([1, longest, rng.randint(1, longest)])
        params = rng.choice(
            [{}, {}, {"decoder_input_details": True}, {"top_n_tokens": 2}, {"repetition_penalty": 1.0001}]
        )
        shared = rng.choice([0, 0, longest, rng.randint(0, longest)])
        start = rng.choice(known)[: min(shared, length)]
        request = GenerationRequest(
            id=number,
            token_ids=start + [rng.randrange(VOCAB) for _ in range(length - len(start))],
            sampling=SamplingParams(**params),
            max_new_tokens=rng.choice([1, total - length, rng.randint(1, total - length)]),
            stop_token_ids=[3] if rng.random() < 0.5 else [],
            seed=number,
        )
        arrivals.append((rng.randrange(1 + 2 * count), request))
    aborts = [(rng.randrange(1 + 3 * count), rng.randrange(count)) for _ in range(rng.choice([0, 0, 3]))]
    booleans = st.booleans()
    ways = [draw(booleans) for _ in range(3)]
    return Traffic(limits, wanted, *ways, sorted(arrivals, key=lambda a: a[0]), aborts)


def make_runner(asked: Traffic, plan: BucketPlan) -> tuple[Any, OracleModel]:
    limits = asked.limits
    model = OracleModel()
    assert limits.num_blocks is not None
    cache = torch.full((limits.num_blocks + 1, limits.block_size, 1, 1), 1e9, dtype=torch.float64)
    runner: Any = Runner(
        (KeepingDevice if asked.keeps_tokens else GraphDevice)(), model, [(cache, cache)], limits.max_batch_size, limits.max_total_tokens,  # pyright: ignore
        plan=plan, limit_graphs=asked.limit_graphs,
    )  # fmt: skip
    return runner, model


def _as_met(key: Any) -> Any:
    """As the model meets it: how many of the best ids a scored prompt wants is not its concern."""
    return tuple((name, shape[:1] if name == "logit_tokens" else shape) for name, shape in key)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(traffic())
def test_no_traffic_makes_a_new_key(asked: Traffic) -> None:
    limits = asked.limits
    plan = plan_buckets(limits, asked.wanted)
    plan.pass_tokens = 5  # so little that prompts of a step often are several passes
    runner, model = make_runner(asked, plan)
    WarmUp(runner.steps).run()
    warmed, num_captured = set(model.keys), runner.steps.stats.num_captured
    assert num_captured == sum(runner.steps.passes.captures(bucket) for bucket in plan.shapes)
    assert warmed == {_as_met(key) for key in runner.steps.passes.shape_stats.warmed}
    policy = BatchPolicy(
        max_batch_prefill_tokens=limits.max_batch_prefill_tokens,
        max_batch_size=limits.max_batch_size,
        max_total_tokens=limits.max_total_tokens,
    )
    assert limits.num_blocks is not None
    in_place = asked.wanted.contiguous
    pool = BlockPool(limits.num_blocks + 1, limits.block_size, asked.wanted.reuse, lowest_first=in_place)
    scheduler = Scheduler(policy, pool, clock=lambda: 0, shapes=plan)
    outputs: dict[int, list[int]] = {}
    prompts: dict[int, int] = {}
    reasons: dict[int, str] = {}
    pending: deque[Future[StepResult]] = deque()
    arrivals, aborts = deque(asked.arrivals), sorted(asked.aborts, reverse=True)
    step = 0
    while arrivals or scheduler.has_work:
        while arrivals and (arrivals[0][0] <= step or not scheduler.has_work):
            scheduler.add(arrivals.popleft()[1])
        while aborts and aborts[-1][0] <= step:
            scheduler.abort(aborts.pop()[1])
        planned = scheduler.plan()
        scheduler.check()
        if planned is not None:
            if not plan.in_parts:
                assert not any(chunk.start or not chunk.samples for chunk in planned.chunks), "a prompt in parts"
            if planned.chunks:
                longest = max(chunk.end - chunk.start for chunk in planned.chunks)
                context = max(chunk.start for chunk in planned.chunks)
                fit = plan.prompts_fit(len(planned.chunks), longest, context)  # after cached tokens in several passes
                assert fit, "prompts of a step that no shapes hold"
                asked_for = [(chunk.end - chunk.start, chunk.start) for chunk in planned.chunks]
                for together in plan.group(asked_for):
                    some = [asked_for[place] for place in together]
                    about = max(length for length, _ in some), max(start for _, start in some)
                    assert plan.find("prefill", len(some), *about) is not None, "a pass that no shape holds"
            pending.append(runner.launch(planned))
        while pending and (len(pending) > asked.overlap or planned is None):
            out = scheduler.apply(pending.popleft().result())
            for number, token in zip(out.request_ids, out.token_ids, strict=True):
                outputs.setdefault(number, []).append(token)
            for scored in out.prompt_logprobs:
                assert scored.start == 1 + prompts.get(scored.row, 0), "parts follow each other"
                prompts[scored.row] = prompts.get(scored.row, 0) + len(scored.logprobs)
            reasons.update({finish.request_id: finish.reason for finish in out.finished})
        step += 1
    runner.device.close()
    assert scheduler.stats.num_preemptions == 0
    assert pool.num_free == pool.num_usable
    for _, request in asked.arrivals:
        if request.id in reasons:
            assert outputs[request.id] == expected_output(request)
            assert prompts.get(request.id, 0) == request.sampling.decoder_input_details * (len(request.token_ids) - 1)
    assert model.keys == warmed
    assert runner.steps.stats.num_captured == num_captured
    assert runner.steps.stats.num_unplanned == 0
    with pytest.raises(ValidationError):
        scheduler.add(GenerationRequest(
            id=-1, token_ids=[0] * (limits.max_input_tokens + 1), sampling=SamplingParams(), max_new_tokens=1,
            stop_token_ids=[], seed=0,
        ))  # fmt: skip
