"""A request as the scheduler sees it: known tokens, computed tokens, blocks.

Owned by `Scheduler`; nothing outside `scheduler/` holds one.
"""

from collections.abc import Sequence

from text_generation_inference.scheduler.prefix import prefix_tokens, root_of
from text_generation_inference.types import GenerationRequest


class Request:
    """One generation in progress.

    *Known* tokens exist (prompt, or sampled on the device). *Computed* ones have their keys and values in the cache, or
    will have them by the steps that were planned. *Reserved* is the most that can be said: what steps in flight may
    write. `tokens` holds the values the host has seen, which may be one step behind the device.
    """

    __slots__ = (
        "admitted_ns",
        "arrived_ns",
        "beside",
        "blocks",
        "busy_until",
        "chain",
        "finished",
        "join_clock",
        "next_event",
        "num_behind",
        "num_beside_behind",
        "num_cached_tokens",
        "num_promised",
        "num_prompt",
        "num_published",
        "order",
        "reserved",
        "root",
        "slot",
        "source",
        "stop_ids",
        "tokens",
        "total_limit",
        "whole_runs",
    )

    def __init__(
        self,
        source: GenerationRequest,
        order: int,
        arrived_ns: int,
        whole_runs: Sequence[tuple[int, int]] = (),
        depends_on: str = "",
    ) -> None:
        self.source = source
        self.order = order
        self.arrived_ns = arrived_ns
        self.admitted_ns: int | None = None
        self.tokens = prefix_tokens(source)  # a picture's as numbers that no other picture has
        self.whole_runs = whole_runs  # (start, end) of tokens that are computed in one step
        self.num_prompt = len(source.token_ids)
        self.total_limit = self.num_prompt + source.max_new_tokens
        self.stop_ids = frozenset(source.stop_token_ids)
        self.slot = -1
        self.blocks: list[int] = []  # its table: block 0 where one was given back, or not needed
        self.num_promised = 0  # blocks that it can have whenever it wants
        self.num_behind = 0  # leading blocks of the table that are such
        self.beside: list[int] = []  # its table in layers that read a window, where others keep all: likewise
        self.num_beside_behind = 0
        self.reserved = 0  # as of `join_clock` while in the decode set
        self.join_clock = -1  # decode clock at which it entered the decode set; -1 outside
        self.next_event = -1  # decode clock of its calendar entry; -1 without one
        self.busy_until = 0  # last planned step that may still return a token for it
        self.root = root_of(source, depends_on)
        self.chain: object = self.root  # identity of the last published block, or the root before the first
        self.num_published = 0
        self.num_cached_tokens = 0
        self.finished = False

    @property
    def id(self) -> int:
        return self.source.id

    @property
    def held(self) -> list[int]:
        return self.blocks[self.num_behind :] if self.num_behind else self.blocks

    @property
    def held_beside(self) -> list[int]:
        return self.beside[self.num_beside_behind :]

    @property
    def running(self) -> bool:
        return self.slot >= 0

    @property
    def computed(self) -> int:
        """Outside the decode set. The last known token is computed with the one after it."""
        return min(self.reserved, len(self.tokens) - 1)

    @property
    def decodes(self) -> bool:
        return self.join_clock >= 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's logits are still owed, so that no part of it may come from the cache."""
        return self.source.sampling.decoder_input_details and len(self.tokens) == self.num_prompt

    def forget_progress(self) -> None:
        """Nothing of it is computed, and it holds nothing."""
        self.blocks, self.num_behind = [], 0
        self.beside, self.num_beside_behind = [], 0
        self.num_promised = 0
        self.reserved = 0
        self.num_published = 0
        self.chain = self.root
