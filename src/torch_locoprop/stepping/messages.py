"""The warnings of an optimizer: each is issued once and points at the user's own line of code.

Errors are raised where they are detected.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from types import FrameType

from torch_locoprop.recording.layer_record import LayerRecord

_LIBRARIES = ("torch", "torch_locoprop")  # whose stack frames are not the user's code


class Notices:
    """The warnings of one optimizer, at most one for each topic."""

    def __init__(self) -> None:
        self._issued: set[str] = set()

    def once(self, topic: str, message: str) -> None:
        """Issue a warning, unless this object has issued one with the same topic before."""
        if topic not in self._issued:
            self._issued.add(topic)
            warnings.warn(message, stacklevel=_user_stacklevel())

    def overwritten(self, layers: Iterable[str]) -> None:
        """Warn that the recorded inputs of layers were written to before the step."""
        self.once(
            "overwritten",
            f"The input of {_quoted(layers)} was written to between the forward pass and step(). Such "
            "a layer takes one BackProp step now, and keeps copies of its inputs from now on.",
        )

    def lacking(self, layers: Iterable[LayerRecord]) -> None:
        """Warn of layers with gradients of backward passes whose rows are not recorded."""
        by_reason: dict[str, list[str]] = {}
        for layer in layers:
            by_reason.setdefault(layer.lacks_rows, []).append(layer.name)
        for reason, names in by_reason.items():
            self.once(reason, f"The gradients of {_quoted(names)} {reason}")

    def added(self, modules: Iterable[str]) -> None:
        """Warn that modules with gradients were added to the model after the optimizer was made."""
        self.once(
            "added",
            f"{_quoted(modules)} got parameters after this optimizer was made, which does not train "
            "them. Make the optimizer when the model is complete.",
        )

    def hidden(self, layers: Iterable[str]) -> None:
        """Warn that layers are called where their rows cannot be recorded."""
        self.once(
            "hidden",
            f"The forward of {_quoted(layers)} was called inside a transform of torch.func (vmap, "
            "jacrev, ...), with dual tensors of torch.autograd.forward_ad, or by functional_call with "
            "weights that are computed from its own. Rows cannot be recorded there. Such a layer takes "
            "BackProp steps. What torch.autograd.grad(..., create_graph=True) computes is recorded.",
        )

    def hidden_state(self, solver: str) -> None:
        """Warn that checkpoint tools do not know which state a user's own solver keeps."""
        self.once(
            "hidden state",
            f"A tool such as torch.distributed.checkpoint asks for the state of solver {solver!r} "
            "before its first step, and will not load any of a checkpoint: the solver has no method "
            "empty_states that names the entries. Add it, or set stateless = True in the class if the "
            "solver keeps nothing between steps.",
        )

    def not_called(self, layer: str) -> None:
        """Warn that a layer has a gradient although its forward was not called."""
        self.once(
            layer,
            f"Layer {layer!r} has a gradient, but its forward was not called (a functional use of its "
            "weight?). Such a layer takes one BackProp step.",
        )

    def not_reached(self, layer: str) -> None:
        """Warn that a layer has a gradient that did not come through the output of its call."""
        self.once(
            layer,
            f"Layer {layer!r} was called and has a gradient, but no backward pass went through its "
            "output: the loss uses a derivative of it (as force matching does), or it was called "
            "without gradients and computed again by other code (as in reversible networks). Such a "
            "layer takes one BackProp step.",
        )

    def not_recorded(self, failure: str) -> None:
        """Warn that steps cannot be recorded as a CUDA graph."""
        self.once(
            "graph",
            f"The step could not be recorded as a CUDA graph ({failure}). From now on its kernels are "
            "launched one by one. Pass cuda_graph=False to do so from the start.",
        )

    def not_finite(self, layers: Iterable[str]) -> None:
        """Warn that local solutions were not written because they are not finite."""
        self.once(
            "skipped",
            f"The local solution of {_quoted(layers)} was not finite and was not written; the layer "
            "keeps its weights. A smaller lr or gamma usually helps. Further cases are counted in "
            "opt.skipped_updates without a warning.",
        )

    def hooked(self, layers: Iterable[LayerRecord]) -> None:
        """Warn about parameter hooks, whose effect on gradients the row gradients do not have.

        Args:
            layers: the layers whose problems need gradients of rows.
        """
        found = [
            layer.name
            for layer in layers
            if any(p._backward_hooks for p in layer.with_gradient.values())
        ]
        if found:
            self.once(
                "hooked",
                f"The parameters of {_quoted(found)} have hooks. If these change gradients, the change "
                "affects only the first local iteration of PocoProp, not the later ones.",
            )

    def drifting(self) -> None:
        """Warn that there are several processes, but no DDP module that averages gradients."""
        self.once(
            "processes",
            "torch.distributed has several processes, but no layer was called through "
            "DistributedDataParallel (inside a compiled graph this cannot be detected). Each process "
            "solves its local problems with its own rows only, so the weights of the processes drift "
            "apart unless local_steps=1.",
        )

    def unknown_terms(self) -> None:
        """Warn that the number of terms of a summed loss is not known."""
        self.once(
            "terms",
            'local_reduction="mean" divides a summed loss by the number of its terms. That number is '
            "not known, because what the model returns is not the output of one layer with a local "
            "problem, several losses are summed, or classes have weights. The sum is used without a "
            "division. Use a loss "
            'with reduction="mean", or pass one of PyTorch\'s loss modules, called once in each '
            "backward pass, as loss_fn=.",
        )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _user_stacklevel() -> int:
    """Return the stacklevel of the first caller that is neither this library nor PyTorch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _package(frame) in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    return level


def _package(frame: FrameType) -> str:
    """Return the package of the code that runs; empty for code that ``exec`` runs without a name."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
