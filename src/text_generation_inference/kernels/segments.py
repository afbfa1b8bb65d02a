"""Attention without a cache over runs of rows, as the towers of models that see have it: the definition in plain torch.

`Segments` says which rows attend to each other, and has what kernels read of that on the device.
"""

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class _Runs(NamedTuple):
    """Runs of one length; where all runs are, their rows are not listed."""

    length: int
    key_length: int
    rows: Tensor | None
    key_rows: Tensor | None


class Segments:
    """Runs of rows that attend to each other, of lengths that may differ; queries and keys may have their own rows."""

    def __init__(self, queries: Sequence[int], device: torch.device, keys: Sequence[int] | None = None) -> None:
        self.queries = tuple(queries)
        self.keys = self.queries if keys is None else tuple(keys)
        self.device = device

    @cached_property
    def starts(self) -> tuple[Tensor, Tensor]:
        """Where runs of queries and of keys begin, and where the last one ends: `[runs + 1]` int32."""
        of_queries = _starts(self.queries, self.device)
        return of_queries, of_queries if self.keys == self.queries else _starts(self.keys, self.device)

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Run of queries, and of keys."""
        return max(self.queries), max(self.keys)

    @cached_property
    def are_alike(self) -> bool:
        """Runs have one length, and those of keys too."""
        return len(set(self.queries)) == len(set(self.keys)) == 1

    @cached_property
    def groups(self) -> list[_Runs]:
        """Runs of equal lengths together."""
        by_lengths: dict[tuple[int, int], list[tuple[int, int]]] = {}
        start, key_start = 0, 0
        for pair in zip(self.queries, self.keys, strict=True):
            by_lengths.setdefault(pair, []).append((start, key_start))
            start, key_start = start + pair[0], key_start + pair[1]
        if len(by_lengths) == 1:
            return [_Runs(*lengths, None, None) for lengths in by_lengths]
        found: list[_Runs] = []
        for (length, key_length), starts in by_lengths.items():
            of_queries, of_keys = torch.tensor(starts).unbind(1)
            rows = (of_queries[:, None] + torch.arange(length)).flatten()
            key_rows = (of_keys[:, None] + torch.arange(key_length)).flatten()
            found.append(_Runs(length, key_length, rows.to(self.device), key_rows.to(self.device)))
        return found

    def within(self, start: int, end: int) -> "Segments":
        """Those between two of its ends, where queries are the keys."""
        ends = list(accumulate(self.queries, initial=0))
        return Segments(self.queries[ends.index(start) : ends.index(end)], self.device)

    def get_ready(self) -> None:
        """Put all of this on the device: there is no way from the host into a graph."""
        _ = self.starts, self.groups


def cut(segments: Collection[Segments], most: int) -> list[tuple[int, int]]:
    """Rows that see none beyond theirs in any of the segments, from where to where: so many at most if runs allow."""
    if not most or any(each.keys != each.queries for each in segments):
        return [(0, max(sum(each.queries) for each in segments))]
    ends = sorted(set[int].intersection(*(set(accumulate(each.queries)) for each in segments)))
    found, start, last = list[tuple[int, int]](), 0, 0
    for end in ends:
        if last > start and end - start > most:
            found.append((start, last))
            start = last
        last = end
    return [*found, (start, last)]


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    if len(set(lengths)) == 1 and lengths[0]:  # made there: nothing is sent
        return torch.arange(0, lengths[0] * (len(lengths) + 1), lengths[0], dtype=torch.int32, device=device)
    queued = device.type == "cuda"  # behind what the device does, rather than waiting for it
    starts = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, pin_memory=queued)
    return starts.to(device, non_blocking=queued)


def segment_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """q `[rows, heads, dim]`, k and v `[key rows, kv heads, dim]` -> `[rows, heads * dim]`."""
    out = None
    for length, key_length, rows, key_rows in segments.groups:
        if rows is None or key_rows is None:
            return _attend(q, k, v, length, key_length)
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2]) if out is None else out
        out[rows] = _attend(q[rows], k[key_rows], v[key_rows], length, key_length)
    assert out is not None, "there are no rows"
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, length: int, key_length: int) -> Tensor:
    q = q.view(-1, length, *q.shape[1:]).transpose(1, 2)
    k, v = (each.view(-1, key_length, *each.shape[1:]).transpose(1, 2) for each in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] != q.shape[1])
    return out.transpose(1, 2).flatten(2).flatten(0, 1)
