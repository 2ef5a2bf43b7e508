"""The averaged preconditioned step, against a second implementation in plain float64 tensors."""

from __future__ import annotations

import copy
import io
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import assert_close, batch, cross_entropy, network, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.losses import Matching, Squared
from torch_locoprop.paper.preconditioning import average_size
from torch_locoprop.paper.regularizers import REGULARIZERS
from torch_locoprop.paper.targets import MirrorDescent
from torch_locoprop.paper.transfers import Sigmoid, Softmax, Tanh, Transfer
from torch_locoprop.solvers import (
    SOLVERS,
    AveragedPreconditioned,
    Numbers,
    Preconditioned,
    averaged_preconditioned,
)

STEPS = 33  # with renewals in the first ten steps and in steps 10, 20 and 30
NAME = "preconditioned-averaged"


def averaged(values: list[Tensor], past: float, *, from_zero: bool) -> Tensor:
    """Return a running average, written out as a sum over all values."""
    shares = [(1 - past) * past**age for age in range(len(values) - 1, -1, -1)]
    if not from_zero:
        shares[0] = past ** (len(values) - 1)
    return sum((s * v for s, v in zip(shares, values, strict=True)), torch.zeros(()))


class Oracle:
    """The step of one matrix ``[W b]``, from all gradients and rows so far."""

    def __init__(self, solver: AveragedPreconditioned, lr: float, mu: float, rho: float) -> None:
        self.solver, self.lr, self.mu, self.rho, self.t = solver, lr, mu, rho, 0
        self.grams: list[Tensor] = []
        self.slopes: list[Tensor] = []
        self.moved: list[Tensor] = []

    def move(self, gradient: Tensor, rows: Tensor, slopes: Tensor) -> Tensor:
        """Return the displacement.

        Args:
            gradient: that of ``[W b]``.
            rows: the rows ``[X 1]``.
            slopes: the slopes h of the outputs in this batch.
        """
        if self.t < 10 or self.t % self.solver.every == 0:
            gram = rows.mT @ rows
            self.grams.append(gram * len(gram) / gram.trace())
            self.slopes.append(slopes)
        past = self.solver.averaging
        gram = averaged(self.grams, past, from_zero=False)
        h = averaged(self.slopes, past, from_zero=False)
        system = gram + self.solver.damping * torch.eye(len(gram)).double()
        self.moved.append(-torch.linalg.solve(system, gradient.mT).mT / h[:, None])
        mean = averaged(self.moved, self.mu, from_zero=True)
        squares = [m.square().mean(1, keepdim=True) for m in self.moved]
        rho = max(self.rho, self.mu)  # sizes are not forgotten before the average is
        size = averaged(squares, rho, from_zero=False).sqrt()
        self.t += 1
        return 0.2 * self.lr * (self.mu * mean + (1 - self.mu) * self.moved[-1]) / size


def train(model: nn.Module, opt: LocoProp, steps: range = range(STEPS)) -> None:
    for step in steps:
        x = rows_of(step)
        opt.zero_grad()
        cross_entropy(model(x), x[:, :3]).backward()
        opt.step()


def rows_of(step: int) -> Tensor:
    return batch(8, 6, seed=step) - 0.3


def joined(layer: nn.Linear | nn.Conv2d, gradient: bool = False) -> Tensor:
    parts = [layer.weight, *([] if layer.bias is None else [layer.bias])]
    parts = [p.grad if gradient else p.detach() for p in parts]
    return torch.cat([p.flatten(1) if p.dim() > 1 else p[:, None] for p in parts], 1)


def with_ones(rows: Tensor, bias: bool) -> Tensor:
    return torch.cat([rows, torch.ones(len(rows), 1).double()], 1) if bias else rows


SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {"solver": NAME},
    "other values": {
        "solver": AveragedPreconditioned(every=3, averaging=0.5, damping=0.3),
        "lr": 0.1,
        "momentum": 0.7,
        "decay": 0.5,
    },
    "no averages": {
        "solver": AveragedPreconditioned(every=1, averaging=0.0),
        "momentum": 0.0,
        "decay": 0.0,
    },
}


