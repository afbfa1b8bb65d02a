"""Start to ready, cold (nothing converted, no kernels built) and warm, and peak resident memory under load.

    python bench/startup.py

The load: 16 prompts of 500 tokens, 200 tokens out, with a KV cache for exactly that.
"""

import json
import subprocess
import sys
import tempfile
import time

CHILD = """
import json, resource, sys, time
begin = time.perf_counter()
from text_generation_inference import LLM, SamplingParams
imported = time.perf_counter()
limits = {"max_batch_total_tokens": 16 * 704, "max_total_tokens": 704, "max_batch_size": 16}
llm = LLM(progress=False, cache_dir=sys.argv[1], **limits)
ready = time.perf_counter()
llm.generate([[7 + n] * 500 for n in range(16)], SamplingParams(max_new_tokens=200, ignore_eos=True))
engine = llm.engine
kv_bytes = sum(t.nbytes for pair in engine.rank.runner.kv_cache for t in pair)
weights = (engine.folder / "ggml.safetensors").stat().st_size
print(json.dumps({
    "import": imported - begin, "start": ready - imported, "stages": engine.seconds,
    "kernels": engine.rank.device.ops.description,
    "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "kv": kv_bytes, "weights": weights,
}))
"""


def run(cache: str) -> dict:
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", CHILD, cache], capture_output=True, text=True, check=True)
    return {"total": time.perf_counter() - start, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = run(cache), run(cache)
    print("| | cold | warm |\n|---|---|---|")
    print(f"| import, s | {cold['import']:.2f} | {warm['import']:.2f} |")
    for stage in warm["stages"]:
        print(f"| {stage}, s | {cold['stages'][stage]:.2f} | {warm['stages'][stage]:.2f} |")
    ready = [run["import"] + run["start"] for run in (cold, warm)]
    print(f"| **process start to ready, s** | {ready[0]:.2f} | {ready[1]:.2f} |")
    for name in ("weights", "kv", "peak"):
        print(f"| {name}, MB | {cold[name] / 1e6:.0f} | {warm[name] / 1e6:.0f} |")
    over = [(run["peak"] - run["weights"] - run["kv"]) / 1e6 for run in (cold, warm)]
    print(f"| **peak beyond weights and KV cache, MB** | {over[0]:.0f} | {over[1]:.0f} |")
    print(f"\n{warm['kernels']}")


if __name__ == "__main__":
    main()
