"""The spectral step, against a second implementation that knows rows, gradients and formulas only."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import batch, cross_entropy, network, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.paper.spectral import equal_rows, polar
from torch_locoprop.solvers import SOLVERS, Spectral, spectral

STEPS = 33  # with renewals in the first ten steps and in steps 10, 20 and 30


class Oracle:
    """The step of one matrix ``[W b]``, in singular vectors and eigenvectors."""

    def __init__(self, solver: Spectral, lr: float, mu: float, rho: float) -> None:
        self.solver, self.lr, self.mu, self.rho = solver, lr, mu, rho
        self.t = 0
        self.gram = self.inverse = self.rows = torch.zeros(())
        self.gradients: list[Tensor] = []

    def move(self, gradient: Tensor, rows: Tensor) -> Tensor:
        """Return the displacement for the gradient of ``[W b]`` and the rows ``[X 1]``."""
        solver, mu = self.solver, self.mu
        if self.t < 10 or self.t % solver.every == 0:
            gram = rows.mT @ rows
            gram = gram * len(gram) / gram.trace()
            past = solver.averaging
            self.gram = gram if self.t == 0 else past * self.gram + (1 - past) * gram
            values, basis = torch.linalg.eigh(self.gram)
            damping = max(solver.damping, 1 / (1 + self.t / solver.fall))
            self.inverse = basis / (values + damping) @ basis.mT
        self.gradients.append(gradient)
        # Running averages that begin at zero, written out as sums.
        ages = [len(self.gradients) - 1 - i for i in range(len(self.gradients))]
        shares = [(1 - mu) * mu**age for age in ages]
        average = sum(s * g for s, g in zip(shares, self.gradients, strict=True))
        u, s, vt = torch.linalg.svd((mu * average + (1 - mu) * gradient) @ self.inverse, False)
        s = s / s.norm()
        for _ in range(5):
            s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
        direction = u * s @ vt
        self.rows = self.rho * self.rows + (1 - self.rho) * direction.square().mean(1)
        found = direction / self.rows.sqrt()[:, None]
        found *= direction.norm() / found.norm()
        self.t += 1
        return (
            -self.lr * 0.2 * max(gradient.shape) ** 0.5 * found * self.agreed() ** solver.agreement
        )

    def agreed(self) -> Tensor:
        """Return the root of the share of the signal: of its square in that of the gradients."""
        common, square = torch.zeros(()), torch.zeros(())
        for i, gradient in enumerate(self.gradients):
            before = self.gradients[:i] or [gradient]
            ages = torch.arange(len(before) - 1.0, -1, -1).double()
            mean = torch.tensordot(self.mu**ages / (self.mu**ages).sum(), torch.stack(before), 1)
            common = 0.97 * common + (gradient * mean).sum()
            square = 0.97 * square + gradient.square().sum()
        start = 0.97 ** len(self.gradients)
        return (start + (1 - start) * common / square).clamp(0.15**2, 1).sqrt()


def train(
    model: nn.Module, opt: LocoProp, data: Callable[[int], Tensor], steps: range = range(STEPS)
) -> None:
    for step in steps:
        cross_entropy(model(data(step)).flatten(1), data(step).flatten(1)[:, :3]).backward()
        opt.step()
        opt.zero_grad()


def rows_of(step: int) -> Tensor:
    return batch(8, 6, seed=step) - 0.3


SOLVER_CASES: dict[str, dict[str, Any]] = {
    "general": {"preset": "general"},
    "spectral": {"preset": "spectral"},
    "other values": {
        "solver": Spectral(every=3, averaging=0.5, damping=0.3, fall=5.0, agreement=0.5),
        "lr": 0.1,
        "momentum": 0.7,
        "decay": 0.5,
    },
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", SOLVER_CASES)
def test_linear_layers_equal_a_second_implementation(name: str, bias: bool) -> None:
    model = network(bias=bias)
    expected = copy.deepcopy(model)
    opt = LocoProp(model, **SOLVER_CASES[name])
    group = opt.param_groups[0]
    solver = opt._components.solver(group)
    assert isinstance(solver, Spectral)
    layers = [m for m in expected if isinstance(m, nn.Linear)]
    oracles = [Oracle(solver, group["lr"], group["momentum"], group["decay"]) for _ in layers]
    train(model, opt, rows_of)
    inputs: dict[nn.Module, Tensor] = {}
    for layer in layers:
        layer.register_forward_hook(lambda m, args, out: inputs.update({m: args[0].detach()}))
    for step in range(STEPS):
        x = rows_of(step)
        expected.zero_grad()
        cross_entropy(expected(x), x[:, :3]).backward()
        for layer, oracle in zip(layers, oracles, strict=True):
            gradient, rows = layer.weight.grad, inputs[layer]
            if bias:
                gradient = torch.cat([gradient, layer.bias.grad[:, None]], 1)
                rows = torch.cat([rows, torch.ones(len(rows), 1).double()], 1)
            moved = oracle.move(gradient, rows)
            with torch.no_grad():
                layer.weight += moved[:, : layer.in_features]
                if bias:
                    layer.bias += moved[:, -1]
    for one, other in zip(weights(model), weights(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_equal_a_second_implementation(groups: int) -> None:
    """Every output position is a row, and every group of channels a matrix of its own."""
    torch.manual_seed(0)
    model = nn.Conv2d(2, 4, 3, padding=1, groups=groups).double()
    expected = copy.deepcopy(model)
    opt = LocoProp(model)

    def images(step: int) -> Tensor:
        return batch(3, 2, 5, 5, seed=step) - 0.5

    group = opt.param_groups[0]
    oracles = [Oracle(Spectral(agreement=1.0), group["lr"], 0.9, 0.95) for _ in range(groups)]
    for step in range(STEPS):
        x = images(step)
        for net in (model, expected):
            net.zero_grad()
            net(x).square().mean().backward()
        opt.step()
        patches = F.unfold(x, 3, padding=1)  # [N, C · 9, positions]
        for g, oracle in enumerate(oracles):
            own = patches.chunk(groups, 1)[g].mT.reshape(-1, 18 // groups)
            rows = torch.cat([own, torch.ones(len(own), 1).double()], 1)
            out = slice(g * 4 // groups, (g + 1) * 4 // groups)
            assert expected.weight.grad is not None
            assert expected.bias is not None
            gradient = torch.cat(
                [expected.weight.grad[out].flatten(1), expected.bias.grad[out, None]], 1
            )
            moved = oracle.move(gradient, rows)
            with torch.no_grad():
                expected.weight[out] += moved[:, :-1].reshape(expected.weight[out].shape)
                expected.bias[out] += moved[:, -1]
    for one, other in zip(weights(model), weights(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def test_rows_are_recorded_for_renewals_only() -> None:
    model = network()
    opt = LocoProp(model)
    kept = []
    for step in range(14):
        x = rows_of(step)
        cross_entropy(model(x), x[:, :3]).backward()
        calls = [call for layer in opt._layers for call in layer.calls]
        kept.append(any(c.gram.is_known if c.gram is not None else c.x.numel() for c in calls))
        opt.step()
        opt.zero_grad()
    assert kept == [True] * 11 + [False] * 3  # steps 0 to 9, and step 10


def test_a_gradient_of_zero_moves_nothing_and_harms_nothing() -> None:
    """Projections that start at zero have no gradient below them in the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    for p in model[2].parameters():
        nn.init.zeros_(p)
    opt = LocoProp(model)
    before = weights(model)
    train(model, opt, rows_of, range(1))
    assert torch.equal(model[0].weight, before[0])
    train(model, opt, rows_of, range(1, 30))
    assert not torch.equal(model[0].weight, before[0])
    assert all(p.isfinite().all() for p in model.parameters())
    assert not any(opt.skipped_updates.values())


