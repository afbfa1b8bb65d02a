"""Turns rows into what a padded pass reads beside the slots, on the host.

A pass that has no rows at all is all padding: it has the shape of its bucket, which is what warming up needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from text_generation_inference.runner.shapes import Bucket
from text_generation_inference.runner.slots import HostTables


@dataclass(slots=True)
class PrefillArrays:
    """Whole prompts. Tokens are `[batch * length]`, row after row; see `WholePrompts`."""

    token_slots: np.ndarray  # [tokens]: -1 for padding
    positions: np.ndarray  # [tokens]
    seq_lens: np.ndarray  # [batch]
    last_tokens: np.ndarray  # [batch]: each row's last one among the tokens


def describe_prefill(bucket: Bucket, slots: Sequence[int], host: HostTables) -> PrefillArrays:
    rows, length = bucket.batch, bucket.length
    index = np.array(slots, dtype=np.int64)
    count = len(index)
    lengths = host.lengths[index]
    inside = np.arange(length)
    real = inside < lengths[:, None]
    token_slots = np.full((rows, length), -1, dtype=np.int64)
    token_slots[:count] = np.where(real, index[:, None], -1)
    positions = np.zeros((rows, length), dtype=np.int64)
    positions[:count] = np.where(real, inside, 0)
    seq_lens = np.zeros(rows, dtype=np.int64)
    seq_lens[:count] = lengths
    last_tokens = np.arange(rows) * length + np.maximum(seq_lens - 1, 0)
    return PrefillArrays(token_slots.reshape(-1), positions.reshape(-1), seq_lens, last_tokens)


@dataclass(slots=True)
class DecodeArrays:
    """One token of each row; see `BlockLists`."""

    slots: np.ndarray  # [batch]: -1 for padding
    block_list: np.ndarray  # [blocks]
    block_groups: np.ndarray  # [blocks]
    block_usage: np.ndarray  # [blocks]
    row_starts: np.ndarray  # [batch]


def describe_decode(bucket: Bucket, slots: Sequence[int], host: HostTables) -> DecodeArrays:
    rows, size = bucket.batch, host.block_size
    index = np.array(slots, dtype=np.int64)
    count = len(index)
    lengths = host.lengths[index]
    counts = -(-lengths // size)
    ends = np.cumsum(counts)
    found = DecodeArrays(
        slots=np.full(rows, -1, dtype=np.int64),
        block_list=np.zeros(bucket.length, dtype=np.int64),
        block_groups=np.full(bucket.length, -1, dtype=np.int64),
        block_usage=np.ones(bucket.length, dtype=np.int64),
        row_starts=np.full(rows, -1, dtype=np.int64),
    )
    if not count:
        return found
    total = int(ends[-1])
    found.slots[:count] = index
    tables = host.tables[index, : int(counts.max())]
    found.block_list[:total] = tables[np.arange(tables.shape[1]) < counts[:, None]]
    found.block_groups[:total] = np.repeat(np.arange(count), counts)
    found.block_usage[:total] = size
    found.block_usage[ends - 1] = (lengths - 1) % size + 1
    found.row_starts[:count] = ends - counts
    return found
