"""What tests of Triton kernels have in common: their batches, and an interpreter that rounds as hardware does."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from text_generation_inference.kernels import fp8
from text_generation_inference.kernels.batch import PREFILL_TILE, Batch, PagedMeta


@pytest.fixture(scope="module", autouse=True)
def interpreter_as_hardware(device_name: str) -> Iterator[None]:
    """Triton's interpreter cuts bits off and loses carries; GPUs round to the nearest and saturate."""
    if device_name != "cpu":
        yield
        return
    import triton.language as tl

    interpreter = importlib.import_module("triton.runtime.interpreter")
    original, original_call = interpreter._convert_float, interpreter.InterpretedFunction.__call__
    prepared: set[Any] = set()

    def call(self: Any, *args: Any, **named: Any) -> Any:
        if self.fn not in prepared:  # once is enough, and takes longer than most calls
            prepared.add(self.fn)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **named)

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target not in (tl.float8e4nv, tl.bfloat16):
            return original(data, source, target, rounding)
        wide = torch.from_numpy(data)
        if target == tl.float8e4nv:
            return fp8.to_fp8(wide).view(torch.uint8).numpy()
        return wide.bfloat16().view(torch.uint16).numpy()

    interpreter._convert_float, interpreter.InterpretedFunction.__call__ = convert, call
    yield
    interpreter._convert_float, interpreter.InterpretedFunction.__call__ = original, original_call


def make_batch(device: torch.device, decode: list[int], chunks: list[tuple[int, int]], size: int = 16) -> Batch:
    """Rows with so many cached tokens each, then chunks (start, end). Tables and slots are shuffled; row -1 is padding."""
    ends = [*decode, *(end for _, end in chunks)]
    counts = [max(1, -(-end // size)) for end in ends]
    ids = (torch.randperm(sum(counts)) + 1).to(torch.int32).split(counts) if counts else ()
    slots = torch.randperm(len(ends) + 2)[: len(ends)].to(torch.int32)
    tables = torch.full(
        (len(ends) + 2, max(counts, default=1)), 10**6, dtype=torch.int32
    )  # read by mistake, it crashes
    for slot, row_ids in zip(slots.tolist(), ids, strict=True):
        tables[slot, : len(row_ids)] = row_ids
    tiles: list[list[int]] = []
    token = len(decode)
    for row, (start, end) in enumerate(chunks, len(decode)):
        for first in range(start, end, PREFILL_TILE):
            count = min(PREFILL_TILE, end - first)
            tiles.append([int(slots[row]), token, first, count, start])
            token += count
    tiles.sort(key=lambda tile: tile[4] == 0)
    rows = slots.clone()
    for row, length in enumerate(decode):
        if length == 0:
            rows[row] = -1
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return Batch(
        input_ids=nothing,
        positions=nothing,
        kv_index=nothing,
        seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
        meta=PagedMeta(
            block_tables=tables.to(device),
            num_decode=len(decode),
            chunk_starts_cpu=[start for start, _ in chunks],
            chunk_ends_cpu=[end for _, end in chunks],
            max_seq_len=max(ends, default=0),
            table_rows=rows.to(device),
            prefill_tiles=torch.tensor(tiles, dtype=torch.int32, device=device) if tiles else None,
            num_prefix_tiles=sum(tile[4] > 0 for tile in tiles),
        ),
    )