def test_dead_inputs_and_equal_rows() -> None:
    """Inputs that are always zero, and fewer different rows than inputs: C is singular."""
    model = network()
    opt = LocoProp(model)
    for step in range(25):
        x = torch.zeros(8, 6).double()
        x[:, 0] = step % 3
        cross_entropy(model(x), x[:, :3]).backward()
        opt.step()
        opt.zero_grad()
    assert all(p.isfinite().all() for p in model.parameters())
    assert not any(opt.skipped_updates.values())


def test_a_gradient_that_is_not_finite_is_skipped() -> None:
    model = network()
    opt = LocoProp(model)
    train(model, opt, rows_of, range(3))
    before = weights(model)
    states = {p: {k: v.clone() for k, v in state.items()} for p, state in opt.state.items()}
    x = rows_of(3)
    cross_entropy(model(x), x[:, :3]).backward()
    for p in model.parameters():
        p.grad.fill_(torch.nan)
    with pytest.warns(UserWarning, match="not finite"):
        opt.step()
    for one, other in zip(weights(model), before, strict=True):
        assert torch.equal(one, other)
    for p, state in states.items():
        assert all(torch.equal(opt.state[p][key], value) for key, value in state.items())


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_part_stays_and_may_thaw(frozen: str) -> None:
    model = network()
    opt = LocoProp(model)
    train(model, opt, rows_of, range(3))
    getattr(model[0], frozen).requires_grad_(False)
    kept = getattr(model[0], frozen).clone()
    train(model, opt, rows_of, range(3, 16))
    assert torch.equal(getattr(model[0], frozen), kept)
    getattr(model[0], frozen).requires_grad_(True)
    train(model, opt, rows_of, range(16, 20))
    assert not torch.equal(getattr(model[0], frozen), kept)
    assert not any(opt.skipped_updates.values())


