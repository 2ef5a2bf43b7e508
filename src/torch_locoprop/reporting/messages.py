"""What the optimizer tells its user in warnings: each thing once, at the user's own line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

from torch_locoprop.recording.layer_record import LayerRecord

_OURS = ("torch", "torch_locoprop")


class Notices:
    """The warnings of one optimizer; each topic is warned of once."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def once(self, topic: str, message: str) -> None:
        """Warn, unless there was a warning of this topic before."""
        if topic not in self._given:
            self._given.add(topic)
            warnings.warn(message, stacklevel=_level_of_the_user())

    def overwritten(self, layers: Iterable[str]) -> None:
        """Warn of inputs that were written to before the step."""
        self.once(
            "overwritten",
            f"The input of {_named(layers)} was written to between the forward pass and step(). Such "
            "a layer takes one BackProp step, and keeps copies of its inputs from now on.",
        )

    def not_called(self, layer: str) -> None:
        """Warn of a layer with a gradient that no call of its forward explains."""
        self.once(
            layer,
            f"Layer {layer!r} has a gradient, but its forward was not called (a functional use of its "
            "weight?). Such a layer takes one BackProp step.",
        )

    def not_recorded(self, failure: str) -> None:
        """Warn that steps cannot be recorded as a CUDA graph."""
        self.once(
            "graph",
            f"The step could not be recorded as a CUDA graph ({failure}) and is launched kernel by "
            "kernel from now on. cuda_graph=False does so from the start.",
        )

    def not_finite(self, layers: Iterable[str]) -> None:
        """Warn of solutions that were not written because they are not finite."""
        self.once(
            "skipped",
            f"The local solution of {_named(layers)} was not finite and was not written; the layer "
            "keeps its weights. A smaller lr or gamma usually helps. Further cases are counted in "
            "opt.skipped_updates without a warning.",
        )

    def hooked(self, layers: Iterable[LayerRecord]) -> None:
        """Warn of parameter hooks whose changes PocoProp sees in its first iteration only.

        Args:
            layers: the layers whose rows need gradients of their own.
        """
        found = [
            layer.name
            for layer in layers
            if any(p._backward_hooks for p in layer.with_gradient.values())
        ]
        if found:
            self.once(
                "hooked",
                f"The parameters of {_named(found)} have hooks. What these do to gradients, "
                "PocoProp's first local iteration sees, and the others do not.",
            )

    def drifting(self) -> None:
        """Warn of processes that are not seen to average their gradients."""
        self.once(
            "processes",
            "torch.distributed has several processes, but no layer was called through "
            "DistributedDataParallel (inside a compiled graph that is not seen). Each process solves "
            "its local problems with its own rows only, so their weights drift apart unless "
            "local_steps=1.",
        )

    def unknown_terms(self) -> None:
        """Warn that the terms of a summed loss cannot be counted."""
        self.once(
            "terms",
            'local_reduction="mean" divides a summed loss by the number of its terms, which is unknown '
            "here: what the model returns is not the output of one layer with a local problem. The sum "
            'is taken as it is. Give a loss with reduction="mean".',
        )


def _named(layers: Iterable[str]) -> str:
    return ", ".join(map(repr, layers))


def _level_of_the_user() -> int:
    """Return the stacklevel of the first caller that is neither this library nor PyTorch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    return level
