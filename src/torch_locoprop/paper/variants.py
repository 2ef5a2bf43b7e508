"""The variants of the paper as data: a target, a local loss, and what happens at the output."""

from __future__ import annotations

from dataclasses import dataclass

from torch_locoprop.paper.losses import DualMatching, LocalLoss, Matching, PostSquared, Squared
from torch_locoprop.paper.targets import (
    DualMirrorDescent,
    GradientDescent,
    MirrorDescent,
    NaturalGradient,
    PostGradientDescent,
    Target,
)


@dataclass(frozen=True)
class Variant:
    """A kind of local problem. Make your own from any :class:`Target` and :class:`LocalLoss`."""

    name: str
    target: Target
    loss: LocalLoss
    output_by_gradient_descent: bool = False  # ProxProp: the output layer takes one plain step


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("locoprop-s", GradientDescent(), Squared()),
        Variant("locoprop-m", MirrorDescent(), Matching()),
        Variant("pocoprop-s", PostGradientDescent(), PostSquared()),
        Variant("pocoprop-m", DualMirrorDescent(), DualMatching()),
        Variant("natural-s", NaturalGradient(), Squared()),
        Variant("proxprop", GradientDescent(), Squared(), output_by_gradient_descent=True),
    )
}
