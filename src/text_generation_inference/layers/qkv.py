"""Queries, keys and values as checkpoints store them, and as attention wants them: q, k, v stacked, halves rotated.

Biases and the weights of norms lie in the same order as the rows of the matrix and are read by the same parts.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from text_generation_inference.weights.declare import Arrangement, Part


class QkvLayout(StrEnum):
    SEPARATE = "separate"  # a tensor each
    STACKED = "stacked"  # one tensor: all queries, all keys, all values
    GROUPED = "grouped"  # one tensor: for each key/value head its queries, its key, its value
    QUARTERS = "quarters"  # one tensor: for each quarter of the heads all queries, all values, all keys


_QUARTERS = 4


@dataclass(frozen=True, slots=True)
class HeadRanges:
    """Heads of a layer, and which of them this rank keeps."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    heads: tuple[int, int]
    kv_heads: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Grouped(Arrangement):
    """Rows by group (queries, a key, a value) -> queries, keys, values of all groups."""

    queries: int  # in each group
    kept: tuple[int, int]  # of them
    head_dim: int

    def count(self, rows: int) -> int:
        return rows // (self.queries + 2) * (self.kept[1] - self.kept[0] + 2)

    def apply(self, x: Tensor) -> Tensor:
        groups = x.view(-1, self.queries + 2, self.head_dim, *x.shape[1:])
        parts = (groups[:, slice(*self.kept)].flatten(0, 1), groups[:, -2], groups[:, -1])
        return torch.cat([part.flatten(0, 1) for part in parts])


@dataclass(frozen=True, slots=True)
class Interleaved(Arrangement):
    """Heads whose neighbours 2i, 2i + 1 are rotated together -> heads whose halves are. Scores stay as they are."""

    head_dim: int
    rotary_dim: int
    start: int = 0  # the first of them

    def stays_within(self, size: int) -> bool:
        firsts = range(self.start, math.lcm(self.head_dim, size), self.head_dim)
        return all(first // size == (first + self.rotary_dim - 1) // size for first in firsts)

    def apply(self, x: Tensor) -> Tensor:
        heads = x.view(-1, self.head_dim, *x.shape[1:])
        first, last = self.start, self.start + self.rotary_dim
        turned = heads[:, first:last]
        return torch.cat((heads[:, :first], turned[:, 0::2], turned[:, 1::2], heads[:, last:]), dim=1).flatten(0, 1)


def qkv_parts(
    names: tuple[str, ...],
    layout: QkvLayout,
    ranges: HeadRanges,
    in_features: int | None,  # None: of a bias
    transposed: bool = False,
    interleaved: int = 0,  # dimensions of a head that are rotated as neighbours
) -> list[Part]:
    """This rank's rows of q, k and v."""
    suffix = "bias" if in_features is None else "weight"
    transposed = transposed and in_features is not None
    dim = ranges.head_dim

    def part(name: str, rows: int, kept: tuple[int, int]) -> Part:
        shape = (rows,) if in_features is None else (rows, in_features)
        whole = Part(f"{name}.{suffix}", shape[::-1] if transposed else shape, transposed=transposed)
        start, end = kept
        return whole if kept == (0, rows) else replace(whole, dim=int(transposed), start=start, end=end)

    def scaled(heads: tuple[int, int], by: int = dim, plus: int = 0) -> tuple[int, int]:
        return heads[0] * by + plus, heads[1] * by + plus

    if layout is QkvLayout.GROUPED:
        queries = ranges.num_heads // ranges.num_kv_heads
        first = ranges.kv_heads[0] * queries
        kept = (0, queries) if _shares_evenly(ranges) else (ranges.heads[0] - first, ranges.heads[1] - first)
        group = (queries + 2) * dim
        found = part(names[0], ranges.num_kv_heads * group, scaled(ranges.kv_heads, group))
        return [replace(found, arrangement=Grouped(queries, kept, dim))]
    if layout is QkvLayout.QUARTERS:
        each, rows, parts = ranges.num_heads // _QUARTERS, 3 * ranges.num_heads * dim, list[Part]()
        for place in (0, 2, 1):  # of queries, keys, values
            for quarter in range(_QUARTERS):
                first, last = (min(max(head - quarter * each, 0), each) for head in ranges.heads)
                if first < last:
                    found = part(names[0], rows, scaled((first, last), plus=(3 * quarter + place) * each * dim))
                    arrangement = Interleaved(dim, interleaved) if interleaved and place != 1 else None
                    parts.append(replace(found, arrangement=arrangement))
        return parts
    counts = [ranges.num_heads, ranges.num_kv_heads, ranges.num_kv_heads]
    kept = [ranges.heads, ranges.kv_heads, ranges.kv_heads]
    if layout is QkvLayout.STACKED:
        rows = sum(counts) * dim
        if all(end - start == count for (start, end), count in zip(kept, counts, strict=True)) and not interleaved:
            return [part(names[0], rows, (0, rows))]
        starts = [0, counts[0] * dim, (counts[0] + counts[1]) * dim]
        parts = [part(names[0], rows, scaled(each, plus=at)) for each, at in zip(kept, starts, strict=True)]
    else:
        parts = [part(*each) for each in zip(names, (n * dim for n in counts), map(scaled, kept), strict=True)]
    if interleaved:
        arrangement = Interleaved(dim, interleaved)
        parts[:2] = [replace(each, arrangement=arrangement) for each in parts[:2]]
    return parts


def _shares_evenly(ranges: HeadRanges) -> bool:
    """Whether this rank has all queries of its key/value heads."""
    count = ranges.kv_heads[1] - ranges.kv_heads[0]
    return (ranges.heads[1] - ranges.heads[0]) * ranges.num_kv_heads == count * ranges.num_heads
