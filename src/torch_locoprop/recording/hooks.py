"""Records what each layer saw: its input and, on request, the gradients of its outputs.

A forward hook puts a hook on the autograd node of the layer's matrix product. When that node runs in a
backward pass the call is noted, and when the pass has added to the layer's ``.grad`` it counts. A
forward pass without a backward leaves nothing behind, in-place activations and views do not matter,
and ``zero_grad`` may stand anywhere in the loop.

In a model that ``torch.compile`` traces, ``torch_compile`` stands in for the hooks.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_locoprop.distributed.exchange import averaging
from torch_locoprop.fast import overlapped_weight_grads
from torch_locoprop.layers import layer_kind
from torch_locoprop.paper import transfers
from torch_locoprop.paper.fisher import sampled_output_gradient
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording import transfer_detection
from torch_locoprop.recording.layer_record import Call, CompiledCall, CompiledGraph, ServedLayer
from torch_locoprop.recording.transfer_assignment import NESTED
from torch_locoprop.recording.transfer_detection import LAYER_INPUT, MODEL_OUTPUT, Mark


class Capture:
    """The hooks on one model. They vanish with this object and do nothing in copies of the model."""

    def __init__(
        self, model: nn.Module, layers: Iterable[ServedLayer], output_transfer: Transfer | None
    ) -> None:
        self.layers = {layer.module: layer for layer in layers}
        self.tracing = True  # search the graph for transfers
        self.sums: bool | None = None  # the loss, as a closure's graph tells
        self.plan: weakref.WeakMethod[Callable[[], None]] | None = None  # makes it anew
        self.record_post_gradients = False
        self.processes: Any = None  # that have their gradients averaged, once they were seen to
        self._seed: int | None = None  # of the labels drawn in the next forward pass
        self._output_transfer = output_transfer  # tells the predictive distribution
        self._sampling = False
        self._in_forward: list[_Output] | None = None
        self._serial = next(_serials)
        # Layers without a local problem are watched too: what feeds them is not the output.
        kinds = {module: layer_kind(module) for module in model.modules()}
        self._watched = {module: kind for module, kind in kinds.items() if kind is not None}
        for module in (*self._watched, model):
            _remove_inert(module)
        handles: list[Any] = [
            # First in line, so that other hooks see the tensor that is used.
            module.register_forward_hook(
                _hook(self, "_after_layer", module), with_kwargs=True, prepend=True
            )
            for module in self._watched
        ]
        handles.append(model.register_forward_pre_hook(_hook(self, "_before_model", model)))
        handles.append(model.register_forward_hook(_hook(self, "_after_model", model)))
        self._handles = handles
        self._cells: weakref.WeakSet[_Cell] = weakref.WeakSet()
        self._layer_of: dict[nn.Parameter, ServedLayer] = {}
        self.graphs: set[CompiledGraph] = set()  # that call a watched layer
        self.leaves: set[int] = set()  # of operations outside of layers, by id
        weakref.finalize(self, _remove, handles)
        _captures.add(self)

    def draw_labels(self, step: int | None) -> None:
        """Draw labels in the forward passes of this step, others in each; None: draw none."""
        self._seed = None if step is None else step * 1000

    @property
    def draws_labels(self) -> bool:
        return self._seed is not None

    def clear(self) -> None:
        for layer in self.layers.values():
            layer.clear()
        for cell in self._cells:
            cell.let_go()

    def trace_loss(self, loss: object) -> None:
        """Look for the output's transfer inside a loss returned by a closure."""
        if not isinstance(loss, Tensor):
            return
        if self.sums is None:
            self.sums = transfer_detection.sums(loss)
        if self.tracing:
            transfer_detection.trace(loss, MODEL_OUTPUT)

    def _after_layer(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: object
    ) -> Tensor | None:
        kind = self._watched.get(module)
        self.processes = averaging() or self.processes
        if kind is None or not isinstance(out, Tensor) or out.grad_fn is None:
            return None
        layer = self.layers.get(module)
        if layer is not None and not layer.is_intact:  # a call with others in their place
            layer = None
        x: Tensor = args[0] if args else kwargs["input"]
        if self.tracing:
            self._search(x, LAYER_INPUT)
        # As long as anybody searches: it is another node of the graph.
        searched = self.tracing or (layer is not None and not layer.decided)
        plain = _not_a_view(out) if searched else out
        if layer is not None and (comes_aside := overlapped_weight_grads.takes(layer, x, out)):
            plain = overlapped_weight_grads.output(layer, x, out)
        assert plain.grad_fn is not None
        node = transfer_detection.matmul_node(plain.grad_fn)
        mark = transfer_detection.mark_layer(node)
        if layer is not None and layer.trained:
            self._follow_gradients(layer)
            recomputed = torch._C._current_graph_task_id() != -1
            self.tracing |= not layer.decided  # a layer thawed since the last step
            traced = self.tracing and not recomputed
            call = _call(layer, x, out, mark, traced=traced, recomputed=recomputed)
            if layer.keeps_output and comes_aside:
                call = call._replace(a=plain.detach(), a_version=plain._version)
            if self._trains(x):  # the layer it belongs to may be solved before this one
                call = call.copied()
            cell = _Cell(call)
            self._cells.add(cell)
            node.register_prehook(_recorder(self, layer, cell))
        if self._in_forward is not None and self._seed is not None and not out.is_nested:
            self._in_forward.append(_Output(layer, mark, plain, kind.features))
        return None if plain is out else plain

    def _search(self, tensor: Tensor, sink: Mark) -> None:
        leaves = transfer_detection.trace(tensor, sink, self.record_post_gradients)
        if not _is_scalar(tensor):  # a loss, which may have a penalty on weights
            for each in _captures:  # who else searches here finds the graph marked
                each.leaves |= leaves

    def _trains(self, x: Tensor) -> bool:
        """Whether an input is a layer's own weight, or a part of it."""
        base = x if x._base is None else x._base
        if not isinstance(base, nn.Parameter):
            return False
        return any(base is p for layer in self.layers.values() for p in layer.given)

    def _follow_gradients(self, layer: ServedLayer) -> None:
        """Hear of gradients that accumulate; a parameter frozen so far can be followed only now."""
        for p in layer.trained:
            if p not in self._layer_of:
                self._layer_of[p] = layer
                hook = _Hook(self, "_after_gradient")
                handle = p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def follow(self, module: nn.Module) -> None:
        """A compiled graph calls a layer."""
        layer = self.layers.get(module)
        if layer is not None and layer.trained:
            self._follow_gradients(layer)
            self.tracing |= not layer.decided  # around the graph

    def record_compiled(self, layer: nn.Module, x: Tensor, g: Tensor, call: CompiledCall) -> None:
        """The backward pass of a compiled graph has reached a layer with the gradient ``g``."""
        served = self.layers.get(layer)
        if served is not None and served.trained:
            # Copies, for a compiled graph may write its next result where these stand.
            kept = None if served.needs.isdisjoint({"g", "v"}) else g.clone()
            beyond = (
                transfer_detection.running_mark()
            )  # its own, where the graph runs as it was traced
            beyond = None if beyond is call.mark else beyond
            recorded = Call(x.clone(), call.mark, g.shape, g=kept, compiled=call, beyond=beyond)
            served.record(recorded, torch._C._current_graph_task_id())

    def _record(self, layer: ServedLayer, cell: _Cell, g: Tensor) -> None:
        """A backward pass has reached a layer's matrix product with the gradient ``g``."""
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
        # Where the transfer was missed, in this pass or in another that adds to it, ∂L/∂a tells ∂L/∂y.
        several = cell.recorded or _keeps_graph()
        for_v = "v" in needs and (several or not layer.has_v(call))
        if "g" in needs or for_v:
            call = call._replace(g=g)
        cell.recorded = True
        layer.record(call, torch._C._current_graph_task_id())
        if not _keeps_graph():
            cell.let_go()  # no other pass can come this way, and the loss may be kept for long

    def _after_gradient(self, parameter: nn.Parameter) -> None:
        layer = self._layer_of[parameter]
        layer.commit(torch._C._current_graph_task_id())
        if self.processes is not None and not layer.needs.isdisjoint({"g", "v"}):
            # At the end of the pass, after those that wait already: one of them averages.
            at_the_end = torch.autograd.Variable._execution_engine.queue_callback
            at_the_end(lambda: at_the_end(layer.measure_again))

    def _before_model(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._in_forward = []
        if self.plan is not None and (plan := self.plan()) is not None:
            plan()

    def _after_model(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        calls, self._in_forward = self._in_forward or [], None
        if not torch.is_grad_enabled():
            return
        if self.tracing:
            for tensor in sorted(_tensors(output), key=_is_scalar):
                self._search(tensor, MODEL_OUTPUT)
        if self._seed is not None and calls:
            self._sample(calls, self._seed)
            self._seed += 1

    def _sample(self, calls: list[_Output], seed: int) -> None:
        """Send the gradient of a sampled label back to every layer; no parameter is touched."""
        # A bias gradient is a sum over rows, a weight gradient a matrix product: ask for the former.
        wanted = [call.layer.trained[-1] for call in calls if call.layer and call.layer.trained]
        if not wanted:
            return
        outputs = [call for call in calls if call.predicts(self._output_transfer)]
        if not outputs:
            raise RuntimeError(
                "Labels are drawn from the output of the model's last Linear layer, but the model "
                "ends in something else. Use a variant and a regularizer that need no Fisher matrix."
            )
        if self.processes is not None:  # whose labels are not to be drawn alike
            seed += 7919 * torch.distributed.get_rank(self.processes)
        generator = torch.Generator(outputs[0].a.device).manual_seed(seed)
        gradients = [call.sampled_gradient(self._output_transfer, generator) for call in outputs]
        self._sampling = True
        try:
            torch.autograd.grad(
                [call.a for call in outputs],
                wanted,
                gradients,
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            self._sampling = False


def _call(
    layer: ServedLayer, x: Tensor, out: Tensor, mark: Mark, *, traced: bool, recomputed: bool
) -> Call:
    """What the forward pass tells of a call; of nested tensors that is no rows."""
    if x.is_nested:
        layer.obstacle = NESTED
        rows = layer.kind.collect([], [], layer.tensors["weight"])
        shape, version = torch.Size((0, layer.width)), None
    else:
        rows, shape, version = x.detach(), out.shape, None if x.is_inference() else x._version
    return Call(rows, mark, shape, traced=traced, recomputed=recomputed, version=version)


def _with_post_gradient(call: Call, layer: ServedLayer, g: Tensor) -> Call:
    """The call with ∂L/∂y that this pass left behind its transfer, in the shape of ∂L/∂a."""
    finding = transfer_detection.resolve(call.mark, layer.last_width)
    consumer = finding.consumer
    if consumer is None or consumer.gradient is None:
        return call
    v, consumer.gradient = consumer.gradient.reshape(g.shape), None
    return call._replace(v=v, behind=finding.transfer)


class _Output(NamedTuple):
    """What a layer's call in the model's forward pass returned."""

    layer: ServedLayer | None
    mark: Mark
    a: Tensor
    features: int  # which dimension of it they are

    def predicts(self, transfer: Transfer | None) -> bool:
        """Whether the model ends in it, or in the transfer behind it, and not in more."""
        finding = transfer_detection.resolve(
            self.mark, self.a.shape[-1] if self.features == -1 else 0
        )
        consumer = finding.consumer
        ends = consumer is None or MODEL_OUTPUT in consumer.consumers
        return finding.is_output and (ends or finding.transfer == self._own(transfer))

    def _own(self, transfer: Transfer | None) -> Transfer | None:
        return self.layer.transfer if self.layer and self.layer.explicit else transfer

    def sampled_gradient(self, transfer: Transfer | None, generator: torch.Generator) -> Tensor:
        """∂L/∂a for labels drawn from what the transfer predicts."""
        transfer = self._own(transfer)
        a = self.a.detach().movedim(self.features, -1)
        found = sampled_output_gradient(transfer or transfers.Linear(), a, generator)
        return found.movedim(-1, self.features)


class _Cell:
    """What a node's hook holds of a call.

    It is emptied with the last pass through the graph, or with the step, whoever keeps the graph.
    """

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call
        self.sampled: Tensor | None = None
        self.recorded = False

    def let_go(self) -> None:
        if self.recorded:
            self.call = self.sampled = None


def _recorder(
    capture: Capture, layer: ServedLayer, cell: _Cell
) -> Callable[[tuple[Tensor, ...]], None]:
    """A hook for the node of a layer's matrix product; it does not keep the capture alive."""
    weak = weakref.ref(capture)

    def record(gradients: tuple[Tensor, ...]) -> None:
        alive = weak()
        if alive is not None and gradients[0] is not None:
            alive._record(layer, cell, gradients[0].detach())

    return record


class _Hook:
    """A method of a capture, weakly held: it keeps nothing alive and copies to one that is inert."""

    def __init__(
        self, capture: Capture | None = None, method: str = "", module: nn.Module | None = None
    ) -> None:
        self._capture = weakref.ref(capture) if capture is not None else lambda: None
        self._module = weakref.ref(module) if module is not None else lambda: None
        self._method = method
        self._key = str(next(_serials))  # text, for the compiler takes numbers for variables
        _hooks[self._key] = self

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            from torch_locoprop.recording import torch_compile

            if torch_compile.is_exporting():
                return None
            if not torch_compile.needs_python(self._key):
                return torch_compile.trace(self._key, self._method, args)
            return torch_compile.as_python(self.run, *args)
        return self.run(*args)

    def run(self, *args: Any) -> Any:
        """What it does in an ordinary pass."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return None
        capture = self._capture()
        return None if capture is None else getattr(capture, self._method)(*args)

    @property
    def __name__(self) -> str:  # asked for by torch.jit.script, which compiles hooks
        raise AttributeError(
            "torch.jit.script cannot compile LocoProp's hooks, which a model has while the optimizer "
            "lives, and copies made meanwhile keep. Delete the optimizer first, or use torch.export or "
            "torch.jit.trace."
        )

    @property
    def inert(self) -> bool:
        return self._capture() is None

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def _hook(capture: Capture, method: str, module: nn.Module) -> _Hook:
    """A hook with a code object of its own.

    The compiler keeps what it made of a function by its code, and gives up after eight versions: so
    many models would share one.
    """
    call = _Hook.__call__
    code = call.__code__.replace()
    own = FunctionType(code, call.__globals__, call.__name__, None, call.__closure__)
    kind: type[_Hook] = type("_Hook", (_Hook,), {"__call__": own})
    return kind(capture, method, module)


# ---- what compiled graphs ask for ----------------------------------------------------------------

_serials = itertools.count()
_captures: weakref.WeakSet[Capture] = weakref.WeakSet()
_hooks: weakref.WeakValueDictionary[str, _Hook] = weakref.WeakValueDictionary()


def captures_of(module: nn.Module) -> list[Capture]:
    """The captures that watch a module, the oldest first."""
    return sorted((c for c in _captures if module in c._watched), key=lambda c: c._serial)


def hooked_module(key: str) -> nn.Module | None:
    """The module on which this hook sits."""
    hook = _hooks.get(key)
    return None if hook is None or hook.inert else hook._module()


def role(key: str) -> str:
    """What a hook does when it is traced; where several sit on one module, the first acts for all."""
    hook, module = _hooks.get(key), hooked_module(key)
    if hook is None or module is None:
        return "nothing"
    capture = hook._capture()
    assert capture is not None
    if any("fisher" in layer.needs for layer in capture.layers.values()):
        return "python"  # labels are drawn from the model's output in the forward pass
    if hook._method != "_after_layer":
        return "search"
    sharing = captures_of(module)
    if sharing[0] is not capture:
        return "nothing"
    served = [each.layers[module] for each in sharing if module in each.layers]
    return "tap" if any(layer.trained for layer in served) else "search"


def _keeps_graph() -> bool:
    """Whether the backward pass that runs now may be followed by another through its graph."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or bool(ask())


def note_break(key: str) -> None:
    """A hook that draws labels breaks a compiled graph, and the summary has to tell."""
    hook = _hooks.get(key)
    capture = None if hook is None else hook._capture()
    if capture is not None:
        for layer in capture.layers.values():
            layer.compiled = True


def _remove_inert(module: nn.Module) -> None:
    """Copies and reloads of a model carry hooks that do nothing; they need not pile up."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, _Hook) and hook.inert:
                del hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _not_a_view(out: Tensor) -> Tensor:
    """The same memory without the view relation, so that in-place activations stay visible.

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
