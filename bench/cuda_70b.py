# ruff: noqa: E402
"""Llama-2-70B with weights and cache in FP8: the kernels of its decode steps, and whole layers.

    python bench/cuda_70b.py [--only vector,few,attention,gate,rotary,layers] [--json FILE]

Microseconds of one call, medians over replays of a captured graph whose calls go through more memory than the chip's
cache holds: what is chosen ("now") beside the rule for sizes that nobody measured ("rule"). "away" is the distance from
the definition in plain torch, of its length; layers are not compared. `--trial`: tiny sizes through
Triton's interpreter, nothing is timed.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRIAL = "--trial" in sys.argv
if TRIAL:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from text_generation_inference.bench.floor import RATES, graph_ms
from text_generation_inference.kernels import fp8, reference
from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.kernels.fp8 import FP8, Fp8Rows, Fp8Weight, ScaledRows
from text_generation_inference.kernels.fused_decode import FusedLayer
from text_generation_inference.kernels.triton import norms_rotary
from text_generation_inference.kernels.triton.attention import DecodeChoice, PagedAttention
from text_generation_inference.kernels.triton.fused_decode import SingleRowDecode
from text_generation_inference.kernels.triton.gemv_fp8 import GemvFp8, Shape
from text_generation_inference.kernels.triton.linear import TritonLinear
from text_generation_inference.kernels.triton.quantize import quantize_rows
from text_generation_inference.kernels.triton.small_gemm import SmallGemm, choose_tiling

DEVICE = torch.device("cpu" if TRIAL else "cuda")
DTYPE = torch.float16 if TRIAL else torch.bfloat16  # the interpreter has no product in bfloat16
PROCESSORS = 4 if TRIAL else torch.cuda.get_device_properties(0).multi_processor_count
CAPABILITY = (0, 0) if TRIAL else torch.cuda.get_device_capability()
HIDDEN, WIDTH, HEADS, KV_HEADS, D = (256, 896, 8, 1, 32) if TRIAL else (8192, 28672, 64, 8, 128)
LAYERS, BLOCK_SIZE, EPS = 1 if TRIAL else 4, 16, 1e-5
AT_LEAST = 200 << 20  # bytes that the calls of a graph go through
LIMIT = 0.08 if TRIAL else 0.03  # the interpreter cuts bits off where hardware rounds
RATE = RATES["NVIDIA H200"]
MATRICES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * D, HIDDEN),
    "o": (HIDDEN, HEADS * D),
    "gate_up": (2 * WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
}


@dataclass(slots=True)
class Work:
    """One op of one size: `run(number, way)` computes it on the buffers of that number."""

    name: str
    num_bytes: float  # read and written at least
    buffers: int
    run: Callable[[int, Any], Any]
    wanted: Callable[[], Any] | None  # of buffer 0; None: not compared
    ways: dict[str, Any] = field(default_factory=lambda: {"now": None})
    operations: float = 0.0


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def plain(found: Any) -> Tensor:
    if isinstance(found, tuple):
        return torch.cat([plain(each).flatten() for each in found])
    return fp8.dequantize_rows(found).float() if isinstance(found, Fp8Rows) else found.float()


def count_for(num_bytes: float) -> int:
    return 1 if TRIAL else min(32, max(2, int(-(-AT_LEAST // num_bytes))))


def sizes(*pairs: tuple[int, int]) -> list[tuple[int, int]]:
    return [(min(rows, 5), min(tokens, 20)) for rows, tokens in pairs[:1]] if TRIAL else list(pairs)


def make_weight(n: int, k: int) -> Fp8Weight:
    data = torch.empty((n, k), device=DEVICE, dtype=FP8)
    for part in data.split(4096):
        part.copy_(torch.randn(part.shape, device=DEVICE, dtype=DTYPE) * 32)
    return Fp8Weight(data, torch.rand(n, device=DEVICE) * 1e-3 + 1e-4, dtype=DTYPE)


def make_batch(rows: int, tokens: int) -> Batch:
    per_row = -(-tokens // BLOCK_SIZE)
    tables = (torch.randperm(rows * per_row, device=DEVICE) + 1).to(torch.int32).view(rows, per_row)
    last = tables[:, (tokens - 1) // BLOCK_SIZE].long() * BLOCK_SIZE + (tokens - 1) % BLOCK_SIZE
    places = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    return Batch(
        torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        torch.full((rows,), tokens - 1, dtype=torch.int64, device=DEVICE),
        last,
        torch.full((rows,), tokens, dtype=torch.int32, device=DEVICE),
        PagedMeta(tables, rows, [], [], tokens, places),
    )


def make_caches(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    """By head in memory, as the engine keeps it."""
    shape = (rows * -(-tokens // BLOCK_SIZE) + 1, KV_HEADS, BLOCK_SIZE, D)
    keys, values = (torch.randn(shape, device=DEVICE, dtype=DTYPE).to(FP8).transpose(1, 2) for _ in range(2))
    return keys, values


def rotary_table() -> Tensor:
    angles = torch.rand(4096, D // 2, device=DEVICE) * 6
    return torch.cat((angles.cos(), angles.sin()), -1)


def vector() -> Iterator[Work]:
    product = GemvFp8(PROCESSORS)
    for name, (n, k) in MATRICES.items():
        gate, norm = "silu" if name == "gate_up" else None, (random(k), EPS) if name in ("qkv", "gate_up") else None
        stored = [make_weight(n, k) for _ in range(count_for(n * k))]
        x = random(1, k)

        def run(i: int, way: Any, x: Tensor = x, stored: Any = stored, norm: Any = norm, gate: Any = gate) -> Tensor:
            out = torch.empty((1, stored[0].shape[0] // (2 if gate else 1)), device=DEVICE, dtype=DTYPE)
            product(x, stored[i], out, norm=norm, gate=gate, shape=way)
            return out

        def wanted(x: Tensor = x, stored: Any = stored, norm: Any = norm, gate: Any = gate) -> Any:
            rows = quantize_rows(norms_rotary.rms_norm(x, *norm) if norm else x, stored[0])
            y = fp8.linear(rows, stored[0], None, DTYPE)
            return reference.silu_mul(y) if gate else y

        long = {"rule": Shape(2, 3, 16, 1)} if name == "down" else {}
        if TRIAL and long:
            long = {"7 parts": Shape(4, 3, 4, 3, parts=7)}
        yield Work(f"one row {name}", n * k, len(stored), run, wanted, {"now": None, **long})


def few() -> Iterator[Work]:
    op = SmallGemm(PROCESSORS, measured=CAPABILITY == (9, 0))
    for name, (n, k) in MATRICES.items():
        stored = [make_weight(n, k) for _ in range(count_for(n * k))]
        for rows, _ in sizes((64, 0), (32, 0)):
            x = fp8.quantize_rows(random(rows, k), stored[0])

            def run(i: int, way: Any, x: Fp8Rows = x, stored: Any = stored) -> Tensor:
                out = torch.empty((x.shape[0], stored[0].shape[0]), device=DEVICE, dtype=DTYPE)
                op(x, stored[i], out, None, way)
                return out

            def wanted(x: Fp8Rows = x, stored: Any = stored) -> Tensor:
                return fp8.linear(x, stored[0], None, DTYPE)

            ways = {"now": None, "rule": choose_tiling(rows, n, k, PROCESSORS)}
            yield Work(f"{rows} rows {name}", n * k, len(stored), run, wanted, ways, 2.0 * rows * n * k)


def attention() -> Iterator[Work]:
    for rows, tokens in sizes((256, 192), (64, 192), (32, 192), (32, 2112), (1, 192)):
        batch, num_bytes = make_batch(rows, tokens), rows * tokens * KV_HEADS * D * 2
        q, caches = random(rows, HEADS, D), [make_caches(rows, tokens) for _ in range(min(8, count_for(num_bytes)))]
        op = PagedAttention(PROCESSORS)

        def run(i: int, way: Any, op: Any = op, q: Tensor = q, caches: Any = caches, batch: Batch = batch) -> Tensor:
            op.decode_choice = way
            return op(q, None, None, *caches[i], batch, D**-0.5, kv_scales=(0.5, 0.25))

        def wanted(q: Tensor = q, caches: Any = caches, batch: Batch = batch) -> Tensor:
            return reference.attention(q, None, None, *caches[0], batch, D**-0.5, kv_scales=(0.5, 0.25))

        ways = {"now": None, **({"one part": DecodeChoice(64, 2, 3, 1)} if rows == 32 else {})}
        yield Work(f"attention {rows} x {tokens}", num_bytes, len(caches), run, wanted, ways)


def product_like(rows: int, width: int) -> Any:
    """What the op before gives: the library's product leaves its scales to the op after it."""
    data = random(rows, width)
    if rows <= 64 or rows > 512:
        return data
    return ScaledRows(data, torch.rand(rows, device=DEVICE) + 0.5, torch.rand(width, device=DEVICE) + 0.5)


