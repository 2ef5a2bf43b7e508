"""Generated images equal a slow pixel-by-pixel drawing of the same curves."""

import math

import numpy as np
import pytest
import torch

from torch_locoprop.study.data.curves import RADIUS, SIDE, SOFTNESS, curves, paint, parabola


def brightness_by_hand(points: np.ndarray, x: float, y: float) -> float:
    """The pen's ink at (x, y), from the distance to 2,000 points of the quadratic interpolant."""
    (x0, y0), (x1, y1), (x2, y2) = points.tolist()
    nearest = math.inf
    for n in range(2001):
        t = n / 2000
        # Newton's form of the interpolating polynomial, in each coordinate.
        cx = x0 + 2 * t * (x1 - x0) + 2 * t * (t - 0.5) * (x2 - 2 * x1 + x0)
        cy = y0 + 2 * t * (y1 - y0) + 2 * t * (t - 0.5) * (y2 - 2 * y1 + y0)
        nearest = min(nearest, math.hypot(x - cx, y - cy))
    return min(max((RADIUS + SOFTNESS - nearest) / SOFTNESS, 0.0), 1.0)


def test_images_are_grey_levels_with_a_stroke_on_black() -> None:
    images = curves(200, seed=3)
    assert images.shape == (200, SIDE * SIDE)
    assert images.dtype == torch.float32
    assert images.min() == 0
    assert images.max() == 1
    lit = (images > 0).float().mean(dim=1)
    assert lit.min() > 0.01
    assert lit.max() < 0.5


def test_brightness_is_the_distance_to_the_parabola() -> None:
    points = np.array([[4, 5], [20, 9], [11, 24]], dtype=np.float32)
    image = paint(parabola(points[None]))[0].reshape(SIDE, SIDE)
    for row, column in [(4, 3), (5, 4), (9, 19), (12, 22), (23, 11), (18, 18), (20, 17), (0, 27)]:
        expected = brightness_by_hand(points, column + 0.5, row + 0.5)
        assert image[row, column] == pytest.approx(expected, abs=0.06)


def test_the_curve_goes_through_its_three_points() -> None:
    points = np.random.default_rng(0).uniform(0, SIDE, (5, 3, 2))
    vertices = parabola(points)
    middle = (vertices.shape[1] - 1) // 2
    np.testing.assert_allclose(vertices[:, [0, middle, -1]], points)


def test_three_equal_points_make_a_dot() -> None:
    points = np.full((1, 3, 2), 14.5, dtype=np.float32)
    image = paint(parabola(points))[0].reshape(SIDE, SIDE)
    assert image[14, 14] == 1
    assert np.count_nonzero(image) <= 9


def test_a_seed_repeats_and_a_longer_draw_continues_a_shorter_one() -> None:
    images = curves(70, seed=1)
    assert torch.equal(images, curves(70, seed=1))
    assert torch.equal(images[:33], curves(33, seed=1))
    assert not torch.equal(images, curves(70, seed=2))


def test_no_images_is_an_error() -> None:
    with pytest.raises(ValueError, match="Invalid count=0"):
        curves(0, seed=0)
