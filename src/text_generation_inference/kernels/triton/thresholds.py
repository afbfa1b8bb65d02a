# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""The exact thresholds of a row's filters, from the list of scores near them. See `filters`.

One program per row. The list comes in any order, so everything added up over it is integers.
"""

import triton
import triton.language as tl

from text_generation_inference.kernels.triton.filters import (
    BEST_ABOVE,
    BINS,
    BOUND,
    COLUMNS,
    CURSOR,
    DONE,
    DRAW,
    FACTS,
    FIRST,
    FLOOR,
    JOIN,
    LAST,
    MASS,
    MASS_ABOVE,
    MEAN,
    MOMENT_ABOVE,
    PLAN,
    REACH,
    SETTLE,
    TYPICAL,
    WHOLE,
    finish_row,
    join_stats,
    order,
    read_scores,
    row_of,
    step_kernel,
    wishes,
)  # fmt: skip
from text_generation_inference.kernels.triton.noise import from_sortable, gumbel, noise_key, sortable

_FIXED = tl.constexpr(1099511627776.0)  # 2^40: what a weight of 1 is as an integer
_NO_ID = tl.constexpr(2147483647)


@triton.jit
def _item(listed, ids, count, whole, logits, scores, place, vocab, temperature, start, BLOCK: tl.constexpr):
    """A block of the list, or of the row that stands in for it."""
    i = start + tl.arange(0, BLOCK)
    if whole == 0:
        x = tl.load(listed + i, mask=i < count, other=float("-inf"))
        which = tl.load(ids + i, mask=i < count, other=0)
    else:
        x = read_scores(logits, scores, place, i, vocab, temperature)
        which = i.to(tl.int32)
    return x, which


@triton.jit
def _among(x, best, mean, floor, first, KIND: tl.constexpr):
    """What a threshold is looked for in: not dropped yet, not above the first bin of the list."""
    return (x >= floor) & (x > float("-inf")) & (order(x, best, mean, floor, KIND) >= first)


@triton.jit
def _key(x, best, mean, typicality):
    return tl.where(typicality, -tl.abs(best - x - mean), x)


@triton.jit
def _fixed(x, best):
    return (tl.exp(x - best) * _FIXED).to(tl.int64)


@triton.jit
def _threshold(
    listed, ids, count, whole, logits, scores, place, vocab, temperature, best, mean, floor, first, above, target,
    typicality, weighs, BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The highest key from which up the weights, with `above` for those not listed, add up to the target.

    Sixteen ways at a time, between the lowest and the highest key. Weights are probabilities, or 1 each.
    """
    end = tl.where(whole != 0, vocab, count)
    lowest = tl.full([], float("inf"), tl.float32)
    highest = tl.full([], float("-inf"), tl.float32)
    for start in range(0, end, BLOCK):
        x, _ids = _item(listed, ids, count, whole, logits, scores, place, vocab, temperature, start, BLOCK)
        among = _among(x, best, mean, floor, first, KIND)
        key = _key(x, best, mean, typicality)
        lowest = tl.minimum(lowest, tl.min(tl.where(among, key, float("inf")), 0))
        highest = tl.maximum(highest, tl.max(tl.where(among, key, float("-inf")), 0))
    ways = tl.arange(0, 16).to(tl.uint32)
    low = sortable(lowest)
    high = tl.maximum(sortable(highest), low)
    shift = tl.full([], 28, tl.uint32)
    for _turn in range(0, 8):
        if ((high - low) >> shift) > 0:
            steps = ways << shift
            borders = low + steps
            weights = tl.zeros((16,), tl.int64) + above
            for start in range(0, end, BLOCK):
                x, _ids = _item(listed, ids, count, whole, logits, scores, place, vocab, temperature, start, BLOCK)
                among = _among(x, best, mean, floor, first, KIND)
                bits = sortable(_key(x, best, mean, typicality))
                weight = tl.where(among, tl.where(weighs, _fixed(x, best), 1), 0)
                weights += tl.sum(tl.where(bits[:, None] >= borders[None, :], weight[:, None], 0), 0)
            found = (weights >= target) & (ways > 0) & (steps <= high - low)
            low = low + (tl.sum(found.to(tl.int32), 0).to(tl.uint32) << shift)
        shift = shift - 4
    return from_sortable(low)


