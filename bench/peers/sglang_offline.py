"""SGLang through its public interface on the rows that `tgi bench offline` runs: random weights, greedy, EOS ignored.

    python bench/peers/sglang_offline.py SHAPE bf16|fp8 FILE IN/OUT/REQUESTS ...

Knows nothing of our packages, which are not to be seen by this process. FILE is written anew after each row.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def process_age() -> float:
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def main() -> None:
    folder, precision, file = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    rows = [tuple(int(part) for part in row.split("/")) for row in sys.argv[4:]]
    import sglang

    fp8 = {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"} if precision == "fp8" else {}
    engine = sglang.Engine(
        model_path=folder,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        mem_fraction_static=0.88,
        max_running_requests=1280,
        context_length=4096,
        log_level="error",
        **fp8,
    )
    found = {"peer": f"SGLang {sglang.__version__}", "ready_seconds": round(process_age(), 2), "rows": []}
    print(f"ready after {found['ready_seconds']} s", file=sys.stderr, flush=True)
    file.write_text(json.dumps(found))
    vocab = json.loads(Path(folder, "config.json").read_text())["vocab_size"]
    rng = random.Random(0)

    def params(new: int) -> dict[str, float | bool]:
        return {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}

    for inputs, outputs, count in rows:
        prompts = [rng.choices(range(5, vocab), k=inputs) for _ in range(count)]
        engine.generate(input_ids=prompts[:32], sampling_params=params(min(8, outputs)))
        started = time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=params(outputs))
        seconds = time.perf_counter() - started
        num_tokens = sum(len(answer["output_ids"]) for answer in answers)
        assert num_tokens == outputs * count, (num_tokens, outputs * count)
        row = {"inputs": inputs, "outputs": outputs, "requests": count, "seconds": round(seconds, 3)}
        found["rows"].append({**row, "output_tokens_per_s": round(num_tokens / seconds, 1)})
        print(json.dumps(found["rows"][-1]), file=sys.stderr, flush=True)
        file.write_text(json.dumps(found))
    engine.shutdown()


if __name__ == "__main__":
    main()
