"""Decode steps that take the best token, and that draw: the draw captured, and queued kernel by kernel.

    python bench/cuda_decode.py [--shape llama-3.1-8b] [--fp8] [--rows 1,64,256,1024] [--json FILE]

Milliseconds per step under steady load, planning overlapped as in the server, medians of several stretches of steps;
both ways take turns in one engine; random weights. The best token is chosen in the captured step itself, and draws
without a filter are always queued for more than 8 rows: there both columns are the same way. Also what the captures of
the start took of the device's memory.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

from text_generation_inference.bench.shapes import SHAPES, write_shape
from text_generation_inference.bench.tables import markdown
from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import start_engine
from text_generation_inference.engine.loop import EngineLoop
from text_generation_inference.engine.warm_up import warm_up
from text_generation_inference.runner.runner import Runner
from text_generation_inference.types import GenerationRequest, SamplingParams

WAYS = {
    "best": SamplingParams(),
    "drawn": SamplingParams(temperature=0.8),
    "drawn, top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
}
STEPS = 40  # of a stretch
STRETCHES = 6  # of each way, and one more that is not measured
PROMPT = 64
LONGEST = PROMPT + 2 * (STRETCHES + 1) * STEPS + 40


def fill(loop: EngineLoop, count: int, params: SamplingParams) -> None:
    rng = random.Random(count)
    for number in range(count):
        ids = rng.choices(range(5, 30_000), k=PROMPT)
        loop.add(
            GenerationRequest(
                id=number,
                token_ids=ids,
                sampling=params,
                max_new_tokens=LONGEST - PROMPT,
                stop_token_ids=[],
                seed=number,
            )
        )
    for _ in range(20):  # prompts, and the first steps of all
        loop.step()


def empty(loop: EngineLoop, count: int) -> None:
    for number in range(count):
        loop.abort(number)
    while loop.has_work:
        loop.step()


def time_stretch(loop: EngineLoop) -> float:
    began = time.perf_counter()
    for _ in range(STEPS):
        loop.step()
    return 1e3 * (time.perf_counter() - began) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--fp8", action="store_true", help="weights and cache in FP8")
    parser.add_argument("--rows", default="1,64,256,1024")
    parser.add_argument("--json", help="also write the figures there")
    options = parser.parse_args()
    counts = [int(text) for text in options.rows.split(",")]
    fp8 = {"quantize": "fp8", "kv_cache_dtype": "fp8_e4m3fn"} if options.fp8 else {}
    prepare, taken = Runner.prepare, []

    def prepare_and_weigh(*arguments: object) -> None:
        before = torch.cuda.mem_get_info()[0]
        prepare(*arguments)
        taken.append(before - torch.cuda.mem_get_info()[0])

    Runner.prepare = prepare_and_weigh
    with tempfile.TemporaryDirectory() as folder:
        config = ServerConfig(
            model_id=str(write_shape(options.shape, Path(folder) / options.shape)), device="cuda",
            load_format="dummy", max_total_tokens=LONGEST, max_batch_size=max(counts), prefix_caching=False,
            max_batch_prefill_tokens=16_384, **fp8,
        )  # fmt: skip
        engine = start_engine(config)
    warm_up(engine)
    print({stage: round(seconds, 2) for stage, seconds in engine.seconds.items()}, flush=True)
    print(f"captures took {taken[0] / 1e6:.0f} MB", flush=True)
    loop, sampling = engine.loop, engine.rank.runner.sampling
    captured = sampling.captured_draws
    found, lines = [], []
    for count in counts:
        for name, params in WAYS.items():
            fill(loop, count, params)
            times: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(2 * (STRETCHES + 1)):
                replays = turn % 4 in (0, 3)  # contexts get longer: neither way may always come first
                sampling.captured_draws = captured if replays else {}
                took = time_stretch(loop)
                if turn > 1:  # what happens once is not measured
                    times[replays].append(took)
            sampling.captured_draws = captured
            empty(loop, count)
            one, other = statistics.median(times[True]), statistics.median(times[False])
            found.append({"rows": count, "choice": name, "captured_ms": one, "queued_ms": other})
            lines.append([str(count), name, f"{one:.3f}", f"{other:.3f}", f"{other / one:.3f}"])
    engine.close()
    print(markdown(["rows", "choice", "captured, ms", "kernel by kernel, ms", "ratio"], lines))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
