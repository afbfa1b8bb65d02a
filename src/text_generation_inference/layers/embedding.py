"""Token embedding and the output head, split over ranks by vocabulary; they may share one weight."""

import torch
from torch import Tensor

from text_generation_inference.kernels.ops import Ops
from text_generation_inference.parallel import Parallel
from text_generation_inference.quant.method import Matrix
from text_generation_inference.weights.declare import Part


class VocabWeight(Matrix):
    """A `[vocab, hidden]` matrix, looked up by row or multiplied as the head."""

    def __init__(
        self, ops: Ops, parallel: Parallel, name: str, vocab_size: int, hidden_size: int, is_head: bool
    ) -> None:
        """`is_head`: it is also, or only, multiplied."""
        self.parallel = parallel
        self.start, self.end = parallel.split(vocab_size, "the vocabulary")
        part = Part(f"{name}.weight", (vocab_size, hidden_size))
        if parallel.world > 1:
            part = Part(f"{name}.weight", (vocab_size, hidden_size), 0, self.start, self.end)
        super().__init__(ops, [part], may_round=False, is_multiplied=is_head)

    def look_up(self, ids: Tensor) -> Tensor:
        """ids `[tokens]` -> `[tokens, hidden]`."""
        if self.parallel.world == 1:
            return self.ops.embedding(ids, self.weight)
        local = ids - self.start
        mine = (local >= 0) & (local < self.end - self.start)
        rows = self.ops.embedding(torch.where(mine, local, 0), self.weight)
        return self.parallel.all_reduce(rows * mine[:, None])

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden `[tokens, hidden]` -> `[tokens, vocab]`, into `out` if there is one (float32)."""
        if self.parallel.world == 1:
            return self.method.logits(self, hidden, out)
        result = self.parallel.all_gather_last(self.method.apply(self, hidden))
        return result if out is None else out.copy_(result)
