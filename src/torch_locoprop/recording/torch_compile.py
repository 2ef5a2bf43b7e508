"""The code that hooks run while ``torch.compile`` traces them: it inserts an operator into the graph.

A compiled graph runs no Python hooks, and a hook that cannot be traced causes a graph break. A traced
hook therefore inserts ``torch_locoprop::tap`` after the layer. The backward of this operator gives the
layer's input and gradient to every :class:`~.hooks.ModelHooks` that watches the layer at that time. The
search for transfers runs once, while the model is traced, on PyTorch's fake tensors.

Importing this module imports the compiler, so only traced hooks import it. What hooks do in ordinary
passes is in ``hooks.py``.
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
from torch.autograd.graph import Node
from torch.nn import functional

from torch_locoprop.distributed.fully_shard import local
from torch_locoprop.layers import layer_kind
from torch_locoprop.layers.base import call_inputs, is_distributed, joined_inputs
from torch_locoprop.recording import node_marks, transfer_detection, weak_hook
from torch_locoprop.recording.call import CompiledCall, CompiledGraph
from torch_locoprop.recording.local_layer import COMPUTED
from torch_locoprop.recording.node_marks import LAYER_INPUT, MODEL_OUTPUT, Mark
from torch_locoprop.recording.transfer_assignment import DIVIDED, NESTED


@dataclass(eq=False)
class CallSite:
    """One place in a compiled graph where a layer is called."""

    module: weakref.ref[nn.Module]
    mark: Mark
    graph: CompiledGraph
    features: int | None = None  # features of the whole output, if this process has some of them


# Call sites of living modules, by their number in the compiled graph.
_call_sites: dict[int, CallSite] = {}
_site_numbers = itertools.count()
# Compiled graphs by the mode of fake tensors in which they are traced.
_graphs: weakref.WeakKeyDictionary[Any, CompiledGraph] = weakref.WeakKeyDictionary()
_call_numbers = itertools.count()


# ---- code that torch.compile traces --------------------------------------------------------------


def trace(key: str, method: str, args: tuple[Any, ...]) -> Tensor | None:
    """Do in a compiled graph what a method of ``ModelHooks`` does in an ordinary pass.

    Args:
        key: the key of the hook.
        method: the name of the method.
        args: what PyTorch passes to the hook.

    Returns:
        The output of the layer after the inserted operator; None if the hook changes nothing.
    """
    if method == "after_layer":
        module, inputs, options, out = args
        role = _role(key)
        if role == "nothing":
            return None
        tensors = call_inputs(_arguments(key), inputs, options)
        return _trace_layer(role, key, module, tensors, out)
    if method == "after_model" and _role(key) != "nothing":
        tensors = _tensors(args[-1])
        scalars = [tensor for tensor in tensors if tensor.dim() == 0]
        # The functions for comptime read the local variables of this frame by their names.
        for tensor in [t for t in tensors if t.dim() > 0] + scalars:  # noqa: B007
            comptime(_search_from_output)
    return None


def _trace_layer(
    role: str, key: str, module: nn.Module, inputs: list[Tensor], out: Tensor
) -> Tensor | None:
    """Search for transfers from a layer's inputs, and insert the operator after its output.

    The functions for ``comptime`` read the local variables of this frame by their names.
    """
    if not out.requires_grad:
        return None
    if out.is_nested:
        comptime(_note_nested)
        return None
    for x in inputs:  # noqa: B007
        comptime(_search_from_input)
    comptime(_note_layer)
    if role == "search":
        comptime(_mark_output)
        return None
    site = _new_call_site(key)
    weight = module.weight  # noqa: F841
    comptime(_note_call_site)
    bias = module.bias
    if bias is not None:
        comptime(_note_bias)
    if is_distributed(out):
        comptime(_note_placements)
        return _tapped_parts(out, inputs[0], site)
    tapped, _ = torch.ops.torch_locoprop.tap(out, joined_inputs(inputs).detach(), site)
    return tapped  # type: ignore[no-any-return]


def _tapped_parts(out: Any, x: Any, site: int) -> Tensor:
    """Insert the operator after the part of a layer's output, a DTensor, that this process has."""
    from torch.distributed.tensor import DTensor, Replicate

    placements = [Replicate() if each.is_partial() else each for each in out.placements]
    part = out.to_local(grad_placements=placements)
    rows = x.to_local() if is_distributed(x) else x
    tapped, _ = torch.ops.torch_locoprop.tap(part, rows.detach(), site)
    return DTensor.from_local(
        tapped,
        out.device_mesh,
        out.placements,
        run_check=False,
        shape=out.shape,
        stride=out.stride(),
    )


