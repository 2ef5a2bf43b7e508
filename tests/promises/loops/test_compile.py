"""``torch.compile``, before or after the optimizer is made, equals the eager run, in one graph."""

from __future__ import annotations

import copy
import gc
import shutil
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
import torch._dynamo
from cases import assert_close, cross_entropy, network, weights
from promises.loops.plain import (
    PRESETS,
    STEPS,
    data,
    distance,
    each_model,
    each_variant,
    loco,
    make,
    plain,
    train,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from torch_locoprop import LocoProp
from torch_locoprop.recording import torch_compile

BACKENDS = ["eager", "aot_eager"]
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
recent = pytest.mark.skipif(
    VERSION < (2, 13), reason="the compiler sees no thawing, nor a whole module"
)

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # From within the compiler: of tensors that pass from one graph to the next, and of its own parts.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]


def run(
    model: nn.Module,
    compiled: Callable[[nn.Module], Any],
    variant: str = "locoprop-m",
    kind: str = "linear",
    first: str = "optimizer",
    **options: Any,
) -> tuple[list[Tensor], LocoProp]:
    """Return the weights after a few steps, with the model compiled before or after the optimizer."""
    if first == "compile":
        call = compiled(model)
        opt = loco(model, variant, **options)
    else:
        opt = loco(model, variant, **options)
        call = compiled(model)
    for seed in range(STEPS):
        plain(call, *data(kind, seed))
        opt.step()
        opt.zero_grad()
    return weights(model), opt


def whole(backend: Any = "aot_eager") -> Callable[[nn.Module], Any]:
    return lambda model: torch.compile(model, backend=backend, fullgraph=True)


def variants_of(opt: LocoProp) -> list[str]:
    rows = opt.summary().split("\n\n")[0].splitlines()[2:]
    return [row.split()[4] for row in rows]


class Net(nn.Module):
    """A model with its own forward, which ends in a transfer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 5).double(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.two(torch.tanh(self.one(x))))


@each_variant
@each_model
@pytest.mark.parametrize("first", ["compile", "optimizer"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_the_eager_run(variant: str, kind: str, first: str, backend: str) -> None:
    """``fullgraph=True`` raises an error at a graph break."""
    found, opt = run(make(kind), whole(backend), variant, kind, first)
    assert_close(found, train(variant, kind), 1e-11)
    name = "locoprop-s" if variant in PRESETS else variant
    assert variants_of(opt) == [name] * 3  # all transfers were found


@each_model
def test_one_graph_and_no_more(kind: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    run(make(kind), lambda model: torch.compile(model, backend=counter), kind=kind)
    assert counter.frame_count == 1


@pytest.mark.parametrize("first", ["compile", "optimizer"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_with_a_forward_of_its_own(first: str, backend: str) -> None:
    """The last transfer is found at the end of the compiled graph, for every backend."""
    found, opt = run(Net(), whole(backend), first=first, output_transfer=None)
    expected, plainly = run(Net(), lambda model: model, output_transfer=None)
    assert_close(found, expected, 1e-11)
    assert opt.summary() == plainly.summary()
    assert "relu" in opt.summary()


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
@pytest.mark.parametrize("variant", ["locoprop-m", "pocoprop-s", "spectral"])
def test_with_inductor(variant: str) -> None:
    assert_close(run(network(), whole("inductor"), variant)[0], train(variant), 1e-11)


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def the_whole_loss(model: nn.Module) -> Any:
    """Compile model and loss as one graph; the caller's loss is then the identity."""
    return torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True)


@each_variant
@pytest.mark.parametrize("compiled", [pytest.param(in_place, marks=recent), the_whole_loss])
def test_other_ways_to_compile(variant: str, compiled: Callable[[nn.Module], Any]) -> None:
    assert_close(run(network(), compiled, variant)[0], train(variant), 1e-11)


@pytest.mark.parametrize("first", ["compile", "optimizer"])
def test_the_loss_in_the_graph(first: str) -> None:
    model = network()
    if first == "optimizer":
        opt = loco(model)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y)

    if first == "compile":
        opt = loco(model)
    for seed in range(STEPS):
        loss_of(*data(seed=seed)).backward()
        opt.step()
        opt.zero_grad()
    assert_close(weights(model), train(), 1e-11)


