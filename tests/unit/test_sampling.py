"""Every sampling processor against a plain NumPy statement of its formula, and the statistics of the draw."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from text_generation_inference.sampling import filters, min_p, penalties, top_k, top_n_sigma, top_p, typical_p
from text_generation_inference.sampling.bias import add_biases
from text_generation_inference.sampling.candidates import Candidates
from text_generation_inference.sampling.draw import draw, draw_from_best, exponential_noise, noise_keys
from text_generation_inference.sampling.watermark import favour, green_list

VOCAB = 40


def scores(rows: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def kept(filtered: torch.Tensor) -> list[set[int]]:
    return [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in filtered.numpy()]


ids_lists = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


def kept_by(module, x: torch.Tensor, numbers: list[float]) -> list[set[int]]:
    candidates = Candidates(x)
    module.apply(candidates, torch.tensor(numbers))
    return kept(candidates.scores)


@given(st.integers(0, 1000), ids_lists, st.integers(0, 29), st.floats(0.1, 5.0), st.floats(-2, 2), st.floats(-2, 2))
@settings(max_examples=80, deadline=None)
def test_penalties(seed: int, ids: list[int], num_prompt: int, r: float, frequency: float, presence: float) -> None:
    """In the documented order; by length and by count; a row that asks for nothing; rows shorter than the table."""
    num_prompt = min(num_prompt, len(ids))
    x = scores(3, seed)
    history = torch.randint(0, VOCAB, (3, len(ids) + 4), dtype=torch.int32)
    history[:, : len(ids)] = torch.tensor(ids)
    numbers = torch.tensor([[r, r, 1.0], [frequency, frequency, 0], [presence, presence, 0], [1.0, 0, 1]])
    lengths, prompts = torch.full((3,), len(ids)), torch.full((3,), num_prompt)
    result = penalties.penalise(x.clone(), history, lengths, prompts, list(numbers))
    output = ids[num_prompt:]
    for row, by_length in enumerate((True, False)):
        for i in range(VOCAB):
            value = float(x[row, i])
            if i in ids:
                value = value * r if value < 0 else value / r
            value -= frequency * (ids.count(i) / len(ids) if by_length else output.count(i))
            value -= presence if i in output else 0
            assert math.isclose(result[row, i], value, rel_tol=1e-5, abs_tol=1e-5)
    assert torch.equal(result[2], x[2])


def test_biases() -> None:
    x = scores(2)
    result = add_biases(x.clone(), torch.tensor([[3, 7, 0], [5, 0, 0]]), torch.tensor([[1.5, -2.0, 0.0], [4.0, 0, 0]]))
    expected = x.clone()
    expected[0, 3] += 1.5
    expected[0, 7] -= 2.0
    expected[1, 5] += 4.0
    assert torch.equal(result, expected)


@given(st.integers(0, 1000), st.integers(1, 60))
@settings(max_examples=80, deadline=None)
def test_top_k_keeps_ties(seed: int, k: int) -> None:
    x = scores(2, seed).round()  # rounding makes ties
    result = kept_by(top_k, x, [float(k), 0.0])
    values = np.sort(x[0].numpy())[::-1]
    threshold = values[min(k, VOCAB) - 1]
    assert result[0] == {i for i in range(VOCAB) if x[0, i] >= threshold}
    assert result[1] == set(range(VOCAB))


@given(st.integers(0, 1000), st.floats(0.01, 0.999), st.booleans())
@settings(max_examples=120, deadline=None)
def test_top_p_keeps_what_has_less_than_p_above_it(seed: int, p: float, ties: bool) -> None:
    x = scores(2, seed).round() if ties else scores(2, seed)
    result = kept_by(top_p, x, [p, 1.0])
    probabilities = softmax(x[0].numpy().astype(np.float64))
    above = [float(probabilities[x[0].numpy() > value].sum()) for value in x[0].numpy()]  # of all that are better
    expected = {i for i in range(VOCAB) if above[i] < p}
    assert (result[0] ^ expected) <= {i for i in range(VOCAB) if abs(above[i] - p) < 1e-6}
    assert result[1] == set(range(VOCAB))


def test_top_p_keeps_the_best_and_its_equals() -> None:
    assert kept_by(top_p, scores(1), [1e-9]) == [{int(scores(1).argmax())}]
    x = torch.zeros(1, VOCAB)
    x[0, [3, 30]] = 5.0
    assert kept_by(top_p, x, [1e-9]) == kept_by(top_p, x, [0.5]) == [{3, 30}]
    assert kept_by(top_p, torch.zeros(1, VOCAB), [0.1]) == [set(range(VOCAB))]


@given(st.integers(0, 1000), st.floats(0.01, 0.99))
@settings(max_examples=80, deadline=None)
def test_typical_p(seed: int, mass: float) -> None:
    x = scores(2, seed)
    result = kept_by(typical_p, x, [mass, 1.0])
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
    assert 3 in kept_by(typical_p, x, [0.001])[0]


@given(st.integers(0, 1000), st.floats(0.0, 1.0))
@settings(max_examples=50, deadline=None)
def test_min_p(seed: int, share: float) -> None:
    x = scores(1, seed)
    p = softmax(x[0].numpy().astype(np.float64))
    unsure = {i for i in range(VOCAB) if abs(p[i] - share * p.max()) < 1e-6}
    expected = {i for i in range(VOCAB) if p[i] >= share * p.max()}
    assert (kept_by(min_p, x, [share])[0] ^ expected) <= unsure


@given(st.integers(0, 1000), st.floats(0.01, 4.0), st.floats(0.2, 3.0))
@settings(max_examples=50, deadline=None)
def test_top_n_sigma(seed: int, n: float, temperature: float) -> None:
    """A dropped id does not count; the temperature makes no difference; 0 keeps all."""
    x = scores(2, seed)
    x[:, :5] = -math.inf
    values = x[0, 5:].numpy().astype(np.float64)
    floor = values.max() - n * values.std()
    expected = {i + 5 for i, value in enumerate(values) if value >= floor}
    unsure = {i + 5 for i, value in enumerate(values) if abs(value - floor) < 1e-4}
    for divisor in (1.0, temperature):
        result = kept_by(top_n_sigma, x / divisor, [n, 0.0])
        assert (result[0] ^ expected) <= unsure
        assert int(x[0].argmax()) in result[0]
        assert result[1] == set(range(5, VOCAB))


def test_watermark_green_list() -> None:
    words = torch.from_numpy(green_list(17, VOCAB, 0.25))
    x = favour(torch.zeros(2, VOCAB), torch.stack((words, torch.zeros_like(words))), 2.0)
    generator = torch.Generator().manual_seed(15485863 * 17)
    green = torch.randperm(VOCAB, generator=generator)[: VOCAB // 4]
    expected = torch.zeros(VOCAB)
    expected[green] = 2.0
    assert torch.equal(x, torch.stack((expected, torch.zeros(VOCAB))))


def test_noise_is_exponential_and_independent() -> None:
    rows = 64
    ids = torch.arange(5000, dtype=torch.int32)[None]
    noise = exponential_noise(*noise_keys(torch.arange(rows), torch.arange(rows) * 7), ids).numpy().astype(np.float64)
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
    counts = np.bincount(draw(x, *noise_keys(seeds, positions)).numpy(), minlength=VOCAB)
    expected = softmax(x[0].numpy().astype(np.float64)) * draws
    assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-4


def test_draw_depends_on_seed_and_position_alone() -> None:
    x = scores(64, seed=9)
    seeds, positions = torch.arange(64) * 31 - 500, torch.arange(64)
    together = draw(x, *noise_keys(seeds, positions))
    alone = torch.cat([draw(x[i : i + 1], *noise_keys(seeds[i : i + 1], positions[i : i + 1])) for i in range(64)])
    assert torch.equal(together, alone)
    assert not torch.equal(draw(x, *noise_keys(seeds, positions + 1)), together)
    assert not torch.equal(draw(x, *noise_keys(seeds + 1, positions)), together)


@given(
    st.integers(0, 1000),
    st.sampled_from([0, 1, 3, 8, 9]),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_drawing_from_the_best_equals_drawing_from_all(seed: int, k: int, p: float, share: float, ties: bool) -> None:
    rows, num_best = 6, 8
    x = scores(rows, seed, 1.5).mul(2).round() / 2 if ties else scores(rows, seed)
    numbers = {
        name: torch.full((rows,), float(v)) for name, v in zip(("top_k", "top_p", "min_p"), (k, p, share), strict=True)
    }
    keys = noise_keys(torch.arange(rows) + seed, torch.arange(rows))
    expected = draw(filters.keep(x, numbers, numbers), *keys)
    kept_after_top = kept(filters.keep(x, numbers, ("top_k", "top_p")))
    ids, enough = draw_from_best(x, numbers, *keys, num_best)
    for row in range(rows):
        few = k <= num_best and len(kept_after_top[row]) < num_best
        at_the_end = len(kept_after_top[row]) == num_best or (k and x[row].sort().values[[-k, -num_best]].diff() == 0)
        assert bool(enough[row]) == few or (at_the_end and not enough[row])
        if enough[row]:
            assert ids[row] == expected[row]
