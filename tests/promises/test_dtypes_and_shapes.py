"""Half precision, changes of dtype, empty batches, and numbers from other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from torch import Tensor, nn

from torch_locoprop import Guards, LocoProp, Variant
from torch_locoprop.paper.closed_form import implicit_step, sylvester
from torch_locoprop.paper.losses import Squared
from torch_locoprop.paper.targets import NaturalGradient
from torch_locoprop.solvers import Exact


def step(model: nn.Module, opt: LocoProp, x: Tensor) -> None:
    cross_entropy(model(x), x[:, :3]).backward()
    opt.step()
    opt.zero_grad()


pytestmark = pytest.mark.filterwarnings("ignore:.* no effect with solver")

CASES: list[dict[str, Any]] = [
    *({"variant": v} for v in ("locoprop-s", "locoprop-m", "pocoprop-s", "natural-s")),
    *({"solver": s} for s in ("sgd", "adam", "exact", Exact(decay=0.9, every=2, damping=0.1))),
    {"variant": "locoprop-s", "solver": "exact"},
    {"solver": "preconditioned", "gamma": 10.0},
    {"solver": "preconditioned-averaged"},
    {"variant": "locoprop-s", "solver": Exact(decay=0.9)},
    {"regularizer": "fisher"},
    {"preset": "general"},
    {"preset": "spectral"},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parameters_of_any_precision(case: dict[str, Any], dtype: torch.dtype) -> None:
    """After a few steps the weights equal those of float64 to the dtype's precision."""
    if case.get("regularizer") == "fisher" and dtype == torch.float16:
        return  # an inverse Fisher matrix overflows float16: such steps are skipped and counted
    results = []
    for kind in (dtype, torch.float64):
        model = network().to(kind)
        opt = LocoProp(model, lr=1e-3, momentum=0.5, output_transfer="sigmoid", **case)
        before = weights(model)
        for seed in range(3):
            step(model, opt, batch(8, 6, seed=seed).to(kind))
        assert not any(opt.skipped_updates.values())
        assert not torch.equal(before[0], weights(model)[0])
        results.append(weights(model))
    if case.get("variant") != "natural-s" and case.get("regularizer") != "fisher":
        for one, other in zip(*results, strict=True):
            assert one.dtype == dtype
            tolerance = 60 * torch.finfo(dtype).eps
            torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="PyTorch before 2.10")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_another_precision_than_the_weights(case: dict[str, Any]) -> None:
    """``p.grad_dtype = torch.float32`` for weights in bfloat16."""
    results = []
    for grad_dtype in (None, torch.float32):
        model = network().bfloat16()
        for p in model.parameters():
            if grad_dtype is not None:
                p.grad_dtype = grad_dtype
        opt = LocoProp(model, lr=1e-3, momentum=0.5, output_transfer="sigmoid", **case)
        for seed in range(3):
            step(model, opt, batch(8, 6, seed=seed).bfloat16())
        results.append(weights(model))
    assert_close(*results, 1e-2)


LARGE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "general": lambda m: LocoProp(m),
    "spectral": lambda m: LocoProp(m, preset="spectral"),
    "blocks": lambda m: LocoProp(m, gram="block", block_size=4),
    "diagonal": lambda m: LocoProp(m, gram="diagonal"),
    "iterations": lambda m: LocoProp(
        m, variant="locoprop-s", solver="sgd", lr=2e-6, gamma=1e3, local_steps=5
    ),
    "exact": lambda m: LocoProp(m, variant="locoprop-s", solver="exact", lr=1e-4, gamma=100.0),
}


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("name", LARGE)
def test_more_rows_than_the_largest_float16(name: str, images: bool) -> None:
    """Sums over 65,504 rows and more overflow float16; XᵀX is computed in float32 for it."""
    x = torch.randn(70_000, 6, generator=torch.Generator().manual_seed(0)).half()
    moved = []
    for dtype in (torch.float16, torch.float64):
        model: nn.Module = network(sizes=(6, 5, 3)).half().to(dtype)
        given = x.to(dtype)
        if images:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv1d(6, 5, 1), nn.Tanh(), nn.Conv1d(5, 3, 1))
            model, given = model.half().to(dtype), given.view(70, 1000, 6).mT
        opt, before = LARGE[name](model), weights(model)
        for _ in range(2):
            (100 * model(given).square().mean()).backward()
            opt.step()
            opt.zero_grad()
        moved.append([a.double() - b.double() for a, b in zip(weights(model), before, strict=True)])
    for half, double in zip(*moved, strict=True):
        assert (half - double).norm() < 0.05 * double.norm()


