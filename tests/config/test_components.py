"""A user's own target, loss, regularizer and solver stand where a built-in one does."""

from __future__ import annotations

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp, Variant
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.losses import LocalLoss, Matching, Squared
from torch_locoprop.paper.regularizers import L1, L2, Regularizer
from torch_locoprop.paper.targets import GradientDescent, MirrorDescent, Target
from torch_locoprop.paper.transfers import Transfer, get
from torch_locoprop.solvers import Exact, FirstOrder, Numbers, Sgd, Solver


class OwnMirrorDescent(Target):
    """The mirror-descent target written by a user: from the recorded ∂L/∂a alone."""

    def __call__(
        self, a: Tensor, transfer: Transfer, g: Tensor | None, v: Tensor | None, gamma: float
    ) -> Tensor:
        assert g is not None
        return transfer.f(a) - gamma * g


class OwnMatching(LocalLoss):
    def residual(self, a: Tensor, target: Tensor, transfer: Transfer) -> Tensor:
        return transfer.f(a) - target


class OwnRmsProp(FirstOrder):
    name = "own"

    def init(self, tensor: Tensor, numbers: Numbers) -> dict[str, Tensor]:
        return {"v": torch.ones_like(tensor), "m": torch.zeros_like(tensor)}

    def step(
        self, gradient: Tensor, state: dict[str, Tensor], numbers: Numbers
    ) -> tuple[Tensor, dict[str, Tensor]]:
        v = numbers.decay * state["v"] + (1 - numbers.decay) * gradient**2
        m = numbers.momentum * state["m"] + numbers.lr * gradient / (v + numbers.eps) ** 0.5
        return m, {"v": v, "m": m}


class OwnL2(Regularizer):
    name = "own l2"

    def direction(self, gradient, displacement, eta, metric):  # type: ignore[no-untyped-def]
        return {k: g + displacement[k] / eta for k, g in gradient.items()}


def train(**options: object) -> list[Tensor]:
    model = network()
    opt = LocoProp(model, lr=1e-3, momentum=0.9, output_transfer="sigmoid", **options)
    for seed in range(5):
        x = batch(8, 6, seed=seed)
        cross_entropy(model(x), x[:, :3]).backward()
        opt.step()
        opt.zero_grad()
    return weights(model)


def test_own_target_and_loss() -> None:
    own = Variant("own", OwnMirrorDescent(), OwnMatching())
    assert_close(train(variant=own), train(variant="locoprop-m"), 1e-10)


@pytest.mark.parametrize("solver", ["exact", "preconditioned", "preconditioned-averaged"])
def test_an_own_loss_without_curvature_has_no_closed_form(solver: str) -> None:
    own = Variant("own", GradientDescent(), OwnMatching())
    with pytest.raises(ValueError, match=f"solver='{solver}'"):
        LocoProp(network(), variant=own, solver=solver)


def test_own_target_with_a_built_in_loss() -> None:
    own = Variant("own", OwnMirrorDescent(), Matching())
    assert_close(train(variant=own, solver="exact"), train(solver="exact"), 1e-10)


def test_own_solver() -> None:
    assert_close(train(solver=OwnRmsProp()), train(solver="rmsprop"))


def test_own_regularizer() -> None:
    assert_close(train(regularizer=OwnL2()), train(regularizer="l2"))
    assert_close(train(regularizer=Regularizer()), train(variant="locoprop-m"))
    assert not torch.equal(train(regularizer="l2")[0], train(variant="locoprop-m")[0])


def test_own_solver_from_scratch() -> None:
    class Stay(Solver):
        name = "stay"

        def solve(self, problem, states, numbers, local_steps, local_decay):  # type: ignore[no-untyped-def]
            assert isinstance(problem, LocalProblem)
            return problem.start, states

    assert_close(train(solver=Stay()), weights(network()), 0.0)


def test_objects_of_one_name_are_kept_apart() -> None:
    model = network()
    opt = LocoProp(
        model,
        regularizer=L1(strength=0.1),
        param_groups=[
            {"params": model[0].parameters()},
            {"params": model[2].parameters(), "regularizer": L1(strength=0.2)},
            {"params": model[4].parameters(), "regularizer": L1(strength=0.1)},
        ],
    )
    names = [group["regularizer"] for group in opt.param_groups]
    assert names == ["L1(strength=0.1)", "L1(strength=0.2)", "L1(strength=0.1)"]
    assert opt._components.regularizer(opt.param_groups[1]) == L1(strength=0.2)


