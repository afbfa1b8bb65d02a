"""Logit bias: what a request adds to the scores of ids it names."""

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from text_generation_inference.sampling.parts import Arrays, Room
from text_generation_inference.sampling.vocabulary import VocabularyPart
from text_generation_inference.types import Admission, SamplingParams


def add_biases(scores: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """In place. ids and values `[rows, room]`; a value of 0 changes nothing."""
    return scores.scatter_add_(1, ids.long(), values)


class Bias:
    def __init__(self, vocabulary: VocabularyPart, room: Room) -> None:
        self._vocabulary, self._room = vocabulary, room
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by slot: ids of this part, values

    def asks(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def admit(self, admission: Admission) -> None:
        start, end = self._vocabulary.start, self._vocabulary.end
        biases = admission.request.sampling.logit_bias
        biases = {token_id - start: value for token_id, value in biases.items() if start <= token_id < end}
        self._biases.pop(admission.slot, None)
        if biases:
            values = np.array(list(biases.values()), dtype=np.float32)
            self._biases[admission.slot] = np.array(list(biases), dtype=np.int32), values

    def keep(self, slots: np.ndarray) -> Arrays:
        found = [self._biases.get(slot) for slot in slots.tolist()]
        most = max((len(biases[0]) for biases in found if biases is not None), default=0)
        ids, values = self._nothing(len(slots), self._room.fit(most, self._vocabulary.width))
        for row, biases in enumerate(found):
            if biases is not None:
                ids[row, : len(biases[0])], values[row, : len(biases[0])] = biases
        return [ids, values]

    def step(self, slots: np.ndarray) -> Arrays:
        return []

    def shapes(self, num_rows: int) -> Iterator[Arrays]:
        """The usual one: more biases than that are rare."""
        yield self._nothing(num_rows, next(self._room.sizes(self._vocabulary.width)))

    @staticmethod
    def apply(scores: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        return add_biases(scores, ids, values)

    @staticmethod
    def _nothing(num_rows: int, room: int) -> Arrays:
        return [np.zeros((num_rows, room), dtype=np.int32), np.zeros((num_rows, room), dtype=np.float32)]