def test_the_gate_judges_more_rows_than_the_largest_float16() -> None:
    model = network(sizes=(6, 3)).half()
    x = torch.randn(70_000, 6, generator=torch.Generator().manual_seed(0)).half()
    options = {"variant": "locoprop-s", "solver": "sgd", "gamma": 1.0, "local_steps": 5}
    counts = []
    for lr in (2e-6, 1e-3):  # far below and far above 2 over the largest eigenvalue
        opt = LocoProp(model, lr=lr, gate=True, **options)
        (100 * model(x).square().mean()).backward()
        opt.step()
        opt.zero_grad()
        counts.append(int(opt._layers[0].counts["gated"]))
    assert counts == [0, 1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_model_may_change_its_dtype_between_steps(case: dict[str, Any]) -> None:
    model = network()
    opt = LocoProp(model, lr=1e-3, momentum=0.5, output_transfer="sigmoid", **case)
    step(model, opt, batch(8, 6))
    model.float()
    step(model, opt, batch(8, 6, seed=2).float())
    assert all(w.dtype == torch.float32 and w.isfinite().all() for w in weights(model))
    assert not any(opt.skipped_updates.values())


@pytest.mark.parametrize("rows", [20, 100])
@pytest.mark.parametrize("eta", [1.0, 1e2, 1e4])
def test_exact_in_float32_is_exact_for_any_eta(eta: float, rows: int) -> None:
    x, g = batch(rows, 60), batch(5, 60, seed=2)
    h = batch(5, seed=3)
    for found, true in (
        (implicit_step(g.float(), x.float(), eta), implicit_step(g, x, eta)),
        (sylvester(g.float(), x.float(), eta, h.float()), sylvester(g, x, eta, h)),
    ):
        assert found.dtype == torch.float32
        assert (found.double() - true).norm() / true.norm() < 2e-3


def test_exact_m_does_not_mind_the_default_dtype() -> None:
    model = network().float()
    opt = LocoProp(model, lr=0.1, solver="exact", output_transfer="sigmoid")
    torch.set_default_dtype(torch.float64)
    try:
        step(model, opt, batch(8, 6).float())
    finally:
        torch.set_default_dtype(torch.float32)
    assert model[0].weight.dtype == torch.float32


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_empty_batch_moves_nothing(case: dict[str, Any]) -> None:
    model = network()
    opt = LocoProp(model, lr=1e-2, output_transfer="sigmoid", **{"momentum": 0.0, **case})
    before = weights(model)
    model(batch(0, 6)).sum().backward()
    opt.step()
    assert_close(weights(model), before, 0.0)
    assert not any(opt.skipped_updates.values())


EMPTY_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: network(), (6,)),
    "convolution": (lambda: convolutions(nn.Conv2d), (4, 6, 6)),
    "grouped": (lambda: convolutions(nn.Conv2d, groups=2), (4, 6, 6)),
    "transposed": (lambda: convolutions(nn.ConvTranspose2d, groups=2, stride=2), (4, 6, 6)),
    "padded": (lambda: convolutions(nn.Conv2d, padding=1, padding_mode="circular"), (4, 6, 6)),
}


