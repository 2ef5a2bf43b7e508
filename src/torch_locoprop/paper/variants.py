"""The variants of the paper as data: a target (``targets.py``) and a local loss (``losses.py``) each.

The solver and the regularizer are settings of the optimizer and not part of a variant.
"""

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
    """A kind of local problem: Algorithms 1 to 4, ProxProp, or your own target and loss.

    Args:
        name: the name for summaries.
        target: the target of the local problem.
        loss: the local loss between the layer's pre-activation and the target.
        output_by_gradient_descent: if True, the output layer takes one gradient-descent step with the
            rate ``ηγ`` in place of a local problem, as in ProxProp.

    Example::

        >>> from torch_locoprop import LocoProp, Variant, losses, targets
        >>> variant = Variant("mine", targets.GradientDescent(), losses.Squared())
        >>> opt = LocoProp(model, variant=variant)
    """

    name: str
    target: Target
    loss: LocalLoss
    output_by_gradient_descent: bool = False


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
