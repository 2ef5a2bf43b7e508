"""What hooks do while ``torch.compile`` traces them: they leave an operator in the compiled graph.

A compiled graph runs no Python hooks, and a hook that is not traced breaks the graph in two. So a
traced hook puts ``torch_locoprop::tap`` behind the layer; its backward hands the layer's input and
gradient to every :class:`~.hooks.ModelHooks` that watches the layer by then. The search
for transfers runs while the model is traced, on the tensors without data that PyTorch traces with.

Importing this imports the compiler: only traced code does.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import assume_constant_result, disable
from torch._dynamo.comptime import ComptimeContext, comptime

from torch_locoprop.layers import layer_kind
from torch_locoprop.layers.base import call_inputs, joined_inputs
from torch_locoprop.recording import transfer_detection, weak_hook
from torch_locoprop.recording.call import CompiledCall, CompiledGraph
from torch_locoprop.recording.transfer_assignment import NESTED
from torch_locoprop.recording.transfer_detection import LAYER_INPUT, MODEL_OUTPUT, Mark


@dataclass(eq=False)
class Place:
    """One call of a layer in a compiled graph."""

    module: weakref.ref[nn.Module]
    mark: Mark
    graph: CompiledGraph


_places: list[Place] = []
_graphs: weakref.WeakKeyDictionary[Any, CompiledGraph] = weakref.WeakKeyDictionary()  # by fake mode
_calls = itertools.count()


# ---- traced --------------------------------------------------------------------------------------


def trace(key: str, method: str, args: tuple[Any, ...]) -> Tensor | None:
    """What a hook does, and returns, in a compiled graph."""
    if method == "after_layer":
        module, inputs, options, out = args
        tensors = call_inputs(_arguments(key), inputs, options)
        return _trace_layer(_role(key), key, module, tensors, out)
    if method == "after_model":
        tensors = _tensors(args[-1])
        scalars = [tensor for tensor in tensors if tensor.dim() == 0]
        for tensor in [t for t in tensors if t.dim() > 0] + scalars:  # noqa: B007, seen by name
            comptime(_search_from_output)
    return None


def _trace_layer(
    role: str, key: str, module: nn.Module, inputs: list[Tensor], out: Tensor
) -> Tensor | None:
    if role == "nothing" or not out.requires_grad:
        return None
    if out.is_nested:
        comptime(_note_nested)
        return None
    for x in inputs:  # noqa: B007, seen by name
        comptime(_search_from_input)
    comptime(_note_layer)
    if role == "search":
        comptime(_mark_output)
        return None
    place = _new_place(key)
    weight = module.weight  # noqa: F841, seen by name
    comptime(_note_graph)
    tapped, _ = torch.ops.torch_locoprop.tap(out, joined_inputs(inputs).detach(), place)
    return tapped  # type: ignore[no-any-return]


def _tensors(output: object) -> list[Tensor]:
    """The tensors of an output, in a form that can be traced."""
    if isinstance(output, Tensor):
        return [] if output.is_nested else [output]
    values = list(output.values()) if isinstance(output, dict) else output
    if not isinstance(values, (tuple, list)):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


# ---- while tracing -------------------------------------------------------------------------------


@assume_constant_result  # type: ignore[untyped-decorator]
def _arguments(key: str) -> tuple[str, ...]:
    module = weak_hook.hooked_module(key)
    kind = None if module is None else layer_kind(module)
    return ("input",) if kind is None else kind.arguments


@assume_constant_result  # type: ignore[untyped-decorator]
def _role(key: str) -> str:
    return weak_hook.role(key)


@assume_constant_result  # type: ignore[untyped-decorator]
def is_exporting() -> bool:
    """Whether the model is exported; up to PyTorch 2.11, what is traced is told that it always is."""
    return torch.compiler.is_exporting()


@assume_constant_result  # type: ignore[untyped-decorator]
def needs_python(key: str) -> bool:
    """Whether a hook has to run as it is, at the price of a break in the graph."""
    if weak_hook.role(key) != "python":
        return False
    weak_hook.mark_compiled(key)
    return True


@disable  # type: ignore[untyped-decorator]
def as_python(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, which breaks the graph."""
    return function(*args)


@assume_constant_result  # type: ignore[untyped-decorator]
def _new_place(key: str) -> int:
    module = weak_hook.hooked_module(key)
    assert module is not None
    mark = Mark("a layer's output", is_layer=True)
    _places.append(Place(weakref.ref(module), mark, CompiledGraph()))
    return len(_places) - 1


