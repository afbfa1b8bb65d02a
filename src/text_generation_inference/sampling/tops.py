"""The best ids of a row with their log-probabilities.

All ids at least as likely as the one at the wanted place: ties can make it more than wanted, but never more than
`MORE_TIES` more. The best first, lower ids first among equals.
"""

import math

import torch
from torch import Tensor

MORE_TIES = 8


def best_ids(logprobs: Tensor, room: int, named: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `room` best ids of each row `[rows, vocab]`, lower ones among equals: ids int64 and log-probabilities,
    `[rows, room]`. The best come first, equals in any order: see `in_order`. `named`: which ids the columns are, in
    float32 like the scores; all, otherwise."""
    values, ids = logprobs.topk(room, dim=-1)  # leaves open which of equals it takes
    last = values[:, -1:]
    every = torch.arange(logprobs.shape[1], dtype=torch.float32, device=logprobs.device) if named is None else named
    ids = ids if named is None else named.gather(1, ids).long()
    lowest = torch.where(logprobs == last, -every, -math.inf).topk(room, dim=-1).values
    num_better = (values > last).sum(dim=-1, keepdim=True)
    place = torch.arange(room, device=logprobs.device)
    equal = -lowest.gather(1, (place - num_better).clamp(min=0))
    # What is not a number is equal to nothing.
    return torch.where((place < num_better) | equal.isinf(), ids, equal.long()), values


def kept_ids(logprobs: Tensor, wanted: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """`count_kept` of `best_ids`, and these. Reads on the host whether equals of the last one matter: rarely."""
    values, ids = logprobs.topk(room, dim=-1)
    counts = count_kept(values, wanted)
    if bool((counts == room).any()):
        ids, values = best_ids(logprobs, room)
    return counts, ids, values


def in_order(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The best first, lower ids first among equals."""
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return ids.gather(1, order), values


def count_kept(values: Tensor, wanted: Tensor) -> Tensor:
    """How many of the best `[rows, room]` are at least as good as the one at place `wanted` `[rows]`.

    A mask may leave fewer than wanted.
    """
    at = (wanted.long() - 1).clamp(0, values.shape[1] - 1)[:, None]
    return ((values >= values.gather(1, at)) & (values > -math.inf)).sum(dim=-1)
