"""What the optimizer tells its user in warnings: each thing once, at the user's own line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

_OURS = ("torch", "torch_locoprop")


class Notices:
    """The warnings given so far."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def once(self, topic: str, message: str) -> None:
        """Warn, unless there was a warning of that topic."""
        if topic not in self._given:
            self._given.add(topic)
            warnings.warn(message, stacklevel=_level_of_the_user())


TERMS = (
    'local_reduction="mean" divides a summed loss by the number of its terms, which is unknown here: '
    "what the model returns is not the output of one layer with a local problem. The sum is taken as "
    'it is. Give a loss with reduction="mean".'
)


def overwritten(layers: Iterable[str]) -> str:
    return (
        f"The input of {_named(layers)} was written to between the forward pass and step(). Such a "
        "layer takes one BackProp step, and keeps copies of its inputs from now on."
    )


def not_called(layer: str) -> str:
    return (
        f"Layer {layer!r} has a gradient, but its forward was not called (a functional use of its "
        "weight?). Such a layer takes one BackProp step."
    )


def not_recorded(failure: str) -> str:
    return (
        f"The step could not be recorded as a CUDA graph ({failure}) and is launched kernel by kernel "
        "from now on. cuda_graph=False does so from the start."
    )


def not_finite(layers: Iterable[str]) -> str:
    return (
        f"The local solution of {_named(layers)} was not finite and was not written; the layer keeps "
        "its weights. A smaller lr or gamma usually helps. Further cases are counted in "
        "opt.skipped_updates without a warning."
    )


def hooked(layers: Iterable[str]) -> str:
    return (
        f"The parameters of {_named(layers)} have hooks. What these do to gradients, PocoProp's first "
        "local iteration sees, and the others do not."
    )


def _named(layers: Iterable[str]) -> str:
    return ", ".join(map(repr, layers))


def _level_of_the_user() -> int:
    """The stacklevel at which a warning points at the first caller who is not us nor PyTorch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    return level
