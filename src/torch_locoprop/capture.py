"""Records what each layer saw: its input and, on request, the gradients of its outputs.

A forward hook puts a hook on the autograd node of the layer's matrix product; a call is recorded when
that node runs in a backward pass. A forward pass without a backward leaves nothing behind, in-place
activations and views do not matter, and ``zero_grad`` may stand anywhere in the loop.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_locoprop import detection, transfers
from torch_locoprop.detection import LAYER_INPUT, MODEL_OUTPUT, Finding, Mark
from torch_locoprop.fisher import sampled_output_gradient
from torch_locoprop.layers import Layer
from torch_locoprop.transfers import Transfer


@dataclass(frozen=True)
class Call:
    """One call of a layer, as recorded in the backward pass."""

    x: Tensor
    mark: Mark
    g: Tensor | None = None
    sampled: Tensor | None = None  # ∂L/∂a for a label drawn from the model, where asked for


@dataclass(eq=False)
class ServedLayer:
    """A layer with a local problem: its module, its kind, and what was recorded for it."""

    name: str
    module: nn.Module
    kind: Layer
    given: list[nn.Parameter]  # those of its parameters that the optimizer trains
    needs: frozenset[str] = frozenset()  # what to record besides the input: "g", "v", "fisher"
    calls: list[Call] = field(default_factory=list)
    transfer: Transfer | None = None
    explicit: bool = False  # the transfer was given by the user
    decided: bool = False  # the transfer is known, or known not to exist
    note: str = ""  # why there is no transfer
    is_output: bool = False
    skips: int | Tensor = 0  # local solutions that were not finite

    @property
    def tensors(self) -> dict[str, nn.Parameter]:
        named = {"weight": self.module.weight, "bias": self.module.bias}
        return {name: p for name, p in named.items() if isinstance(p, nn.Parameter)}

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.given if p.requires_grad]

    @property
    def with_gradient(self) -> dict[str, nn.Parameter]:
        """The tensors this step will move."""
        return {
            name: p
            for name, p in self.tensors.items()
            if p.grad is not None and any(p is own for own in self.given)
        }

    def findings(self) -> list[Finding]:
        return [detection.resolve(call.mark) for call in self.calls]

    def inputs(self) -> Tensor:
        """X ``[rows, n]``: the inputs of all calls, one below the other."""
        weight = self.tensors["weight"]
        rows = self._joined([call.x for call in self.calls])
        return weight.new_empty(0, weight.shape[1]) if rows is None else rows

    def gradients(self) -> Tensor | None:
        """∂L/∂a ``[rows, d]``, where recorded."""
        return self._joined([call.g for call in self.calls])

    def post_gradients(self) -> Tensor | None:
        """∂L/∂y ``[rows, d]`` from behind the transfer; None where that is inside the loss."""
        return self._joined(
            [
                finding.consumer.gradient
                if finding.consumer is not None and finding.transfer == self.transfer
                else None
                for finding in self.findings()
            ]
        )

    def sampled(self) -> Tensor | None:
        """∂L/∂a ``[rows, d]`` for sampled labels, where drawn."""
        return self._joined([call.sampled for call in self.calls])

    def _joined(self, tensors: list[Tensor | None]) -> Tensor | None:
        dtype = self.tensors["weight"].dtype
        rows = [self.kind.rows(t).to(dtype) for t in tensors if t is not None]
        if not rows or len(rows) < len(tensors):
            return None
        return rows[0] if len(rows) == 1 else torch.cat(rows)


class Capture:
    """The hooks on one model. They vanish with this object and do nothing in copies of the model."""

    def __init__(
        self, model: nn.Module, layers: Iterable[ServedLayer], output_transfer: Transfer | None
    ) -> None:
        self.layers = {layer.module: layer for layer in layers}
        self.sample_seed: int | None = None  # draw labels in the next forward pass
        self.output_transfer = output_transfer  # tells the predictive distribution
        self._sampling = False
        self._in_forward: list[tuple[ServedLayer, Mark, Tensor]] | None = None
        handles = [
            module.register_forward_hook(_Hook(self, "_after_layer"), with_kwargs=True)
            for module in self.layers
        ]
        handles.append(model.register_forward_pre_hook(_Hook(self, "_before_model")))
        handles.append(model.register_forward_hook(_Hook(self, "_after_model")))
        weakref.finalize(self, _remove, handles)

    def clear(self) -> None:
        for layer in self.layers.values():
            layer.calls.clear()

    def trace_loss(self, loss: object) -> None:
        """Look for the output's transfer inside a loss returned by a closure."""
        if isinstance(loss, Tensor):
            detection.trace(loss.grad_fn, MODEL_OUTPUT)

    @property
    def _tracing(self) -> bool:
        return any(not layer.decided or layer.needs for layer in self.layers.values())

    @property
    def _record_gradients(self) -> bool:
        return any("v" in layer.needs for layer in self.layers.values())

    def _after_layer(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
    ) -> Tensor | None:
        if not torch.is_grad_enabled() or out.grad_fn is None:
            return None
        layer = self.layers[module]
        x: Tensor = args[0] if args else kwargs["input"]
        if self._tracing:
            detection.trace(x.grad_fn, LAYER_INPUT, self._record_gradients)
        plain = _not_a_view(out)
        assert plain.grad_fn is not None
        node = detection.matmul_node(plain.grad_fn)
        mark = detection.mark_layer(node)
        if layer.trained:
            node.register_prehook(self._recorder(layer, Call(x.detach(), mark)))
        if self._in_forward is not None and self.sample_seed is not None:
            self._in_forward.append((layer, mark, plain))
        return None if plain is out else plain

    def _recorder(self, layer: ServedLayer, call: Call) -> Callable[[tuple[Tensor, ...]], None]:
        sampled: list[Tensor] = []

        def record(gradients: tuple[Tensor, ...]) -> None:
            g = gradients[0].detach()
            if self._sampling:
                sampled.append(g)
                return
            layer.calls.append(
                replace(
                    call,
                    g=g if "g" in layer.needs else None,
                    sampled=sampled[-1] if sampled else None,
                )
            )

        return record

    def _before_model(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._in_forward = []

    def _after_model(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        calls, self._in_forward = self._in_forward or [], None
        if not torch.is_grad_enabled():
            return
        if self._tracing:
            for tensor in _tensors(output):
                detection.trace(tensor.grad_fn, MODEL_OUTPUT, self._record_gradients)
        if self.sample_seed is not None and calls:
            self._sample(calls, self.sample_seed)

    def _sample(self, calls: list[tuple[ServedLayer, Mark, Tensor]], seed: int) -> None:
        """Send the gradient of a sampled label back to every layer; no parameter is touched."""
        outputs = [
            (a, layer.transfer if layer.explicit else self.output_transfer)
            for layer, mark, a in calls
            if detection.resolve(mark).is_output
        ]
        generator = torch.Generator(outputs[0][0].device).manual_seed(seed)
        gradients = [
            sampled_output_gradient(transfer or transfers.Linear(), a.detach(), generator)
            for a, transfer in outputs
        ]
        # A bias gradient is a sum over rows, a weight gradient a matrix product: ask for the former.
        wanted = [layer.trained[-1] for layer, _, _ in calls if layer.trained]
        self._sampling = True
        try:
            torch.autograd.grad(
                [a for a, _ in outputs], wanted, gradients, retain_graph=True, allow_unused=True
            )
        finally:
            self._sampling = False


class _Hook:
    """A method of a capture, weakly held: it keeps nothing alive and copies to one that is inert."""

    def __init__(self, capture: Capture | None = None, method: str = "") -> None:
        self._capture = weakref.ref(capture) if capture is not None else lambda: None
        self._method = method

    def __call__(self, *args: Any) -> Any:
        capture = self._capture()
        return None if capture is None else getattr(capture, self._method)(*args)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _not_a_view(out: Tensor) -> Tensor:
    """The same memory without the view relation, so that in-place activations stay visible.

    A biased Linear returns a view of its matrix product for inputs of more than two dimensions, and
    autograd hides what is done in place to a view. The base is known to nobody else.
    """
    base = out._base
    if base is None or base.grad_fn is None:
        return out
    return torch.ops.aten._unsafe_view.default(base, out.shape)  # type: ignore[no-any-return]


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)
