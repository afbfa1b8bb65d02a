"""Where a decode step's time goes: median microseconds per part, at 1, 4 and 16 running requests.

python bench/step_profile.py
"""

import random
import statistics
import time
from collections import defaultdict

from text_generation_inference import LLM, SamplingParams

PARTS: dict[str, list[float]] = defaultdict(list)


def timed(name: str, function):
    def call(*args, **kwargs):
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            PARTS[name].append(time.perf_counter() - start)

    return call


def main() -> None:
    rng = random.Random(0)
    rows = {}
    with LLM(progress=False, max_total_tokens=512, prefix_caching=False) as llm:
        loop = llm.engine.loop
        runner = llm.engine.rank.runner
        model = runner.model
        runner.steps._batch = timed("build the batch", runner.steps._batch)
        model.model.embedding.look_up = timed("embedding", model.model.embedding.look_up)
        if model.fused_decode is not None:
            model.fused_decode = timed("layers", model.fused_decode)
        model.logits = timed("output head", model.logits)
        runner.sampling.choose = timed("choose tokens", runner.sampling.choose)
        runner._queue = timed("step on the device thread", runner._queue)
        loop.scheduler.plan = timed("plan (overlapped)", loop.scheduler.plan)
        loop.scheduler.apply = timed("apply", loop.scheduler.apply)
        llm._deliver = timed("text out", llm._deliver)
        for level in (1, 4, 16):
            prompts = [[rng.randrange(100, 40000) for _ in range(64)] for _ in range(level)]
            llm.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))
            PARTS.clear()
            llm.generate(prompts, SamplingParams(max_new_tokens=128, ignore_eos=True))
            rows[level] = {name: statistics.median(values) * 1e6 for name, values in PARTS.items()}
    print("| median per step, us | 1 | 4 | 16 |\n|---|---|---|---|")
    for name in rows[1]:
        print(f"| {name} | " + " | ".join(f"{rows[level].get(name, 0):.0f}" for level in rows) + " |")


if __name__ == "__main__":
    main()
