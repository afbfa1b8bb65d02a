"""Seconds from the start of the engine process until it is ready, with random weights on a GPU.

    python bench/cuda_start.py [--shape llama-3.1-8b | --config DIR] [--set NAME=VALUE ...] [--json FILE]

Twice: cold (no kernel was ever compiled here) and warm. Prints the stages, the memory that is left, and any kernel that
is compiled later than that, by a prompt or a decode step of a size that the start did not think of.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from text_generation_inference.bench.shapes import SHAPES, write_shape

# The engine process, which after its start runs requests of odd sizes and reports what was compiled for them.
PROGRAM = """
import json, random, sys, time
began = float(sys.argv[1])
seconds = {"python": time.time() - began}
from text_generation_inference.collection import pause_collection, resume_collection
pause_collection()
from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import start_engine
from text_generation_inference.engine.warm_up import warm_up
seconds["imports"] = time.time() - began - sum(seconds.values())
import msgspec
config = msgspec.json.decode(sys.argv[2], type=ServerConfig)
from contextlib import contextmanager
from text_generation_inference.devices.cuda import CudaDevice
dry_run, here = {}, []
def timed(part, work):
    start = time.time()
    try:
        return work()
    finally:
        dry_run[part] = dry_run.get(part, 0) + time.time() - start
compiling, peak_bytes = CudaDevice.compiling, CudaDevice.peak_bytes
@contextmanager
def timed_compiling(self):
    from triton import knobs
    knobs.compilation.listener = lambda **facts: here.append(facts["src"].name) if not facts["cache_hit"] else None
    context = compiling(self)
    context.__enter__()
    start = time.time()
    yield
    dry_run["going through steps"] = time.time() - start
    timed("waiting for compilers", lambda: context.__exit__(None, None, None))
    knobs.compilation.listener = None
CudaDevice.compiling = timed_compiling
CudaDevice.peak_bytes = lambda self, work: timed("measuring", lambda: peak_bytes(self, work))
engine = start_engine(config)
seconds |= engine.seconds
seconds["warm-up"] = warm_up(engine, grammars=False)
resume_collection()
ready = time.time() - began
import torch
free, total = torch.cuda.mem_get_info()
late = []
try:
    from triton import knobs
    knobs.runtime.jit_post_compile_hook = lambda **facts: late.append(facts["repr"].split("(")[0])
except ImportError:
    pass
from text_generation_inference.types import GenerationRequest, SamplingParams
rng = random.Random(0)
number = 0
waits = []
reserved = torch.cuda.memory_reserved()
WORK = (1, 1), (1, 2), (1, 77), (3, 1000), (7, 50), (17, 33), (64, 300), (129, 200), (500, 40), (1024, 30)
for count, longest in WORK:
    count = min(count, engine.resolved.max_batch_size)
    for _ in range(count):
        number += 1
        length = rng.randrange(1, longest + 1)
        params = SamplingParams(temperature=0.7, top_p=0.9) if number % 7 == 3 else SamplingParams()
        engine.loop.add(GenerationRequest(
            id=number, token_ids=[rng.randrange(5, 1000) for _ in range(length)], sampling=params,
            max_new_tokens=rng.randrange(1, 20), stop_token_ids=[], seed=number,
        ))
    while engine.loop.has_work:
        before = time.perf_counter()
        engine.loop.step()
        waits.append(time.perf_counter() - before)
print(json.dumps({
    "ready_s": round(ready, 2), "seconds": {name: round(value, 2) for name, value in seconds.items()},
    "dry_run": {name: round(value, 2) for name, value in dry_run.items()}, "compiled_here": here,
    "free_gb": round(free / 1e9, 2), "total_gb": round(total / 1e9, 2),
    "kv_blocks": engine.facts.num_blocks, "late_kernels": late, "longest_step_ms": round(1e3 * max(waits), 1),
    "reserved_later_mb": (torch.cuda.memory_reserved() - reserved) >> 20,
    "rollbacks": engine.loop.scheduler.stats.num_rollbacks, "notes": engine.notes,
}))
"""


def start(config: dict, cache: Path) -> dict:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_CACHE_DIR"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent / "src"), *sys.path])
    settings = json.dumps({**config, "cache_dir": str(cache)})
    began = time.time()
    command = [sys.executable, "-c", PROGRAM, str(began), settings]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"the engine did not start: status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--config", help="a folder with a config.json, instead of a shape")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting, as JSON")
    parser.add_argument("--json", help="also write everything measured to this file")
    options = parser.parse_args()
    folder = Path(options.config) if options.config else write_shape(options.shape, Path(tempfile.mkdtemp()))
    config = {"model_id": str(folder), "load_format": "dummy", "device": "cuda"}
    for setting in options.set:
        name, _, value = setting.partition("=")
        config[name] = json.loads(value)
    results = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            results[name] = result = start(config, Path(cache))
            stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in result["seconds"].items())
            print(f"{name}: ready after {result['ready_s']:.2f} s ({stages})", flush=True)
            parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in result["dry_run"].items())
            here = ", ".join(result["compiled_here"]) or "nothing"
            kernels = len(list(Path(cache).glob("triton/*/*.cubin")))
            print(f"  of dry_run: {parts}; {kernels} kernels on disk, compiled in the engine process: {here}")
            print(
                f"  {result['kv_blocks']} cache blocks; {result['free_gb']} of {result['total_gb']} GB left;"
                f" reserved later {result['reserved_later_mb']} MB; longest step afterwards"
                f" {result['longest_step_ms']} ms; rollbacks {result['rollbacks']}"
            )
            print(f"  compiled after the start: {', '.join(result['late_kernels']) or 'nothing'}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