@triton.jit
def _report_best(
    listed, ids, count, whole, logits, scores, place, vocab, temperature, best, mass, floor, out, room,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The ids from a score up, the best first, lower ids first among equals, as far as there is room."""
    end = tl.where(whole != 0, vocab, count)
    previous = tl.full([], float("inf"), tl.float32)
    previous_id = tl.full([], -1, tl.int32)
    found = tl.full([], 0, tl.int32)
    for _turn in range(0, room):
        if previous >= floor:
            next_score = tl.full([], float("-inf"), tl.float32)
            next_id = tl.full([], _NO_ID, tl.int32)
            for start in range(0, end, BLOCK):
                x, which = _item(listed, ids, count, whole, logits, scores, place, vocab, temperature, start, BLOCK)
                left = (x < previous) | ((x == previous) & (which > previous_id))
                left = left & (x >= floor) & (x > float("-inf"))
                score = tl.max(tl.where(left, x, float("-inf")), 0)
                token = tl.min(tl.where(left & (x == score), which, _NO_ID), 0)
                if (score > next_score) | ((score == next_score) & (token < next_id)):
                    next_score = score
                    next_id = token
            previous = next_score
            previous_id = next_id
            if next_score > float("-inf"):
                logprob = next_score - best - tl.log(mass)
                tl.store(out + 1 + found, next_id)
                tl.store(out + 1 + room + found, logprob.to(tl.int32, bitcast=True))
                found += 1
    tl.store(out, found)


@step_kernel
def thresholds_kernel(
    logits, scores, places, slots, filters, tops, parts, plan, facts, bins, listed, ids, out, last_tokens, lengths,
    seeds, top_out, logits_row, filters_row, out_row, last_row, record, top_row, vocab, num_parts, room, top_room,
    adjusted, wants_tops, BLOCK: tl.constexpr, PAD: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One row: exact thresholds, the best ids, and the token if the list holds all that is kept.

    KIND 0: top-k and top-p; also typical-p if the list holds all. KIND 1: typical-p of the other rows.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    at = plan + row * PLAN
    state = tl.load(at, mask=slot >= 0, other=DONE)
    if KIND == 0:
        mine = (state == BOUND) | (state == SETTLE)
    else:
        mine = state == TYPICAL
    if mine:
        temperature, top_k, top_p, typical_p, min_p, _ = wishes(filters, slot, filters_row, vocab)
        logits, scores, place = row_of(logits, logits_row, scores, places, row, vocab, adjusted)
        listed += row.to(tl.int64) * room
        ids += row.to(tl.int64) * room
        best, mass, moment = join_stats(parts, row, num_parts, PAD)
        counted = state != SETTLE  # else there is no list
        count = tl.load(at + CURSOR, mask=counted, other=0)
        whole = tl.load(at + WHOLE, mask=counted, other=0)
        first = tl.load(at + FIRST, mask=counted, other=0)
        last = tl.load(at + LAST, mask=counted, other=-1)
        end = tl.where(whole != 0, vocab, count)
        i = tl.arange(0, PAD)
        own = parts + (row * num_parts + i) * COLUMNS
        summed = i < tl.where(first > 0, num_parts, 0)
        above = (tl.sum(tl.load(own + MASS_ABOVE, mask=summed, other=0.0), 0) * _FIXED).to(tl.int64)
        above_moment = (tl.sum(tl.load(own + MOMENT_ABOVE, mask=summed, other=0.0), 0) * _FIXED).to(tl.int64)
        above_best = tl.max(tl.load(own + BEST_ABOVE, mask=summed, other=float("-inf")), 0)
        holds_all = (first == 0) & (last >= 0)  # of what top-k and top-p keep
        typical = typical_p < 1
        limited = (last >= 0) & (top_k > 0) & (top_k <= end)
        wanted = tl.load(tops + row * 2, mask=wants_tops != 0, other=0)
        reach = tl.full([], float("inf"), tl.float32)
        top_floor = tl.full([], float("-inf"), tl.float32)
        if KIND == 0:
            floor = tl.full([], float("-inf"), tl.float32)
            mean = moment / mass
            kept_mass = (mass * _FIXED).to(tl.int64)
            pending = typical & ((first > 0) | (last < 0)) & (mass == mass)
        else:
            floor = tl.load(facts + row * FACTS + FLOOR)
            mean = tl.load(facts + row * FACTS + MEAN)
            kept_mass = (tl.load(facts + row * FACTS + MASS) * _FIXED).to(tl.int64)
            pending = mass != mass  # never
        # One search after the other: top-k, top-p, the best ids, typical-p.
        for step in range(3 * KIND, 4):
            sums = limited & (top_p < 1)
            asks = limited
            from_first = first
            beyond = above
            lower = floor
            if step == 1:
                asks = (top_p < 1) & (last >= 0)
            if step == 2:
                asks = wanted > 0
                lower = tl.full([], float("-inf"), tl.float32)
            if step == 3:
                asks = typical & (holds_all | (KIND == 1))
                sums = typical & (last >= 0)
            if (step == 0) | (step == 2):
                from_first = first * 0
                beyond = above * 0
            if ((step == 1) | (step == 3)) & sums & (KIND == 0):
                # Mass and moment of what is kept: what is above the list, and what of it is not below the floor.
                kept_mass = above
                kept_moment = above_moment
                for start in range(0, end, BLOCK):
                    x, _ids = _item(listed, ids, count, whole, logits, scores, place, vocab, temperature, start, BLOCK)
                    among = _among(x, best, mean, floor, first, 0)
                    kept_mass += tl.sum(tl.where(among, _fixed(x, best), 0), 0)
                    moments = tl.where(among, tl.exp(x - best) * (best - x), 0.0)
                    kept_moment += tl.sum((moments * _FIXED).to(tl.int64), 0)
                if step == 3:
                    mean = kept_moment.to(tl.float32) / kept_mass.to(tl.float32)
            if asks:
                target = tl.maximum((tl.where(step == 1, top_p, typical_p) * kept_mass.to(tl.float32)).to(tl.int64), 1)
                if (step == 0) | (step == 2):
                    target = tl.where(step == 0, top_k, wanted).to(tl.int64)
                border = _threshold(
                    listed, ids, count, whole, logits, scores, place, vocab, temperature, best, mean, lower, from_first,
                    beyond, target, step == 3, (step == 1) | (step == 3), BLOCK, KIND,
                )  # fmt: skip
                if step == 2:
                    top_floor = border
                elif step == 3:
                    reach = -border
                else:
                    floor = tl.minimum(tl.maximum(floor, border), best)
        if KIND == 0:
            tl.store(facts + row * FACTS + MASS, kept_mass.to(tl.float32) / _FIXED)
            if wanted > 0:
                _report_best(
                    listed, ids, count, whole, logits, scores, place, vocab, temperature, best, mass, top_floor,
                    top_out + tl.load(tops + row * 2 + 1) * top_row, top_room, BLOCK,
                )  # fmt: skip
        if pending:
            tl.store(at, TYPICAL)
            tl.store(at + CURSOR, 0)
            tl.store(bins + row * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
        else:
            if min_p > 0:
                # The best of what is left may be another one than before, where the typical ones are not the best.
                left = best
                if typical:
                    left = above_best
                    for start in range(0, end, BLOCK):
                        x, _ids = _item(
                            listed, ids, count, whole, logits, scores, place, vocab, temperature, start, BLOCK
                        )  # fmt: skip
                        near = (x >= floor) & (tl.abs(best - x - mean) <= reach)
                        left = tl.maximum(left, tl.max(tl.where(near, x, float("-inf")), 0))
                floor = tl.maximum(floor, left + tl.log(min_p))
            if holds_all:
                at_slot = slot.to(tl.int64) * record
                noise = noise_key(tl.load(seeds + at_slot), tl.load(lengths + at_slot))
                chosen_value = tl.full([], float("-inf"), tl.float32)
                chosen = tl.full([], _NO_ID, tl.int32)
                score = best
                for start in range(0, end, BLOCK):
                    x, which = _item(listed, ids, count, whole, logits, scores, place, vocab, temperature, start, BLOCK)
                    kept = (x >= floor) & (x > float("-inf")) & (tl.abs(best - x - mean) <= reach)
                    values = tl.where(kept, x + gumbel(noise, which), float("-inf"))
                    value = tl.max(values, 0)
                    token = tl.min(tl.where(kept & (values == value), which, _NO_ID), 0)
                    if (value > chosen_value) | ((value == chosen_value) & (token < chosen)):
                        chosen_value = value
                        chosen = token
                        score = tl.max(tl.where(kept & (which == token), x, float("-inf")), 0)
                logprob = score - best - tl.log(mass)
                finish_row(row, slot, chosen, logprob, out, out_row, last_tokens, last_row, lengths, record)
                tl.store(at, DONE)
            else:
                # Also where fewer ids are left than top-k keeps: nobody has chosen for a row with a filter yet.
                filtered = (last >= 0) | typical | (min_p > 0) | (top_k > 0) | (top_p < 1)
                tl.store(at, tl.where(filtered & (mass == mass), DRAW, JOIN))
        tl.store(facts + row * FACTS + FLOOR, floor)
        tl.store(facts + row * FACTS + MEAN, mean)
        tl.store(facts + row * FACTS + REACH, reach)
