# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""Drawing from what top-k, top-p, typical-p and min-p keep; the best ids of a row. Definition: `kernels.choice`.

Nothing is sorted. A row is read in parts by many programs, a few times:

- `look_kernel`: the best score, the sum, and the token already where a row has no filter;
- `count_kernel`: how many scores lie in each of 512 bins below the best;
- `bound_kernel`: the bins that a threshold must be in, from what the counts say at least and at most;
- `collect_kernel`: the scores in those bins (and all above, where they are few) in a list;
- `thresholds.thresholds_kernel`: the exact threshold from the list; the token too if the list holds all that is kept;
- typical-p: the same four again, with the distance from the mean in place of the distance from the best;
- `draw_kernel`, `join_kernel`: the token of the rows that are left.

A row's result depends on nothing but the row: lists come in any order, so what is added up over them is integers.
"""

import inspect

import triton
import triton.language as tl

from text_generation_inference.kernels import slot_state
from text_generation_inference.kernels.triton.noise import gumbel, noise_key

BINS = tl.constexpr(512)
LAST_BIN = tl.constexpr(510)  # beyond it: what is dropped already

# Where a slot's numbers are, and what its sampling mode says.
TEMPERATURE, TOP_K, TOP_P, TYPICAL_P, MIN_P, SAMPLING_MODE = (
    tl.constexpr(slot_state.FILTERS.index(name))
    for name in ("temperature", "top_k", "top_p", "typical_p", "min_p", "sampling_mode")
)
PLAIN, DRAWS = tl.constexpr(slot_state.PLAIN), tl.constexpr(slot_state.DRAWS)

# Words of a row's plan, and what its first one says.
PLAN = tl.constexpr(8)
FIRST, LAST, TOP_LAST, CURSOR, WHOLE = (tl.constexpr(i) for i in range(1, 6))
JOIN, BOUND, SETTLE, TYPICAL, DRAW, DONE = (tl.constexpr(i) for i in range(6))

# Numbers of a row that one kernel leaves for the next.
FACTS = tl.constexpr(4)
FLOOR, MEAN, MASS, REACH = (tl.constexpr(i) for i in range(4))

# Numbers of a part: of all scores, of the chosen one, of the scores above the bins of the list.
COLUMNS = tl.constexpr(9)
BEST, TOTAL, MOMENT, VALUE, CHOSEN, SCORE, MASS_ABOVE, MOMENT_ABOVE, BEST_ABOVE = (tl.constexpr(i) for i in range(9))

_SLACK = tl.constexpr(1e-4)  # more than the rounding of what the bins are bounded with
_NEAR = tl.constexpr(28.0)  # bins per nat


# What differs from step to step without any difference to the code: not compiled for each.
FREE_NUMBERS = ["out_row", "top_row", "top_room", "adjusted", "wants_tops"]
FREE_POINTERS = ["slots", "places", "tops", "top_out", "out"]


def step_kernel(kernel):
    """`triton.jit` for kernels whose arguments come from the inputs of a step."""
    names = inspect.signature(kernel).parameters
    return triton.jit(
        kernel,
        do_not_specialize=[name for name in FREE_NUMBERS if name in names],
        do_not_specialize_on_alignment=[name for name in FREE_POINTERS if name in names],
    )


@triton.jit
def finish_row(row, slot, token, logprob, out, out_row, last_tokens, last_row, lengths, record):
    """Report a token, append it to its slot. What could not be chosen from gives id 0: the next step reads it."""
    token = tl.where(logprob == logprob, token, 0)
    tl.store(out + row, token)
    tl.store(out + out_row + row, logprob.to(tl.float32).to(tl.int32, bitcast=True))
    if slot >= 0:
        at = lengths + slot.to(tl.int64) * record
        length = tl.load(at)
        tl.store(last_tokens + slot.to(tl.int64) * last_row, token)
        tl.store(at, length + 1)


@triton.jit
def wishes(filters, slot, filters_row, vocab):
    numbers = filters + slot.to(tl.int64) * filters_row
    samples = tl.load(numbers + SAMPLING_MODE) == DRAWS
    temperature = tl.load(numbers + TEMPERATURE)
    top_k = tl.load(numbers + TOP_K)
    top_k = tl.where(samples & (top_k > 0) & (top_k < vocab), top_k, 0.0).to(tl.int32)
    top_p = tl.where(samples, tl.load(numbers + TOP_P), 1.0)
    typical_p = tl.where(samples, tl.load(numbers + TYPICAL_P), 1.0)
    min_p = tl.where(samples, tl.load(numbers + MIN_P), 0.0)
    return temperature, top_k, top_p, typical_p, min_p, samples


@triton.jit
def read_scores(logits, scores, place, i, end, temperature):
    """Scores of the ids i of a row: those of the model, or the adjusted ones if the row has a place among them.

    The same in every kernel to the last bit: an approximate quotient may be fused with what is computed from it, and
    then the best score is not as far from the best one as it was where that was found.
    """
    if place < 0:
        x = tl.load(logits + i, mask=i < end, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(scores + i, mask=i < end, other=float("-inf"))
    return tl.div_rn(x, temperature)


@triton.jit
def row_of(logits, logits_row, scores, places, row, vocab, adjusted):
    place = tl.load(places + row, mask=adjusted != 0, other=-1)
    return logits + row.to(tl.int64) * logits_row, scores + tl.maximum(place, 0).to(tl.int64) * vocab, place


@triton.jit
def _best_drawn(x, kept, i, key, samples):
    """(value, place) of the drawn one among the kept; without a draw, of the best one."""
    value = tl.where(kept, x, float("-inf"))
    if samples:
        value = tl.where(kept, x + gumbel(key, i.to(tl.int32)), float("-inf"))
    return tl.max(value, 0), tl.argmax(value, 0)


@step_kernel
def look_kernel(
    logits, scores, places, slots, lengths, seeds, filters, tops, parts, plan, bins, top_out, logits_row, filters_row,
    record, top_row, vocab, start, num_parts, adjusted, wants_tops, PART: tl.constexpr,
):  # fmt: skip
    """One part: best, sum of exponentials, and moment; the choice too where no filter comes first. Clears the plan."""
    part, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    mode = tl.load(filters + slot.to(tl.int64) * filters_row + SAMPLING_MODE, mask=slot >= 0, other=PLAIN)
    if mode == PLAIN:
        if part == 0:
            tl.store(plan + row * PLAN, DONE)
    else:
        temperature, top_k, top_p, typical_p, min_p, samples = wishes(filters, slot, filters_row, vocab)
        logits, scores, place = row_of(logits, logits_row, scores, places, row, vocab, adjusted)
        i = part * PART + tl.arange(0, PART)
        x = read_scores(logits, scores, place, i, vocab, temperature)
        numbers = tl.where(x == x, x, float("-inf"))  # next to NaN, argmax may name a place past the vocabulary
        best = tl.max(numbers, 0)
        weight = tl.where(i < vocab, tl.exp(x - best), 0.0)
        total = tl.sum(weight, 0)
        moment = tl.sum(tl.where(x > float("-inf"), weight * (best - x), 0.0), 0)
        total = tl.where(best == float("-inf"), tl.sum(tl.where(x == x, 0.0, x), 0), total)  # nothing left, or NaN
        at = parts + (row * num_parts + part) * COLUMNS
        tl.store(at + BEST, best)
        tl.store(at + TOTAL, total)
        tl.store(at + MOMENT, tl.where(best == float("-inf"), 0.0, moment))
        wanted = tl.load(tops + row * 2, mask=wants_tops != 0, other=0)
        filtered = (top_k > 0) | (top_p < 1) | (typical_p < 1) | (min_p > 0)
        if not filtered:
            key = tl.full([], 0, tl.int64)
            if samples:
                at_slot = slot.to(tl.int64) * record
                key = noise_key(tl.load(seeds + at_slot), tl.load(lengths + at_slot))
            value, chosen = _best_drawn(x, numbers > float("-inf"), start + i, key, samples)
            score = tl.sum(tl.where(tl.arange(0, PART) == chosen, numbers, 0.0), 0)
            tl.store(at + VALUE, value)
            tl.store(at + CHOSEN, (start + part * PART + chosen).to(tl.int32).to(tl.float32, bitcast=True))
            tl.store(at + SCORE, score)
        if part == 0:
            counts = (top_k > 0) | (top_p < 1) | (wanted > 0)
            state = tl.where(counts, BOUND, tl.where(filtered, SETTLE, JOIN))
            tl.store(plan + row * PLAN, state)
            tl.store(plan + row * PLAN + CURSOR, 0)
            if counts | filtered:
                tl.store(bins + row * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
            if wanted > 0:
                tl.store(top_out + tl.load(tops + row * 2 + 1) * top_row, 0)


@triton.jit
def join_stats(parts, row, num_parts, PAD: tl.constexpr):
    """Best, sum and moment of a row; the sum is NaN where nothing can be chosen."""
    i = tl.arange(0, PAD)
    at = parts + (row * num_parts + i) * COLUMNS
    best = tl.load(at + BEST, mask=i < num_parts, other=float("-inf"))
    total = tl.load(at + TOTAL, mask=i < num_parts, other=0.0)
    moment = tl.load(at + MOMENT, mask=i < num_parts, other=0.0)
    top = tl.max(best, 0)
    gone = best == float("-inf")
    share = tl.where(gone, total * 0.0, total * tl.exp(best - top))
    shifted = tl.where(gone, 0.0, (moment + total * (top - best)) * tl.exp(best - top))
    mass = tl.sum(share, 0)
    mass = tl.where((top == float("-inf")) | (top == float("inf")), float("nan"), mass)
    return top, mass, tl.sum(shifted, 0)


@triton.jit
def _edge(b):
    """The lower edge of a bin, as distance: 28 bins per nat up to 16 nats, then 8 per doubling."""
    far = (((b - 448) << 20) + 0x41800000).to(tl.float32, bitcast=True)
    return tl.where(b <= 448, b / _NEAR, far)


@triton.jit
def _bin(d):
    """Which bin a distance from the best is in; monotone. Not a number or infinite: past the last one."""
    far = (d.to(tl.int32, bitcast=True) - 0x41800000) >> 20
    near = tl.where(d < 16, d * _NEAR, 0.0).to(tl.int32)
    b = tl.minimum(tl.where(d < 16, near, 448 + far), LAST_BIN)
    return tl.where((d >= 0) & (d < float("inf")), b, LAST_BIN + 1)


@triton.jit
def _typical_edge(t):
    """The lower edge of a bin, as distance from the mean: 28 bins per nat up to 8 nats, then 4 per doubling."""
    far = (((t - 224) << 21) + 0x41000000).to(tl.float32, bitcast=True)
    return tl.where(t <= 224, t / _NEAR, far)


@triton.jit
def _typical_bin(distance):
    """Bins of one side of the mean, 0 to 254."""
    far = (distance.to(tl.int32, bitcast=True) - 0x41000000) >> 21
    near = tl.where(distance < 8, distance * _NEAR, 0.0).to(tl.int32)
    return tl.minimum(tl.where(distance < 8, near, 224 + far), 254)


@triton.jit
def order(x, best, mean, floor, KIND: tl.constexpr):
    """How far down a score is in the order of a filter, as bin; those that are dropped already come past the last."""
    if KIND == 0:
        b = _bin(best - x)
    else:
        b = _typical_bin(tl.abs(best - x - mean))
        b = tl.where((x >= floor) & (x > float("-inf")), b, LAST_BIN + 1)
    return b


@step_kernel
def count_kernel(
    logits, scores, places, slots, filters, parts, plan, facts, bins, logits_row, filters_row, vocab, num_parts,
    adjusted, PART: tl.constexpr, PAD: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One part: its scores by bin, added to those of the row. KIND 0: by distance from the best; 1: from the mean."""
    part, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    state = tl.load(plan + row * PLAN, mask=slot >= 0, other=DONE)
    if state == (BOUND if KIND == 0 else TYPICAL):
        temperature = tl.load(filters + slot.to(tl.int64) * filters_row + TEMPERATURE)
        logits, scores, place = row_of(logits, logits_row, scores, places, row, vocab, adjusted)
        best, _, _ = join_stats(parts, row, num_parts, PAD)
        i = part * PART + tl.arange(0, PART)
        x = read_scores(logits, scores, place, i, vocab, temperature)
        if KIND == 0:
            b = order(x, best, 0.0, 0.0, 0)
        else:
            mean = tl.load(facts + row * FACTS + MEAN)
            b = order(x, best, mean, tl.load(facts + row * FACTS + FLOOR), 1)
            b = tl.where((b <= 254) & (best - x > mean), b + 256, b)
        counts = tl.histogram(b, BINS)
        j = tl.arange(0, BINS)
        tl.atomic_add(bins + row * BINS + j, counts, mask=(counts > 0) & (j <= LAST_BIN), sem="relaxed")


