"""Log-probabilities travel as float32 and are printed with as few digits as tell them apart."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_inference.engine.client import shortest_floats

SINGLES = st.floats(width=32, allow_nan=False, allow_subnormal=False)


@given(st.lists(SINGLES, max_size=100))
def test_fewest_digits_that_are_still_that_number(values: list[float]) -> None:
    shown = shortest_floats(values)
    for value, short in zip(values, shown, strict=True):
        assert np.float32(short) == np.float32(value)
        assert short == float(str(np.float32(value)))


@pytest.mark.parametrize("count", [1, 64])
def test_values_that_are_no_numbers_stay(count: int) -> None:
    shown = shortest_floats([math.nan, math.inf, -math.inf, 0.0] * count)
    assert math.isnan(shown[0])
    assert shown[1:4] == [math.inf, -math.inf, 0.0]


def test_the_usual_log_probability() -> None:
    assert shortest_floats([float(np.float32(-0.12))]) == [-0.12]
    assert shortest_floats([float(np.float32(-0.12))] * 40) == [-0.12] * 40
