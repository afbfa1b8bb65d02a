"""FP8 with static scales: measures the embedded model, then serves it with what was measured, and prints perplexities.

    python bench/cuda_static_fp8.py [--device cuda] [--tokens 20000] [--window 2000] [--also METHOD,...] [--json FILE]

The first half of the text is measured and the second half is scored, so that no scale has seen what it is judged by.
Scored are bfloat16 and then each configuration, one engine after the other in this process. Exits with 1 where a limit
is missed. Rounding costs this small model most in its last layer (see bench/RESULTS.md), which the block list leaves as
it is. Products of attention and the head come one by one; on a GPU the former stay in the model's type. `--also` adds
rows of other scale methods, such as maxabs_hw, without a limit.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cuda_perplexity import TEXT, differences, run, score, start, stop

from text_generation_inference.bench.tables import markdown
from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import TgiError
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.weights.source import find_model

LAST_LAYER = r"layers\.29\.(self_attn\.[qkvo]_proj|mlp\.)"
EXACT = {"scale_value_type": "MAXABS", "rounding_method": "IDENTITY"}
# A scale per output row of a matrix, one for all inputs of it, neither rounded.
BY_ROW = {
    "default": {
        "weight": {**EXACT, "granularity": "PCS", "backoff": 1.0},
        "activation": {**EXACT, "granularity": "PTS", "backoff": 0.25},
    }
}
PLAIN_CACHE = {"types": ["KVCache", "Matmul"], "names": [LAST_LAYER, "lm_head"]}
FP8_CACHE = {"types": ["Matmul"], "names": [LAST_LAYER, "lm_head"]}
# Configuration, and how far the perplexity may be from bfloat16's; None: for information.
ROWS: dict[str, tuple[dict[str, Any], float | None]] = {
    "static FP8": ({"scale_method": BY_ROW, "blocklist": PLAIN_CACHE}, 0.02),
    "static FP8 and FP8 cache": ({"scale_method": BY_ROW, "blocklist": FP8_CACHE}, None),
    "with products of attention": ({"scale_method": BY_ROW, "blocklist": {**FP8_CACHE, "types": []}}, None),
    "with the head as well": ({"scale_method": BY_ROW, "blocklist": {"types": [], "names": [LAST_LAYER]}}, None),
}


def write_config(folder: Path, mode: str, **more: Any) -> str:
    path = folder / f"{mode.lower()}.json"
    fields = {"method": "HOOKS", "mode": mode, "observer": "maxabs", "dump_stats_path": str(folder / "measure"), **more}
    path.write_text(json.dumps(fields))
    return str(path)


def measure(options: argparse.Namespace, windows: list[list[int]], folder: Path) -> int:
    """-> number of modules measured."""
    engine = start(options, dtype="bfloat16", quant_config=write_config(folder, "MEASURE"))
    run(engine, windows, 1)
    stop(engine)  # writes
    return len(json.loads((folder / "measure_hooks_maxabs.json").read_text())["Nodes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model-id", default="embedded")
    parser.add_argument("--tokens", type=int, default=20_000, help="half of them are measured, half are scored")
    parser.add_argument("--window", type=int, default=2_000)
    parser.add_argument("--also", type=lambda text: text.split(","), default=[], help="further scale methods")
    parser.add_argument("--json")
    options = parser.parse_args()
    tokenizer = Tokenizer.load(find_model(ServerConfig(model_id=options.model_id)).path)
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)[: options.tokens]
    windows = [ids[first : first + options.window] for first in range(0, len(ids), options.window)]
    windows = [window for window in windows if len(window) > 1]
    if len(windows) < 2:
        sys.exit("the text must have two windows at least: one to measure, one to score")
    measured, scored = windows[: len(windows) // 2], windows[len(windows) // 2 :]
    configurations = dict(ROWS)
    configurations |= {name: ({"scale_method": name, "blocklist": PLAIN_CACHE}, None) for name in options.also}
    rows: list[dict[str, Any]] = []
    passed = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = time.perf_counter()
        expected = score(options, scored, {"dtype": "bfloat16"})
        base = math.exp(-statistics.fmean(expected))
        rows.append({"precision": "bfloat16", "perplexity": base, "ratio": 1.0, "limit": None, "within": True})
        print(f"bfloat16: perplexity {base:.4f}, {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
        started = time.perf_counter()
        modules = measure(options, measured, folder)
        print(f"measured {modules} modules in {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
        for label, (fields, limit) in configurations.items():
            started = time.perf_counter()
            try:
                found = score(
                    options, scored, {"dtype": "bfloat16", "quant_config": write_config(folder, "QUANTIZE", **fields)}
                )
            except TgiError as error:
                print(f"{label}: {error}", flush=True)
                passed = False
                continue
            perplexity = math.exp(-statistics.fmean(found))
            row = {"precision": label, "perplexity": perplexity, "ratio": perplexity / base, "limit": limit}
            row |= {"apart": differences(found, expected), "seconds": round(time.perf_counter() - started, 1)}
            row["within"] = limit is None or abs(row["ratio"] - 1) <= limit
            rows.append(row)
            passed = passed and row["within"]
            print(
                f"{label}: perplexity {perplexity:.4f}, {100 * (row['ratio'] - 1):+.3f}%", file=sys.stderr, flush=True
            )
    heads = ["precision", "perplexity", "against bfloat16", "limit", "logprobs apart: median", "p99"]
    cells = [
        [row["precision"], f"{row['perplexity']:.4f}", f"{100 * (row['ratio'] - 1):+.3f}%"]
        + ["" if row["limit"] is None else f"{100 * row['limit']:g}%"]
        + [f"{row['apart'][key]:.2e}" if "apart" in row else "" for key in ("median", "p99")]
        for row in rows
    ]
    count = sum(map(len, scored))
    print(f"{count} tokens scored in windows of {options.window} on {options.device}\n{markdown(heads, cells)}")
    if options.json:
        Path(options.json).write_text(json.dumps({"device": options.device, "tokens": count, "rows": rows}, indent=1))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
