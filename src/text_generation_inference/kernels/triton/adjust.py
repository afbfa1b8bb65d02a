# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""Watermark, penalties, biases and grammars, on a float32 copy of the rows that ask. Definition: `kernels.choice`.

An id is penalised once however often a history has it: one kernel tallies the histories in tables with a word
per id, the next takes each word out: whichever occurrence comes first changes the score, and the tables are clean
again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_inference.kernels.choice import Adjustments
from text_generation_inference.kernels.slot_state import SlotState
from text_generation_inference.sampling.penalties import FIELDS as PENALTIES
from text_generation_inference.sampling.vocabulary import VocabularyPart

_PART = 4096  # ids that one program copies
_HISTORY = 1024  # known tokens that one program takes
_BIASES = 256
_TABLES = 64  # rows that are penalised at a time: a table takes four bytes per id
_SEEN, _IN_OUTPUT, _ONE = (tl.constexpr(i) for i in (1, 2, 4))  # of a word of a table: two bits, and a count

assert PENALTIES == ("repetition_penalty", "frequency_penalty", "presence_penalty", "frequency_by_length")


# `do_not_specialize`: inputs of a step lie anywhere and differ in number, which makes no difference to the code.


@triton.jit(
    do_not_specialize=["green_words", "allowed_words"], do_not_specialize_on_alignment=["rows", "green", "allowed"]
)
def copy_kernel(
    logits, scores, rows, green, allowed, delta, logits_row, vocab, green_words, allowed_words, PART: tl.constexpr
):
    """One part of a row: its scores, with what is green raised and what is not allowed dropped.

    A dropped score stays dropped whatever comes after, so that this may come first.
    """
    place = tl.program_id(1)
    row = tl.load(rows + place * 3).to(tl.int64)
    its_green = tl.load(rows + place * 3 + 1).to(tl.int64)
    its_allowed = tl.load(rows + place * 3 + 2).to(tl.int64)
    i = tl.program_id(0) * PART + tl.arange(0, PART)
    x = tl.load(logits + row * logits_row + i, mask=i < vocab, other=0.0).to(tl.float32)
    word = i >> 5
    if its_green >= 0:
        bits = tl.load(green + its_green * green_words + word, mask=word < green_words, other=0)
        x += tl.where((bits >> (i & 31)) & 1 != 0, delta, 0.0)
    if its_allowed >= 0:
        bits = tl.load(allowed + its_allowed * allowed_words + word, mask=word < allowed_words, other=0)
        x += tl.where((bits >> (i & 31)) & 1 != 0, 0.0, float("-inf"))  # NaN stays NaN
    tl.store(scores + place.to(tl.int64) * vocab + i, x, mask=i < vocab)


