"""What the published configurations for Gaudi cost before the first request, and what reuse of prefixes saves. No card.

    .venv/bin/python bench/gaudi_plans.py [--users 8] [--turns 8] [--counts]

For each distinct set of limits and sizes of `tests/unit/gaudi_commands.py`: shapes of prompts, of those after cached
tokens, of decoding and of the tower of a model that sees; graphs (with LIMIT_HPU_GRAPH, the default: those of decoding
and of towers); passes of a warm-up (shapes, and prompts of one row once more as scored ones); and bytes of logits that
graphs keep (float32, one result for each). Then chats through the real scheduler and plan, without reuse of prefixes
and with it: prompt tokens, rows and blocks of decoding, needed and computed. `--counts`: no chats, which another tree's
sources can be asked for too (PYTHONPATH=THERE/src). Only counted, nothing timed.
"""

import argparse
import random
import sys
from collections import Counter, deque
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

from gaudi_commands import COMMANDS, LLAVA, launch

from text_generation_inference.runner.shapes.buckets import BucketPlan, PlanLimits, plan_buckets
from text_generation_inference.runner.shapes.plan import choose_settings
from text_generation_inference.scheduler.blocks import BlockPool
from text_generation_inference.scheduler.policy import BatchPolicy
from text_generation_inference.scheduler.scheduler import Scheduler
from text_generation_inference.types import GenerationRequest, SamplingParams, StepPlan, StepResult

BLOCK_SIZE = 128
LLAVA_TILE = 336 * 336  # pixels
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
    lengths: dict[int, int] = {}  # tokens of a slot that are computed
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
        out = scheduler.apply(execute(plan, planned, decode, lengths, counts, rng))
        for request, token in zip(out.request_ids, out.token_ids, strict=True):
            texts[running[request][0]].append(token)
        for finish in out.finished:
            user, left = running.pop(finish.request_id)
            waiting.append((user, left - 1))
    return counts


def execute(
    plan: BucketPlan,
    planned: StepPlan,
    decode: list[int],
    lengths: dict[int, int],
    counts: Counter[str],
    rng: random.Random,
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
    if planned.decode and decode:
        for slot in decode:
            lengths[slot] += 1
        blocks = sum(-(-lengths[slot] // BLOCK_SIZE) for slot in decode)
        bucket = plan.find("decode", len(decode), blocks)
        assert bucket is not None
        counts.update(rows=len(decode), rows_computed=bucket.batch, blocks=blocks, blocks_computed=bucket.length)
    lengths.update((chunk.slot, chunk.end) for chunk in planned.chunks)
    rows = (len(decode) if planned.decode else 0) + sum(chunk.samples for chunk in planned.chunks)
    return StepResult(planned.step, [rng.randrange(30000) for _ in range(rows)], [0.0] * rows, [], [], [])


def tower_sizes(model: str) -> list[int]:
    """Of Llava-Next's tower, which computes tiles of several pictures together."""
    try:
        from text_generation_inference.engine.picture_memory import BATCH_PIXELS
        from text_generation_inference.models.vision.padded import pass_sizes
    except ImportError:  # an older tree: pictures were met as they came
        return []
    tower: Any = SimpleNamespace(step=1, least=1)
    return pass_sizes(tower, BATCH_PIXELS // LLAVA_TILE) if model == LLAVA else []


def count(limits: PlanLimits, settings: Any, sizes: list[int]) -> list[str]:
    """Shapes, graphs, passes of a warm-up, bytes of logits."""
    reuses = "reuse" in {field.name for field in fields(settings)}
    plan = plan_buckets(limits, settings, sizes) if sizes else plan_buckets(limits, settings)
    whole = plan_buckets(limits, replace(settings, reuse=False)) if reuses else plan
    scored = len({whole.find("prefill", 1, bucket.length) for bucket in whole.prefill})
    shapes = [len(whole.prefill), len(plan.prefill) - len(whole.prefill), len(plan.decode), len(sizes)]
    logits = sum(bucket.batch for bucket in plan.decode) * VOCABULARY * 4
    graphs, passes = len(plan.decode) + len(sizes), sum(shapes) + scored
    return [" + ".join(map(str, shapes)), str(graphs), str(passes), f"{logits / 1e6:.0f} MB"]


def share(counts: Counter[str], computed: str, needed: str) -> str:
    return f"{counts[computed]:,} / {counts[needed]:,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--counts", action="store_true", help="no chats")
    options = parser.parse_args()
    known: dict[object, str] = {}
    for name, command in COMMANDS.items():
        if command.model:
            known.setdefault((command.limits, command.sizes, command.model == LLAVA), name)
    columns = ["input/total/batch/prefill; sizes", "shapes: prompts, after cached, decoding, tower", "graphs"]
    columns += ["warm-up passes", "logits"]
    if not options.counts:
        columns += ["chat without reuse: prompts computed / needed", "with", "decoding: rows", "blocks", "passes"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name in known.values():
        command = COMMANDS[name]
        limits = PlanLimits(*command.limits, BLOCK_SIZE)
        settings = choose_settings(launch(command).config)
        sizes = "/".join("-" if size is None else str(size) for size in command.sizes)
        shown = "/".join(map(str, command.limits)) + ("; " + sizes if any(command.sizes) else "; exponential")
        row = [shown, *count(limits, settings, tower_sizes(command.model))]
        if not options.counts:
            chats = [
                chat(plan_buckets(limits, replace(settings, reuse=reuse)), limits, reuse, options.users, options.turns)
                for reuse in (False, True)
            ]
            row += [share(found, "computed", "needed") for found in chats]
            row += [share(chats[1], "rows_computed", "rows"), share(chats[1], "blocks_computed", "blocks")]
            row.append(", ".join(str(found["passes"]) for found in chats))
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
