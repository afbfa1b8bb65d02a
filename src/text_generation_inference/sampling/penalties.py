"""Repetition, frequency and presence penalty: ids that a request has seen become less likely, or more."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.sampling.parts import Arrays, KnownTokens, Room
from text_generation_inference.sampling.slot_numbers import SlotNumbers
from text_generation_inference.sampling.vocabulary import VocabularyPart
from text_generation_inference.types import Admission, SamplingParams

FIELDS = ("repetition_penalty", "frequency_penalty", "presence_penalty", "frequency_by_length")


def penalise(scores: Tensor, history: Tensor, lengths: Tensor, prompts: Tensor, numbers: Sequence[Tensor]) -> Tensor:
    """In place: the penalties of rows with these known tokens `[rows, room]`, of which the first `prompts` are given.

    `numbers`: those of `FIELDS`. An id is touched once however often it occurs, where an occurrence does not count.
    """
    repetition, frequency, presence, by_length = (values[:, None] for values in numbers)
    lengths, prompts = lengths[:, None], prompts[:, None]
    history = history.long()
    places = torch.arange(history.shape[1], device=history.device)
    is_known = places < lengths
    seen_ids = torch.where(is_known, history, history[:, :1])  # past a row's end: its first token, known anyway
    seen = scores.gather(1, seen_ids)
    scores.scatter_(1, seen_ids, torch.where(seen < 0, seen * repetition, seen / repetition))
    in_output = is_known & (places >= prompts)
    shares = torch.where(by_length > 0, is_known / lengths, in_output.float())
    scores.scatter_add_(1, seen_ids, -(frequency * shares))
    # Where the output does not have an id: the last token, which is in the output if there is any.
    last = history.gather(1, (lengths - 1).clamp(0, history.shape[1] - 1).long())
    output_ids = torch.where(in_output, history, last)
    amount = torch.where(lengths > prompts, presence, 0.0)
    return scores.scatter_(1, output_ids, scores.gather(1, output_ids) - amount)


def penalise_part(
    scores: Tensor,
    history: Tensor,
    lengths: Tensor,
    prompts: Tensor,
    numbers: Sequence[Tensor],
    vocabulary: VocabularyPart,
) -> Tensor:
    """The same for this rank's ids: what is done to the ids of others goes to a column of its own.

    Scores stay where they are, as programs that come after it are found by strides, too.
    """
    if vocabulary.is_whole:
        return penalise(scores, history, lengths, prompts, numbers)
    wider = F.pad(scores, (0, 1))
    changed = penalise(wider, vocabulary.own(history), lengths, prompts, numbers)
    return scores.copy_(changed[:, : vocabulary.width])


class Penalties:
    def __init__(self, known: KnownTokens, vocabulary: VocabularyPart, room: Room) -> None:
        self._known, self._vocabulary, self._room = known, vocabulary, room
        num_slots = known.num_slots
        self._numbers = SlotNumbers(FIELDS, num_slots)
        self._num_prompt = np.ones(num_slots + 1, dtype=np.int32)

    def asks(self, params: SamplingParams) -> bool:
        return params.penalises

    def admit(self, admission: Admission) -> None:
        self._numbers.admit(admission.slot, admission.request.sampling)
        self._num_prompt[admission.slot] = len(admission.request.token_ids)

    def keep(self, slots: np.ndarray) -> Arrays:
        return [*self._numbers.of(slots), self._num_prompt[slots]]

    def step(self, slots: np.ndarray) -> Arrays:
        known = self._known
        lengths = np.where(slots >= 0, known.lengths[slots], 1).astype(np.int32)
        room = self._room.fit(int(lengths.max()), known.max_tokens)
        return [lengths, known.history(slots, room)]

    def shapes(self, num_rows: int) -> Iterator[Arrays]:
        slots = np.full(num_rows, -1)
        for room in self._room.sizes(self._known.max_tokens):
            lengths = np.ones(num_rows, dtype=np.int32)
            yield [*self.keep(slots), lengths, np.zeros((num_rows, room), dtype=np.int32)]

    def apply(self, scores: Tensor, *arrays: Tensor) -> Tensor:
        *numbers, prompts, lengths, history = arrays
        return penalise_part(scores, history, lengths, prompts, numbers, self._vocabulary)
