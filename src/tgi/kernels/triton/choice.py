# pyright: basic, reportMissingImports=false
"""From logits to tokens, and the tokens into the slots. Definitions: `kernels.resident`.

Level 1. Plain rows take the best token, in two small kernels over parts of the vocabulary. Others go through one kernel
with a program per row: each filter keeps the scores from a threshold up, which is found sixteen ways at a time, so
nothing is sorted.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.kernels.resident import SlotState

_PART = 4096  # ids that one program of the plain way looks at


@triton.jit
def _finish_row(row, slot, token, logprob, out, out_row, tokens, tokens_row, lengths, record):
    """Report a token, append it to its slot. What could not be chosen from gives id 0: the next step reads it."""
    token = tl.where(logprob == logprob, token, 0)
    tl.store(out + row, token)
    tl.store(out + out_row + row, logprob.to(tl.float32).to(tl.int32, bitcast=True))
    if slot >= 0:
        at = lengths + slot.to(tl.int64) * record
        length = tl.load(at)
        tl.store(tokens + slot.to(tl.int64) * tokens_row + length, token)
        tl.store(at, length + 1)


@triton.jit
def _best_of_part_kernel(logits, parts, logits_row, vocab, num_parts, PART: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1)
    i = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row.to(tl.int64) * logits_row + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    numbers = tl.where(x == x, x, float("-inf"))  # next to NaN, argmax may name a place past the vocabulary
    best = tl.max(numbers, 0)
    place = tl.argmax(numbers, 0)
    total = tl.sum(tl.where(i < vocab, tl.exp(x - best), 0.0), 0)
    total = tl.where(best == float("-inf"), tl.sum(tl.where(x == x, 0.0, x), 0), total)  # all dropped: nothing, or NaN
    at = parts + (row * num_parts + part) * 3
    tl.store(at, best)
    tl.store(at + 1, total)
    tl.store(at + 2, (part * PART + place).to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def _join_parts_kernel(parts, slots, out, tokens, lengths, out_row, tokens_row, record, num_parts, PAD: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, PAD)
    at = parts + (row * num_parts + i) * 3
    best = tl.load(at, mask=i < num_parts, other=float("-inf"))
    total = tl.load(at + 1, mask=i < num_parts, other=0.0)
    places = tl.load(at + 2, mask=i < num_parts, other=0.0).to(tl.int32, bitcast=True)
    top = tl.max(best, 0)
    winner = tl.argmax(best, 0)
    token = tl.sum(tl.where(i == winner, places, 0), 0)
    share = tl.where(best == float("-inf"), total * 0.0, total * tl.exp(best - top))
    logprob = -tl.log(tl.sum(share, 0))
    logprob = tl.where((top == float("-inf")) | (top == float("inf")), float("nan"), logprob)
    _finish_row(row, tl.load(slots + row), token, logprob, out, out_row, tokens, tokens_row, lengths, record)


def greedy_into(logits: Tensor, slots: Tensor, state: SlotState, out: Tensor) -> None:
    """See `kernels.resident.greedy_into`."""
    rows, vocab = logits.shape
    num_parts = triton.cdiv(vocab, _PART)
    parts = torch.empty((rows, num_parts, 3), dtype=torch.float32, device=logits.device)
    _best_of_part_kernel[(num_parts, rows)](logits, parts, logits.stride(0), vocab, num_parts, PART=_PART, num_warps=4)
    _join_parts_kernel[(rows,)](
        parts, slots, out, state.tokens, state.lengths, out.stride(0), state.tokens.stride(0), state.lengths.stride(0),
        num_parts, PAD=triton.next_power_of_2(num_parts), num_warps=1,
    )  # fmt: skip


# The general way -------------------------------------------------------------------------------------------------


@triton.jit
def _sortable(x):
    """float32 -> uint32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF) ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _read(logits, start, vocab, temperature, BLOCK: tl.constexpr):
    i = start + tl.arange(0, BLOCK)
    return tl.load(logits + i, mask=i < vocab, other=float("-inf")).to(tl.float32) / temperature


