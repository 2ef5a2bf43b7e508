"""Propositions 1 to 4 of the paper, each against dense matrices, autograd or the definition."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from cases import batch, cross_entropy, network, weights
from torch import Tensor

from torch_locoprop import LocoProp, Variant
from torch_locoprop.paper import transfers
from torch_locoprop.paper.closed_form import sylvester
from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.losses import Matching
from torch_locoprop.paper.objective import objective
from torch_locoprop.paper.regularizers import L2
from torch_locoprop.paper.targets import MirrorDescent, NaturalGradient
from torch_locoprop.paper.variants import VARIANTS
from torch_locoprop.recording import row_gradients


def matching_problem(
    transfer: transfers.Transfer, rows: int, eta: float = 0.1, gamma: float = 0.7, d: int = 3
) -> LocalProblem:
    x, w = batch(rows, 4) - 0.5, batch(d, 4, seed=2) - 0.5
    g = batch(rows, d, seed=3) - 0.5
    return LocalProblem(
        linear_map=Dense(),
        x=x,
        start={"weight": w},
        fixed={},
        backprop={"weight": g.mT @ x},
        target=MirrorDescent(),
        loss=Matching(),
        transfer=transfer,
        gamma=gamma,
        eta=eta,
        regularizer=L2(),
        g=g,
    )


@pytest.mark.filterwarnings("ignore:The first step changes the weights")  # hardly any damping
@pytest.mark.parametrize("output_transfer", ["sigmoid", "softmax", "linear"])
def test_proposition_1_natural_target_and_exact_solve_give_the_kfac_update(
    output_transfer: str,
) -> None:
    """``w − ηγ ((I + η XᵀX) ⊗ D)⁻¹ vec(G)`` with a dense Kronecker product, D from the definition.

    The update also minimizes Eq. 3 with the target ``a − γ D⁻¹ ∂L/∂a``: autograd's gradient is zero.
    """
    eta, gamma, damping = 0.05, 2.0, 1e-3
    model, x, y = network(), batch(11, 6), batch(11, 3, seed=2)
    variant = Variant("natural", NaturalGradient(damping=damping), VARIANTS["natural-s"].loss)
    opt = LocoProp(
        model,
        lr=eta,
        gamma=gamma,
        variant=variant,
        solver="exact",
        output_transfer=output_transfer,
    )
    before = weights(model)
    F.mse_loss(model(x), y).backward()
    # The sampled output gradient, read where the model's last layer recorded it, and sent back
    # through the network by autograd alone.
    at_output = row_gradients.sampled(opt._layers[-1])
    a, pre_activations = x, []
    for module in copy.deepcopy(model):  # a copy: it is not recorded
        a = module(a)
        if isinstance(module, torch.nn.Linear):
            pre_activations.append(a)
    sampled = torch.autograd.grad(a, pre_activations, at_output, retain_graph=True)
    of_loss = torch.autograd.grad(F.mse_loss(a, y), pre_activations)
    gradients = [p.grad.clone() for p in model.parameters()]
    inputs = [x, torch.tanh(pre_activations[0]), torch.tanh(pre_activations[1])]
    opt.step()
    after = weights(model)
    for m, g in enumerate(sampled):
        fisher = g.mT @ g / len(g)
        fisher = fisher + damping * fisher.diagonal().mean() * torch.eye(len(fisher), dtype=x.dtype)
        ones = torch.ones(len(x), 1, dtype=x.dtype)
        rows = torch.cat([inputs[m].detach(), ones], 1)
        curvature = torch.eye(rows.shape[1], dtype=x.dtype) + eta * rows.mT @ rows
        joint = torch.cat([gradients[2 * m], gradients[2 * m + 1][:, None]], 1)
        columns = joint.mT.reshape(-1)  # vec stacks the columns
        delta = -eta * gamma * torch.linalg.solve(torch.kron(curvature, fisher), columns)
        delta = delta.reshape(joint.mT.shape).mT
        torch.testing.assert_close(
            after[2 * m], before[2 * m] + delta[:, :-1], rtol=1e-9, atol=1e-12
        )
        torch.testing.assert_close(after[2 * m + 1], before[2 * m + 1] + delta[:, -1])
        assert delta.abs().max() > 1e-6
        old = torch.cat([before[2 * m], before[2 * m + 1][:, None]], 1)
        new = torch.cat([after[2 * m], after[2 * m + 1][:, None]], 1).requires_grad_()
        target = rows @ old.mT - gamma * torch.linalg.solve(fisher, of_loss[m].mT).mT
        squared = 0.5 * (rows @ new.mT - target).square().sum()
        (slope,) = torch.autograd.grad(squared + (new - old).square().sum() / (2 * eta), new)
        assert slope.abs().max() < 1e-9 * (delta / eta).abs().max()


@pytest.mark.parametrize("name", transfers.NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_proposition_2_the_local_matching_problem_is_convex(name: str, seed: int) -> None:
    """Along random segments the objective lies below its chord."""
    problem = matching_problem(transfers.get(name), rows=6, eta=0.3, gamma=3.0)
    one, other = ({"weight": 6 * batch(3, 4, seed=10 + seed + k) - 3} for k in (0, 50))
    ends = objective(problem, one), objective(problem, other)
    for t in torch.linspace(0.05, 0.95, 7, dtype=torch.float64):
        between = {"weight": (1 - t) * one["weight"] + t * other["weight"]}
        chord = (1 - t) * ends[0] + t * ends[1]
        assert objective(problem, between) <= chord + 1e-10 * chord.abs().clamp_min(1)
    # and not because it is flat: the regularizer alone bends it
    middle = {"weight": 0.5 * (one["weight"] + other["weight"])}
    assert objective(problem, middle) < 0.5 * (ends[0] + ends[1]) - 1e-3


def matching_fixed_point(problem: LocalProblem) -> Tensor:
    """The minimiser of the objective by Newton's method on autograd's own derivatives."""
    w = problem.start["weight"].clone()

    def value(flat: Tensor) -> Tensor:
        return objective(problem, {"weight": flat.reshape(w.shape)})

    flat = w.reshape(-1)
    for _ in range(30):
        gradient = torch.autograd.functional.jacobian(value, flat)
        hessian = torch.autograd.functional.hessian(value, flat)
        flat = flat - torch.linalg.solve(hessian, gradient)
    return flat.reshape(w.shape)


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "softplus", "softmax", "arctan"])
def test_proposition_3_the_sylvester_form_errs_at_second_order(name: str) -> None:
    """One row, where H is exact: halving γ quarters the distance to the true fixed point."""
    errors = []
    for gamma in (0.4, 0.2, 0.1, 0.05):
        problem = matching_problem(transfers.get(name), rows=1, eta=2.0, gamma=gamma)
        found = matching_fixed_point(problem) - problem.start["weight"]
        h = problem.transfer.derivative(problem.a0)[0]
        approximate = sylvester(problem.first_gradient["weight"], problem.x, problem.eta, h)
        errors.append(float((approximate - found).norm()))
        assert float(found.norm()) > 3 * errors[-1]
    ratios = [a / b for a, b in pairwise(errors)]
    assert all(3.0 < ratio < 5.5 for ratio in ratios), ratios


@pytest.mark.parametrize(("transfer", "rows"), [("tanh", 1), ("softmax", 1), ("tanh", 9)])
def test_proposition_3_in_the_dense_vectorized_form(transfer: str, rows: int) -> None:
    """``C δ = −ηγ (I ⊗ H⁻¹) vec(G)`` with ``C = I ⊗ H⁻¹ + η XᵀX ⊗ I``, as printed."""
    problem = matching_problem(transfers.get(transfer), rows=rows, eta=0.8)
    h = problem.loss.curvature(problem.a0, problem.transfer)
    dense = h if h.dim() == 2 else torch.diag(h)
    if transfer == "softmax":  # H is singular along the ones: invert it where it is not
        dense = dense + 1e-6 * torch.eye(3, dtype=h.dtype)
        h = dense
    inverse = torch.linalg.inv(dense).contiguous()
    gram = problem.x.mT @ problem.x
    eye_n, eye_d = torch.eye(4, dtype=gram.dtype), torch.eye(3, dtype=gram.dtype)
    c = torch.kron(eye_n, inverse) + problem.eta * torch.kron(gram, eye_d)
    g = problem.backprop["weight"]
    right = torch.kron(eye_n, inverse) @ g.mT.reshape(-1)
    delta = -problem.eta * problem.gamma * torch.linalg.solve(c, right)
    found = sylvester(problem.first_gradient["weight"], problem.x, problem.eta, h)
    torch.testing.assert_close(found.mT.reshape(-1), delta, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", ["diagonal", "dense"])
@pytest.mark.parametrize("rows", [1, 9])
def test_the_sylvester_equation_10_holds_as_printed(rows: int, kind: str) -> None:
    """``H⁻¹Δ + η Δ XᵀX = −ηγ H⁻¹ G`` at the solution, for a diagonal and a dense H."""
    problem = matching_problem(transfers.get("tanh"), rows=rows, eta=0.8)
    root = batch(3, 3, seed=7)
    h = batch(3, seed=6) + 0.1 if kind == "diagonal" else root @ root.mT + torch.eye(3).double()
    delta = sylvester(problem.gamma * problem.backprop["weight"], problem.x, problem.eta, h)
    inverse = torch.linalg.inv(torch.diag(h) if kind == "diagonal" else h)
    left = inverse @ delta + problem.eta * delta @ problem.x.mT @ problem.x
    right = -problem.eta * problem.gamma * inverse @ problem.backprop["weight"]
    torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-12)
    assert right.abs().max() > 1e-3


@pytest.mark.parametrize("output_transfer", ["sigmoid", "softmax", "linear"])
def test_proposition_4_with_gamma_one_the_last_layer_minimises_the_loss(
    output_transfer: str,
) -> None:
    """The local objective of the output layer is the network's loss plus the regularizer."""
    x, w0 = batch(8, 4), batch(3, 4, seed=2) - 0.5
    labels = torch.arange(8) % 3
    y = F.one_hot(labels, 3).double() if output_transfer == "softmax" else batch(8, 3, seed=3)

    def loss(weight: Tensor) -> Tensor:
        logits = x @ weight.mT
        if output_transfer == "sigmoid":
            return F.binary_cross_entropy_with_logits(logits, y, reduction="sum")
        if output_transfer == "softmax":
            return F.cross_entropy(logits, labels, reduction="sum")
        return 0.5 * F.mse_loss(logits, y, reduction="sum")

    problem = LocalProblem(
        linear_map=Dense(),
        x=x,
        start={"weight": w0},
        fixed={},
        backprop={"weight": torch.autograd.functional.jacobian(loss, w0)},
        target=MirrorDescent(),
        loss=Matching(),
        transfer=transfers.get(output_transfer),
        gamma=1.0,
        eta=0.3,
        regularizer=L2(),
    )
    for seed in range(4):
        other = batch(3, 4, seed=20 + seed) * 4 - 2
        regularizer = (other - w0).square().sum() / (2 * 0.3)
        expected = loss(other) - loss(w0) + regularizer
        torch.testing.assert_close(objective(problem, {"weight": other}), expected)