def gate() -> Iterator[Work]:
    down = Fp8Weight(torch.empty((16, WIDTH), device=DEVICE, dtype=FP8), torch.ones(16, device=DEVICE))
    for rows, _ in sizes((256, 0), (64, 0), (4096, 0)):
        given = [product_like(rows, 2 * WIDTH) for _ in range(count_for(rows * WIDTH * 5))]

        def run(i: int, _: Any, given: Any = given) -> Any:
            return norms_rotary.silu_mul(given[i], down)

        def wanted(given: Any = given) -> Any:
            return reference.silu_mul(given[0], down)

        yield Work(f"gate {rows}", rows * WIDTH * 5, len(given), run, wanted)


def rotary() -> Iterator[Work]:
    cos_sin, width = rotary_table(), MATRICES["qkv"][0]
    for rows, tokens in sizes((256, 192), (64, 192)):
        batch, caches = make_batch(rows, tokens), make_caches(rows, tokens)
        given = [product_like(rows, width) for _ in range(count_for(rows * width * 3.5))]
        first = fp8.split_scales(given[0])[0].clone()

        def run(
            i: int, way: Any, given: Any = given, batch: Batch = batch, caches: Any = caches, first: Tensor = first
        ) -> Any:
            """Each timed call turns its queries further, which takes as long."""
            data, scales = fp8.split_scales(given[i])
            timed = not TRIAL and torch.cuda.is_current_stream_capturing()
            if not timed:
                data.copy_(first)
            q, k, v = data.view(data.shape[0], -1, D).split((HEADS, KV_HEADS, KV_HEADS), 1)
            q = (way or norms_rotary.rotary_and_cache)(q, k, v, cos_sin, batch, *caches, scales=scales)
            where = batch.kv_index // BLOCK_SIZE, batch.kv_index % BLOCK_SIZE
            return q if timed else (q, *(each.view(torch.uint8)[where].view(FP8) for each in caches))

        def wanted(run: Any = run) -> Any:
            return run(0, reference.rotary_and_cache)

        yield Work(f"rotary {rows}", rows * width * 3.5, len(given), run, wanted)


