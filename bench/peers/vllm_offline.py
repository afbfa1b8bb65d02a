"""vLLM through its public interface on the rows that `tgi bench offline` runs: random weights, greedy, EOS ignored.

    python bench/peers/vllm_offline.py FOLDER bf16|fp8|gptq|awq FILE IN/OUT/REQUESTS ...

Knows nothing of our packages, which are not to be seen by this process. FILE is written anew after each row. That a
model is in GPTQ or AWQ its config.json says.
"""

import os

from rows import measure, read_arguments

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def main() -> None:
    folder, precision, file, rows = read_arguments()
    import vllm

    fp8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"} if precision == "fp8" else {}
    llm = vllm.LLM(
        model=folder,
        load_format="dummy",
        dtype="float16" if precision == "awq" else "bfloat16",  # the only type that its AWQ is made for
        skip_tokenizer_init=True,
        max_model_len=max(inputs + outputs for inputs, outputs, _ in rows),
        gpu_memory_utilization=0.92,
        enable_prefix_caching=False,
        max_num_seqs=max(256, *(count for _, _, count in rows)),
        disable_log_stats=True,
        **fp8,
    )

    def generate(prompts: list[list[int]], new: int) -> list[int]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [len(answer.outputs[0].token_ids) for answer in llm.generate(asked, params, use_tqdm=False)]

    measure(f"vLLM {vllm.__version__}", folder, file, rows, generate)


if __name__ == "__main__":
    main()
