"""How much of the work is padding: tokens computed / tokens needed, under each strategy. No model, no device.

    .venv/bin/python bench/padding_share.py [--requests 1000] [--users 1 16 256]

The real scheduler and the real bucket plan take a number of users through the profiles of inference-benchmarker; each
user sends the next request when one is answered. Counted are the tokens of prompts, the rows of decode steps, and the
blocks of the KV cache that attention reads. Limits are those of the published benchmark (512/1536/256/131072); chat has
longer prompts (1024/2048/256/131072).
"""

import argparse
import random
from collections import Counter, deque
from dataclasses import dataclass, field

from text_generation_inference.bench.serve.profiles import PROFILES, LengthProfile
from text_generation_inference.runner.shapes.buckets import BucketPlan, BucketSettings, PlanLimits, plan_buckets
from text_generation_inference.scheduler.blocks import BlockPool
from text_generation_inference.scheduler.policy import BatchPolicy
from text_generation_inference.scheduler.scheduler import Scheduler
from text_generation_inference.types import GenerationRequest, SamplingParams, StepPlan, StepResult

BLOCK_SIZE = 128
LIMITS = {"fixed-length": (512, 1536, 256, 131072), "chat": (1024, 2048, 256, 131072)}
STRATEGIES = {
    "exponential": BucketSettings(),
    "linear 8/4/128": BucketSettings("linear"),
    "linear 1/1/128": BucketSettings("linear", 1, 1, 128),
    "linear 64/16/256": BucketSettings("linear", 64, 16, 256),
}


@dataclass
class PaddingCounter:
    """Stands where the runner is, and only counts."""

    plan: BucketPlan
    counts: Counter[str] = field(default_factory=Counter)
    lengths: dict[int, int] = field(default_factory=dict)  # by slot
    decode_set: list[int] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> StepResult:
        leaving = set(plan.leave)
        self.decode_set = [slot for slot in self.decode_set if slot not in leaving] + plan.join
        for admission in plan.admit:
            self.lengths[admission.slot] = len(admission.request.token_ids)
        rows = list(self.decode_set) if plan.decode else []
        if rows:
            blocks = sum(-(-self.lengths[slot] // BLOCK_SIZE) for slot in rows)
            bucket = self.plan.find("decode", len(rows), blocks)
            assert bucket is not None
            self._count("decode", bucket.batch, len(rows))
            self._count("blocks", bucket.length, blocks)
        if plan.chunks:
            lengths = [chunk.end for chunk in plan.chunks]
            for places in self.plan.group([(length, 0) for length in lengths]):
                bucket = self.plan.find("prefill", len(places), max(lengths[place] for place in places))
                assert bucket is not None
                self._count("prefill", bucket.num_tokens, sum(lengths[place] for place in places))
            rows += [chunk.slot for chunk in plan.chunks]
        for slot in rows:
            self.lengths[slot] += 1
        return StepResult(plan.step, [0] * len(rows), [0.0] * len(rows))

    def _count(self, what: str, computed: int, needed: int) -> None:
        self.counts[f"{what} computed"] += computed
        self.counts[f"{what} needed"] += needed

    def share(self, *parts: str) -> float:
        computed, needed = (sum(self.counts[f"{part} {kind}"] for part in parts) for kind in ("computed", "needed"))
        return computed / max(1, needed)


def simulate(profile: LengthProfile, limits: PlanLimits, plan: BucketPlan, users: int, count: int) -> PaddingCounter:
    rng = random.Random(0)
    policy = BatchPolicy(
        max_batch_prefill_tokens=limits.max_batch_prefill_tokens,
        max_batch_size=limits.max_batch_size,
        max_total_tokens=limits.max_total_tokens,
    )
    pool = BlockPool(limits.max_batch_size * (limits.blocks_per_row + 1) + 1, BLOCK_SIZE, False)
    scheduler = Scheduler(policy, pool, clock=lambda: 0, shapes=plan)
    runner = PaddingCounter(plan)
    waiting = deque(
        GenerationRequest(
            id=number,
            token_ids=[0] * min(profile.prompt.draw(rng), limits.max_input_tokens),
            sampling=SamplingParams(),
            max_new_tokens=profile.output.draw(rng),
            stop_token_ids=[],
            seed=0,
        )
        for number in range(count)
    )
    running = 0
    while waiting or scheduler.has_work:
        while waiting and running < users:
            scheduler.add(waiting.popleft())
            running += 1
        step = scheduler.plan()
        if step is not None:
            running -= len(scheduler.apply(runner.execute(step)).finished)
    return runner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--users", type=int, nargs="+", default=[1, 16, 256])
    arguments = parser.parse_args()
    print("users                            prompts, decode, both, blocks")
    for name, numbers in LIMITS.items():
        limits = PlanLimits(*numbers, BLOCK_SIZE)
        for strategy, settings in STRATEGIES.items():
            plan = plan_buckets(limits, settings)
            print(f"{name}, {strategy}: {len(plan.prefill)} + {len(plan.decode)} shapes")
            for users in arguments.users:
                found = simulate(PROFILES[name], limits, plan, users, min(arguments.requests, 40 * users))
                parts = (["prefill"], ["decode"], ["prefill", "decode"], ["blocks"])
                print(f"{users:19}                 " + "".join(f"{found.share(*part):8.3f}" for part in parts))


if __name__ == "__main__":
    main()
