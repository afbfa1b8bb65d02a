"""Times the native CPU kernels against torch and against what the machine can do at all.

Run: python bench/cpu_kernels.py [--cache-dir DIR] [--march native] [--seconds 0.15] [--only floor,linear,step,prefill]
Shapes are those of SmolLM2-135M. Each figure is the best of repeated runs, all in one process.
"""

import argparse
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.kernels import reference
from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.kernels.cpu.ops import BLOCK_BYTES, FusedLayer, NativeOps, Packed, load_ops

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 30, 576, 9, 3, 64, 1536, 49152
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
SHAPES = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE), (VOCAB, HIDDEN)]
BLOCK_SIZE = 16


def best(function: Callable[[], object], seconds: float) -> float:
    """Least time of one call, from calls spread over `seconds`."""
    function()
    least, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        function()
        least = min(least, time.perf_counter() - start)
    return least


def random_blocks(kind: str, rows: int, width: int) -> Tensor:
    """Blocks with finite scales; their values do not matter here."""
    size = BLOCK_BYTES[kind]
    blocks = torch.randint(0, 256, (rows, width // 32, size), dtype=torch.uint8)
    blocks[:, :, 1], blocks[:, :, 0] = 0x20, 0
    if kind == "q4_1":
        blocks[:, :, 3], blocks[:, :, 2] = 0xA0, 0
    return blocks.flatten(1)


def make_weight(ops: NativeOps, kind: str, rows: int, width: int) -> Packed | Tensor:
    if kind == "torch":
        return torch.randn(rows, width) / math.sqrt(width)
    if kind == "float32":
        return ops.pack_linear(torch.randn(rows, width) / math.sqrt(width))
    return ops.pack_quantized(kind, random_blocks(kind, rows, width), width)


def bench_floor(ops: NativeOps) -> None:
    print("floor of this machine")
    for threads in sorted({1, torch.get_num_threads()}):
        flops = max(ops.probe_fma(threads) for _ in range(5))
        reads = {}
        for mib in (1, 100, 1024):
            memory = torch.zeros(mib << 18)
            reads[mib] = max(ops.probe_read(memory, threads) for _ in range(6))
        print(
            f"  {threads} thread(s): {flops / 1e9:6.0f} GFLOP/s fused multiply-add, read "
            + ", ".join(f"{rate / 1e9:.0f} GB/s of {mib} MiB" for mib, rate in reads.items())
        )


def bench_linear(ops: NativeOps, seconds: float, kinds: list[str]) -> None:
    print("\nlinear: microseconds (GFLOP/s, GB/s of weights)")
    print(f"{'weight':>12} {'rows':>5}" + "".join(f"{kind:>26}" for kind in kinds))
    for out, width in SHAPES:
        # Enough copies that no call finds its weight in a private cache.
        copies = max(1, min(24, (64 << 20) // (out * width)))
        weights = {kind: [make_weight(ops, kind, out, width) for _ in range(copies)] for kind in kinds}
        for rows in (1, 4, 16, 64, 256, 1024):
            if out == VOCAB and rows > 64:
                continue
            x, cells = torch.randn(rows, width), []
            for kind in kinds:
                apply = F.linear if kind == "torch" else ops.linear

                def run(apply=apply, x=x, many=weights[kind]) -> None:
                    for weight in many:
                        apply(x, weight)

                taken = best(run, seconds) / copies
                flops, read = 2 * rows * out * width / taken / 1e9, weights[kind][0].nbytes / taken / 1e9
                cells.append(f"{taken * 1e6:9.1f} ({flops:5.0f}, {read:5.1f})")
            print(f"{out:>6}x{width:<5} {rows:>5}" + "".join(f"{cell:>26}" for cell in cells), flush=True)


def make_batch(rows: int, context: int, chunk: int = 0) -> Batch:
    """`rows` rows that decode their token `context`, or that prefill `chunk` tokens after `context` others."""
    length = context + chunk if chunk else context
    per_row = -(-length // BLOCK_SIZE)
    tables = (torch.randperm(rows * per_row) + 1).view(rows, per_row).int()
    start = context if chunk else context - 1
    positions = torch.arange(start, length).repeat(rows)
    row = torch.arange(rows).repeat_interleave(length - start)
    return Batch(
        input_ids=torch.randint(0, VOCAB, (len(positions),)),
        positions=positions,
        kv_index=tables[row, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        seq_lens=torch.full((rows,), length, dtype=torch.int32),
        meta=PagedMeta(
            block_tables=tables,
            num_decode=0 if chunk else rows,
            chunk_starts_cpu=[start] * rows if chunk else [],
            chunk_ends_cpu=[length] * rows if chunk else [],
            max_seq_len=length,
        ),
        logit_tokens=(torch.arange(rows) + 1) * (length - start) - 1,
    )


class Model:
    """A whole pass over random weights, each op optionally timed by name."""

    def __init__(self, ops: NativeOps, kind: str) -> None:
        self.ops = reference if kind == "torch" else ops
        shapes = dict(zip(("qkv", "o", "gate_up", "down"), SHAPES, strict=False))
        self.layers = [{name: make_weight(ops, kind, *shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
        head = {"q4_1": "q8_0", "q4_0": "q8_0"}.get(kind, kind)
        self.embedding = make_weight(ops, head, VOCAB, HIDDEN)
        self.norm = torch.ones(HIDDEN)
        self.cos_sin = torch.randn(8192, HEAD_DIM)
        self.pick = ops.greedy

    def caches(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        shape = (int(batch.meta.block_tables.max()) + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        return [(torch.randn(shape), torch.randn(shape)) for _ in range(LAYERS)]

    def step(
        self, batch: Batch, caches: list[tuple[Tensor, Tensor]], times: list[tuple[str, float]] | None = None
    ) -> Tensor:
        ops = self.ops

        def call(name: str, function: Callable, *args):
            if times is None:
                return function(*args)
            start = time.perf_counter()
            result = function(*args)
            times.append((name, time.perf_counter() - start))
            return result

        x = call("embedding", ops.embedding, batch.input_ids, self.embedding)
        residual = x
        x = call("norm", ops.rms_norm, x, self.norm, 1e-5)
        for weights, (k_cache, v_cache) in zip(self.layers, caches, strict=True):
            qkv = call("qkv", ops.linear, x, weights["qkv"])
            q, k, v = qkv.view(len(x), -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            q = call("rotary", ops.rotary_and_cache, q, k, v, self.cos_sin, batch, k_cache, v_cache)
            x = call("attention", ops.attention, q, k, v, k_cache, v_cache, batch, 0.125)
            x = call("o", ops.linear, x, weights["o"])
            x, residual = call("norm", ops.add_rms_norm, x, residual, self.norm, 1e-5)
            x = call("gate_up", ops.linear, x, weights["gate_up"])
            x = call("silu", ops.silu_mul, x)
            x = call("down", ops.linear, x, weights["down"])
            x, residual = call("norm", ops.add_rms_norm, x, residual, self.norm, 1e-5)
        logits = call("head", ops.linear, x[batch.logit_tokens], self.embedding)
        return call("greedy", self.pick, logits)[0]

    def fused_step(self, batch: Batch, caches: list[tuple[Tensor, Tensor]]) -> Callable[[], Tensor]:
        """The same pass with all layers in one call."""
        layers = [
            FusedLayer(self.norm, w["qkv"], w["o"], self.norm, w["gate_up"], w["down"], k_cache, v_cache)
            for w, (k_cache, v_cache) in zip(self.layers, caches, strict=True)
        ]
        ops = self.ops
        stack = ops.make_fused_decode(layers, self.norm, self.cos_sin, heads=HEADS, eps=1e-5, scale=0.125)

        def step() -> Tensor:
            x = ops.run_fused_decode(ops.embedding(batch.input_ids, self.embedding), stack, batch)
            return ops.greedy(ops.linear(x[batch.logit_tokens], self.embedding))[0]

        return step


def bench_steps(ops: NativeOps, seconds: float, kinds: list[str], batches: dict[str, Batch]) -> None:
    print("\nwhole pass of 30 layers and head, milliseconds: best pass, sum of the best of each call, by op")
    for kind in kinds:
        model = Model(ops, kind)
        for name, batch in batches.items():
            caches = model.caches(batch)
            taken = best(lambda: model.step(batch, caches), 4 * seconds)  # noqa: B023
            # The sum of each call's own least time: what a step takes when nothing else runs on the machine.
            least: list[tuple[str, float]] = []
            end = time.perf_counter() + 4 * seconds
            while not least or time.perf_counter() < end:
                times: list[tuple[str, float]] = []
                model.step(batch, caches, times)
                least = [min(pair, key=lambda item: item[1]) for pair in zip(times, least or times, strict=True)]
            spent: dict[str, float] = defaultdict(float)
            for op, one in least:
                spent[op] += one
            parts = " ".join(f"{op} {one * 1e3:.2f}" for op, one in spent.items())
            total = sum(spent.values())
            if kind != "torch":
                taken_fused = best(model.fused_step(batch, caches), 4 * seconds)
                parts += f"; layers in one call {taken_fused * 1e3:.2f}"
            print(f"{kind:>8} {name:>18} {taken * 1e3:8.2f} {total * 1e3:8.2f} = {parts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache-dir", type=Path, default=Path(tempfile.gettempdir()) / "tgi-bench-kernels")
    parser.add_argument("--march", default="native")
    parser.add_argument("--seconds", type=float, default=0.15)
    parser.add_argument("--kinds", default="torch,float32,q4_1,q8_0")
    parser.add_argument("--only", default="floor,linear,step,prefill")
    options = parser.parse_args()
    kinds, parts = options.kinds.split(","), options.only.split(",")
    options.cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    ops = load_ops(options.cache_dir, march=options.march)
    if isinstance(ops, str):
        raise SystemExit(ops)
    print(ops.description)
    with torch.inference_mode():
        if "floor" in parts:
            bench_floor(ops)
        if "linear" in parts:
            bench_linear(ops, options.seconds, kinds)
        if "step" in parts:
            decode = {f"decode {rows} x 128": make_batch(rows, 128) for rows in (1, 4, 16)}
            bench_steps(ops, options.seconds, kinds, decode)
        if "prefill" in parts:
            prefill = {f"prefill {tokens}": make_batch(1, 0, tokens) for tokens in (256, 2048)}
            bench_steps(ops, options.seconds, kinds, prefill)


if __name__ == "__main__":
    main()
