"""The slots of all requests as one tensor, and the ops that read and change them without the host, in plain torch.

For devices that run ahead of the host: the host sends a step's changes in one copy (`apply_writes`), inputs
are read from the slots (`gather_inputs`), and chosen tokens go back into them: those of plain rows, which take their
best token, by `greedy_into`, those of all others by `choose_into`. A row whose slot is -1 is padding: it reads token 0
at position 0 and writes to block 0, which no request owns.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_inference.kernels import reference, sampling

FILTERS = ("temperature", "top_k", "top_p", "typical_p", "min_p", "sampling_mode")
PLAIN, DRAWS, ADJUSTED = 0.0, 1.0, -1.0  # ways: the best token; a draw; the best token, with more to it than that
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty", "frequency_by_length")


class SlotState:
    """One row per slot. All tensors are views of `words`, so that one kind of write reaches everything."""

    LENGTH, NUM_PROMPT, SEED, NUMBERS, RECORD = 0, 2, 4, 6, 16  # places in a record, in words

    def __init__(self, num_slots: int, max_tokens: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        max_blocks = -(-max_tokens // block_size)
        num_rows = num_slots + num_slots % 2  # records stay aligned to 8 bytes
        self.rows_at = num_slots * self.RECORD
        self.tables_at = self.rows_at + num_rows
        self.tokens_at = self.tables_at + num_slots * max_blocks
        self.words = torch.zeros(self.tokens_at + num_slots * max_tokens, dtype=torch.int32, device=device)
        self.records = self.words[: self.rows_at].view(num_slots, self.RECORD)
        self.rows = self.words[self.rows_at : self.rows_at + num_slots]  # the decode set; -1 past its end
        self.block_tables = self.words[self.tables_at : self.tokens_at].view(num_slots, max_blocks)
        self.tokens = self.words[self.tokens_at :].view(num_slots, max_tokens)
        wide, real = self.records.view(torch.int64), self.records.view(torch.float32)
        self.lengths, self.num_prompt, self.seeds = (
            wide[:, place // 2] for place in (self.LENGTH, self.NUM_PROMPT, self.SEED)
        )
        self.filters = real[:, self.NUMBERS : self.NUMBERS + len(FILTERS)]
        self.numbers = {name: real[:, self.NUMBERS + i] for i, name in enumerate(FILTERS + PENALTIES)}
        self.rows.fill_(-1)


@dataclass(slots=True)
class Adjustments:
    """What changes the scores of some rows before the temperature. Applied in the order of `choose_into`."""

    rows: Tensor  # [adjusted, 3] int32: the row, which of `green` and which of `allowed` are its own (-1: none)
    places: Tensor  # [rows] int32: where a row is among the adjusted ones, or -1
    green: Tensor | None = (
        None  # [marked, words] int32: the ids that the watermark favours; bit i of word j is 32 j + i
    )
    delta: float = 0.0  # how much it favours them
    penalised: Tensor | None = None  # [penalised] int32: places of the rows with penalties
    longest: int = 0  # of them, in known tokens
    biases: Tensor | None = None  # [3, biases] int32: place, id, bits of what is added
    allowed: Tensor | None = None  # [masked, words] int32: all that a grammar allows, in bits like `green`


@dataclass(slots=True)
class Tops:
    """The rows that want to know their best ids, and where these go.

    All ids at least as likely as the one at the wanted place, so ties may be more than wanted. Past the room that `out`
    has, higher ids are left out.
    """

    rows: Tensor  # [rows, 2] int32: how many are wanted (0: none), and the row of `out` for them
    out: Tensor  # [wanting, 1 + 2 * room] int32: how many there are, ids, bits of log-probabilities

    @property
    def room(self) -> int:
        return (self.out.shape[1] - 1) // 2


@dataclass(slots=True)
class Asked:
    """What `choose_into` must be ready for; each row's own numbers are in its slot. What no row asks costs nothing."""

    filters: bool = False  # top-k, top-p, typical-p or min-p
    counts: bool = False  # top-k, top-p or the best ids
    typical: bool = False
    adjustments: Adjustments | None = None
    tops: Tops | None = None


