"""One step with a prompt, alone and beside requests that decode: captured, and queued op by op.

    python bench/cuda_prompts.py [--shape llama-3.1-8b] [--fp8] [--json FILE]

Milliseconds from asking for the step to having its tokens, medians of several, both ways taking turns in one engine;
random weights. `beside` is how many others decode in the same step.
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
from text_generation_inference.engine.build import Engine, start_engine
from text_generation_inference.engine.warm_up import warm_up
from text_generation_inference.types import GenerationRequest, SamplingParams

BESIDE = (0, 16, 64, 250)
LENGTHS = (8, 60, 128, 200, 380, 512, 700, 1000, 1400, 2000)
ROUNDS = 7
LONGEST = 2048
DECODING = 900  # tokens of those beside: more than there are steps


def make_request(number: int, length: int, new_tokens: int) -> GenerationRequest:
    ids = random.Random(number).choices(range(5, 30_000), k=length)
    return GenerationRequest(
        id=number, token_ids=ids, sampling=SamplingParams(), max_new_tokens=new_tokens, stop_token_ids=[], seed=0
    )


class Steps:
    def __init__(self, engine: Engine) -> None:
        self.loop = engine.loop
        self.number = 0

    def decode_beside(self, count: int) -> None:
        for _ in range(count):
            self.loop.add(make_request(self.take_number(), 1, DECODING))
        for _ in range(3 if count else 0):
            self.loop.step()

    def take_number(self) -> int:
        self.number += 1
        return self.number

    def prompt(self, length: int) -> float:
        self.loop.add(make_request(self.take_number(), length, 1))
        began = time.perf_counter()
        self.loop.launch()
        self.loop.wait()
        took = time.perf_counter() - began
        self.loop.take()
        return 1e3 * took

    def end(self) -> None:
        for number in range(1, self.number + 1):
            self.loop.abort(number)
        while self.loop.has_work:
            self.loop.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--fp8", action="store_true", help="weights and cache in FP8")
    parser.add_argument("--json", help="also write the figures there")
    options = parser.parse_args()
    fp8 = {"quantize": "fp8", "kv_cache_dtype": "fp8_e4m3fn"} if options.fp8 else {}
    with tempfile.TemporaryDirectory() as folder:
        config = ServerConfig(
            model_id=str(write_shape(options.shape, Path(folder) / options.shape)), device="cuda",
            load_format="dummy", max_total_tokens=LONGEST, max_batch_size=256, prefix_caching=False, overlap=False,
            **fp8,
        )  # fmt: skip
        engine = start_engine(config)
    warm_up(engine)
    print({stage: round(seconds, 2) for stage, seconds in engine.seconds.items()}, flush=True)
    steps, passes = Steps(engine), engine.rank.runner.steps
    captured = passes._captured
    without = {bucket: one for bucket, one in captured.items() if bucket.phase == "decode"}
    found, lines = [], []
    for beside in BESIDE:
        steps.decode_beside(beside)
        for length in LENGTHS:
            times: dict[str, list[float]] = {"captured": [], "queued": []}
            for turn in range(2 * (ROUNDS + 1)):
                way = ("captured", "queued")[turn % 2]
                passes._captured = captured if way == "captured" else without
                took = steps.prompt(length)
                if turn > 1:  # what happens once is not measured
                    times[way].append(took)
            one, other = (statistics.median(times[way]) for way in ("captured", "queued"))
            found.append({"beside": beside, "tokens": length, "captured_ms": one, "queued_ms": other})
            lines.append([str(beside), str(length), f"{one:.2f}", f"{other:.2f}", f"{other / one:.2f}"])
        steps.end()
    engine.close()
    print(markdown(["beside", "prompt tokens", "captured, ms", "op by op, ms", "ratio"], lines))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
