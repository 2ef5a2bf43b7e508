"""Targets: the values that a layer's local problem moves its activations towards.

Each variant of LocoProp has one. Combine a target with a loss from :mod:`torch_locoprop.losses` in
a :class:`torch_locoprop.Variant`, or subclass :class:`Target` to write one.
"""

from torch_locoprop.paper.targets import (
    BackPropTarget,
    DualMirrorDescent,
    GradientDescent,
    MirrorDescent,
    NaturalGradient,
    PostGradientDescent,
    Target,
    step_from,
)

__all__ = [
    "BackPropTarget",
    "DualMirrorDescent",
    "GradientDescent",
    "MirrorDescent",
    "NaturalGradient",
    "PostGradientDescent",
    "Target",
    "step_from",
]