def layers() -> Iterator[Work]:
    """One op after the other as the decoder calls them, where kernels find what the one before left in the cache."""
    made = [{name: make_weight(n, k) for name, (n, k) in MATRICES.items()} for _ in range(LAYERS)]
    gain, cos_sin = random(HIDDEN).abs() + 0.5, rotary_table()
    linear, op, size = TritonLinear(PROCESSORS, CAPABILITY), PagedAttention(PROCESSORS), sum(map(_area, MATRICES))
    one = make_batch(1, 20 if TRIAL else 192)
    fused = [FusedLayer(gain, w["qkv"], w["o"], gain, w["gate_up"], w["down"], *make_caches(1, 192)) for w in made]
    others: Any = (None, None, None)  # few bits, experts, latents
    alone = SingleRowDecode(fused, gain, cos_sin, HEADS, EPS, D**-0.5, "silu", op, GemvFp8(PROCESSORS), *others)
    x = random(1, HIDDEN)
    yield Work(f"{LAYERS} layers, one row", LAYERS * size, 1, lambda _, __: alone(x, one), None)
    for rows, tokens in sizes((64, 192), (256, 192), (32, 2112)):
        batch, caches = make_batch(rows, tokens), [make_caches(rows, tokens) for _ in made]
        start = random(rows, HIDDEN) * 0.1, random(rows, HIDDEN)

        def run(_: int, __: Any, batch: Batch = batch, caches: Any = caches, start: Any = start) -> Tensor:
            h, stream = start
            for w, cache in zip(made, caches, strict=True):
                normed, stream = norms_rotary.add_rms_norm(h, stream, gain, EPS, w["qkv"])
                data, scales = fp8.split_scales(linear.linear_unscaled(normed, w["qkv"], DTYPE))
                q, k, v = data.view(data.shape[0], -1, D).split((HEADS, KV_HEADS, KV_HEADS), 1)
                q = norms_rotary.rotary_and_cache(q, k, v, cos_sin, batch, *cache, scales=scales)
                h = linear.linear_unscaled(op(q, k, v, *cache, batch, D**-0.5), w["o"], DTYPE)
                normed, stream = norms_rotary.add_rms_norm(h, stream, gain, EPS, w["gate_up"])
                gated = norms_rotary.silu_mul(linear.linear_unscaled(normed, w["gate_up"], DTYPE), w["down"])
                h = linear.linear_unscaled(gated, w["down"], DTYPE)
            return stream

        reads = LAYERS * (size + rows * tokens * KV_HEADS * D * 2)
        name = f"{LAYERS} layers, {rows} rows x {tokens}"
        yield Work(name, reads, 1, run, None, operations=2.0 * rows * size * LAYERS)


def _area(name: str) -> int:
    n, k = MATRICES[name]
    return n * k


def measure(work: Work) -> dict[str, Any]:
    wanted = None if work.wanted is None else plain(work.wanted())
    floor = 1e6 * max(work.num_bytes / RATE.read_bytes_per_s, work.operations / RATE.fp8_operations_per_s)
    result: dict[str, Any] = {"op": work.name, "floor": round(floor, 1)}
    calls = -(-8 // work.buffers) * work.buffers
    for words, way in work.ways.items():
        found = plain(work.run(0, way))
        if wanted is not None:
            away = float((found - wanted).norm() / wanted.norm())
            if not away < LIMIT:
                sys.exit(f"{work.name}, {words}: {away:.5f} away from the definition")
            result[f"{words}, away"] = round(away, 5)
        if not TRIAL:
            ms = graph_ms(lambda way=way: [work.run(i % work.buffers, way) for i in range(calls)] and None, 8)
            result[words] = round(1e3 * ms / calls, 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {each.__name__: each for each in (vector, few, attention, gate, rotary, layers)}
    parser.add_argument("--only", default=",".join(parts))
    parser.add_argument("--trial", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.manual_seed(0)
    results = []
    with torch.inference_mode():
        for name in options.only.split(","):
            for work in parts[name]():
                results.append(measure(work))
                print("  ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
