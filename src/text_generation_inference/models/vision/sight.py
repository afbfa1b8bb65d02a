"""`Sight`: what a model that sees asks of the engine beside its tower; and where pictures stand among positions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from text_generation_inference.types import PictureSpan


@dataclass(frozen=True, slots=True)
class Sight:
    width: int  # of features: that of hidden states, or several of them, which later layers add one each of
    whole_runs: bool = False  # tokens of a run see each other both ways
    whole_prompts: bool = False  # tokens of a prompt do
    # Where pictures have rows and columns of positions: for each frequency of a head, whether it turns by time, row or
    # column (0, 1, 2), and how many patches of a picture become one feature in each direction.
    rope_axes: tuple[int, ...] = ()
    merge: int = 1
    # Where layers of cross-attention read pictures: features of each, and of each of its tiles; one of the layers.
    cross_rows: int = 0
    tile_rows: int = 0
    cross_layer: int = 0
    num_more_ids: int = 0  # behind the vocabulary, which stand for pictures: they have an embedding and no score
    num_parts: int = 1  # that computing features has: see `Tower.in_parts`


def place_pictures(num_tokens: int, spans: Sequence[PictureSpan], merge: int) -> tuple[np.ndarray, int]:
    """Positions `[3, num_tokens]` in time, row and column of a prompt's tokens, and what positions after it are more
    than places.

    Text counts on by one in all three; a picture of r rows and c columns of features counts on by the larger of both.
    A video's grid says the times of its moments, and what follows it comes after all of them too, as models were
    trained; `transformers` 5.22 counts on by rows and columns alone, which is the same for short ones. Where words
    stand between its moments, each of them is as a picture is.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    token = at = 0
    runs = [(span, *run) for span in spans for run in span.runs]
    for span, start, count in runs:
        rows, columns = span.grid[1] // merge, span.grid[2] // merge
        times = span.grid[0] // len(span.runs)
        assert count == times * rows * columns, "a moment's features stand together"
        positions[:, token:start] = np.arange(at, at + start - token)
        at += start - token
        inside = np.indices((times, rows, columns)).reshape(3, -1)
        if span.grid[3:]:
            inside[0] = np.repeat(span.grid[3:], rows * columns)
        positions[:, start : start + count] = at + inside
        at += int(inside.max()) + 1
        token = start + count
    positions[:, token:] = np.arange(at, at + num_tokens - token)
    return positions, at - token
