"""The sampler: chooses the next token of each row, from logits and what the slots' requests ask for.

Order: watermark, penalties, bias, mask; temperature; here log-probabilities and the best ids are taken; filters; draw.
What no row asks for is not computed: a batch of plain greedy requests is one pass over the logits. Where shapes are
exact a part touches the rows that ask for it. Where they are padded it touches all rows, with neutral numbers for
those that do not ask: then every shape follows from the number of rows, and the device may make a graph for each.

Where ranks share a vocabulary each has the scores of its own ids. Adjusting them needs no others; the choice is joined
from parts (`vocabulary`), and rows that need all of their scores (filters, best ids) are gathered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.sampling import filters, temperature
from text_generation_inference.sampling.bias import Bias
from text_generation_inference.sampling.draw import FEW, NUM_BEST, add_noise, draw, draw_from_best, noise_keys
from text_generation_inference.sampling.mask import RowMasks, allow_only
from text_generation_inference.sampling.ops import Arguments, Result, SamplerOps, TokenKeeper
from text_generation_inference.sampling.parts import Arrays, KnownTokens, Room, SamplingPart
from text_generation_inference.sampling.penalties import Penalties
from text_generation_inference.sampling.sampled_tokens import BestIds, PaddedTokens, SampledTokens
from text_generation_inference.sampling.slot_numbers import SlotNumbers
from text_generation_inference.sampling.tops import MORE_TIES, best_ids, count_kept, in_order, kept_ids
from text_generation_inference.sampling.vocabulary import VocabularyPart, join, look
from text_generation_inference.sampling.watermark import Watermark
from text_generation_inference.types import Admission, SamplingParams

_NEUTRAL = SamplingParams()
_LARGEST_ID = 1 << 24  # that a float32 tells from all others
_TOP_ROOM = 16  # best ids that padded rows report at least: up to 8 wanted ones, and ties


@dataclass(slots=True)
class _Group:
    """Rows that a part touches."""

    rows: slice | list[int] | None  # None: all of them
    slots: np.ndarray  # of these rows; -1: padding
    kept: list[Any]  # as long as the rows stay: tensors on the device, or arrays for who makes graphs, see `_bring`

    def take(self, scores: Tensor) -> Tensor:
        return scores if self.rows is None else scores[self.rows]


@dataclass(slots=True)
class _Draws:
    """Rows that draw in the same way; among padded ones, some that do not draw."""

    group: _Group
    keep_few: bool  # whether filters are likely to leave few ids
    filters: list[str]  # that any of them asks for


@dataclass(slots=True)
class _Batch:
    """What the rows of a batch ask for."""

    adjusting: list[tuple[SamplingPart, _Group]]
    draws: list[_Draws]
    tops: _Group | None
    top_rows: list[int]
    top_counts: list[int]  # how many each of them wants
    all_draw: bool
    shared: "_Shared | None" = None  # where ranks share the vocabulary


@dataclass(slots=True)
class _Shared:
    """How the tokens of a batch are found from parts of the vocabulary."""

    drawing: _Group | None  # all rows, some of which draw; None: none does
    gathered: list[int]  # rows that need all of their scores
    whole: _Batch | None  # what these ask for


class Sampler:
    def __init__(
        self,
        ops: SamplerOps,
        device: torch.device,
        known: KnownTokens,
        vocabulary: VocabularyPart,
        watermark: tuple[float, float],  # gamma, delta
        pads: bool = False,
        keeper: TokenKeeper | None = None,  # of the tokens of padded rows; None: the host has them at once
    ) -> None:
        num_slots = known.num_slots
        self._greedy, self._device, self._known, self._pads = ops.greedy, device, known, pads
        self._keeper = keeper
        self._vocabulary, self._num_words = vocabulary, -(-vocabulary.width // 32)
        room = Room(pads)
        self._parts: list[SamplingPart] = [
            Watermark(known, vocabulary, *watermark),
            Penalties(known, vocabulary, room),
            Bias(vocabulary, room),
        ]
        self._numbers = SlotNumbers((temperature.NAME, *filters.FIELDS), num_slots)
        self._params = [_NEUTRAL] * (num_slots + 1)  # slot -1 is padding
        self._seeds = np.zeros(num_slots + 1, dtype=np.int64)
        self._has_graphs = pads and ops.by_shape is not None
        by_shape = ops.by_shape if pads and ops.by_shape is not None else _as_it_is
        self._apply = {id(part): by_shape(part.apply) for part in self._parts}
        self._allow_only = by_shape(allow_only)
        # What is found for padded rows goes to the host as one tensor.
        assert not pads or vocabulary.size <= _LARGEST_ID
        self._best, self._join_parts = by_shape(_together(self._greedy), True), by_shape(_together(join), True)
        self._draw_unfiltered, self._draw_filtered, self._draw_unsorted, self._draw_from_best = (
            by_shape(_together(_draw_unfiltered)),
            by_shape(_together(_draw_filtered)),
            by_shape(_together(_draw_unsorted)),
            by_shape(_together(_draw_from_best)),
        )
        self._find_tops = by_shape(_find_tops)
        self._best_here, self._drawn_here = by_shape(self._look_best, True), by_shape(self._look_drawn)
        self._warmed: set[int] = set()  # numbers of rows
        self._key: tuple[int, list[int]] | None = None
        self._batch: _Batch | None = None

    def admit(self, admission: Admission) -> None:
        """Take over a slot's parameters."""
        slot, request = admission.slot, admission.request
        for part in self._parts:
            part.admit(admission)
        self._numbers.admit(slot, request.sampling)
        self._params[slot] = request.sampling
        self._seeds[slot] = request.seed - 2**64 if request.seed >= 2**63 else request.seed
        self._key = None

    def choose(self, logits: Tensor, rows: list[int], masks: RowMasks | None = None) -> SampledTokens | PaddedTokens:
        """logits `[rows or more, vocab]` float32, which may be overwritten; `rows` are the slots of the first ones.
        Of a shared vocabulary: this rank's part; all ranks choose together, and find the same.

        Tokens and log-probabilities are those of all rows of the logits.
        """
        batch = self._look_up(rows, logits.shape[0])
        scores = self._here(logits)
        for part, group in batch.adjusting:
            arrays = [*group.kept, *self._bring(part.step(group.slots))]
            scores = self._touch(scores, group.rows, lambda part_of, a=arrays, p=part: self._apply[id(p)](part_of, *a))
        if masks is not None and masks.rows:
            scores = self._mask(scores, masks)
        return self._choose_whole(scores, batch) if batch.shared is None else self._choose_shared(scores, batch.shared)

    def _choose_whole(self, scores: Tensor, batch: _Batch) -> SampledTokens | PaddedTokens:
        """From the adjusted scores of all ids."""
        if self._pads:
            best = self._padded_best(scores, batch) if batch.tops is not None else None
            found = self._draw_padded(scores, batch.draws[0]) if batch.draws else self._take(self._best(scores))
            return PaddedTokens(found, best)
        tops = self._report_best(scores, batch) if batch.tops is not None else None
        if batch.all_draw and scores.shape[0]:
            shape = (scores.shape[0],)
            token_ids = torch.empty(shape, dtype=torch.int64, device=scores.device)
            logprobs = torch.empty(shape, dtype=torch.float32, device=scores.device)
        else:
            token_ids, logprobs = self._greedy(scores)
        for draws in batch.draws:
            where = slice(None) if draws.group.rows is None else draws.group.rows
            token_ids[where], logprobs[where] = self._draw_exact(draws.group.take(scores), draws)
        return SampledTokens(token_ids, logprobs, tops)

    def _choose_shared(self, scores: Tensor, shared: _Shared) -> SampledTokens | PaddedTokens:
        """From the adjusted scores of this rank's ids."""
        num_rows = scores.shape[0]
        if shared.whole is not None and len(shared.gathered) == num_rows:
            return self._choose_whole(self._vocabulary.gather(scores), shared.whole)
        assert self._vocabulary.exchange is not None
        parts = self._look(scores, shared.drawing)
        if self._pads:  # nothing of them is gathered, or all is
            return PaddedTokens(self._take(self._join_parts(self._vocabulary.exchange(parts))))
        token_ids, logprobs = join(self._vocabulary.exchange(parts))
        if shared.whole is None:
            return SampledTokens(token_ids, logprobs)
        rows = shared.gathered
        found = self._choose_whole(self._vocabulary.gather(scores[rows]), shared.whole)
        assert isinstance(found, SampledTokens)
        token_ids[rows], logprobs[rows] = found.token_ids, found.logprobs
        tops = found.tops
        if tops is not None:
            tops = replace(tops, rows=[rows[row] for row in tops.rows])
        return SampledTokens(token_ids, logprobs, tops)

    def _look(self, scores: Tensor, drawing: _Group | None) -> Tensor:
        """What this rank says of its part of every row."""
        if drawing is None:
            return self._best_here(scores)
        return self._drawn_here(scores, *drawing.kept, *self._bring(self._keys(drawing.slots)))

    def _look_best(self, scores: Tensor) -> Tensor:
        return look(scores, scores, self._vocabulary.start)

    def _look_drawn(self, scores: Tensor, warmth: Tensor, samples: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Rows of which some draw."""
        start = self._vocabulary.start
        scores = temperature.apply(scores, warmth)
        return look(scores, torch.where(samples[:, None], add_noise(scores, low, high, start), scores), start)

    def warm(self, logits: Tensor) -> None:
        """Meet everything that may follow padded logits of this shape, whatever is asked for."""
        self.choose(logits, [])
        scores, num_rows = self._here(logits), logits.shape[0]
        if not self._has_graphs or num_rows in self._warmed:
            return
        self._warmed.add(num_rows)
        slots = np.full(num_rows, -1)
        for part in self._parts:
            for arrays in part.shapes(num_rows):
                self._apply[id(part)](scores, *self._bring(arrays))
        words = np.full((num_rows, self._num_words), -1, dtype=np.int32)
        self._allow_only(scores, *self._bring([words]))
        kept, keys = self._bring(self._draw_numbers(slots)), self._bring(self._keys(slots))
        if self._vocabulary.exchange is not None:
            self._take(self._join_parts(self._vocabulary.exchange(self._drawn_here(scores, *kept[:2], *keys))))
            scores = self._vocabulary.gather(scores)
            self._take(self._best(scores))
        self._take(self._draw_unfiltered(scores, *kept[:2], *keys))
        for draw_rows in (self._draw_filtered, self._draw_unsorted, self._draw_from_best):
            self._take(draw_rows(scores, *kept, *keys))
        self._bring_back(self._find_tops(scores, *self._bring(self._top_arrays(slots, [0] * num_rows, 1))))

    # -- who asks for what -----------------------------------------------------------------------------------------

    def _look_up(self, rows: list[int], num_rows: int) -> _Batch:
        """Kept while the rows stay the same."""
        if self._batch is None or self._key is None or self._key[0] != num_rows or self._key[1] != rows:
            self._key, self._batch = (num_rows, list(rows)), self._make_batch(rows, num_rows)
            if not self._vocabulary.is_whole:
                self._batch.shared = self._share([*rows, *[-1] * (num_rows - len(rows))])
        return self._batch

    def _make_batch(self, rows: list[int], num_rows: int) -> _Batch:
        padded = [*rows, *[-1] * (num_rows - len(rows))]
        slots = np.array(padded, dtype=np.int64)
        params = [self._params[slot] for slot in padded]

        def group(wanting: list[int], arrays: Callable[[np.ndarray], Arrays]) -> _Group:
            touched = None if self._pads else _as_slice(wanting, num_rows)
            of_group = slots if touched is None else slots[touched]
            return _Group(touched, of_group, self._bring(arrays(of_group)))

        def draws(drawing: list[int]) -> _Draws:
            asked = {name for row in drawing for name in filters.asked_by(params[row])}
            keep_few = all(keeps_few(params[row]) for row in drawing)
            of_group = group(drawing, self._draw_numbers)
            return _Draws(of_group, keep_few, [name for name in filters.FIELDS if name in asked])

        adjusting = [(part, [row for row, p in enumerate(params) if part.asks(p)]) for part in self._parts]
        drawing: dict[object, list[int]] = {}  # rows by what they have in common
        for row, p in enumerate(params):
            if p.samples:  # padded rows: one graph for all; others: what sorts all ids is for those who ask for it
                drawing.setdefault(self._pads or keeps_few(p) or filters.asked_by(p), []).append(row)
        top_counts = [p.top_n_tokens for p in params]
        top_rows = [row for row, count in enumerate(top_counts) if count]
        most = max(top_counts, default=0)
        return _Batch(
            adjusting=[(part, group(asking, part.keep)) for part, asking in adjusting if asking],
            draws=[draws(alike) for alike in drawing.values()],
            tops=group(top_rows, lambda some: self._top_arrays(some, top_counts, most)) if top_rows else None,
            top_rows=top_rows,
            top_counts=[count for count in top_counts if count],
            all_draw=all(p.samples for p in params),
        )

    def _share(self, rows: list[int]) -> _Shared:
        """Rows (slots) that need all of their scores, and how the others are found. Of padded rows all or none."""
        params, slots = [self._params[slot] for slot in rows], np.array(rows, dtype=np.int64)
        gathered = [row for row, p in enumerate(params) if needs_all_scores(p)]
        if self._pads and gathered:
            gathered = list(range(len(rows)))
        drawing = None
        if any(p.samples for p in params):
            drawing = _Group(None, slots, self._bring(self._draw_numbers(slots)[:2]))
        whole = self._make_batch([rows[row] for row in gathered], len(gathered)) if gathered else None
        return _Shared(drawing, gathered, whole)

    def _draw_numbers(self, slots: np.ndarray) -> Arrays:
        listed: list[int] = slots.tolist()
        samples = np.array([self._params[slot].samples for slot in listed])
        return [self._numbers.of(slots)[0], samples, *self._numbers.of(slots)[1:]]

    def _top_arrays(self, slots: np.ndarray, counts: list[int], most: int) -> Arrays:
        """Temperatures, how many are wanted, and a place for each that may be found."""
        room = most + MORE_TIES
        if self._pads:
            room = max(_TOP_ROOM, 1 << (room - 1).bit_length())
            wanted = counts
        else:
            wanted = [count for count in counts if count]
        places = np.arange(min(room, self._vocabulary.size), dtype=np.int32)
        return [self._numbers.of(slots)[0], np.array(wanted, dtype=np.int32), places]

    def _keys(self, slots: np.ndarray) -> Arrays:
        """What the noise of these rows follows from. 64-bit integers stay on the host."""
        seeds, positions = self._seeds[slots], self._known.lengths[slots].astype(np.int64)
        return [key.numpy() for key in noise_keys(_tensor(seeds), _tensor(positions))]

    # -- steps -----------------------------------------------------------------------------------------------------

    def _touch(self, scores: Tensor, rows: "slice | list[int] | None", change: Callable[[Tensor], Tensor]) -> Tensor:
        """Change some rows."""
        if rows is None:
            return change(scores)
        some = scores[rows]
        changed = change(some)
        if changed is not some or not isinstance(rows, slice):  # else the rows themselves were changed
            scores[rows] = changed
        return scores

    def _mask(self, scores: Tensor, masks: RowMasks) -> Tensor:
        masks = masks.of(self._vocabulary)
        if self._pads:
            return self._allow_only(scores, *self._bring([masks.for_all(scores.shape[0], self._num_words)]))
        (allowed,) = self._send([masks.allowed])
        return self._touch(scores, _as_slice(masks.rows, scores.shape[0]), lambda some: allow_only(some, allowed))

    def _draw_exact(self, scores: Tensor, draws: _Draws) -> tuple[Tensor, Tensor]:
        """Rows that all draw."""
        low, high = self._send(self._keys(draws.group.slots))
        warmth, _, *numbers = draws.group.kept
        scores = temperature.apply(scores, warmth)
        named = dict(zip(filters.FIELDS, numbers, strict=True))
        if draws.keep_few:
            token_ids, enough = draw_from_best(scores, named, low, high)
            if not bool(enough.all()):
                rest = ~enough
                kept = filters.keep(scores[rest], {name: named[name][rest] for name in named}, draws.filters)
                token_ids[rest] = draw(kept, low[rest], high[rest])
        else:
            token_ids = draw(filters.keep(scores, named, draws.filters), low, high)
        return token_ids, scores.gather(1, token_ids[:, None])[:, 0] - scores.logsumexp(dim=-1)

    def _draw_padded(self, scores: Tensor, draws: _Draws) -> Tensor:
        """Rows of which some draw: one of four functions, each of them a graph of its own. On the host, see
        `_together`."""
        arrays = [*draws.group.kept, *self._bring(self._keys(draws.group.slots))]
        if draws.keep_few:
            few = self._draw_from_best(scores, *arrays)
            found = _fetch(few)  # what follows depends on it
            if bool(found[2].all()):  # enough
                if self._keeper is not None:
                    self._keeper.write(few)
                return found
        if not draws.filters:
            return self._take(self._draw_unfiltered(scores, *arrays[:2], *arrays[-2:]))
        if all(name in filters.UNSORTED for name in draws.filters):
            return self._take(self._draw_unsorted(scores, *arrays))
        return self._take(self._draw_filtered(scores, *arrays))

    def _take(self, found: Tensor) -> Tensor:
        """What `_together` has made, on its way to the host or there."""
        if self._keeper is not None:
            self._keeper.write(found)
        return self._bring_back(found)

    def _bring_back(self, found: Tensor) -> Tensor:
        return _fetch(found) if self._keeper is None else self._keeper.fetch(found)

    def _padded_best(self, scores: Tensor, batch: _Batch) -> Callable[[], BestIds]:
        """Read once the step is done."""
        assert batch.tops is not None
        found = self._bring_back(self._find_tops(scores, *batch.tops.kept))

        def read() -> BestIds:
            of_rows = found[batch.top_rows]
            counts, room = of_rows[:, 0].long(), of_rows.shape[1] // 2
            return _best_of(batch, counts, of_rows[:, 1 : 1 + room].long(), of_rows[:, 1 + room :])

        return read

    def _report_best(self, scores: Tensor, batch: _Batch) -> BestIds:
        assert batch.tops is not None
        warmth, wanted, places = batch.tops.kept
        warm = temperature.apply(batch.tops.take(scores), warmth)
        warm.sub_(warm.logsumexp(dim=-1, keepdim=True))
        return _best_of(batch, *kept_ids(warm, wanted, places.shape[0]))

    def _here(self, logits: Tensor) -> Tensor:
        """Those of a scored prompt come back from the host."""
        return logits if logits.device.type == self._device.type else logits.to(self._device)

    def _send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        return [_tensor(array).to(self._device) for array in arrays]

    def _bring(self, arrays: Sequence[np.ndarray]) -> "list[Tensor] | list[np.ndarray]":
        """Who makes graphs sends all arrays of one together, in each step: what stays the same with what does not, as a
        copy costs more than the bytes of another step's numbers."""
        return list(arrays) if self._has_graphs else self._send(arrays)


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


def _as_it_is(function: Callable[..., Result], keeps: bool = False) -> Callable[..., Result]:
    return function


def _together(function: Callable[Arguments, Sequence[Tensor]]) -> Callable[Arguments, Tensor]:
    """What it finds for rows, each `[rows]`, as one float32 tensor, which holds ids exactly."""

    @wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Tensor:
        return torch.stack([each.float() for each in function(*args, **kwargs)])

    return run


def _best_of(batch: _Batch, counts: Tensor, ids: Tensor, values: Tensor) -> BestIds:
    limits = [count + MORE_TIES for count in batch.top_counts]
    return BestIds(batch.top_rows, limits, counts, *in_order(ids, values))


def _fetch(found: Tensor) -> Tensor:
    """To the host: the next call of a graph overwrites what the one before has found."""
    return found.cpu().clone()


def keeps_few(params: SamplingParams) -> bool:
    """Whether filters are likely to keep at most `NUM_BEST` ids. Depends on the request alone."""
    asked = filters.asked_by(params)
    return all(name in FEW for name in asked) and (0 < params.top_k <= NUM_BEST or params.top_p < 1)


def needs_all_scores(params: SamplingParams) -> bool:
    """Whether something depends on the order of all ids, so that a vocabulary that ranks share is gathered."""
    return bool(params.top_n_tokens) or (params.samples and bool(filters.asked_by(params)))


def _as_slice(rows: list[int], num_rows: int) -> "slice | list[int] | None":
    """Rows that follow each other are seen without a copy; None: all there are."""
    if len(rows) == num_rows:
        return None
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return rows


# -- functions of tensors alone, for all rows of a padded batch ------------------------------------------------------


_Drawn = tuple[Tensor, Tensor]  # token ids, log-probabilities


def _take(scores: Tensor, samples: Tensor, drawn: Tensor) -> _Drawn:
    token_ids = torch.where(samples, drawn, scores.argmax(dim=-1))
    return token_ids, scores.gather(1, token_ids[:, None])[:, 0] - scores.logsumexp(dim=-1)


def _draw_unfiltered(
    scores: Tensor, warmth: Tensor, samples: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor]:
    scores = temperature.apply(scores, warmth)
    return _take(scores, samples, draw(scores, low, high))


def _draw_filtered(scores: Tensor, warmth: Tensor, samples: Tensor, *arrays: Tensor) -> _Drawn:
    return _draw_kept(filters.FIELDS, scores, warmth, samples, *arrays)


def _draw_unsorted(scores: Tensor, warmth: Tensor, samples: Tensor, *arrays: Tensor) -> _Drawn:
    return _draw_kept(filters.UNSORTED, scores, warmth, samples, *arrays)


def _draw_kept(
    wanted: Sequence[str], scores: Tensor, warmth: Tensor, samples: Tensor, *arrays: Tensor
) -> tuple[Tensor, Tensor]:
    *numbers, low, high = arrays
    scores = temperature.apply(scores, warmth)
    kept = filters.keep(scores, dict(zip(filters.FIELDS, numbers, strict=True)), wanted)
    return _take(scores, samples, draw(kept, low, high))


def _draw_from_best(scores: Tensor, warmth: Tensor, samples: Tensor, *arrays: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    *numbers, low, high = arrays
    named = dict(zip(filters.FIELDS, numbers, strict=True))
    scores = temperature.apply(scores, warmth)
    drawn, enough = draw_from_best(scores, named, low, high)
    return *_take(scores, samples, drawn), enough | ~samples


def _find_tops(scores: Tensor, warmth: Tensor, wanted: Tensor, places: Tensor) -> Tensor:
    """`[rows, 1 + 2 * places]` float32: how many there are, ids, log-probabilities."""
    scores = temperature.apply(scores, warmth)
    ids, values = best_ids(scores - scores.logsumexp(dim=-1, keepdim=True), places.shape[0])
    return torch.cat((count_kept(values, wanted)[:, None].float(), ids.float(), values.float()), 1)
