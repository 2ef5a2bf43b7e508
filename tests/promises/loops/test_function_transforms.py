"""Layers that are called inside ``torch.func`` transforms, where rows cannot be recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_close, batch, network, weights
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vmap

from torch_locoprop import LocoProp

LR, GAMMA = 0.01, 2.0
NOTE = "called inside a transform of torch.func or forward_ad: it takes BackProp steps"


def by_forward_ad(model: nn.Module, x: Tensor) -> Tensor:
    """Return a derivative along a direction, whose products have rows of their own."""
    with forward_ad.dual_level():
        out = model(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(out).tangent  # type: ignore[no-any-return]


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "vmap": lambda model, x: vmap(model)(x),
    "jacrev": lambda model, x: vmap(jacrev(model))(x),
    "jacfwd": lambda model, x: vmap(jacfwd(model))(x),
    "hessian": lambda model, x: vmap(hessian(lambda z: model(z).sum()))(x),
    "forward_ad": by_forward_ad,
    "grad": lambda model, x: grad(lambda z: model(z).sum())(x),
    "parameters": lambda model, x: grad(
        lambda own: functional_call(model, own, (x,)).square().sum()
    )(dict(model.named_parameters()))["0.weight"],
}
each = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]


def make(**options: Any) -> tuple[nn.Sequential, LocoProp]:
    model = network()
    own = {"variant": "locoprop-s", "solver": "sgd", "momentum": 0.0, "local_steps": 5}
    return model, LocoProp(model, lr=LR, gamma=GAMMA, **{**own, **options})


@each
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("zero_late", [True, False])
def test_layers_take_backprop_steps(
    transform: Callable[[nn.Module, Tensor], Tensor], beside: bool, zero_late: bool
) -> None:
    model, opt = make()
    loss = transform(model, batch(7, 6)).square().sum()
    if beside:
        loss = loss + model(batch(3, 6, seed=2)).square().sum()
    if zero_late:
        opt.zero_grad()
    loss.backward()
    moved = {
        name: p.detach() - LR * GAMMA * p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    with pytest.warns(UserWarning, match="inside a transform of torch.func"):
        opt.step()
    for name, p in model.named_parameters():
        if name in moved:
            assert_close([p.detach()], [moved[name]], 1e-12)
    assert opt.summary().count(NOTE) == 3


@each
def test_transforms_without_a_gradient_change_nothing(
    transform: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    """Such as measurements under ``no_grad``, or with detached parameters."""
    model, opt = make()
    other, plain = make()
    for seed in range(2):
        with torch.no_grad():
            transform(model, batch(7, 6))
        for each_model, each_opt in ((model, opt), (other, plain)):
            each_opt.zero_grad()
            each_model(batch(5, 6, seed=seed)).square().sum().backward()
            each_opt.step()
    assert_close(weights(model), weights(other), 0.0)
    assert NOTE not in opt.summary()


def test_a_transform_inside_a_compiled_function_is_told() -> None:
    model, opt = make()

    def loss(x: Tensor) -> Tensor:
        return vmap(jacrev(model))(x).square().sum() + model(x).square().sum()

    torch.compile(loss, backend="eager")(batch(5, 6)).backward()
    plain = [p.detach() - LR * GAMMA * p.grad for p in model.parameters()]
    with pytest.warns(UserWarning, match="inside a transform of torch.func"):
        opt.step()
    assert_close(weights(model), plain, 1e-12)
    assert opt.summary().count(NOTE) == 3
