"""The slots of all requests as one tensor, and the ops that read and change them without the host, in plain torch.

For devices that run ahead of the host: the host sends a step's changes in one copy (`apply_writes`), inputs
are read from the slots (`gather_inputs`), and sampled tokens go back into them (`kernels.choice`). A row whose slot is
-1 is padding: it reads token 0 at position 0 and writes to block 0, which no request owns.
"""

import torch
from torch import Tensor

from text_generation_inference.sampling import filters, penalties, temperature

PLAIN, DRAWS, ADJUSTED = (
    0.0,
    1.0,
    -1.0,
)  # sampling modes: the best token; a draw; the best token, with more to it than that
FILTERS = (temperature.NAME, "top_k", "top_p", "typical_p", "min_p", "sampling_mode")  # what kernels know
OTHER_FILTERS = tuple(
    name for name in filters.FIELDS if name not in FILTERS
)  # rows with one are left to the definition
NUMBER_FIELDS = FILTERS + penalties.FIELDS + OTHER_FILTERS  # of a slot


class SlotState:
    """One row per slot. All tensors are views of `words`, so that one kind of write reaches everything."""

    LENGTH, NUM_PROMPT, SEED, NUMBERS = 0, 2, 4, 6  # places in a record, in words
    RECORD = -(-(NUMBERS + len(NUMBER_FIELDS)) // 4) * 4

    def __init__(self, num_slots: int, max_tokens: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        max_blocks = -(-max_tokens // block_size)
        num_rows = num_slots + num_slots % 2  # records stay aligned to 8 bytes
        self.rows_at = num_slots * self.RECORD
        self.tables_at = self.rows_at + num_rows
        self.tokens_at = self.tables_at + num_slots * max_blocks
        self.words = torch.zeros(self.tokens_at + num_slots * max_tokens, dtype=torch.int32, device=device)
        self.records = self.words[: self.rows_at].view(num_slots, self.RECORD)
        self.rows = self.words[self.rows_at : self.rows_at + num_slots]  # the decode set; -1 past its end
        self.block_tables = self.words[self.tables_at : self.tokens_at].view(num_slots, max_blocks)
        self.tokens = self.words[self.tokens_at :].view(num_slots, max_tokens)
        wide, real = self.records.view(torch.int64), self.records.view(torch.float32)
        self.lengths, self.num_prompt, self.seeds = (
            wide[:, place // 2] for place in (self.LENGTH, self.NUM_PROMPT, self.SEED)
        )
        self.filters = real[:, self.NUMBERS : self.NUMBERS + len(FILTERS)]
        self.numbers = {name: real[:, self.NUMBERS + i] for i, name in enumerate(NUMBER_FIELDS)}
        self.rows.fill_(-1)


def apply_writes(words: Tensor, staged: Tensor, num_writes: int) -> None:
    """staged begins with a header per write, (place low, place high, source, count); sources are places in staged."""
    headers: list[list[int]] = staged[: 4 * num_writes].view(-1, 4).tolist()  # pyright: ignore
    for low, high, source, count in headers:
        place = (high << 32) | (low & 0xFFFFFFFF)
        words[place : place + count] = staged[source : source + count]


def gather_inputs(state: SlotState, slots: Tensor, at: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """slots `[tokens]` int32, at `[tokens]` int32: positions, or -1 (and everywhere if None) for the last known token.

    -> input_ids, positions, kv_index (int64) and seq_lens (int32, 0 for padding), each `[tokens]`.
    """
    real = slots >= 0
    rows = slots.clamp(min=0).long()
    positions = state.lengths[rows] - 1
    if at is not None:
        positions = torch.where(at >= 0, at.long(), positions)
    positions = torch.where(real, positions, 0)
    ids = torch.where(real, state.tokens[rows, positions].long(), 0)
    blocks = state.block_tables[rows, positions // state.block_size].long()
    kv_index = torch.where(real, blocks * state.block_size + positions % state.block_size, 0)
    return ids, positions, kv_index, torch.where(real, positions + 1, 0).to(torch.int32)
