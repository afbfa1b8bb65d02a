"""`Batch`: the tensors one model pass reads, whatever the device, the phase and the padding.

Made by the runner, read by layers and ops. Tokens of a row are consecutive. A row of padding has length 0 and writes
to block 0, which no request owns. What attention needs beside that is `meta`, which is opaque to models: `PagedMeta`
here, or one of `kernels.block_lists`. `Device.prepare` turns a batch into the form that the device's ops read.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

PREFILL_TILE = 128  # queries of a prompt that are looked at together


@dataclass(slots=True)
class Batch:
    input_ids: Tensor  # [tokens] int64; padding 0
    positions: Tensor  # [tokens] int64, for rotation and position tables alone; padding 0
    kv_index: Tensor  # [tokens] int64: block id * block size + offset, where the token's key and value go; padding 0
    seq_lens: Tensor  # [rows] int32: tokens in the cache once this pass has written its own; 0: a row of padding
    meta: Any  # what attention reads of the rows; a device's ops know which kind they are given
    logit_tokens: Tensor | None = None  # [logit rows] int64: tokens whose logits are needed; None: all, in order
    # Of passes with pictures:
    features: Tensor | None = None  # [any number, width]; the same tensor for all passes
    feature_index: Tensor | None = None  # [tokens] int64: which of them stands in a token's place; -1: none
    grid_positions: Tensor | None = None  # [3, tokens] int64: in time, row and column, where models tell them apart
    visible_ends: Tensor | None = (
        None  # [tokens] int64: position after the last token it sees, where that is not its own
    )
    cross: "CrossMeta | None" = None  # what layers of cross-attention read; None: they pass all tokens by
    picture_lists: Any = None  # of a padded pass: what `cross` is made of, once all of the pass is on the device
    following: Tensor | None = None  # [tokens of a row] int64: what comes after each of a prompt that is scored
    # [rows] int64: where the device keeps the newest token of each row's request, if it does. While decoding
    # `input_ids` are such places: see `runner.newest_tokens`.
    places: Tensor | None = None
    # [tokens] int64: `kv_index` in layers that read a window, where they have blocks of their own
    window_index: Tensor | None = None

    def for_windows(self) -> "Batch":
        """The same as layers that read a window have it."""
        if self.window_index is None:
            return self
        meta: PagedMeta = self.meta
        assert meta.window_tables is not None
        return replace(self, kv_index=self.window_index, meta=replace(meta, block_tables=meta.window_tables))


@dataclass(slots=True)
class PagedMeta:
    """Rows with block tables: those that decode (one query token) first, then chunks of prompts."""

    block_tables: Tensor  # [rows, max_blocks] int32; [slots, max_blocks] where there are `table_rows`
    num_decode: int  # leading rows with exactly one query token
    # For each row after `num_decode`: position of its first query token. Both are empty in a step that is replayed with
    # other prompts, whose tiles are all that describes them.
    chunk_starts_cpu: list[int]
    chunk_ends_cpu: list[int]  # for each row after `num_decode`: position after its last query token
    max_seq_len: int
    table_rows: Tensor | None = None  # [rows] int32: where in `block_tables` each row is; -1: a row of padding
    # [tiles, 5] int32: slot, token of the batch, its position, number of tokens, position of the chunk's first one
    prefill_tiles: Tensor | None = None
    num_prefix_tiles: int = 0  # leading tiles, of chunks that are not their prompt's first
    window_tables: Tensor | None = None  # `block_tables` in layers that read a window, where they have such


@dataclass(slots=True)
class CrossReading:
    """Consecutive tokens that read the same rows of pictures."""

    start: int  # among the tokens that read
    end: int
    parts: list[tuple[Tensor, int, int]]  # blocks `[any number]` int64; the rows in them from one to another


@dataclass(slots=True)
class CrossMeta:
    """What tokens read of pictures in layers of cross-attention: rows that decode first, then chunks of prompts."""

    tokens: Tensor | None  # [reading tokens] int64: which of the batch; None: all
    reads: Tensor  # [reading tokens, 1] bool: others are passed by
    feeds: Tensor  # [reading tokens, 1] bool: those that pass the feed-forward too, for a picture stands before them
    decode: Batch | None  # of the leading tokens: one row each, `seq_lens` rows of pictures in blocks of these
    num_decode: int
    readings: list[CrossReading]  # of the tokens after those
    # Of padded prompts, in place of readings:
    blocks: Tensor | None = None  # [rows, any number]: where the pictures of each prompt are; filler 0
    mask: Tensor | None = None  # [rows, row length, rows of those blocks] bool: who reads what; nobody reads nothing
