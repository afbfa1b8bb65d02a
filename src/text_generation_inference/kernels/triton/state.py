# pyright: basic, reportMissingImports=false
"""Reading and changing the slots on the device. Definitions: `kernels.slot_state`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_inference.kernels.slot_state import SlotState


@triton.jit
def _write_kernel(words, staged, BLOCK: tl.constexpr):
    """One write: where (two words), from where, how many."""
    header = staged + tl.program_id(0) * 4
    low = tl.load(header).to(tl.int64) & 0xFFFFFFFF
    to = words + ((tl.load(header + 1).to(tl.int64) << 32) | low)
    source = staged + tl.load(header + 2)
    count = tl.load(header + 3)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(to + i, tl.load(source + i, mask=i < count), mask=i < count)


def apply_writes(words: Tensor, staged: Tensor, num_writes: int) -> None:
    """See `kernels.slot_state.apply_writes`."""
    if num_writes:
        _write_kernel[(num_writes,)](words, staged, BLOCK=512, num_warps=4)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots", "at", "positions"])
def _inputs_kernel(
    slots, at, last_tokens, shifts, tables, page_tables, pages, lengths, input_ids, positions, kv_index, seq_lens,
    count, last_row, tables_row, record, BLOCK_SIZE: tl.constexpr, LAST: tl.constexpr, OWN_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + i, mask=i < count, other=-1).to(tl.int64)
    real = slot >= 0
    length = tl.load(lengths + slot * record, mask=real, other=1)
    position = length - 1
    newest = real
    if not LAST:
        given = tl.load(at + i, mask=i < count, other=0).to(tl.int64)
        position = tl.where(given >= 0, given, position)
        newest = real & (given < 0)
    position = tl.where(real, position, 0)
    block = tl.load(tables + slot * tables_row + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
    where = tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, 0)
    place = where
    if OWN_PAGES:
        page = tl.load(page_tables + slot * tables_row + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
        place = tl.where(real, page * BLOCK_SIZE + position % BLOCK_SIZE, 0)
    token = tl.load(last_tokens + slot * last_row, mask=newest, other=0)
    tl.store(pages + place, token, mask=newest)
    if not LAST:
        # Nobody reads what another program writes: a slot that decodes owns the page of its last token.
        token = tl.where(newest, token, tl.load(pages + place, mask=real & (given >= 0), other=0))
    tl.store(input_ids + i, token.to(tl.int64), mask=i < count)
    shift = tl.load(shifts + slot * last_row, mask=real, other=0).to(tl.int64)
    tl.store(positions + i, tl.maximum(position + shift, 0), mask=i < count)
    tl.store(kv_index + i, where, mask=i < count)
    tl.store(seq_lens + i, tl.where(real, position + 1, 0).to(tl.int32), mask=i < count)


def gather_inputs(state: SlotState, slots: Tensor, at: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.slot_state.gather_inputs`."""
    count = slots.shape[0]
    ids, positions, kv_index = torch.empty((3, count), dtype=torch.int64, device=slots.device).unbind()
    seq_lens = torch.empty(count, dtype=torch.int32, device=slots.device)
    strides = (state.last_tokens.stride(0), state.block_tables.stride(0), state.lengths.stride(0))
    _inputs_kernel[(triton.cdiv(count, 128),)](
        slots, slots if at is None else at, state.last_tokens, state.shifts, state.block_tables, state.page_tables,
        state.pages, state.lengths, ids, positions, kv_index, seq_lens, count, *strides, BLOCK_SIZE=state.block_size,
        LAST=at is None, OWN_PAGES=state.own_pages, BLOCK=128, num_warps=4,
    )  # fmt: skip
    return ids, positions, kv_index, seq_lens
