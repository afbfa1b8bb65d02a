"""Microseconds of scheduler work per step while N requests decode and nothing arrives.

    python bench/planning.py

`plan` should grow far slower than N: it costs what changes (a block for every request once per block size). `apply` is
told beside it; it hands out N tokens.
"""

import statistics
import time

from text_generation_inference.scheduler.blocks import BlockPool
from text_generation_inference.scheduler.policy import BatchPolicy
from text_generation_inference.scheduler.scheduler import Scheduler
from text_generation_inference.types import GenerationRequest, SamplingParams, StepResult

STEPS = 2000


def measure(num_requests: int) -> tuple[float, float]:
    pool = BlockPool(num_requests * 160 + 2, 16)
    policy = BatchPolicy(max_batch_prefill_tokens=10**6, max_batch_size=num_requests, max_total_tokens=2500)
    scheduler = Scheduler(policy, pool)
    for number in range(num_requests):
        prompt = [number % 251] * (1 + number % 16)  # block borders spread over the steps
        scheduler.add(
            GenerationRequest(
                id=number,
                token_ids=prompt,
                sampling=SamplingParams(),
                max_new_tokens=2400,
                stop_token_ids=[1],
                seed=0,
            )
        )
    plans: list[int] = []
    applies: list[int] = []
    for step in range(STEPS + 10):
        start = time.perf_counter_ns()
        plan = scheduler.plan()
        middle = time.perf_counter_ns()
        assert plan is not None
        result = StepResult(plan.step, [5] * num_requests, [0.0] * num_requests)
        begin = time.perf_counter_ns()
        scheduler.apply(result)
        if step >= 10:
            plans.append(middle - start)
            applies.append(time.perf_counter_ns() - begin)
    return statistics.fmean(plans) / 1e3, statistics.fmean(applies) / 1e3


def main() -> None:
    rows = {count: measure(count) for count in (64, 128, 256, 512, 1024)}
    base = rows[64][0]
    print("| running requests | plan, us | against 64 | apply, us |\n|---|---|---|---|")
    for count, (plan, apply) in rows.items():
        print(f"| {count} | {plan:.1f} | {plan / base:.2f}x | {apply:.1f} |")


if __name__ == "__main__":
    main()
