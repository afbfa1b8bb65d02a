"""What the published configurations for Gaudi cost before the first request, and what reuse of prefixes saves. No card.

    .venv/bin/python bench/gaudi_plans.py [--users 8] [--turns 8]

For each distinct set of limits and sizes of `tests/unit/gaudi_commands.py`: shapes of prompts without and with those
after cached tokens, shapes of decoding, graphs (with LIMIT_HPU_GRAPH, the default: decoding alone), passes of a warm-up
(shapes, and prompts of one row once more as scored ones), and bytes of logits that graphs keep (float32, one result for
each). Then chats through the real scheduler and plan: prompt tokens needed and computed. Only counted, nothing timed.
"""

import argparse
import random
import sys
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

from gaudi_commands import COMMANDS, launch

from text_generation_inference.runner.shapes.buckets import BucketPlan, PlanLimits, plan_buckets
from text_generation_inference.runner.shapes.plan import choose_settings
from text_generation_inference.scheduler.blocks import BlockPool
from text_generation_inference.scheduler.policy import BatchPolicy
from text_generation_inference.scheduler.scheduler import Scheduler
from text_generation_inference.types import GenerationRequest, SamplingParams, StepPlan, StepResult

BLOCK_SIZE = 128
VOCABULARY = 128256  # Llama 3
SYSTEM, QUESTION, ANSWER = 200, 40, 60  # tokens


def chat(plan: BucketPlan, limits: PlanLimits, reuse: bool, users: int, turns: int) -> Counter[str]:
    """Users whose every turn is the one before, its answer and a new question, while there is room."""
    policy = BatchPolicy(
        max_batch_prefill_tokens=limits.max_batch_prefill_tokens,
        max_batch_size=limits.max_batch_size,
        max_total_tokens=limits.max_total_tokens,
    )
    pool = BlockPool(limits.max_batch_size * limits.blocks_per_row + 1, BLOCK_SIZE, reuse)
    scheduler = Scheduler(policy, pool, clock=lambda: 0, shapes=plan)
    rng, counts = random.Random(1), Counter[str]()
    words = lambda count: [rng.randrange(30000) for _ in range(count)]  # noqa: E731
    system = words(SYSTEM)
    texts = [[*system] for _ in range(users)]
    waiting, running, number = deque((user, turns) for user in range(users)), dict[int, tuple[int, int]](), 0
    decode: list[int] = []
    while waiting or scheduler.has_work:
        while waiting and len(running) < limits.max_batch_size:
            user, left = waiting.popleft()
            asked = texts[user] + words(QUESTION)
            if not left or len(asked) > limits.max_input_tokens or len(asked) + ANSWER > limits.max_total_tokens:
                continue
            texts[user], running[number] = asked, (user, left)
            scheduler.add(
                GenerationRequest(
                    id=number,
                    token_ids=asked,
                    sampling=SamplingParams(),
                    max_new_tokens=ANSWER,
                    stop_token_ids=[],
                    seed=0,
                )
            )
            number += 1
        planned = scheduler.plan()
        if planned is None:
            continue
        out = scheduler.apply(execute(plan, planned, decode, counts, rng))
        for request, token in zip(out.request_ids, out.token_ids, strict=True):
            texts[running[request][0]].append(token)
        for finish in out.finished:
            user, left = running.pop(finish.request_id)
            waiting.append((user, left - 1))
    return counts


def execute(
    plan: BucketPlan, planned: StepPlan, decode: list[int], counts: Counter[str], rng: random.Random
) -> StepResult:
    decode[:] = [slot for slot in decode if slot not in planned.leave] + planned.join
    prompts = [(chunk.end - chunk.start, chunk.start) for chunk in planned.chunks]
    for places in plan.group(prompts):
        length, context = (max(prompts[place][axis] for place in places) for axis in (0, 1))
        bucket = plan.find("prefill", len(places), length, context)
        assert bucket is not None
        counts["computed"] += bucket.num_tokens
        counts["needed"] += sum(prompts[place][0] for place in places)
        counts["passes"] += 1
    rows = (len(decode) if planned.decode else 0) + sum(chunk.samples for chunk in planned.chunks)
    return StepResult(planned.step, [rng.randrange(30000) for _ in range(rows)], [0.0] * rows, [], [], [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    options = parser.parse_args()
    known: dict[object, str] = {}
    for name, command in COMMANDS.items():
        if command.model:
            known.setdefault((command.limits, command.sizes), name)
    print(
        "| configuration (input/total/batch/prefill; sizes) | prompt shapes, + after cached | decode shapes = graphs"
        " | warm-up passes before, after | logits kept | chat: computed / needed before | after | passes |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in known.values():
        command = COMMANDS[name]
        limits = PlanLimits(*command.limits, BLOCK_SIZE)
        settings = choose_settings(launch(command).config)
        plans = {reuse: plan_buckets(limits, replace(settings, reuse=reuse)) for reuse in (False, True)}
        whole = plans[False]
        scored = len({whole.find("prefill", 1, bucket.length) for bucket in whole.prefill})
        passes = [len(plans[reuse].shapes) + scored for reuse in (False, True)]
        logits = sum(bucket.batch for bucket in whole.decode) * VOCABULARY * 4
        chats = {reuse: chat(plans[reuse], limits, reuse, options.users, options.turns) for reuse in (False, True)}
        sizes = "/".join("-" if size is None else str(size) for size in command.sizes)
        shown = "/".join(map(str, command.limits)) + ("; " + sizes if any(command.sizes) else "; exponential")
        figures = [f"{found['computed']:,} / {found['needed']:,}" for found in chats.values()]
        print(
            f"| {shown} | {len(whole.prefill)} + {len(plans[True].prefill) - len(whole.prefill)} | {len(whole.decode)}"
            f" | {passes[0]}, {passes[1]} | {logits / 1e6:.0f} MB | {figures[0]} | {figures[1]}"
            f" | {chats[False]['passes']}, {chats[True]['passes']} |"
        )


if __name__ == "__main__":
    main()
