"""vLLM through its public interface on the rows that `tgi bench offline` runs: random weights, greedy, EOS ignored.

    python bench/peers/vllm_offline.py SHAPE bf16|fp8 FILE IN/OUT/REQUESTS ...

Knows nothing of our packages, which are not to be seen by this process. FILE is written anew after each row.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def process_age() -> float:
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def main() -> None:
    folder, precision, file = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    rows = [tuple(int(part) for part in row.split("/")) for row in sys.argv[4:]]
    import vllm

    fp8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"} if precision == "fp8" else {}
    llm = vllm.LLM(
        model=folder,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=max(inputs + outputs for inputs, outputs, _ in rows),
        gpu_memory_utilization=0.92,
        enable_prefix_caching=False,
        max_num_seqs=max(256, *(count for _, _, count in rows)),
        disable_log_stats=True,
        **fp8,
    )
    found = {"peer": f"vLLM {vllm.__version__}", "ready_seconds": round(process_age(), 2), "rows": []}
    print(f"ready after {found['ready_seconds']} s", file=sys.stderr, flush=True)
    file.write_text(json.dumps(found))
    vocab = json.loads(Path(folder, "config.json").read_text())["vocab_size"]
    rng = random.Random(0)

    def params(new: int) -> vllm.SamplingParams:
        return vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)

    for inputs, outputs, count in rows:
        prompts = [{"prompt_token_ids": rng.choices(range(5, vocab), k=inputs)} for _ in range(count)]
        llm.generate(prompts[:32], params(min(8, outputs)), use_tqdm=False)
        started = time.perf_counter()
        answers = llm.generate(prompts, params(outputs), use_tqdm=False)
        seconds = time.perf_counter() - started
        num_tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
        assert num_tokens == outputs * count, (num_tokens, outputs * count)
        row = {"inputs": inputs, "outputs": outputs, "requests": count, "seconds": round(seconds, 3)}
        found["rows"].append({**row, "output_tokens_per_s": round(num_tokens / seconds, 1)})
        print(json.dumps(found["rows"][-1]), file=sys.stderr, flush=True)
        file.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
