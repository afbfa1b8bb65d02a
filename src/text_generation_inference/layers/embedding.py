"""Token embedding and the output head, split over ranks by vocabulary; they may share one weight."""

import torch
from torch import Tensor

from text_generation_inference.devices.device import Ops
from text_generation_inference.parallel import Parallel
from text_generation_inference.weights.declare import Blocks, Declared, Module, Part


class VocabWeight(Module):
    """A `[vocab, hidden]` matrix, looked up by row or multiplied as the head."""

    def __init__(
        self, ops: Ops, parallel: Parallel, name: str, vocab_size: int, hidden_size: int, is_head: bool
    ) -> None:
        self.ops = ops
        self.parallel = parallel
        self.start, self.end = parallel.split(vocab_size, "the vocabulary")
        self.part = Part(f"{name}.weight", (vocab_size, hidden_size))
        if parallel.world > 1:
            self.part = Part(f"{name}.weight", (vocab_size, hidden_size), 0, self.start, self.end)
        self.is_head = is_head  # also, or only, used as the head
        self.weight: Tensor | Blocks

    def declare(self) -> list[Declared]:
        return [Declared("weight", [self.part], packable=True)]

    def accepts_blocks(self, kind: str) -> bool:
        return kind in self.ops.block_kinds

    def finish(self) -> None:
        if isinstance(self.weight, Blocks):
            self.weight = self.ops.pack_blocks(self.weight.kind, self.weight.data, self.weight.shape[1])
        elif self.is_head:
            self.weight = self.ops.pack_linear(self.weight)

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
        if self.parallel.world == 1 and isinstance(self.weight, Tensor):
            return self.ops.logits(hidden, self.weight, out)
        result = self.parallel.all_gather_last(self.ops.linear(hidden, self.weight, None))
        return result if out is None else out.copy_(result)
