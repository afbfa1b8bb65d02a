"""Tokens of slots that are on the host: chosen when the logits are there, and known at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.runner.slots import Slots
from text_generation_inference.runner.step_pass import StepPass
from text_generation_inference.sampling.mask import RowMasks
from text_generation_inference.sampling.parts import KnownTokens
from text_generation_inference.sampling.sampler import Sampler
from text_generation_inference.sampling.vocabulary import VocabularyPart
from text_generation_inference.types import Admission, TopTokens


class SampledRows(Protocol):
    """Tokens of the rows that sampled in a pass, best ids of those that want them. Read once, when the step is done."""

    def read_tokens(self) -> tuple[list[int], list[float]]: ...

    def read_tops(self) -> list[TopTokens]: ...


@dataclass(slots=True)
class HostTokens:
    """`SampledTokens` that were read already."""

    token_ids: list[int]
    logprobs: list[float]
    tops: list[TopTokens]

    def read_tokens(self) -> tuple[list[int], list[float]]:
        return self.token_ids, self.logprobs

    def read_tops(self) -> list[TopTokens]:
        return self.tops


class HostSampling:
    def __init__(
        self,
        device: Device,
        slots: Slots,
        vocabulary: VocabularyPart,
        watermark: tuple[float, float],
        pads: bool = False,  # logits have padded rows, and each number of rows is a shape
    ) -> None:
        self._slots = slots
        state = slots.state
        pages, last = state.pages.numpy(), state.last_tokens.numpy()
        known = KnownTokens(pages, state.page_tables.numpy(), last, slots.lengths_cpu, state.max_tokens)
        self._sampler = Sampler(device.ops, device.torch_device, known, vocabulary, watermark, pads, slots.newest)

    @property
    def follows_tokens(self) -> bool:
        """Whatever depends on tokens finds them in the slots."""
        return False

    def admit(self, admission: Admission) -> None:
        self._sampler.admit(admission)

    def release(self, slots: Sequence[int]) -> None:
        pass

    def advance(self, slots: list[int], token_ids: list[int]) -> None:
        pass

    def take_best(self, logits: Tensor, row_slots: Tensor) -> Tensor:
        return logits

    def choose(self, made: StepPass, masks: RowMasks | None) -> SampledRows:
        """The tokens of a pass's sampling rows, which go into the slots."""
        assert made.logits is not None
        sampled = self._sampler.choose(made.logits, made.slots, masks)
        token_ids, logprobs = sampled.read_tokens()
        count = len(made.slots)
        self._slots.append(made.slots, token_ids[:count])
        return HostTokens(token_ids[:count], logprobs[:count], sampled.read_tops())

    def warm(self, logits: Tensor) -> None:
        """Meet the choice that follows padded logits of this shape."""
        self._sampler.warm(logits)
