"""Counts the terms that a summed loss has, for ``local_reduction="mean"``.

A loss module given as ``loss_fn=`` is watched: a hook counts the terms of each call from its labels, as
PyTorch counts them for ``reduction="mean"``, and a backward pass makes the call count. What the
autograd graph of a loss tells is in ``loss_graph.py``, and what a loss is called with in
``loss_inputs.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_locoprop.layers.base import is_distributed
from torch_locoprop.paper.tensors import has_values
from torch_locoprop.recording import backward_pass, function_transforms
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.recording.loss_graph import LossFacts
from torch_locoprop.recording.loss_inputs import LossInputs
from torch_locoprop.recording.weak_hook import hook_for, remove_inert

_ARGUMENTS = ("input", "target")


class LossTerms:
    """The numbers of terms of a loss module's calls, by the backward passes that reach them.

    Copies and reloads of this object watch nothing.

    Args:
        loss: one of PyTorch's losses with a ``reduction``; None watches nothing.
        by_row: the loss has one term for each row; otherwise one for each element.
        inputs: the layers whose outputs the loss is called with.
    """

    wanted = True  # a step may ask for the terms; on a GPU, counting labels is a host sync

    def __init__(
        self,
        loss: nn.Module | None = None,
        by_row: bool = False,
        inputs: LossInputs | None = None,
    ) -> None:
        self._by_row = by_row
        self.inputs = inputs or LossInputs()
        self._of_pass: dict[int, list[float | None]] = {}
        if loss is not None:
            remove_inert(loss)
            hook = hook_for(self, "after_loss", loss)
            handle = loss.register_forward_hook(hook, with_kwargs=True)
            weakref.finalize(self, handle.remove)

    def __reduce__(self) -> tuple[type[LossTerms], tuple[()]]:
        return LossTerms, ()

    def after_loss(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: object
    ) -> None:
        """Count the terms of a call, once a backward pass reaches it: the loss's forward hook."""
        if not isinstance(out, Tensor) or out.grad_fn is None or module.reduction != "sum":
            return
        if self.wanted and function_transforms.innermost() is None:
            out.grad_fn.register_prehook(_counter(self, _terms(module, args, kwargs, self._by_row)))

    def total(self, layers: Iterable[LayerRecord]) -> float | None:
        """Return the number of terms whose gradients the layers have; None if it is not known.

        The number is known if every backward pass has reached one call of the loss, and the passes of
        each layer have the same number of terms in total. If a pass reaches two calls, their sum may be
        one loss or two.

        Args:
            layers: all layers with recorded calls.
        """
        totals = {self._of_passes(layer.passes) for layer in layers if layer.calls}
        return totals.pop() if len(totals) == 1 else None

    def _of_passes(self, passes: Iterable[int]) -> float | None:
        total = 0.0
        for each in passes:
            counted = self._of_pass.get(each, [])
            if len(counted) != 1 or counted[0] is None:
                return None
            total += counted[0]
        return total or None

    def clear(self) -> None:
        """Forget all calls, after a step."""
        self._of_pass.clear()

    def count(self, terms: float | None) -> None:
        """Count a call that the running backward pass has reached."""
        self._of_pass.setdefault(backward_pass.current_pass(), []).append(terms)


def watched(loss: object, facts: LossFacts | None) -> LossTerms:
    """Return an object that watches a loss, and counts its terms if it is a known module that sums.

    Args:
        loss: what the user gave as ``loss_fn=``.
        facts: what is known of it by its name.
    """
    inputs = LossInputs(loss, of_classes=isinstance(loss, nn.CrossEntropyLoss))
    if isinstance(loss, nn.Module) and facts is not None and facts.sums:
        return LossTerms(loss, bool(facts.by_row), inputs)
    return LossTerms(inputs=inputs)


def _counter(owner: LossTerms, terms: float | None) -> Callable[[tuple[Tensor, ...]], None]:
    """Return a hook for the node of a loss that does not keep the owner alive."""
    weak = weakref.ref(owner)

    def count(gradients: tuple[Tensor, ...]) -> None:
        alive = weak()
        if alive is not None:
            alive.count(terms)

    return count


def _terms(loss: Any, args: Sequence[Any], kwargs: Mapping[str, Any], by_row: bool) -> float | None:
    """Return the number by which one of PyTorch's losses would divide to average; None if unknown."""
    given = dict(zip(_ARGUMENTS, args, strict=False)) | dict(kwargs)
    x, y = given.get("input"), given.get("target")
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or is_distributed(y):
        return None
    if not by_row:
        return float(torch.broadcast_shapes(x.shape, y.shape).numel())  # type: ignore[no-untyped-call]
    if y.is_floating_point():  # probabilities of the classes
        return float(y.numel() // y.shape[1 if y.dim() > 1 else 0])
    if not has_values(y) or (y.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    counted = y[y != loss.ignore_index]
    if loss.weight is None:
        return float(counted.numel())
    return float(loss.weight[counted].sum())
