"""Answers of tiny models to many kinds of requests, and the same as recorded once: what no refactoring may change.

PYTHONPATH=src:tests:tests/models python tests/models/recorded.py      # writes them anew: only where a change is meant
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from driving import make_request, make_tiny, random_prompts, run, start

FILE = Path(__file__).parents[1] / "data" / "recorded" / "tiny_models.json"
FAMILIES = {"Llama": {}, "Mistral": {}, "Qwen2": {}}
NEW = 24
PARAMS: list[dict[str, Any]] = [
    {},
    {"top_n_tokens": 4},
    {"decoder_input_details": True, "prompt_top_n_tokens": 2},
    {"repetition_penalty": 1.8, "top_n_tokens": 2},
    {"frequency_penalty": 0.8, "presence_penalty": 0.5},
    {"logit_bias": {7: 4.0, 9: -100.0}},
    {"do_sample": True},
    {"temperature": 0.7, "top_k": 12},
    {"temperature": 1.3, "top_p": 0.8},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"typical_p": 0.6},
    {"watermark": True, "temperature": 0.9},
    {"repetition_penalty": 1.2, "temperature": 1.1, "top_k": 30, "top_n_tokens": 3},
    {"min_tokens": 8, "stop_token_ids": (5, 6, 7, 8), "do_sample": True},
]


def answers(family: str, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """All requests at once, and again half of them later: prompts that share blocks, and others of one token."""
    tiny = make_tiny(family, FAMILIES[family], folder)
    lengths = [1 + (7 * n) % 60 for n in range(2 * len(PARAMS))]
    prompts = random_prompts(320, lengths, seed=11)
    prompts[-1] = prompts[-2] = prompts[-3]
    requests = [
        make_request(n, prompt, NEW, seed=77 + n, **PARAMS[n % len(PARAMS)]) for n, prompt in enumerate(prompts)
    ]
    engine = start(tiny.folder, **settings)
    outputs = run(engine, requests, [0 if n % 2 else n for n in range(len(requests))])
    engine.close()
    return [
        {
            "tokens": output.token_ids,
            "logprobs": output.logprobs,
            "tops": [sorted(top.items()) for top in output.top_tokens],
            "prompt": sorted(output.prompt_logprobs.items()),
            "reason": output.reason,
        }
        for output in outputs
    ]


def compare(found: list[dict[str, Any]], kept: list[dict[str, Any]]) -> None:
    """Tokens are equal, and numbers but for rounding."""
    for number, (answer, recorded) in enumerate(zip(found, kept, strict=True)):
        assert answer["tokens"] == recorded["tokens"], number
        assert answer["reason"] == recorded["reason"], number
        for what in ("logprobs", "tops", "prompt"):
            assert _close(answer[what], recorded[what]), (number, what)


def _close(found: Any, kept: Any) -> bool:
    if isinstance(kept, list):
        return len(found) == len(kept) and all(_close(a, b) for a, b in zip(found, kept, strict=True))
    return abs(found - kept) < 2e-3 if isinstance(kept, float) else found == kept


def main() -> None:
    found = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            found[family] = _rounded(answers(family, Path(folder)))
    lines = [f"{json.dumps(family)}: {json.dumps(rows, separators=(',', ':'))}" for family, rows in found.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    main()
