"""What reduced precision costs: perplexity of the embedded model on a fixed text, and whether two devices agree.

    python bench/cuda_perplexity.py [--device cuda] [--tokens 20000] [--window 2000] [--only bfloat16] [--json FILE]

For each precision the text is scored in windows (`decoder_input_details` through the engine), in this process, one
engine after the other. Printed: perplexity, its ratio to float32, and the differences of single log-probabilities. Then
greedy tokens of 32 prompts in float32, here and on the CPU with torch's own ops. Exits with 1 where a limit is missed.
"""

import argparse
import gc
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tgi.bench.report import markdown
from tgi.config import ServerConfig
from tgi.engine.build import Engine, start_engine
from tgi.errors import TgiError
from tgi.text.tokenizer import Tokenizer
from tgi.types import GenerationRequest, SamplingParams

TEXT = Path(__file__).parent / "data/perplexity.txt"
FP8, FP8_CACHE = {"quantize": "fp8"}, {"kv_cache_dtype": "fp8_e4m3fn"}
# Settings, and how far the perplexity may be from float32's.
PRECISIONS: dict[str, tuple[dict[str, Any], float]] = {
    "float32": ({"dtype": "float32"}, 0.0),
    "bfloat16": ({"dtype": "bfloat16"}, 0.005),
    "fp8 weights": (FP8, 0.02),
    "fp8 cache": ({"dtype": "bfloat16", **FP8_CACHE}, 0.01),
    "fp8 weights and cache": ({**FP8, **FP8_CACHE}, 0.03),
}
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 48, 64


def start(options: argparse.Namespace, **settings: Any) -> Engine:
    config: dict[str, Any] = {
        "model_id": options.model_id,
        "device": options.device,
        "prefix_caching": False,
        "max_total_tokens": options.window + 16,
        "max_batch_size": NUM_PROMPTS,
        "max_batch_total_tokens": 16 * (options.window + 16),
        **settings,
    }
    return start_engine(ServerConfig(**config))


def stop(engine: Engine) -> None:
    engine.close()
    runner: Any = engine.loop._runner
    runner.kv_cache.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(
    engine: Engine, prompts: list[list[int]], new_tokens: int, **sampling: Any
) -> tuple[list[list[int]], list[dict]]:
    """New tokens, and log-probabilities of prompt tokens by position."""
    tokens: list[list[int]] = [[] for _ in prompts]
    scores: list[dict[int, float]] = [{} for _ in prompts]
    for number, prompt in enumerate(prompts):
        request = GenerationRequest(
            id=number,
            token_ids=prompt,
            sampling=SamplingParams(**sampling),
            max_new_tokens=new_tokens,
            stop_token_ids=[],
            seed=0,
        )
        engine.loop.add(request)
    while engine.loop.has_work:
        out = engine.loop.step()
        if out is None:
            continue
        for number, token in zip(out.request_ids, out.token_ids, strict=True):
            tokens[number].append(token)
        for scored in out.prompt_logprobs:
            scores[scored.row].update(enumerate(scored.logprobs, scored.start))
        for finish in out.finished:
            if finish.error:
                sys.exit(f"request {finish.request_id} failed: {finish.error}")
    return tokens, scores


def score(options: argparse.Namespace, windows: list[list[int]], settings: dict[str, Any]) -> list[float]:
    """Log-probabilities of all tokens but the first of each window."""
    engine = start(options, **settings)
    _, scores = run(engine, windows, 1, decoder_input_details=True)
    stop(engine)
    for window, found in zip(windows, scores, strict=True):
        assert set(found) == set(range(1, len(window))), "log-probabilities are missing"
    return [found[position] for found in scores for position in sorted(found)]


def differences(values: list[float], expected: list[float]) -> dict[str, float]:
    apart = sorted(abs(a - b) for a, b in zip(values, expected, strict=True))
    return {"median": statistics.median(apart), "p99": apart[int(0.99 * (len(apart) - 1))], "max": apart[-1]}


def compare_precisions(options: argparse.Namespace, windows: list[list[int]]) -> tuple[list[dict], bool]:
    rows: list[dict] = []
    expected: list[float] | None = None
    passed = True
    for name, (settings, limit) in PRECISIONS.items():
        if options.only and name not in options.only and name != "float32":
            continue
        started = time.perf_counter()
        try:
            found = score(options, windows, settings)
        except TgiError as error:
            print(f"{name}: {error}", flush=True)
            passed = False
            continue
        expected = found if expected is None else expected
        perplexity = math.exp(-statistics.fmean(found))
        ratio = perplexity / math.exp(-statistics.fmean(expected))
        row = {"precision": name, "perplexity": perplexity, "ratio": ratio, "limit": limit}
        row |= {"apart": differences(found, expected), "within": abs(ratio - 1) <= limit}
        rows.append(row | {"seconds": round(time.perf_counter() - started, 1)})
        passed = passed and row["within"]
        print(f"{name}: perplexity {perplexity:.4f}, {100 * (ratio - 1):+.3f}%", file=sys.stderr, flush=True)
    return rows, passed


def compare_greedy(options: argparse.Namespace, ids: list[int]) -> dict:
    """float32 on the device and on the CPU with torch's ops: the same tokens, or where each prompt parts."""
    count = min(options.prompts, len(ids) // PROMPT_TOKENS)
    prompts = [ids[n * len(ids) // count :][:PROMPT_TOKENS] for n in range(count)]
    outputs = []
    for settings in ({"dtype": "float32"}, {"dtype": "float32", "device": "cpu", "custom_kernels": False}):
        engine = start(options, **settings)
        outputs.append(run(engine, prompts, NEW_TOKENS)[0])
        stop(engine)
    here, there = outputs
    parted = {
        number: next(place for place, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        for number, (mine, theirs) in enumerate(zip(here, there, strict=True))
        if mine != theirs
    }
    return {"prompts": len(prompts), "new_tokens": NEW_TOKENS, "equal": len(prompts) - len(parted), "parted_at": parted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model-id", default="embedded")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=2_000)
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"of {', '.join(PRECISIONS)}")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help="to compare greedy tokens of; 0: none")
    parser.add_argument("--json")
    options = parser.parse_args()
    from tgi.weights.source import find_model

    tokenizer = Tokenizer.load(find_model(ServerConfig(model_id=options.model_id)).path)
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    if len(ids) < options.tokens:
        sys.exit(f"the text has only {len(ids)} tokens")
    ids = ids[: options.tokens]
    windows = [ids[start : start + options.window] for start in range(0, len(ids), options.window)]
    windows = [window for window in windows if len(window) > 1]
    rows, passed = compare_precisions(options, windows)
    heads = ["precision", "perplexity", "against float32", "limit", "logprobs apart: median", "p99", "max"]
    cells = [
        [row["precision"], f"{row['perplexity']:.4f}", f"{100 * (row['ratio'] - 1):+.3f}%", f"{100 * row['limit']:g}%"]
        + [f"{row['apart'][name]:.2e}" for name in ("median", "p99", "max")]
        for row in rows
    ]
    print(f"{len(ids)} tokens in windows of {options.window} on {options.device}\n{markdown(heads, cells)}")
    results: dict[str, Any] = {"device": options.device, "tokens": len(ids), "precisions": rows}
    if options.prompts:
        results["greedy"] = greedy = compare_greedy(options, ids)
        print(f"greedy in float32: {greedy['equal']} of {greedy['prompts']} prompts equal the CPU's tokens", end="")
        print(f"; parted (prompt: token) {greedy['parted_at']}" if greedy["parted_at"] else "")
        passed = passed and not greedy["parted_at"]
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
