"""Token embedding and the output head, split over ranks by vocabulary; they may share one weight. Learned positions."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.errors import StartError
from text_generation_inference.kernels.matrices import plain
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.parallel import Parallel
from text_generation_inference.quant.method import Matrix
from text_generation_inference.sampling.vocabulary import VocabularyPart
from text_generation_inference.weights.declare import Declared, Module, Part


class VocabWeight(Matrix):
    """A `[vocab, hidden]` matrix, looked up by row or multiplied as the head."""

    def __init__(
        self,
        ops: Ops,
        parallel: Parallel,
        name: str,
        vocab_size: int,
        hidden_size: int,
        is_head: bool,
        is_normed: bool = False,
    ) -> None:
        """`is_head`: it is also, or only, multiplied. `is_normed`: its rows are divided by their length."""
        self.is_normed = is_normed
        self.parallel = parallel
        self.vocabulary = VocabularyPart.of_rank(vocab_size, parallel.rank, parallel.world, parallel.all_gather_last)
        start, end = self.vocabulary.start, self.vocabulary.end
        if start == end:
            raise StartError(f"a vocabulary of {vocab_size} cannot be split over {parallel.world} ranks")
        part = Part(f"{name}.weight", (vocab_size, hidden_size))
        if parallel.world > 1:
            part = Part(f"{name}.weight", (vocab_size, hidden_size), 0, start, end)
        if (
            not is_head
        ):  # random ones large enough that layers do not make all tokens alike, so that routers tell them apart
            part = replace(part, random_std=1.0)
        super().__init__(ops, [part], may_round=False, is_multiplied=is_head)
        self.is_head = is_head and not is_normed  # rows that are divided by their length stay as they are

    @property
    def layer_class(self) -> str:
        return "Linear" if self.is_multiplied else "Embedding"

    def finish(self) -> None:
        if self.is_normed:
            self.weight = F.normalize(plain(self.weight))
        super().finish()

    def rename(self, name: str) -> None:
        """It is called so in the checkpoint at hand."""
        self.parts = [replace(part, name=f"{name}.weight") for part in self.parts]

    def look_up(self, ids: Tensor) -> Tensor:
        """ids `[tokens]` -> `[tokens, hidden]`."""
        if self.parallel.world == 1:
            return self.ops.embedding(ids, self.weight)
        local = ids - self.vocabulary.start
        mine = (local >= 0) & (local < self.vocabulary.width)
        rows = self.ops.embedding(torch.where(mine, local, 0), self.weight)
        return self.parallel.all_reduce(rows * mine[:, None])

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden `[tokens, hidden]` -> `[tokens, vocab]` of this rank's ids, into `out` if there is one (float32)."""
        return self.method.logits(self, hidden, out)


class HeadBias(Module):
    """What is added to logits, of a head with its own matrix or with the embedding's."""

    bias: Tensor  # [vocab] of this rank's ids

    def __init__(self, name: str, vocab_size: int, vocabulary: VocabularyPart) -> None:
        self._part = Part(f"{name}.bias", (vocab_size,))
        if vocabulary.width < vocab_size:
            self._part = replace(self._part, dim=0, start=vocabulary.start, end=vocabulary.end)

    def declare(self) -> list[Declared]:
        return [Declared("bias", [self._part])]

    def rename(self, name: str) -> None:
        """The head is called so in the checkpoint at hand."""
        self._part = replace(self._part, name=f"{name}.bias")


@dataclass(frozen=True, slots=True)
class RowsOf:
    """An embedding that is a head, which owns the weight."""

    head: VocabWeight

    def __post_init__(self) -> None:
        self.head.is_head = False

    def look_up(self, ids: Tensor) -> Tensor:
        return self.head.look_up(ids)


class LearnedPositions(Module):
    """A vector for each position, added to the embedding."""

    def __init__(self, ops: Ops, name: str, num_positions: int, offset: int, hidden_size: int) -> None:
        self.ops = ops
        self.offset = offset  # rows before that of position 0
        self.part = Part(f"{name}.weight", (num_positions + offset, hidden_size))
        self.weight: Tensor

    def declare(self) -> list[Declared]:
        return [Declared("weight", [self.part])]

    def look_up(self, positions: Tensor) -> Tensor:
        """positions `[tokens]` -> `[tokens, hidden]`."""
        return self.ops.embedding(positions + self.offset, self.weight)
