"""The visible range of losses, and where lines leave it.

A range that included the first epochs and failed runs would hide the differences at the end. So lines
enter the frame from above, and a line that is above the frame later has a mark at its upper edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from torch_locoprop.study import methods
from torch_locoprop.study.figures.catalog import Loss
from torch_locoprop.study.figures.loss_lines import Drawn, Floats

LOGARITHMIC = 2.25
"""A frame whose highest and lowest loss have at least this ratio gets a logarithmic scale."""

STRETCH, FARTHER_STRETCH = 1.8, 4.0
"""The largest height of a frame that shows the ends of lines, relative to the range of early losses.

The second number is for lines of methods with ``ends_in_frame``.
"""

ROW, SMALL_ROW = 0.055, 0.078
"""The height of a name in a frame and in a small one, as a share of the range of losses."""

NEARBY = 0.04
"""Marks of one line are at least this share of its points apart."""


@dataclass(frozen=True)
class Frame:
    """The visible range of losses."""

    low: float
    high: float
    logarithmic: bool

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and highest visible loss."""
        return self.low, self.high


def frame_of(lines: Sequence[Drawn], loss: Loss, *, small: bool = False) -> Frame | None:
    """Return the range from the lowest loss to the median after a tenth of the epochs.

    The range is extended to the ends of lines that are not far above it, and to the second half of the
    lines of methods with ``ends_in_frame``. The scale is logarithmic if even this range is wide.
    In a `small` panel a name takes a larger share of the height.
    """
    known = [(line, line.losses(loss)) for line in lines if not line.diverged]
    finite = [(line, each) for line, each in known if np.isfinite(each).all() and each.shape[1] > 1]
    if not finite:
        return None
    low = min(float(each.min()) for _, each in finite)
    early = float(np.median([each[:, max(1, each.shape[1] // 10)].mean() for _, each in finite]))
    late = float(np.median([each[:, -1].mean() for _, each in finite]))
    span = max(early - low, 1.5 * (late - low), 1e-3 * abs(low))
    top = low + 1.05 * span
    for line, each in finite:
        method = methods.get(line.series.config.method)
        middle = each.shape[1] // 2
        end = float(each.mean(axis=0)[middle if method.ends_in_frame else -1 :].max())
        wanted = end + 0.03 * (end - low)
        if wanted <= low + (FARTHER_STRETCH if method.ends_in_frame else STRETCH) * span:
            top = max(top, wanted)
    # Lines that end above are named in a row each below the upper edge, above the other ends.
    names = sum(line.final(loss) > top for line in lines) * (SMALL_ROW if small else ROW)
    if low > 0 and top / low >= LOGARITHMIC:
        return Frame(low / (top / low) ** 0.04, top * (top / low) ** names, True)
    return Frame(low - 0.04 * (top - low), top + names * (top - low), False)


def exits(losses: Floats, high: float) -> list[int]:
    """Return the points at which a line is marked at the upper edge: the peaks above the frame.

    The way into the frame in the first epochs is not marked. A line that never gets there is marked at
    its end.
    """
    with np.errstate(invalid="ignore"):
        inside = losses <= high
    if not inside.any():
        return [len(losses) - 1]
    entered = int(inside.argmax())
    outside = [at for at in range(entered, len(losses)) if not inside[at]]
    peaks: list[int] = []
    for group in _runs(outside, max(1.0, NEARBY * len(losses))):
        # A line that ends above the frame is marked where it ends, another where it is highest.
        last = group[-1] == len(losses) - 1
        peaks.append(group[-1] if last else max(group, key=lambda at: losses[at]))
    return peaks


def _runs(numbers: Sequence[int], gap: float) -> list[list[int]]:
    """Return increasing numbers in groups whose members are at most `gap` apart."""
    if not numbers:
        return []
    groups = [[numbers[0]]]
    for before, after in pairwise(numbers):
        if after - before > gap:
            groups.append([])
        groups[-1].append(after)
    return groups
