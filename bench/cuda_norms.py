# ruff: noqa: B023
"""What stands between the matrix products of a layer: torch's kernels beside ours, checked first. About 20 s.

    python bench/cuda_norms.py

Microseconds of one call inside a captured graph of 32, in bf16 and with rows quantised for the next matrix.
"""

from collections.abc import Callable
from typing import Any

import torch

from text_generation_inference.bench.floor import graph_ms
from text_generation_inference.kernels import fp8, reference
from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.kernels.fp8 import Fp8Rows
from text_generation_inference.kernels.head_norms import HeadNorms
from text_generation_inference.kernels.triton import norms_rotary

CALLS = 32
ROWS = (1, 64, 256, 2048)
HIDDEN, WIDTH = 4096, 16384


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def plain(found: Any) -> torch.Tensor:
    first = found[0] if isinstance(found, tuple) else found
    return fp8.dequantize_rows(first).float() if isinstance(first, Fp8Rows) else first.float()


def compare(name: str, rows: int, theirs: Callable[[], Any], ours: Callable[[], Any], limit: float) -> None:
    expected, found = plain(theirs()), plain(ours())
    away = float((found - expected).norm() / expected.norm())
    times = [1e3 * graph_ms(lambda: [work() for _ in range(CALLS)] and None) / CALLS for work in (theirs, ours)]
    said = "ok" if away < limit else "WRONG"
    print(f"{name:<24}{rows:>6}{times[0]:>10.1f}{times[1]:>10.1f}   {away:.4f} {said}", flush=True)


def rotary(rows: int) -> None:
    """Queries and keys normalised head by head, rotated and cached, as Qwen3-30B has them."""
    heads, kv_heads, d = 32, 4, 128
    fused = random(rows, heads + 2 * kv_heads, d)
    angles = torch.rand(4096, d // 2, device="cuda") * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    norms = HeadNorms(random(d).abs() + 0.5, random(d).abs() + 0.5, 1e-6)
    caches = [torch.zeros(rows // 16 + 1, 16, kv_heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    index = torch.arange(rows, device="cuda")
    lens = torch.ones(rows, device="cuda", dtype=torch.int32)
    tables = torch.zeros((rows, 1), device="cuda", dtype=torch.int32)
    batch = Batch(index, index, index, lens, PagedMeta(tables, rows, [], [], 1))

    def run(op: Any, q_k_v: torch.Tensor) -> Any:
        return op(*q_k_v.split((heads, kv_heads, kv_heads), 1), cos_sin, batch, *caches, norms=norms)

    # Ours rotates where the queries are: each call a bit further, which takes as long.
    scratch = fused.clone()
    expected = run(reference.rotary_and_cache, fused)
    away = float((run(norms_rotary.rotary_and_cache, scratch) - expected).float().norm() / expected.float().norm())
    ways = ((reference.rotary_and_cache, fused), (norms_rotary.rotary_and_cache, scratch))
    times = [1e3 * graph_ms(lambda: [run(*way) for _ in range(CALLS)] and None) / CALLS for way in ways]
    said = "ok" if away < 0.02 else "WRONG"
    print(f"{'norms, rotation, cache':<24}{rows:>6}{times[0]:>10.1f}{times[1]:>10.1f}   {away:.4f} {said}", flush=True)


def main() -> None:
    print(f"{'':<24}{'rows':>6}{'torch us':>10}{'ours us':>10}   error")
    gain, shift = random(HIDDEN), random(HIDDEN)
    narrow, wide = (fp8.quantize_weight(random(128, size)) for size in (HIDDEN, WIDTH))
    with torch.inference_mode():
        for rows in ROWS:
            x, stream, inner = random(rows, HIDDEN), random(rows, HIDDEN), random(rows, WIDTH)
            for words, quantize_for, limit in (("", None, 0.01), (", fp8", narrow, 0.03)):
                given = (x, stream, gain, shift, 1e-5, quantize_for)
                compare(
                    f"add, LayerNorm{words}",
                    rows,
                    lambda: reference.add_layer_norm(*given),
                    lambda: norms_rotary.add_layer_norm(*given),
                    limit,
                )
            for activation in ("gelu", "gelu_tanh", "relu"):
                for words, quantize_for, limit in (("", None, 0.01), (", fp8", wide, 0.03)):
                    theirs, ours = getattr(reference, activation), getattr(norms_rotary, activation)
                    compare(
                        activation + words,
                        rows,
                        lambda: theirs(inner, quantize_for),
                        lambda: ours(inner, quantize_for),
                        limit,
                    )
            rotary(rows)


if __name__ == "__main__":
    main()
