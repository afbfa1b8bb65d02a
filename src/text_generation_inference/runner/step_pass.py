"""One model pass of a step, between what computes it and what chooses tokens from it."""

from dataclasses import dataclass, field

from torch import Tensor

from text_generation_inference.runner.prompt_scores import PromptScores


@dataclass(slots=True)
class ScoredPrompt:
    slot: int
    start: int  # position of the first token that is scored
    parts: list[PromptScores]


@dataclass(slots=True)
class StepPass:
    """The rows that sample come first in the logits; padding may follow."""

    slots: list[int]  # of the sampling rows
    logits: Tensor | None  # of this rank's ids; None where no row samples
    row_slots: Tensor  # slots of all rows, where the slots are
    prompts: list[ScoredPrompt] = field(default_factory=list[ScoredPrompt])
    is_decode: bool = False  # of nothing but the decode set
