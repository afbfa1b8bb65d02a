"""From logits to tokens in the slots, without the host, in plain torch: the definition of faster ops.

For devices that run ahead of the host: what each row asks for is in its slot. Plain rows, which take their best token,
are chosen for by `greedy_into`, all others by `choose_into`. What the parameters mean is said by `sampling`.

Where ranks share a vocabulary, each has the logits of its own ids and all of them choose together: see
`sampling.vocabulary`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_inference.kernels import reference
from text_generation_inference.kernels.slot_state import DRAWS, PLAIN, SlotState
from text_generation_inference.sampling import filters, penalties
from text_generation_inference.sampling.bits import spread
from text_generation_inference.sampling.draw import add_noise, draw, noise_keys
from text_generation_inference.sampling.tops import best_ids, count_kept, in_order
from text_generation_inference.sampling.vocabulary import VocabularyPart


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
class SamplingNeeds:
    """What `choose_into` must be ready for; each row's own numbers are in its slot. What no row asks costs nothing.

    Of a shared vocabulary: filters and best ids are those of gathered rows alone.
    """

    filters: bool = False  # top-k, top-p, typical-p or min-p
    counts: bool = False  # top-k, top-p or the best ids
    typical: bool = False
    others: Tensor | None = None  # [others] int64: rows with `OTHER_FILTERS`, for ops that do not know these
    adjustments: Adjustments | None = None
    tops: Tops | None = None
    gathered: "GatheredRows | None" = None


@dataclass(slots=True)
class GatheredRows:
    """The rows of a shared vocabulary that need all of their scores."""

    rows: Tensor  # [gathered] int64
    needs: SamplingNeeds  # of these rows, which are adjusted already


EVERY_FILTER = SamplingNeeds(filters=True, counts=True, typical=True)


def greedy_into(
    logits: Tensor, slots: Tensor, state: SlotState, out: Tensor, vocabulary: VocabularyPart | None = None
) -> None:
    """logits `[rows, vocab]`: the best token of each plain row goes into its slot, with its log-probability into out.

    out `[2, >= rows]` int32: ids, then the bits of the log-probabilities; other rows are left alone. A row with a NaN,
    or whose best score is infinite, gives id 0 and NaN: its slot goes on with a token that exists until the host has
    seen the NaN. `vocabulary`: which ids the logits are of; None: all.
    """
    scores = logits.float()
    if vocabulary is None or vocabulary.is_whole:
        tokens, logprobs = reference.greedy(scores)
    else:
        tokens, logprobs = vocabulary.choose(scores, scores)
    plain = state.numbers["sampling_mode"][slots.clamp(min=0).long()] == PLAIN
    _append(slots, (slots >= 0) & plain, state, out, tokens, logprobs)


def choose_into(
    logits: Tensor,
    slots: Tensor,
    state: SlotState,
    out: Tensor,
    needs: SamplingNeeds = EVERY_FILTER,
    vocabulary: VocabularyPart | None = None,
) -> None:
    """Like `greedy_into` for rows that are not plain, with all that requests may ask for. logits are left as they are.

    In this order: watermark, repetition, frequency and presence penalty, biases, grammar; temperature; here the best
    ids and all log-probabilities are taken; filters; draw.
    """
    rows = slots.clamp(min=0).long()
    is_real = slots >= 0
    mode = torch.where(is_real, state.numbers["sampling_mode"][rows], PLAIN)
    scores = logits.float()
    if needs.adjustments is not None:
        adjusted = needs.adjustments.rows[:, 0].long()
        scores = scores.index_copy(0, adjusted, adjust(logits, slots, state, needs.adjustments, vocabulary))
    if vocabulary is not None and not vocabulary.is_whole:
        _choose_shared(scores, slots, state, out, needs.gathered, vocabulary)
        return
    scores = scores / torch.where(is_real, state.numbers["temperature"][rows], 1.0)[:, None]
    totals = scores.logsumexp(dim=-1)
    if needs.tops is not None:
        _report_best(scores - totals[:, None], mode != PLAIN, needs.tops)
    best, best_id = scores.max(dim=-1)
    kept = filters.keep(scores, {name: state.numbers[name][rows] for name in filters.FIELDS})
    drawn = draw(kept, *noise_keys(state.seeds[rows], state.lengths[rows]))
    tokens = torch.where(mode == DRAWS, drawn, best_id)
    logprobs = scores.gather(1, tokens[:, None])[:, 0] - totals
    _append(slots, mode != PLAIN, state, out, tokens, torch.where(best.isinf(), math.nan, logprobs))


def _choose_shared(
    scores: Tensor,
    slots: Tensor,
    state: SlotState,
    out: Tensor,
    gathered: GatheredRows | None,
    vocabulary: VocabularyPart,
) -> None:
    """From the adjusted scores of this rank's ids."""
    if gathered is not None:
        whole = vocabulary.gather(scores[gathered.rows])
        slots = choose_gathered(choose_into, whole, slots, state, out, gathered)
    rows = slots.clamp(min=0).long()
    is_real = slots >= 0
    mode = torch.where(is_real, state.numbers["sampling_mode"][rows], PLAIN)
    scores = scores / torch.where(is_real, state.numbers["temperature"][rows], 1.0)[:, None]
    noisy = add_noise(scores, *noise_keys(state.seeds[rows], state.lengths[rows]), vocabulary.start)
    tokens, logprobs = vocabulary.choose(scores, torch.where((mode == DRAWS)[:, None], noisy, scores))
    _append(slots, mode != PLAIN, state, out, tokens, logprobs)


