"""What tests of a Gaudi card share: made-up batches of its kernels, and limits of small engines."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.block_lists import (
    BlockLists,
    WholePrompts,
    put_together,
    take_apart,
)

SIZE = 128  # tokens of a block
LIMITS = {"max_batch_size": 3, "max_total_tokens": 160, "max_batch_total_tokens": 2048}


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(found.cpu().float(), expected.cpu().float(), atol=tolerance, rtol=tolerance)


class Called(TorchDispatchMode):
    """Which ops were called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# -- batches ---------------------------------------------------------------------------------------------------------


class Made:
    """Rows of the given lengths in a cache, padded to a bucket; the CPU's copy and the card's."""

    def __init__(self, device, seq_lens: list[int], rows: int, decode: bool, blocks: int = 0, length: int = 0, **heads):
        self.heads, self.kv_heads, self.dim = heads["heads"], heads["kv_heads"], heads["dim"]
        generator = torch.Generator().manual_seed(sum(seq_lens) + rows)
        rand = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
        counts = [-(-n // SIZE) for n in seq_lens]
        ids = (torch.randperm(sum(counts) + 3, generator=generator) + 1).split([*counts, 3])[:-1]
        num_blocks = sum(counts) + 5
        self.k_cache, self.v_cache = (rand(num_blocks, SIZE, self.kv_heads, self.dim) for _ in range(2))
        self.cos_sin = torch.cat([f(rand(max(seq_lens) + 1, self.dim // 2)) for f in (torch.cos, torch.sin)], -1)
        tokens = rows if decode else rows * length
        self.q = rand(tokens, self.heads, self.dim)
        self.k, self.v = (rand(tokens, self.kv_heads, self.dim) for _ in range(2))
        lens = torch.tensor([*seq_lens, *[0] * (rows - len(seq_lens))], dtype=torch.int32)
        positions, index = torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens, dtype=torch.int64)
        for row, n in enumerate(seq_lens):
            own = torch.tensor([n - 1]) if decode else torch.arange(n)
            at = slice(row, row + 1) if decode else slice(row * length, row * length + n)
            positions[at] = own
            index[at] = ids[row][own // SIZE] * SIZE + own % SIZE
        self.real = torch.zeros(tokens, dtype=torch.bool)
        for row, n in enumerate(seq_lens):
            self.real[row if decode else slice(row * length, row * length + n)] = True
        batch = Batch(torch.zeros(tokens, dtype=torch.int64), positions, index, lens, WholePrompts())
        if decode:
            starts = [sum(counts[:row]) for row in range(len(counts))] + [-1] * (rows - len(seq_lens))
            filler = blocks - sum(counts)
            usage = [
                SIZE if block < count - 1 else (n - 1) % SIZE + 1
                for n, count in zip(seq_lens, counts, strict=True)
                for block in range(count)
            ]
            groups = [row for row, count in enumerate(counts) for _ in range(count)]
            as_int = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
            lists = BlockLists(
                block_list=torch.cat((torch.cat(ids).int(), as_int([0] * filler))),
                block_groups=as_int(groups + [-1] * filler),
                block_usage=as_int(usage + [1] * filler),
                row_starts=as_int(starts),
            )
            self.batch = replace(batch, meta=lists)
        else:
            ends = [row * length + max(0, n - 1) for row, n in enumerate(lens.tolist())]
            self.batch = replace(batch, logit_tokens=torch.tensor(ends))

    def on(self, device) -> tuple[list[Tensor], Batch, list[Tensor]]:
        """(q, k, v, cos_sin), the batch, (k_cache, v_cache) there."""
        caches = [device.zeros(tuple(c.shape), c.dtype) for c in (self.k_cache, self.v_cache)]
        for there, here in zip(caches, (self.k_cache, self.v_cache), strict=True):
            there.copy_(here)
        to = device.torch_device
        batch = put_together({name: tensor.to(to) for name, tensor in take_apart(self.batch).items()})
        return [t.to(to) for t in (self.q.clone(), self.k.clone(), self.v.clone(), self.cos_sin)], batch, caches


HEADS = {"heads": 6, "kv_heads": 2, "dim": 16}
