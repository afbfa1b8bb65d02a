"""What the rows of a step need of sampling, on a device that runs ahead.

Each slot's numbers are on the device already; this says which kernels a batch needs and for which rows, and
brings the masks of grammars and watermarks, which depend on the tokens before, in one copy. What it says is kept while
the rows stay the same.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.kernels.choice import Adjustments, GatheredRows, SamplingNeeds
from text_generation_inference.kernels.slot_state import OTHER_FILTERS, PLAIN
from text_generation_inference.runner.slots import Slots, sampling_mode_of
from text_generation_inference.runner.staging import Staging
from text_generation_inference.sampling.filters import asked_by
from text_generation_inference.sampling.mask import RowMasks
from text_generation_inference.sampling.sampler import needs_all_scores
from text_generation_inference.sampling.tops import MORE_TIES
from text_generation_inference.sampling.vocabulary import VocabularyPart
from text_generation_inference.sampling.watermark import green_list
from text_generation_inference.types import Admission, SamplingParams


@dataclass(slots=True)
class BatchNeeds:
    """Of one batch."""

    sampling: SamplingNeeds
    top_rows: list[int]  # rows that want their best ids
    top_limits: list[int]  # how many each may get at most
    top_table: Tensor | None  # see `choice.Tops.rows`
    top_room: int
    penalised: list[int]  # slots
    marked: list[int]  # slots with a watermark

    @property
    def only_draws(self) -> bool:
        """Whether draws, perhaps with filters, are all that is asked for: what they need is in the slots."""
        sampling = self.sampling
        nothing_else = sampling.adjustments is None and sampling.others is None and sampling.gathered is None
        return nothing_else and not self.top_rows

    @property
    def of_order(self) -> SamplingNeeds:
        """Of the rows that need the order of all ids."""
        return self.sampling if self.sampling.gathered is None else self.sampling.gathered.needs


class SlotNeeds:
    def __init__(
        self, device: Device, slots: Slots, num_slots: int, vocabulary: VocabularyPart, watermark: tuple[float, float]
    ) -> None:
        self._slots = slots
        self._vocabulary = vocabulary
        self._gamma, self._delta = watermark
        self._staging = Staging(device)
        self._params = [SamplingParams()] * num_slots
        self._is_plain = [True] * num_slots
        self._has_others = [False] * num_slots
        self._last: dict[int, int] = {}  # last token of each slot with a watermark
        self._key: object = None
        self._needs: BatchNeeds | None = None

    @property
    def follows_tokens(self) -> bool:
        """Whether some slot's scores depend on tokens that the host must have seen."""
        return bool(self._last)

    def admit(self, admission: Admission) -> None:
        slot, request = admission.slot, admission.request
        self._params[slot], self._is_plain[slot] = request.sampling, sampling_mode_of(request) == PLAIN
        others = [name for name in asked_by(request.sampling) if name in OTHER_FILTERS]
        self._has_others[slot] = request.sampling.samples and bool(others)
        self._last.pop(slot, None)
        if request.sampling.watermark:
            self._last[slot] = (request.token_ids + admission.output_ids)[-1]
        self._key = None

    def release(self, slots: list[int]) -> None:
        for slot in slots:
            self._last.pop(slot, None)

    def advance(self, rows: list[int], token_ids: list[int]) -> None:
        """Take what was sampled for the rows (slots)."""
        if self._last:
            for slot, token_id in zip(rows, token_ids, strict=True):
                if slot in self._last:
                    self._last[slot] = token_id

    def find(self, rows: list[int], size: int, masks: RowMasks | None) -> BatchNeeds | None:
        """What the rows (slots; `size` with padding) ask for; None if all are plain."""
        masked = masks.rows if masks is not None else []
        if self._key != (size, masked, rows):
            self._key, self._needs = (size, list(masked), list(rows)), self._make(rows, size, masked)
        return self._needs

    def bring(self, needs: BatchNeeds, masks: RowMasks | None) -> None:
        """What differs from step to step."""
        adjustments = needs.sampling.adjustments
        if adjustments is None:
            return
        if needs.penalised:
            adjustments.longest = int(self._slots.lengths_cpu[needs.penalised].max())
        wanted: dict[str, np.ndarray] = {}
        if masks is not None and masks.rows:
            wanted["allowed"] = masks.of(self._vocabulary).allowed
        if needs.marked:
            green = [green_list(self._last[slot], self._vocabulary.size, self._gamma) for slot in needs.marked]
            wanted["green"] = self._vocabulary.cut(np.stack(green))
        for words in wanted.values():
            self._staging.put(words.reshape(-1))
        for (name, words), sent in zip(wanted.items(), self._staging.send(self._slots.state), strict=True):
            setattr(adjustments, name, sent.view(words.shape))

    def _make(self, rows: list[int], size: int, masked: list[int]) -> BatchNeeds | None:
        if all(self._is_plain[slot] for slot in rows):
            return None
        params = [self._params[slot] for slot in rows]
        drawing = [p for p in params if p.samples]
        top_rows = [row for row, p in enumerate(params) if p.top_n_tokens]
        top_limits = [params[row].top_n_tokens + MORE_TIES for row in top_rows]
        penalised = [row for row, p in enumerate(params) if p.penalises]
        marked = [row for row, p in enumerate(params) if p.watermark]
        biased = [row for row, p in enumerate(params) if p.logit_bias]
        adjusted = sorted({*penalised, *marked, *biased, *masked})
        places = {row: place for place, row in enumerate(adjusted)}
        green = {row: number for number, row in enumerate(marked)}
        allowed = {row: number for number, row in enumerate(masked)}
        start, end = self._vocabulary.start, self._vocabulary.end
        biases = [
            (places[row], token_id - start, value)
            for row in biased
            for token_id, value in params[row].logit_bias.items()
            if start <= token_id < end
        ]
        of_place, of_id, of_value = zip(*biases, strict=True) if biases else ((), (), ())
        # Filters and best ids are found for all rows, or for those that are gathered.
        gathered: list[int] = []
        if not self._vocabulary.is_whole:
            gathered = [row for row, p in enumerate(params) if needs_all_scores(p)]
        among = {row: number for number, row in enumerate(gathered or range(size))}
        top_table = np.zeros((len(among) if top_rows else 0, 2), dtype=np.int32)
        for number, row in enumerate(top_rows):
            top_table[among[row]] = params[row].top_n_tokens, number
        others = [among[row] for row, slot in enumerate(rows) if self._has_others[slot]]
        rows_of_adjusted, place_of_row, penalised_places, bias_table, tops, other_rows, gathered_rows = self._keep(
            np.array([(row, green.get(row, -1), allowed.get(row, -1)) for row in adjusted], dtype=np.int32),
            np.array([places.get(row, -1) for row in range(size)], dtype=np.int32),
            np.array([places[row] for row in penalised], dtype=np.int32),
            np.array([of_place, of_id, np.array(of_value, dtype=np.float32).view(np.int32)], dtype=np.int32),
            top_table,
            np.array(others, dtype=np.int32),
            np.array(gathered, dtype=np.int32),
        )
        limits = any(p.top_k > 0 or p.top_p < 1 for p in drawing)
        sampling = SamplingNeeds(
            filters=limits or any(p.typical_p < 1 or p.min_p > 0 for p in drawing),
            counts=limits or bool(top_rows),
            typical=any(p.typical_p < 1 for p in drawing),
        )
        if others:
            sampling.others = other_rows.long()
        if not self._vocabulary.is_whole:
            of_gathered = GatheredRows(gathered_rows.long(), sampling) if gathered else None
            sampling = SamplingNeeds(gathered=of_gathered)
        if adjusted:
            sampling.adjustments = Adjustments(
                rows=rows_of_adjusted,
                places=place_of_row,
                delta=self._delta,
                penalised=penalised_places if penalised else None,
                biases=bias_table if biases else None,
            )
        return BatchNeeds(
            sampling=sampling,
            top_rows=top_rows,
            top_table=tops if top_rows else None,
            top_limits=top_limits,
            top_room=max(top_limits, default=0),
            penalised=[rows[row] for row in penalised],
            marked=[rows[row] for row in marked],
        )

    def _keep(self, *arrays: np.ndarray) -> list[Tensor]:
        """Copies on the device that stay."""
        self._staging.put(np.concatenate([array.reshape(-1) for array in arrays]))
        kept = self._staging.send(self._slots.state)[0].clone()
        bounds = pairwise(accumulate((array.size for array in arrays), initial=0))
        return [kept[a:b].view(array.shape) for array, (a, b) in zip(arrays, bounds, strict=True)]
