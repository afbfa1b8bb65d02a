"""`ForwardBatch`: the tensors one model pass reads.

Made by `runner/inputs.py`, read by layers and attention ops. Rows are requests; tokens of a row are
consecutive; rows that decode (one query token) come first.
"""

from dataclasses import dataclass

from torch import Tensor

PREFILL_TILE = 128  # queries of a prompt that are looked at together


@dataclass(slots=True)
class ForwardBatch:
    input_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    kv_index: Tensor  # [tokens] int64: block id * block size + offset, where the token's key and value go
    block_tables: Tensor  # [rows, max_blocks] int32; [slots, max_blocks] where there are `table_rows`
    seq_lens: Tensor  # [rows] int32: tokens in the cache once this step has written its own
    num_decode: int  # leading rows with exactly one query token
    # For each row after `num_decode`: position of its first query token. Both are empty in a step that is replayed with
    # other prompts, whose tiles are all that describes them.
    chunk_starts_cpu: list[int]
    chunk_ends_cpu: list[int]  # for each row after `num_decode`: position after its last query token
    max_seq_len: int
    logit_tokens: Tensor | None  # [logit rows] int64: tokens whose logits are needed; None: all, in order
    table_rows: Tensor | None = None  # [rows] int32: where in `block_tables` each row is; -1: a row of padding
    # [tiles, 5] int32: slot, token of the batch, its position, number of tokens, position of the chunk's first one
    prefill_tiles: Tensor | None = None
    num_prefix_tiles: int = 0  # leading tiles, of chunks that are not their prompt's first