def choose_gathered(
    choose: Callable[..., None], whole: Tensor, slots: Tensor, state: SlotState, out: Tensor, gathered: GatheredRows
) -> Tensor:
    """For rows whose scores are all here. The slots of the others: -1 in the places of these."""
    rows = gathered.rows
    found = torch.zeros((2, rows.shape[0]), dtype=torch.int32, device=out.device)
    choose(whole, slots[rows], state, found, gathered.needs)
    out[:, rows] = found
    return slots.index_fill(0, rows, -1)


def adjust(
    logits: Tensor, slots: Tensor, state: SlotState, wanted: Adjustments, vocabulary: VocabularyPart | None = None
) -> Tensor:
    """The adjusted scores `[adjusted, vocab]`, float32; `wanted` has bits and biases of the same ids as the logits."""
    rows, green, allowed = wanted.rows.long().unbind(1)
    scores = logits[rows].float()
    vocab_size = scores.shape[1]
    if wanted.green is not None:
        raised = spread(wanted.green, 0.0, wanted.delta, vocab_size)[green.clamp(min=0)]
        scores += torch.where(green[:, None] >= 0, raised, 0.0)
    if wanted.penalised is not None:
        places = wanted.penalised.long()
        index = slots[rows[places]].long()
        known = (state.history(index, wanted.longest), state.lengths[index], state.num_prompt[index])
        numbers = [state.numbers[name][index] for name in penalties.FIELDS]
        of = vocabulary or VocabularyPart.whole(vocab_size)
        scores[places] = penalties.penalise_part(scores[places], *known, numbers, of)
    if wanted.biases is not None:
        places, ids, values = wanted.biases.unbind(0)
        scores.index_put_((places.long(), ids.long()), values.view(torch.float32), accumulate=True)
    if wanted.allowed is not None:
        drops = spread(wanted.allowed, -math.inf, 0.0, vocab_size)[allowed.clamp(min=0)]
        scores += torch.where(allowed[:, None] >= 0, drops, 0.0)
    return scores


def _report_best(logprobs: Tensor, chosen: Tensor, tops: Tops) -> None:
    """Of the rows that are chosen for."""
    wanted, places = tops.rows.long().unbind(1)
    room = min(tops.room, logprobs.shape[1])
    ids, values = in_order(*best_ids(logprobs, room))
    counts = count_kept(values, wanted)[:, None]
    place = torch.arange(room, device=logprobs.device)
    is_kept = place < counts
    found = torch.cat((counts.int(), ids.int(), values.view(torch.int32)), dim=1)
    is_written = torch.cat((torch.ones_like(counts, dtype=torch.bool), is_kept, is_kept), dim=1)
    is_written = is_written & (chosen & (wanted > 0))[:, None]
    columns = torch.cat((place[:1], 1 + place, 1 + tops.room + place)).expand_as(found)
    # All rows write somewhere; those that report nothing add 0.
    change = torch.where(is_written, found - tops.out[places[:, None], columns], 0)
    tops.out.index_put_((places[:, None].expand_as(found), columns), change, accumulate=True)


def _append(slots: Tensor, wanted: Tensor, state: SlotState, out: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
    """For the rows that are wanted. The others, some of them without a slot, add 0 to where they are."""
    chosen = torch.where(logprobs.isnan(), 0, tokens).to(torch.int32)
    count = slots.shape[0]
    words = torch.stack((chosen, logprobs.to(torch.float32).view(torch.int32)))
    out[:, :count] = torch.where(wanted, words, out[:, :count])
    rows = slots.clamp(min=0).long()
    change = torch.where(wanted, chosen - state.last_tokens[rows], 0)
    state.last_tokens.index_put_((rows,), change, accumulate=True)
    state.lengths.index_put_((rows,), wanted.long(), accumulate=True)
