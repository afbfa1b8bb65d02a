"""Steps padded to a bucket plan and captured as graphs, against steps that are not, on one device in one run.

    python bench/cuda_buckets.py [--shape llama-3.1-8b] [--limits 512/1536/256/131072] [--strategy exponential]
                                 [--work 512/256 200/800] [--shared 128] [--device cuda] [--json FILE]

Random weights. Prints how many shapes and graphs there are and how many seconds they took, then for each row of work (a
full batch of requests, prompt and new tokens; the second number is the mean of lengths spread as in the profile
fixed-length unless it is followed by !) tokens per second without and with buckets and their ratio, the padding, and
whether graphs gave the tokens of the same padded passes without graphs. Prefixes are reused: the first 128 tokens of
all prompts (--shared N) are the same, known before the clock starts; --shared 0 reuses nothing. Ends with status 1 if
a ratio is below --goal (0.97), a token differs, or a shape came up that warming up had not met.

Try it anywhere: --device cpu --shape tiny --limits 32/64/4/64 --work 32/16 20/16 --shared 16 --goal 0
"""

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

from text_generation_inference.bench.shapes import SHAPES, config_of
from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import Engine, start_engine
from text_generation_inference.engine.warm_up import warm_up
from text_generation_inference.progress import StageBars
from text_generation_inference.types import GenerationRequest, SamplingParams

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
SPREAD = 0.125  # standard deviation of the number of new tokens, as a share of its mean
MIXED = (
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"do_sample": True, "repetition_penalty": 1.2},
    {"top_k": 20, "top_n_tokens": 3},
)


def write_model(shape: str, folder: Path) -> None:
    fields = (
        {**config_of("smollm2-135m"), "tie_word_embeddings": False, **TINY} if shape == "tiny" else config_of(shape)
    )
    (folder / "config.json").write_text(json.dumps(fields))


def start(options: argparse.Namespace, folder: Path, bucketing: bool) -> tuple[Engine, dict[str, float]]:
    longest, total, rows, prefill = (int(number) for number in options.limits.split("/"))
    config = ServerConfig(
        model_id=str(folder),
        load_format="dummy",
        device=options.device,
        max_input_tokens=longest,
        max_total_tokens=total,
        max_batch_size=rows,
        max_batch_prefill_tokens=prefill,
        prefix_caching=options.shared > 0,
        bucketing=bucketing,
        bucket_strategy=options.strategy,
        limit_hpu_graph=options.limit_graph,
    )
    began = time.perf_counter()
    with StageBars() as bars:
        engine = start_engine(config, bars.update)
    seconds = {**engine.seconds, "warm-up": warm_up(engine, grammars=False)}
    seconds["all"] = time.perf_counter() - began
    return engine, seconds


def make_work(text: str, rows: int, shared: int, seed: int) -> list[GenerationRequest]:
    """`512/256`: so many prompt tokens, of which `shared` are those of all, and new ones on average."""
    prompt, new = text.removesuffix("!").split("/")
    rng = random.Random(f"{text} {seed}")
    lengths = [max(1, int(rng.gauss(int(new), SPREAD * int(new)))) for _ in range(rows)]
    if text.endswith("!"):
        lengths = [int(new)] * rows
    work = [make_request(number, int(prompt), min(length, int(new)), {}, rng) for number, length in enumerate(lengths)]
    for request in work:
        request.token_ids[:shared] = work[0].token_ids[:shared]
    return work


def make_request(
    number: int, prompt: int, new: int, params: dict[str, object], rng: random.Random
) -> GenerationRequest:
    return GenerationRequest(
        id=number,
        token_ids=[rng.randrange(3, 300) for _ in range(prompt)],
        sampling=SamplingParams(**params),  # pyright: ignore[reportArgumentType]
        max_new_tokens=new,
        stop_token_ids=[],
        seed=number,
    )


def run(engine: Engine, work: list[GenerationRequest]) -> tuple[float, dict[int, list[int]]]:
    """Seconds until all are answered, and the answers."""
    began = time.perf_counter()
    for request in work:
        engine.loop.add(request)
    answers: dict[int, list[int]] = {request.id: [] for request in work}
    while engine.loop.has_work:
        out = engine.loop.step()
        if out is not None:
            for number, token in zip(out.request_ids, out.token_ids, strict=True):
                answers[number].append(token)
            assert not any(finish.error for finish in out.finished), [finish.error for finish in out.finished]
    return time.perf_counter() - began, answers


