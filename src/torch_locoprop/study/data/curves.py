"""Generated images like those of CURVES: each shows one smooth stroke through three random points.

The original data set (Hinton and Salakhutdinov, 2006) does not specify its stroke. Here a stroke is the
parabola through the first point at t = 0, the second at t = 1/2 and the third at t = 1, drawn with a
soft pen: the brightness of a pixel depends on the distance of its centre from the stroke. Images have
256 grey levels, as in MNIST. Files of genuine and generated images are in ``curves_files``.
"""

from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

SIDE = 28
"""Pixels per side of an image."""

SEGMENTS = 20
"""Line segments that approximate the parabola, with errors far below the softness of the pen."""

RADIUS = 0.7
"""Half the width of the fully bright part of the stroke, in pixels."""

SOFTNESS = 1.0
"""Distance over which the edge of the stroke fades to black, in pixels."""

MARGIN = 3.0
"""Smallest distance of a point from the border, in pixels."""

BLOCK = 32
"""Images drawn at a time, so that the distances of pixels from segments need little memory."""


def curves(count: int, *, seed: int) -> Tensor:
    """Return generated images `[count, 784]`, float32 in [0, 1], as `draw` draws them."""
    return torch.from_numpy(draw(count, seed=seed)).float() / 255


def draw(count: int, *, seed: int) -> Bytes:
    """Return generated images `[count, 784]` as bytes.

    The same seed gives the same images on every machine. The n-th image does not depend on `count`.

    Raises:
        ValueError: If `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"Invalid count={count}. Must be at least 1.")
    points = np.random.default_rng(seed).uniform(MARGIN, SIDE - MARGIN, (count, 3, 2))
    # Computed in float64 and rounded, as matrix products differ in the last digit between machines.
    vertices = parabola(cast(Floats, points)).astype(np.float32)
    blocks = (vertices[start : start + BLOCK] for start in range(0, count, BLOCK))
    return np.concatenate([np.rint(paint(block) * 255).astype(np.uint8) for block in blocks])


def parabola(points: Floats) -> Floats:
    """Return vertices `[n, SEGMENTS + 1, 2]` on the parabolas through the points `[n, 3, 2]`."""
    t = np.linspace(0, 1, SEGMENTS + 1, dtype=points.dtype)
    lagrange = np.stack([(2 * t - 1) * (t - 1), 4 * t * (1 - t), t * (2 * t - 1)], axis=1)
    return lagrange @ points


def paint(vertices: Floats) -> Floats:
    """Return the images `[n, 784]` of the polylines with vertices `[n, v, 2]`."""
    centres = np.arange(SIDE, dtype=vertices.dtype) + 0.5
    start, step = vertices[:, :-1, :], np.diff(vertices, axis=1)  # [n, s, 2]
    dx = centres[None, :, None] - start[:, None, :, 0]  # [n, side, s]
    dy = centres[None, :, None] - start[:, None, :, 1]
    step_x, step_y = step[:, None, :, 0], step[:, None, :, 1]
    length2 = np.maximum(step_x**2 + step_y**2, 1e-12)
    # The point of each segment that is nearest to each pixel, as a fraction of the segment.
    along = (dy * step_y / length2)[:, :, None, :] + (dx * step_x / length2)[:, None, :, :]
    np.clip(along, 0, 1, out=along)
    gap_x = dx[:, None, :, :] - along * step_x[:, :, None, :]
    gap_y = dy[:, :, None, :] - along * step_y[:, :, None, :]
    distance = np.sqrt((gap_x**2 + gap_y**2).min(axis=-1))  # [n, rows, columns]
    ink: Floats = np.clip((RADIUS + SOFTNESS - distance) / SOFTNESS, 0, 1)
    return ink.reshape(len(vertices), SIDE * SIDE)
