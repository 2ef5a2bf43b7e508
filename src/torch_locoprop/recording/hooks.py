"""Hooks that record what each layer saw: its input and, if needed, the gradients of its outputs.

A forward hook puts a hook on the autograd node of the layer's matrix product. When that node runs
in a backward pass the call is recorded, and once the pass has added to the layer's ``.grad`` it
counts. A forward pass without a backward pass leaves nothing behind, in-place activations and views
do not matter, and ``zero_grad`` may be called anywhere in the loop.

In a model that ``torch.compile`` traces, ``torch_compile.py`` takes the place of the hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_locoprop.distributed.ddp import averaging_processes
from torch_locoprop.fast import dispatch
from torch_locoprop.layers import layer_kind
from torch_locoprop.layers.base import call_inputs, joined_inputs
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording import transfer_detection
from torch_locoprop.recording.call import Call, CompiledCall, CompiledGraph
from torch_locoprop.recording.fisher_sampling import LayerOutput, send_sampled_gradients
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.recording.loss_inspection import sums_terms
from torch_locoprop.recording.transfer_assignment import NESTED
from torch_locoprop.recording.transfer_detection import LAYER_INPUT, MODEL_OUTPUT, Mark
from torch_locoprop.recording.weak_hook import (
    WeakHook,
    hook_for,
    remove_inert,
    serials,
    watchers,
)


class ModelHooks:
    """The hooks on one model. They vanish with this object and do nothing in copies of the model.

    Args:
        model: the model.
        layers: records of the layers with a local problem.
        output_transfer: the transfer inside the loss, which says what distribution the model predicts.
    """

    def __init__(
        self, model: nn.Module, layers: Iterable[LayerRecord], output_transfer: Transfer | None
    ) -> None:
        self.layers = {layer.module: layer for layer in layers}
        self.tracing = True  # search the autograd graph for transfers
        self.loss_sums: bool | None = None  # whether the loss sums, as a closure's graph shows
        self.before_forward: weakref.WeakMethod[Callable[[], None]] | None = None
        self.record_post_gradients = False
        self.processes: Any = None  # the process group that averages gradients, once seen
        self.graphs: set[CompiledGraph] = set()  # compiled graphs that call a watched layer
        self.leaves: set[int] = set()  # ids of leaves used by operations outside of layers
        self.serial = next(serials)
        self._seed: int | None = None  # of the labels drawn in the next forward pass
        self._output_transfer = output_transfer
        self._sampling = False
        self._in_forward: list[LayerOutput] | None = None
        # Layers without a local problem are watched too: what feeds them is not the output.
        kinds = {module: layer_kind(module) for module in model.modules()}
        self._watched = {module: kind for module, kind in kinds.items() if kind is not None}
        for module in (*self._watched, model):
            remove_inert(module)
        handles: list[Any] = [
            # First in line, so that other hooks see the tensor that is used.
            module.register_forward_hook(
                hook_for(self, "after_layer", module), with_kwargs=True, prepend=True
            )
            for module in self._watched
        ]
        handles.append(model.register_forward_pre_hook(hook_for(self, "before_model", model)))
        handles.append(model.register_forward_hook(hook_for(self, "after_model", model)))
        self._handles = handles
        self._cells: weakref.WeakSet[_Cell] = weakref.WeakSet()
        self._layer_of: dict[nn.Parameter, LayerRecord] = {}
        weakref.finalize(self, _remove, handles)
        watchers.add(self)

    def watches(self, module: nn.Module) -> bool:
        """Return True if a hook of this object sits on the module."""
        return module in self._watched

    def draw_labels(self, step: int | None) -> None:
        """Draw labels in the forward passes of a step, new ones in each pass; None draws none."""
        self._seed = None if step is None else step * 1000

    @property
    def draws_labels(self) -> bool:
        """True if labels are drawn in forward passes now."""
        return self._seed is not None

    def clear(self) -> None:
        """Drop everything that was recorded."""
        for layer in self.layers.values():
            layer.clear()
        for cell in self._cells:
            cell.release()

    def trace_loss(self, loss: object) -> None:
        """Look for the output's transfer inside a loss returned by a closure."""
        if not isinstance(loss, Tensor):
            return
        if self.loss_sums is None:
            self.loss_sums = sums_terms(loss)
        if self.tracing:
            transfer_detection.trace(loss, MODEL_OUTPUT)

    def after_layer(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: object
    ) -> Tensor | None:
        """Prepare the record of a layer's call; return its output, as another node where needed."""
        kind = self._watched.get(module)
        self.processes = averaging_processes() or self.processes
        if kind is None or not isinstance(out, Tensor) or out.grad_fn is None:
            return None
        layer = self.layers.get(module)
        if layer is not None and not layer.is_intact:  # called with other parameters
            layer = None
        inputs = call_inputs(kind.arguments, args, kwargs)
        if self.tracing:
            for tensor in inputs:
                self._search(tensor, LAYER_INPUT)
        x = joined_inputs(inputs)
        # As long as anybody searches: it is another node of the graph.
        searched = self.tracing or (layer is not None and not layer.decided)
        plain = _not_a_view(out) if searched else out
        if layer is not None and (overlaps := dispatch.overlap.takes(layer, x, out)):
            plain = dispatch.overlap.output(layer, x, out)
        assert plain.grad_fn is not None
        node = transfer_detection.matmul_node(plain.grad_fn)
        mark = transfer_detection.mark_layer(node)
        if layer is not None and layer.trained:
            self._follow_gradients(layer)
            recomputed = torch._C._current_graph_task_id() != -1
            self.tracing |= not layer.decided  # a layer thawed since the last step
            traced = self.tracing and not recomputed
            call = _call(layer, x, out, mark, traced=traced, recomputed=recomputed)
            if layer.keeps_output and overlaps:
                call = call._replace(a=plain.detach(), a_version=plain._version)
            if self._trains(x):  # the layer it belongs to may be solved before this one
                call = call.copied()
            cell = _Cell(call)
            self._cells.add(cell)
            node.register_prehook(_recorder(self, layer, cell))
        if self._in_forward is not None and self._seed is not None and not out.is_nested:
            self._in_forward.append(LayerOutput(layer, mark, plain, kind.features))
        return None if plain is out else plain

    def _search(self, tensor: Tensor, sink: Mark) -> None:
        leaves = transfer_detection.trace(tensor, sink, self.record_post_gradients)
        if not _is_scalar(tensor):  # a loss, which may have a penalty on weights
            for each in watchers:  # others that search here find the graph marked already
                each.leaves |= leaves

    def _trains(self, x: Tensor) -> bool:
        """Return True if an input is a parameter of a served layer, or a part of one."""
        base = x if x._base is None else x._base
        if not isinstance(base, nn.Parameter):
            return False
        return any(base is p for layer in self.layers.values() for p in layer.given)

    def _follow_gradients(self, layer: LayerRecord) -> None:
        """Register hooks that run when the layer's gradients accumulate, also for thawed parameters."""
        for p in layer.trained:
            if p not in self._layer_of:
                self._layer_of[p] = layer
                hook = WeakHook(self, "after_gradient")
                handle = p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def follow(self, module: nn.Module) -> None:
        """Follow the gradients of a layer that a compiled graph calls."""
        layer = self.layers.get(module)
        if layer is not None and layer.trained:
            self._follow_gradients(layer)
            self.tracing |= not layer.decided  # around the graph

    def record_compiled(self, layer: nn.Module, x: Tensor, g: Tensor, call: CompiledCall) -> None:
        """Record a layer's call in a compiled graph whose backward pass has reached it with ``g``."""
        served = self.layers.get(layer)
        if served is not None and served.trained:
            # Copies, for a compiled graph may write its next result where these stand.
            kept = None if served.needs.isdisjoint({"g", "v"}) else g.clone()
            # The graph's own node, unless it runs as it was traced: then it is the layer's.
            beyond = transfer_detection.running_mark()
            beyond = None if beyond is call.mark else beyond
            recorded = Call(x.clone(), call.mark, g.shape, g=kept, compiled=call, beyond=beyond)
            served.record(recorded, torch._C._current_graph_task_id())

    def _record(self, layer: LayerRecord, cell: _Cell, g: Tensor) -> None:
        """Record a layer's call whose matrix product a backward pass has reached with ``g``."""
        if self._sampling:
            cell.sampled = g
            return
        if cell.call is None:  # a second pass through a graph whose step was taken
            return
        call = cell.call
        if cell.sampled is not None:
            call = call._replace(sampled=cell.sampled)
        needs = frozenset() if layer.obstacle else layer.needs
        if "v" in needs:
            call = _with_post_gradient(call, layer, g)
        # Where ∂L/∂y was missed, in this pass or in another that adds to it, it is computed from ∂L/∂a.
        several = cell.recorded or _keeps_graph()
        for_v = "v" in needs and (several or not layer.has_v(call))
        if "g" in needs or for_v:
            call = call._replace(g=g)
        cell.recorded = True
        layer.record(call, torch._C._current_graph_task_id())
        if not _keeps_graph():
            cell.release()  # no other pass can come this way, and the loss may be kept for long

    def after_gradient(self, parameter: nn.Parameter) -> None:
        """Make the calls of the pass that has added to a parameter's gradient count."""
        layer = self._layer_of[parameter]
        layer.commit(torch._C._current_graph_task_id())
        if self.processes is not None and not layer.needs.isdisjoint({"g", "v"}):
            # At the end of the pass, after the callbacks queued already, one of which averages.
            at_the_end = torch.autograd.Variable._execution_engine.queue_callback
            at_the_end(lambda: at_the_end(layer.measure_again))

    def before_model(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Begin a forward pass of the whole model."""
        self._in_forward = []
        if self.before_forward is not None and (prepare := self.before_forward()) is not None:
            prepare()

    def after_model(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """End a forward pass of the whole model: search from its output, draw labels."""
        calls, self._in_forward = self._in_forward or [], None
        if not torch.is_grad_enabled():
            return
        if self.tracing:
            for tensor in sorted(_tensors(output), key=_is_scalar):
                self._search(tensor, MODEL_OUTPUT)
        if self._seed is not None and calls:
            self._sample(calls, self._seed)
            self._seed += 1

    def _sample(self, calls: list[LayerOutput], seed: int) -> None:
        if self.processes is not None:  # each process draws labels of its own
            seed += 7919 * torch.distributed.get_rank(self.processes)
        self._sampling = True
        try:
            send_sampled_gradients(calls, self._output_transfer, seed)
        finally:
            self._sampling = False


def _call(
    layer: LayerRecord, x: Tensor, out: Tensor, mark: Mark, *, traced: bool, recomputed: bool
) -> Call:
    """Return what the forward pass shows of a call; of nested tensors that is no rows."""
    if x.is_nested:
        layer.obstacle = NESTED
        rows = layer.kind.collect([], [], layer.tensors["weight"])
        shape, version = torch.Size((0, layer.width)), None
    else:
        rows, shape, version = x.detach(), out.shape, None if x.is_inference() else x._version
    return Call(rows, mark, shape, traced=traced, recomputed=recomputed, version=version)


def _with_post_gradient(call: Call, layer: LayerRecord, g: Tensor) -> Call:
    """Return the call with ∂L/∂y that this pass left behind its transfer, in the shape of ∂L/∂a."""
    finding = transfer_detection.resolve(call.mark, layer.last_width)
    consumer = finding.consumer
    if consumer is None or consumer.gradient is None:
        return call
    v, consumer.gradient = consumer.gradient.reshape(g.shape), None
    return call._replace(v=v, behind=finding.transfer)


class _Cell:
    """What a node's hook holds of a call, until the last pass through the graph or the step."""

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call
        self.sampled: Tensor | None = None
        self.recorded = False

    def release(self) -> None:
        """Drop a call that was recorded; the autograd graph may live on."""
        if self.recorded:
            self.call = self.sampled = None


def _recorder(
    owner: ModelHooks, layer: LayerRecord, cell: _Cell
) -> Callable[[tuple[Tensor, ...]], None]:
    """Return a hook for the node of a layer's matrix product that does not keep the owner alive."""
    weak = weakref.ref(owner)

    def record(gradients: tuple[Tensor, ...]) -> None:
        alive = weak()
        if alive is not None and gradients[0] is not None:
            alive._record(layer, cell, gradients[0].detach())

    return record


def _keeps_graph() -> bool:
    """Return True if the running backward pass may be followed by another through its graph."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or bool(ask())


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _not_a_view(out: Tensor) -> Tensor:
    """Return the same memory without the view relation, so that in-place activations stay visible.

    A biased Linear returns a view of its matrix product for inputs of more than two dimensions, and
    autograd hides what is done in place to a view. The base is known to nobody else.
    """
    base = out._base
    if base is None or base.grad_fn is None or out.grad_fn is None:
        return out
    directly_above = out.grad_fn.name() == "ViewBackward0" and out.is_contiguous()
    if not directly_above or base.numel() != out.numel():
        return out
    return torch.ops.aten._unsafe_view.default(base, out.shape)  # type: ignore[no-any-return]


def _is_scalar(tensor: Tensor) -> bool:
    return tensor.dim() == 0


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)
    elif is_dataclass(output):
        yield from _tensors(list(vars(output).values()))