# ---- the formula ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("variant", ["locoprop-m", "locoprop-s"])
@pytest.mark.parametrize("name", SETTINGS)
def test_linear_layers_equal_a_second_implementation(name: str, variant: str, bias: bool) -> None:
    model = network(bias=bias)
    expected = copy.deepcopy(model)
    opt = LocoProp(model, variant=variant, output_transfer="sigmoid", **SETTINGS[name])
    group = opt.param_groups[0]
    solver = opt._components.solver(group)
    assert isinstance(solver, AveragedPreconditioned)
    layers = [m for m in expected if isinstance(m, nn.Linear)]
    numbers = group["lr"], group["momentum"], group["decay"]
    oracles = [Oracle(solver, *numbers) for _ in layers]
    train(model, opt)
    for step in range(STEPS):
        x = rows_of(step)
        expected.zero_grad()
        cross_entropy(expected(x), x[:, :3]).backward()
        with torch.no_grad():
            one = layers[0](x).tanh()
            two = layers[1](one).tanh()
            y = layers[2](two).sigmoid()
        slopes = [1 - one**2, 1 - two**2, y * (1 - y)]
        for layer, oracle, rows, slope, largest in zip(
            layers, oracles, (x, one, two), slopes, (1.0, 1.0, 0.25), strict=True
        ):
            h = slope.mean(0).clamp_min(0.4 * largest)
            h = torch.ones_like(h) if variant == "locoprop-s" else h
            moved = oracle.move(joined(layer, gradient=True), with_ones(rows, bias), h)
            with torch.no_grad():
                layer.weight += moved[:, : layer.in_features]
                if bias:
                    layer.bias += moved[:, -1]
    assert not torch.equal(model[0].weight, network(bias=bias)[0].weight)
    assert_close(weights(model), weights(expected), 1e-9)


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_equal_a_second_implementation(groups: int) -> None:
    """Every output position is a row, and every group of channels a matrix of its own."""
    torch.manual_seed(0)
    model = nn.Conv2d(2, 4, 3, padding=1, groups=groups).double()
    expected = copy.deepcopy(model)
    opt = LocoProp(model, variant="locoprop-m", output_transfer="sigmoid", solver=NAME)
    oracles = [Oracle(AveragedPreconditioned(), 0.03, 0.9, 0.95) for _ in range(groups)]
    for step in range(STEPS):
        x = batch(3, 2, 5, 5, seed=step) - 0.5
        for net in (model, expected):
            net.zero_grad()
            cross_entropy(net(x), x[:, :1].expand(3, 4, 5, 5) + 0.5).backward()
        opt.step()
        y = expected(x).detach().sigmoid()
        slopes = (y * (1 - y)).mean((0, 2, 3)).clamp_min(0.1)
        patches = F.unfold(x, 3, padding=1)  # [N, C · 9, positions]
        for g, oracle in enumerate(oracles):
            rows = patches.chunk(groups, 1)[g].mT.reshape(-1, 18 // groups)
            out = slice(g * 4 // groups, (g + 1) * 4 // groups)
            gradient = joined(expected, gradient=True)[out]
            moved = oracle.move(gradient, with_ones(rows, True), slopes[out])
            with torch.no_grad():
                expected.weight[out] += moved[:, :-1].reshape(expected.weight[out].shape)
                expected.bias[out] += moved[:, -1]
    assert_close(weights(model), weights(expected), 1e-9)


def test_a_step_without_averages_has_the_direction_of_the_preconditioned_solver() -> None:
    """Output by output, and entries of 0.2 lr in the root mean square."""
    for transfer in (Tanh(), Sigmoid(), Softmax()):
        problem = random_problem(transfer)
        numbers = dict.fromkeys(problem.start, Numbers(0.03, 0.0, 0.0))
        checked = Preconditioned().solve(problem, empty(problem), numbers, 1, "linear")[0]
        found = AveragedPreconditioned().solve(problem, empty(problem), numbers, 1, "linear")[0]
        one, other = (
            torch.cat([t["weight"], t["bias"][:, None]], 1)
            - torch.cat([problem.start["weight"], problem.start["bias"][:, None]], 1)
            for t in (checked, found)
        )
        cosines = F.cosine_similarity(one, other)
        torch.testing.assert_close(cosines, torch.ones_like(cosines), rtol=0, atol=1e-9)
        sizes = other.square().mean(1).sqrt()
        torch.testing.assert_close(sizes, torch.full_like(sizes, 0.2 * 0.03))


@pytest.mark.parametrize("past", [None, torch.zeros(3, 1), torch.tensor([[0.0], [1.0], [2.0]])])
def test_the_size_begins_at_the_first_displacement_that_is_not_zero(past: Tensor | None) -> None:
    moved = torch.tensor([[3.0, -4.0], [0.0, 0.0], [1.0, 1.0]])
    size, factor = average_size(past, moved, 0.75)
    known = past is not None and bool(past.any())
    expected = [12.5**0.5, 0.75**0.5 if known else 0.0, (0.25 + 0.75 * 4) ** 0.5 if known else 1.0]
    torch.testing.assert_close(size, torch.tensor(expected)[:, None])
    moves = torch.tensor([1.0, 0.0, 1.0])[:, None]
    torch.testing.assert_close(factor * size, moves)
    assert not factor[1]


# ---- what changes nothing ------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [2.0**-40, 2.0**30])
def test_the_scale_of_the_loss_changes_nothing(factor: float) -> None:
    """To the last bit for a power of two. tests/promises/test_no_units.py has other factors."""
    ends = []
    for scale in (1.0, factor):
        model = network()
        opt = LocoProp(model, variant="locoprop-m", solver=NAME, output_transfer="sigmoid")
        for step in range(14):
            opt.zero_grad()
            (scale * cross_entropy(model(rows_of(step)), rows_of(step)[:, :3])).backward()
            opt.step()
        ends.append(weights(model))
    assert_close(*ends, 0.0)


@pytest.mark.parametrize("factor", [1e-24, 1e15])
def test_the_scale_of_the_loss_changes_nothing_in_float32(factor: float) -> None:
    """Squares of the displacements would underflow or overflow."""

    def displacement(dtype: torch.dtype, factor: float) -> Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(8, 4).to(dtype)
        start = layer.weight.detach().clone()
        opt = LocoProp(layer, solver="preconditioned-averaged", output_transfer="linear")
        for step in range(12):
            x, y = batch(6, 8, seed=step).to(dtype), batch(6, 4, seed=step + 999).to(dtype)
            opt.zero_grad()
            (factor * (layer(x) - y).square().sum()).backward()
            opt.step()
        return (layer.weight - start).detach().double()

    expected, found = displacement(torch.float64, 1.0), displacement(torch.float32, factor)
    assert (found - expected).norm() < 1e-3 * expected.norm()


def test_an_output_whose_gradient_vanishes_takes_no_long_steps() -> None:
    """With a momentum above the decay, too, for which the sizes would be forgotten sooner."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 4).double()
    opt = LocoProp(
        layer,
        solver="preconditioned-averaged",
        output_transfer="linear",
        lr=0.01,
        momentum=0.98,
        decay=0.9,
    )
    most = 0.0
    for step in range(400):
        x, y = batch(6, 8, seed=step), batch(6, 4, seed=step + 999)
        each = torch.tensor([1, 1, 1.0 if step < 50 else 1e-12, 1])
        opt.zero_grad()
        before = layer.weight.detach().clone()
        ((layer(x) - y).square() * each).sum().backward()
        opt.step()
        moved = (layer.weight - before).detach().square().mean(1).sqrt()
        most = max(most, float(moved.max()) / (0.2 * 0.01))
    assert most < 2


def test_a_layer_whose_gradient_has_become_zero_stays() -> None:
    """Along the average of earlier displacements alone, it would go on."""
    torch.manual_seed(0)
    body, one, other = (nn.Linear(*sizes).double() for sizes in ((6, 5), (5, 3), (5, 3)))
    model = nn.ModuleList([body, one, other])
    opt = LocoProp(model, output_transfer="linear", solver=NAME)
    for step in range(14):
        h = body(batch(9, 6, seed=step)).tanh()
        weight = 0.0 if 4 <= step < 11 else 1.0
        before = weights(model)
        (one(h).square().mean() + weight * other(h).cos().mean()).backward()
        opt.step()
        opt.zero_grad()
        moved = [not torch.equal(*pair) for pair in zip(weights(model), before, strict=True)]
        assert moved == [True] * 4 + [weight > 0] * 2
    assert all(entry.isfinite().all() for state in opt.state.values() for entry in state.values())


def test_single_outputs_without_a_gradient_stay() -> None:
    """A unit that is off in all rows of a batch, and one that always is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        model[0].bias[1] = -100.0
    opt = LocoProp(model, output_transfer="sigmoid", variant="locoprop-m", solver=NAME)
    for step in range(12):
        x = rows_of(step)
        if step in (5, 6):
            x = x * (x @ model[0].weight[2] + model[0].bias[2] < 0).unsqueeze(1)
        dead = (x @ model[0].weight.mT + model[0].bias <= 0).all(0)
        before = joined(model[0])
        opt.zero_grad()
        cross_entropy(model(x), rows_of(step)[:, :3]).backward()
        opt.step()
        moved = (joined(model[0]) != before).any(1)
        assert moved.tolist() == dead.logical_not().tolist()
        assert not moved[1]
    assert not any(opt.skipped_updates.values())


def test_weights_that_start_at_zero_train() -> None:
    """Their layer moves, and the layers before it from the second step on."""
    model = network()
    for p in model[4].parameters():
        nn.init.zeros_(p)
    opt = LocoProp(model, variant="locoprop-m", solver=NAME, output_transfer="sigmoid")
    start = weights(model)
    train(model, opt, range(1))
    assert_close(weights(model)[:4], start[:4], 0.0)
    train(model, opt, range(1, 2))
    first = [(a - b).square().mean().sqrt() for a, b in zip(weights(model), start, strict=True)]
    # 0.19 of a step of full length, as in the very first step of any layer.
    assert 0.1 < float(first[0]) / (0.19 * 0.2 * 0.03) < 1.5
    assert not any(opt.skipped_updates.values())


def test_dead_inputs_and_equal_rows() -> None:
    """Inputs that are always zero, and fewer different rows than inputs: C is singular."""
    model = network()
    opt = LocoProp(model, variant="locoprop-m", solver=NAME, output_transfer="sigmoid")
    for step in range(25):
        x = torch.zeros(8, 6).double()
        x[:, 0] = step % 3
        opt.zero_grad()
        cross_entropy(model(x), x[:, :3].clamp_max(1.0)).backward()
        opt.step()
    assert all(p.isfinite().all() for p in model.parameters())
    assert not any(opt.skipped_updates.values())


@pytest.mark.parametrize("steps_before", [0, 2, 12])
def test_an_empty_batch_changes_neither_the_inverse_nor_the_weights(steps_before: int) -> None:
    model = network()
    opt = LocoProp(model, variant="locoprop-m", solver=NAME, output_transfer="sigmoid")
    train(model, opt, range(steps_before))
    before, kept = weights(model), copy.deepcopy(opt.state.get(model[0].weight, {}))
    opt.zero_grad()
    model(batch(0, 6)).sum().backward()
    opt.step()
    assert_close(weights(model), before, 0.0)
    state = opt.state[model[0].weight]
    for key in ("gram", "inverse", "slopes"):
        assert torch.equal(state[key], kept[key]) if steps_before else key not in state
    train(model, opt, range(steps_before, steps_before + 2))
    assert "inverse" in opt.state[model[0].weight]
    assert not any(opt.skipped_updates.values())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
@pytest.mark.parametrize("bias", [True, False])
def test_layers_without_inputs_or_outputs_are_no_failure(bias: bool) -> None:
    model = network()
    for n, d in ((0, 3), (6, 0)):
        model.append(nn.Linear(n, d, bias=bias).double())
    opt = LocoProp(model, variant="locoprop-m", solver=NAME, output_transfer="linear")
    for step in range(12):
        opt.zero_grad()
        x = rows_of(step)
        out = torch.cat([model[:5](x), model[5](x[:, :0]), model[6](x)], 1)
        out.square().sum().backward()
        opt.step()
    assert not any(opt.skipped_updates.values())
    assert all(p.isfinite().all() for p in model.parameters())


# ---- states and records --------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["locoprop-m", "locoprop-s"])
def test_only_steps_that_renew_record_rows_and_change_the_inverse(variant: str) -> None:
    model = network()
    opt = LocoProp(model, variant=variant, solver=NAME, output_transfer="sigmoid")
    recorded, renewed, last = [], [], None
    for step in range(32):
        opt.zero_grad()
        cross_entropy(model(rows_of(step)), rows_of(step)[:, :3]).backward()
        calls = [call for layer in opt._layers for call in layer.calls]
        assert len(calls) == 3
        recorded.append(any(c.x.numel() or (c.gram is not None and c.gram.is_known) for c in calls))
        opt.step()
        inverse = opt.state[model[2].weight]["inverse"].clone()
        renewed.append(last is None or not torch.equal(inverse, last))
        last = inverse
    expected = [step < 10 or step % 10 == 0 for step in range(32)]
    assert recorded == renewed == expected


@pytest.mark.parametrize("saved_after", [4, 10, 14, 20])
def test_a_resumed_run_is_the_same_bit_for_bit(saved_after: int) -> None:
    """With a linear layer, whose transfer a resumed run does not know in its first step."""

    def make(seed: int) -> tuple[nn.Module, LocoProp]:
        torch.manual_seed(seed)
        layers = [nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2), nn.Linear(2, 3)]
        model = nn.Sequential(*layers).double()
        opt = LocoProp(model, variant="locoprop-m", solver=NAME, output_transfer="sigmoid")
        return model, opt

    model, opt = make(0)
    train(model, opt, range(saved_after))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    train(model, opt, range(saved_after, 24))
    file.seek(0)
    saved = torch.load(file)
    resumed, other = make(7)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["opt"])
    train(resumed, other, range(saved_after, 24))
    assert_close(weights(resumed), weights(model), 0.0)
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert opt.state[p].keys() == other.state[q].keys()
        assert all(torch.equal(opt.state[p][key], other.state[q][key]) for key in opt.state[p])