def test_a_layer_without_rows_takes_a_step_of_the_usual_length() -> None:
    """The gradient came from elsewhere: the layer moves along the polar factor with C = 0."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 3)]).double()
    opt = LocoProp(model, preset="spectral", lr=0.1)
    x = rows_of(0)
    weight, before = model[0].weight, weights(model)
    F.linear(F.linear(x, weight), model[1].weight).square().sum().backward()
    model[1](x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt.step()
    moved = weight - before[0]
    assert 0.5 < moved.norm() / (0.1 * 0.2 * 6**0.5 * 6**0.5) < 1.3


def test_momentum_of_zero_and_one_output() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 1).double()
    opt = LocoProp(model, momentum=0.0)
    for step in range(12):
        model(rows_of(step)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"every": True}, "every=True"),
        ({"averaging": 1.0}, "averaging=1.0"),
        ({"damping": 0.0}, "damping=0.0"),
        ({"fall": -1.0}, "fall=-1.0"),
        ({"agreement": -0.5}, "agreement=-0.5"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spectral(**options)


def test_values_at_the_ends_of_their_ranges() -> None:
    solver = Spectral(every=1, averaging=0.0, agreement=0.0)
    assert all(solver.use_of_rows(1, number, {}, 3).square for number in range(30))
    widest, wider = (solver.use_of_rows(1, 0, {}, columns) for columns in (8192, 8193))
    assert widest.square
    assert not wider.is_any


@pytest.mark.parametrize("variant", ["locoprop-m", "pocoprop-s", "pocoprop-m"])
def test_variants_with_a_transfer_are_refused(variant: str) -> None:
    with pytest.raises(ValueError, match="no closed form for solver='spectral'"):
        LocoProp(network(), variant=variant, solver="spectral")


def test_wide_layers_leave_c_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectral, "WIDEST", 6)  # the first layer has 6 inputs and a bias
    model = network()
    opt = LocoProp(model, preset="spectral")
    before = weights(model)
    x = rows_of(0)
    cross_entropy(model(x), x[:, :3]).backward()
    first = model[0]
    gradient = torch.cat([first.weight.grad, first.bias.grad[:, None]], 1)
    opt.step()
    assert "inverse" not in opt.state[first.weight]
    assert "inverse" in opt.state[model[2].weight]
    direction = polar(gradient)
    lengths = direction.norm(dim=1, keepdim=True)
    direction = direction * equal_rows(lengths, direction.square().mean(1, keepdim=True))
    expected = before[0] - 0.015 * 0.2 * 7**0.5 * direction[:, :-1]
    torch.testing.assert_close(first.weight.detach(), expected, rtol=1e-9, atol=1e-9)


def test_large_gradients_in_half_precision() -> None:
    model = network().to(torch.float16)
    opt = LocoProp(model)
    for step in range(3):
        x = rows_of(step).half()
        (3000 * cross_entropy(model(x), x[:, :3])).backward()
        assert sum(p.grad.float().square().sum() for p in model.parameters()) > 65504
        opt.step()
        opt.zero_grad()
    assert not any(opt.skipped_updates.values())


def test_its_name() -> None:
    assert SOLVERS["spectral"] == Spectral()


@pytest.mark.parametrize("products", ["bf16", "full"])
def test_polar_factors_in_bfloat16(products: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with products in bfloat16 is the step in float32 to bfloat16's rounding."""
    ends = {}
    for fast in (True, False):
        monkeypatch.setattr(spectral, "has_fast_bf16", lambda matrix, fast=fast: fast)
        torch.manual_seed(0)
        model = nn.Linear(32, 32)
        opt = LocoProp(model, preset="spectral", local_products=products)
        start = model.weight.detach().clone()
        model(torch.randn(64, 32)).square().sum().backward()
        opt.step()
        ends[fast] = model.weight.detach() - start
    apart = (ends[True] - ends[False]).norm() / ends[False].norm()
    if products == "full":
        assert apart == 0
    else:
        assert 1e-4 < apart < 0.05