@triton.jit
def _surprise(x, total, entropy):
    """How far an id's information is from the entropy, negated: the more typical, the higher."""
    return -tl.abs(total - x - entropy)


@triton.jit
def _threshold(
    logits, vocab, temperature, best, floor, target, total, entropy, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """The highest key from which up the weights of ids with score >= floor add up to the target.

    KIND 0: key = score, each id weighs 1. KIND 1: key = score, weight = probability. KIND 2: key = typicality.
    """
    ways = tl.arange(0, 16).to(tl.uint32)
    low = tl.full((1,), 0, tl.uint32)
    shift = tl.full((1,), 28, tl.uint32)
    for _ in range(0, 8):
        borders = low + (ways << shift)
        weights = tl.zeros((16,), tl.float32)
        for start in range(0, vocab, BLOCK):
            x = _read(logits, start, vocab, temperature, BLOCK)
            kept = (x >= floor) & (x > float("-inf"))
            if KIND == 0:
                weight = tl.where(kept, 1.0, 0.0)
            else:
                weight = tl.where(kept, tl.exp(x - best), 0.0)
            if KIND == 2:
                key = _sortable(tl.where(kept, _surprise(x, total, entropy), float("-inf")))
            else:
                key = _sortable(x)
            weights += tl.sum(tl.where(key[:, None] >= borders[None, :], weight[:, None], 0.0), 0)
        found = tl.sum(tl.where((weights >= target) & (ways > 0), 1, 0), 0).to(tl.uint32)
        low = low + (found << shift)
        shift = shift - 4
    return tl.sum(low, 0)


@triton.jit
def _from_sortable(key):
    bits = key.to(tl.int32, bitcast=True) ^ -2147483648
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mix64(x):
    x = x ^ ((x >> 30) & 0x3FFFFFFFF)
    x = x * -4658895280553007687
    x = x ^ ((x >> 27) & 0x1FFFFFFFFF)
    x = x * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _noise(key, ids):
    """Gumbel noise of ids: the same bits as `sampling.exponential_noise`."""
    low, high = key.to(tl.int32), (key >> 32).to(tl.int32)
    bits = ids * -1640531535 + low
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * -2048144789
    bits = bits ^ ((bits >> 13) & 0x7FFFF)
    bits = bits + high
    bits = bits * -1028477387
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    uniform = (((bits >> 9) & 0x7FFFFF).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _choose_kernel(
    logits, slots, out, tokens, lengths, seeds, filters, logits_row, out_row, tokens_row, record, filters_row, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        logits += row.to(tl.int64) * logits_row
        length = tl.load(lengths + slot.to(tl.int64) * record)
        seed = tl.load(seeds + slot.to(tl.int64) * record)
        numbers = filters + slot.to(tl.int64) * filters_row
        temperature = tl.load(numbers)
        top_k = tl.load(numbers + 1)
        top_p = tl.load(numbers + 2)
        typical_p = tl.load(numbers + 3)
        min_p = tl.load(numbers + 4)
        samples = tl.load(numbers + 5) > 0
        # The best, and the sum of all before any filter.
        tops = tl.full((BLOCK,), float("-inf"), tl.float32)
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            x = _read(logits, start, vocab, temperature, BLOCK)
            new = tl.maximum(tops, x)
            shift = tl.where(new == float("-inf"), 0.0, new)
            sums = sums * tl.exp(tops - shift) + tl.exp(x - shift)
            tops = new
        best = tl.max(tops, 0)
        mass = tl.sum(sums * tl.exp(tops - best), 0)
        total = best + tl.log(mass)  # NaN where nothing is left or something is not finite
        floor = tl.full([], float("-inf"), tl.float32)
        typical_floor = tl.full([], float("-inf"), tl.float32)
        typical = samples & (typical_p < 1)
        entropy = tl.full([], 0.0, tl.float32)
        kept_total = total
        if samples:
            if (top_k > 0) & (top_k < vocab):
                key = _threshold(logits, vocab, temperature, best, floor, top_k, total, entropy, 0, BLOCK)
                floor = _from_sortable(key)
            if (top_p < 1) | typical:
                kept_mass = tl.zeros((BLOCK,), tl.float32)
                for start in range(0, vocab, BLOCK):
                    x = _read(logits, start, vocab, temperature, BLOCK)
                    kept_mass += tl.where((x >= floor) & (x > float("-inf")), tl.exp(x - best), 0.0)
                mass = tl.sum(kept_mass, 0)
            if top_p < 1:
                key = _threshold(logits, vocab, temperature, best, floor, top_p * mass, total, entropy, 1, BLOCK)
                floor = tl.maximum(floor, _from_sortable(key))
            if typical:
                kept_mass = tl.zeros((BLOCK,), tl.float32)
                kept_sum = tl.zeros((BLOCK,), tl.float32)
                for start in range(0, vocab, BLOCK):
                    x = _read(logits, start, vocab, temperature, BLOCK)
                    kept = (x >= floor) & (x > float("-inf"))
                    weight = tl.where(kept, tl.exp(x - best), 0.0)
                    kept_mass += weight
                    kept_sum += tl.where(kept, weight * (x - best), 0.0)
                mass = tl.sum(kept_mass, 0)
                kept_total = best + tl.log(mass)
                entropy = tl.log(mass) - tl.sum(kept_sum, 0) / mass
                key = _threshold(
                    logits, vocab, temperature, best, floor, typical_p * mass, kept_total, entropy, 2, BLOCK
                )
                typical_floor = _from_sortable(key)
            if min_p > 0:
                # The best of what is left may be another one than before, where the typical ones are not the best ones.
                left = best
                if typical:
                    tops = tl.full((BLOCK,), float("-inf"), tl.float32)
                    for start in range(0, vocab, BLOCK):
                        x = _read(logits, start, vocab, temperature, BLOCK)
                        kept = (x >= floor) & (_surprise(x, kept_total, entropy) >= typical_floor)
                        tops = tl.maximum(tops, tl.where(kept, x, float("-inf")))
                    left = tl.max(tops, 0)
                floor = tl.maximum(floor, left + tl.log(min_p))
        key = _mix64(_mix64(seed) ^ (length + 1))
        chosen_value = tl.full([], float("-inf"), tl.float32)
        chosen = tl.full([], 0, tl.int32)
        chosen_score = best
        for start in range(0, vocab, BLOCK):
            x = _read(logits, start, vocab, temperature, BLOCK)
            value = tl.where(x == x, x, float("-inf"))  # argmax needs numbers
            if samples:
                i = start + tl.arange(0, BLOCK)
                kept = (x >= floor) & (x > float("-inf"))
                if typical:
                    kept = kept & (_surprise(x, kept_total, entropy) >= typical_floor)
                value = tl.where(kept, x + _noise(key, i.to(tl.int32)), float("-inf"))
            top = tl.max(value, 0)
            if top > chosen_value:
                place = tl.argmax(value, 0)
                chosen_value = top
                chosen = (start + place).to(tl.int32)
                chosen_score = tl.sum(tl.where(tl.arange(0, BLOCK) == place, x, 0.0), 0)
        logprob = tl.where(best == float("-inf"), float("nan"), chosen_score - total)
        _finish_row(row, slot, chosen, logprob, out, out_row, tokens, tokens_row, lengths, record)


def choose_into(logits: Tensor, slots: Tensor, state: SlotState, out: Tensor) -> None:
    """See `kernels.resident.choose_into`."""
    rows, vocab = logits.shape
    block = min(2048, triton.next_power_of_2(vocab))
    _choose_kernel[(rows,)](
        logits, slots, out, state.tokens, state.lengths, state.seeds, state.filters, logits.stride(0), out.stride(0),
        state.tokens.stride(0), state.lengths.stride(0), state.filters.stride(0), vocab, BLOCK=block, num_warps=8,
    )  # fmt: skip
