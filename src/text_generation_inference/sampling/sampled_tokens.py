"""What a step sampled, on its way from the device to the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from text_generation_inference.types import TopTokens


@dataclass(slots=True)
class BestIds:
    """Of the rows that want to know theirs."""

    rows: Sequence[int]
    limits: Sequence[int]  # how many each of them reports at most: the room is that of the row that asks for most
    counts: Tensor  # [rows]: how many there are
    ids: Tensor  # [rows, room]
    logprobs: Tensor  # [rows, room] float32


@dataclass(slots=True)
class SampledTokens:
    """One token for each row; rows of padding may follow."""

    token_ids: Tensor  # [rows]
    logprobs: Tensor  # [rows] float32
    tops: BestIds | None = None

    def read_tokens(self) -> tuple[list[int], list[float]]:
        """Once the step is done.

        A token has one log-probability: that told among the best ids, which another op may have rounded otherwise.
        """
        token_ids, logprobs = _read(self.token_ids), _read(self.logprobs)
        for best in self.read_tops():
            if token_ids[best.row] in best.token_ids:
                logprobs[best.row] = best.logprobs[best.token_ids.index(token_ids[best.row])]
        return token_ids, logprobs

    def read_tops(self) -> list[TopTokens]:
        if self.tops is None:
            return []
        counts = map(min, _read(self.tops.counts), self.tops.limits)
        found = zip(self.tops.rows, counts, _read(self.tops.ids), _read(self.tops.logprobs), strict=True)
        return [TopTokens(row, ids[:count], logprobs[:count]) for row, count, ids, logprobs in found]


class PaddedTokens:
    """The same as one tensor of the host, `[2 or more, rows]` float32, which is read once the step is done."""

    def __init__(self, found: Tensor, tops: Callable[[], BestIds] | None = None) -> None:
        self._found, self._tops = found, tops
        self._taken: SampledTokens | None = None

    @property
    def token_ids(self) -> Tensor:
        return self._take().token_ids

    @property
    def logprobs(self) -> Tensor:
        return self._take().logprobs

    def _take(self) -> SampledTokens:
        if self._taken is None:
            tops = self._tops() if self._tops is not None else None
            self._taken = SampledTokens(self._found[0].long(), self._found[1], tops)
        return self._taken

    def read_tokens(self) -> tuple[list[int], list[float]]:
        return self._take().read_tokens()

    def read_tops(self) -> list[TopTokens]:
        return self._take().read_tops()


def _read(tensor: Tensor) -> list[Any]:
    return tensor.cpu().numpy().tolist()
