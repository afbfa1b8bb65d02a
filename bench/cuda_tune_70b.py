# ruff: noqa: B023, E402, E501
"""Llama-2-70B in FP8: every kernel of its decode steps in other shapes than the chosen one, checked first.

    python bench/cuda_tune_70b.py [--only attention,gate,norms,vector,few,one,steps] [--json FILE]

Microseconds of one call, the median of replays of a captured graph whose calls go through more memory than the chip's
cache holds; then whole layers, of one row (`one`) and of many (`steps`), where kernels find what the one before has left
in the cache. "away" is the distance from the definition in plain torch, of its length. `--trial`: tiny sizes, through
Triton's interpreter, where nothing is timed.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRIAL = "--trial" in sys.argv
if TRIAL:
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from text_generation_inference.bench.floor import graph_ms
from text_generation_inference.kernels import fp8, reference
from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.kernels.fp8 import FP8, Fp8Rows, Fp8Weight, ScaledRows
from text_generation_inference.kernels.fused_decode import FusedLayer
from text_generation_inference.kernels.triton import launch, norms_rotary, quantize, small_gemm
from text_generation_inference.kernels.triton.attention import DecodeChoice, PagedAttention, choose_decode
from text_generation_inference.kernels.triton.fused_decode import SingleRowDecode
from text_generation_inference.kernels.triton.gemv_fp8 import GemvFp8, Shape
from text_generation_inference.kernels.triton.linear import TritonLinear
from text_generation_inference.kernels.triton.small_gemm import SmallGemm, Tiling

DEVICE = torch.device("cpu" if TRIAL else "cuda")
DTYPE = torch.float16 if TRIAL else torch.bfloat16  # the interpreter's bfloat16 is not rounded as hardware does it
PROCESSORS = 4 if TRIAL else torch.cuda.get_device_properties(0).multi_processor_count
HIDDEN, WIDTH, HEADS, KV_HEADS, D = (256, 896, 8, 1, 32) if TRIAL else (8192, 28672, 64, 8, 128)
BLOCK_SIZE, EPS = 16, 1e-5
COPY, OPERATIONS = 4.2e12, 1.3e15
AT_LEAST = 200 << 20  # bytes that the calls of a graph go through
LAYERS = 1 if TRIAL else 4
PATIENCE = 100  # seconds
MATRICES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * D, HIDDEN),
    "o": (HIDDEN, HEADS * D),
    "gate_up": (2 * WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
}
STARTED = time.perf_counter()


@dataclass(slots=True)
class Work:
    """One op of one size: `run(number, way)` computes it on the buffers of that number."""

    name: str
    num_bytes: float  # read and written at least
    buffers: int
    run: Callable[[int, Any], Any]
    wanted: Callable[[], Any]  # of buffer 0
    ways: dict[str, Any]
    limit: float = 0.02
    operations: float = 0.0

    @property
    def floor(self) -> float:
        return 1e6 * max(self.num_bytes / COPY, self.operations / OPERATIONS)


RESULTS: list[dict[str, Any]] = []


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def plain(found: Any) -> torch.Tensor:
    if isinstance(found, tuple):
        return torch.cat([plain(each).flatten() for each in found])
    return fp8.dequantize_rows(found).float() if isinstance(found, Fp8Rows) else found.float()


def make_weight(n: int, k: int) -> Fp8Weight:
    data = torch.empty((n, k), device=DEVICE, dtype=FP8)
    for part in data.split(4096):
        part.copy_(torch.randn(part.shape, device=DEVICE, dtype=DTYPE) * 32)
    return Fp8Weight(data, torch.rand(n, device=DEVICE) * 1e-3 + 1e-4, dtype=DTYPE)


def timing() -> bool:
    return not TRIAL and torch.cuda.is_current_stream_capturing()


def how_many(num_bytes: float) -> int:
    return 1 if TRIAL else max(2, int(-(-AT_LEAST // num_bytes)))


def measure(works: list[Work]) -> None:
    for work in works:
        wanted, times = plain(work.wanted()), {}
        calls = -(-8 // work.buffers) * work.buffers
        for words, way in work.ways.items():
            if times and time.perf_counter() - STARTED > PATIENCE:
                break
            try:
                found = plain(work.run(0, way))
                away = float((found - wanted).norm() / wanted.norm())
                if TRIAL:
                    us = 0.0
                else:
                    us = (
                        1e3
                        * graph_ms(lambda: [work.run(i % work.buffers, way) for i in range(calls)] and None, 8)
                        / calls
                    )
            except Exception as error:  # no room for it
                print(f"  {work.name} {words}: {type(error).__name__} {str(error)[:100]}", flush=True)
                continue
            times[words] = us
            said = {"op": work.name, "way": words, "us": round(us, 2), "away": round(away, 5)}
            RESULTS.append({**said, "floor": round(work.floor, 1)})
            if not away < (0.08 if TRIAL else work.limit):  # the interpreter cuts bits off where hardware rounds
                print(f"  {work.name} {words}: WRONG, away {away:.5f}", flush=True)
                times.pop(words)
        first = next(iter(times.items()), ("nothing", 0.0))
        best = sorted(times.items(), key=lambda item: item[1])[:5]
        shown = "  ".join(f"{us:.1f} [{words}]" for words, us in best)
        print(f"{work.name:<28} floor {work.floor:6.1f}  now {first[1]:6.1f}  best {shown}", flush=True)


def compile_all(works: list[Work]) -> None:
    if TRIAL:
        return
    from text_generation_inference.kernels.triton.compile_ahead import compile_only
    from text_generation_inference.kernels.triton.compile_workers import Workers

    began = time.perf_counter()
    try:
        with compile_only(16, Workers(), load=False):
            for work in works:
                for way in work.ways.values():
                    work.run(0, way)
    except Exception as error:  # what could not be compiled fails again, alone, where it is timed
        print(f"compiling: {type(error).__name__} {str(error)[:300]}", flush=True)
    torch.cuda.synchronize()
    print(f"-- compiled in {time.perf_counter() - began:.0f} s", flush=True)


@contextmanager
def changed(module: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


# Attention --------------------------------------------------------------------------------------------------------


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


def make_cache(rows: int, tokens: int) -> torch.Tensor:
    """By head in memory, as the engine keeps it."""
    blocks = rows * -(-tokens // BLOCK_SIZE) + 1
    made = torch.empty((blocks, KV_HEADS, BLOCK_SIZE, D), dtype=FP8, device=DEVICE)
    made.copy_(torch.randn(made.shape, device=DEVICE))
    return made.transpose(1, 2)


def attention() -> list[Work]:
    works = []
    several = [
        (32, 1, 5),
        (32, 1, 3),
        (32, 1, 4),
        (64, 1, 3),
        (64, 2, 3),
        (64, 2, 4),
        (64, 4, 3),
        (32, 2, 4),
        (128, 4, 3),
    ]
    few = [(64, 2, 3), (64, 4, 3), (32, 1, 4), (128, 4, 3)]
    alone = [(64, 2, 3), (32, 2, 2), (32, 1, 2), (64, 4, 2), (16, 1, 2)]
    for rows, tokens, shapes, parts in (
        (256, 192, several, (1,)), (64, 192, several, (1, 2)), (32, 2112, few, (1, 2, 4)), (1, 192, alone, (32, 8)),
    ):  # fmt: skip
        if TRIAL:
            rows, shapes = min(rows, 4), shapes[:2]
        usual = choose_decode(rows, KV_HEADS, HEADS // KV_HEADS, D, DTYPE, FP8, PROCESSORS)
        ways = {
            f"{n} tokens, {w} warps, {s} stages, {p} parts": DecodeChoice(n, w, s, p)
            for p in parts
            for n, w, s in shapes
        }
        batch, num_bytes = make_batch(rows, tokens), rows * tokens * KV_HEADS * D * 2
        count = min(8, how_many(num_bytes))
        q = random(rows, HEADS, D)
        caches = [(make_cache(rows, tokens), make_cache(rows, tokens)) for _ in range(count)]
        op = PagedAttention(PROCESSORS, bulk_copies=not TRIAL)

        def run(number: int, way: Any, op: Any = op, q: Any = q, caches: Any = caches, batch: Any = batch) -> Any:
            op.decode_choice = way
            return op(q, None, None, *caches[number], batch, D**-0.5, kv_scales=(0.5, 0.25))

        def wanted(q: Any = q, caches: Any = caches, batch: Any = batch) -> Any:
            return reference.attention(q, None, None, *caches[0], batch, D**-0.5, kv_scales=(0.5, 0.25))

        works.append(Work(f"attention {rows} x {tokens}", num_bytes, count, run, wanted, {"now": usual, **ways}))
    return works


# Between products -------------------------------------------------------------------------------------------------


def product_like(rows: int, width: int, scaled: bool) -> Any:
    data = random(rows, width)
    if not scaled:
        return data
    return ScaledRows(data, torch.rand(rows, device=DEVICE) + 0.5, torch.rand(width, device=DEVICE) + 0.5)


def gate() -> list[Work]:
    options = [{"maxnreg": 64}, {"num_warps": 32}, {"num_warps": 8}]
    tiles = [(8, 1024, 8, 4096, 4), (16, 512, 8, 4096, 4), (16, 1024, 8, 8192, 8), (8, 512, 4, 2048, 2),
             (4, 1024, 4, 4096, 8), (16, 256, 4, 4096, 4), (4, 2048, 8, 8192, 16)]  # fmt: skip
    ways: dict[str, Any] = {"now": ({}, None)}
    ways |= {" ".join(f"{k} {v}" for k, v in each.items()): (each, None) for each in ([] if TRIAL else options)}
    ways |= {f"tiles {each}": ({}, each) for each in tiles[: 2 if TRIAL else None]}
    quantized_for = Fp8Weight(torch.empty((16, WIDTH), device=DEVICE, dtype=FP8), torch.ones(16, device=DEVICE))
    works = []
    for rows, scaled in ((256, True), (64, False), (4096, False)):
        rows = min(rows, 5) if TRIAL else rows
        num_bytes = rows * WIDTH * 5
        given = [product_like(rows, 2 * WIDTH, scaled) for _ in range(how_many(num_bytes))]

        def run(number: int, way: Any, given: Any = given) -> Any:
            with changed(norms_rotary, GATE_OPTIONS=way[0], GATE_TILE=way[1]):
                return norms_rotary.silu_mul(given[number], quantized_for)

        def wanted(given: Any = given) -> Any:
            return reference.silu_mul(given[0], quantized_for)

        name = f"gate {rows}{' scaled' if scaled else ''}"
        works.append(Work(name, num_bytes, len(given), run, wanted, ways, 0.03))
    return works


def norms() -> list[Work]:
    works = []
    narrow = Fp8Weight(torch.empty((16, HIDDEN), device=DEVICE, dtype=FP8), torch.ones(16, device=DEVICE))
    gain = random(HIDDEN).abs() + 0.5
    angles = torch.rand(4096, D // 2, device=DEVICE) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    by_warps = {"now": {}, **{f"{warps} warps": {"num_warps": warps} for warps in (4, 8, 32)}}
    turns = {
        f"{hb} heads, {w} warps": (hb, w)
        for hb, w in ((8, 4), (8, 2), (8, 1), (4, 1), (4, 2), (16, 8), (16, 2), (2, 1))
    }
    for rows, scaled in ((256, True), (64, False)):
        rows = min(rows, 5) if TRIAL else rows
        num_bytes = rows * HIDDEN * 7
        count = min(32, how_many(num_bytes))
        given = [(product_like(rows, HIDDEN, scaled), random(rows, HIDDEN)) for _ in range(count)]

        def run(number: int, way: Any, given: Any = given) -> Any:
            with changed(norms_rotary, NORM_OPTIONS=way):
                return norms_rotary.add_rms_norm(*given[number], gain, EPS, narrow)

        def wanted(given: Any = given) -> Any:
            return reference.add_rms_norm(*given[0], gain, EPS, narrow)

        works.append(Work(f"norm {rows}", num_bytes, count, run, wanted, by_warps, 0.03))
        rest = [random(rows, HIDDEN) for _ in range(count)]

        def shrink(number: int, way: Any, rest: Any = rest) -> Any:
            with changed(quantize, warps_for=way or quantize.warps_for):
                return quantize.quantize_rows(rest[number], narrow)

        by_number = {"now": None, **{f"{warps} warps": (lambda _, warps=warps: warps) for warps in (4, 8, 32)}}
        works.append(
            Work(f"quantize {rows}", rows * HIDDEN * 3, count, shrink, lambda rest=rest: fp8.quantize_rows(rest[0], narrow),
                 by_number, 0.03)
        )  # fmt: skip
        batch, cache = make_batch(rows, 192), [make_cache(rows, 192) for _ in range(2)]
        fused = [product_like(rows, MATRICES["qkv"][0], scaled) for _ in range(count)]
        saved = fp8.split_scales(fused[0])[0].clone()

        def rotate(number: int, way: Any, op: Any = norms_rotary.rotary_and_cache, fused: Any = fused, batch: Any = batch,
                   cache: Any = cache, saved: Any = saved, rows: int = rows) -> Any:  # fmt: skip
            """Where the queries are: each call turns them further, which takes as long."""
            data, scales = fp8.split_scales(fused[number])
            if not timing():
                data.copy_(saved)
            q, k, v = data.view(rows, -1, D).split((HEADS, KV_HEADS, KV_HEADS), 1)
            with changed(norms_rotary, ROTARY_OPTIONS=way):
                q = op(q, k, v, cos_sin, batch, *cache, scales=scales)
            if timing():
                return None
            where = batch.kv_index // BLOCK_SIZE, batch.kv_index % BLOCK_SIZE
            return (q, *(each.view(torch.uint8)[where].view(FP8).float() for each in cache))

        works.append(
            Work(f"rotary {rows}", rows * MATRICES["qkv"][0] * 3.5, count, rotate,
                 lambda rotate=rotate: rotate(0, None, reference.rotary_and_cache), {"now": None, **turns}, 0.03)
        )  # fmt: skip
    return works


# Products ---------------------------------------------------------------------------------------------------------


def vector() -> list[Work]:
    short = [(2, 3, 4, 3, 1, 1), (2, 3, 4, 3, 1, 2), (2, 4, 4, 3), (4, 3, 8, 2), (4, 3, 8, 2, 1, 1), (2, 3, 4, 4, 1, 1),
             (1, 4, 4, 4, 1, 2), (2, 5, 4, 3), (2, 6, 4, 2), (2, 5, 4, 3, 1, 2), (4, 4, 8, 2)]  # fmt: skip
    long = [(2, 4, 16, 1), (2, 4, 16, 1, 1, 1), (1, 7, 16, 1), (1, 5, 16, 1),
            (1, 3, 4, 3, 2), (2, 3, 8, 2, 2), (1, 4, 4, 3, 2), (2, 3, 8, 2, 2, 1),
            (2, 3, 4, 3, 4), (2, 3, 4, 3, 4, 1), (2, 5, 4, 3, 4), (4, 3, 8, 2, 4),
            (4, 3, 4, 3, 7), (4, 3, 4, 3, 7, 1), (4, 5, 4, 3, 7), (4, 3, 4, 4, 7)]  # fmt: skip
    product = GemvFp8(PROCESSORS)
    works = []
    for name, (n, k) in MATRICES.items():
        shapes = [Shape(*each) for each in (long if name == "down" else short)]
        gate, norm = "silu" if name == "gate_up" else None, (random(k), EPS) if name in ("qkv", "gate_up") else None
        stored = [make_weight(n, k) for _ in range(how_many(n * k))]
        x, residual = random(1, k), random(1, n // (2 if gate else 1))
        scratch = residual.clone()

        def run(number: int, way: Any, x: Any = x, stored: Any = stored, residual: Any = residual, norm: Any = norm,
                gate: Any = gate, scratch: Any = scratch) -> Any:  # fmt: skip
            out = scratch if timing() else residual.clone()
            product(x, stored[number], out, norm=norm, gate=gate, add=gate is None and norm is None, shape=way)
            return out

        def wanted(
            x: Any = x, stored: Any = stored, residual: Any = residual, norm: Any = norm, gate: Any = gate
        ) -> Any:
            rows = quantize.quantize_rows(norms_rotary.rms_norm(x, *norm) if norm else x, stored[0])
            y = fp8.linear(rows, stored[0], None, DTYPE)
            if gate:
                return reference.silu_mul(y)
            return y if norm else y + residual

        ways: dict[str, Any] = {"now": None, **{str(tuple(shape)): shape for shape in shapes[:: 3 if TRIAL else 1]}}
        works.append(Work(f"one row {name}", n * k, len(stored), run, wanted, ways))
    return works


TILINGS = {
    "qkv": [(64, 128, 1, 6), (64, 128, 2, 4), (128, 128, 2, 4, 8), (128, 128, 3, 4, 8), (128, 128, 5, 3, 8),
            (128, 128, 3, 4, 4), (64, 128, 1, 4, 4, True), (64, 128, 1, 6, 4, True), (64, 256, 2, 3, 4, True),
            (128, 128, 3, 4, 8, True), (128, 128, 3, 4, 4, True), (128, 128, 5, 3, 4, True), (64, 128, 3, 4, 4, True)],
    "gate_up": [(64, 128, 1, 3), (64, 128, 1, 6), (128, 128, 1, 4, 8), (128, 128, 1, 4, 4), (128, 128, 1, 3, 4),
                (128, 128, 2, 4, 8), (64, 128, 1, 4, 4, True), (64, 256, 1, 3, 4, True), (128, 128, 1, 4, 4, True),
                (128, 128, 1, 4, 8, True), (128, 128, 1, 3, 4, True), (128, 256, 1, 3, 8, True)],
    "o": [(64, 128, 2, 4), (64, 128, 3, 4), (128, 128, 4, 4, 8), (128, 128, 4, 4, 4), (128, 128, 6, 3, 8),
          (64, 256, 2, 3, 4, True), (64, 128, 2, 6, 4, True), (128, 128, 4, 4, 4, True), (128, 128, 4, 4, 8, True),
          (64, 128, 3, 4, 4, True), (128, 128, 6, 3, 4, True)],
    "down": [(64, 128, 2, 4), (64, 128, 3, 4), (128, 128, 4, 4, 8), (128, 128, 4, 4, 4), (128, 128, 6, 3, 8),
             (64, 256, 2, 3, 4, True), (64, 128, 2, 6, 4, True), (128, 128, 4, 4, 4, True), (128, 128, 4, 4, 8, True),
             (64, 128, 3, 4, 4, True), (128, 128, 6, 3, 4, True)],
}  # fmt: skip


def few() -> list[Work]:
    works = []
    op = SmallGemm(PROCESSORS)
    for name, (n, k) in MATRICES.items():
        stored = [make_weight(n, k) for _ in range(how_many(n * k))]
        for rows in (5,) if TRIAL else (64, 32):
            x = fp8.quantize_rows(random(rows, k), stored[0])

            def run(number: int, way: Any, x: Any = x, stored: Any = stored) -> Any:
                out = torch.empty((x.shape[0], stored[0].shape[0]), device=DEVICE, dtype=DTYPE)
                op(x, stored[number], out, None, way)
                return out

            tilings = [Tiling(*each) for each in TILINGS[name]][: None if rows == 64 else 8]
            ways = {"now": None, **{str(tuple(each)): each for each in tilings if not (TRIAL and each.bulk)}}
            work = Work(
                f"{rows} rows {name}", n * k, len(stored), run,
                lambda x=x, stored=stored: fp8.linear(x, stored[0], None, DTYPE), ways, operations=2.0 * rows * n * k,
            )  # fmt: skip
            works.append(work)
    return works


# Whole layers -----------------------------------------------------------------------------------------------------


def make_layers() -> list[dict[str, Fp8Weight]]:
    return [{name: make_weight(n, k) for name, (n, k) in MATRICES.items()} for _ in range(LAYERS)]


class TunedVector(GemvFp8):
    """With shapes by name of matrix, launched in one mode."""

    shapes: dict[tuple[int, int], Shape]
    way: int = 0

    def __call__(self, x: Any, weight: Any, out: Any, bias: Any = None, **more: Any) -> None:
        more["shape"] = self.shapes.get(tuple(weight.shape))
        super().__call__(x, weight, out, bias, mode=self.way, **more)


def one() -> list[Work]:
    """All layers of one row, of which 80 are a step."""
    layers, gain = make_layers(), random(HIDDEN).abs() + 0.5
    caches = [(make_cache(1, 192), make_cache(1, 192)) for _ in layers]
    given = [
        FusedLayer(gain, w["qkv"], w["o"], gain, w["gate_up"], w["down"], *cache)
        for w, cache in zip(layers, caches, strict=True)
    ]
    cos_sin, batch, x = torch.randn(4096, D, device=DEVICE), make_batch(1, 192), random(1, HIDDEN)
    product = TunedVector(PROCESSORS)
    product.shapes = {}
    nothing: Any = None
    op = SingleRowDecode(
        given,
        gain,
        cos_sin,
        HEADS,
        EPS,
        D**-0.5,
        "silu",
        PagedAttention(PROCESSORS),
        product,
        nothing,
        nothing,
        nothing,
    )
    size = {name: tuple(shape) for name, shape in MATRICES.items()}

    def shapes(ahead: int, long: tuple[int, ...] | None = None) -> dict[Any, Shape]:
        found = {size[name]: Shape(2, 3, 4, 3, 1, ahead) for name in ("qkv", "o", "gate_up")}
        return {**found, size["down"]: Shape(*(long or (2, 3, 16, 1)), ahead)}  # pyright: ignore

    long = (4, 3, 4, 3, 7)
    ways: dict[str, Any] = {
        "now": ({}, 0), "ahead 1": (shapes(1, (2, 3, 16, 1, 1)), 0), "ahead 2": (shapes(2, (2, 3, 16, 1, 1)), 0),
        "7 parts": (shapes(0, long), 0), "7 parts, ahead 1": (shapes(1, long), 0),
        "4 parts, ahead 1": (shapes(1, (2, 3, 4, 3, 4)), 0),
        "7 parts, ahead 1, waits": (shapes(1, long), 3), "7 parts, ahead 2, waits": (shapes(2, long), 3),
        "7 parts, ahead 1, both": (shapes(1, long), 1), "7 parts, ahead 2, both": (shapes(2, long), 1),
        "7 parts, ahead 4, both": (shapes(4, long), 1),
    }  # fmt: skip
    if TRIAL:
        ways = {"now": ({}, 0), "7 parts": (shapes(0, long), 0)}

    def run(_: int, way: Any) -> Any:
        product.shapes, product.way = way
        return op(x, batch)

    reads = LAYERS * sum(n * k for n, k in MATRICES.values())
    return [Work(f"one row, {LAYERS} layers", reads, 1, run, lambda: run(0, ({}, 0)), ways)]


def steps() -> list[Work]:
    """Layers of many rows, one op after the other, as the decoder calls them."""
    layers, gain = make_layers(), random(HIDDEN).abs() + 0.5
    linear = TritonLinear(PROCESSORS, (0, 0) if TRIAL else torch.cuda.get_device_capability())
    op = PagedAttention(PROCESSORS)
    cos_sin, works = torch.randn(4096, D, device=DEVICE), []
    usual = small_gemm.choose_tiling
    for rows, tokens in ((2, 20),) if TRIAL else ((64, 192), (256, 192), (32, 2112)):
        batch = make_batch(rows, tokens)
        caches = [(make_cache(rows, tokens), make_cache(rows, tokens)) for _ in layers]
        x, start = random(rows, HIDDEN) * 0.1, random(rows, HIDDEN)

        def layer(
            h: Any, stream: Any, w: dict[str, Fp8Weight], cache: Any, rows: int = rows, batch: Any = batch
        ) -> Any:
            normed, stream = norms_rotary.add_rms_norm(h, stream, gain, EPS, w["qkv"])
            data, scales = fp8.split_scales(linear.linear_unscaled(normed, w["qkv"], DTYPE))
            q, k, v = data.view(rows, -1, D).split((HEADS, KV_HEADS, KV_HEADS), 1)
            q = norms_rotary.rotary_and_cache(q, k, v, cos_sin, batch, *cache, scales=scales)
            h = linear.linear_unscaled(op(q, k, v, *cache, batch, D**-0.5), w["o"], DTYPE)
            normed, stream = norms_rotary.add_rms_norm(h, stream, gain, EPS, w["gate_up"])
            gated = norms_rotary.silu_mul(linear.linear_unscaled(normed, w["gate_up"], DTYPE), w["down"])
            return linear.linear_unscaled(gated, w["down"], DTYPE), stream

        def run(_: int, way: Any, caches: Any = caches, x: Any = x, start: Any = start, layer: Any = layer) -> Any:
            options = dict(way)
            launch.set_early_products(options.pop("early", 0))
            ahead = options.pop("ahead", 0)

            def tiling(*sizes: int) -> Tiling:
                return usual(*sizes)._replace(ahead=ahead)

            op.decode_choice = options.pop("attention", None)
            with changed(small_gemm, choose_tiling=tiling), changed(norms_rotary, **options):
                h, stream = x, start
                for w, cache in zip(layers, caches, strict=True):
                    h, stream = layer(h, stream, w, cache)
            launch.set_early_products(0)
            return stream

        ways: dict[str, Any] = {"now": {}}
        if rows <= 64:
            ways |= {
                "early": {"early": 64}, "early, 4 lines": {"early": 64, "ahead": 4},
                "early, 8 lines": {"early": 64, "ahead": 8}, "early, 16 lines": {"early": 64, "ahead": 16},
            }  # fmt: skip
        else:
            ways |= {
                "gate in tiles": {"GATE_TILE": (8, 1024, 8, 4096, 4)}, "gate maxnreg 64": {"GATE_OPTIONS": {"maxnreg": 64}},
                "gate in tiles, norm 8 warps": {"GATE_TILE": (8, 1024, 8, 4096, 4), "NORM_OPTIONS": {"num_warps": 8}},
                "the same, rotary 8, 2": {"GATE_TILE": (8, 1024, 8, 4096, 4), "NORM_OPTIONS": {"num_warps": 8},
                                          "ROTARY_OPTIONS": (8, 2)},
            }  # fmt: skip
        if TRIAL:
            ways = {"now": {}, "gate in tiles": {"GATE_TILE": (8, 1024, 8, 4096, 4)}}
        reads = LAYERS * (sum(n * k for n, k in MATRICES.values()) + rows * tokens * KV_HEADS * D * 2)
        work = sum(2.0 * rows * n * k for n, k in MATRICES.values()) * LAYERS
        works.append(
            Work(
                f"{rows} rows, {LAYERS} layers", reads, 1, run, lambda run=run: run(0, {}), ways, 0.05, operations=work
            )
        )
    return works


def main() -> None:
    global PATIENCE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {
        "attention": attention,
        "gate": gate,
        "norms": norms,
        "vector": vector,
        "few": few,
        "one": one,
        "steps": steps,
    }
    parser.add_argument("--only", default=",".join(parts))
    parser.add_argument("--seconds", type=int, default=PATIENCE, help="after which only the first way of each is timed")
    parser.add_argument("--trial", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    PATIENCE = options.seconds
    torch.manual_seed(0)
    with torch.inference_mode():
        made = {name: parts[name]() for name in options.only.split(",")}
        compile_all([work for works in made.values() for work in works])
        for name, works in made.items():
            began = time.perf_counter()
            measure(works)
            print(f"-- {name}: {time.perf_counter() - began:.0f} s", flush=True)
    print(f"-- all: {time.perf_counter() - STARTED:.0f} s", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main()
