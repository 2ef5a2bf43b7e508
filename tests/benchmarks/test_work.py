"""The timed matrix products are exactly those of a LocoProp-M step, by count and by formula."""

from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import work

STANDARD = list(pairwise((784, 1000, 500, 250, 30, 250, 500, 1000, 784)))


@pytest.mark.parametrize("widths", [(5, 3), (7, 4, 2), (6, 6, 6, 6)], ids=str)
@pytest.mark.parametrize("T", [1, 2, 10])
def test_the_products_are_counted_right(widths: tuple[int, ...], T: int) -> None:
    layers = list(pairwise(widths))
    products = work.Gemms(layers, 9, T)
    with FlopCounterMode(display=False) as counter:
        products()
    assert counter.get_total_flops() == work.locoprop_flop(layers, 9, T)


def test_ten_iterations_are_21_units_but_for_the_input_gradient_of_the_images() -> None:
    unit = 2 * 1000 * sum(n * d for n, d in STANDARD)
    first = 2 * 1000 * 784 * 1000
    assert work.locoprop_flop(STANDARD, 1000, 10) == 21 * unit - first
    assert work.backprop_flop(STANDARD, 1000) == 3 * unit - first


def test_one_iteration_is_backprop() -> None:
    assert work.locoprop_flop(STANDARD, 100, 1) == work.backprop_flop(STANDARD, 100)
    assert work.gram_flop(STANDARD, 100, 1) == work.backprop_flop(STANDARD, 100)


def test_through_the_gram_matrix_is_never_more_work() -> None:
    for batch in (10, 300, 1000, 10_000):
        by_rows = work.locoprop_flop(STANDARD, batch, 10)
        assert work.gram_flop(STANDARD, batch, 10) <= by_rows
    (n, d), b, T = (20, 30), 1000, 10
    expected = work.backprop_flop([(n, d)], b) + 2 * b * n * n + 2 * (T - 1) * d * n * n
    assert work.gram_flop([(n, d)], b, T) == expected


def test_the_products_are_those_of_the_network() -> None:
    products = work.Gemms([(5, 4), (4, 3)], 6, 2)
    x, g = products.inputs[0].clone(), products.gradients[2].clone()
    products()
    first, second = products.weights
    y = x @ first.mT
    torch.testing.assert_close(products.inputs[2], y @ second.mT)
    torch.testing.assert_close(products.gradients[1], g @ second)
    # The last local iteration overwrote the weight gradient; the weights did not change.
    torch.testing.assert_close(products.weight_gradients[1], (y @ second.mT).mT @ y)
