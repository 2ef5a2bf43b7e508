"""A look-alike of the CURVES data set: each image is one smooth stroke through three points.

The original (Hinton and Salakhutdinov, 2006) draws a curve from three random points of the plane;
its exact stroke is not published. Here it is the parabola that meets the first point at t = 0, the
second at t = 1/2 and the third at t = 1, painted with a soft pen: a pixel is as bright as its
centre is close to the stroke, in 256 grey levels, as those of MNIST.
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
"""Line segments that stand for the parabola: enough for errors far below the pen's soft edge."""

RADIUS = 0.7
"""Half the width of the fully bright core of the stroke, in pixels."""

SOFTNESS = 1.0
"""Width over which the edge of the stroke fades to black, in pixels."""

MARGIN = 3.0
"""Smallest distance of the three points from the border, in pixels."""

BLOCK = 32
"""Images painted at a time, or the distances of pixels to segments would fill gigabytes of memory."""


def curves(count: int, *, seed: int) -> Tensor:
    """Return what `draw` does, float32 in [0, 1]."""
    return torch.from_numpy(draw(count, seed=seed)).float() / 255


def draw(count: int, *, seed: int) -> Bytes:
    """Return images `[count, 784]`, for the same seed the same on every machine.

    The n-th image does not depend on `count`: a longer draw continues a shorter one.
    """
    if count < 1:
        raise ValueError(f"Invalid count={count}. Must be at least 1.")
    points = np.random.default_rng(seed).uniform(MARGIN, SIDE - MARGIN, (count, 3, 2))
    # In float64, then rounded: matrix products differ in the last digit from machine to machine.
    vertices = parabola(cast(Floats, points)).astype(np.float32)
    blocks = (vertices[start : start + BLOCK] for start in range(0, count, BLOCK))
    return np.concatenate([np.rint(paint(block) * 255).astype(np.uint8) for block in blocks])


def parabola(points: Floats) -> Floats:
    """Return vertices `[n, SEGMENTS + 1, 2]` along the parabolas through the points `[n, 3, 2]`."""
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
    # The nearest point of each segment to each pixel: project on the line, stay on the segment.
    along = (dy * step_y / length2)[:, :, None, :] + (dx * step_x / length2)[:, None, :, :]
    np.clip(along, 0, 1, out=along)
    gap_x = dx[:, None, :, :] - along * step_x[:, :, None, :]
    gap_y = dy[:, :, None, :] - along * step_y[:, :, None, :]
    distance = np.sqrt((gap_x**2 + gap_y**2).min(axis=-1))  # [n, rows, columns]
    ink: Floats = np.clip((RADIUS + SOFTNESS - distance) / SOFTNESS, 0, 1)
    return ink.reshape(len(vertices), SIDE * SIDE)