@triton.jit
def _read_history(pages, page_tables, slot, tables_row, i, known, BLOCK_SIZE: tl.constexpr):
    """The tokens at these positions; of other ranks' ids too."""
    page = tl.load(page_tables + slot * tables_row + i // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
    return tl.load(pages + page * BLOCK_SIZE + i % BLOCK_SIZE, mask=known, other=0)


@triton.jit(do_not_specialize_on_alignment=["rows", "penalised", "slots"])
def tally_kernel(
    rows, penalised, slots, pages, page_tables, lengths, prompts, penalties, tables, tables_row, record, penalties_row,
    vocab, start, HISTORY: tl.constexpr, BLOCK_SIZE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """One stretch of a history into the row's table."""
    table = tl.program_id(1)
    slot = tl.load(slots + tl.load(rows + tl.load(penalised + table) * 3)).to(tl.int64)
    length = tl.load(lengths + slot * record)
    i = tl.program_id(0) * HISTORY + tl.arange(0, HISTORY)
    if tl.program_id(0) * HISTORY < length:
        known = i < length
        in_output = i >= tl.load(prompts + slot * record)
        by_length = tl.load(penalties + slot * penalties_row + 3) > 0
        token = _read_history(pages, page_tables, slot, tables_row, i, known, BLOCK_SIZE)
        if SHARED:
            token -= start
            known = known & (token >= 0) & (token < vocab)
        at = tables + table.to(tl.int64) * vocab + token
        tl.atomic_or(at, tl.where(in_output, _SEEN | _IN_OUTPUT, _SEEN), mask=known, sem="relaxed")
        counted = tl.where(by_length, 1, in_output.to(tl.int32))
        tl.atomic_add(at, counted * _ONE, mask=known & (counted > 0), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["rows", "penalised", "slots"])
def penalise_kernel(
    rows, penalised, slots, pages, page_tables, lengths, penalties, tables, scores, tables_row, record, penalties_row,
    vocab, start, HISTORY: tl.constexpr, BLOCK_SIZE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """One stretch of a history: penalise the ids whose tally is still there, and take it out."""
    table = tl.program_id(1)
    place = tl.load(penalised + table)
    slot = tl.load(slots + tl.load(rows + place * 3)).to(tl.int64)
    length = tl.load(lengths + slot * record)
    i = tl.program_id(0) * HISTORY + tl.arange(0, HISTORY)
    if tl.program_id(0) * HISTORY < length:
        known = i < length
        numbers = penalties + slot * penalties_row
        repetition, frequency, presence = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
        by_length = tl.load(numbers + 3) > 0
        token = _read_history(pages, page_tables, slot, tables_row, i, known, BLOCK_SIZE)
        if SHARED:
            token -= start
            known = known & (token >= 0) & (token < vocab)
        tally = tl.atomic_xchg(tables + table.to(tl.int64) * vocab + token, token * 0, mask=known, sem="relaxed")
        mine = known & (tally != 0)
        at = scores + place.to(tl.int64) * vocab + token
        x = tl.load(at, mask=mine, other=0.0)
        x = tl.where(x < 0, x * repetition, x / repetition)
        count = (tally // _ONE).to(tl.float32)
        x -= frequency * tl.where(by_length, count / length.to(tl.float32), count)
        x -= tl.where((tally & _IN_OUTPUT) != 0, presence, 0.0)
        tl.store(at, x, mask=mine)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["biases"])
def bias_kernel(scores, biases, count, vocab, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(biases + i, mask=i < count, other=0).to(tl.int64)
    token = tl.load(biases + count + i, mask=i < count, other=0)
    value = tl.load(biases + 2 * count + i, mask=i < count, other=0).to(tl.float32, bitcast=True)
    at = scores + place * vocab + token
    tl.store(at, tl.load(at, mask=i < count, other=0.0) + value, mask=i < count)


class Adjust:
    """`kernels.choice.adjust`. Keeps its tables: calls on one device go to one queue."""

    def __init__(self) -> None:
        self._tables: Tensor | None = None

    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        state: SlotState,
        wanted: Adjustments,
        vocabulary: VocabularyPart | None = None,
    ) -> Tensor:
        vocab, count = logits.shape[1], wanted.rows.shape[0]
        scores = torch.empty((count, vocab), dtype=torch.float32, device=logits.device)
        nothing = wanted.rows
        green = nothing if wanted.green is None else wanted.green
        allowed = nothing if wanted.allowed is None else wanted.allowed
        copy_kernel[(triton.cdiv(vocab, _PART), count)](
            logits, scores, wanted.rows, green, allowed, wanted.delta, logits.stride(0), vocab, green.shape[1],
            allowed.shape[1], PART=_PART, num_warps=8,
        )  # fmt: skip
        if wanted.penalised is not None:
            of = vocabulary or VocabularyPart.whole(vocab)
            self._penalise(scores, slots, state, wanted, wanted.penalised, of)
        if wanted.biases is not None:
            count = wanted.biases.shape[1]
            bias_kernel[(triton.cdiv(count, _BIASES),)](scores, wanted.biases, count, vocab, BLOCK=_BIASES, num_warps=4)
        return scores

    def _penalise(
        self,
        scores: Tensor,
        slots: Tensor,
        state: SlotState,
        wanted: Adjustments,
        penalised: Tensor,
        vocabulary: VocabularyPart,
    ) -> None:
        vocab = scores.shape[1]
        needed = min(triton.next_power_of_2(penalised.shape[0]), _TABLES)
        if self._tables is None or self._tables.shape[0] < needed:
            self._tables = torch.zeros((needed, vocab), dtype=torch.int32, device=scores.device)
        penalties = state.numbers[PENALTIES[0]]  # the others lie behind
        stretches = triton.cdiv(wanted.longest, _HISTORY)
        known = (state.pages, state.page_tables, state.lengths)
        strides = (state.page_tables.stride(0), state.lengths.stride(0), penalties.stride(0), vocab, vocabulary.start)
        ways = {"HISTORY": _HISTORY, "BLOCK_SIZE": state.block_size, "SHARED": not vocabulary.is_whole, "num_warps": 4}
        for first in range(0, penalised.shape[0], needed):
            some = penalised[first : first + needed]
            grid = (stretches, some.shape[0])
            tally_kernel[grid](
                wanted.rows, some, slots, *known, state.num_prompt, penalties, self._tables, *strides,
                **ways,
            )  # fmt: skip
            penalise_kernel[grid](
                wanted.rows, some, slots, *known, penalties, self._tables, scores, *strides, **ways,
            )  # fmt: skip