def test_the_optimizer_may_be_given_the_compiled_model() -> None:
    model = network()
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    opt = loco(compiled, transfers={"0": "tanh"})
    for seed in range(STEPS):
        plain(compiled, *data(seed=seed))
        opt.step()
        opt.zero_grad()
    assert_close(weights(model), train(), 1e-11)
    assert "_orig_mod" not in opt.summary()


def test_many_models_in_one_process() -> None:
    """The compiler does not count the hooks of several models as versions of one function."""
    kept = []
    for _ in range(10):
        forward = FunctionType(Net.forward.__code__.replace(), Net.forward.__globals__)
        model = type("Fresh", (Net,), {"forward": forward})()  # another model, not a version of one
        kept.append(run(model, whole(), output_transfer=None))
    assert distance(kept[0][0], kept[-1][0]) == 0


def test_post_gradients_behind_a_flat_transfer() -> None:
    """A compiled graph gives ∂L/∂a, from which ∂L/∂y is not known where ReLU is flat."""

    class Relu(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.relu(self.one(x)))

    found, opt = run(Relu(), whole(), "pocoprop-s")
    expected, plainly = run(Relu(), lambda model: model, "pocoprop-s")
    assert "compiled: ∂L/∂y counts as zero where the transfer is flat" in opt.summary()
    assert "compiled" not in plainly.summary()
    assert distance(found, expected) < 0.02 * distance(expected, weights(Relu()))
    torch.compiler.reset()
    backprop = {"variant": "pocoprop-s", "solver": "sgd", "local_steps": 1}
    one, other = (run(Relu(), how, **backprop)[0] for how in (whole(), lambda model: model))
    assert_close(one, other, 1e-12)


strictly = pytest.mark.skipif(VERSION < (2, 11), reason="not where the model itself has hooks")


@pytest.mark.parametrize("strict", [pytest.param(True, marks=strictly), False])
def test_an_exported_model_has_nothing_of_ours(strict: bool) -> None:
    model = network()
    opt = loco(model)
    exported = torch.export.export(model, (data()[0],), strict=strict)
    assert "locoprop" not in str(exported.graph)
    plain(model, *data())
    opt.step()


# Graphs that break, or are several


class Broken(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.one(x))
        torch._dynamo.graph_break()
        return torch.relu(self.two(h))


