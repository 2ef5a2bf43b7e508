"""The cost of a step beyond BackProp: a row of the paper's Table 1.

The formulas are orders of growth. They are evaluated with every constant one, layer by layer: `d₁` and
`d₂` are the inputs and outputs of the layer, `b` is the batch size, `T` the number of local iterations,
and `k` the number of steps between two renewals of a preconditioner. Measured costs are in
``torch_locoprop.study.figures.costs``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class StepCost:
    """The formulas of one row, as text and as functions.

    Args:
        memory: The numbers kept beyond BackProp, summed over layers, as text.
        computation: The multiply-adds beyond BackProp, summed over layers, as text.
        numbers: ``numbers(d1, d2, b)`` of one layer.
        operations: ``operations(d1, d2, b, T, k)`` of one layer.
    """

    memory: str
    computation: str
    numbers: Callable[[int, int, int], float]
    operations: Callable[[int, int, int, int, int], float]


ADAPTIVE = StepCost(
    memory="Σ d₁·d₂",
    computation="Σ d₁·d₂",
    numbers=lambda d1, d2, b: d1 * d2,
    operations=lambda d1, d2, b, T, k: d1 * d2,
)
"""A method that keeps and updates some numbers for each weight."""
