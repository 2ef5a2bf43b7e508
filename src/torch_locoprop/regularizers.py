"""Regularizers: the penalty on the distance between a layer's new and current weights.

Pass one, or its name (``"none"``, ``"l2"``, ``"l1"``, ``"fisher"``), to ``LocoProp(regularizer=...)``.
Subclass :class:`Regularizer` to write one.
"""

from torch_locoprop.paper.regularizers import (
    L1,
    L2,
    REGULARIZERS,
    FisherMahalanobis,
    Metric,
    Regularizer,
    pulled_back_to_start,
)

__all__ = [
    "L1",
    "L2",
    "REGULARIZERS",
    "FisherMahalanobis",
    "Metric",
    "Regularizer",
    "pulled_back_to_start",
]