def _tensors(output: object) -> list[Tensor]:
    """Return all tensors in the output of a model, by code that can be traced."""
    if isinstance(output, Tensor):
        return [] if output.is_nested else [output]
    values = list(output.values()) if isinstance(output, dict) else output
    if not isinstance(values, (tuple, list)):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


# ---- code that runs while torch.compile traces ---------------------------------------------------


@assume_constant_result  # type: ignore[untyped-decorator]
def _arguments(key: str) -> tuple[str, ...]:
    """Return the names of the input arguments of the layer that a hook is on."""
    module = weak_hook.hooked_module(key)
    kind = None if module is None else layer_kind(module)
    return ("input",) if kind is None else kind.arguments


@assume_constant_result  # type: ignore[untyped-decorator]
def _role(key: str) -> str:
    return weak_hook.role(key)


@assume_constant_result  # type: ignore[untyped-decorator]
def is_exporting() -> bool:
    """Return True if the model is being exported.

    Traced code must not ask PyTorch itself: up to PyTorch 2.11 it gets True in every compilation.
    """
    return torch.compiler.is_exporting()


@assume_constant_result  # type: ignore[untyped-decorator]
def needs_python(key: str) -> bool:
    """Return True if a hook has to run as Python, at the cost of a graph break."""
    if weak_hook.role(key) != "python":
        return False
    weak_hook.mark_compiled(key)
    return True


