"""Local losses: the distance between a layer's pre-activation and its target.

Each variant of LocoProp has one. Combine a loss with a target from :mod:`torch_locoprop.targets` in
a :class:`torch_locoprop.Variant`, or subclass :class:`LocalLoss` to write one.
"""

from torch_locoprop.paper.losses import (
    DualMatching,
    LocalLoss,
    Matching,
    PostSquared,
    Squared,
    integral_per_row,
)

__all__ = [
    "DualMatching",
    "LocalLoss",
    "Matching",
    "PostSquared",
    "Squared",
    "integral_per_row",
]
