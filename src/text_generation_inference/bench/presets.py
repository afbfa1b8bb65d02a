"""Rows that others published, to be measured here with the same formula.

Pure Python. The figures are those of optimum-habana 1.11.1 in FP8 (Gaudi software 1.16): iterations x batch x
new tokens / wall time, warm-up excluded.
"""

from typing import Any

import msgspec

from text_generation_inference.bench.results import Published, Row


class PresetRow(msgspec.Struct, frozen=True):
    row: Row
    published: Published | None = None


class Preset(msgspec.Struct, frozen=True):
    text: str
    shape: str | None  # None: the embedded model
    settings: dict[str, Any]  # fields of `ServerConfig`; flags go first
    iterations: int
    rows: list[PresetRow]


_FP8 = {"quantize": "fp8", "kv_cache_dtype": "fp8_e4m3fn"}
_PUBLISHED_ITERATIONS = 5  # the default of the program that the published figures come from


def _gaudi2(model: str, shape: str, rows: list[tuple[int, int, int, int, float]]) -> Preset:
    """Rows are (inputs, outputs, cards, batch, tokens per second)."""
    found = [
        PresetRow(Row(inputs, outputs, batch), Published(f"{model} FP8", "Gaudi 2", cards, tokens_per_s))
        for inputs, outputs, cards, batch, tokens_per_s in rows
    ]
    return Preset(f"{model} in FP8, as published for Gaudi 2", shape, _FP8, _PUBLISHED_ITERATIONS, found)


PRESETS: dict[str, Preset] = {
    "gaudi2-llama-2-7b": _gaudi2(
        "Llama-2-7B",
        "llama-2-7b",
        [
            (128, 128, 1, 1230, 13163),
            (128, 2048, 1, 163, 4777),
            (2048, 128, 1, 94, 1291),
            (2048, 2048, 1, 81, 1943),
        ],
    ),
    "gaudi2-llama-2-70b": _gaudi2(
        "Llama-2-70B",
        "llama-2-70b",
        [
            (128, 128, 2, 1750, 2727),
            (128, 2048, 4, 750, 7422),
            (2048, 128, 2, 95, 276),
            (2048, 2048, 2, 78, 958),
        ],
    ),
    "gaudi2-mistral-7b": _gaudi2(
        "Mistral-7B-Instruct-v0.2",
        "mistral-7b",
        [
            (128, 128, 1, 896, 13112),
            (128, 2048, 1, 120, 7947),
            (2048, 128, 1, 120, 1360),
            (2048, 2048, 1, 44, 3143),
        ],
    ),
    "gaudi2-small": Preset(
        "the same four kinds of work in small, on the embedded model; nothing is published for it",
        None,
        {},
        2,
        [PresetRow(row) for row in (Row(16, 16, 32), Row(16, 128, 8), Row(128, 16, 8), Row(128, 128, 4))],
    ),
}
