"""A recorder of ``XᵀX``: it adds up the products of layers' inputs while an engine trains a model.

Forward hooks compute ``XᵀX`` of each call at once and keep nothing else of it. What the hooks do in
compiled graphs is in ``compiled_count.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from torch_locoprop.config.setting_kinds import Choice, Count
from torch_locoprop.fast import dispatch
from torch_locoprop.functional.arguments import working_dtype
from torch_locoprop.functional.layer_matrix import known_kind
from torch_locoprop.layers import LayerKind, layer_kind
from torch_locoprop.layers.base import call_inputs, joined_inputs, unusual_tensors
from torch_locoprop.paper.linear_map import with_ones
from torch_locoprop.paper.structured_gram import STRUCTURES, block_gram, diagonal_gram
from torch_locoprop.recording import backward_pass, function_transforms
from torch_locoprop.recording.weak_hook import WeakHook, remove_inert

REDUCTIONS = ("sum", "mean")


@dataclass
class _Layer:
    """A layer that is recorded, and what was counted since the last ``take``."""

    name: str
    module: nn.Module
    kind: LayerKind
    ones: bool  # append a column of ones
    total: Tensor | None = None
    rows: int = 0


class InputGram:
    """Records ``XᵀX`` of layers' inputs X over the micro-batches of a step.

    Make it before the first call of a compiled model, run forward and backward passes as usual, and
    call :meth:`take` once a step.

    **What counts.** Each forward call whose output requires a gradient counts once, when it is made:
    calls under ``torch.no_grad()`` do not, ``model.eval()`` by itself changes nothing, and neither does
    recomputation by activation checkpointing, of either kind. Set ``enabled`` to False around forward
    passes that require gradients but belong to no step.

    **What is kept.** One matrix for each layer, in float32 at least; no inputs. The recorder holds the
    layers; the model does not hold the recorder. Copies of the model are made without its hooks.

    With several processes, add the results up over the processes (average them for means), as with
    gradients: the recorder does not know of other processes.

    Args:
        layers: a model, all of whose layers with local problems are recorded, or a dictionary from
            names to layers: linear layers, convolutions, GPT-2's ``Conv1D``, bilinear layers.
        structure: ``"dense"``, ``"block"`` or ``"diagonal"``.
        block_size: for ``"block"``, the number of columns of a block. It divides the columns of X; a
            layer with fewer columns is one block.
        ones: append a column of ones to the rows of layers with a bias, for the joint matrix ``[W b]``.
        reduction: ``"sum"`` over the rows, or ``"mean"``.
        every: record the first of each ``every`` steps, and nothing in the others.
        dtype: dtype of the sums; None is that of the inputs, at least float32.

    Attributes:
        enabled: False counts nothing; may be set at any time.
        every: may be set at any time, for example after the first steps.
        steps: number of calls of :meth:`take`; set it when a run is resumed.
        skipped: for layers of the given model that are not recorded, the reason by name.

    Raises:
        ValueError: if an option is unknown, or a layer in the dictionary has no local problem.

    Example::

        >>> recorder = InputGram(model, every=10)
        >>> grams = {}
        >>> for batch in loader:
        ...     loss(model(batch)).backward()
        ...     grams |= recorder.take()  # {} in nine of ten steps
    """

    def __init__(
        self,
        layers: nn.Module | Mapping[str, nn.Module],
        *,
        structure: str = "dense",
        block_size: int | None = None,
        ones: bool = True,
        reduction: str = "sum",
        every: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        Choice(default=None, meaning="", choices=STRUCTURES).check("structure", structure)
        Choice(default=None, meaning="", choices=REDUCTIONS).check("reduction", reduction)
        Count(default=None, meaning="").check("every", every)
        Count(default=None, meaning="", optional=structure != "block").check(
            "block_size", block_size
        )
        if structure != "block" and block_size is not None:
            raise ValueError(
                f"Invalid block_size={block_size} with structure={structure!r}. It is the number of "
                "columns of a block of structure='block'."
            )
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"Invalid dtype={dtype}. Must be a floating dtype.")
        self.enabled, self.every, self.steps = True, every, 0
        self._structure, self._block_size, self._reduction = structure, block_size, reduction
        self._dtype = dtype
        self.skipped: dict[str, str] = {}
        chosen = self._all_in(layers) if isinstance(layers, nn.Module) else dict(layers)
        self._recorded: dict[nn.Module, _Layer] = {}
        for name, module in chosen.items():
            kind, has_bias = known_kind(module), getattr(module, "bias", None) is not None
            if reason := _obstacle(kind, module):
                raise ValueError(f"The inputs of layer {name!r} cannot be recorded: {reason}.")
            self._recorded[module] = _Layer(name, module, kind, ones and has_bias)
        if not self._recorded:
            raise ValueError("There is no layer to record. " + _as_text(self.skipped))
        handles = []
        for module in self._recorded:
            remove_inert(module)
            hook = _hook_for(self, module)
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        self._finalizer = weakref.finalize(self, _remove, handles)

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The recorded layers by name."""
        return {layer.name: layer.module for layer in self._recorded.values()}

    @property
    def is_due(self) -> bool:
        """True if the present step is recorded."""
        return self.steps % self.every == 0

    def take(self) -> dict[str, Tensor]:
        """End a step: return ``XᵀX`` of its rows by layer, and begin with zero.

        Returns:
            For each layer that was called ``[n, n]``, ``[b, n/b, n/b]`` or ``[n]``, where n counts the
            column of ones. Convolutions with G groups have ``[G, ...]``. The dictionary is empty in
            steps that are not recorded.

        Raises:
            RuntimeError: if no layer was called in a step that is recorded.
        """
        due, self.steps = self.is_due, self.steps + 1
        found: dict[str, Tensor] = {}
        for layer in self._recorded.values():
            if layer.total is not None and due:
                mean = self._reduction == "mean"
                found[layer.name] = layer.total / max(layer.rows, 1) if mean else layer.total
            layer.total, layer.rows = None, 0
        if due and self.enabled and not found:
            raise RuntimeError(
                "No inputs were recorded in this step: no layer was called in a forward pass with "
                "gradients, the recorder was removed, or it was made after the first call of a "
                "compiled model. For a step without passes, set enabled = False."
            )
        return found

    def remove(self) -> None:
        """Remove all hooks; compiled graphs that have them record nothing from then on."""
        self._finalizer()
        self._recorded.clear()

    def __repr__(self) -> str:
        names = ", ".join(layer.name for layer in self._recorded.values())
        return f"InputGram({names}; {self._structure}, {self._reduction}, every={self.every})"

    def after_layer(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], out: object
    ) -> None:
        """Count the rows of a layer's call: the forward hook of every recorded layer."""
        layer = self._recorded.get(module)
        if layer is None or not isinstance(out, Tensor) or not out.requires_grad:
            return
        if not (self.enabled and self.is_due):
            return
        if function_transforms.innermost() is not None or function_transforms.has_tangent(out):
            raise RuntimeError(
                f"Layer {layer.name!r} was called inside a transform of torch.func, or with a dual "
                "tensor of torch.autograd.forward_ad, where its inputs cannot be recorded. Set enabled "
                "= False around such calls."
            )
        self.count(
            module, joined_inputs(call_inputs(layer.kind.arguments, args, kwargs)), out.shape
        )

    def count(self, module: nn.Module, x: Tensor, output: Sequence[int]) -> None:
        """Add the rows of one call.

        Args:
            module: the layer.
            x: the input of the layer.
            output: the shape of its output.
        """
        layer = self._recorded.get(module)
        if layer is None or not (self.enabled and self.is_due) or _is_recomputation():
            return
        if x.is_nested:
            raise RuntimeError(f"The input of layer {layer.name!r} is a nested tensor.")
        x = x.detach()
        like = x.new_empty((0, 0), dtype=self._dtype or working_dtype(x))
        device = x.device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            for rows in layer.kind.linear_map.row_blocks(layer.kind.collect([x], [output], like)):
                added = self._product(layer, rows)
                layer.total = added if layer.total is None else layer.total.add_(added)
                layer.rows += rows.shape[-2]

    def _product(self, layer: _Layer, rows: Tensor) -> Tensor:
        """Return ``XᵀX`` of some rows in the structure of this recorder."""
        if self._structure == "dense":
            return dispatch.gram(rows, apart=True).joint(True, layer.ones)
        rows = with_ones(rows, True, layer.ones)
        if self._block_size is None:
            return diagonal_gram(rows)
        n = rows.shape[-1]
        size = min(self._block_size, n)
        if n % size != 0:
            column = ", one of them the column of ones (ones=False leaves it out)" * layer.ones
            raise ValueError(
                f"Invalid block_size={self._block_size} for layer {layer.name!r}, whose rows have {n} "
                f"columns{column}. It must divide the number of columns."
            )
        return block_gram(rows, size)

    def _all_in(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return all layers of a model that can be recorded; note the reason for the others."""
        found = {}
        for name, module in model.named_modules():
            kind = layer_kind(module)
            if kind is None:
                continue
            reason = _obstacle(kind, module)
            if reason is None:
                found[name] = module
            else:
                self.skipped[name] = reason
        return found


class CountHook(WeakHook):
    """The forward hook of a recorded layer. It does not keep the recorder alive."""

    arguments: tuple[str, ...] = ()  # names of the layer's input arguments

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            from torch_locoprop.functional import compiled_count

            return compiled_count.trace(self._key, self.arguments, args)
        return self.run(*args)

    def count(self, x: Tensor, output: Sequence[int]) -> None:
        """Count a call in a compiled graph; do nothing if the recorder was deleted."""
        owner: Any = self._owner()
        module = self._module()
        if owner is not None and module is not None:
            owner.count(module, x, output)


# The hooks of all recorders by their keys, by which compiled graphs find them.
hooks: weakref.WeakValueDictionary[str, CountHook] = weakref.WeakValueDictionary()


def _hook_for(owner: InputGram, module: nn.Module) -> CountHook:
    """Return a hook whose ``__call__`` has its own code object.

    ``torch.compile`` stops after eight versions of one code object.
    """
    call = CountHook.__call__
    own = FunctionType(call.__code__.replace(), call.__globals__, call.__name__)
    kind: Any = type("CountHook", (CountHook,), {"__call__": own})
    hook: CountHook = kind(owner, "after_layer", module)
    hook.arguments = known_kind(module).arguments
    hooks[hook._key] = hook
    return hook


def _obstacle(kind: LayerKind, module: nn.Module) -> str | None:
    """Return why the inputs of a layer cannot be recorded; what its weight is does not matter."""
    reason = kind.refuses(module)
    return None if reason == unusual_tensors(module) else reason


def _is_recomputation() -> bool:
    """Return True if activation checkpointing makes a call again that was counted.

    Checkpoints that are reentrant make the first call without gradients, which is not counted, and
    compute anew in the backward of their own node.
    """
    if backward_pass.current_pass() == -1:
        return False
    node = backward_pass.running_node()
    return node is None or node.name() != "CheckpointFunctionBackward"


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _as_text(skipped: Mapping[str, str]) -> str:
    return " ".join(f"{name}: {reason}." for name, reason in skipped.items())
