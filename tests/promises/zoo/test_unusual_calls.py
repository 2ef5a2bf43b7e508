"""Calls that are not plain: the recorded rows explain the gradient, or the layer takes BackProp steps.

For every layer with a local problem, ``gᵀX`` of its recorded rows must be the gradient that autograd
has computed. A layer whose rows cannot be recorded has to move by ``−lr · gamma · gradient`` and say
so. No formula of the local problem is needed: a row that is missing, or is another one, shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import assert_close, batch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from torch_locoprop import LocoProp
from torch_locoprop.recording import row_gradients

LR, GAMMA = 0.01, 2.0
Change = Callable[[nn.Sequential], object]
Loss = Callable[[nn.Sequential, Tensor], Tensor]


def layers() -> nn.Sequential:
    modules = (nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    return nn.Sequential(*modules).double()


def convolutions() -> nn.Sequential:
    middle = nn.Conv2d(3, 4, 3, padding=1)
    modules = (nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), middle, nn.Tanh(), nn.Conv2d(4, 2, 1))
    return nn.Sequential(*modules).double()


def squares(model: nn.Sequential, x: Tensor) -> Tensor:
    return model(x).square().sum()


def check(
    make: Callable[[], nn.Sequential],
    x: Tensor,
    note: str = "",
    noted: tuple[int, ...] = (),
    change: Change | None = None,
    at: int = 1,
    loss: Loss = squares,
    variant: str = "pocoprop-m",
) -> None:
    """Train two steps, and check the rows and the steps of all layers.

    Args:
        make: makes the model.
        x: its inputs.
        note: what the summary says of layers that take BackProp steps.
        noted: which layers do.
        change: is done to the model: to begin with, or before the second step.
        at: 0 or 1 of these.
        loss: the loss of model and inputs.
        variant: of LocoProp.
    """
    torch.manual_seed(0)
    model = make()
    if change is not None and at == 0:
        change(model)
    opt = LocoProp(
        model, lr=LR, gamma=GAMMA, local_steps=5, solver="sgd", momentum=0.0, variant=variant,
        output_transfer="linear", fallback=lambda ps: torch.optim.SGD(ps, lr=LR * GAMMA),
    )  # fmt: skip
    for step in range(2):
        if change is not None and at == step == 1:
            change(model)
        for layer in opt._layers:
            layer.needs |= {"g"}
            layer.use_of_rows = None  # keep the rows
        opt.zero_grad()
        loss(model, x).backward()
        for layer in opt._layers:
            if layer.calls and not layer.obstacle:
                assert_explained(layer)
        plain = {n: p.detach() - LR * GAMMA * p.grad for n, p in model.named_parameters()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opt.step()
    rows = {line.split()[0]: line for line in opt.summary().splitlines() if line}
    for number in (0, 2, 4):
        name = f"{number}.weight"
        moved = model.get_parameter(name).detach()
        if number in noted:
            assert_close([moved], [plain[name]], 1e-12)
        else:
            assert not torch.allclose(moved, plain[name], rtol=1e-6)
        assert (note in rows[str(number)]) == (number in noted or not note)


def assert_explained(layer: Any) -> None:
    """Assert that the recorded rows and their gradients give the layer's gradient."""
    x, g = layer.inputs(), row_gradients.gradients(layer)
    gradients = layer.kind.linear_map.weight_grad(x, g)
    for name, p in layer.tensors.items():
        found = layer.kind.restored(name, gradients[name], p)
        torch.testing.assert_close(found, p.grad, rtol=1e-9, atol=1e-12, msg=f"{layer.name}.{name}")


# ---- functional_call -------------------------------------------------------------------------------


def with_own_weights(model: nn.Sequential, x: Tensor) -> Tensor:
    return (
        squares(model, x[:3])
        + functional_call(model, dict(model.named_parameters()), (x,)).square().sum()
    )


def with_other_weights(model: nn.Sequential, x: Tensor) -> Tensor:
    others = {n: (0.9 * p).detach().requires_grad_() for n, p in model.named_parameters()}
    return squares(model, x) + functional_call(model, others, (x,)).square().sum()


def with_fast_weights(model: nn.Sequential, x: Tensor) -> Tensor:
    """Return the loss after one step of SGD, as in meta-learning."""
    own = dict(model.named_parameters())
    gradients = torch.autograd.grad(squares(model, x), list(own.values()), create_graph=True)
    fast = {n: p - 0.01 * g for (n, p), g in zip(own.items(), gradients, strict=True)}
    return functional_call(model, fast, (x,)).square().sum()


