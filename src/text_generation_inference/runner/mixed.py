"""What a step with prompt tokens reads beside the slots, for as many tokens as there are or padded to a captured size.

Tokens: those of the decode rows, then the chunks. Padding is slot -1, which reads and writes what nobody owns,
and tiles without tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from torch import Tensor

from text_generation_inference.kernels.batch import PREFILL_TILE
from text_generation_inference.types import Chunk

_TILE_WORDS = 5
MOST_CHUNKS = 8  # of a captured step


@dataclass(slots=True)
class MixedInputs:
    token_slots: np.ndarray  # [tokens]
    positions: np.ndarray  # [tokens]; -1: the last known one
    rows: list[int]  # slots, decode rows first
    logit_tokens: list[int]
    tiles: np.ndarray  # [tiles * 5], see `PagedMeta.prefill_tiles`
    num_prefix_tiles: int


def describe(
    decode: list[int], chunks: list[Chunk], prompt_chunks: Sequence[Chunk] = (), first_prompt: int | None = None
) -> MixedInputs:
    """Logits: one per sampling row, then all of `prompt_chunks`. Chunks begin at token `first_prompt`."""
    before = len(decode) if first_prompt is None else first_prompt
    counts = np.array([chunk.end - chunk.start for chunk in chunks], dtype=np.int64)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    slots = [chunk.slot for chunk in chunks]
    firsts = before + np.cumsum(counts) - counts
    total = before + int(counts.sum())
    token_slots = np.full(total, -1, dtype=np.int64)
    token_slots[: len(decode)] = decode
    token_slots[before:] = np.repeat(slots, counts)
    positions = np.full(total, -1, dtype=np.int64)
    positions[before:] = np.arange(before, total) - np.repeat(firsts - starts, counts)
    logit_tokens = list(range(len(decode)))
    prompt_tokens: list[int] = []
    after: list[np.ndarray] = []  # tiles of chunks that have tokens before them
    first_ones: list[np.ndarray] = []
    for chunk, first, length in zip(chunks, firsts.tolist(), counts.tolist(), strict=True):
        if chunk.samples:
            logit_tokens.append(first + length - 1)
        if chunk in prompt_chunks:
            prompt_tokens += range(first, first + length)
        offsets = np.arange(0, length, PREFILL_TILE)
        tile = np.empty((len(offsets), _TILE_WORDS), dtype=np.int64)
        tile[:, 0], tile[:, 1], tile[:, 2] = chunk.slot, first + offsets, chunk.start + offsets
        tile[:, 3] = np.minimum(PREFILL_TILE, length - offsets)
        tile[:, 4] = chunk.start
        (after if chunk.start else first_ones).append(tile)
    if first_ones:  # in the order of what they see: kernels begin with those that take longest
        alike = np.concatenate(first_ones)
        first_ones = [alike[np.argsort(alike[:, 2], kind="stable")]]
    tiles = np.concatenate(after + first_ones).ravel()
    return MixedInputs(
        token_slots, positions, decode + slots, logit_tokens + prompt_tokens, tiles, sum(len(tile) for tile in after)
    )


@dataclass(frozen=True, slots=True)
class MixedSize:
    """Decode rows, prompt tokens and logits of a captured step."""

    rows: int
    tokens: int
    logits: int

    @classmethod
    def of(cls, rows: int, tokens: int, num_slots: int) -> "MixedSize":
        return cls(rows, tokens, min(rows + MOST_CHUNKS, num_slots))

    @property
    def num_words(self) -> int:
        return sum(_aligned(count) for count in self._counts)

    @property
    def _counts(self) -> tuple[int, ...]:
        tokens = self.rows + self.tokens
        return tokens, tokens, self.logits, self.logits, _TILE_WORDS * (self.tokens // PREFILL_TILE + MOST_CHUNKS)

    @property
    def _places(self) -> list[slice]:
        ends = list(accumulate(_aligned(count) for count in self._counts))
        return [
            slice(end - _aligned(count), end - _aligned(count) + count)
            for end, count in zip(ends, self._counts, strict=True)
        ]

    def split(self, words: Tensor) -> list[Tensor]:
        """Slots and positions of tokens; slots and tokens of logits; tiles."""
        return [words[place] for place in self._places]

    def blank(self) -> np.ndarray:
        """The words of a step that is all padding."""
        words = np.full(self.num_words, -1, dtype=np.int32)
        for place in self._places[3:]:
            words[place] = 0
        return words

    def fill(self, decode: list[int], chunks: list[Chunk], sampling: list[int]) -> np.ndarray:
        """The words of a step that fits; `sampling`: the slots of its logits."""
        inputs = describe(decode, chunks, first_prompt=self.rows)
        words = self.blank()
        parts = (inputs.token_slots, inputs.positions, sampling, inputs.logit_tokens, inputs.tiles)
        for place, part in zip(self._places, parts, strict=True):
            words[place.start : place.start + len(part)] = part
        return words


def _aligned(count: int) -> int:
    return -(-count // 4) * 4  # kernels are compiled for inputs that begin at 16 bytes
