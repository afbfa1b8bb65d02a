"""SGLang through its public interface on the rows that `tgi bench offline` runs: random weights, greedy, EOS ignored.

    python bench/peers/sglang_offline.py SHAPE bf16|fp8 FILE IN/OUT/REQUESTS ...

Knows nothing of our packages, which are not to be seen by this process. FILE is written anew after each row.
"""

import os

from rows import measure, read_arguments

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    folder, precision, file, rows = read_arguments()
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

    def generate(prompts: list[list[int]], new: int) -> list[int]:
        params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        return [len(answer["output_ids"]) for answer in engine.generate(input_ids=prompts, sampling_params=params)]

    measure(f"SGLang {sglang.__version__}", folder, file, rows, generate)
    engine.shutdown()


if __name__ == "__main__":
    main()