def test_l1_moves_few_entries() -> None:
    """Exactly those whose γ|∂L/∂w| exceeds the strength, in the first iteration of sgd."""
    model = network()
    opt = LocoProp(model, lr=0.1, gamma=2.0, solver="sgd", local_steps=1, regularizer=L1(0.05))
    before = weights(model)
    x = batch(8, 6)
    cross_entropy(model(x), x[:, :3]).backward()
    gradients = [2.0 * p.grad for p in model.parameters()]
    opt.step()
    for w0, w1, g in zip(before, weights(model), gradients, strict=True):
        assert torch.equal(w0 != w1, g.abs() > 0.05)
    moved = torch.cat([(a != b).flatten() for a, b in zip(before, weights(model), strict=True)])
    assert 0 < moved.sum() < moved.numel()


def test_l1_iterations_converge_to_the_minimiser() -> None:
    """Optimality of ``D + λ‖W̃ − W‖₁``: |∇D| ≤ λ where unmoved, −λ·sign where moved."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    strength = 0.02
    opt = LocoProp(
        model, lr=0.05, gamma=1.0, solver="sgd", local_steps=3000, local_decay="constant",
        regularizer=L1(strength), output_transfer="sigmoid",
    )  # fmt: skip
    x, y = batch(20, 4), batch(20, 3, seed=2)
    cross_entropy(model(x), y).backward()
    w0, b0 = weights(model)
    gradient = model.weight.grad.clone()
    opt.step()
    w1, b1 = weights(model)
    change = torch.sigmoid(x @ w1.mT + b1) - torch.sigmoid(x @ w0.mT + b0)
    total = gradient + change.mT @ x
    still = w1 == w0
    assert 0 < still.sum() < still.numel()
    assert (total[still].abs() <= strength + 1e-9).all()
    torch.testing.assert_close(total[~still], -strength * (w1 - w0)[~still].sign())


def test_regularizer_values() -> None:
    moved = {"weight": torch.tensor([[3.0, -4.0]]), "bias": torch.tensor([1.0])}
    assert Regularizer().value(moved, 0.5, None) == 0
    assert L2().value(moved, 0.5, None) == pytest.approx(26.0)
    assert L1(0.5).value(moved, 0.5, None) == pytest.approx(4.0)


def test_zero_lr_with_the_l2_term_stands_still() -> None:
    model = network()
    before = weights(model)
    opt = LocoProp(model, lr=0.0, solver="sgd", regularizer="l2", output_transfer="sigmoid")
    x = batch(8, 6)
    cross_entropy(model(x), x[:, :3]).backward()
    opt.step()
    assert_close(weights(model), before, 0.0)
    assert sum(opt.skipped_updates.values()) == 0


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"solver": Sgd()}, "sgd"),
        ({"solver": Exact()}, "exact"),
        ({"solver": Exact(decay=0.5)}, "Exact(decay=0.5, every=1, damping=None)"),
        ({"solver": OwnRmsProp()}, "own"),
        ({"regularizer": L2()}, "l2"),
        ({"regularizer": L1()}, "l1"),
        ({"variant": Variant("locoprop-s", GradientDescent(), Squared())}, "locoprop-s"),
        ({"variant": Variant("locoprop-s", MirrorDescent(), Squared())}, "locoprop-s-2"),
    ],
)
def test_a_component_is_known_by_what_it_is(given: dict[str, object], name: str) -> None:
    opt = LocoProp(network(), **given)
    assert opt.param_groups[0][next(iter(given))] == name


def test_exact_takes_an_l2_object() -> None:
    assert_close(train(solver="exact", regularizer=L2()), train(solver="exact"))


def test_a_component_with_tensors_is_its_own() -> None:
    class Scaled(OwnRmsProp):
        name = "scaled"

        def __init__(self, scale: float) -> None:
            self.scale = torch.tensor(scale)

    model = network()
    groups = [
        {"params": model[0].parameters(), "solver": Scaled(1.0)},
        {"params": model[2].parameters(), "solver": Scaled(2.0)},
    ]
    opt = LocoProp(model, param_groups=groups)
    assert [group["solver"] for group in opt.param_groups] == ["scaled", "scaled-2"]


@pytest.mark.parametrize("transfer", ["tanh", "sigmoid", "relu"])
def test_residuals_of_the_matching_loss_can_be_differentiated(transfer: str) -> None:
    a = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    residual = Matching().residual(a, torch.zeros(3, 2, dtype=torch.float64), get(transfer))
    (found,) = torch.autograd.grad(residual.sum(), a)
    torch.testing.assert_close(found, get(transfer).derivative(a.detach()))
