"""Time to the first token of a 1,000-token prompt, new and seen before, from one run.

python bench/prefix_reuse.py
"""

import random
import statistics
import time

from text_generation_inference import LLM, SamplingParams

PROMPT_TOKENS, ROUNDS = 1000, 7


def main() -> None:
    rng = random.Random(0)
    with LLM(progress=False, max_total_tokens=1200) as llm:
        params = SamplingParams(max_new_tokens=2, ignore_eos=True)

        def first_token(prompt: list[int]) -> float:
            start = time.perf_counter()
            next(iter(llm.stream(prompt, params)))
            return time.perf_counter() - start

        first_token([5] * 100)
        pairs = []
        for _ in range(ROUNDS):
            prompt = [rng.randrange(100, 40000) for _ in range(PROMPT_TOKENS)]
            pairs.append((first_token(prompt), first_token(prompt)))
    cold = statistics.median(pair[0] for pair in pairs)
    warm = statistics.median(pair[1] for pair in pairs)
    ratio = statistics.median(a / b for a, b in pairs)
    print("| first token of a 1,000-token prompt | ms |\n|---|---|")
    print(f"| new | {cold * 1e3:.0f} |\n| seen before | {warm * 1e3:.1f} |")
    print(f"| ratio within a pair, median | {ratio:.1f}x |")


if __name__ == "__main__":
    main()
