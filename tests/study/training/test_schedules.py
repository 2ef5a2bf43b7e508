"""The linear schedule rises and falls in equal steps and is never zero."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_locoprop.study.training.schedules import linear


def test_rises_and_falls_linearly() -> None:
    factor = linear(steps=10, warmup_steps=4)
    expected = [1 / 4, 2 / 4, 3 / 4, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7]
    assert [factor(step) for step in range(10)] == pytest.approx(expected)


@given(st.data())
def test_is_never_zero_and_has_one_peak(data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, 300))
    warmup = data.draw(st.integers(0, steps - 1))
    factor = linear(steps=steps, warmup_steps=warmup)
    factors = [factor(step) for step in range(steps)]
    assert all(0 < value <= 1 for value in factors)
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert warmup == 0 or factors[warmup - 1] == 1
