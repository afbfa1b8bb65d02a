# ruff: noqa: B023
"""Attention and the small kernels on a GPU: are they right, how fast is each way to launch them.

    python bench/cuda_attention.py [--only check,small,decode,...] [--flashinfer] [--quick] [--out FILE]

First every kernel against its definition, then each work with several variants, the best last.
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.bench.floor import graph_ms
from text_generation_inference.kernels import fp8, reference
from text_generation_inference.kernels.batch import PREFILL_TILE, Batch, PagedMeta
from text_generation_inference.kernels.fp8 import FP8, Fp8Rows, Fp8Weight
from text_generation_inference.kernels.triton import launch, norms_rotary, quantize
from text_generation_inference.kernels.triton.attention import (
    DecodeChoice,
    PagedAttention,
    PrefillChoice,
    choose_decode,
    choose_prefill,
)
from text_generation_inference.kernels.triton.ops import specialised

CUDA = torch.device("cuda")
PROCESSORS = torch.cuda.get_device_properties(0).multi_processor_count
BULK_COPIES = torch.cuda.get_device_capability() >= (9, 0)
SPECIALISED = specialised(torch.cuda.get_device_capability())
BLOCK_SIZE, D, SCALES = 16, 128, (0.02, 0.03)
NONE = (None, None)  # keys and values are read from the cache alone
results: list[dict[str, Any]] = []

# rows, tokens of each, heads, key/value heads, type of the cache
DECODE = [
    (256, 600, 32, 8, torch.bfloat16),
    (512, 600, 32, 8, torch.bfloat16),
    (1024, 192, 32, 8, torch.bfloat16),
    (64, 600, 32, 8, torch.bfloat16),
    (1, 600, 32, 8, torch.bfloat16),
    (1, 3000, 32, 8, torch.bfloat16),
    (1, 32768, 32, 8, torch.bfloat16),
    (4, 600, 32, 8, torch.bfloat16),
    (8, 600, 32, 8, torch.bfloat16),
    (16, 600, 32, 8, torch.bfloat16),
    (32, 600, 32, 8, torch.bfloat16),
    (163, 1152, 32, 32, FP8),
    (94, 2112, 32, 32, FP8),
    (81, 3072, 32, 32, FP8),
    (1230, 192, 32, 32, FP8),
    (1024, 200, 32, 8, torch.bfloat16),  # a few tokens more than whole tiles
    (1230, 200, 32, 32, FP8),
    (1, 400, 32, 32, FP8),
    (256, 600, 32, 8, FP8),
]
# prompts, their tokens, tokens before them, heads, key/value heads, type of the cache
PREFILL = [
    (4, 2048, 0, 32, 8, torch.bfloat16),
    (40, 200, 0, 32, 8, torch.bfloat16),
    (64, 128, 0, 32, 8, torch.bfloat16),
    (1, 8192, 0, 32, 8, torch.bfloat16),
    (4, 2048, 0, 32, 32, FP8),
    (4, 1024, 1024, 32, 8, torch.bfloat16),
    (4, 1024, 1024, 32, 32, FP8),
]


def decode_variants(rows: int, kv_heads: int, group: int, dtype: torch.dtype, quick: bool) -> dict[str, DecodeChoice]:
    usual = choose_decode(rows, kv_heads, group, D, torch.bfloat16, dtype, PROCESSORS)
    s = usual.splits
    found = {"chosen": usual}
    if group == 1:
        # lanes: tokens that one load of 16 bytes in each thread brings
        width = 4 if dtype is FP8 else 2
        ways = [
            (64, 4, 1),
            (64, 4, 2),
            (64, 4, 3),
            (64, 4, 4),
            (128, 4, 1),
            (128, 4, 2),
            (128, 8, 2),
            (32, 2, 3),
            (64, 2, 2),
            (32, 4, 3),
            (32, 2, 2),
            (32, 2, 4),
            (32, 1, 3),
        ]
        for n, w, stages in ways[: 4 if quick else None]:
            found[f"lanes n{n} w{w} s{stages}"] = DecodeChoice(n, w, stages, s, lanes=min(n, width * w))
    ways = [(64, 4, 3), (32, 4, 4), (64, 2, 3), (128, 4, 2), (64, 4, 2), (32, 2, 4), (64, 4, 4), (128, 8, 3)]
    ways += [(64, 2, 2), (64, 2, 4), (32, 2, 3), (32, 1, 4)]
    for n, w, stages in ways[: 3 if quick or group == 1 else None]:
        found[f"group n{n} w{w} s{stages}"] = DecodeChoice(n, w, stages, s)
    if rows <= 64:
        for splits in (1, 2, 4, 8) if rows > 1 else (4, 8, 16, 32):
            for n in (32, 64):
                found[f"like chosen n{n} splits {splits}"] = DecodeChoice(
                    n, usual.warps, usual.stages, splits, min(n, usual.lanes)
                )
    return found


BULK = [(128, 64, 8, 3), (64, 64, 4, 2), (128, 128, 8, 2), (64, 128, 4, 2), (128, 64, 8, 2), (64, 64, 4, 3)]


def prefill_variants(before: int, quick: bool) -> dict[str, PrefillChoice]:
    found = {"chosen": choose_prefill(D, torch.bfloat16, before > 0, BULK_COPIES)}
    ways = [
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (128, 128, 8, 2),
        (64, 128, 4, 2),
        (64, 32, 4, 3),
        (128, 32, 4, 3),
    ]
    for m, n, w, stages in ways[: 3 if quick else None]:
        found[f"m{m} n{n} w{w} s{stages}"] = PrefillChoice(m, n, w, stages)
    if before == 0:
        for m, n, w, stages in BULK[: 3 if quick else None]:
            found[f"bulk m{m} n{n} w{w} s{stages}"] = PrefillChoice(m, n, w, stages, bulk=True)
    return found


# Making work ------------------------------------------------------------------------------------------------------


def tables_for(rows: int, tokens: int, block: int = BLOCK_SIZE) -> Tensor:
    per_row = -(-tokens // block)
    return (torch.randperm(rows * per_row, device=CUDA) + 1).to(torch.int32).view(rows, per_row)


def cache_for(
    rows: int, tokens: int, kv_heads: int, dtype: torch.dtype, spread: float = 1.0, block: int = BLOCK_SIZE,
    by_head: bool = True,
) -> Tensor:  # fmt: skip
    """By head in memory, as the engine keeps it, or by token."""
    blocks = rows * -(-tokens // block) + 1
    shape = (blocks, kv_heads, block, D) if by_head else (blocks, block, kv_heads, D)
    made = torch.empty(shape, dtype=dtype, device=CUDA)
    for part in made.split(4096):  # not all of it in float32 at once
        part.copy_((torch.randn(part.shape, device=CUDA) * spread).clamp(-400, 400))
    return made.transpose(1, 2) if by_head else made


def batch_for(decode: list[int], chunks: list[tuple[int, int]], tables: Tensor) -> Batch:
    ends = [*decode, *(end for _, end in chunks)]
    tiles, token = [], len(decode)
    for row, (start, end) in enumerate(chunks, len(decode)):
        for first in range(start, end, PREFILL_TILE):
            tiles.append([row, token, first, min(PREFILL_TILE, end - first), start])
            token += tiles[-1][3]
    tiles.sort(key=lambda tile: tile[4] == 0)
    nothing = torch.zeros(0, dtype=torch.int64, device=CUDA)
    return Batch(
        input_ids=nothing,
        positions=nothing,
        kv_index=nothing,
        seq_lens=torch.tensor(ends, dtype=torch.int32, device=CUDA),
        meta=PagedMeta(
            block_tables=tables,
            num_decode=len(decode),
            chunk_starts_cpu=[start for start, _ in chunks],
            chunk_ends_cpu=[end for _, end in chunks],
            max_seq_len=max(ends),
            table_rows=torch.arange(len(ends), dtype=torch.int32, device=CUDA),
            prefill_tiles=torch.tensor(tiles, dtype=torch.int32, device=CUDA) if tiles else None,
            num_prefix_tiles=sum(tile[4] > 0 for tile in tiles),
        ),
    )


def own_from(cache: Tensor, scale: float, batch: Batch, chunks: list[tuple[int, int]]) -> Tensor:
    """This step's keys or values as the cache holds them."""
    rows = []
    for row, (start, end) in enumerate(chunks, batch.meta.num_decode):
        at = torch.arange(start, end, device=CUDA)
        block = batch.meta.block_tables[row][at // BLOCK_SIZE].long()
        rows.append(
            cache.view(torch.uint8)[block, at % BLOCK_SIZE].view(FP8).float() * scale
            if cache.dtype is FP8
            else cache[block, at % BLOCK_SIZE]
        )
    none = torch.zeros((batch.meta.num_decode, *cache.shape[2:]), device=CUDA, dtype=rows[0].dtype)
    return torch.cat([none, *rows]).bfloat16()


@contextmanager
def compiling() -> Iterator[None]:
    """Everything called inside is compiled on many threads, not run; without that tool it is just run."""
    try:
        from text_generation_inference.kernels.triton.compile_ahead import compile_only
    except ImportError as error:
        print("compiling one by one:", error)
        yield
        return
    started = time.perf_counter()
    try:
        with compile_only(16):
            yield
    except Exception as error:  # what could not be compiled fails again, alone, where it is timed
        print(f"compiling: {type(error).__name__} {str(error)[:200]}")
    torch.cuda.synchronize()
    print(f"compiled in {time.perf_counter() - started:.1f} s", flush=True)


def median_ms(work: Callable[[], Any], repeats: int = 10) -> float:
    return graph_ms(work, repeats, calls=4)


def attempt(name: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        print(f"FAILED {name}: {type(error).__name__} {str(error)[:200]}", flush=True)
        if not isinstance(error, (AssertionError, ImportError)):
            traceback.print_exc(limit=-3)
        return None


def tell(kind: str, work: str, unit: str, found: list[tuple[float, float, str]], most: int = 4) -> None:
    """(rate, microseconds, variant): the best last."""
    for rate, us, variant in sorted(found):
        results.append({"kind": kind, "work": work, "variant": variant, "us": us, unit: rate})
    shown = sorted(found)[-most:]
    chosen = [f for f in found if f[2] == "chosen"]
    print(
        f"{kind:8s}{work:34s}"
        + " | ".join(f"{v} {us:.1f}us {r:.2f}" for r, us, v in dict.fromkeys(chosen + shown))
        + f" {unit}",
        flush=True,
    )


# Is it right --------------------------------------------------------------------------------------------------------


def near(name: str, actual: Any, expected: Any, tolerance: float) -> None:
    worst = float((actual.float() - expected.float()).abs().max())
    assert worst <= tolerance * max(1.0, float(expected.float().abs().max())), f"{name}: off by {worst:.4f}"


def check_small() -> None:
    data = torch.zeros(8, 14336, dtype=FP8, device=CUDA)
    for width in (4096, 14336, 11008, 1000):
        matrices = {
            "by row": Fp8Weight(data[:, :width], torch.ones(8, device=CUDA)),
            "static": Fp8Weight(data[:, :width], torch.ones(8, device=CUDA), torch.tensor(0.02, device=CUDA)),
            "by square": Fp8Weight(data[:, :width], torch.ones(1, -(-width // 128), device=CUDA)),
        }
        x, residual = (torch.randn(37, width, device=CUDA).bfloat16() for _ in range(2))
        weight = torch.rand(width, device=CUDA).bfloat16()
        gate_up = torch.randn(37, 2 * width, device=CUDA).bfloat16()
        near("norm", norms_rotary.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), 2e-2)
        for form, quantize_for in matrices.items():
            pairs = [
                (
                    norms_rotary.add_rms_norm(x, residual, weight, 1e-5, quantize_for)[0],
                    reference.add_rms_norm(x, residual, weight, 1e-5)[0],
                ),
                (norms_rotary.silu_mul(gate_up, quantize_for), reference.silu_mul(gate_up)),
                (quantize.quantize_rows(x, quantize_for), x),
            ]
            for place, (actual, plain) in enumerate(pairs):
                assert isinstance(actual, Fp8Rows)
                expected = fp8.quantize_rows(plain, quantize_for)
                near(f"{form} {width} {place}", fp8.dequantize_rows(actual), fp8.dequantize_rows(expected), 5e-2)
                same = float((actual.data.float() == expected.data.float()).float().mean())
                assert same > 0.98, f"{form} {width} {place}: {same:.3f} the same"


def check_rotary() -> None:
    for dtype in (torch.bfloat16, FP8):
        scales = SCALES if dtype is FP8 else (1.0, 1.0)
        fused = torch.randn(50, 48, D, device=CUDA).bfloat16()
        q, k, v = fused.clone().split((32, 8, 8), 1)
        caches = [torch.zeros(9, 8, BLOCK_SIZE, D, device=CUDA, dtype=dtype).transpose(1, 2) for _ in range(4)]
        angles = torch.rand(99, D // 2, device=CUDA) * 6
        cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
        batch = batch_for([], [(7, 57)], tables_for(1, 64))
        batch.positions = torch.arange(7, 57, device=CUDA)
        batch.kv_index = torch.randperm(144, device=CUDA)[:50]
        expected_q, expected_k, expected_v = fused.split((32, 8, 8), 1)
        expected_q = reference.rotary_and_cache(
            expected_q, expected_k, expected_v, cos_sin, batch, caches[0], caches[1], scales
        )
        actual_q = norms_rotary.rotary_and_cache(q, k, v, cos_sin, batch, caches[2], caches[3], scales)
        near("q", actual_q, expected_q, 2e-2)
        near("k cache", caches[2].float(), caches[0].float(), 0.13)
        assert torch.equal(caches[3].float(), caches[1].float()), "v cache"
        held = caches[2].float()[batch.kv_index // BLOCK_SIZE, batch.kv_index % BLOCK_SIZE] * scales[0]
        assert torch.equal(held.bfloat16(), k), "k is left as the cache holds it"


def check_attention(
    decode: list[int],
    chunks: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    own: bool,
    op: PagedAttention,
    window: int | None = None,
) -> None:
    rows, longest = len(decode) + len(chunks), max([*decode, *(end for _, end in chunks)])
    scales = SCALES if dtype is FP8 else (1.0, 1.0)
    caches = [cache_for(rows, longest, kv_heads, dtype, 1 / s) for s in scales]
    batch = batch_for(decode, chunks, tables_for(rows, longest))
    tokens = len(decode) + sum(end - start for start, end in chunks)
    q = torch.randn(tokens, heads, D, device=CUDA).bfloat16()
    k = v = None
    if own:
        fused = torch.cat([q, *(own_from(c, s, batch, chunks) for c, s in zip(caches, scales, strict=True))], 1)
        q, k, v = fused.split((heads, kv_heads, kv_heads), 1)
    exact = [c.float() * s for c, s in zip(caches, scales, strict=True)]
    expected = reference.attention(q.float(), None, None, exact[0], exact[1], batch, D**-0.5, window)
    for _ in range(2):
        near("attention", op(q, k, v, *caches, batch, D**-0.5, window, None, scales), expected, 1e-2)


def check_dependent() -> None:
    """A chain of our kernels in a graph, launched each way, against the same one by one."""
    x, residual = (torch.randn(64, 4096, device=CUDA).bfloat16() for _ in range(2))
    weight = torch.rand(4096, device=CUDA).bfloat16()
    quantize_for = Fp8Weight(torch.zeros(8, 4096, device=CUDA, dtype=FP8), torch.ones(8, device=CUDA))
    angles = torch.rand(999, D // 2, device=CUDA) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    caches = [cache_for(64, 608, 32, FP8, 1 / s) for s in SCALES]
    tables = tables_for(64, 608)
    batch = batch_for([600] * 64, [], tables)
    batch.positions = torch.full((64,), 599, device=CUDA)
    batch.kv_index = tables[:, 599 // 16].long() * 16 + 599 % 16
    op = PagedAttention(PROCESSORS, bulk_copies=BULK_COPIES)
    kv = torch.randn(64, 2, 32, D, device=CUDA).bfloat16()

    def chain() -> list[Tensor]:
        out, total = norms_rotary.add_rms_norm(x, residual, weight, 1e-5)
        for _ in range(6):
            q = norms_rotary.rotary_and_cache(
                out.view(64, 32, D), kv[:, 0].clone(), kv[:, 1], cos_sin, batch, *caches, SCALES
            )
            mixed = op(q, None, None, *caches, batch, D**-0.5, None, None, SCALES)
            gated = norms_rotary.silu_mul(torch.cat((mixed, total), 1))
            out, total = norms_rotary.add_rms_norm(gated, total, weight, 1e-5)
        rows = norms_rotary.rms_norm(out, weight, 1e-5, quantize_for)
        assert isinstance(rows, Fp8Rows)
        return [rows.data.view(torch.uint8), rows.scale, total]

    launch.set_dependent_launch(False)
    expected = [t.clone() for t in chain()]
    for on in (False, True):
        if launch.set_dependent_launch(on) != on:
            print("no dependent launch on this GPU")
            return
        chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = chain()
        for _ in range(30):
            for t in actual:
                t.zero_()
            graph.replay()
            for a, e in zip(actual, expected, strict=True):
                assert torch.equal(a, e), f"dependent launch {on}: not the same"
        us = 1e3 * median_ms(chain)
        results.append(
            {"kind": "chain", "work": "26 small kernels and attention, 64 rows", "variant": f"dependent {on}", "us": us}
        )
        print(f"chain of our kernels, dependent launch {'on' if on else 'off'}: {us:.1f} us", flush=True)
    launch.set_dependent_launch(False)


def check(quick: bool) -> bool:
    plain, parts = PagedAttention(1), PagedAttention(PROCESSORS, bulk_copies=BULK_COPIES)
    lanes, groups = PagedAttention(1), PagedAttention(1)
    lanes.decode_choice, groups.decode_choice = DecodeChoice(64, 4, 2, 4, lanes=16), DecodeChoice(64, 4, 3, 2)
    decode, chunks = [1, 16, 700, 65, 300], [(0, 130), (48, 300), (256, 700)]
    work: dict[str, Callable[[], None]] = {
        "small kernels": check_small,
        "rotary and cache": check_rotary,
        "decode bf16": lambda: check_attention(decode, [], 32, 8, torch.bfloat16, False, plain),
        "decode bf16 in parts": lambda: check_attention(decode, [], 32, 8, torch.bfloat16, False, parts),
        "decode bf16 window": lambda: check_attention(decode, [], 32, 8, torch.bfloat16, False, parts, 100),
        "decode bf16 by lane": lambda: check_attention(decode, [], 8, 8, torch.bfloat16, False, lanes),
        "decode fp8 by lane": lambda: check_attention(decode, [], 32, 32, FP8, False, parts),
        "decode fp8 by lane, chosen parts": lambda: check_attention(decode, [], 8, 8, FP8, False, lanes),
        "decode fp8 by group": lambda: check_attention(decode, [], 32, 8, FP8, False, groups),
        "prefill bf16 from the cache": lambda: check_attention([], chunks, 32, 8, torch.bfloat16, False, plain),
        "prefill bf16": lambda: check_attention(decode, chunks, 32, 8, torch.bfloat16, True, plain),
        "prefill bf16 window": lambda: check_attention([], chunks, 32, 8, torch.bfloat16, True, plain, 100),
        "prefill fp8": lambda: check_attention(decode, chunks, 32, 32, FP8, True, plain),
        "dependent launch": check_dependent,
    }
    with compiling():
        for name, one in work.items():
            if name != "dependent launch":
                try:
                    one()
                except AssertionError:
                    pass  # nothing was run
                except Exception as error:
                    print(f"compiling {name}: {type(error).__name__} {str(error)[:200]}")
    good = []
    for name, one in work.items():
        if attempt(name, lambda: (one(), True)[1]):
            good.append(name)
    launch.set_dependent_launch(False)
    print(f"right: {len(good)} of {len(work)}; not: {[name for name in work if name not in good]}", flush=True)
    return len(good) == len(work)


# How fast is it -----------------------------------------------------------------------------------------------------


def time_small(quick: bool) -> None:
    for rows in (1, 64, 256, 1024):
        for width, hidden in ((14336, 4096), (11008, 4096)):
            x = torch.randn(rows, hidden, device=CUDA).bfloat16()
            weight = torch.rand(hidden, device=CUDA).bfloat16()
            gate_up = torch.randn(rows, 2 * width, device=CUDA).bfloat16()
            quantize_for = Fp8Weight(torch.zeros(8, 16, device=CUDA, dtype=FP8), torch.ones(8, device=CUDA))
            work: dict[str, tuple[int, Callable[[], Any]]] = {
                "add_rms_norm": (8 * x.numel(), lambda: norms_rotary.add_rms_norm(x, x, weight, 1e-5)),
                "add_rms_norm fp8": (
                    7 * x.numel(),
                    lambda: norms_rotary.add_rms_norm(x, x, weight, 1e-5, quantize_for),
                ),
                "quantize_rows": (3 * x.numel(), lambda: quantize.quantize_rows(x, quantize_for)),
                f"silu_mul {width}": (6 * rows * width, lambda: norms_rotary.silu_mul(gate_up)),
                f"silu_mul {width} fp8": (5 * rows * width, lambda: norms_rotary.silu_mul(gate_up, quantize_for)),
            }
            for name, (num_bytes, one) in work.items():
                if width == 11008 and "silu" not in name:
                    continue
                ms = attempt(name, lambda: median_ms(one))
                if ms:
                    results.append(
                        {"kind": "small", "work": f"{name} x{rows}", "us": 1e3 * ms, "TB/s": num_bytes / ms / 1e9}
                    )
    by_name: dict[str, list[str]] = {}
    for r in results:
        if r["kind"] == "small":
            name, rows = r["work"].rsplit(" x", 1)
            by_name.setdefault(name, []).append(f"x{rows} {r['us']:.1f}us {r['TB/s']:.2f}")
    for name, cells in by_name.items():
        print(f"small   {name:22s} " + " | ".join(cells) + " TB/s", flush=True)


def time_decode(quick: bool, flashinfer: bool) -> None:
    def prepare(
        rows: int, context: int, heads: int, kv_heads: int, dtype: torch.dtype
    ) -> tuple[Tensor, list[Tensor], Batch]:
        scales = SCALES if dtype is FP8 else (1.0, 1.0)
        caches = [cache_for(rows, context, kv_heads, dtype, 1 / s) for s in scales]
        q = torch.randn(rows, heads, D, device=CUDA).bfloat16()
        return q, caches, batch_for([context] * rows, [], tables_for(rows, context))

    with compiling():  # of one row: only strides and types matter
        for rows, context, heads, kv_heads, dtype in DECODE:
            q, caches, batch = prepare(1, context, heads, kv_heads, dtype)
            for name, choice in decode_variants(rows, kv_heads, heads // kv_heads, dtype, quick).items():
                op = PagedAttention(PROCESSORS, bulk_copies=BULK_COPIES)
                op.decode_choice = choice
                attempt(f"compiling {name}", lambda: op(q, None, None, *caches, batch, D**-0.5, None, None, SCALES))
    for rows, context, heads, kv_heads, dtype in DECODE:
        q, caches, batch = prepare(rows, context, heads, kv_heads, dtype)
        num_bytes = rows * context * 2 * kv_heads * D * dtype.itemsize
        found = []
        for name, choice in decode_variants(rows, kv_heads, heads // kv_heads, dtype, quick).items():
            op = PagedAttention(PROCESSORS, bulk_copies=BULK_COPIES)
            op.decode_choice = choice
            ms = attempt(name, lambda: median_ms(lambda: op(q, *NONE, *caches, batch, D**-0.5, None, None, SCALES)))
            if ms:
                found.append((num_bytes / ms / 1e9, 1e3 * ms, name))
        if flashinfer:
            ms = attempt("flashinfer", lambda: median_ms(flashinfer_decode(q, caches, batch, context)))
            if ms:
                found.append((num_bytes / ms / 1e9, 1e3 * ms, "flashinfer"))
        tell("decode", f"{rows}x{context} {heads}/{kv_heads} {'fp8' if dtype is FP8 else 'bf16'}", "TB/s", found)


def flashinfer_decode(q: Tensor, caches: list[Tensor], batch: Batch, context: int) -> Callable[[], Any]:
    import flashinfer  # pyright: ignore

    k, v = (cache.transpose(1, 2) for cache in caches)  # as it lies in memory: by head
    rows, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    per_row = batch.meta.block_tables.shape[1]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=CUDA), "HND", use_tensor_cores=heads // kv_heads >= 4
    )
    wrapper.plan(
        torch.arange(rows + 1, dtype=torch.int32, device=CUDA) * per_row, batch.meta.block_tables.flatten(),
        torch.full((rows,), (context - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device=CUDA),
        heads, kv_heads, D, BLOCK_SIZE, q_data_type=q.dtype, kv_data_type=k.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(q, (k, v))


def time_prefill(quick: bool, flashinfer: bool) -> None:
    def prepare(
        prompts: int, own: int, before: int, heads: int, kv_heads: int, dtype: torch.dtype
    ) -> tuple[list[Tensor], list[Tensor], Batch]:
        scales = SCALES if dtype is FP8 else (1.0, 1.0)
        caches = [cache_for(prompts, before + own, kv_heads, dtype, 1 / s) for s in scales]
        batch = batch_for([], [(before, before + own)] * prompts, tables_for(prompts, before + own))
        fused = torch.randn(prompts * own, heads + 2 * kv_heads, D, device=CUDA).bfloat16()
        return list(fused.split((heads, kv_heads, kv_heads), 1)), caches, batch

    def call(op: PagedAttention, made: tuple[list[Tensor], list[Tensor], Batch], own: bool) -> Tensor:
        (q, k, v), caches, batch = made
        return op(q, *((k, v) if own else (None, None)), *caches, batch, D**-0.5, None, None, SCALES)

    with compiling():
        for work in PREFILL:
            made = prepare(1, *work[1:])
            for name, choice in prefill_variants(work[2], quick).items():
                op = PagedAttention(PROCESSORS, bulk_copies=BULK_COPIES)
                op.prefill_choice = choice
                attempt(f"compiling {name}", lambda: call(op, made, True))
                if name == "chosen":
                    op.prefill_choice = None
                    attempt(f"compiling {name}", lambda: call(op, made, False))
    for work in PREFILL:
        prompts, own, before, heads, kv_heads, dtype = work
        made = prepare(*work)
        flops = 4 * D * heads * prompts * (own * before + own * (own + 1) / 2)
        found = []
        for name, choice in prefill_variants(before, quick).items():
            op = PagedAttention(PROCESSORS, bulk_copies=BULK_COPIES)
            op.prefill_choice = choice
            for way in (True, False) if name == "chosen" else (True,):
                op.prefill_choice = choice if way else None
                label = name if way else "all from the cache"
                ms = attempt(label, lambda: median_ms(lambda: call(op, made, way), 6))
                if ms:
                    found.append((flops / ms / 1e9, 1e3 * ms, label))
        if SPECIALISED is not None:
            op = PagedAttention(PROCESSORS, bulk_copies=BULK_COPIES, specialised=SPECIALISED)
            ms = attempt("warp-specialised", lambda: median_ms(lambda: call(op, made, True), 6))
            if ms:
                found.append((flops / ms / 1e9, 1e3 * ms, "warp-specialised"))
        if before == 0:
            q, k, v = made[0]
            others = [
                ("torch varlen", lambda: torch_varlen(q, k, v, prompts, own)),
                ("torch sdpa", lambda: torch_sdpa(q, k, v, prompts)),
            ]
            if flashinfer and dtype is not FP8:
                others += [("flashinfer", lambda: flashinfer_prefill(q, k, v, prompts, own))]
            for label, other in others:
                ms = attempt(label, lambda: median_ms(other(), 6))
                if ms:
                    found.append((flops / ms / 1e9, 1e3 * ms, label))
        tell(
            "prefill",
            f"{prompts}x{own} after {before} {heads}/{kv_heads} {'fp8' if dtype is FP8 else 'bf16'}",
            "TFLOP/s",
            found,
        )


def flashinfer_prefill(q: Tensor, k: Tensor, v: Tensor, prompts: int, own: int) -> Callable[[], Any]:
    import flashinfer  # pyright: ignore

    starts = torch.arange(prompts + 1, dtype=torch.int32, device=CUDA) * own
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=CUDA), "NHD"
    )
    wrapper.plan(starts, starts, q.shape[1], k.shape[1], D, causal=True, q_data_type=q.dtype)
    q, k, v = (t.contiguous() for t in (q, k, v))
    return lambda: wrapper.run(q, k, v)


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, prompts: int, own: int) -> Callable[[], Any]:
    from torch.nn.attention.varlen import varlen_attn

    starts = torch.arange(prompts + 1, dtype=torch.int32, device=CUDA) * own
    if q.shape[1] != k.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    q, k, v = (t.contiguous() for t in (q, k, v))

    def run() -> Any:
        try:
            return varlen_attn(q, k, v, starts, starts, own, own, is_causal=True)  # pyright: ignore
        except TypeError:
            return varlen_attn(q, k, v, starts, starts, own, own, window_size=(-1, 0))  # pyright: ignore

    return run


def torch_sdpa(q: Tensor, k: Tensor, v: Tensor, prompts: int) -> Callable[[], Any]:
    parts = [t.view(prompts, -1, *t.shape[1:]).transpose(1, 2) for t in (q, k, v)]
    return lambda: torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)


def time_layouts() -> None:
    """Sizes of blocks and orders in memory, each with the variant that is chosen."""
    for rows, context, heads, kv_heads, dtype in (
        DECODE[0],
        DECODE[2],
        (163, 1152, 32, 32, FP8),
        (81, 3072, 32, 32, FP8),
    ):
        scales = SCALES if dtype is FP8 else (1.0, 1.0)
        q = torch.randn(rows, heads, D, device=CUDA).bfloat16()
        num_bytes = rows * context * 2 * kv_heads * D * dtype.itemsize
        found = []
        for block in (16, 32, 64, 128):
            for by_head in (True, False):
                caches = [cache_for(rows, context, kv_heads, dtype, 1 / s, block, by_head) for s in scales]
                batch = batch_for([context] * rows, [], tables_for(rows, context, block))
                op = PagedAttention(PROCESSORS, bulk_copies=BULK_COPIES)
                name = f"block {block} by {'head' if by_head else 'token'}"
                ms = attempt(name, lambda: median_ms(lambda: op(q, *NONE, *caches, batch, D**-0.5, None, None, SCALES)))
                if ms:
                    found.append((num_bytes / ms / 1e9, 1e3 * ms, name))
        tell(
            "layout",
            f"{rows}x{context} {heads}/{kv_heads} {'fp8' if dtype is FP8 else 'bf16'}",
            "TB/s",
            found,
            len(found),
        )


def time_new_lengths() -> None:
    """What the first call with a length costs on the host: a library that plans by shape pays it for every prompt."""

    def first_calls(call: Callable[[int], Any]) -> list[float]:
        times = []
        for length in (1200, 1201, 1333, 1500, 1777, 2011):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            call(length)
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - begun))
        return times[1:]

    whole = torch.randn(2048, 48, D, device=CUDA).bfloat16()
    op = PagedAttention(PROCESSORS, bulk_copies=BULK_COPIES)
    caches = [cache_for(1, 2048, 8, torch.bfloat16) for _ in range(2)]

    def ours(length: int) -> Tensor:
        q, k, v = whole[:length].split((32, 8, 8), 1)
        batch = batch_for([], [(0, length)], tables_for(1, length))
        return op(q, k, v, *caches, batch, D**-0.5, None, None, (1.0, 1.0))

    for label, call in (
        ("ours", ours),
        ("torch sdpa", lambda length: torch_sdpa(*whole[:length].split((32, 8, 8), 1), 1)()),
    ):
        times = attempt(label, lambda: first_calls(call))
        if times:
            results.append({"kind": "lengths", "work": "first call with a length", "variant": label, "ms": times})
            print(f"lengths first call with a length, {label}: " + " ".join(f"{ms:.2f}" for ms in times) + " ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="check,small,decode,prefill,layout,lengths")
    parser.add_argument(
        "--flashinfer", action="store_true", help="time it as well; it compiles for 12 to 31 s a kernel"
    )
    parser.add_argument("--quick", action="store_true", help="fewer variants")
    parser.add_argument("--out", default="cuda-attention.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    import triton

    print(torch.__version__, triton.__version__, torch.cuda.get_device_name(0), flush=True)
    started = time.perf_counter()
    for name in options.only.split(","):
        begun = time.perf_counter()
        if name == "check":
            attempt(name, lambda: check(options.quick))
        elif name == "small":
            attempt(name, lambda: time_small(options.quick))
        elif name == "decode":
            attempt(name, lambda: time_decode(options.quick, options.flashinfer))
        elif name == "prefill":
            attempt(name, lambda: time_prefill(options.quick, options.flashinfer))
        elif name == "layout":
            attempt(name, time_layouts)
        elif name == "lengths":
            attempt(name, time_new_lengths)
        print(f"-- {name}: {time.perf_counter() - begun:.0f} s", flush=True)
        Path(options.out).write_text(json.dumps(results, indent=1))
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
