"""Hooks that record each layer's input and, if needed, the gradients of its output.

A forward hook puts a hook on the autograd node of the layer's matrix product. When a backward pass
runs that node, the call is recorded. The record counts once the pass has added to the layer's
``.grad``. Therefore a forward pass without a backward pass leaves no record, in-place activations and
views do not matter, and ``zero_grad`` may be called anywhere in the loop.

Not here: what is kept of a call (``layer_record.py``, ``row_gradients.py``, ``row_reduction.py``), the
search for transfers (``graph_search.py``), labels that are drawn from the model's output
(``fisher_sampling.py``), and what hooks do in compiled graphs (``torch_compile.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd import forward_ad

from torch_locoprop.distributed.averaging import Averaging
from torch_locoprop.distributed.fully_shard import local
from torch_locoprop.fast.dispatch import overlap, streams
from torch_locoprop.layers import layer_kind
from torch_locoprop.layers.base import call_inputs, is_distributed, joined_inputs
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording import backward_pass, function_transforms, node_marks
from torch_locoprop.recording.call import (
    Call,
    CompiledCall,
    CompiledGraph,
    PendingCall,
    some_samples,
)
from torch_locoprop.recording.fisher_sampling import LabelSampling, LayerOutput
from torch_locoprop.recording.graph_search import GraphSearch, without_view
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.recording.local_layer import COMPUTED, TRANSFORMED
from torch_locoprop.recording.node_marks import Mark
from torch_locoprop.recording.row_gradients import gradient_norm, with_row_gradients
from torch_locoprop.recording.transfer_assignment import DIVIDED, NESTED
from torch_locoprop.recording.weak_hook import (
    WeakHook,
    hook_for,
    remove_inert,
    serials,
    watch,
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
        self.search = GraphSearch()  # searches the autograd graph for transfers
        self.averaging = Averaging(self.layers)
        self.labels = LabelSampling(output_transfer)
        self.before_forward: weakref.WeakMethod[Callable[[], None]] | None = None
        self.compiled_graphs: set[CompiledGraph] = set()  # graphs that call a watched layer
        self.serial = next(serials)
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
        watch(self)

    def watches(self, module: nn.Module) -> bool:
        """Return True if this object has a hook on the module."""
        return module in self._watched

    def begin_without_rows(self) -> None:
        """Begin a step of this process after its last batch, inside of ``Join``."""
        self.averaging.has_joined = self.averaging.averaged = True
        for layer in self.layers.values():
            if layer.empty_call is not None:
                layer.calls[:] = [layer.empty_call]

    def clear(self) -> None:
        """Drop everything that was recorded."""
        self.search.loss_facts = self.search.loss_facts._replace(terms=None)
        for layer in self.layers.values():
            layer.clear()
            layer.called, layer.unrecorded = False, ""
            layer.has_dropped = False
        for pending in self._pending_calls:
            pending.release()

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
        is_dual = forward_ad._current_level >= 0 and function_transforms.has_tangent(out)
        if is_dual or function_transforms.innermost() is not None:
            self._notice_transform(module, out)
            return None
        if distributed.is_available() and distributed.is_initialized():
            self.averaging.notice_forward_pass()
        if kind is None or not isinstance(out, Tensor) or out.grad_fn is None:
            return None
        # torch.func.functional_call puts other tensors in the place of parameters.
        if layer is not None and not layer.is_intact:
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
        if self.search.is_on and not recomputed:  # a second autograd graph of the same operations
            self.search.from_inputs(inputs)
        # without_view adds a node to the autograd graph, so it is used only during searches.
        searching = self.search.is_on or (layer is not None and not layer.decided)
        plain = without_view(out) if searching else out
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
            self.search.is_on |= not layer.decided  # a layer that was unfrozen since the last step
            searched = self.search.is_on and not recomputed
            call = _forward_call(layer, x, out, mark, searched=searched, recomputed=recomputed)
            if layer.keeps_output and overlaps:
                call = call._replace(a=plain.detach(), a_version=plain._version)
            if self._is_trained_parameter(x):  # the step of x's own layer may change x first
                call = call.with_own_input()
            pending = PendingCall(call)
            self._pending_calls.add(pending)
            node.register_prehook(_recorder(self, layer, pending))
        drawn_from = None if self.labels.seed is None else self.labels.outputs
        if drawn_from is not None and not out.is_nested:
            drawn_from.append(LayerOutput(layer, mark, plain, kind.features))
        return None if plain is out else plain

    def _notice_transform(self, module: nn.Module, out: object) -> None:
        """Notice a call whose rows cannot be recorded, if its layer may get a gradient from it."""
        layer = self.layers.get(module)
        if layer is None or not layer.trained or not isinstance(out, Tensor):
            return
        if function_transforms.reaches_ordinary_autograd(out):
            layer.unrecorded = TRANSFORMED
            self._watch_gradients(layer)

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
            unsharded = (present.get(name) for name in layer.tensors)
            layer.unsharded |= {id(p) for p in unsharded if p is not None}
        for p in own:
            if p not in self._layer_of:
                self._layer_of[p] = layer
                hook = WeakHook(self, "after_gradient")
                handle = p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)
            # A module may change its dtype by torch.utils.swap_tensors, after which autograd does not
            # know the hooks of the parameter any more. Setting the hooks registers them again.
            p._post_accumulate_grad_hooks = p._post_accumulate_grad_hooks

    def before_compiled_layer(self, module: nn.Module) -> None:
        """Watch the gradients of a layer that a compiled graph is about to call."""
        layer = self.layers.get(module)
        if layer is not None and layer.trained:
            self._watch_gradients(layer)
            self.search.is_on |= not layer.decided  # search outside of the compiled graph

    def record_compiled(self, module: nn.Module, x: Tensor, g: Tensor, call: CompiledCall) -> None:
        """Record a layer's call in a compiled graph, once a backward pass has reached it.

        Args:
            module: the layer.
            x: the input of the layer.
            g: ∂L/∂a.
            call: which call of the layer it is.
        """
        layer = self.layers.get(module)
        if layer is not None and layer.trained:
            # Copies: a compiled graph may reuse the memory of x and g in its next run.
            kept = None if layer.needs.isdisjoint({"g", "v"}) else g.clone()
            # With the eager backend the running node is the layer's, not the compiled graph's.
            mark = node_marks.running_mark()
            mark = None if mark is call.mark else mark
            own, features = g.shape, call.features
            whole = own if features is None else torch.Size((*own[:-1], features))
            recorded = Call(x.clone(), call.mark, whole, g=kept, compiled=call, graph_mark=mark)
            recorded = recorded._replace(
                g_norm=gradient_norm(g) if "g_norm" in layer.needs else None
            )
            layer.record(recorded, backward_pass.current_pass())

    def _record(self, layer: LayerRecord, pending: PendingCall, g: Tensor) -> None:
        """Record a layer's call whose matrix product a backward pass has reached.

        Args:
            layer: the record of the layer.
            pending: the call, as the forward pass left it.
            g: ∂L/∂a.
        """
        if self.labels.are_sent_back:
            pending.sampled = g
            return
        if pending.call is None:  # another pass through an autograd graph after its step
            layer.note_lost(backward_pass.current_pass())
            return
        call = pending.call
        if pending.sampled is not None:
            call = call._replace(sampled=pending.sampled)
        if layer.needs and not layer.obstacle:
            several = pending.recorded or backward_pass.retains_graph()
            call = with_row_gradients(call, layer, g, several_passes=several)
        pending.recorded = True
        if self.averaging.wrapper is not None:
            layer.empty_call = call.without_rows(layer.kind)
        layer.record(call, backward_pass.current_pass())
        if not backward_pass.retains_graph():
            pending.release()  # no other pass can follow, but the loss may be kept for long

    def after_gradient(self, parameter: nn.Parameter) -> None:
        """Commit the calls of the backward pass that has added to a parameter's gradient."""
        layer = self._layer_of[parameter]
        layer.commit(backward_pass.current_pass())
        if self.averaging.processes is not None and layer.needs_row_gradients:
            # The second callback is registered by the first, so it runs after DDP's, which averages.
            backward_pass.at_end(lambda: backward_pass.at_end(layer.remember_gradient_norms))

    def before_model(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Begin a forward pass of the whole model."""
        self.labels.outputs = []
        if self.before_forward is not None and (prepare := self.before_forward()) is not None:
            prepare()

    def after_model(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """End a forward pass of the whole model: search from its output, draw labels."""
        outputs, self.labels.outputs = self.labels.outputs, None
        if not torch.is_grad_enabled() or function_transforms.innermost() is not None:
            return
        if self.search.is_on:
            self.search.from_output(output)
        if self.labels.seed is not None and outputs:
            self.labels.send_back(outputs, self.averaging.processes)


def _forward_call(
    layer: LayerRecord, x: Tensor, out: Tensor, mark: Mark, *, searched: bool, recomputed: bool
) -> Call:
    """Return what is known of a call after its forward pass; nested tensors have no rows."""
    if x.is_nested:
        layer.obstacle = NESTED
        rows = layer.kind.collect([], [], layer.like)
        shape, version = torch.Size((0, layer.width)), None
    else:
        rows, shape, version = _plain(x), out.shape, None if x.is_inference() else x._version
    call = Call(rows, mark, shape, searched=searched, recomputed=recomputed, version=version)
    if x.grad_fn is None and _is_on_host(rows):  # the user's, who may write to it in other ways
        return call._replace(samples=some_samples(rows))
    return call


def _is_on_host(x: Tensor) -> bool:
    """Return True for ordinary tensors with numbers that can be read without waiting."""
    return type(x) is Tensor and x.is_cpu and x.layout == torch.strided and x.numel() > 0


def _plain(x: Tensor) -> Tensor:
    """Return an input without its autograd graph, and as a tensor of torch itself.

    Subclasses such as images with metadata would pass their type on to states, which then are not
    loaded with ``weights_only=True``. Subclasses with operations of their own stay as they are.
    """
    x = x.detach()
    if type(x) is Tensor or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return x
    return x.as_subclass(Tensor)


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


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
