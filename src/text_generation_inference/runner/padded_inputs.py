"""Turns rows into what a padded pass reads beside the slots, on the host.

A pass that has no rows at all is all padding: it has the shape of its bucket, which is what warming up needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from text_generation_inference.runner.shapes import Bucket
from text_generation_inference.runner.slots import HostTables
from text_generation_inference.types import Chunk


@dataclass(slots=True)
class PrefillArrays:
    """Prompts, or parts of them. Tokens are `[batch * length]`, row after row; see `WholePrompts`, `PromptParts`."""

    token_slots: np.ndarray  # [tokens]: -1 for padding
    positions: np.ndarray  # [tokens]
    seq_lens: np.ndarray  # [batch]
    last_tokens: np.ndarray  # [batch]: each row's last one among the tokens
    starts: np.ndarray  # [batch]: tokens before each row's own
    tables: np.ndarray | None  # [batch, blocks] where the bucket has a context


def describe_prefill(bucket: Bucket, chunks: Sequence[Chunk], host: HostTables) -> PrefillArrays:
    rows, length = bucket.batch, bucket.length
    count = len(chunks)
    index = np.array([chunk.slot for chunk in chunks], dtype=np.int64)
    starts, seq_lens = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
    starts[:count] = [chunk.start for chunk in chunks]
    seq_lens[:count] = [chunk.end for chunk in chunks]
    inside = np.arange(length)
    real = inside < (seq_lens - starts)[:count, None]
    token_slots = np.full((rows, length), -1, dtype=np.int64)
    token_slots[:count] = np.where(real, index[:, None], -1)
    positions = np.zeros((rows, length), dtype=np.int64)
    positions[:count] = np.where(real, starts[:count, None] + inside, 0)
    last_tokens = np.arange(rows) * length + np.maximum(seq_lens - starts - 1, 0)
    tables = _describe_tables(bucket, index, seq_lens[:count], host) if bucket.context else None
    return PrefillArrays(token_slots.reshape(-1), positions.reshape(-1), seq_lens, last_tokens, starts, tables)


def _describe_tables(bucket: Bucket, slots: np.ndarray, ends: np.ndarray, host: HostTables) -> np.ndarray:
    size = host.block_size
    found = np.zeros((bucket.batch, -(-bucket.context // size) + -(-bucket.length // size)), dtype=np.int64)
    width = min(found.shape[1], host.tables.shape[1])
    used = np.arange(width) < -(-ends // size)[:, None]
    found[: len(slots), :width] = np.where(used, host.tables[slots, :width], 0)
    return found


def describe_following(bucket: Bucket, chunk: Chunk | None, host: HostTables) -> tuple[np.ndarray, np.ndarray]:
    """Slots and positions `[length]` of what comes after each token of a chunk; anything after a prompt's last."""
    if chunk is None:
        return np.full(bucket.length, -1, dtype=np.int64), np.zeros(bucket.length, dtype=np.int64)
    positions = chunk.start + 1 + np.arange(bucket.length)
    return np.full(bucket.length, chunk.slot), np.minimum(positions, int(host.lengths[chunk.slot]) - 1)


@dataclass(slots=True)
class DecodeArrays:
    """One token of each row; see `BlockLists`."""

    slots: np.ndarray  # [batch]: -1 for padding
    lists: dict[str, np.ndarray]


def describe_decode(bucket: Bucket, slots: Sequence[int], host: HostTables) -> DecodeArrays:
    rows, size = np.full(bucket.batch, -1, dtype=np.int64), host.block_size
    rows[: len(slots)] = slots
    groups = np.full(bucket.length, -1, dtype=np.int64)
    usage = np.ones(bucket.length, dtype=np.int64)
    blocks, counts = host.used_blocks(slots)
    ends = np.cumsum(counts)
    # Where each block is described: in its own place among all, or in the order of the list.
    places = blocks if bucket.contiguous else np.arange(len(blocks))
    groups[places] = np.repeat(np.arange(len(counts)), counts)
    usage[places] = size
    usage[places[ends - 1]] = (host.lengths[list(slots)] - 1) % size + 1
    if bucket.contiguous:
        numbers = np.zeros(bucket.length, dtype=np.int64)
        numbers[places] = np.arange(len(blocks)) - np.repeat(ends - counts, counts)
        return DecodeArrays(rows, {"block_groups": groups, "block_usage": usage, "block_numbers": numbers})
    block_list = np.zeros(bucket.length, dtype=np.int64)
    block_list[: len(blocks)] = blocks
    starts = np.full(bucket.batch, -1, dtype=np.int64)
    starts[: len(counts)] = ends - counts
    lists = {"block_list": block_list, "block_groups": groups, "block_usage": usage, "row_starts": starts}
    return DecodeArrays(rows, lists)
