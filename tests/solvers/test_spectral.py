"""The spectral step, against a second implementation that knows rows, gradients and formulas only."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import batch, cross_entropy, network, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.paper.gram import FULL, Structure
from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.losses import Squared
from torch_locoprop.paper.regularizers import REGULARIZERS
from torch_locoprop.paper.spectral import equal_rows, longer, mean_size, polar, relative
from torch_locoprop.paper.structured_gram import ReducedGram
from torch_locoprop.paper.targets import GradientDescent, NaturalGradient
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.paper.transfers import Tanh
from torch_locoprop.solvers import SOLVERS, Numbers, Spectral, spectral

STEPS = 33  # with renewals in the first ten steps and in steps 10, 20 and 30


class Oracle:
    """The step of one matrix ``[W b]``, in singular vectors and eigenvectors."""

    def __init__(self, solver: Spectral, lr: float, mu: float, rho: float) -> None:
        self.solver, self.lr, self.mu, self.rho = solver, lr, mu, rho
        self.t = 0
        self.gram = self.inverse = self.rows = torch.zeros(())
        self.gradients: list[Tensor] = []
        self.moved: Tensor | None = None
        self.growth = 1.0

    def move(self, gradient: Tensor, rows: Tensor, bias: bool = True) -> Tensor:
        """Return the displacement for the gradient of ``[W b]`` and the rows ``[X 1]``.

        Without a bias, these are the gradient of W and the rows X.
        """
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
        factor = float(self.agreed() * self.grown()) ** solver.agreement
        self.moved = -self.lr * 0.2 * max(gradient.shape) ** 0.5 * factor * found
        if bias:
            squares = [g[:, -1] ** 2 + 1e-10 * g.square().mean(1) for g in self.gradients]
            past = torch.stack(squares)
            rho = max(self.rho, mu)  # sizes are not forgotten before the average is
            weights = (1 - rho) * rho ** torch.tensor(ages).double()
            size = (weights[:, None] * past).sum(0).sqrt()
            self.moved[:, -1] -= self.lr * solver.bias_rate * factor * average[:, -1] / size
        return self.moved

    def mean(self, gradients: list[Tensor]) -> Tensor:
        """Return the mean of gradients, with weights that fall by μ a step into the past."""
        falling = self.mu ** torch.arange(len(gradients) - 1.0, -1, -1).double()
        return torch.tensordot(falling / falling.sum(), torch.stack(gradients), 1)

    def grown(self) -> float:
        """Return the growth: of the slope along the last step, 0.2 may be left."""
        if self.moved is not None:
            before = float((self.mean(self.gradients[:-1]) * self.moved).sum())
            left = float((self.gradients[-1] * self.moved).sum()) / -abs(before)
            rise = min(max(left, -1), 1) - 0.2
            rise *= 1 - 0.97**self.t if rise > 0 else 1
            self.growth = min(max(self.growth * math.exp(0.1 * rise), 1), 16)
        return self.growth

    def agreed(self) -> Tensor:
        """Return the root of the share of the signal: of its square in that of the gradients."""
        common, square = torch.zeros(()), torch.zeros(())
        for i, gradient in enumerate(self.gradients):
            mean = self.mean(self.gradients[:i] or [gradient])
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
        "solver": Spectral(
            every=3, averaging=0.5, damping=0.3, fall=5.0, agreement=0.5, bias_rate=0.3
        ),
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
            moved = oracle.move(gradient, rows, bias)
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
    oracles = [Oracle(SOLVERS["general"], group["lr"], 0.9, 0.95) for _ in range(groups)]
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
        ({"averaging": -0.1}, "averaging=-0.1"),
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


@pytest.mark.parametrize(
    ("inputs", "settings", "omits"),
    [
        (9000, {}, True),
        (8192, {}, True),  # with the bias 8193 columns
        (8191, {}, False),
        (9000, {"gram": "block"}, False),
        (9000, {"gram": "block", "block_size": 10_000}, True),  # one block, which is all of C
        (9000, {"preset": "paper-s"}, False),
    ],
)
def test_the_summary_names_layers_without_c(
    inputs: int, settings: dict[str, Any], omits: bool
) -> None:
    model = nn.Linear(inputs, 2)
    opt = LocoProp(model, output_transfer="linear", **settings)
    note = 'no XᵀX: more than 8192 inputs with the bias; gram="block" uses blocks'
    assert (note in opt.summary()) == omits
    model(torch.randn(3, inputs)).square().mean().backward()
    opt.step()
    assert (note in opt.summary()) == omits
    if "preset" not in settings:
        assert ("inverse" in opt.state[model.weight]) != omits


@pytest.mark.parametrize(
    "settings", [{}, {"preset": "spectral", "lr": 0.04}], ids=["default", "spectral"]
)
def test_a_layer_whose_gradient_has_become_zero_stays(settings: dict[str, Any]) -> None:
    """Along the average of earlier gradients alone it would go on in steps of full length."""
    torch.manual_seed(0)
    body, one, other = (nn.Linear(*sizes).double() for sizes in ((6, 5), (5, 3), (5, 3)))
    model = nn.ModuleList([body, one, other])
    opt = LocoProp(model, output_transfer="linear", **settings)
    for step in range(14):
        h = body(batch(9, 6, seed=step)).tanh()
        weight = 0.0 if 4 <= step < 11 else 1.0
        before = [p.detach().clone() for p in model.parameters()]
        (one(h).square().mean() + weight * other(h).cos().mean()).backward()
        opt.step()
        opt.zero_grad()
        moved = [not torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)]
        assert moved == [True] * 4 + [weight > 0] * 2
    assert all(entry.isfinite().all() for state in opt.state.values() for entry in state.values())


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
    assert SOLVERS["general"] == replace(Spectral(), agreement=1.0, bias_rate=0.0)


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


# ---- the growth of steps ----------------------------------------------------------------------------


def lengths_of_steps(
    gradient_at: Callable[[Tensor], Tensor], steps: int, **changes: Any
) -> tuple[list[float], Tensors]:
    """Return how far one weight ``[3, 4]`` moves in each step, and the last state."""
    solver, x = Spectral(**{"agreement": 1.0, **changes}), torch.eye(4).double()
    weight, states, found = torch.zeros(3, 4).double(), {"weight": {}}, []  # type: ignore[var-annotated]
    for step in range(steps):
        problem = weight_problem(weight, x, number=step, backprop={"weight": gradient_at(weight)})
        new, states = solver.solve(
            problem, states, {"weight": Numbers(0.04, 0.9, 0.95)}, 1, "constant"
        )
        found.append(float((new["weight"] - weight).norm()))
        weight = new["weight"]
    return found, states["weight"]


def test_steps_grow_while_gradients_stay() -> None:
    """Sixteen times the length is the most, and half of the power is its root."""
    constant = torch.randn(3, 4, generator=torch.manual_seed(0)).double()
    grown, state = lengths_of_steps(lambda _: constant, 120)
    usual, other = lengths_of_steps(lambda _: constant, 120, agreement=0.0)
    half, _ = lengths_of_steps(lambda _: constant, 120, agreement=0.5)
    assert grown[:2] == pytest.approx(usual[:2], rel=0.01)
    assert grown[-1] == pytest.approx(16 * usual[-1], rel=1e-6)
    assert half[-1] == pytest.approx(4 * usual[-1], rel=1e-6)
    assert float(state["growth"]) == 16
    assert not {"growth", "moved"} & other.keys()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_steps_grow_towards_a_far_minimum_and_shrink_there(scale: float) -> None:
    """The minimum is 125 usual steps of an entry away, whatever the scale of the loss."""
    target = torch.randn(3, 4, generator=torch.manual_seed(0)).double().sign()

    def distance(steps: int, agreement: float) -> tuple[float, float]:
        """Return how far an entry is from the minimum after some steps, and the growth."""
        seen = []

        def gradient(weight: Tensor) -> Tensor:
            seen.append(float((weight - target).norm()) / 12**0.5)
            return scale * (weight - target)

        _, state = lengths_of_steps(gradient, steps, agreement=agreement)
        return seen[-1], float(state.get("growth", torch.ones(())))

    near, growth = distance(60, 1.0)
    assert near < 0.1
    assert 2 < growth < 16
    assert distance(60, 0.0)[0] > 0.3
    there, growth = distance(300, 1.0)
    assert there < 0.01
    assert growth < 1.5


def test_steps_do_not_grow_in_noise() -> None:
    numbers = torch.Generator().manual_seed(0)
    found, states = [], {"weight": {}}  # type: ignore[var-annotated]
    for step in range(100):
        noise = torch.randn(30, 40, generator=numbers).double()
        problem = weight_problem(torch.zeros(30, 40).double(), torch.eye(40).double(), number=step)
        problem = replace(problem, backprop={"weight": noise})
        given = {"weight": Numbers(0.04, 0.9)}
        _, states = Spectral(agreement=1.0).solve(problem, states, given, 1, "constant")
        found.append(float(states["weight"]["growth"]))
    assert max(found) < 1.05


def test_a_state_of_an_earlier_version_has_no_growth_yet() -> None:
    constant = torch.randn(3, 4, generator=torch.manual_seed(0)).double()
    _, state = lengths_of_steps(lambda _: constant, 40)
    earlier = {key: entry for key, entry in state.items() if key not in ("growth", "moved")}
    problem = weight_problem(
        torch.zeros(3, 4).double(), torch.eye(4).double(), number=40, backprop={"weight": constant}
    )
    numbers = {"weight": Numbers(0.04, 0.9, 0.95)}
    _, states = Spectral(agreement=1.0).solve(problem, {"weight": earlier}, numbers, 1, "constant")
    assert float(state["growth"]) > 1.5
    assert float(states["weight"]["growth"]) == 1


# ---- the step of biases ----------------------------------------------------------------------------


def trained(
    weights_of_outputs: Callable[[int], list[float]],
    steps: int,
    *,
    dtype: torch.dtype = torch.float64,
    factor: float = 1.0,
    forget_at: int | None = None,
    **settings: Any,
) -> list[Tensor]:
    """Return the biases of a linear layer with four outputs after each step.

    Args:
        weights_of_outputs: returns the factor of the loss of each output in a step.
        steps: number of steps.
        dtype: dtype of the layer.
        factor: factor of the loss of all outputs.
        forget_at: a step before which the sizes are taken out of the state.
    """
    torch.manual_seed(0)
    layer = nn.Linear(8, 4).to(dtype)
    opt = LocoProp(layer, **{"preset": "spectral", **settings})
    found = []
    for step in range(steps):
        x, y = batch(6, 8, seed=step).to(dtype), batch(6, 4, seed=step + 999).to(dtype)
        opt.zero_grad()
        each = torch.tensor(weights_of_outputs(step), dtype=dtype)
        (factor * ((layer(x) - 0.3 * y).square() * each).sum()).backward()
        if step == forget_at:
            del opt.state[layer.weight]["bias_size"]
        opt.step()
        found.append(layer.bias.detach().clone())
    return found


@pytest.mark.parametrize("momentum", [0.9, 0.98])
def test_the_bias_of_an_output_without_a_gradient_comes_to_rest(momentum: float) -> None:
    """A unit that is off in all rows: the layer as a whole has a gradient."""
    biases = trained(lambda step: [1, 1, float(step < 100), 1], 600, lr=0.01, momentum=momentum)
    moves = torch.stack(biases).diff(dim=0).abs() / 0.01
    assert moves.max() < 2
    assert moves[-1, 2] < 0.05
    assert moves[:50, 2].max() > 0.5


def test_a_state_without_sizes_takes_steps_of_the_usual_length() -> None:
    """As of a version in which biases had no step of their own, with a small loss in that step."""
    kept, forgotten = (
        trained(lambda step: [1, 1e-4, 0, 1] if step >= 50 else [1, 1, 1, 1], 52, forget_at=at)
        for at in (None, 50)
    )
    for biases in (kept, forgotten):
        assert ((biases[50] - biases[49]).abs() / 0.015).max() < 2


@pytest.mark.parametrize("factor", [1e-25, 1e15])
def test_the_step_of_biases_has_no_unit(factor: float) -> None:
    expected = trained(lambda step: [1, 1, 1, 1], 12)
    found = trained(lambda step: [1, 1, 1, 1], 12, dtype=torch.float32, factor=factor)
    torch.testing.assert_close(found[-1].double(), expected[-1], rtol=1e-3, atol=1e-4)


def test_a_bias_whose_gradient_is_rounding_stays_nearly_where_it_is() -> None:
    """That of the keys of attention: no output depends on it."""
    problem = replace(
        weight_problem(torch.zeros(3, 4).double(), torch.eye(4).double()),
        start={"weight": torch.zeros(3, 4).double(), "bias": torch.zeros(3).double()},
        backprop={
            "weight": torch.randn(3, 4, generator=torch.manual_seed(0)).double(),
            "bias": torch.tensor([1e-17, -1e-17, 1.0]).double(),
        },
    )
    states: dict[str, dict[str, Tensor]] = {"weight": {}, "bias": {}}
    numbers = dict.fromkeys(("weight", "bias"), Numbers(0.1, 0.9, 0.95))
    moved = []
    for bias_rate in (0.0, 1.0):
        solver = Spectral(bias_rate=bias_rate)
        moved.append(solver.solve(problem, states, numbers, 1, "constant")[0]["bias"])
    own = (moved[1] - moved[0]).abs() / 0.1
    assert own[:2].max() < 1e-10
    assert own[2] > 0.4


@pytest.mark.parametrize(
    ("decay", "momentum"), [(0.95, 0.9), (0.5, 0.9), (0.999, 0.9), (0.9, 0.99)]
)
def test_how_long_the_step_of_a_bias_may_be(decay: float, momentum: float) -> None:
    """At most the bound of `longer`, for gradients of any sizes."""
    rho = max(decay, momentum)
    bound = (1 - momentum) / ((1 - rho) * (1 - momentum**2 / rho)) ** 0.5
    size, mean, most = None, torch.zeros(1000).double(), torch.zeros(())
    generator = torch.manual_seed(0)
    for _ in range(300):
        exponents = 12 * torch.rand(1000, generator=generator).double() - 6
        gradient = 10**exponents * (torch.rand(1000, generator=generator) < 0.1)
        mean = momentum * mean + (1 - momentum) * gradient
        size = mean_size(size, gradient, longer(decay, momentum))
        most = torch.maximum(most, relative(mean, size).max())
    assert 0.1 < most <= bound * (1 + 1e-9)
    of_tensors = longer(torch.tensor(decay), torch.tensor(momentum))
    assert float(of_tensors) == pytest.approx(rho)
    assert float(longer(decay, torch.tensor(momentum))) == pytest.approx(rho)


# ---- what tools ask of it --------------------------------------------------------------------------


@pytest.mark.parametrize("bias_rate", [0.0, 1.0])
@pytest.mark.parametrize("agreement", [0.0, 0.5])
@pytest.mark.parametrize(
    ("structure", "of_gram"),
    [(FULL, (5, 5)), (Structure("block", 3), (2, 3, 3)), (Structure("diagonal"), (5,))],
)
@pytest.mark.parametrize("leading", [(), (2,)], ids=str)
def test_empty_states_have_the_shapes_of_full_ones(
    leading: tuple[int, ...],
    structure: Structure,
    of_gram: tuple[int, ...],
    agreement: float,
    bias_rate: float,
) -> None:
    """C and its inverse are the identity, with which a layer moves; all else is zero."""
    start = {"weight": torch.zeros(*leading, 3, 4), "bias": torch.zeros(*leading, 3)}
    solver = Spectral(agreement=agreement, bias_rate=bias_rate)
    found = solver.empty_states(start, False, structure=structure)
    assert found["bias"] == {}
    state = found["weight"]
    shapes = {
        "average": (3, 5),
        "rows": (3, 1),
        "gram": of_gram,
        "inverse": of_gram,
        "step": (1, 1),
    }
    if agreement:
        shapes |= {"moved": (3, 5), "energy": (1, 1), "signal": (1, 1), "growth": (1, 1)}
    if bias_rate:
        shapes["bias_size"] = (3, 1)
    assert {k: tuple(t.shape) for k, t in state.items()} == {
        k: (*leading, *shape) for k, shape in shapes.items()
    }
    one = torch.ones(5) if structure.kind == "diagonal" else torch.eye(of_gram[-1])
    for key, entry in state.items():
        expected = one.expand_as(entry) if key in ("gram", "inverse") else torch.zeros_like(entry)
        assert torch.equal(entry, expected), key
    alone = solver.empty_states({"bias": start["bias"]}, False)
    assert alone["bias"].keys() == state.keys() - {"bias_size"}


def test_empty_states_of_wide_layers_have_no_gram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectral, "WIDEST", 5)

    def keys(columns: int, structure: Structure = FULL) -> set[str]:
        start = {"weight": torch.zeros(3, columns)}
        return set(Spectral().empty_states(start, False, structure=structure)["weight"])

    assert {"gram", "inverse"} <= keys(5)
    assert not {"gram", "inverse"} & keys(6)
    assert {"gram", "inverse"} <= keys(6, Structure("diagonal"))
    assert {"gram", "inverse"} <= keys(16, Structure("block", 8))
    assert not Spectral().use_of_rows(1, 0, {}, 6).square
    assert Spectral().use_of_rows(1, 0, {}, 5).square
    assert Spectral().use_of_rows(1, 0, {}, 6, structure=Structure("diagonal")).square


def test_which_problems_renew_the_inverse() -> None:
    """The first ten, each ``every``-th, and those without an inverse of the right shape."""
    solver, state = Spectral(every=4), {"inverse": torch.eye(5)}
    uses = [n for n in range(25) if solver.use_of_rows(1, n, state, 5).square]
    assert uses == [*range(10), 12, 16, 20, 24]
    assert [n for n in range(25) if solver.phase(n)] == uses
    assert {solver.phase(n) for n in range(25)} == {0, 1}
    assert solver.use_of_rows(1, 13, {}, 5).square
    assert solver.use_of_rows(1, 13, state, 6).square
    assert not solver.without_rows().use_of_rows(1, 0, {}, 5).square
    assert solver.is_fixed_work(0, torch.zeros(3, 4), False)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 3, 4), (2, 3, 0), (2, 0, 4)], ids=str)
def test_a_layer_without_inputs_outputs_or_members_stays(shape: tuple[int, ...]) -> None:
    weight = torch.zeros(shape)
    problem = weight_problem(weight, torch.zeros(*shape[:-2], 6, shape[-1]))
    states: dict[str, dict[str, Tensor]] = {"weight": {}}
    numbers = {"weight": Numbers(0.1, 0.9, 0.9)}
    assert Spectral().direction(problem, states, numbers) is None
    found, after = Spectral().solve(problem, states, numbers, 1, "constant")
    assert found["weight"] is weight
    assert after is states


def weight_problem(weight: Tensor, x: Tensor, **changes: Any) -> LocalProblem:
    problem = LocalProblem(
        linear_map=Dense(),
        x=x,
        start={"weight": weight},
        fixed={},
        backprop={"weight": torch.randn(weight.shape, generator=torch.manual_seed(1)).to(weight)},
        target=GradientDescent(),
        loss=Squared(),
        transfer=Tanh(),
        gamma=1.0,
        eta=0.1,
        regularizer=REGULARIZERS["none"],
    )
    return replace(problem, **changes)


@pytest.mark.parametrize("eps_bits", [torch.float64, torch.float32, torch.bfloat16])
def test_the_damping_is_at_least_64_units_of_rounding(eps_bits: torch.dtype) -> None:
    """With a late step and a tiny damping, the inverse of C + λI shows λ."""
    weight = torch.ones(2, 2, dtype=eps_bits)
    problem = weight_problem(weight, torch.eye(2, dtype=eps_bits)[:1])
    state = {"step": torch.full((1, 1), 1e30), "average": torch.zeros(2, 2)}
    found = Spectral(damping=1e-30).direction(problem, {"weight": state}, {"weight": Numbers(0.1)})
    assert found is not None
    gram = torch.diag(torch.tensor([2.0, 0.0])).double()  # divided by its mean diagonal
    least = 64 * torch.finfo(eps_bits).eps
    expected = torch.linalg.inv(gram + least * torch.eye(2).double())
    torch.testing.assert_close(found.state["inverse"].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("agreement", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["full", "block", "diagonal"])
@pytest.mark.parametrize("leading", [(), (2,), (2, 3)], ids=str)
def test_empty_states_stand_for_the_start(
    leading: tuple[int, ...], kind: str, agreement: float
) -> None:
    """A first step from them leaves the state of a first step from nothing, with parts of C too."""
    solver, numbers = Spectral(agreement=agreement, averaging=0.0), Numbers(0.1, 0.9, 0.9)
    x = torch.randn(*leading, 8, 5, dtype=torch.float64)
    structure = Structure(kind, 3, ones=False)
    problem = weight_problem(torch.zeros(*leading, 4, 5).double(), x)
    if kind != "full":
        rows = ReducedGram.reduced(x, structure)
        problem = replace(problem, x=rows, structure=structure)
    empty = solver.empty_states(problem.start, False, structure=structure)
    ends = [
        solver.solve(problem, states, {"weight": numbers}, 1, "constant")
        for states in ({"weight": {}}, empty)
    ]
    assert ends[0][1]["weight"].keys() == empty["weight"].keys()
    for key, entry in ends[0][1]["weight"].items():
        assert entry.shape == empty["weight"][key].shape
        torch.testing.assert_close(ends[1][1]["weight"][key], entry)
    torch.testing.assert_close(ends[1][0]["weight"], ends[0][0]["weight"])
    gram = x.mT @ x
    gram = gram / gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    blocks = torch.arange(5) // {"full": 5, "block": 3, "diagonal": 1}[kind]
    inverse = torch.linalg.inv(gram * (blocks[:, None] == blocks) + torch.eye(5).double())
    moved = polar(problem.backprop["weight"] @ inverse)
    rows = 0.1 * moved.square().mean(
        -1, keepdim=True
    )  # a running average from zero, with decay 0.9
    torch.testing.assert_close(ends[0][1]["weight"]["rows"], rows)
    moved = moved * equal_rows(moved.norm(dim=-1, keepdim=True), rows)
    torch.testing.assert_close(ends[0][0]["weight"], -0.1 * 0.2 * 5**0.5 * moved)
    # A step that is not to renew C has no use for rows, and keeps the inverse.
    later = replace(problem, x=None, number=13)
    _, after = solver.solve(later, ends[0][1], {"weight": numbers}, 1, "constant")
    assert torch.equal(after["weight"]["inverse"], ends[0][1]["weight"]["inverse"])


def test_the_gradient_of_a_natural_target_is_divided_by_the_fisher_matrix() -> None:
    """``D⁻¹ G`` takes the place of G, with D damped by 1e-2 of its mean diagonal."""
    x, root = torch.randn(8, 5).double(), torch.randn(4, 4).double()
    plain, fisher = weight_problem(torch.zeros(4, 5).double(), x), root @ root.mT
    shift = 1e-2 * fisher.diagonal().mean() * torch.eye(4).double()
    solved = torch.linalg.solve(fisher + shift, plain.backprop["weight"])
    ends = [
        Spectral().solve(problem, {"weight": {}}, {"weight": Numbers(0.1)}, 1, "constant")[0]
        for problem in (
            replace(plain, target=NaturalGradient(), fisher=fisher, gamma=3.0),
            replace(plain, backprop={"weight": solved}),
        )
    ]
    torch.testing.assert_close(ends[0]["weight"], ends[1]["weight"])


def test_a_process_without_outputs_takes_part() -> None:
    """Another process has all of them, and both have to exchange their sums."""
    problem = weight_problem(torch.zeros(0, 4), torch.randn(6, 4))
    problem = replace(problem, outputs=OtherHalf(6))
    found = Spectral().direction(problem, {"weight": {}}, {"weight": Numbers(0.1)})
    assert found is not None
    assert found.matrix.shape == (0, 4)


class OtherHalf:
    """A process with the other outputs of a layer, as many as here and with equal sums."""

    def __init__(self, d: int) -> None:
        self.d = d

    def add_up(self, of_rows: Tensor) -> Tensor:
        return 2 * of_rows


@pytest.mark.parametrize(("d", "n"), [(3, 4), (3, 10)])
def test_outputs_on_two_processes(d: int, n: int) -> None:
    """Norms and lengths of steps are those of all outputs, as with both halves on one process."""
    solver, numbers = Spectral(agreement=0.7), {"weight": Numbers(0.1, 0.9, 0.8)}
    half = weight_problem(torch.zeros(d, n).double(), torch.randn(8, n).double())
    factor = torch.randn(d, n, generator=torch.manual_seed(2), dtype=torch.float64)
    both = replace(
        half,
        start={"weight": half.start["weight"].repeat(2, 1)},
        backprop={"weight": half.backprop["weight"].repeat(2, 1)},
    )
    half = replace(half, outputs=OtherHalf(2 * d))
    states: list[Any] = [{"weight": {}}, {"weight": {}}]
    for step in range(3):
        new = []
        for i, (problem, own) in enumerate([(half, factor), (both, factor.repeat(2, 1))]):
            problem = replace(
                problem,
                number=step,
                backprop={"weight": problem.backprop["weight"] * (-0.5) ** step},
            )
            found = solver.direction(problem, states[i], numbers)
            assert found is not None
            moved, states[i] = solver.displaced(problem, states[i], numbers, found, own)
            new.append(moved["weight"])
        torch.testing.assert_close(new[0], new[1][:d])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_step_number_stays_in_float32(dtype: torch.dtype) -> None:
    """In bfloat16, 256 + 1 is 256; all other entries have the dtype of the weight."""
    problem = weight_problem(torch.zeros(2, 3, dtype=dtype), torch.ones(4, 3, dtype=dtype))
    states: Any = {"weight": {}}
    states = Spectral().solve(problem, states, {"weight": Numbers(0.1)}, 1, "constant")[1]
    states["weight"]["step"].fill_(256)
    state = Spectral().solve(problem, states, {"weight": Numbers(0.1)}, 1, "constant")[1]["weight"]
    assert state["step"].dtype == torch.float32
    assert state["step"].item() == 257
    assert {entry.dtype for key, entry in state.items() if key != "step"} == {dtype}