@disable  # type: ignore[untyped-decorator]
def as_python(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function outside of the compiled graph, with a graph break."""
    return function(*args)


@assume_constant_result  # type: ignore[untyped-decorator]
def _new_call_site(key: str) -> int:
    """Register a call site of the layer that a hook is on, until the layer dies; return its number."""
    module = weak_hook.hooked_module(key)
    assert module is not None
    mark = Mark("a layer's output", is_layer=True)
    number = next(_site_numbers)
    alive = weakref.ref(module, lambda _: _call_sites.pop(number, None))
    _call_sites[number] = CallSite(alive, mark, CompiledGraph())
    return number


def _search_from_input(context: ComptimeContext) -> None:
    x = _fake(context, "x")
    leaves = transfer_detection.trace(x, LAYER_INPUT, adds_one=_reader(_fx_graph(context)))
    _graph(_fake(context, "out")).leaves |= leaves


def _note_layer(context: ComptimeContext) -> None:
    module = weak_hook.hooked_module(context.get_local("key").as_python_constant())
    assert module is not None
    graph = _graph(_fake(context, "out"))
    graph.layers.add(module)
    for hooks in weak_hook.watchers_of(module):
        hooks.compiled_graphs.add(graph)


def _note_placements(context: ComptimeContext) -> None:
    x, out = _fake(context, "x"), _fake(context, "out")
    if out.shape != out.to_local().shape:
        _call_sites[context.get_local("site").as_python_constant()].features = out.shape[-1]
    module = weak_hook.hooked_module(context.get_local("key").as_python_constant())
    assert module is not None
    for hooks in weak_hook.watchers_of(module):
        layer = hooks.layers.get(module)
        if layer is not None and layer.shards is not None and is_distributed(x):
            layer.obstacle = layer.obstacle or ("" if layer.shards.are_known(x) else DIVIDED)


def _note_nested(context: ComptimeContext) -> None:
    module = weak_hook.hooked_module(context.get_local("key").as_python_constant())
    assert module is not None
    for hooks in weak_hook.watchers_of(module):
        if module in hooks.layers:
            hooks.layers[module].obstacle = NESTED


def _mark_output(context: ComptimeContext) -> None:
    node_marks.mark_layer(node_marks.matmul_node(_fake(context, "out").grad_fn))


def _note_call_site(context: ComptimeContext) -> None:
    graph = _graph(_fake(context, "out"))
    site = _call_sites[context.get_local("site").as_python_constant()]
    site.graph = graph
    module = site.module()
    assert module is not None
    weight = _fake(context, "weight")
    graph.tensors[module] = {id(weight)}
    if weight.grad_fn is not None:  # torch.func.functional_call has replaced the weight
        for hooks in weak_hook.watchers_of(module):
            if module in hooks.layers:
                hooks.layers[module].obstacle = COMPUTED
    # PyTorch does not promise this method. Without it the ends of compiled graphs are not searched,
    # and the summary says so.
    translator: Any = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    add_finalizer = getattr(translator.output, "add_graph_finalizer", None)
    if add_finalizer is not None:
        add_finalizer(lambda module: _search_from_graph_outputs(module, graph))


def _note_bias(context: ComptimeContext) -> None:
    graph = _graph(_fake(context, "out"))
    module = _call_sites[context.get_local("site").as_python_constant()].module()
    assert module is not None
    graph.tensors[module].add(id(_fake(context, "bias")))


def _search_from_output(context: ComptimeContext) -> None:
    tensor = _fake(context, "tensor")
    graph = _graph(tensor)
    _search(tensor, graph, _fx_graph(context))
    graph.outputs_searched = graph.returns_model_output = True


def _search(output: Tensor, graph: CompiledGraph, operations: torch.fx.Graph) -> None:
    leaves = transfer_detection.trace(output, MODEL_OUTPUT, adds_one=_reader(operations))
    if output.dim() > 0:  # a scalar is a loss, which may have a penalty on weights
        graph.leaves |= leaves


def _fx_graph(context: ComptimeContext) -> torch.fx.Graph:
    """Return the operations that were traced so far."""
    translator: Any = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    graph: torch.fx.Graph = translator.output.graph
    return graph


def _reader(graph: torch.fx.Graph) -> Callable[[Node], bool]:
    """Return a function that reads from a graph whether a division ``a / (c + |a|)`` has c = 1."""

    def adds_one(division: Node) -> bool:
        made = {_grad_fn(node): node for node in graph.nodes}
        quotient = made.get(division)
        if quotient is not None and quotient.target is functional.softsign:
            return True
        total = made.get(division.next_functions[1][0])
        # A keyword may be alpha=, a factor.
        return total is not None and not total.kwargs and 1 in total.args

    return adds_one


def _grad_fn(node: torch.fx.Node) -> Node | None:
    value = node.meta.get("example_value")
    return value.grad_fn if isinstance(value, Tensor) else None


def _fake(context: ComptimeContext, name: str) -> Any:
    """Return the fake tensor of a local variable in the traced frame."""
    return context.get_local(name).as_fake()


def _graph(fake: Any) -> CompiledGraph:
    """Return the compiled graph that is being traced: each has its own mode of fake tensors."""
    part: Any = local(fake)
    return _graphs.setdefault(part.fake_mode, CompiledGraph())


def _search_from_graph_outputs(module: torch.fx.GraphModule, graph: CompiledGraph) -> None:
    """Search from the outputs of a compiled graph as if they were the model's output.

    If they are not the model's output, the model is compiled in parts, and has layers outside of the
    graph.
    """
    if not graph.outputs_searched:
        outputs = _values(node.args for node in module.graph.nodes if node.op == "output")
        tensors = [value for value in outputs if isinstance(value, Tensor)]
        for tensor in sorted(tensors, key=lambda tensor: tensor.dim() == 0):
            _search(tensor, graph, module.graph)
        graph.outputs_searched = True


def _values(arguments: Any) -> Iterator[Any]:
    """Yield the example values of all nodes in nested arguments of an FX node."""
    for argument in arguments:
        if isinstance(argument, torch.fx.Node):
            yield argument.meta.get("example_value")
        elif isinstance(argument, (tuple, list)):
            yield from _values(argument)


# ---- operators in the compiled graph -------------------------------------------------------------


@torch.library.custom_op("torch_locoprop::tap", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _tap(out: Tensor, x: Tensor, site: int) -> tuple[Tensor, Tensor]:
    """Return a layer's output unchanged, and the number of this call.

    The input ``x`` is an argument so that it is saved for the backward pass.
    """
    called = _call_sites.get(site)
    module = None if called is None else called.module()
    if module is not None:
        for hooks in weak_hook.watchers_of(module):
            hooks.before_compiled_layer(module)
    return out.clone(), torch.tensor(next(_call_numbers), device="cpu")


@torch.library.custom_op(
    "torch_locoprop::record", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _record(g: Tensor, x: Tensor, call: Tensor, site: int) -> Tensor:
    """Record the call with the gradient ``g`` of the layer's output; return ``g`` unchanged."""
    called = _call_sites.get(site)
    module = None if called is None else called.module()
    if called is not None and module is not None:
        for hooks in weak_hook.watchers_of(module):
            compiled_call = CompiledCall(called.mark, called.graph, int(call), called.features)
            hooks.record_compiled(module, x, g, compiled_call)
    return g.clone()


@_tap.register_fake
def _(out: Tensor, x: Tensor, site: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out), torch.empty((), dtype=torch.int64, device="cpu")


@_record.register_fake
def _(g: Tensor, x: Tensor, call: Tensor, site: int) -> Tensor:
    return torch.empty_like(g)


def _setup_context(
    ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]
) -> None:
    _, x, site = inputs
    ctx.save_for_backward(x, output[1])
    ctx.site = site
    if site in _call_sites:
        ctx.metadata[node_marks.KEY] = _call_sites[site].mark


def _backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    x, call = ctx.saved_tensors
    return torch.ops.torch_locoprop.record(g, x, call, ctx.site), None, None


_tap.register_autograd(_backward, setup_context=_setup_context)