def measure(engine: Engine, options: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of each row of work; the best of a few."""
    speeds: dict[str, float] = {}
    for text in options.work:
        speeds[text] = 0.0
        for seed in range(options.repeats):
            work = make_work(text, engine.resolved.max_batch_size, options.shared, seed)
            tokens = sum(request.max_new_tokens for request in work)
            if options.shared:
                run(engine, work[:1])
            speeds[text] = max(speeds[text], tokens / run(engine, work)[0])
    return speeds


def compare_graphs(engine: Engine) -> tuple[int, int]:
    """Requests with mixed options, by graphs and by the same padded passes without: (tokens, those that differ)."""
    rng = random.Random(1)
    rows, longest = min(24, engine.resolved.max_batch_size), engine.resolved.max_input_tokens
    new = min(24, engine.resolved.max_total_tokens - longest)
    work = [
        make_request(n, rng.randint(1, min(longest, 300)), rng.randint(1, new), dict(MIXED[n % len(MIXED)]), rng)
        for n in range(2 * rows)
    ]
    captured = run(engine, work)[1]
    engine.loop.scheduler.pool.forget()  # the same passes again: nothing may be found of the first time
    for bucket in engine.rank.runner.steps.plan.shapes:
        engine.rank.runner.steps.go_without(bucket)
    plain = run(engine, work)[1]
    pairs = [(a, b) for n in captured for a, b in zip(captured[n], plain[n], strict=True)]
    return len(pairs), sum(a != b for a, b in pairs)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=[*SHAPES, "tiny"])
    parser.add_argument("--limits", default="512/1536/256/131072", help="max input/total/batch size/prefill tokens")
    parser.add_argument("--strategy", default="exponential", choices=["exponential", "linear"])
    parser.add_argument("--work", nargs="+", default=["512/256!", "200/800"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--shared", type=int, default=128, help="tokens that all prompts begin with; 0: no reuse")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit-graph", action="store_true", help="prompts without graphs")
    parser.add_argument("--goal", type=float, default=0.97)
    parser.add_argument("--json")
    options = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(options.shape, folder)
        engine, seconds = start(options, folder, bucketing=False)
        print(f"without buckets: ready in {seconds['all']:.1f} s", flush=True)
        plain = measure(engine, options)
        engine.close()
        del engine
        free_memory()
        engine, seconds = start(options, folder, bucketing=True)
        plan, stats = engine.rank.runner.steps.plan, engine.rank.bucket_stats
        print(
            f"{options.shape}, {options.limits}, {options.strategy}: {len(plan.prefill)} + {len(plan.decode)} shapes,"
            f" {stats.num_captured} graphs, {stats.num_warmed} keys; warm-up of shapes {seconds['prepare']:.1f} s of"
            f" {seconds['all']:.1f} s until ready"
        )
        print("  " + ", ".join(f"{stage} {value:.1f} s" for stage, value in seconds.items()), flush=True)
        bucketed = measure(engine, options)
        after = engine.rank.bucket_stats
        tokens, different = compare_graphs(engine)
        unplanned = engine.rank.bucket_stats.num_unplanned
        engine.close()
    ratios = {text: bucketed[text] / plain[text] for text in options.work}
    for text, ratio in ratios.items():
        print(f"{text:>10}: {plain[text]:10.1f} tokens/s, in buckets {bucketed[text]:10.1f}, ratio {ratio:.3f}")
    print(
        f"padding, computed / needed: prompts {after.prefill_computed / after.prefill_needed:.3f}, decode"
        f" {after.decode_computed / after.decode_needed:.3f}; passes without a graph {after.num_bypassed}"
    )
    print(f"graphs against none: {different} of {tokens} tokens differ; shapes not warmed up: {unplanned}")
    print(f"{time.perf_counter() - began:.0f} s in all")
    if options.json:
        facts = {
            "shapes": [len(plan.prefill), len(plan.decode)],
            "graphs": stats.num_captured,
            "seconds": seconds,
            "plain": plain,
            "bucketed": bucketed,
            "ratios": ratios,
            "tokens_compared": tokens,
            "tokens_different": different,
            "unplanned": unplanned,
        }
        Path(options.json).write_text(json.dumps(facts, indent=1))
    return int(different > 0 or unplanned > 0 or min(ratios.values()) < options.goal)


if __name__ == "__main__":
    sys.exit(main())