EVERY_FILTER = Asked(filters=True, counts=True, typical=True)


def apply_writes(words: Tensor, staged: Tensor, num_writes: int) -> None:
    """staged begins with a header per write, (place low, place high, source, count); sources are places in staged."""
    headers: list[list[int]] = staged[: 4 * num_writes].view(-1, 4).tolist()  # pyright: ignore
    for low, high, source, count in headers:
        place = (high << 32) | (low & 0xFFFFFFFF)
        words[place : place + count] = staged[source : source + count]


def gather_inputs(state: SlotState, slots: Tensor, at: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """slots `[tokens]` int32, at `[tokens]` int32: positions, or -1 (and everywhere if None) for the last known token.

    -> input_ids, positions, kv_index (int64) and seq_lens (int32, 0 for padding), each `[tokens]`.
    """
    real = slots >= 0
    rows = slots.clamp(min=0).long()
    positions = state.lengths[rows] - 1
    if at is not None:
        positions = torch.where(at >= 0, at.long(), positions)
    positions = torch.where(real, positions, 0)
    ids = torch.where(real, state.tokens[rows, positions].long(), 0)
    blocks = state.block_tables[rows, positions // state.block_size].long()
    kv_index = torch.where(real, blocks * state.block_size + positions % state.block_size, 0)
    return ids, positions, kv_index, torch.where(real, positions + 1, 0).to(torch.int32)


def greedy_into(logits: Tensor, slots: Tensor, state: SlotState, out: Tensor) -> None:
    """logits `[rows, vocab]`: the best token of each plain row goes into its slot, with its log-probability into out.

    out `[2, >= rows]` int32: ids, then the bits of the log-probabilities; other rows are left alone. A row with a NaN,
    or whose best score is infinite, gives id 0 and NaN: its slot goes on with a token that exists until the host has
    seen the NaN.
    """
    tokens, logprobs = reference.greedy(logits.float())
    plain = state.numbers["sampling_mode"][slots.clamp(min=0).long()] == PLAIN
    _append(slots, (slots >= 0) & plain, state, out, tokens, logprobs)


def choose_into(logits: Tensor, slots: Tensor, state: SlotState, out: Tensor, asked: Asked = EVERY_FILTER) -> None:
    """Like `greedy_into` for rows that are not plain, with all that requests may ask for. logits are left as they are.

    In this order: watermark, repetition, frequency and presence penalty, biases, grammar; temperature; here the best
    ids and all log-probabilities are taken; top-k, top-p, typical-p, min-p; draw. Ids as likely as the last one that
    top-k, top-p or typical-p keep stay too.
    """
    rows = slots.clamp(min=0).long()
    temperature, top_k, top_p, typical_p, min_p, mode = torch.where(
        (slots >= 0)[:, None], state.filters[rows], torch.tensor([1.0, 0, 1, 1, 0, PLAIN], device=slots.device)
    ).unbind(1)
    scores = logits.float()
    if asked.adjustments is not None:
        adjusted = asked.adjustments.rows[:, 0].long()
        scores = scores.index_copy(0, adjusted, adjust(logits, slots, state, asked.adjustments))
    scores = scores / temperature[:, None]
    totals = scores.logsumexp(dim=-1)
    if asked.tops is not None:
        _report_best(scores - totals[:, None], asked.tops)
    best, best_id = scores.max(dim=-1)
    tokens = best_id
    if bool((mode == DRAWS).any()):
        kept = sampling.top_k(scores, top_k)
        kept = sampling.typical_p(_with_ties(kept, sampling.top_p(kept, top_p)), typical_p)
        drawn = sampling.draw(sampling.min_p(kept, min_p), state.seeds[rows], state.lengths[rows])
        tokens = torch.where(mode == DRAWS, drawn, best_id)
    logprobs = scores.gather(1, tokens[:, None])[:, 0] - totals
    _append(slots, mode != PLAIN, state, out, tokens, torch.where(best.isinf(), torch.nan, logprobs))


def _with_ties(before: Tensor, kept: Tensor) -> Tensor:
    """Keep also what is as good as the worst of the kept."""
    floor = torch.where(kept > -math.inf, kept, math.inf).amin(dim=-1, keepdim=True)
    return before.masked_fill(before < floor, -math.inf)


def adjust(logits: Tensor, slots: Tensor, state: SlotState, wanted: Adjustments) -> Tensor:
    """The adjusted scores `[adjusted, vocab]`, float32."""
    rows, green, allowed = wanted.rows.long().unbind(1)
    scores = logits[rows].float()
    if wanted.green is not None:
        marked = green >= 0
        scores[marked] += wanted.delta * _bits(wanted.green, scores.shape[1])[green[marked]]
    if wanted.penalised is not None:
        places = wanted.penalised.long()
        index = slots[rows[places]].long()
        known = (state.tokens[index, : wanted.longest], state.lengths[index], state.num_prompt[index])
        numbers = {name: state.numbers[name][index] for name in PENALTIES}
        scores[places] = penalise(scores[places], *known, numbers)
    if wanted.biases is not None:
        places, ids, values = wanted.biases.unbind(0)
        scores.index_put_((places.long(), ids.long()), values.view(torch.float32), accumulate=True)
    if wanted.allowed is not None:
        masked = allowed >= 0
        sampling.allow_only(scores, masked.nonzero()[:, 0], wanted.allowed[allowed[masked]])
    return scores


def penalise(scores: Tensor, history: Tensor, lengths: Tensor, prompts: Tensor, numbers: dict[str, Tensor]) -> Tensor:
    """In place: the three penalties of rows with these known tokens `[rows, longest]`, of which `prompts` are given."""
    lengths, prompts = lengths[:, None], prompts[:, None]
    history = history.long()
    positions = torch.arange(history.shape[1], device=history.device)
    known = positions < lengths
    # Past a row's end stands its first token, which is known anyway.
    seen_ids = torch.where(known, history, history[:, :1])
    sampling.repetition_penalty(scores, seen_ids, numbers["repetition_penalty"])
    in_output = known & (positions >= prompts)
    shares = torch.where(numbers["frequency_by_length"][:, None] > 0, known / lengths, in_output.float())
    sampling.frequency_penalty(scores, seen_ids, numbers["frequency_penalty"][:, None] * shares)
    if bool(numbers["presence_penalty"].any()):  # it takes a pass over all ids
        sampling.presence_penalty(scores, seen_ids, in_output, numbers["presence_penalty"])
    return scores


def _bits(words: Tensor, count: int) -> Tensor:
    """`[any, words]` int32 -> `[any, count]` of 0 and 1."""
    places = torch.arange(32, device=words.device)
    return ((words[:, :, None] >> places) & 1).flatten(1)[:, :count]


def _report_best(logprobs: Tensor, tops: Tops) -> None:
    table: list[list[int]] = tops.rows.tolist()  # pyright: ignore
    for row, (wanted, place) in enumerate(table):
        if wanted > 0:
            values, ids = logprobs[row].sort(descending=True, stable=True)
            kept = (values >= values[min(wanted, len(values)) - 1]) & (values > -math.inf)
            count = min(int(kept.sum()), tops.room)
            tops.out[place, 0] = count
            tops.out[place, 1 : 1 + count] = ids[:count].to(torch.int32)
            tops.out[place, 1 + tops.room : 1 + tops.room + count] = values[:count].float().view(torch.int32)


def _append(slots: Tensor, wanted: Tensor, state: SlotState, out: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
    """For the rows that are wanted."""
    chosen = torch.where(logprobs.isnan(), 0, tokens)[wanted].to(torch.int32)
    places = wanted.nonzero()[:, 0]
    out[0, places] = chosen
    out[1, places] = logprobs[wanted].to(torch.float32).view(torch.int32)
    rows = slots[wanted].long()
    state.tokens[rows, state.lengths[rows]] = chosen
    state.lengths[rows] += 1
