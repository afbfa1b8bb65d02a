"""Whether what was measured before the cache holds with it: the GPU's memory from loading to the last of some rows.

    python bench/cuda_memory.py --shape llama-2-70b --set quantize='"fp8"' --set kv_cache_dtype='"fp8_e4m3fn"' \
        --set max_batch_prefill_tokens=16384 128/128/64 128/128/256 2048/128/32

Rows are prompt tokens/new tokens/requests. Prints what torch holds and what of it is in tensors (the rest: fragments)
after loading, with the cache, and after each row; what steps may take as measured before there was a cache, and what
they took; tokens/s of each row; and the steps that were taken back for lack of memory, of which there should be none.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from text_generation_inference.bench.shapes import SHAPES, write_shape
from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import Engine, start_engine
from text_generation_inference.engine.rank import Rank
from text_generation_inference.engine.warm_up import warm_up
from text_generation_inference.types import GenerationRequest, SamplingParams


def tell(stage: str, more: str = "") -> None:
    torch.cuda.synchronize()
    held, used = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    peak, free = torch.cuda.max_memory_reserved(), torch.cuda.mem_get_info()[0]
    print(
        f"{stage:28} held {held / 1e9:8.3f} GB, in tensors {used / 1e9:8.3f}, fragments {(held - used) / 1e9:7.3f},"
        f" most held {peak / 1e9:8.3f}, free {free / 1e9:7.3f} {more}",
        flush=True,
    )
    torch.cuda.reset_peak_memory_stats()


def watch(name: str, say: Callable[[Any], str]) -> None:
    """Tell about the memory after a part of starting a rank."""
    work = getattr(Rank, name)

    def watched(*arguments: Any) -> Any:
        result = work(*arguments)
        if name == "load":
            torch.cuda.empty_cache()  # as the engine does before it looks
        tell(name, say(result))
        return result

    setattr(Rank, name, watched)


def run_row(engine: Engine, row: str, seed: int) -> str:
    inputs, outputs, count = (int(part) for part in row.split("/"))
    rng = random.Random(seed)
    before = engine.loop.scheduler.stats.num_rollbacks
    for number in range(count):
        tokens = rng.choices(range(5, engine.facts.vocab_size), k=inputs)
        engine.loop.add(
            GenerationRequest(
                id=(seed << 20) + number,
                token_ids=tokens,
                sampling=SamplingParams(),
                max_new_tokens=outputs,
                stop_token_ids=[],
                seed=0,
            )
        )
    started, num_tokens, failed = time.perf_counter(), 0, 0
    while engine.loop.has_work:
        out = engine.loop.step()
        if out is not None:
            num_tokens += len(out.token_ids)
            failed += sum(finish.error is not None for finish in out.finished)
    per_second = num_tokens / (time.perf_counter() - started)
    rolled_back = engine.loop.scheduler.stats.num_rollbacks - before
    return f"{per_second:10,.1f} tokens/s, {rolled_back} steps rolled back, {failed} requests failed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-2-70b", choices=list(SHAPES))
    parser.add_argument("--config", help="a folder with a config.json, instead of a shape")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting, as JSON")
    parser.add_argument("--times", type=int, default=2, help="how often each row is run (default 2)")
    parser.add_argument("rows", nargs="*", default=["128/128/64", "128/128/256", "2048/128/32"])
    options = parser.parse_args()
    folder = Path(options.config) if options.config else write_shape(options.shape, Path(tempfile.mkdtemp()))
    settings: dict[str, Any] = {"model_id": str(folder), "load_format": "dummy", "device": "cuda"}
    for setting in options.set:
        name, _, value = setting.partition("=")
        settings[name] = json.loads(value)
    watch("load", lambda _: "")
    watch("measure", lambda found: f"steps may take {found.step_bytes / 1e9:.3f} GB")
    watch("fits", lambda fits: "the largest step fits" if fits else "THE LARGEST STEP DOES NOT FIT")
    engine = start_engine(ServerConfig(**settings))
    seconds = ", ".join(f"{stage} {value:.1f}" for stage, value in engine.seconds.items())
    tell("started", f"{engine.facts.num_blocks} blocks; seconds: {seconds}")
    warm_up(engine, grammars=False)
    rolled_back = engine.loop.scheduler.stats.num_rollbacks
    tell("warmed up", f"{rolled_back} steps rolled back")
    for number, row in enumerate(options.rows * options.times, 1):
        tell(row, run_row(engine, row, number))
    rolled_back = engine.loop.scheduler.stats.num_rollbacks
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    print(f"in all: {rolled_back} steps rolled back, {retries} times memory had to be given back to go on")
    engine.close()
    sys.exit(rolled_back > 0)


if __name__ == "__main__":
    main()