def convolutions(kind: type[nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind(4, 4, 3, **options), nn.Tanh(), kind(4, 2, 3)).double()


@pytest.mark.parametrize(
    "case",
    [
        *({"variant": v} for v in ("locoprop-s", "locoprop-m", "pocoprop-m", "natural-s")),
        {"variant": "locoprop-s", "solver": "exact"},
        {"variant": "locoprop-m", "gate": True},
        {"variant": "locoprop-m", "max_rows": 3},
        {"variant": "locoprop-s", "max_rows": 3},
        {"variant": "locoprop-s", "max_rows": 64},
        {"variant": "locoprop-m", "local_reduction": "mean"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", EMPTY_MODELS)
@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0,), (0, 0)])
def test_calls_without_rows(case: dict[str, Any], name: str, sizes: tuple[int, ...]) -> None:
    """They change nothing: experts, proposals, or an empty micro-batch."""
    results = []
    for own in (sizes, tuple(size for size in sizes if size)):
        make, shape = EMPTY_MODELS[name]
        model = make()
        opt = LocoProp(model, lr=1e-3, momentum=0.0, output_transfer="linear", **case)
        before = weights(model)
        for step in range(2):
            opt.zero_grad()
            parts = [model(batch(size, *shape, seed=step)).square().sum() for size in own]
            if parts:
                sum(parts).backward()
                opt.step()
        assert not any(opt.skipped_updates.values())
        results.append(weights(model))
        assert torch.equal(before[0], weights(model)[0]) == (not any(own))
    # max_rows and the labels of natural-s are drawn for each call by its number.
    if "max_rows" not in case and case["variant"] != "natural-s":
        assert_close(*results, 1e-12)


WIDTH_ZERO = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")


@WIDTH_ZERO
@pytest.mark.parametrize("case", [*CASES, {"max_rows": 3}, {"guards": Guards(cap=1.0)}], ids=str)
@pytest.mark.parametrize("shape", [(9, 6), (2, 5, 6), (6,)])
def test_layers_of_width_zero(case: dict[str, Any], shape: tuple[int, ...]) -> None:
    """The bias of a layer without inputs is trained; a layer without outputs has nothing to train."""
    model = nn.Sequential(nn.Linear(6, 0), nn.Tanh(), nn.Linear(0, 3)).double()
    own = {} if "preset" in case else {"variant": "locoprop-m"}
    opt = LocoProp(model, **{**own, "lr": 1e-3, "output_transfer": "linear", **case})
    for seed in range(2):
        model(batch(*shape, seed=seed)).sum().backward()
        opt.step()
        opt.zero_grad()
    assert (model[2].bias < 0).all()  # its initial value is zero
    assert not any(opt.skipped_updates.values())


@WIDTH_ZERO
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_with_nothing_to_train(case: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(6, 0, bias=False), nn.Linear(0, 3, bias=False), nn.Linear(3, 2))
    own = {} if "preset" in case else {"variant": "locoprop-m"}
    opt = LocoProp(model.double(), **{**own, "lr": 1e-3, "output_transfer": "linear", **case})
    before = weights(model)
    for seed in range(2):
        model(batch(9, 6, seed=seed)).sum().backward()
        opt.step()
        opt.zero_grad()
    assert not torch.equal(before[-1], weights(model)[-1])
    assert not any(opt.skipped_updates.values())


@WIDTH_ZERO
@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m"])
def test_the_local_problem_of_a_layer_without_inputs(variant: str) -> None:
    """All rows are equal: five local iterations equal those of a vector."""
    model = nn.Sequential(nn.Linear(0, 3), nn.Tanh()).double()
    b = batch(3)
    with torch.no_grad():
        model[0].bias.copy_(b)
    opt = LocoProp(
        model, variant=variant, solver="sgd", lr=0.01, gamma=2.0, local_steps=5,
        momentum=0.0, local_decay="constant",
    )  # fmt: skip
    model(batch(9, 0)).square().sum().backward()
    opt.step()
    f = torch.tanh if variant == "locoprop-m" else nn.Identity()
    g = 2 * b.tanh() * (1 - b.tanh() ** 2)
    target = f(b) - 2.0 * g
    for _ in range(5):
        b = b - 0.01 * 9 * (f(b) - target)
    assert_close([model[0].bias.detach()], [b])


def test_a_head_of_zeros_with_natural_targets() -> None:
    """No gradient flows through it: hidden layers have a zero gradient and Fisher matrix."""
    model = network()
    nn.init.zeros_(model[4].weight)
    opt = LocoProp(model, lr=1e-2, variant="natural-s", output_transfer="sigmoid")
    before = weights(model)
    step(model, opt, batch(8, 6))
    assert not any(opt.skipped_updates.values())
    assert_close(weights(model)[:4], before[:4], 0.0)
    assert not torch.equal(weights(model)[4], before[4])


def test_a_bias_may_be_frozen_under_a_running_average() -> None:
    model = network()
    opt = LocoProp(model, lr=1e-2, solver=Exact(decay=0.9, every=3), output_transfer="sigmoid")
    step(model, opt, batch(8, 6))
    model[0].bias.requires_grad_(False)
    step(model, opt, batch(8, 6))
    model[0].bias.requires_grad_(True)
    before = weights(model)
    step(model, opt, batch(8, 6))
    assert not torch.equal(before[1], weights(model)[1])


def test_a_layer_first_used_between_two_samplings_takes_a_backprop_step() -> None:
    torch.manual_seed(0)

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = (nn.Linear(4, 4).double() for _ in range(3))
            self.skip = True

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.one(x))
            return self.three(h if self.skip else torch.tanh(self.two(h)))

    model = Skipping()
    variant = Variant("natural", NaturalGradient(every=10), Squared())
    opt = LocoProp(model, lr=1e-2, gamma=1.0, solver="sgd", variant=variant, loss_fn=nn.MSELoss())
    x = batch(8, 4)
    nn.functional.mse_loss(model(x), x).backward()
    opt.step()
    opt.zero_grad()
    model.skip = False
    before = model.two.weight.detach().clone()
    nn.functional.mse_loss(model(x), x).backward()
    expected = before - 1e-2 * model.two.weight.grad
    opt.step()
    assert_close([model.two.weight.detach()], [expected])
    opt.zero_grad()
    nn.functional.mse_loss(model(x), x).backward()  # now labels are drawn for it
    opt.step()
    assert "fisher" in opt.state[model.two.weight]


def test_numbers_from_numpy() -> None:
    model, other = network(), network()
    opt = LocoProp(model, lr=np.float32(1e-3), local_steps=np.int64(3), output_transfer="sigmoid")
    plain = LocoProp(other, lr=1e-3, local_steps=3, output_transfer="sigmoid")
    step(model, opt, batch(8, 6))
    step(other, plain, batch(8, 6))
    assert_close(weights(model), weights(other), 1e-7)