def beside_fast_weights(model: nn.Sequential, x: Tensor) -> Tensor:
    computed = {n: 0.9 * p for n, p in model.named_parameters()}
    return squares(model, x[:3]) + functional_call(model, computed, (x,)).square().sum()


@pytest.mark.parametrize("loss", [with_own_weights, with_other_weights])
def test_functional_call_with_weights_that_are_not_computed(loss: Loss) -> None:
    check(layers, batch(7, 6), loss=loss)


@pytest.mark.parametrize("loss", [with_fast_weights, beside_fast_weights])
def test_functional_call_with_computed_weights(loss: Loss) -> None:
    """Rows of a call with W − η∇L explain no part of the gradient of W by themselves."""
    check(layers, batch(7, 6), "called with weights computed from its own", (0, 2, 4), loss=loss)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_functional_call_with_computed_weights_in_a_compiled_function() -> None:
    compiled = torch.compile(beside_fast_weights, backend="eager")
    check(layers, batch(7, 6), "called with weights computed", (0, 2, 4), loss=compiled)


# ---- hooks and subclasses --------------------------------------------------------------------------


class Around(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x**2)  # type: ignore[no-any-return]


class Instead(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x**3, self.weight, self.bias)


def change_class(cls: type[nn.Module]) -> Change:
    return lambda model: setattr(model[2], "__class__", cls)


def scale_gradient(module: nn.Module, args: object, out: Tensor) -> None:
    out.register_hook(lambda g: 3 * g)


HOOKS: dict[str, Change] = {
    "inputs": lambda m: m[2].register_forward_pre_hook(lambda _, args: (args[0] ** 3,)),
    "inputs in place": lambda m: m[2].register_forward_pre_hook(
        lambda _, a: (a[0].mul(2).add_(1),)
    ),
    "output": lambda m: m[2].register_forward_hook(lambda _, args, out: 2 * out),
    "output in place": lambda m: m[2].register_forward_hook(lambda _, args, out: out.mul_(2)),
    "gradient": lambda m: m[2].register_forward_hook(scale_gradient),
    "gradient of outputs": lambda m: m[2].register_full_backward_pre_hook(lambda _, g: (3 * g[0],)),
    "gradient of inputs": lambda m: m[2].register_full_backward_hook(lambda _, g, __: (3 * g[0],)),
    "around the call": change_class(Around),
}


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("variant", ["pocoprop-m", "locoprop-s"])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_change_tensors(name: str, variant: str, at: int) -> None:
    check(layers, batch(7, 6), change=HOOKS[name], at=at, variant=variant)


@pytest.mark.parametrize("at", [0, 1])
def test_a_call_that_does_not_run_the_forward(at: int) -> None:
    check(layers, batch(7, 6), "its forward is not called", (2,), change_class(Instead), at)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_block_whose_hooks_change_tensors(reentrant: bool) -> None:
    def loss(model: nn.Sequential, x: Tensor) -> Tensor:
        block = checkpoint(model[:4], x.requires_grad_(), use_reentrant=reentrant)
        return model[4](block).square().sum()  # type: ignore[no-any-return]

    check(layers, batch(7, 6), change=HOOKS["inputs"], loss=loss)


# ---- what a convolution has read of its module -----------------------------------------------------


class OfCubes(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x**3, weight, bias)


GEOMETRY: dict[str, Any] = {
    "stride": (2, 2),
    "padding": (0, 0),
    "dilation": (2, 2),
    "padding_mode": "circular",
}


@pytest.mark.parametrize("variant", ["pocoprop-m", "locoprop-s"])
@pytest.mark.parametrize("name", GEOMETRY)
def test_a_geometry_that_changes_later(name: str, variant: str) -> None:
    change = lambda model: setattr(model[2], name, GEOMETRY[name])  # noqa: E731
    note = "its geometry was changed after the optimizer was made"
    check(convolutions, batch(3, 2, 6, 6), note, (2,), change, variant=variant)


def test_a_convolution_of_another_class_later() -> None:
    note = "its forward was replaced after the optimizer was made"
    check(convolutions, batch(3, 2, 6, 6), note, (2,), change_class(OfCubes))


def test_every_attribute_of_a_convolution_that_was_read_is_watched() -> None:
    """A kind that reads an attribute which may change later has it in ``geometry``."""
    read: set[str] = set()

    class Watched(nn.Conv2d):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    from torch_locoprop.layers import layer_kind

    module = Watched(2, 2, 3, padding=1)
    read.clear()
    kind = layer_kind(module)
    derived = {"_reversed_padding_repeated_twice"}  # of the padding
    fixed = {"in_channels", "out_channels", "kernel_size", "transposed", "__class__"}
    assert read - derived - fixed == set(kind.geometry)  # type: ignore[union-attr]