def test_objective_has_the_gradient_the_solvers_follow() -> None:
    """For every variant, autograd of the objective is the gradient plus the L2 term."""
    model, x, y = network("softplus"), batch(9, 6), batch(9, 3, seed=2)
    for name in ("locoprop-s", "locoprop-m", "pocoprop-s", "pocoprop-m"):
        for p in model.parameters():
            p.grad = None
        opt = LocoProp(model, variant=name, gamma=2.0, output_transfer="sigmoid")
        layer = opt._layers[1]
        layer.use_of_rows = None  # keep the rows
        cross_entropy(model(x), y).backward()
        g, v = row_gradients.gradients(layer), row_gradients.post_gradients(layer)
        w, b = layer.tensors["weight"], layer.tensors["bias"]
        problem = LocalProblem(
            linear_map=layer.kind.linear_map,
            x=layer.inputs(),
            start={"weight": w.detach(), "bias": b.detach()},
            fixed={},
            backprop={"weight": w.grad, "bias": b.grad},
            target=VARIANTS[name].target,
            loss=VARIANTS[name].loss,
            transfer=transfers.get("softplus"),
            gamma=2.0,
            eta=0.1,
            regularizer=L2(),
            g=g,
            v=v,
        )
        at = {
            "weight": (w + batch(*w.shape, seed=5)).detach().requires_grad_(),
            "bias": (b + batch(*b.shape, seed=6)).detach().requires_grad_(),
        }
        exact = torch.autograd.grad(objective(problem, at), list(at.values()))
        local = problem.gradient({k: t.detach() for k, t in at.items()})
        for found, key in zip(exact, at, strict=True):
            expected = local[key] + (at[key].detach() - problem.start[key]) / 0.1
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
