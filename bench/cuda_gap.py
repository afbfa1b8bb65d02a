"""The longest time between two tokens of running requests while a long prompt is computed on a GPU, by `--max-step-ms`.

    python bench/cuda_gap.py [--shape llama-3.1-8b] [--rows 64] [--prompt 100000] [--limits 0,250,100,50] [--json FILE]

So many requests decode; a prompt of so many tokens arrives; the loop is driven as in the server until it has its first
token. Random weights; all limits in one engine, after a first prompt that is not measured.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from text_generation_inference.bench.shapes import SHAPES, write_shape
from text_generation_inference.bench.tables import markdown
from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import start_engine
from text_generation_inference.engine.loop import EngineLoop
from text_generation_inference.engine.warm_up import warm_up
from text_generation_inference.scheduler.pace import StepPace
from text_generation_inference.types import GenerationRequest, SamplingParams

NEW_TOKENS = 4000


def request(number: int, length: int, new_tokens: int) -> GenerationRequest:
    ids = random.Random(number).choices(range(5, 30_000), k=length)
    return GenerationRequest(
        id=number, token_ids=ids, sampling=SamplingParams(), max_new_tokens=new_tokens, stop_token_ids=[], seed=number
    )


def measure(loop: EngineLoop, rows: int, length: int, limit_ms: int, first_id: int) -> dict[str, float]:
    loop.scheduler._pace = StepPace(limit_ms / 1000 or None, loop.scheduler.pool.block_size)
    for number in range(rows):
        loop.add(request(first_id + number, 64, NEW_TOKENS))
    for _ in range(60):
        loop.step()
    long = first_id + rows
    loop.add(request(long, length, 1))
    begin = before = time.perf_counter()
    gaps: list[float] = []
    done = False
    while not done:
        out = loop.step()
        if out is None:
            continue
        if first_id in out.request_ids:
            now = time.perf_counter()
            gaps.append(now - before)
            before = now
        done = any(finish.request_id == long for finish in out.finished)
    seconds = time.perf_counter() - begin
    for number in range(rows):
        loop.abort(first_id + number)
    while loop.has_work:
        loop.step()
    return {
        "limit_ms": limit_ms,
        "prompt_s": seconds,
        "tokens": len(gaps),
        "median_ms": 1e3 * statistics.median(gaps),
        "worst_ms": 1e3 * max(gaps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=100_000)
    parser.add_argument("--limits", default="0,250,100,50")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", help="also write the figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = ServerConfig(
            model_id=str(write_shape(options.shape, Path(folder) / options.shape)), device=options.device,
            load_format="dummy", max_total_tokens=options.prompt + 100, max_batch_size=options.rows + 1,
            prefix_caching=False,
        )  # fmt: skip
        engine = start_engine(config)
    warm_up(engine)
    limits = [int(text) for text in options.limits.split(",")]
    found = [
        measure(engine.loop, options.rows, options.prompt, limit, number * (options.rows + 1))
        for number, limit in enumerate([limits[0], *limits])
    ][1:]
    engine.close()
    names = ["--max-step-ms", "prompt, s", "tokens of each meanwhile", "median gap, ms", "worst gap, ms"]
    rows = [
        [
            str(row["limit_ms"]),
            f"{row['prompt_s']:.2f}",
            str(row["tokens"]),
            f"{row['median_ms']:.0f}",
            f"{row['worst_ms']:.0f}",
        ]
        for row in found
    ]
    print(markdown(names, rows))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
