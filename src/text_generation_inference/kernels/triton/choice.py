# pyright: basic, reportMissingImports=false
"""From logits to tokens, and the tokens into the slots. Definitions: `kernels.choice`.

Plain rows take the best token, in two small kernels over parts of the vocabulary. For the others `Choice`
queues the kernels of `filters` that the batch needs; which rows take part in each is decided on the device.

Where ranks share a vocabulary, the parts of all of them are joined: ranks exchange what they found of each part,
in the order of ids, and every rank joins. Rows with filters, or that want their best ids, are gathered.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_inference.kernels import choice
from text_generation_inference.kernels.choice import EVERY_FILTER, SamplingNeeds, Tops
from text_generation_inference.kernels.slot_state import SlotState
from text_generation_inference.kernels.triton import filters, thresholds
from text_generation_inference.kernels.triton.adjust import Adjust
from text_generation_inference.kernels.triton.filters import DRAWS, PLAIN, SAMPLING_MODE, finish_row, step_kernel
from text_generation_inference.sampling.vocabulary import VocabularyPart

_PART = 4096  # ids that one program of the plain way looks at


@triton.jit
def _is_plain(slots, filters, row, filters_row):
    slot = tl.load(slots + row)
    mode = tl.load(filters + slot.to(tl.int64) * filters_row + SAMPLING_MODE, mask=slot >= 0, other=DRAWS)
    return mode == PLAIN


@step_kernel
def _best_of_part_kernel(
    logits, parts, slots, filters, logits_row, filters_row, vocab, start, num_parts, PART: tl.constexpr
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1)
    if not _is_plain(slots, filters, row, filters_row):
        return
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
    tl.store(at + 2, (start + part * PART + place).to(tl.int32).to(tl.float32, bitcast=True))


@step_kernel
def _join_parts_kernel(
    parts, slots, filters, out, last_tokens, lengths, out_row, last_row, filters_row, record, num_parts,
    PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if not _is_plain(slots, filters, row, filters_row):
        return
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
    finish_row(row, tl.load(slots + row), token, logprob, out, out_row, last_tokens, last_row, lengths, record)


def greedy_into(
    logits: Tensor, slots: Tensor, state: SlotState, out: Tensor, vocabulary: VocabularyPart | None = None
) -> None:
    """See `kernels.choice.greedy_into`."""
    rows, vocab = logits.shape
    of = vocabulary or VocabularyPart.whole(vocab)
    num_parts = triton.cdiv(of.most, _PART)
    parts = torch.empty((rows, num_parts * 3), dtype=torch.float32, device=logits.device)
    filters_row = state.filters.stride(0)
    _best_of_part_kernel[(num_parts, rows)](
        logits, parts, slots, state.filters, logits.stride(0), filters_row, vocab, of.start, num_parts, PART=_PART,
        num_warps=4,
    )  # fmt: skip
    if of.exchange is not None:
        parts = of.exchange(parts)
        num_parts = parts.shape[1] // 3
    _join_parts_kernel[(rows,)](
        parts, slots, state.filters, out, state.last_tokens, state.lengths, out.stride(0), state.last_tokens.stride(0),
        filters_row, state.lengths.stride(0), num_parts, PAD=triton.next_power_of_2(num_parts), num_warps=1,
    )  # fmt: skip


# The general way -------------------------------------------------------------------------------------------------


class Choice:
    """`kernels.choice.choose_into`."""

    room = 8192  # scores of a row that the list of the ones near a threshold holds
    part = 4096  # ids that one program looks at
    few = 16  # rows that are left to the definition at a time

    def __init__(self) -> None:
        self._adjust = Adjust()

    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        state: SlotState,
        out: Tensor,
        needs: SamplingNeeds = EVERY_FILTER,
        vocabulary: VocabularyPart | None = None,
    ) -> None:
        rows, vocab = logits.shape
        of = vocabulary or VocabularyPart.whole(vocab)
        num_parts = triton.cdiv(of.most, self.part)
        parts, plan, facts, bins, listed, ids = self._make_room(rows, num_parts, logits.device)
        scores, places = parts, slots  # where there are none: not read
        if needs.adjustments is not None:
            scores, places = self._adjust(logits, slots, state, needs.adjustments, of), needs.adjustments.places
        if needs.gathered is not None:
            whole = of.gather(_adjusted(logits, scores, places, needs, needs.gathered.rows))
            slots = choice.choose_gathered(self, whole, slots, state, out, needs.gathered)
        if needs.others is not None:
            self._choose_others(logits, scores, places, slots, state, out, needs, needs.others)
            slots = slots.index_fill(0, needs.others, -1)
        tops = top_out = slots
        if needs.tops is not None:
            tops, top_out = needs.tops.rows, needs.tops.out
        read = {
            "logits": logits, "scores": scores, "places": places, "slots": slots, "filters": state.filters,
            "parts": parts, "plan": plan, "logits_row": logits.stride(0), "filters_row": state.filters.stride(0),
            "vocab": vocab, "num_parts": num_parts, "adjusted": int(needs.adjustments is not None),
        }  # fmt: skip
        noise = {"lengths": state.lengths, "seeds": state.seeds, "record": state.lengths.stride(0)}
        last_tokens = state.last_tokens
        write = {"out": out, "last_tokens": last_tokens, "out_row": out.stride(0), "last_row": last_tokens.stride(0)}
        many = {"PART": self.part, "num_warps": 8}
        pad = {"PAD": triton.next_power_of_2(num_parts)}
        top = {"tops": tops, "wants_tops": int(needs.tops is not None)}
        top_write = {"top_out": top_out, "top_row": top_out.stride(0)}
        by_parts, by_rows = (num_parts, rows), (rows,)
        filters.look_kernel[by_parts](**read, **noise, **top, **top_write, bins=bins, start=of.start, **many)
        if of.exchange is not None:
            parts = of.exchange(parts)
            num_parts = parts.shape[1] // filters.COLUMNS.value
            pad = {"PAD": triton.next_power_of_2(num_parts)}
        if needs.filters or needs.tops is not None:
            for kind in (0, 1) if needs.typical else (0,):
                if needs.counts or kind == 1:
                    filters.count_kernel[by_parts](**read, **pad, **many, facts=facts, bins=bins, KIND=kind)
                    filters.bound_kernel[by_rows](
                        slots, state.filters, tops, parts, plan, facts, bins, state.filters.stride(0), vocab, num_parts,
                        self.room, top["wants_tops"], KIND=kind, **pad, num_warps=4,
                    )  # fmt: skip
                    filters.collect_kernel[by_parts](
                        **read, **pad, **many, facts=facts, listed=listed, ids=ids, room=self.room, KIND=kind
                    )
                thresholds.thresholds_kernel[by_rows](
                    **read, **noise, **write, **top, **top_write, **pad, facts=facts, bins=bins, listed=listed, ids=ids,
                    room=self.room, top_room=needs.tops.room if needs.tops is not None else 0, BLOCK=512, KIND=kind,
                    num_warps=8,
                )  # fmt: skip
            filters.draw_kernel[by_parts](**read, **noise, **pad, **many, facts=facts)
        filters.join_kernel[by_rows](
            parts, slots, plan, out, last_tokens, state.lengths, out.stride(0), last_tokens.stride(0),
            state.lengths.stride(0), num_parts, **pad, num_warps=1,
        )  # fmt: skip

    def _choose_others(
        self,
        logits: Tensor,
        scores: Tensor,
        places: Tensor,
        slots: Tensor,
        state: SlotState,
        out: Tensor,
        needs: SamplingNeeds,
        others: Tensor,
    ) -> None:
        """Rows with a filter that no kernel knows: by the definition, few at a time, as it takes much memory."""
        for rows in others.split(self.few):
            some = _adjusted(logits, scores, places, needs, rows)
            tops = Tops(needs.tops.rows[rows], needs.tops.out) if needs.tops is not None else None
            found = torch.zeros((2, rows.shape[0]), dtype=torch.int32, device=out.device)
            choice.choose_into(some, slots[rows], state, found, SamplingNeeds(tops=tops))
            out[:, rows] = found

    def _make_room(self, rows: int, num_parts: int, device: torch.device) -> list[Tensor]:
        """Made for each call, so that a captured one has its own."""
        shapes = (
            (num_parts * filters.COLUMNS.value, torch.float32), (filters.PLAN.value, torch.int32),
            (filters.FACTS.value, torch.float32), (filters.BINS.value, torch.int32), (self.room, torch.float32),
            (self.room, torch.int32),
        )  # fmt: skip
        return [torch.empty((rows, width), dtype=dtype, device=device) for width, dtype in shapes]


def _adjusted(logits: Tensor, scores: Tensor, places: Tensor, needs: SamplingNeeds, rows: Tensor) -> Tensor:
    """float32 scores of some rows: the model's, or the adjusted ones of those that have a place among them."""
    some = logits[rows].float()
    if needs.adjustments is None:
        return some
    place = places[rows].long()
    return torch.where(place[:, None] >= 0, scores[place.clamp(min=0)], some)
