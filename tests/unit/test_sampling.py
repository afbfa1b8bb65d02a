"""Every sampling processor against a plain NumPy statement of its formula, and the statistics of the draw."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from text_generation_inference.kernels import sampling

VOCAB = 40


def scores(rows: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def kept(filtered: torch.Tensor) -> list[set[int]]:
    return [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in filtered.numpy()]


ids_lists = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


@given(st.integers(0, 1000), ids_lists, st.floats(0.1, 5.0))
@settings(max_examples=50, deadline=None)
def test_repetition_penalty(seed: int, ids: list[int], penalty: float) -> None:
    x = scores(2, seed)
    result = x.clone()
    sampling.repetition_penalty(result, torch.tensor([ids, ids]), torch.tensor([penalty, 1.0]))
    for row, r in enumerate([penalty, 1.0]):
        for i in range(VOCAB):
            value = float(x[row, i])
            expected = (value * r if value < 0 else value / r) if i in ids else value
            assert math.isclose(result[row, i], expected, rel_tol=1e-5, abs_tol=1e-6)


@given(st.integers(0, 1000), ids_lists, st.floats(-2, 2))
@settings(max_examples=50, deadline=None)
def test_frequency_and_presence_penalty(seed: int, ids: list[int], penalty: float) -> None:
    x = scores(1, seed)
    counted = [i % 3 != 0 for i in range(len(ids))]
    frequency, presence = x.clone(), x.clone()
    amounts = torch.tensor([[penalty / len(ids) if c else 0.0 for c in counted]])
    sampling.frequency_penalty(frequency, torch.tensor([ids]), amounts)
    sampling.presence_penalty(presence, torch.tensor([ids]), torch.tensor([counted]), torch.tensor([penalty]))
    for i in range(VOCAB):
        count = sum(1 for token, c in zip(ids, counted, strict=True) if c and token == i)
        assert math.isclose(frequency[0, i], x[0, i] - penalty * count / len(ids), abs_tol=1e-5)
        assert math.isclose(presence[0, i], x[0, i] - (penalty if count else 0), abs_tol=1e-5)


@given(st.integers(0, 1000), st.integers(1, 60))
@settings(max_examples=80, deadline=None)
def test_top_k_keeps_ties(seed: int, k: int) -> None:
    x = scores(2, seed).round()  # rounding makes ties
    result = kept(sampling.top_k(x, torch.tensor([float(k), 0.0])))
    values = np.sort(x[0].numpy())[::-1]
    threshold = values[min(k, VOCAB) - 1]
    assert result[0] == {i for i in range(VOCAB) if x[0, i] >= threshold}
    assert result[1] == set(range(VOCAB))


@given(st.integers(0, 1000), st.floats(0.01, 0.999))
@settings(max_examples=80, deadline=None)
def test_top_p(seed: int, p: float) -> None:
    x = scores(2, seed)
    result = kept(sampling.top_p(x, torch.tensor([p, 1.0])))
    order = np.argsort(x[0].numpy(), kind="stable")
    cumulated = np.cumsum(softmax(x[0].numpy().astype(np.float64))[order])
    dropped = {int(i) for i, c in zip(order, cumulated, strict=True) if c <= 1 - p}
    dropped.discard(int(order[-1]))
    unsure = {int(i) for i, c in zip(order, cumulated, strict=True) if abs(c - (1 - p)) < 1e-6}
    assert (result[0] ^ (set(range(VOCAB)) - dropped)) <= unsure
    assert result[1] == set(range(VOCAB))


def test_top_p_keeps_one() -> None:
    assert kept(sampling.top_p(scores(1), torch.tensor([1e-9]))) == [{int(scores(1).argmax())}]


@given(st.integers(0, 1000), st.floats(0.01, 0.99))
@settings(max_examples=80, deadline=None)
def test_typical_p(seed: int, mass: float) -> None:
    x = scores(2, seed)
    result = kept(sampling.typical_p(x, torch.tensor([mass, 1.0])))
    p = softmax(x[0].numpy().astype(np.float64))
    surprise = np.abs(-np.log(p) + (p * np.log(p)).sum())
    order = np.argsort(surprise, kind="stable")
    cumulated = np.cumsum(p[order])
    last = min(int((cumulated < mass).sum()), VOCAB - 1)
    expected = {i for i in range(VOCAB) if surprise[i] <= surprise[order[last]]}
    near = {int(order[j]) for j in range(VOCAB) if abs(cumulated[j] - mass) < 1e-5 or j in (last, last + 1)}
    assert (result[0] ^ expected) <= near
    assert result[0], "at least one stays"
    assert result[1] == set(range(VOCAB))


def test_typical_p_keeps_one() -> None:
    x = torch.full((1, VOCAB), -50.0)
    x[0, 3] = 10
    assert 3 in kept(sampling.typical_p(x, torch.tensor([0.001])))[0]


@given(st.integers(0, 1000), st.floats(0.0, 1.0))
@settings(max_examples=50, deadline=None)
def test_min_p(seed: int, share: float) -> None:
    x = scores(1, seed)
    p = softmax(x[0].numpy().astype(np.float64))
    unsure = {i for i in range(VOCAB) if abs(p[i] - share * p.max()) < 1e-6}
    expected = {i for i in range(VOCAB) if p[i] >= share * p.max()}
    assert (kept(sampling.min_p(x, torch.tensor([share])))[0] ^ expected) <= unsure


def test_watermark_green_list() -> None:
    x = torch.zeros(VOCAB)
    sampling.watermark(x, last_token=17, gamma=0.25, delta=2.0)
    generator = torch.Generator().manual_seed(15485863 * 17)
    green = torch.randperm(VOCAB, generator=generator)[: VOCAB // 4]
    expected = torch.zeros(VOCAB)
    expected[green] = 2.0
    assert torch.equal(x, expected)


def test_noise_is_exponential_and_independent() -> None:
    rows = 64
    ids = torch.arange(5000, dtype=torch.int32)[None]
    noise = sampling.exponential_noise(torch.arange(rows), torch.arange(rows) * 7, ids).numpy().astype(np.float64)
    assert (noise > 0).all() and np.isfinite(noise).all()
    assert stats.kstest(noise.ravel(), "expon").pvalue > 1e-4
    for first, second in ((noise[:, :-1], noise[:, 1:]), (noise[:-1], noise[1:])):
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.01


@pytest.mark.parametrize("vary", ["positions", "seeds"])
def test_draws_follow_the_distribution(vary: str) -> None:
    draws = 20_000
    x = scores(1, seed=5, spread=1.5).expand(draws, VOCAB)
    counter, fixed = torch.arange(draws), torch.full((draws,), 1234)
    seeds, positions = (fixed, counter) if vary == "positions" else (counter, fixed)
    counts = np.bincount(sampling.draw(x, seeds, positions).numpy(), minlength=VOCAB)
    expected = softmax(x[0].numpy().astype(np.float64)) * draws
    assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-4


def test_draw_depends_on_seed_and_position_alone() -> None:
    x = scores(64, seed=9)
    seeds, positions = torch.arange(64) * 31 - 500, torch.arange(64)
    together = sampling.draw(x, seeds, positions)
    alone = torch.cat([sampling.draw(x[i : i + 1], seeds[i : i + 1], positions[i : i + 1]) for i in range(64)])
    assert torch.equal(together, alone)
    assert not torch.equal(sampling.draw(x, seeds, positions + 1), together)
    assert not torch.equal(sampling.draw(x, seeds + 1, positions), together)


@given(
    st.integers(0, 1000),
    st.sampled_from([0, 1, 3, 8, 9]),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
@settings(max_examples=150, deadline=None)
def test_drawing_from_the_best_equals_the_long_way(seed: int, k: int, p: float, share: float) -> None:
    rows, num_best = 6, 8
    x = scores(rows, seed)
    args = [torch.full((rows,), float(value)) for value in (k, p, share)]
    seeds, positions = torch.arange(rows) + seed, torch.arange(rows)
    filtered = sampling.min_p(sampling.top_p(sampling.top_k(x, args[0]), args[1]), args[2])
    kept_after_top = kept(sampling.top_p(sampling.top_k(x, args[0]), args[1]))
    expected = sampling.draw(filtered, seeds, positions)
    ids, enough = sampling.draw_from_best(x, *args, seeds, positions, num_best)
    for row in range(rows):
        few = k <= num_best and len(kept_after_top[row]) < num_best
        assert bool(enough[row]) == few or len(kept_after_top[row]) == num_best
        if enough[row]:
            assert ids[row] == expected[row]