@pytest.mark.parametrize("leading", [(), (2,)], ids=str)
def test_empty_states_have_the_entries_and_shapes_of_full_ones(leading: tuple[int, ...]) -> None:
    """C and its inverse are the identity, and h is one, with which a layer moves."""
    start = {"weight": torch.zeros(*leading, 3, 4), "bias": torch.zeros(*leading, 3)}
    found = AveragedPreconditioned().empty_states(start, True)
    assert found["bias"] == {}
    shapes = {"average": (3, 5), "size": (3, 1), "gram": (5, 5), "inverse": (5, 5)}
    shapes["slopes"] = (3, 1)
    expected = {key: (*leading, *shape) for key, shape in shapes.items()}
    assert {key: tuple(t.shape) for key, t in found["weight"].items()} == expected
    for key in ("gram", "inverse"):
        assert torch.equal(found["weight"][key], torch.eye(5).expand(*leading, 5, 5))
    model = network()
    opt = LocoProp(model, variant="locoprop-m", solver=NAME, output_transfer="sigmoid")
    train(model, opt, range(1))
    full = {key: tuple(t.shape) for key, t in opt.state[model[2].weight].items()}
    start = {"weight": model[2].weight, "bias": model[2].bias}
    empty_ones = AveragedPreconditioned().empty_states(start, True)["weight"]
    assert {key: tuple(t.shape) for key, t in empty_ones.items()} == full
    assert not opt.state[model[2].bias]


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_part_stays_and_may_thaw(frozen: str) -> None:
    """Between renewals too: another number of columns needs another inverse."""
    model = network()
    opt = LocoProp(model, variant="locoprop-m", solver=NAME, output_transfer="sigmoid")
    train(model, opt, range(12))
    part = getattr(model[0], frozen)
    part.requires_grad_(False)
    kept, other = part.clone(), getattr(model[0], {"weight": "bias", "bias": "weight"}[frozen])
    before = other.clone()
    train(model, opt, range(12, 16))
    assert torch.equal(part, kept)
    assert not torch.equal(other, before)
    columns = {"weight": 1, "bias": 6}[frozen]
    assert opt.state[other]["inverse"].shape == (columns, columns)
    part.requires_grad_(True)
    train(model, opt, range(16, 19))
    assert not torch.equal(part, kept)
    assert opt.state[model[0].weight]["inverse"].shape == (7, 7)
    assert not any(opt.skipped_updates.values())


