"""Where one decode step on a GPU spends its time, or the steps of prompts: kernel by kernel, and between kernels.

Times come from the device's own trace of a few steps; the length of a step is measured without the trace,
which slows the host.
"""

import statistics
import time
from contextlib import closing
from itertools import pairwise

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as record

from text_generation_inference.bench.results import Kernel, Row, StepProfile
from text_generation_inference.bench.work import make_requests, run_once
from text_generation_inference.drive import run_requests
from text_generation_inference.engine.build import Engine

_UNTRACED, _TRACED, _SETTLING = 24, 6, 6
_PROMPT_RUNS = 3
_SEED = 1 << 20

Event = tuple[float, float, str]  # start, end (microseconds), name

# Parts of a kernel's name, the first that fits counts.
_KINDS = (
    ("attention", ("attention", "attn", "flash", "fmha", "decode_by_", "prefill", "latent_")),
    (
        "products",
        (
            "gemm",
            "gemv",
            "nvjet",
            "cutlass",
            "cublas",
            "xmma",
            "splitk",
            "linear",
            "matmul",
            "_mm",
        ),
    ),
    ("copies", ("memcpy", "memset")),
)


def new_tokens(rows: int, context: int) -> int:
    """How many tokens each request gets: the first ones go on while the last prompts are computed."""
    return _SETTLING + _UNTRACED + _TRACED + 12 + rows * context // 2048


def profile_step(engine: Engine, rows: int, context: int) -> StepProfile:
    """`rows` requests of `context` tokens, all decoding."""
    loop = engine.loop
    new = new_tokens(rows, context)
    requests = make_requests(Row(context, new, rows), engine.facts.vocab_size, _SEED)
    with closing(run_requests(loop, requests)) as steps:

        def decode(count: int) -> list[float]:
            """Seconds of `count` steps in which all requests decode and nothing else happens."""
            seconds: list[float] = []
            last = time.perf_counter()
            while len(seconds) < count and (out := next(steps, None)) is not None:
                now = time.perf_counter()
                if len(out.token_ids) == rows and not loop.last.prefill:
                    seconds.append(now - last)
                last = now
            return seconds

        decode(_SETTLING)
        untraced = decode(_UNTRACED)
        torch.cuda.synchronize()
        with record(activities=[ProfilerActivity.CUDA]) as recorded:
            decode(_TRACED)
            torch.cuda.synchronize()
    while loop.has_work:  # what was in flight
        loop.step()
    return summarise(_kernels_of(recorded), rows, context, statistics.median(untraced) if untraced else 0.0)


def profile_prompts(engine: Engine, rows: int, length: int) -> StepProfile:
    """`rows` prompts of `length` tokens, computed in as few steps as the engine's limits allow."""
    row = Row(length, 1, rows)
    seconds = [run_once(engine, row, _SEED + number).seconds for number in range(1 + _PROMPT_RUNS)]
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        run_once(engine, row, _SEED - 1)
        torch.cuda.synchronize()
    return summarise(_kernels_of(recorded), rows, length, statistics.median(seconds[1:]), prompts=True)


def _kernels_of(recorded: record) -> list[Event]:
    return [
        (event.time_range.start, event.time_range.end, event.name)
        for event in recorded.events() or []
        if event.device_type.name == "CUDA"
    ]


def summarise(events: list[Event], rows: int, context: int, wall_seconds: float, prompts: bool = False) -> StepProfile:
    """`events` are those of several whole steps of decoding, or of all prompts once."""
    events = sorted(events)
    starts = [] if prompts else find_steps(events)
    num_steps = max(1, len(starts))
    totals: dict[str, list[float]] = {}
    for start, end, name in events:
        total = totals.setdefault(name, [0.0, 0.0])
        total[0] += end - start
        total[1] += 1
    kernels = [
        Kernel(name, kind_of(name), round(us / num_steps / 1e3, 5), round(calls / num_steps, 2))
        for name, (us, calls) in totals.items()
    ]
    kernels.sort(key=lambda kernel: -kernel.ms)
    by_kind: dict[str, float] = {}
    for kernel in kernels:
        by_kind[kernel.kind] = by_kind.get(kernel.kind, 0.0) + kernel.ms
    ends = [events[0][0], max(end for _, end, _ in events)] if prompts and events else starts
    spans = [(begin, end, _busy(events, begin, end)) for begin, end in pairwise(ends)]
    return StepProfile(
        rows=rows,
        context=context,
        prompts=prompts,
        wall_ms=round(1e3 * wall_seconds, 4),
        traced_ms=_median_ms([end - begin for begin, end, _ in spans]),
        kernel_ms=round(sum(kernel.ms for kernel in kernels), 4),
        busy_ms=_median_ms([busy for _, _, busy in spans]),
        gap_ms=_median_ms([end - begin - busy for begin, end, busy in spans]),
        by_kind={kind: round(ms, 4) for kind, ms in sorted(by_kind.items(), key=lambda item: -item[1])},
        kernels=kernels,
    )


def find_steps(events: list[Event]) -> list[float]:
    """Where each step starts: at the earliest of the kernels that run least often, which is once in a step."""
    starts: dict[str, list[float]] = {}
    for start, _, name in events:
        starts.setdefault(name, []).append(start)
    counts = [len(places) for places in starts.values() if len(places) >= _TRACED]
    least = min(counts, default=0)
    return next((places for places in starts.values() if len(places) == least), [])


def _busy(events: list[Event], begin: float, end: float) -> float:
    """Microseconds between two moments in which a kernel runs; kernels may overlap."""
    busy, until = 0.0, begin
    for start, stop, _ in events:
        if stop > until and start < end:
            busy += min(stop, end) - max(start, until)
            until = min(stop, end)
    return busy


def _median_ms(microseconds: list[float]) -> float:
    return round(statistics.median(microseconds) / 1e3, 4) if microseconds else 0.0


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, parts in _KINDS if any(part in lower for part in parts)), "other")