class BrokenBefore(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        torch._dynamo.graph_break()
        return self.two(torch.tanh(h))


def test_a_break_behind_a_transfer_hides_only_the_end() -> None:
    """Transfers are found; only that the last layer is the output is not, which changes nothing."""
    found, opt = run(Broken(), lambda m: torch.compile(m, backend="aot_eager"))
    expected, _ = run(Broken(), lambda m: m, output_transfer=None)
    assert_close(found, expected, 1e-11)
    assert "tanh" in opt.summary()


def test_a_break_before_a_transfer_is_told() -> None:
    def compiled(model: nn.Module) -> Any:
        return torch.compile(model, backend="aot_eager")

    _, opt = run(BrokenBefore(), compiled)
    assert opt.summary().count("compiled apart from what follows it") == 2
    assert variants_of(opt) == ["locoprop-s", "locoprop-s"]
    torch.compiler.reset()
    named = {"one": "tanh", "two": "sigmoid"}
    found, _ = run(BrokenBefore(), compiled, transfers=named)
    assert_close(found, run(BrokenBefore(), lambda m: m)[0], 1e-11)


def test_an_end_that_cannot_be_searched_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyTorch's private callback, the last layer has no transfer, and a note says so."""
    monkeypatch.delattr(torch._dynamo.output_graph.OutputGraph, "add_graph_finalizer")
    _, opt = run(Net(), whole(), output_transfer=None)
    assert variants_of(opt) == ["locoprop-m", "locoprop-s"]
    assert "compiled apart from what follows it" in opt.summary()


def test_a_compiled_body_under_an_eager_head() -> None:
    def body(model: nn.Module) -> Any:
        compiled = torch.compile(model[:4], backend="aot_eager", fullgraph=True)
        return lambda x: model[4](compiled(x))

    found, opt = run(network(), body, transfers={"4": "sigmoid"})
    assert_close(found, train(), 1e-11)
    assert variants_of(opt) == ["locoprop-m"] * 3


class Block(nn.Module):
    """Two layers; the second one with or without a transfer."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8).double(), nn.Linear(8, 6).double()
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.down(torch.tanh(self.up(x))))


def blocks(end: Callable[[Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(end), Block(end), nn.Linear(6, 3).double())


def each_block(model: Any) -> Any:
    for block in model[:2]:
        block.compile(backend="aot_eager")
    return model


def parts_by_hand(model: Any) -> Any:
    """Compile all parts; the model itself is not called."""
    parts = [torch.compile(part, backend="aot_eager") for part in model]
    return lambda x: parts[2](parts[1](parts[0](x)))


@pytest.mark.parametrize("compiled", [each_block, parts_by_hand])
@pytest.mark.parametrize("served", ["0.*", "1.*"])
def test_layers_served_in_one_part_of_several(
    served: str, compiled: Callable[[nn.Module], Any]
) -> None:
    """Layers that are not in ``layers=`` still count as layers after them."""
    options: dict[str, Any] = {
        "layers": [served],
        "fallback": lambda p: torch.optim.SGD(p, lr=0.01),
        "output_transfer": "softmax",
    }
    found, opt = run(blocks(torch.tanh), compiled, **options)
    expected, plainly = run(blocks(torch.tanh), lambda model: model, **options)
    assert_close(found, expected, 1e-11)
    assert opt.summary() == plainly.summary()
    torch.compiler.reset()
    _, opt = run(blocks(lambda a: a), compiled, **options)
    assert [layer.transfer and layer.transfer.name for layer in opt._layers] == ["tanh", None]
    assert not opt._layers[1].is_output
    assert "compiled apart from what follows it" in opt.summary()


@pytest.mark.parametrize("end", [torch.relu, lambda a: a])
def test_a_compiled_body_under_a_head_that_falls_back(end: Callable[[Tensor], Tensor]) -> None:
    def body(model: Any) -> Any:
        compiled = torch.compile(model["body"], backend="aot_eager", fullgraph=True)
        return lambda x: model["head"](compiled(x))

    torch.manual_seed(0)
    head = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3).double())
    model = nn.ModuleDict({"body": Block(end), "head": head})
    options = {"fallback": lambda p: torch.optim.SGD(p, lr=0.01), "output_transfer": "softmax"}
    _, opt = run(model, body, **options)
    found = opt._layers[1].transfer
    assert (found and found.name) == ("relu" if end is torch.relu else None)
    assert ("compiled apart from what follows it" in opt.summary()) == (found is None)


@recent
def test_the_last_of_several_parts_is_the_output() -> None:
    def all_parts(model: Any) -> Any:
        model[2].compile(backend="aot_eager")
        return each_block(model)

    results = [run(blocks(torch.tanh), how) for how in (all_parts, lambda model: model)]
    assert_close(results[0][0], results[1][0], 1e-11)
    assert [layer.is_output for layer in results[0][1]._layers] == [False] * 4 + [True]


# Other loops, compiled


@each_variant
def test_accumulation_and_other_batch_sizes(variant: str) -> None:
    """A new shape makes a new compiled graph; the rows of both are used."""

    def in_parts(model: nn.Module, x: Tensor, y: Tensor) -> None:
        for x_part, y_part in zip(x.split([5, 3]), y.split([5, 3]), strict=True):
            (cross_entropy(model(x_part), y_part) * len(x_part) / len(x)).backward()

    model = network()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    opt = loco(model, variant)
    for seed in range(STEPS):
        in_parts(compiled, *data(seed=seed))
        opt.step()
        opt.zero_grad()
    assert_close(weights(model), train(variant), 1e-11)


@pytest.mark.parametrize("variant", ["locoprop-m", "pocoprop-s"])
def test_two_backward_passes_through_one_call(variant: str) -> None:
    """Two calls on the same rows count twice; two passes through one call count once."""

    def twice(model: nn.Module, x: Tensor, y: Tensor) -> None:
        out = model(x)
        (0.3 * cross_entropy(out, y)).backward(retain_graph=True)
        (0.7 * cross_entropy(out, y)).backward()

    def two_calls(model: nn.Module, x: Tensor, y: Tensor) -> None:
        for share in (0.3, 0.7):
            (share * cross_entropy(model(x), y)).backward()

    for backward in (twice, two_calls):
        model = network()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        opt = loco(model, variant)
        for seed in range(STEPS):
            backward(compiled, *data(seed=seed))
            opt.step()
            opt.zero_grad()
        assert_close(weights(model), train(variant, backward=backward), 1e-11)


def test_evaluation_and_no_grad() -> None:
    model = network()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        compiled(data()[0])
    opt = loco(model)
    for seed in range(STEPS):
        with torch.no_grad():
            compiled(data(seed=9)[0])
        cross_entropy(compiled(data(seed=8)[0]), data(seed=8)[1])
        plain(compiled, *data(seed=seed))
        opt.step()
        opt.zero_grad()
    assert_close(weights(model), train(), 1e-11)


@recent
def test_freezing() -> None:
    results = []
    for compiled in (True, False):
        model = network()
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        model[2].requires_grad_(False)
        opt = loco(model)
        for seed in range(4):
            model[2].requires_grad_(seed >= 2)
            plain(call, *data(seed=seed))
            opt.step()
            opt.zero_grad()
        results.append(weights(model))
    assert_close(*results, 1e-11)


@pytest.mark.parametrize("variant", ["locoprop-m", "pocoprop-s", "spectral", "general"])
def test_autocast_and_a_grad_scaler(variant: str) -> None:
    results = []
    for compiled in (True, False):
        model = network().float()
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        opt = loco(model, variant)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for seed in range(STEPS):
            x, y = (t.float() for t in data(seed=seed))
            with torch.autocast("cpu", torch.float16):
                loss = cross_entropy(call(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        results.append(weights(model))
    assert distance(*results) < 1e-3 * distance(results[1], weights(network().float()))


def test_checkpointing() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.utils.checkpoint.checkpoint(self.net[:4], x, use_reentrant=False)
            return self.net[4](hidden)

    found, opt = run(Checkpointed(), whole())
    assert_close(found, train(), 1e-11)
    assert variants_of(opt) == ["locoprop-m"] * 3


def test_labels_are_drawn_by_hooks_that_break_the_graph() -> None:
    def compiled(model: nn.Module) -> Any:
        return torch.compile(model, backend="aot_eager")

    for options in ({"variant": "natural-s", "lr": 1e-4}, {"regularizer": "fisher", "lr": 1e-3}):
        named = {"transfers": {"0": "tanh", "2": "tanh"}, **options}
        found, opt = run(network(), compiled, **named)
        assert_close(found, train(**named), 1e-9)
        assert opt.summary().count("labels are drawn by hooks, which break the graph") == 3
        torch.compiler.reset()


# Who listens


@pytest.mark.parametrize("backend", BACKENDS)
def test_call_sites_of_deleted_models_are_forgotten(backend: str) -> None:
    gc.collect()
    before = len(torch_compile._call_sites)
    for _ in range(3):
        model = network()
        opt = loco(model)
        loss = torch.compile(model, backend=backend)(data()[0]).sum()
        loss.backward(retain_graph=True)
        assert all(layer.calls for layer in opt._layers)
        assert len(torch_compile._call_sites) == before + 3
        torch.compiler.reset()
        del model, opt
        gc.collect()
        assert len(torch_compile._call_sites) == before
        loss.backward()  # of a model that is gone: nothing to record


def test_two_optimizers_share_a_compiled_model() -> None:
    model = network()
    idle, opt = loco(model, "locoprop-s"), loco(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed in range(STEPS):
        plain(compiled, *data(seed=seed))
        assert [len(layer.calls) for layer in idle._layers] == [1, 1, 1]
        assert [len(layer.calls) for layer in opt._layers] == [1, 1, 1]
        opt.step()
        opt.zero_grad()
    assert_close(weights(model), train(), 1e-11)


def test_a_new_optimizer_on_a_model_compiled_for_an_old_one() -> None:
    model = network()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    run_before = loco(model)
    plain(compiled, *data())
    model.zero_grad()
    del run_before
    gc.collect()
    opt = loco(model)
    for seed in range(STEPS):
        plain(compiled, *data(seed=seed))
        opt.step()
        opt.zero_grad()
    assert_close(weights(model), train(), 1e-11)


def test_a_compiled_copy_is_not_recorded() -> None:
    model = network()
    opt = loco(model)
    twin = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    plain(twin, *data())
    assert all(not layer.calls for layer in opt._layers)


def test_an_optimizer_made_after_the_first_compiled_pass_is_told() -> None:
    model = network()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain(compiled, *data())
    model.zero_grad()
    opt = loco(model)
    plain(compiled, *data())
    with pytest.raises(RuntimeError, match=r"torch\.compiler\.reset\(\)"):
        opt.step()
    opt.zero_grad()
    torch.compiler.reset()
    for seed in range(STEPS):
        plain(compiled, *data(seed=seed))
        opt.step()
        opt.zero_grad()
    assert_close(weights(model), train(), 1e-11)


def test_another_model_of_the_class_is_told_apart_by_guards_on_hooks() -> None:
    """Without these guards, the default, the compiler uses the graph without hooks for both."""

    def both() -> list[Tensor]:
        torch.compiler.reset()
        model, other = Net(), Net()
        opt = loco(model)
        compiled = [torch.compile(each, backend="aot_eager") for each in (model, other)]
        for seed in range(STEPS):
            for call in compiled:
                plain(call, *data(seed=seed))
            opt.step()
            opt.zero_grad()
        return weights(model)

    with pytest.raises(RuntimeError, match=r"skip_nnmodule_hook_guards = False"):
        both()
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        assert_close(both(), run(Net(), lambda model: model)[0], 1e-11)


def test_a_backward_pass_that_is_compiled_too_is_told() -> None:
    """Compiled autograd runs no hooks, so the step raises an error."""
    model = network()
    opt = loco(model)

    @torch.compile(backend="aot_eager")
    def backward(x: Tensor, y: Tensor) -> None:
        plain(model, x, y)

    with torch._dynamo.config.patch(compiled_autograd=True):
        backward(*data())
    with pytest.raises(RuntimeError, match="No layer recorded a backward pass"):
        opt.step()


@pytest.mark.parametrize("variant", ["general", "locoprop-m"])
def test_a_compiled_step_is_the_eager_step(variant: str) -> None:
    results = []
    for compiled in (False, True):
        model, counter = make(), CompileCounterWithBackend("eager")
        opt = loco(model, variant)
        step = torch.compile(opt.step, backend=counter) if compiled else opt.step
        for seed in range(STEPS):
            plain(model, *data(seed=seed))
            step()
            opt.zero_grad()
        assert counter.frame_count == 0
        results.append(weights(model))
    assert_close(*results, 0.0)


def test_the_closure_of_a_step_may_be_compiled() -> None:
    results = []
    for compiled in (False, True):
        model, counter = make(), CompileCounterWithBackend("aot_eager")
        opt = loco(model)
        call = torch.compile(model, backend=counter, fullgraph=True) if compiled else model
        for seed in range(STEPS):
            opt.zero_grad()
            opt.step(partial(plain, call, *data(seed=seed)))
        assert counter.frame_count == compiled
        results.append(weights(model))
    assert_close(*results)


def test_a_whole_step_in_a_compiled_function_is_told() -> None:
    model = network()
    opt = loco(model)

    @torch.compile(backend="aot_eager")
    def training_step(x: Tensor, y: Tensor) -> None:
        plain(model, x, y)
        opt.step()

    with pytest.raises(RuntimeError, match="The backward pass ran inside a compiled function"):
        training_step(*data())