def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_state() -> None:
    model = network()
    opt = LocoProp(model, variant="locoprop-m", solver=NAME, output_transfer="sigmoid")
    train(model, opt, range(3))
    before, states = weights(model), copy.deepcopy(opt.state_dict()["state"])
    opt.zero_grad()
    cross_entropy(model(rows_of(3)), rows_of(3)[:, :3]).backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad[-1] = torch.nan
    with pytest.warns(UserWarning, match="not finite"):
        opt.step()
    assert_close(weights(model), before, 0.0)
    for number, state in opt.state_dict()["state"].items():
        assert all(torch.equal(states[number][key], entry) for key, entry in state.items())


def test_a_layer_without_rows_takes_the_step_without_c() -> None:
    """The gradient came from elsewhere: each output moves along its gradient, by 0.19 of a step."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 3)]).double()
    opt = LocoProp(model, variant="locoprop-s", solver=NAME, output_transfer="linear")
    weight, before = model[0].weight, weights(model)
    F.linear(F.linear(rows_of(0), weight), model[1].weight).square().sum().backward()
    model[1](rows_of(0)).sum().backward()
    assert weight.grad is not None
    gradient = weight.grad.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt.step()
    size = gradient.square().mean(1, keepdim=True).sqrt()
    assert_close([weight.detach() - before[0]], [-0.19 * 0.2 * 0.03 * gradient / size], 1e-9)


def test_wide_layers_leave_c_out_and_the_summary_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaged_preconditioned, "WIDEST", 6)  # the first layer has 6 and a bias
    model = network()
    opt = LocoProp(model, variant="locoprop-m", solver=NAME, output_transfer="sigmoid")
    before = weights(model)
    opt.zero_grad()
    cross_entropy(model(rows_of(0)), rows_of(0)[:, :3]).backward()
    gradient = joined(model[0], gradient=True)
    opt.step()
    assert set(opt.state[model[0].weight]) == {"average", "size"}
    assert "inverse" in opt.state[model[2].weight]
    size = gradient.square().mean(1, keepdim=True).sqrt()
    assert_close(
        [model[0].weight.detach()], [before[0] - (0.00114 * gradient / size)[:, :-1]], 1e-9
    )
    rows = [line for line in opt.summary().splitlines() if "no XᵀX" in line]
    assert len(rows) == 1
    assert rows[0].startswith("0 ")
    assert "gram=" not in rows[0]  # which this solver refuses


# ---- dtypes and populations ----------------------------------------------------------------------


def random_problem(transfer: Transfer, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x, start = normal(30, 6), {"weight": normal(4, 6), "bias": normal(4)}
    g = normal(30, 4)
    return LocalProblem(
        linear_map=Dense(),
        x=x,
        start=start,
        fixed={},
        backprop={"weight": g.mT @ x, "bias": g.sum(0)},
        target=MirrorDescent(),
        loss=Matching(),
        transfer=transfer,
        gamma=1.0,
        eta=1.0,
        regularizer=REGULARIZERS["none"],
    )


def empty(problem: LocalProblem) -> dict[str, dict[str, Tensor]]:
    return {name: {} for name in problem.start}


@pytest.mark.parametrize("transfer", [Tanh(), Softmax()], ids=repr)
def test_leading_dimensions_are_free_and_may_have_their_own_numbers(transfer: Transfer) -> None:
    lr, mu, rho = (0.1, 0.01, 0.0), (0.9, 0.0, 0.5), (0.95, 0.5, 0.0)
    members = [[random_problem(transfer, 10 * step + k) for k in range(3)] for step in range(3)]
    states: list[Any] = [empty(member) for member in members[0]]
    stacked_states: Any = {"weight": {}, "bias": {}}
    of_all = Numbers(*(torch.tensor(each, dtype=torch.float64) for each in (lr, mu, rho)))
    for step in members:
        start, backprop = (
            {key: torch.stack([getattr(m, name)[key] for m in step]) for key in ("weight", "bias")}
            for name in ("start", "backprop")
        )
        x = torch.stack([m.x for m in step])
        population = replace(step[0], x=x, start=start, backprop=backprop)
        found, stacked_states = AveragedPreconditioned().solve(
            population, stacked_states, dict.fromkeys(start, of_all), 1, "linear"
        )
        for k, member in enumerate(step):
            numbers = dict.fromkeys(member.start, Numbers(lr[k], mu[k], rho[k]))
            alone, states[k] = AveragedPreconditioned().solve(
                member, states[k], numbers, 1, "linear"
            )
            for name, tensor in alone.items():
                torch.testing.assert_close(found[name][k], tensor, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_other_precisions_come_to_the_same(dtype: torch.dtype) -> None:
    """To the precision of the states; λ of bfloat16 is 0.5, so all have a large one here."""
    ends = []
    for kind in (dtype, torch.float64):
        model = network().to(kind)
        solver = AveragedPreconditioned(damping=0.6)
        opt = LocoProp(model, solver=solver, variant="locoprop-m", output_transfer="sigmoid")
        start = weights(model)
        for step in range(14):
            opt.zero_grad()
            x = rows_of(step).to(kind)
            cross_entropy(model(x), x[:, :3]).backward()
            opt.step()
        assert all(p.dtype == kind for p in model.parameters())
        wide = torch.promote_types(
            kind, torch.float32
        )  # of sizes, which bfloat16 would not let fall
        for state in opt.state.values():
            for key, entry in state.items():
                assert entry.dtype == (wide if key == "size" else kind), key
        assert not any(opt.skipped_updates.values())
        ends.append([(b - a).double() for a, b in zip(start, weights(model), strict=True)])
    found, expected = (torch.cat([t.flatten() for t in end]) for end in ends)
    error = float((found - expected).norm() / expected.norm())
    assert 0 < error < {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.3}[dtype]


@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.bfloat16, 0.5), (torch.float16, 0.0625), (torch.float32, 0.0)]
)
def test_damping_is_larger_than_the_rounding_of_the_weights(
    dtype: torch.dtype, least: float
) -> None:
    """An inverse in half precision would lose a smaller one."""
    problem = random_problem(Tanh(), dtype=dtype)
    inverses = []
    for damping in (1e-3, max(least, 1e-3), 0.6):
        solver, numbers = AveragedPreconditioned(damping=damping), Numbers(0.1, 0.9, 0.9)
        given = problem, empty(problem), dict.fromkeys(problem.start, numbers), 1, "linear"
        inverses.append(solver.solve(*given)[1]["weight"]["inverse"])
    assert torch.equal(inverses[0], inverses[1])
    assert not torch.equal(inverses[0], inverses[2])


# ---- settings ------------------------------------------------------------------------------------


def test_its_name_and_its_defaults() -> None:
    assert SOLVERS[NAME] == AveragedPreconditioned()
    names = ("variant", "lr", "momentum", "decay", "local_steps")
    opt = LocoProp(network(), solver=NAME)
    assert [opt.param_groups[0][name] for name in names] == ["locoprop-m", 0.03, 0.9, 0.95, 1]
    solver = AveragedPreconditioned(every=20)
    group = LocoProp(network(), solver=solver, lr=0.1, variant="locoprop-s").param_groups[0]
    assert [group[name] for name in names] == ["locoprop-s", 0.1, 0.9, 0.95, 1]


def test_the_number_of_steps_between_renewals() -> None:
    for every, state in ((1, {}), (7, {"inverse": torch.eye(3)})):
        solver = AveragedPreconditioned(every=every)
        uses = [solver.use_of_rows(1, number, state, 3) for number in range(30)]
        renewed = [number for number, use in enumerate(uses) if use is None]
        assert renewed == [n for n in range(30) if n < 10 or n % every == 0]
        assert all(use is None or not use.is_any for use in uses)
    widest, wider = (AveragedPreconditioned().use_of_rows(1, 0, {}, n) for n in (8192, 8193))
    assert widest is None
    assert wider is not None
    assert not wider.is_any


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"every": True}, "every=True"),
        ({"averaging": 1.0}, "averaging=1.0"),
        ({"averaging": -0.1}, "averaging=-0.1"),
        ({"damping": 0.0}, "damping=0.0"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AveragedPreconditioned(**options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"local_steps": 2},
            "Invalid local_steps=2. Must be 1 with solver='preconditioned-averaged'",
        ),
        ({"regularizer": "l2"}, "solver='preconditioned-averaged' solves problems without a reg"),
        ({"gate": True}, "gate=True and cap_by='backprop' depend"),
        ({"cap": 0.1, "cap_by": "backprop"}, "cap_by='backprop' depend"),
        ({"every": 2}, r"pass solver=AveragedPreconditioned\(every=k\)"),
        ({"variant": "proxprop"}, "plain gradient step in the output layer"),
        ({"variant": "pocoprop-m"}, "solver='preconditioned-averaged'"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocoProp(network(), **{"solver": NAME, **settings})


@pytest.mark.parametrize("name", ["lr", "momentum", "decay"])
def test_weight_and_bias_share_the_numbers_of_one_matrix(name: str) -> None:
    layer = nn.Linear(4, 3)
    groups = [{"params": [layer.weight]}, {"params": [layer.bias], name: 0.1}]
    with pytest.raises(ValueError, match=f"differ in {name}"):
        LocoProp(layer, param_groups=groups, solver=NAME)


def test_other_parameters_get_adamw_at_a_third_of_its_rate() -> None:
    """As with the spectral step, whose entries move as far."""
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    with pytest.warns(
        UserWarning, match=r"2 parameters have no local problem and get AdamW\(lr=0.01\)"
    ):
        opt = LocoProp(model, solver=NAME)
    assert [group["lr"] for group in opt.param_groups] == pytest.approx([0.03, 0.01])


@pytest.mark.parametrize("settings", [{"max_rows": 5}, {"diagnose": True}, {"weight_decay": 0.1}])
def test_it_trains_beside_other_settings(settings: dict[str, Any]) -> None:
    model = network()
    opt = LocoProp(model, solver=NAME, output_transfer="sigmoid", **settings)
    train(model, opt, range(60))
    x = rows_of(0)
    last = cross_entropy(model(x), x[:, :3].clamp(0, 1))
    assert last < 0.97 * cross_entropy(network()(x), x[:, :3].clamp(0, 1))
    assert not any(opt.skipped_updates.values())


def test_plain_sgd_as_the_outer_optimizer_takes_its_steps() -> None:
    """At the rate lr · gamma, by which the displacements are divided."""
    alone, given = network(), network()
    settings: dict[str, Any] = {"solver": NAME, "output_transfer": "sigmoid"}
    train(alone, LocoProp(alone, **settings), range(14))
    outer = LocoProp(
        given, apply="gradient", outer=lambda params: torch.optim.SGD(params, lr=0.3), **settings
    )
    train(given, outer, range(14))
    assert_close(weights(given), weights(alone), 1e-9)


def test_it_serves_convex_losses() -> None:
    assert AveragedPreconditioned().serves(Squared())
    assert AveragedPreconditioned().serves(Matching())
    assert AveragedPreconditioned().is_fixed_work(5, torch.zeros(2, 3), True)
