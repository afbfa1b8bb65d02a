"""What reduced precision costs: perplexity of the embedded model on a fixed text, and whether two devices agree.

    python bench/cuda_perplexity.py [--device cuda] [--tokens 20000] [--window 2000] [--only bfloat16] [--json FILE]

For each precision the text is scored in windows (`decoder_input_details` through the engine), in this process, one
engine after the other. Printed: perplexity, its ratio to float32, and the differences of single log-probabilities. Each
engine also continues 32 prompts greedily, and the log-probabilities of the tokens it chose are compared with float32's,
up to the first token of a prompt that differs.

What is bfloat16's own is shown by the same with `transformers`, where it is installed: its float32 is compared with
ours, its bfloat16 with its float32, as it is (logits rounded to bfloat16) and with logits kept in float32 as ours are.
Where bfloat16 cannot be computed: `--device cpu --only transformers --transformers-dtype float32` with fewer tokens.

Last, the greedy tokens in float32, here and on the CPU with torch's own ops. Exits with 1 where a limit is missed.
"""

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from text_generation_inference.bench.tables import markdown
from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import Engine, start_engine
from text_generation_inference.errors import TgiError
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import GenerationRequest, SamplingParams

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
TRANSFORMERS = "transformers"
FLOAT32_APART = 1e-3  # single log-probabilities in float32, ours and those of transformers
CLOSE = 2e-2
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 48, 64


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of the text (all tokens but the first of each window), and greedy outputs with theirs."""

    text: list[float]
    tokens: list[list[int]]
    logprobs: list[list[float]]

    @property
    def perplexity(self) -> float:
        return math.exp(-statistics.fmean(self.text))


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
    runner: Any = engine.rank.runner
    runner.kv_cache.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(
    engine: Engine, prompts: list[list[int]], new_tokens: int, **sampling: Any
) -> tuple[list[list[int]], list[list[float]], list[dict[int, float]]]:
    """New tokens, their log-probabilities, and those of prompt tokens by position."""
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
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
        for number, token, logprob in zip(out.request_ids, out.token_ids, out.logprobs, strict=True):
            tokens[number].append(token)
            logprobs[number].append(logprob)
        for scored in out.prompt_logprobs:
            scores[scored.row].update(enumerate(scored.logprobs, scored.start))
        for finish in out.finished:
            if finish.error:
                sys.exit(f"request {finish.request_id} failed: {finish.error}")
    return tokens, logprobs, scores


def score_text(engine: Engine, windows: list[list[int]]) -> list[float]:
    _, _, scores = run(engine, windows, 1, decoder_input_details=True)
    for window, found in zip(windows, scores, strict=True):
        assert set(found) == set(range(1, len(window))), "log-probabilities are missing"
    return [found[position] for found in scores for position in sorted(found)]


def score(options: argparse.Namespace, windows: list[list[int]], settings: dict[str, Any]) -> list[float]:
    """Log-probabilities of all tokens but the first of each window."""
    engine = start(options, **settings)
    found = score_text(engine, windows)
    stop(engine)
    return found


def score_all(
    options: argparse.Namespace, windows: list[list[int]], prompts: list[list[int]], settings: dict[str, Any]
) -> Scores:
    engine = start(options, **settings)
    text = score_text(engine, windows)
    tokens, logprobs, _ = run(engine, prompts, NEW_TOKENS)
    stop(engine)
    return Scores(text, tokens, logprobs)


@torch.inference_mode()
def score_with(model: Any, windows: list[list[int]], prompts: list[list[int]]) -> Scores:
    """As `score_all`, by a model of transformers: a window at a time, and all prompts (of one length) together."""
    text: list[float] = []
    for window in windows:
        ids = torch.tensor([window], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        text += (-torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")).tolist()
    if not prompts:
        return Scores(text, [], [])
    ids, past = torch.tensor(prompts, device=model.device), None
    tokens, logprobs = [], []
    for _ in range(NEW_TOKENS):
        out = model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        past = out.past_key_values
        best, ids = out.logits[:, -1].float().log_softmax(-1).max(-1, keepdim=True)
        tokens.append(ids)
        logprobs.append(best)
    return Scores(text, torch.cat(tokens, 1).tolist(), torch.cat(logprobs, 1).tolist())


def score_transformers(
    options: argparse.Namespace, folder: Path, windows: list[list[int]], prompts: list[list[int]]
) -> Iterator[tuple[str, Scores]]:
    """float32, then the other precision, without and with logits in float32."""
    from transformers import AutoModelForCausalLM

    def load(dtype: str) -> Any:
        more: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **more).eval()
        return model.to(options.device)

    model = load("float32")
    yield f"{TRANSFORMERS} float32", score_with(model, windows, prompts)
    del model
    model, name = load(options.transformers_dtype), f"{TRANSFORMERS} {options.transformers_dtype}"
    yield name, score_with(model, windows, prompts)

    def in_float32(head: Any, inputs: tuple[torch.Tensor, ...], _: torch.Tensor) -> torch.Tensor:
        bias = None if head.bias is None else head.bias.float()
        return torch.nn.functional.linear(inputs[0].float(), head.weight.float(), bias)

    model.get_output_embeddings().register_forward_hook(in_float32)
    yield f"{name}, float32 logits", score_with(model, windows, prompts)


def differences(values: list[float], expected: list[float]) -> dict[str, float]:
    apart = sorted(abs(a - b) for a, b in zip(values, expected, strict=True))
    found = {"mean": statistics.fmean(apart), "median": statistics.median(apart)}
    found |= {"p99": apart[int(0.99 * (len(apart) - 1))], "max": apart[-1]}
    return found | {"close": sum(value <= CLOSE for value in apart) / len(apart)}


def parting(mine: list[int], theirs: list[int]) -> int:
    """How many tokens are the same before the first that is not."""
    pairs = enumerate(zip(mine, theirs, strict=True))
    return next((place for place, (a, b) in pairs if a != b), len(mine))


def compare_generated(found: Scores, expected: Scores) -> dict[str, Any]:
    """Differences of the log-probabilities of greedy tokens, while outputs are the same."""
    same = [parting(*pair) for pair in zip(found.tokens, expected.tokens, strict=True)]
    mine, theirs = (
        [value for values, count in zip(scores.logprobs, same, strict=True) for value in values[:count]]
        for scores in (found, expected)
    )
    result: dict[str, Any] = {"tokens": len(mine), "equal": same.count(NEW_TOKENS)}
    return result | (differences(mine, theirs) if mine else {})


def make_row(name: str, found: Scores, expected: Scores, limit: float | None, started: float) -> dict[str, Any]:
    ratio = found.perplexity / expected.perplexity
    row = {"precision": name, "perplexity": found.perplexity, "ratio": ratio, "limit": limit}
    row |= {"apart": differences(found.text, expected.text), "generated": compare_generated(found, expected)}
    print(f"{name}: perplexity {found.perplexity:.4f}, {100 * (ratio - 1):+.3f}%", file=sys.stderr, flush=True)
    row["within"] = limit is None or abs(ratio - 1) <= limit
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def compare_precisions(
    options: argparse.Namespace, windows: list[list[int]], prompts: list[list[int]]
) -> tuple[list[dict[str, Any]], Scores, bool]:
    """-> rows, the scores in float32, whether all are within their limits."""
    rows: list[dict[str, Any]] = []
    expected: Scores | None = None
    passed = True
    for name, (settings, limit) in PRECISIONS.items():
        if options.only and name not in options.only and name != "float32":
            continue
        started = time.perf_counter()
        try:
            found = score_all(options, windows, prompts, settings)
        except TgiError as error:
            if expected is None:
                sys.exit(f"{name}, which the others are compared with: {error}")
            print(f"{name}: {error}", flush=True)
            passed = False
            continue
        expected = expected or found
        rows.append(make_row(name, found, expected, limit, started))
        passed = passed and rows[-1]["within"]
    assert expected is not None
    return rows, expected, passed


def compare_transformers(
    options: argparse.Namespace, folder: Path, windows: list[list[int]], prompts: list[list[int]], ours: Scores
) -> tuple[list[dict[str, Any]], bool]:
    """-> rows, whether its float32 is ours. The first is compared with ours, the others with the first."""
    rows: list[dict[str, Any]] = []
    expected: Scores | None = None
    started = time.perf_counter()
    try:
        for name, found in score_transformers(options, folder, windows, prompts):
            rows.append(make_row(name, found, expected or ours, None, started))
            expected = expected or found
            started = time.perf_counter()
    except ImportError as error:
        print(f"no rows of {TRANSFORMERS}, which cannot be imported here: {error}", flush=True)
        return rows, True
    except Exception as error:  # whatever another project's code raises, the rows of the engines are kept
        print(f"{TRANSFORMERS} failed: {type(error).__name__}: {error}", flush=True)
        return rows, False
    rows[0]["within"] = rows[0]["apart"]["max"] <= FLOAT32_APART
    return rows, rows[0]["within"]


def compare_greedy(options: argparse.Namespace, prompts: list[list[int]], here: list[list[int]]) -> dict[str, Any]:
    """float32 on the device and on the CPU with torch's ops: the same tokens, or where each prompt parts."""
    engine = start(options, dtype="float32", device="cpu", custom_kernels=False)
    there = run(engine, prompts, NEW_TOKENS)[0]
    stop(engine)
    same = [parting(*pair) for pair in zip(here, there, strict=True)]
    parted = {number: count for number, count in enumerate(same) if count < NEW_TOKENS}
    return {"prompts": len(prompts), "new_tokens": NEW_TOKENS, "equal": len(prompts) - len(parted), "parted_at": parted}


