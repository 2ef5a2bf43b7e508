"""Notices which layers' outputs a loss module is called with.

The transfer inside ``loss_fn=`` is that of a layer only if the loss gets the layer's own output.
A loop may divide or mask what the model returns, or give the loss the output of another model.
The number of terms of a loss is counted in ``loss_terms.py``.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from torch_locoprop.recording import function_transforms
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.recording.node_marks import KEY, Mark, is_transparent, node_notes
from torch_locoprop.recording.weak_hook import hook_for, remove_inert

# Nodes that move or select elements. What else they do to softmax shows in the number of classes.
_MOVES = {
    f"{name}Backward{i}"
    for name in (
        *("Slice", "Select", "Index", "IndexSelect", "MaskedSelect", "Split", "SplitWithSizes"),
        *("Unbind", "Gather", "Transpose", "Permute", "T", "Expand", "Cat", "Stack"),
    )
    for i in range(2)
}


class LossInputs:
    """The layers whose outputs a loss module was called with since transfers were last assigned.

    Copies and reloads of this object watch nothing.

    Args:
        loss: a loss; nothing is watched unless it is a module.
        of_classes: the second dimension of its first argument, or the only one, is that of classes.
    """

    def __init__(self, loss: object = None, of_classes: bool = False) -> None:
        self._of_classes = of_classes
        self.clear()
        if isinstance(loss, nn.Module):
            remove_inert(loss)
            handle = loss.register_forward_hook(
                hook_for(self, "after_loss", loss), with_kwargs=True
            )
            weakref.finalize(self, handle.remove)

    def __reduce__(self) -> tuple[type[LossInputs], tuple[()]]:
        return LossInputs, ()

    def clear(self) -> None:
        """Forget all calls, after a step that has assigned transfers."""
        self._shapes: weakref.WeakKeyDictionary[Mark, torch.Size] = weakref.WeakKeyDictionary()
        self._was_called = False
        self._is_known = True  # no call had an argument that code other than PyTorch's computes

    def after_loss(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: object
    ) -> None:
        """Notice the layers behind the arguments of a call: the loss's forward hook."""
        if not isinstance(out, Tensor) or out.grad_fn is None or function_transforms.innermost():
            return
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and x.grad_fn is not None:
                self._was_called = True
                self._search(x.grad_fn, x.shape)

    def _search(self, node: Node, shape: torch.Size) -> None:
        """Notice the layers from whose outputs the elements of an argument are taken."""
        stack: list[Node | None] = [node]
        while stack:
            node_now = stack.pop()
            if node_now is None:
                continue
            mark = node_notes(node_now).get(KEY)
            if mark is not None and mark.is_layer:
                self._shapes[mark] = shape
            elif is_transparent(node_now):
                stack.append(node_now.next_functions[0][0])
            elif node_now.name() in _MOVES:
                stack += [below for below, _ in node_now.next_functions]
            elif isinstance(node_now, BackwardCFunction):
                self._is_known = False

    def lack(self, layer: LayerRecord) -> bool:
        """Return True if the loss was called, and not with the outputs of all calls of a layer.

        Args:
            layer: the record of the layer, with the calls of this step.
        """
        if not self._was_called or not self._is_known:
            return False
        if any(call.compiled is not None or call.recomputed for call in layer.calls):
            return False
        return not all(self._has(call.mark, layer.width) for call in layer.calls)

    def _has(self, mark: Mark, width: int) -> bool:
        shape = self._shapes.get(mark)
        if shape is None or not self._of_classes:
            return shape is not None
        return shape[min(1, len(shape) - 1)] == width
