"""Hooks that record each layer's input and, if needed, the gradients of its output.

A forward hook puts a hook on the autograd node of the layer's matrix product. When a backward pass
runs that node, the call is recorded. The record counts once the pass has added to the layer's
``.grad``. Therefore a forward pass without a backward pass leaves no record, in-place activations and
views do not matter, and ``zero_grad`` may be called anywhere in the loop.

Not here: what is kept of a call (``layer_record.py``, ``row_reduction.py``), the search for transfers
(``transfer_detection.py``), and what hooks do in compiled graphs (``torch_compile.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, distributed, nn

from torch_locoprop.distributed.ddp import are_averaged, averaging_processes
from torch_locoprop.distributed.fully_shard import local
from torch_locoprop.distributed.pipeline import Pipeline, pipeline_of
from torch_locoprop.fast.dispatch import overlap, streams
from torch_locoprop.layers import layer_kind
from torch_locoprop.layers.base import call_inputs, is_distributed, joined_inputs
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording import (
    backward_pass,
    function_transforms,
    node_marks,
    transfer_detection,
)
from torch_locoprop.recording.call import Call, CompiledCall, CompiledGraph, PendingCall
from torch_locoprop.recording.fisher_sampling import LayerOutput, send_sampled_gradients
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.recording.local_layer import COMPUTED, TRANSFORMED
from torch_locoprop.recording.loss_graph import LossFacts, inspect_loss
from torch_locoprop.recording.node_marks import LAYER_INPUT, MODEL_OUTPUT, Mark
from torch_locoprop.recording.row_gradients import has_v
from torch_locoprop.recording.transfer_assignment import DIVIDED, NESTED
from torch_locoprop.recording.weak_hook import (
    WeakHook,
    hook_for,
    remove_inert,
    serials,
    watchers,
)


class ModelHooks:
    """The hooks on one model.

    The hooks are removed when this object is deleted, and do nothing in copies of the model.

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
        self.loss_facts = LossFacts(None, by_row=False)  # of the loss that a closure returns
        self.before_forward: weakref.WeakMethod[Callable[[], None]] | None = None
        self.record_post_gradients = False  # record ∂L/∂y
        self.processes: Any = None  # the process group that averages gradients, once seen
        self.averaged = True  # the last forward pass was not under no_sync()
        self.wrapper: weakref.ref[Any] | None = None  # the DDP module, if it may run inside of Join
        self.has_joined = False  # in that context, this process has run out of batches
        self.compiled_graphs: set[CompiledGraph] = set()  # those that call a watched layer
        self.leaves: set[int] = set()  # ids of leaves used by operations outside of layers
        self.output_shape: torch.Size | None = None  # of the model's output, if it is one tensor
        self.serial = next(serials)
        self._seed: int | None = None  # of the labels drawn in the next forward pass
        self._output_transfer = output_transfer
        self._sampling = False  # the running backward pass is that of sampled labels
        self._forward_outputs: list[LayerOutput] | None = None  # of the running forward pass
        # Layers without a local problem are watched too: a layer that feeds one is not the output.
        kinds = {module: layer_kind(module) for module in model.modules()}
        self._watched = {module: kind for module, kind in kinds.items() if kind is not None}
        for module in (*self._watched, model):
            remove_inert(module)
        handles: list[Any] = [
            # Before all other hooks, so that they see the tensor that this hook returns.
            module.register_forward_hook(
                hook_for(self, "after_layer", module), with_kwargs=True, prepend=True
            )
            for module in self._watched
        ]
        handles.append(model.register_forward_pre_hook(hook_for(self, "before_model", model)))
        handles.append(model.register_forward_hook(hook_for(self, "after_model", model)))
        self._handles = handles
        self._pending_calls: weakref.WeakSet[PendingCall] = weakref.WeakSet()
        self._layer_of: dict[nn.Parameter, LayerRecord] = {}
        weakref.finalize(self, _remove, handles)
        watchers.add(self)

    def watches(self, module: nn.Module) -> bool:
        """Return True if this object has a hook on the module."""
        return module in self._watched

    def draw_labels(self, step: int | None) -> None:
        """Draw labels in every forward pass before the next step.

        Args:
            step: the number of the step, from which the seeds of the labels follow; None draws none.
        """
        self._seed = None if step is None else step * 1000

    @property
    def draws_labels(self) -> bool:
        """True if forward passes draw labels at present."""
        return self._seed is not None

    @cached_property
    def pipeline(self) -> Pipeline:
        """Whether the layers are stages of a pipeline; searched for once."""
        return pipeline_of(self.layers)

    @property
    def is_alone(self) -> bool:
        """True if DDP does not average the gradients of the last forward pass: under ``no_sync()``.

        Schedules of a pipeline use that context too, and average after their last backward pass.
        """
        return self.processes is not None and not (self.averaged or self.pipeline.is_used)

    @property
    def ddp_module(self) -> Any:
        """The DDP module that may run inside of ``Join``; None if there is none."""
        return None if self.wrapper is None else self.wrapper()

    @property
    def divides_by_all(self) -> bool:
        """True if DDP divides gradients by all processes, also by those without a batch."""
        return getattr(self.ddp_module, "_divide_by_initial_world_size", True)

    def begin_without_rows(self) -> None:
        """Begin a step of this process after its last batch, inside of ``Join``."""
        self.has_joined = self.averaged = True
        for layer in self.layers.values():
            if layer.empty_call is not None:
                layer.calls[:] = [layer.empty_call]

    def clear(self) -> None:
        """Drop everything that was recorded."""
        self.loss_facts = self.loss_facts._replace(terms=None)
        for layer in self.layers.values():
            layer.clear()
            layer.called, layer.unrecorded = False, ""
        for pending in self._pending_calls:
            pending.release()

    def trace_loss(self, loss: object) -> None:
        """Search the loss that a closure returned for the output's transfer and its reduction."""
        if not isinstance(loss, Tensor):
            return
        if self.loss_facts.sums is not False:
            found = inspect_loss(loss)
            known = self.loss_facts.sums is not None
            self.loss_facts = self.loss_facts._replace(terms=found.terms) if known else found
        if self.tracing:
            transfer_detection.trace(loss, MODEL_OUTPUT)

    def after_layer(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: object
    ) -> Tensor | None:
        """Prepare the record of a layer's call: the forward hook of every watched layer.

        Returns:
            The layer's output, if another autograd node has to take its place; otherwise None.
        """
        kind = self._watched.get(module)
        layer = self.layers.get(module)
        if layer is not None:
            layer.called = True
        if function_transforms.innermost() is not None:
            self._notice_transform(module, out)
            return None
        if distributed.is_available() and distributed.is_initialized():
            running = averaging_processes(joins=self.wrapper is not None)
            if running is not None:
                self.processes, self.averaged = running, are_averaged()
        if kind is None or not isinstance(out, Tensor) or out.grad_fn is None:
            return None
        if layer is not None and not layer.is_intact:  # by torch.func.functional_call
            if layer.has_computed_weights and layer.trained:
                layer.unrecorded = COMPUTED
                self._watch_gradients(layer)
            layer = None
        if layer is not None and layer.notice_new_forward():
            layer = None
        if len(kind.arguments) == 1 and args and isinstance(args[0], Tensor):
            inputs = [args[0]]
        else:
            inputs = call_inputs(kind.arguments, args, kwargs)
        recomputed = backward_pass.current_pass() != -1
        if self.tracing and not recomputed:  # a second autograd graph of the same operations
            for tensor in inputs:
                self._search(tensor, LAYER_INPUT)
        # Only while transfers are searched for: it adds a node to the autograd graph.
        searching = self.tracing or (layer is not None and not layer.decided)
        plain = _without_view(out) if searching else out
        if layer is not None:
            x = inputs[0] if len(inputs) == 1 else joined_inputs(inputs)
            if layer.shards is not None and is_distributed(x):
                layer.obstacle = layer.obstacle or ("" if layer.shards.are_known(x) else DIVIDED)
                x = local(x)
            overlaps = streams.overlapping and overlap.can_overlap(layer, x, out)
            if overlaps:
                plain = overlap.output(layer, x, out)
        assert plain.grad_fn is not None
        node = node_marks.matmul_node(plain.grad_fn)
        mark = node_marks.mark_layer(node)
        if layer is not None and layer.trained:
            self._watch_gradients(layer)
            self.tracing |= not layer.decided  # a layer that was unfrozen since the last step
            searched = self.tracing and not recomputed
            call = _forward_call(layer, x, out, mark, searched=searched, recomputed=recomputed)
            if layer.keeps_output and overlaps:
                call = call._replace(a=plain.detach(), a_version=plain._version)
            if self._is_trained_parameter(x):  # whose layer's step may come before this layer's
                call = call.with_own_input()
            pending = PendingCall(call)
            self._pending_calls.add(pending)
            node.register_prehook(_recorder(self, layer, pending))
        if self._forward_outputs is not None and self._seed is not None and not out.is_nested:
            self._forward_outputs.append(LayerOutput(layer, mark, plain, kind.features))
        return None if plain is out else plain

    def _notice_transform(self, module: nn.Module, out: object) -> None:
        """Notice a call whose rows cannot be recorded, if its layer may get a gradient from it."""
        layer = self.layers.get(module)
        if layer is None or not layer.trained or not isinstance(out, Tensor):
            return
        if function_transforms.reaches_ordinary_autograd(out):
            layer.unrecorded = TRANSFORMED
            self._watch_gradients(layer)

    def _search(self, tensor: Tensor, sink: Mark) -> None:
        """Search the autograd graph from a tensor backwards to the layers before it."""
        leaves = transfer_detection.trace(tensor, sink, self.record_post_gradients)
        if not _is_scalar(tensor):  # a scalar is a loss, which may have a penalty on weights
            # For all hooks on this model: their searches end at the nodes that this one has marked.
            for each in watchers:
                each.leaves |= leaves

    def _is_trained_parameter(self, x: Tensor) -> bool:
        """Return True if an input is, or is a view of, a parameter with a local problem."""
        base = x if x._base is None else x._base
        if not isinstance(base, nn.Parameter):
            return False
        return any(base is p for layer in self.layers.values() for p in layer.given)

    def _watch_gradients(self, layer: LayerRecord) -> None:
        """Register hooks that run when gradients of the layer's trained parameters accumulate."""
        own: Iterable[nn.Parameter] = layer.trained
        if layer.shards is not None:  # gradients accumulate in the tensors that fully_shard puts in
            present = layer.module._parameters
            trained = [n for n, p in layer.tensors.items() if any(p is q for q in layer.trained)]
            own = [p for n in trained if (p := present.get(n)) is not None and p.requires_grad]
            layer.unsharded.add(id(present.get("weight")))
        for p in own:
            if p not in self._layer_of:
                self._layer_of[p] = layer
                hook = WeakHook(self, "after_gradient")
                handle = p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)
            # A module may change its dtype by torch.utils.swap_tensors, after which autograd does not
            # know the hooks of the parameter any more. Setting them tells it again.
            p._post_accumulate_grad_hooks = p._post_accumulate_grad_hooks

    def before_compiled_layer(self, module: nn.Module) -> None:
        """Watch the gradients of a layer that a compiled graph is about to call."""
        layer = self.layers.get(module)
        if layer is not None and layer.trained:
            self._watch_gradients(layer)
            self.tracing |= not layer.decided  # search the autograd graph around the compiled graph

    def record_compiled(self, module: nn.Module, x: Tensor, g: Tensor, call: CompiledCall) -> None:
        """Record a layer's call in a compiled graph, once a backward pass has reached it.

        Args:
            module: the layer.
            x: its input.
            g: ∂L/∂a.
            call: which call of the layer it is.
        """
        layer = self.layers.get(module)
        if layer is not None and layer.trained:
            # Copies: a compiled graph may reuse the memory of x and g in its next run.
            kept = None if layer.needs.isdisjoint({"g", "v"}) else g.clone()
            # With the eager backend the running node is the layer's own, not that of the graph.
            mark = node_marks.running_mark()
            mark = None if mark is call.mark else mark
            recorded = Call(x.clone(), call.mark, g.shape, g=kept, compiled=call, graph_mark=mark)
            recorded = recorded._replace(g_norm=_norm(g) if "g_norm" in layer.needs else None)
            layer.record(recorded, backward_pass.current_pass())

    def _record(self, layer: LayerRecord, pending: PendingCall, g: Tensor) -> None:
        """Record a layer's call whose matrix product a backward pass has reached.

        Args:
            layer: the record of the layer.
            pending: the call, as the forward pass left it.
            g: ∂L/∂a.
        """
        if self._sampling:
            pending.sampled = g
            return
        if pending.call is None:  # another pass through an autograd graph after its step
            return
        call = pending.call
        if pending.sampled is not None:
            call = call._replace(sampled=pending.sampled)
        needs = frozenset() if layer.obstacle else layer.needs
        if "v" in needs:
            call = _with_post_gradient(call, layer, g)
        # ∂L/∂y is computed from ∂L/∂a if it was not recorded in this pass, or may not be in another
        # pass through the same autograd graph.
        several = pending.recorded or backward_pass.retains_graph()
        for_v = "v" in needs and (several or not has_v(layer, call))
        if "g" in needs or for_v:
            call = call._replace(g=g)
        if "g_norm" in needs:
            call = call._replace(g_norm=_norm(g))
        pending.recorded = True
        if self.wrapper is not None:
            layer.empty_call = call.without_rows(layer.kind)
        layer.record(call, backward_pass.current_pass())
        if not backward_pass.retains_graph():
            pending.release()  # no other pass can follow, but the loss may be kept for long

    def after_gradient(self, parameter: nn.Parameter) -> None:
        """Commit the calls of the backward pass that has added to a parameter's gradient."""
        layer = self._layer_of[parameter]
        layer.commit(backward_pass.current_pass())
        if self.processes is not None and layer.needs_row_gradients:
            # Registered by a callback, so that it runs after the one with which DDP averages.
            backward_pass.at_end(lambda: backward_pass.at_end(layer.remember_gradient_norms))

    def before_model(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Begin a forward pass of the whole model."""
        self._forward_outputs = []
        if self.before_forward is not None and (prepare := self.before_forward()) is not None:
            prepare()

    def after_model(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """End a forward pass of the whole model: search from its output, draw labels."""
        outputs, self._forward_outputs = self._forward_outputs or [], None
        if not torch.is_grad_enabled() or function_transforms.innermost() is not None:
            return
        if self.tracing:
            if isinstance(output, Tensor) and not output.is_nested:  # those have no shape
                self.output_shape = output.shape
            for tensor in sorted(_tensors(output), key=_is_scalar):
                self._search(tensor, MODEL_OUTPUT)
        if self._seed is not None and outputs:
            self._sample(outputs, self._seed)
            self._seed += 1

    def _sample(self, outputs: list[LayerOutput], seed: int) -> None:
        """Draw labels from the model's output and record their gradients in every layer."""
        if self.processes is not None:  # each process draws labels of its own
            seed += 7919 * torch.distributed.get_rank(self.processes)
        self._sampling = True
        try:
            send_sampled_gradients(outputs, self._output_transfer, seed)
        finally:
            self._sampling = False


def _forward_call(
    layer: LayerRecord, x: Tensor, out: Tensor, mark: Mark, *, searched: bool, recomputed: bool
) -> Call:
    """Return what is known of a call after its forward pass; nested tensors have no rows."""
    if x.is_nested:
        layer.obstacle = NESTED
        rows = layer.kind.collect([], [], layer.like)
        shape, version = torch.Size((0, layer.width)), None
    else:
        rows, shape, version = x.detach(), out.shape, None if x.is_inference() else x._version
    return Call(rows, mark, shape, searched=searched, recomputed=recomputed, version=version)


def _with_post_gradient(call: Call, layer: LayerRecord, g: Tensor) -> Call:
    """Return the call with ∂L/∂y, if this pass has recorded it at the output of the transfer."""
    finding = transfer_detection.resolve(call.mark, layer.last_width)
    consumer = finding.consumer
    if consumer is None or consumer.gradient is None:
        return call
    v, consumer.gradient = consumer.gradient.reshape(g.shape), None
    return call._replace(v=v, v_transfer=finding.transfer)


def _recorder(
    owner: ModelHooks, layer: LayerRecord, pending: PendingCall
) -> Callable[[tuple[Tensor, ...]], None]:
    """Return a hook for the node of a layer's matrix product that does not keep the owner alive."""
    weak = weakref.ref(owner)

    def record(gradients: tuple[Tensor, ...]) -> None:
        alive = weak()
        g = gradients[0]
        if alive is not None and g is not None and not function_transforms.is_batched(g):
            alive._record(layer, pending, g.detach())

    return record


def _norm(g: Tensor) -> Tensor:
    """Return the norm of ∂L/∂a, in float32 or wider."""
    norm: Tensor = torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))
    return norm


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _without_view(out: Tensor) -> Tensor:
    """Return an output in the same memory that is no view, so that in-place activations are found.

    A Linear with bias returns a view of its matrix product for inputs of more than two dimensions, and
    autograd hides an in-place operation on a view inside ``CopySlices``. No other code holds the base.
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
    """Yield all tensors in the output of a model."""
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
