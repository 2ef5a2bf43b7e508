"""The schedule rises and falls in equal steps and never is zero."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_locoprop.study.schedule import warmup_then_decay


def test_rises_and_falls_linearly() -> None:
    factor = warmup_then_decay(warmup_steps=4, total_steps=10)
    expected = [1 / 4, 2 / 4, 3 / 4, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7]
    assert [factor(step) for step in range(10)] == pytest.approx(expected)


@given(st.data())
def test_is_never_zero_and_has_one_peak(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 300))
    warmup = data.draw(st.integers(0, total - 1))
    factor = warmup_then_decay(warmup_steps=warmup, total_steps=total)
    factors = [factor(step) for step in range(total + 5)]
    assert all(0 < value <= 1 for value in factors)
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert warmup == 0 or factors[warmup - 1] == 1


def test_drives_a_torch_scheduler() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, warmup_then_decay(warmup_steps=1, total_steps=3)
    )
    rates = []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.5, 0.5 * 2 / 3, 0.5 * 1 / 3])


@pytest.mark.parametrize(("warmup", "total"), [(5, 5), (-1, 5), (0, 0)])
def test_impossible_lengths_are_an_error(warmup: int, total: int) -> None:
    with pytest.raises(ValueError, match=f"warmup_steps={warmup}, total_steps={total}"):
        warmup_then_decay(warmup_steps=warmup, total_steps=total)