def print_tables(options: argparse.Namespace, rows: list[dict[str, Any]], num_tokens: int, num_prompts: int) -> None:
    names = ("mean", "median", "p99", "max")
    apart = ["logprobs apart: mean", *names[1:], f"within {CLOSE}"]

    def cells(found: dict[str, Any]) -> list[str]:
        if "mean" not in found:  # nothing to compare
            return [""] * len(apart)
        return [*(f"{found[name]:.2e}" for name in names), f"{100 * found['close']:.1f}%"]

    heads = ["text", "perplexity", "against float32", "limit", *apart]
    limits = ["" if row["limit"] is None else f"{100 * row['limit']:g}%" for row in rows]
    lines = [
        [row["precision"], f"{row['perplexity']:.4f}", f"{100 * (row['ratio'] - 1):+.3f}%", limit, *cells(row["apart"])]
        for row, limit in zip(rows, limits, strict=True)
    ]
    print(f"{num_tokens} tokens in windows of {options.window} on {options.device}\n{markdown(heads, lines)}")
    if num_prompts:
        heads = ["generated", "same tokens", "same outputs", *apart]
        found = [(row["precision"], row["generated"]) for row in rows]
        lines = [[name, str(part["tokens"]), str(part["equal"]), *cells(part)] for name, part in found]
        print(f"{num_prompts} greedy outputs of {NEW_TOKENS} tokens, while as in float32\n{markdown(heads, lines)}")
    if any(row["precision"].startswith(TRANSFORMERS) for row in rows):
        print(f"{TRANSFORMERS}: float32 is compared with ours, the others with its float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model-id", default="embedded")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=2_000)
    parser.add_argument(
        "--only", type=lambda text: text.split(","), help=f"of {', '.join([*PRECISIONS, TRANSFORMERS])}"
    )
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help="to compare greedy tokens of; 0: none")
    parser.add_argument("--transformers-dtype", default="bfloat16", help="precision of transformers to compare")
    parser.add_argument("--json")
    options = parser.parse_args()
    from text_generation_inference.weights.source import find_model

    folder = find_model(ServerConfig(model_id=options.model_id)).path
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    if len(ids) < options.tokens:
        sys.exit(f"the text has only {len(ids)} tokens")
    ids = ids[: options.tokens]
    windows = [ids[start : start + options.window] for start in range(0, len(ids), options.window)]
    windows = [window for window in windows if len(window) > 1]
    count = min(options.prompts, len(ids) // PROMPT_TOKENS)
    prompts = [ids[n * len(ids) // count :][:PROMPT_TOKENS] for n in range(count)]
    rows, expected, passed = compare_precisions(options, windows, prompts)
    if not options.only or TRANSFORMERS in options.only:
        more, agrees = compare_transformers(options, folder, windows, prompts, expected)
        rows, passed = rows + more, passed and agrees
    print_tables(options, rows, len(ids), len(prompts))
    results: dict[str, Any] = {"device": options.device, "tokens": len(ids), "precisions": rows}
    if prompts:
        results["greedy"] = greedy = compare_greedy(options, prompts, expected.tokens)
        print(f"greedy in float32: {greedy['equal']} of {greedy['prompts']} prompts equal the CPU's tokens", end="")
        print(f"; parted (prompt: token) {greedy['parted_at']}" if greedy["parted_at"] else "")
        passed = passed and not greedy["parted_at"]
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
