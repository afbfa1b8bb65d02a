"""The slots of all requests as one tensor, and the ops that read and change them without the host, in plain torch.

For devices that run ahead of the host: the host sends a step's changes in one copy (`apply_writes`), inputs
are read from the slots (`gather_inputs`), and sampled tokens go back into them (`kernels.choice`). A row whose slot is
-1 is padding: it reads token 0 at position 0 and writes to block 0, which no request owns.

Where layers that read a window have blocks of their own beside those of layers that keep all, slots have a second table
of each: `SlotState.beside` is the same state with those in place of the first.

Token ids are paged like keys and values: one place for each token of the cache, found through the block tables. Where
requests give the blocks behind a window back, slots have pages of their own: what is behind still counts in penalties.
Those of a request are written when it is admitted. One that is sampled is kept as its slot's last token, since its
block may not be there yet; the pass that computes it puts it into its place. So when a step chooses, the pages hold all
that its rows know.
"""

from copy import copy

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


def _aligned(count: int) -> int:
    return -(-count // 4) * 4  # every part begins at 16 bytes, whatever the sizes: kernels are compiled once


class SlotState:
    """One row per slot. All tensors are views of `words`, so that one kind of write reaches everything."""

    LENGTH, NUM_PROMPT, SEED, LAST, SHIFT, NUMBERS = 0, 2, 4, 6, 7, 8  # places in a record, in words
    RECORD = _aligned(NUMBERS + len(NUMBER_FIELDS))

    def __init__(
        self,
        num_slots: int,
        max_tokens: int,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        own_pages: bool = False,  # slots have pages for all of their tokens, whatever blocks they hold
        has_beside: bool = False,  # layers that read a window have blocks of their own
    ) -> None:
        """For a cache of `num_blocks`."""
        self.max_tokens, self.block_size = max_tokens, block_size
        max_blocks = -(-max_tokens // block_size)
        num_pages = 1 + num_slots * max_blocks if own_pages else num_blocks  # page 0 takes the writes of padding
        self.rows_at = num_slots * self.RECORD
        self.tables_at = self.rows_at + _aligned(num_slots)
        self.beside_at = self.tables_at + _aligned(num_slots * max_blocks)
        self.pages_at = self.beside_at + (_aligned(num_slots * max_blocks) if has_beside else 0)
        self.words = torch.zeros(self.pages_at + num_pages * block_size, dtype=torch.int32, device=device)
        self.records = self.words[: self.rows_at].view(num_slots, self.RECORD)
        self.rows = self.words[self.rows_at : self.rows_at + num_slots]  # the decode set; -1 past its end
        tables = self.words[self.tables_at : self.tables_at + num_slots * max_blocks]
        self.block_tables = tables.view(num_slots, max_blocks)
        self.pages = self.words[self.pages_at :].view(num_pages, block_size)  # token ids
        self.page_tables = self.block_tables  # where each slot's token ids are
        if own_pages:
            numbers = torch.arange(1, num_pages, dtype=torch.int32, device=device)
            self.page_tables = numbers.view(num_slots, max_blocks)
        self.own_pages = own_pages
        self.last_tokens = self.records[:, self.LAST]  # each slot's newest token
        # What a token's position is more than its place, after pictures that take fewer positions than places.
        self.shifts = self.records[:, self.SHIFT]
        wide, real = self.records.view(torch.int64), self.records.view(torch.float32)
        self.lengths, self.num_prompt, self.seeds = (
            wide[:, place // 2] for place in (self.LENGTH, self.NUM_PROMPT, self.SEED)
        )
        self.filters = real[:, self.NUMBERS : self.NUMBERS + len(FILTERS)]
        self.numbers = {name: real[:, self.NUMBERS + i] for i, name in enumerate(NUMBER_FIELDS)}
        self.rows.fill_(-1)
        self.beside: SlotState | None = None
        if has_beside:
            assert not own_pages
            self.beside = copy(self)
            tables = self.words[self.beside_at : self.beside_at + num_slots * max_blocks]
            self.beside.block_tables = tables.view(num_slots, max_blocks)
            self.beside.own_pages = True  # token ids stay in the pages of the first tables

    def history(self, slots: Tensor | int, count: int) -> Tensor:
        """The first `count` tokens of slots `[slots]` (or of one) from the pages; past what is known: anything."""
        pages = self.page_tables[slots, : -(-count // self.block_size)].long()
        return self.pages[pages].flatten(-2)[..., :count]


def apply_writes(words: Tensor, staged: Tensor, num_writes: int) -> None:
    """staged begins with a header per write, (place low, place high, source, count); sources are places in staged."""
    low, high, sources, counts = staged[: 4 * num_writes].view(-1, 4).long().unbind(1)
    places = (high << 32) | (low & 0xFFFFFFFF)
    firsts = counts.cumsum(0) - counts
    to, source, first = torch.stack((places, sources, firsts)).repeat_interleave(counts, dim=1)
    inside = torch.arange(to.shape[0], device=words.device) - first
    words[to + inside] = staged[source + inside]


def gather_inputs(state: SlotState, slots: Tensor, at: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """slots `[tokens]` int32, at `[tokens]` int32: positions, or -1 (and everywhere if None) for the last known token.

    -> input_ids, positions, kv_index (int64) and seq_lens (int32, 0 for padding), each `[tokens]`. A last token goes
    into its page. Positions are shifted as those after the last picture are.
    """
    real = slots >= 0
    rows = slots.clamp(min=0).long()
    positions = state.lengths[rows] - 1
    if at is not None:
        positions = torch.where(at >= 0, at.long(), positions)
    positions = torch.where(real, positions, 0)
    number, inside = positions // state.block_size, positions % state.block_size
    kv_index = torch.where(real, state.block_tables[rows, number].long() * state.block_size + inside, 0)
    place = torch.where(real, state.page_tables[rows, number].long() * state.block_size + inside, 0)
    pages = state.pages.view(-1)
    ids = state.last_tokens[rows] if at is None else torch.where(at < 0, state.last_tokens[rows], pages[place])
    ids = torch.where(real, ids, 0)
    pages[place] = ids  # also those that came from there
    seq_lens = torch.where(real, positions + 1, 0).to(torch.int32)
    positions = torch.where(real, positions + state.shifts[rows], 0).clamp(min=0)
    return ids.long(), positions, kv_index, seq_lens