def _search_from_input(context: ComptimeContext) -> None:
    x = _fake(context, "x")
    _graph(_fake(context, "out")).leaves |= transfer_detection.trace(x, LAYER_INPUT)


def _note_layer(context: ComptimeContext) -> None:
    module = weak_hook.hooked_module(context.get_local("key").as_python_constant())
    assert module is not None
    graph = _graph(_fake(context, "out"))
    graph.layers.add(module)
    for listener in weak_hook.watchers_of(module):
        listener.graphs.add(graph)


def _note_nested(context: ComptimeContext) -> None:
    module = weak_hook.hooked_module(context.get_local("key").as_python_constant())
    assert module is not None
    for listener in weak_hook.watchers_of(module):
        if module in listener.layers:
            listener.layers[module].obstacle = NESTED


def _mark_output(context: ComptimeContext) -> None:
    transfer_detection.mark_layer(transfer_detection.matmul_node(_fake(context, "out").grad_fn))


def _note_graph(context: ComptimeContext) -> None:
    graph = _graph(_fake(context, "out"))
    place = _places[context.get_local("place").as_python_constant()]
    place.graph = graph
    module = place.module()
    assert module is not None
    graph.weights[module] = id(_fake(context, "weight"))
    # Not promised by PyTorch. Without it the ends of graphs are unknown, which the summary tells.
    translator: Any = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    at_the_end = getattr(translator.output, "add_graph_finalizer", None)
    if at_the_end is not None:
        at_the_end(lambda module: _search_from_end(module, graph))


def _search_from_output(context: ComptimeContext) -> None:
    tensor = _fake(context, "tensor")
    graph = _graph(tensor)
    _search(tensor, graph)
    graph.complete = graph.whole = True


def _search(output: Tensor, graph: CompiledGraph) -> None:
    leaves = transfer_detection.trace(output, MODEL_OUTPUT)
    if output.dim() > 0:  # and no loss, which may have a penalty on weights
        graph.leaves |= leaves


def _fake(context: ComptimeContext, name: str) -> Any:
    return context.get_local(name).as_fake()


def _graph(fake: Any) -> CompiledGraph:
    """The graph that is being traced: each has a mode of its own for its tensors."""
    return _graphs.setdefault(fake.fake_mode, CompiledGraph())


def _search_from_end(module: torch.fx.GraphModule, graph: CompiledGraph) -> None:
    """What leaves a graph is the model's output; where it is not, other layers lie outside."""
    if not graph.complete:
        outputs = _values(node.args for node in module.graph.nodes if node.op == "output")
        tensors = [value for value in outputs if isinstance(value, Tensor)]
        for tensor in sorted(tensors, key=lambda tensor: tensor.dim() == 0):
            _search(tensor, graph)
        graph.complete = True


def _values(arguments: Any) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, torch.fx.Node):
            yield argument.meta.get("example_value")
        elif isinstance(argument, (tuple, list)):
            yield from _values(argument)


# ---- while running -------------------------------------------------------------------------------


@torch.library.custom_op("torch_locoprop::tap", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _tap(out: Tensor, x: Tensor, place: int) -> tuple[Tensor, Tensor]:
    """The output of a layer, and a number that tells this call from others."""
    module = _places[place].module()
    if module is not None:
        for listener in weak_hook.watchers_of(module):
            listener.follow(module)
    return out.clone(), torch.tensor(next(_calls))


@torch.library.custom_op(
    "torch_locoprop::record", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _record(g: Tensor, x: Tensor, call: Tensor, place: int) -> Tensor:
    """The gradient of a layer's output, on its way to the layer."""
    here = _places[place]
    module = here.module()
    if module is not None:
        for listener in weak_hook.watchers_of(module):
            listener.record_compiled(module, x, g, CompiledCall(here.mark, here.graph, int(call)))
    return g.clone()


@_tap.register_fake
def _(out: Tensor, x: Tensor, place: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out), torch.empty((), dtype=torch.int64)


@_record.register_fake
def _(g: Tensor, x: Tensor, call: Tensor, place: int) -> Tensor:
    return torch.empty_like(g)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    _, x, place = inputs
    ctx.save_for_backward(x, output[1])
    ctx.place = place
    ctx.metadata[transfer_detection.KEY] = _places[place].mark


def _backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    x, call = ctx.saved_tensors
    return torch.ops.torch_locoprop.record(g, x, call, ctx.place), None, None


_tap.register_autograd(_backward, setup_context=_keep)
