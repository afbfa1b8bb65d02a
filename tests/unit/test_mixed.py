"""The words of a step that is padded to a captured size say the same as those of one that is not."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from text_generation_inference.kernels.batch import PREFILL_TILE
from text_generation_inference.runner.mixed import MOST_CHUNKS, MixedSize, describe
from text_generation_inference.runner.shapes.captured import plan_captured
from text_generation_inference.types import Chunk

NUM_SLOTS = 40
PLAN = plan_captured(NUM_SLOTS, 8192, None)
SIZES = [MixedSize.of(bucket.batch, bucket.length, NUM_SLOTS) for bucket in PLAN.mixed]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[Chunk]]:
    slots = draw(st.permutations(range(NUM_SLOTS)))
    num_decode, num_chunks = draw(st.integers(0, 20)), draw(st.integers(1, MOST_CHUNKS))
    chunks = [
        Chunk(slot, start, start + draw(st.integers(1, 300)), draw(st.booleans()))
        for slot in slots[num_decode : num_decode + num_chunks]
        for start in [draw(st.sampled_from([0, 0, 16, 500]))]
    ]
    return list(slots[:num_decode]), chunks


@given(steps())
def test_padding_changes_nothing_else(step: tuple[list[int], list[Chunk]]) -> None:
    decode, chunks = step
    count = sum(chunk.end - chunk.start for chunk in chunks)
    bucket = PLAN.find("mixed", len(decode), count)
    fitting = [one for one in SIZES if one.rows >= len(decode) and one.tokens >= count]
    if bucket is None:
        assert not fitting
        return
    size = MixedSize.of(bucket.batch, bucket.length, NUM_SLOTS)
    assert size.rows + size.tokens == min(one.rows + one.tokens for one in fitting)
    sampling = decode + [chunk.slot for chunk in chunks if chunk.samples]
    words = torch.from_numpy(size.fill(decode, chunks, sampling))
    assert words.shape == (size.num_words,)
    token_slots, positions, logit_slots, logit_tokens, tiles = (part.tolist() for part in size.split(words))
    plain = describe(decode, chunks)
    moved = size.rows - len(decode)  # prompt tokens begin further on
    real = [*range(len(decode)), *range(size.rows, size.rows + count)]
    assert [token_slots[at] for at in real] == plain.token_slots.tolist()
    assert [positions[at] for at in real] == plain.positions.tolist()
    assert all(token_slots[at] == -1 for at in set(range(len(token_slots))) - set(real))
    assert len(token_slots) == size.rows + size.tokens
    assert logit_slots[: len(sampling)] == sampling and set(logit_slots[len(sampling) :]) <= {-1}
    assert logit_tokens[: len(decode)] == plain.logit_tokens[: len(decode)]
    assert logit_tokens[len(decode) : len(sampling)] == [at + moved for at in plain.logit_tokens[len(decode) :]]
    expected = plain.tiles.reshape(-1, 5) + np.array([0, moved, 0, 0, 0])
    found = np.array(tiles).reshape(-1, 5)
    assert found[: len(expected)].tolist() == expected.tolist()
    assert not found[len(expected) :].any()
    assert (found[:, 3] <= PREFILL_TILE).all()


def test_a_blank_step_is_all_padding() -> None:
    for size in SIZES:
        token_slots, _, logit_slots, logit_tokens, tiles = size.split(torch.from_numpy(size.blank()))
        assert (token_slots == -1).all() and (logit_slots == -1).all()
        assert not logit_tokens.any() and not tiles.any()