@triton.jit
def _between(most, least, mass, target):
    """First and last bin in which the weights from the top can reach the target.

    A bin weighs `least` to `most`, all together exactly `mass`: seen from the top and from the bottom.
    """
    from_top_most, from_top_least = tl.cumsum(most, 0), tl.cumsum(least, 0)
    below_most, below_least = tl.sum(most, 0) - from_top_most, tl.sum(least, 0) - from_top_least
    at_most = tl.minimum(from_top_most, mass - below_least) + _SLACK * mass
    at_least = tl.maximum(from_top_least, mass - below_most) - _SLACK * mass
    first = tl.sum((at_most < target).to(tl.int32), 0)
    last = tl.sum((at_least < target).to(tl.int32), 0)
    return first, last


@step_kernel
def bound_kernel(
    slots, filters, tops, parts, plan, facts, bins, filters_row, vocab, num_parts, room, wants_tops,
    PAD: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One row: which bins go into the list. From the first bin on if there is room, else those of the threshold only;
    if those are too many, the row itself stands in for the list."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    state = tl.load(plan + row * PLAN, mask=slot >= 0, other=DONE)
    if state == (BOUND if KIND == 0 else TYPICAL):
        _, top_k, top_p, typical_p, _, _ = wishes(filters, slot, filters_row, vocab)
        _, mass, _ = join_stats(parts, row, num_parts, PAD)
        top_last = tl.full([], -1, tl.int32)
        if KIND == 0:
            b = tl.arange(0, BINS)
            counts = tl.load(bins + row * BINS + b, mask=b <= LAST_BIN, other=0)
            known = tl.cumsum(counts, 0)
            low = _edge(b)
            high = tl.where(b >= LAST_BIN, float("inf"), _edge(b + 1))
            first, last = _between(counts * tl.exp(-low), counts * tl.exp(-high), mass, top_p * mass)
            kth = tl.sum((known < top_k).to(tl.int32), 0)
            limited = (top_k > 0) & (kth <= LAST_BIN)  # else k is no limit
            first = tl.where(limited, 0, tl.where(top_p < 1, first, LAST_BIN + 1))
            last = tl.where(limited, kth, tl.where(top_p < 1, last, -1))
            wanted = tl.load(tops + row * 2, mask=wants_tops != 0, other=0)
            if wanted > 0:
                top_last = tl.sum((known < wanted).to(tl.int32), 0)
        else:
            b = tl.arange(0, BINS // 2)
            mean = tl.load(facts + row * FACTS + MEAN)
            mass = tl.load(facts + row * FACTS + MASS)
            better = tl.load(bins + row * BINS + b, mask=b <= 254, other=0)
            worse = tl.load(bins + row * BINS + 256 + b, mask=b <= 254, other=0)
            counts = better + worse
            known = tl.cumsum(counts, 0)
            low = _typical_edge(b)
            high = tl.where(b >= 254, float("inf"), _typical_edge(b + 1))
            most = better * tl.exp(-tl.maximum(mean - high, 0.0)) + worse * tl.exp(-mean - low)
            least = better * tl.exp(-tl.maximum(mean - low, 0.0)) + worse * tl.exp(-mean - high)
            first, last = _between(most, least, mass, typical_p * mass)
        last = tl.minimum(last, LAST_BIN)
        first = tl.minimum(first, tl.maximum(last, 0))
        top_last = tl.minimum(top_last, LAST_BIN)
        upto_last = tl.sum(tl.where(b <= tl.maximum(last, top_last), counts, 0), 0)
        whole = 0
        if upto_last <= room:
            first = 0
        else:
            listed = ((b >= first) & (b <= last)) | (b <= top_last)
            if tl.sum(tl.where(listed, counts, 0), 0) > room:
                whole = 1
        at = plan + row * PLAN
        tl.store(at + FIRST, first)
        tl.store(at + LAST, last)
        tl.store(at + TOP_LAST, top_last)
        tl.store(at + WHOLE, whole)
        if mass != mass:
            tl.store(at, JOIN)


@step_kernel
def collect_kernel(
    logits, scores, places, slots, filters, parts, plan, facts, listed, ids, logits_row, filters_row, vocab, num_parts,
    room, adjusted, PART: tl.constexpr, PAD: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One part: its scores in the bins of the list go there, in any order; those above are summed up."""
    part, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    at = plan + row * PLAN
    state = tl.load(plan + row * PLAN, mask=slot >= 0, other=DONE)
    if state == (BOUND if KIND == 0 else TYPICAL):
        temperature = tl.load(filters + slot.to(tl.int64) * filters_row + TEMPERATURE)
        logits, scores, place = row_of(logits, logits_row, scores, places, row, vocab, adjusted)
        best, _, _ = join_stats(parts, row, num_parts, PAD)
        mean = tl.load(facts + row * FACTS + MEAN)
        floor = tl.load(facts + row * FACTS + FLOOR)
        i = part * PART + tl.arange(0, PART)
        x = read_scores(logits, scores, place, i, vocab, temperature)
        b = order(x, best, mean, floor, KIND)
        first, last, top_last = tl.load(at + FIRST), tl.load(at + LAST), tl.load(at + TOP_LAST)
        if first > 0:
            weight = tl.where(b < first, tl.exp(x - best), 0.0)
            own = parts + (row * num_parts + part) * COLUMNS
            tl.store(own + MASS_ABOVE, tl.sum(weight, 0))
            tl.store(own + MOMENT_ABOVE, tl.sum(tl.where(b < first, weight * (best - x), 0.0), 0))
            tl.store(own + BEST_ABOVE, tl.max(tl.where(b < first, x, float("-inf")), 0))
        if tl.load(at + WHOLE) == 0:
            taken = (((b >= first) & (b <= last)) | (b <= top_last)).to(tl.int32)
            count = tl.sum(taken, 0)
            if count > 0:
                start = tl.atomic_add(at + CURSOR, count, sem="relaxed")
                to = start + tl.cumsum(taken, 0) - 1
                fits = (taken > 0) & (to < room)
                tl.store(listed + row.to(tl.int64) * room + to, x, mask=fits)
                tl.store(ids + row.to(tl.int64) * room + to, i.to(tl.int32), mask=fits)


@step_kernel
def draw_kernel(
    logits, scores, places, slots, lengths, seeds, filters, parts, plan, facts, logits_row, filters_row, record, vocab,
    num_parts, adjusted, PART: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """One part of a row whose thresholds are known: the drawn one among what is kept."""
    part, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    state = tl.load(plan + row * PLAN, mask=slot >= 0, other=DONE)
    if state == DRAW:
        temperature = tl.load(filters + slot.to(tl.int64) * filters_row + TEMPERATURE)
        logits, scores, place = row_of(logits, logits_row, scores, places, row, vocab, adjusted)
        best, _, _ = join_stats(parts, row, num_parts, PAD)
        floor = tl.load(facts + row * FACTS + FLOOR)
        mean = tl.load(facts + row * FACTS + MEAN)
        reach = tl.load(facts + row * FACTS + REACH)
        i = part * PART + tl.arange(0, PART)
        x = read_scores(logits, scores, place, i, vocab, temperature)
        kept = (x >= floor) & (x > float("-inf")) & (tl.abs(best - x - mean) <= reach)
        at = parts + (row * num_parts + part) * COLUMNS
        if tl.sum(kept.to(tl.int32), 0) > 0:
            at_slot = slot.to(tl.int64) * record
            key = noise_key(tl.load(seeds + at_slot), tl.load(lengths + at_slot))
            value, chosen = _best_drawn(x, kept, i, key, True)
            score = tl.sum(tl.where(tl.arange(0, PART) == chosen, tl.where(kept, x, 0.0), 0.0), 0)
            tl.store(at + VALUE, value)
            tl.store(at + CHOSEN, (part * PART + chosen).to(tl.int32).to(tl.float32, bitcast=True))
            tl.store(at + SCORE, score)
        else:
            tl.store(at + VALUE, float("-inf"))


@step_kernel
def join_kernel(
    parts, slots, plan, out, last_tokens, lengths, out_row, last_row, record, num_parts, PAD: tl.constexpr
):  # fmt: skip
    """One row: the best of what its parts chose."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    state = tl.load(plan + row * PLAN, mask=slot >= 0, other=DONE)
    if state != DONE:
        best, mass, _ = join_stats(parts, row, num_parts, PAD)
        i = tl.arange(0, PAD)
        at = parts + (row * num_parts + i) * COLUMNS
        value = tl.load(at + VALUE, mask=i < num_parts, other=float("-inf"))
        value = tl.where(value == value, value, float("-inf"))
        winner = tl.argmax(value, 0)
        at_winner = parts + (row * num_parts + winner) * COLUMNS
        token = tl.load(at_winner + CHOSEN).to(tl.int32, bitcast=True)
        logprob = tl.load(at_winner + SCORE) - best - tl.log(mass)
        finish_row(row, slot, token, logprob, out, out_row, last_tokens, last_row, lengths, record)
