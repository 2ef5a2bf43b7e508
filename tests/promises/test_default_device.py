"""Steps do the same where ``torch.set_default_device`` names another device than the model's."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import FIRST_ORDER, VARIANTS
from torch import Tensor, nn

import torch_locoprop
from torch_locoprop import LocoProp, TrainingStep, baselines
from torch_locoprop.solvers import Exact

criterion = nn.BCEWithLogitsLoss()
X, Y = torch.rand(12, 1, 4, 4), torch.rand(12, 3)

Make = Callable[[nn.Module], Any]
sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)  # PyTorch's AdamW: not in all versions
loco = partial(LocoProp, loss_fn=criterion, fallback=sgd)
iterations = partial(loco, variant="locoprop-m")
OPTIMIZERS: dict[str, Make] = {
    "default": loco,
    "spectral": partial(loco, preset="spectral"),
    "diagonal": partial(loco, gram="diagonal"),
    **{name: partial(loco, variant=name) for name in VARIANTS},
    **{name: partial(iterations, solver=name) for name in FIRST_ORDER},
    "exact": partial(loco, solver="exact"),
    "exact-average": partial(
        loco, variant="locoprop-s", solver=Exact(decay=0.9, every=2, damping=0.1)
    ),
    "preconditioned": partial(loco, solver="preconditioned"),
    "averaged": partial(loco, solver="preconditioned-averaged"),
    "gate": partial(iterations, gate=True),
    "cap": partial(iterations, cap=0.01),
    "cap by backprop": partial(iterations, cap=0.5, cap_by="backprop"),
    "l1": partial(iterations, regularizer="l1", gate=True),
    "l2": partial(iterations, regularizer="l2"),
    "fisher": partial(iterations, regularizer="fisher", diagnose=True),
    "max_rows": partial(iterations, max_rows=30),
    "mean": partial(iterations, local_reduction="mean"),
    "diagnose": partial(iterations, diagnose=True),
    "outer": partial(iterations, apply="gradient", outer=sgd, gate=True, cap=0.1),
    "kfac": partial(baselines.KFAC, loss_fn=criterion, clip=0.1, fallback=sgd),
    "shampoo": lambda model: baselines.Shampoo(model.parameters()),
    "baseline": lambda model: baselines.Adam(model.parameters()),
}


@contextmanager
def default_device(device: str | None) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5), nn.LayerNorm(5), nn.Tanh(),
        nn.Linear(5, 5), nn.Sigmoid(), nn.Linear(5, 3),
    )  # fmt: skip


def in_a_loop(model: nn.Module, opt: Any, make: Make) -> Any:
    """Train, go on from a state dict, and go on with a copy."""
    for step in range(6):
        criterion(model(X), Y).backward()
        opt.step()
        opt.zero_grad()
        if step == 2:
            state = copy.deepcopy(opt.state_dict())
            opt = make(model)
            opt.load_state_dict(state)
        if step == 3:
            model, opt = copy.deepcopy((model, opt))
    return model, opt


def in_one_call(model: nn.Module, opt: Any, make: Make) -> Any:
    step = TrainingStep(model, criterion, opt)
    for _ in range(4):
        step(X, Y)
    return model, opt


def compiled(model: nn.Module, opt: Any, make: Make) -> Any:
    torch._dynamo.reset()
    return in_a_loop(torch.compile(model, backend="aot_eager"), opt, lambda model: opt)


def found(model: nn.Module, opt: Any) -> list[Tensor]:
    """Return the weights, and what was measured, except the time."""
    weights = [p.detach().clone() for p in model.parameters()]
    if not isinstance(opt, LocoProp) or opt._measurements is None:
        return weights
    measured = [(row.loss_before, row.loss_after, row.displacement) for row in opt.diagnostics()]
    return [*weights, torch.tensor(measured, device="cpu")]


Train = Callable[[nn.Module, Any, Make], Any]


def check(make: Make, train: Train) -> None:
    results = []
    for device in (None, "meta"):
        model = network()
        with default_device(device):
            results.append(found(*train(model, make(model), make)))
    for one, other in zip(*results, strict=True):
        assert not one.isnan().any()
        assert torch.equal(one, other)


@pytest.mark.parametrize("train", [in_a_loop, in_one_call])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_default_device_does_not_matter(make: Make, train: Train) -> None:
    check(make, train)


def test_the_default_device_does_not_matter_to_compiled_models() -> None:
    check(iterations, compiled)


FACTORIES = {
    *("tensor", "as_tensor", "zeros", "ones", "full", "empty", "arange", "linspace", "eye"),
    *("rand", "randn", "randint", "randperm", "scalar_tensor", "empty_strided"),
}


def test_every_new_tensor_has_a_device() -> None:
    root = Path(torch_locoprop.__file__).parent
    for path in root.rglob("*.py"):
        if path.is_relative_to(root / "study"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            called = ast.unparse(node.func)
            if called.startswith("torch.") and called.removeprefix("torch.") in FACTORIES:
                given = {keyword.arg for keyword in node.keywords}
                assert given & {"device", None}, f"{path.name}:{node.lineno}: {called}"
