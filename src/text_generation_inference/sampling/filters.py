"""The table of filters, in the order of application. Each has a number per row, which may be neutral."""

from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Final

from torch import Tensor

from text_generation_inference.sampling import min_p, top_k, top_n_sigma, top_p, typical_p
from text_generation_inference.sampling.candidates import Candidates
from text_generation_inference.types import SamplingParams

_TABLE: tuple[ModuleType, ...] = (top_n_sigma, top_k, top_p, typical_p, min_p)
FIELDS: Final[tuple[str, ...]] = tuple(module.NAME for module in _TABLE)
UNSORTED: Final = tuple(module.NAME for module in _TABLE if not module.SORTS)  # cheap: no order of all ids is needed
_NEUTRAL = SamplingParams()


def asked_by(params: SamplingParams) -> tuple[str, ...]:
    """The filters that a request needs."""
    return tuple(name for name in FIELDS if getattr(params, name) != getattr(_NEUTRAL, name))


def keep(scores: Tensor, numbers: Mapping[str, Tensor], wanted: Collection[str] = FIELDS) -> Tensor:
    """The scores with -inf for all that the wanted filters drop."""
    candidates = Candidates(scores)
    for module in _TABLE:
        if module.NAME in wanted:
            module.apply(candidates, numbers[module.NAME])
    return candidates.scores
