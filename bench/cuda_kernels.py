"""Single kernels of the GPU's op table at the sizes of known models: microseconds, and bytes or operations per second.

    python bench/cuda_kernels.py [--only small,choice,decode,prefill] [--json FILE]

Times are medians over replays of a graph of a few calls. Matrix products are in `cuda_products.py`.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from tgi.bench.report import markdown
from tgi.devices.cuda import CudaDevice
from tgi.devices.device import Ops
from tgi.kernels.batch import PREFILL_TILE, ForwardBatch
from tgi.kernels.resident import SlotState

DEVICE = torch.device("cuda")
BLOCK, DIM, CALLS = 16, 128, 4
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def call_ms(work: Callable[[], object], repeats: int = 12) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / CALLS)
    return statistics.median(times)


class Table:
    def __init__(self) -> None:
        self.rows: list[dict] = []

    def add(self, name: str, work: Callable[[], object], num_bytes: float = 0, operations: float = 0) -> None:
        try:
            ms = call_ms(work)
        except Exception as error:  # one kernel that does not run is a finding, not the end
            print(f"{name}: {str(error)[:200]}", flush=True)
            return
        row = {"kernel": name, "us": 1e3 * ms, "tb_s": num_bytes / ms / 1e9, "tflop_s": operations / ms / 1e9}
        self.rows.append(row)


def decode_batch(rows: int, context: int, tables: torch.Tensor) -> ForwardBatch:
    positions = torch.full((rows,), context - 1, device=DEVICE)
    return ForwardBatch(
        input_ids=torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        positions=positions,
        kv_index=tables[:, (context - 1) // BLOCK].long() * BLOCK + (context - 1) % BLOCK,
        block_tables=tables,
        seq_lens=torch.full((rows,), context, dtype=torch.int32, device=DEVICE),
        num_decode=rows,
        chunk_starts_cpu=[],
        chunk_ends_cpu=[],
        max_seq_len=context,
        logit_tokens=None,
        table_rows=torch.arange(rows, dtype=torch.int32, device=DEVICE),
    )


def prefill_batch(rows: int, length: int, tables: torch.Tensor) -> ForwardBatch:
    """Whole prompts: nothing of them is in the cache before."""
    tiles = [
        (row, row * length + first, first, min(PREFILL_TILE, length - first))
        for row in range(rows)
        for first in range(0, length, PREFILL_TILE)
    ]
    positions = torch.arange(length, device=DEVICE).repeat(rows)
    row_of = torch.arange(rows, device=DEVICE).repeat_interleave(length)
    return ForwardBatch(
        input_ids=torch.zeros(rows * length, dtype=torch.int64, device=DEVICE),
        positions=positions,
        kv_index=tables[row_of, positions // BLOCK].long() * BLOCK + positions % BLOCK,
        block_tables=tables,
        seq_lens=torch.full((rows,), length, dtype=torch.int32, device=DEVICE),
        num_decode=0,
        chunk_starts_cpu=[0] * rows,
        chunk_ends_cpu=[length] * rows,
        max_seq_len=length,
        logit_tokens=None,
        table_rows=torch.arange(rows, dtype=torch.int32, device=DEVICE),
        prefill_tiles=torch.tensor(tiles, dtype=torch.int32, device=DEVICE),
    )


def make_cache(rows: int, length: int, kv_heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Block tables in random order, and keys and values laid out by head."""
    per_row = -(-length // BLOCK)
    tables = (torch.randperm(rows * per_row, device=DEVICE) + 1).to(torch.int32).view(rows, per_row)
    shape = (rows * per_row + 1, kv_heads, BLOCK, DIM)
    caches = [torch.randn(shape, device=DEVICE, dtype=BF16).to(dtype).transpose(1, 2) for _ in range(2)]
    return tables, caches


def time_small(ops: Ops, table: Table) -> None:
    hidden, width, heads, kv_heads = 4096, 14336, 32, 8
    for rows in (1, 64, 256, 1024):
        x = torch.randn(rows, hidden, device=DEVICE).to(BF16)
        weight = torch.rand(hidden, device=DEVICE).to(BF16)
        table.add(f"add_rms_norm, {rows} rows", lambda x=x, w=weight: ops.add_rms_norm(x, x, w, 1e-5), 8 * x.numel())
        gate_up = torch.randn(rows, 2 * width, device=DEVICE).to(BF16)
        table.add(f"silu_mul, {rows} rows", lambda g=gate_up: ops.silu_mul(g), 6 * rows * width)
        fused = torch.randn(rows, heads + 2 * kv_heads, DIM, device=DEVICE).to(BF16)
        q, k, v = fused.split((heads, kv_heads, kv_heads), 1)
        tables, caches = make_cache(rows, 64, kv_heads, BF16)
        batch, cos_sin = decode_batch(rows, 64, tables), torch.randn(2048, DIM, device=DEVICE)
        table.add(
            f"rotary_and_cache, {rows} rows",
            lambda q=q, k=k, v=v, b=batch, c=caches, t=cos_sin: ops.rotary_and_cache(q, k, v, t, b, *c),
            4 * fused.numel(),
        )


def time_choice(ops: Ops, table: Table) -> None:
    vocab = 128256
    for rows in (1, 64, 256, 1024):
        logits = torch.randn(rows, vocab, device=DEVICE).to(BF16)
        slots = SlotState(rows, 4096, BLOCK, DEVICE)
        index = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        out = torch.zeros(2, rows, dtype=torch.int32, device=DEVICE)
        num_bytes = 2 * logits.numel()
        for name, filters in {
            "greedy": None,
            "drawn": [0.8, 0, 1, 1, 0, 1],
            "top-k 50, top-p 0.9": [0.8, 50, 0.9, 1, 0, 1],
        }.items():
            slots.filters.copy_(torch.tensor(filters or [1.0, 0, 1, 1, 0, 0]))
            slots.lengths.fill_(5)
            op = ops.choose_into if filters else ops.greedy_into
            work = lambda op=op, lg=logits, i=index, s=slots, o=out: op(lg, i, s, o)  # noqa: E731
            table.add(f"choice: {name}, {rows} rows", work, num_bytes)


def time_decode(ops: Ops, table: Table) -> None:
    for rows, context, heads, kv_heads, dtype in (
        (1, 600, 32, 8, BF16),
        (64, 600, 32, 8, BF16),
        (256, 600, 32, 8, BF16),
        (512, 600, 32, 8, BF16),
        (1024, 192, 32, 8, BF16),
        (1, 256, 32, 32, FP8),
        (1230, 192, 32, 32, FP8),
        (163, 1152, 32, 32, FP8),
        (94, 2112, 32, 32, FP8),
        (81, 3072, 32, 32, FP8),
    ):
        tables, caches = make_cache(rows, context, kv_heads, dtype)
        q = torch.randn(rows, heads, DIM, device=DEVICE, dtype=BF16)
        batch = decode_batch(rows, context, tables)
        num_bytes = rows * context * 2 * kv_heads * DIM * caches[0].element_size()
        name = f"decode attention {rows} x {context}, {heads}/{kv_heads} heads, {str(dtype)[6:]}"
        table.add(name, lambda q=q, c=caches, b=batch: ops.attention(q, *c, b, DIM**-0.5), num_bytes)
        del tables, caches
        torch.cuda.empty_cache()


def time_prefill(ops: Ops, table: Table) -> None:
    for rows, length, heads, kv_heads, dtype in (
        (40, 200, 32, 8, BF16),
        (64, 128, 32, 32, FP8),
        (4, 2048, 32, 32, FP8),
    ):
        tables, caches = make_cache(rows, length, kv_heads, dtype)
        batch = prefill_batch(rows, length, tables)
        q = torch.randn(rows * length, heads, DIM, device=DEVICE, dtype=BF16)
        k, v = (torch.randn(rows * length, kv_heads, DIM, device=DEVICE, dtype=BF16) for _ in range(2))
        operations = 2 * rows * length * length * heads * DIM  # half of the square, for scores and for values
        name = f"prefill attention {rows} x {length}, {heads}/{kv_heads} heads, {str(dtype)[6:]}"
        work = lambda q=q, c=caches, b=batch, k=k, v=v: ops.attention(q, *c, b, DIM**-0.5, k=k, v=v)  # noqa: E731
        table.add(name, work, operations=operations)


PARTS = {"small": time_small, "choice": time_choice, "decode": time_decode, "prefill": time_prefill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--json")
    options = parser.parse_args()
    ops, table = CudaDevice().ops, Table()
    print(torch.__version__, torch.cuda.get_device_name(0), ops.description, flush=True)
    with torch.inference_mode():
        for name in options.only.split(","):
            PARTS[name](ops, table)
    cells = [
        [row["kernel"], f"{row['us']:.1f}", *(f"{row[name]:.2f}" if row[name] else "-" for name in ("tb_s", "tflop_s"))]
        for row in table.rows
    ]
    print(markdown(["kernel", "us", "TB/s", "TFLOP/s"], cells))
    if options.json:
        Path(options.json).write_text(json.dumps(table.rows, indent=1))


if __name__ == "__main__":
    main()
