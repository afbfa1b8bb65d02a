"""Single kernels of the CPU on one thread, over weights and keys that no cache holds; beside other sources, in turns.

    python bench/cpu_kernels.py [--other FOLDER] [--march native] [--rows 1 2 4 16] [--kinds q4_k q6_k]

FOLDER is `src/text_generation_inference/kernels/cpu` of another checkout (`git worktree add`). Each call is timed
alone, and the table has the time that a fifth of them stay below: so short a time is rarely interrupted, however busy
the machine is. What others read from memory meanwhile slows both. Last column: the largest difference between the two,
over the largest value.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from text_generation_inference.kernels.cpu import build
from text_generation_inference.kernels.cpu.ops import NativeOps, load_ops

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from gguf_blocks import random_blocks

OUT, WIDTH = 3072, 1024
BYTES = 96 << 20  # of copies: three times what a large cache holds
SHAPES = {  # heads, KV heads, size of a head, rows, keys
    "dense": (16, 8, 128, 16, 100),
    "dense, one row": (16, 8, 128, 1, 100),
    "experts": (16, 4, 64, 16, 100),
    "windowed": (4, 1, 256, 16, 512),
}


def load(march: str, sources: Path | None) -> NativeOps:
    if sources is not None:
        build.SOURCE_DIR = sources
    ops = load_ops(Path(tempfile.gettempdir()) / "tgi-bench-kernels", threads=1, march=march)
    if isinstance(ops, str):
        sys.exit(ops)
    return ops


def time_calls(calls: list, rounds: int) -> list[float]:
    """Microseconds of each of `calls`: functions of a number that says which copy, and how many copies there are."""
    found: list[list[int]] = [[] for _ in calls]
    for turn in range(rounds + 1):
        for times, (call, copies) in zip(found, calls, strict=True):
            for copy in range(copies):
                start = time.perf_counter_ns()
                call(copy)
                if turn:
                    times.append(time.perf_counter_ns() - start)
    return [sorted(times)[len(times) // 5] / 1e3 for times in found]


def show(name: str, times: list[float], outputs: list[torch.Tensor], gigabytes: float) -> None:
    cells = [f"{each:.1f} ({gigabytes / each * 1e6:.0f})" for each in times]
    if len(times) > 1:
        apart = float((outputs[0] - outputs[1]).abs().max() / outputs[1].abs().max())
        cells += [f"{times[1] / times[0]:.2f}x", f"{apart:.0e}"]
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def measure_products(libraries: list[NativeOps], kind: str, rows: int, rounds: int) -> None:
    blocks = torch.from_numpy(random_blocks(kind.upper(), OUT, WIDTH, 0))
    x = torch.randn(rows, WIDTH) / 32
    outputs, calls, size = [], [], 0
    for ops in libraries:
        size = ops.pack_blocks([(kind, blocks)], WIDTH).nbytes
        weights = [ops.pack_blocks([(kind, blocks)], WIDTH) for _ in range(BYTES // size)]
        out = torch.empty(rows, OUT)
        outputs.append(out)

        def call(copy: int, ops: NativeOps = ops, weights: list = weights, out: torch.Tensor = out) -> None:
            ops.library.tgi_linear(x.data_ptr(), rows, WIDTH, weights[copy].address, None, out.data_ptr(), OUT, 1)

        calls.append((call, len(weights)))
    show(f"{kind} {OUT} x {WIDTH}, {rows} rows", time_calls(calls, rounds), outputs, size / 1e9)


def measure_attention(libraries: list[NativeOps], name: str, rounds: int) -> None:
    heads, kv_heads, dim, rows, keys = SHAPES[name]
    per_row = -(-keys // 16)
    shape = (rows * per_row, 16, kv_heads, dim)
    tables = torch.arange(rows * per_row, dtype=torch.int32).view(rows, per_row)
    lengths = torch.full((rows,), keys, dtype=torch.int32)
    size = 2 * rows * keys * kv_heads * dim * 4
    caches = [(torch.randn(shape), torch.randn(shape)) for _ in range(max(2, BYTES // size))]
    q = torch.randn(rows, heads, dim)
    outputs, calls = [], []
    for ops in libraries:
        out = torch.empty(rows, heads * dim)
        outputs.append(out)

        def call(copy: int, ops: NativeOps = ops, out: torch.Tensor = out) -> None:
            k, v = caches[copy]
            ops.library.tgi_attention(
                q.data_ptr(), heads * dim, dim, k.data_ptr(), v.data_ptr(), shape[0], 16, tables.data_ptr(), per_row,
                per_row, lengths.data_ptr(), rows, 0, None, None, heads, kv_heads, dim, dim**-0.5, 0, 0, 0.0, None,
                out.data_ptr(), 1,
            )  # fmt: skip

        calls.append((call, len(caches)))
    show(f"attention, {name}: {rows} rows, {keys} keys", time_calls(calls, rounds), outputs, size / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="sources to compare with")
    parser.add_argument("--march", default="native", help="native, x86-64-v4 (no VNNI) or x86-64-v3 (AVX2)")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 16])
    parser.add_argument("--kinds", nargs="+", default=["q4_k", "q6_k", "q4_0"])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    libraries = [load(options.march, None)]
    heads = ["kernel", "us (GB/s)"]
    if options.other:
        libraries.append(load(options.march, options.other))
        heads += ["other sources", "faster", "apart"]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for kind in options.kinds:
        for rows in options.rows:
            measure_products(libraries, kind, rows, options.rounds)
    for name in SHAPES:
        measure_attention(libraries, name, options.rounds)


if __name__ == "__main__":
    main()
