"""The closed forms: minimisers of the stated objective, fixed points of its iteration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.paper import transfers
from torch_locoprop.paper.closed_form import (
    eigh,
    implicit_step,
    operations,
    precise_enough,
    sylvester,
)
from torch_locoprop.paper.fisher import cholesky, damped, damped_solve, is_well_posed
from torch_locoprop.paper.gram import FULL, Gram, RowUse, Structure
from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.losses import Matching, Squared
from torch_locoprop.paper.regularizers import L2
from torch_locoprop.paper.structured_gram import ReducedGram
from torch_locoprop.paper.targets import GradientDescent, MirrorDescent
from torch_locoprop.solvers import SOLVERS, Exact, Numbers


def squared_problem(rows: int, eta: float = 0.2, bias: bool = True) -> LocalProblem:
    x, g = batch(rows, 4) - 0.5, batch(rows, 3, seed=3) - 0.5
    start = {"weight": batch(3, 4, seed=2), "bias": batch(3, seed=4)}
    backprop = {"weight": g.mT @ x, "bias": g.sum(0)}
    if not bias:
        del start["bias"], backprop["bias"]
    return LocalProblem(
        linear_map=Dense(),
        x=x,
        start=start,
        fixed={},
        backprop=backprop,
        target=GradientDescent(),
        loss=Squared(),
        transfer=transfers.Linear(),
        gamma=3.0,
        eta=eta,
        regularizer=L2(),
        g=g,
    )


def solve(problem: LocalProblem, name: str, steps: int = 1) -> dict[str, Tensor]:
    states: dict[str, dict[str, Tensor]] = {key: {} for key in problem.start}
    numbers = {key: Numbers(problem.eta) for key in problem.start}
    return SOLVERS[name].solve(problem, states, numbers, steps, "constant")[0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [2, 9])
def test_exact_minimises_the_squared_objective(rows: int, bias: bool) -> None:
    """Against Eq. 3 written out, with its explicit target: the gradient vanishes, and it is lower."""
    problem = squared_problem(rows, bias=bias)
    found = {key: t.requires_grad_() for key, t in solve(problem, "exact").items()}

    def objective(at: dict[str, Tensor]) -> Tensor:
        a = problem.x @ at["weight"].mT + at.get("bias", 0)
        start = problem.x @ problem.start["weight"].mT + problem.start.get("bias", 0)
        target = start - problem.gamma * problem.g
        moved = sum((at[k] - problem.start[k]).square().sum() for k in at)
        return 0.5 * (a - target).square().sum() + moved / (2 * problem.eta)

    value = objective(found)
    for gradient in torch.autograd.grad(value, list(found.values())):
        assert gradient.abs().max() < 1e-12
    for seed in range(5):
        other = {k: t + 0.1 * (batch(*t.shape, seed=seed + 30) - 0.5) for k, t in found.items()}
        assert objective(other) > value + 1e-6


@pytest.mark.parametrize("rows", [2, 9])
def test_exact_is_the_fixed_point_of_the_iteration(rows: int) -> None:
    """Eq. 4: ``W = W₀ − η (X Wᵀ − a*)ᵀ X`` holds at the solution."""
    problem = squared_problem(rows)
    found = solve(problem, "exact")
    gradient = problem.gradient(found)
    for key, tensor in found.items():
        expected = problem.start[key] - problem.eta * gradient[key]
        torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-13)


def test_many_iterations_with_the_l2_term_converge_to_exact() -> None:
    problem = squared_problem(9, eta=0.05)
    near, far = solve(problem, "sgd", 2000), solve(problem, "sgd", 2)
    exact = solve(problem, "exact")
    assert_close(list(near.values()), list(exact.values()), 1e-11)
    assert (far["weight"] - exact["weight"]).abs().max() > 1e-3


@pytest.mark.parametrize("rows", [1, 3, 7, 20])
def test_both_systems_give_the_same_step(rows: int) -> None:
    """The rows × rows and the n × n system, against a dense inverse."""
    x, g = batch(rows, 7) - 0.5, batch(4, 7, seed=2) - 0.5
    dense = -0.3 * g @ torch.linalg.inv(torch.eye(7, dtype=x.dtype) + 0.3 * x.mT @ x)
    torch.testing.assert_close(implicit_step(g, x, 0.3), dense, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("kind", ["diagonal", "dense"])
def test_sylvester_against_a_dense_kronecker_solve(kind: str, rows: int) -> None:
    x, g = batch(rows, 5) - 0.5, batch(3, 5, seed=2) - 0.5
    h = batch(3, seed=4)
    root = batch(3, 3, seed=5)
    dense = torch.diag(h) if kind == "diagonal" else root @ root.mT
    system = torch.eye(15, dtype=x.dtype) + 0.6 * torch.kron((x.mT @ x).contiguous(), dense)
    expected = -0.6 * torch.linalg.solve(system, g.mT.reshape(-1)).reshape(5, 3).mT
    found = sylvester(g, x, 0.6, h if kind == "diagonal" else dense)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_leading_dimensions_are_free() -> None:
    x, g, h = batch(4, 3, 5), batch(4, 2, 5, seed=2), batch(4, 2, seed=3)
    for k in range(4):
        assert_close([implicit_step(g, x, 0.3)[k]], [implicit_step(g[k], x[k], 0.3)])
        assert_close([sylvester(g, x, 0.3, h)[k]], [sylvester(g[k], x[k], 0.3, h[k])])


def test_sylvester_ignores_rows_that_carry_nothing() -> None:
    x = torch.cat([batch(2, 6), torch.zeros(2, 6, dtype=torch.float64)])
    g = batch(3, 6, seed=2)
    h = batch(3, seed=3)
    torch.testing.assert_close(sylvester(g, x, 0.4, h), sylvester(g, x[:2], 0.4, h))
    torch.testing.assert_close(sylvester(g, x[2:], 0.4, h), -0.4 * g)


def test_an_eigenvalue_of_rounding_may_have_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal rows: the zero of ``X Xᵀ`` may be computed as any number below the rounding."""
    x, g, h = batch(1, 5).expand(2, 5).contiguous(), batch(3, 5, seed=2), batch(3, seed=3)
    x[1, 0] += 1e-9
    true = torch.linalg.eigh

    def tiny(matrix: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = true(matrix)
        values[0] = 1e-40
        return values, vectors

    monkeypatch.setattr(torch.linalg, "eigh", tiny)
    found = sylvester(g, x, 0.4, h)
    for j in range(3):
        system = torch.eye(5).double() + 0.4 * h[j] * x.mT @ x
        torch.testing.assert_close(found[j], -0.4 * torch.linalg.solve(system, g[j]))


@pytest.mark.parametrize("rows", [3, 9])
@pytest.mark.parametrize("leading", [(2,), (2, 4)], ids=str)
def test_members_of_a_population_are_problems_of_their_own(
    leading: tuple[int, ...], rows: int
) -> None:
    """With a dense H for each, and inputs whose lengths differ by a factor of 1e9."""
    x, g = batch(*leading, rows, 5) - 0.5, batch(*leading, 3, 5, seed=2) - 0.5
    root = batch(*leading, 3, 3, seed=3)
    h = root @ root.mT
    x[0] *= 1e9
    found, diagonal = (sylvester(g, x, 0.3, each) for each in (h, h.diagonal(dim1=-2, dim2=-1)))
    last = (-1,) * len(leading)
    for result, own in ((found, h[last]), (diagonal, h[last].diagonal().diag())):
        c = (x[last].mT @ x[last]).contiguous()
        system = torch.eye(15).double() + 0.3 * torch.kron(c, own)
        expected = -0.3 * torch.linalg.solve(system, g[last].mT.reshape(-1)).reshape(5, 3).mT
        torch.testing.assert_close(result[last], expected, rtol=1e-10, atol=1e-11)


def test_matching_with_a_linear_transfer_is_the_squared_solution() -> None:
    model, other = network("linear"), network("linear")
    for net, variant in ((model, "locoprop-m"), (other, "locoprop-s")):
        opt = LocoProp(net, lr=0.1, variant=variant, solver="exact", output_transfer="linear")
        nn.functional.mse_loss(net(batch(9, 6)), batch(9, 3, seed=2)).backward()
        opt.step()
    assert_close(weights(model), weights(other), 1e-11)


def one_layer(solver: Exact, variant: str = "locoprop-s") -> tuple[nn.Linear, LocoProp]:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3, bias=False).double()
    opt = LocoProp(
        layer, lr=0.5, gamma=2.0, variant=variant, solver=solver, output_transfer="sigmoid"
    )
    return layer, opt


def test_running_average_damping_and_refresh_against_the_recursion() -> None:
    """C̄ ← .8 C̄ + .2 XᵀX from the first batch; its inverse is renewed in steps 0 and 2 only."""
    layer, opt = one_layer(Exact(decay=0.8, every=2, damping=0.05))
    gram, inverse = None, None
    for step in range(4):
        x, y = batch(6, 4, seed=step), batch(6, 3, seed=step + 9)
        before = layer.weight.detach().clone()
        cross_entropy(layer(x), y).backward()
        gram = x.mT @ x if gram is None else 0.8 * gram + 0.2 * x.mT @ x
        if step % 2 == 0:
            inverse = torch.linalg.inv(gram + 0.05 * gram.diagonal().mean() * torch.eye(4).double())
        expected = before - 0.5 * 2.0 * layer.weight.grad @ inverse
        opt.step()
        opt.zero_grad()
        assert_close([layer.weight.detach()], [expected], 1e-11)


@pytest.mark.parametrize("damping", [None, 0.05])
def test_running_sylvester_against_the_recursion(damping: float | None) -> None:
    layer, opt = one_layer(Exact(decay=0.8, every=2, damping=damping), "locoprop-m")
    gram = kept = None
    for step in range(4):
        x, y = batch(6, 4, seed=step), batch(6, 3, seed=step + 9)
        before = layer.weight.detach().clone()
        cross_entropy(layer(x), y).backward()
        gram = x.mT @ x if gram is None else 0.8 * gram + 0.2 * x.mT @ x
        kept = gram if step % 2 == 0 else kept
        slope = torch.sigmoid(x @ before.mT)
        h = (slope * (1 - slope)).mean(0)
        shift, length = (1.0, 0.5) if damping is None else (damping * kept.diagonal().mean(), 1.0)
        for j in range(3):
            system = shift * torch.eye(4).double() + length * h[j] * kept
            before[j] -= 0.5 * torch.linalg.solve(system, 2.0 * layer.weight.grad[j])
        opt.step()
        opt.zero_grad()
        assert_close([layer.weight.detach()], [before], 1e-10)


def test_refresh_without_average_keeps_the_last_batch() -> None:
    layer, opt = one_layer(Exact(every=2))
    kept = None
    for step in range(3):
        x, y = batch(6, 4, seed=step), batch(6, 3, seed=step + 9)
        before = layer.weight.detach().clone()
        cross_entropy(layer(x), y).backward()
        kept = x.mT @ x if step % 2 == 0 else kept
        system = torch.eye(4).double() + 0.5 * kept
        expected = before - 0.5 * 2.0 * layer.weight.grad @ torch.linalg.inv(system)
        opt.step()
        opt.zero_grad()
        assert_close([layer.weight.detach()], [expected], 1e-11)


def test_factorisation_falls_back_to_float64() -> None:
    """``[[k, 1], [1, 1/k + ulp]]`` is positive definite, but not in float32's own arithmetic."""

    def matrix_of(k: int) -> Tensor:
        above = torch.nextafter(torch.tensor(1 / k), torch.tensor(1.0))
        return torch.tensor([[float(k), 1.0], [1.0, float(above)]])

    candidates = [matrix_of(k) for k in range(2, 300)]
    matrix = next(m for m in candidates if torch.linalg.cholesky_ex(m)[1] != 0)
    assert torch.linalg.cholesky_ex(matrix.double())[1] == 0
    factor = cholesky(matrix)
    assert factor.dtype == torch.float32
    error = (factor.double() @ factor.double().mT - matrix.double()).norm() / matrix.norm()
    assert error < 1e-6


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("rank", [1, 7, 300])
def test_what_is_well_posed_needs_no_float64(rank: int, scale: float) -> None:
    """With the least damping that counts as such, at the worst condition: one row, all alike."""
    size, eps = 300, torch.finfo(torch.float32).eps
    damping = 1.001 * size * eps / 1e-2
    assert is_well_posed(size, damping, torch.float32)
    assert not is_well_posed(size, damping / 1.01, torch.float32)
    torch.manual_seed(rank)
    rows = torch.randn(rank, size) if rank > 1 else torch.ones(1, size)
    matrix = damped(scale * (rows.mT @ rows), damping)
    factor = cholesky(matrix, well_posed=True)
    assert torch.equal(factor, cholesky(matrix))
    right = torch.randn(size, 2)
    found = torch.cholesky_solve(right, factor)
    error = (matrix.double() @ found.double() - right).norm() / right.norm()
    assert error < 1e-2


def test_what_cannot_be_factored_is_not_a_number() -> None:
    assert cholesky(-torch.eye(3)).isnan().all()
    assert cholesky(torch.full((3, 3), torch.nan)).isnan().any()
    assert cholesky(-torch.eye(3), well_posed=True).isnan().all()
    assert cholesky(torch.full((3, 3), torch.inf), well_posed=True).isnan().any()
    for matrix in (torch.full((3, 3), torch.inf), torch.diag(torch.tensor([1.0, torch.inf, 2.0]))):
        values, vectors = eigh(matrix)
        assert values.isnan().all()
        assert vectors.isnan().all()


def test_eigh_falls_back_to_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = (batch(4, 4) @ batch(4, 4).mT).float()
    true = torch.linalg.eigh

    def failing(m: Tensor) -> tuple[Tensor, Tensor]:
        if m.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return true(m)

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    values, vectors = eigh(matrix)
    assert values.dtype == torch.float32
    torch.testing.assert_close(vectors * values @ vectors.mT, matrix, rtol=1e-5, atol=1e-5)


def test_damped_solve() -> None:
    root = batch(3, 3)
    matrix = root @ root.mT
    dense = torch.linalg.inv(matrix + 0.1 * matrix.diagonal().mean() * torch.eye(3).double())
    right = batch(3, 5, seed=2)
    torch.testing.assert_close(damped_solve(matrix, right, 0.1), dense @ right)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.0}, "Invalid decay=1.0"),
        ({"decay": -0.1}, "Invalid decay=-0.1"),
        ({"every": 0}, "Invalid every=0"),
        ({"every": 1.5}, "Invalid every=1.5"),
        ({"damping": 0.0}, "Invalid damping=0.0"),
        ({"damping": float("nan")}, "Invalid damping=nan"),
    ],
)
def test_bad_numbers(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Exact(**options)


# ---- what tools ask of it, and precision -----------------------------------------------------------


@pytest.mark.parametrize("structure", [FULL, Structure("block", 3), Structure("diagonal")])
@pytest.mark.parametrize("bent", [False, True])
@pytest.mark.parametrize("options", [{}, {"decay": 0.5}, {"every": 2}, {"damping": 0.1}])
@pytest.mark.parametrize("leading", [(), (2,)], ids=str)
def test_empty_states_have_the_shapes_of_full_ones(
    leading: tuple[int, ...], options: dict[str, Any], bent: bool, structure: Structure
) -> None:
    start = {"weight": torch.zeros(*leading, 3, 4), "bias": torch.zeros(*leading, 3)}
    found = Exact(**options).empty_states(start, bent, structure=structure)
    of_gram = {"full": (5, 5), "block": (2, 3, 3), "diagonal": (5,)}[structure.kind]
    expected: dict[str, tuple[int, ...]] = {}
    if "decay" in options:
        expected["gram"] = of_gram
    if options and bent:
        expected |= {"eigenvalues": (5,), "eigenvectors": (5, 5)}
    elif "every" in options:
        expected["inverse"] = of_gram
    assert found["bias"] == {}
    assert {k: tuple(t.shape) for k, t in found["weight"].items()} == {
        k: (*leading, *shape) for k, shape in expected.items()
    }
    alone = Exact(**options).empty_states({"bias": start["bias"]}, bent)
    assert alone["bias"].keys() == expected.keys()


def test_which_steps_are_a_fixed_sequence_of_work() -> None:
    """Those that cannot fall back to float64: well damped ones, and those that renew nothing."""
    weight = torch.zeros(3, 4)
    assert Exact(damping=0.1).is_fixed_work(0, weight, False)
    assert not Exact(damping=0.1).is_fixed_work(0, weight, True)
    assert not Exact(damping=1e-9).is_fixed_work(0, weight, False)
    assert not Exact().is_fixed_work(1, weight, False)
    assert [Exact(every=3).is_fixed_work(i, weight, True) for i in range(4)] == [
        False,
        True,
        True,
        False,
    ]
    # [W b] has one column more than W: a damping that is enough for 4 columns and not for 5.
    eps = torch.finfo(torch.float32).eps
    assert not Exact(damping=4.5 * eps / 0.01).is_fixed_work(0, weight, False)
    assert Exact(damping=5.5 * eps / 0.01).is_fixed_work(0, weight, False)
    assert Exact(damping=4.5 * eps / 0.01).is_fixed_work(0, weight[:, :3], False)
    assert not Exact(damping=4.5 * eps / 0.01).is_fixed_work(0, weight.expand(2, 3, 4), False)


def test_which_steps_need_the_products_of_their_rows() -> None:
    """Each batch's own problem in float64; else those that renew C, average it, or know no inverse."""
    known = {"inverse": torch.eye(5)}
    assert Exact().use_of_rows(1, 1, {}, 5) == RowUse(square=True, precise=True)
    uses = [Exact(every=2).use_of_rows(1, n, known, 5) for n in range(4)]
    assert uses == [RowUse(square=True), RowUse()] * 2
    assert Exact(every=2).use_of_rows(1, 1, {}, 5) == RowUse(square=True)
    assert Exact(every=2, decay=0.1).use_of_rows(1, 1, known, 5) == RowUse(square=True)


class Twice:
    """Another process with the same rows."""

    rows, some_have_gram = 0, False

    def add_up(self, tensors: Any) -> None:
        for tensor in tensors:
            tensor.mul_(2)

    def average(self, mean: Tensor) -> Tensor:
        return mean


@pytest.mark.parametrize("matching", [False, True])
@pytest.mark.parametrize("rows", [2, 9])
def test_rows_of_other_processes_and_products_of_rows(rows: int, matching: bool) -> None:
    """``Δ + η H Δ C = −η γ G`` as one system of all entries, with C of the rows of both processes."""
    own = replace(squared_problem(rows), row_weight=0.3)
    if matching:
        own = replace(own, loss=Matching(), target=MirrorDescent(), transfer=transfers.Tanh())
    wide = torch.cat([own.x, torch.ones(rows, 1).double()], 1)
    gradient = torch.cat([own.backprop["weight"], own.backprop["bias"][:, None]], 1)
    a = wide @ torch.cat([own.start["weight"], own.start["bias"][:, None]], 1).mT
    h = (1 - a.tanh().square()).mean(0) if matching else torch.ones(3).double()
    problems = [(replace(own, others=cast(Any, Twice())), 2), (own, 1)]
    if not matching:
        problems.append((replace(own, x=Gram.of(own.x)), 1))
    for problem, processes in problems:
        c = processes * 0.3 * wide.mT @ wide
        system = torch.eye(15).double() + 0.2 * torch.kron(torch.diag(h), c)
        expected = torch.linalg.solve(system, (-0.2 * 3.0 * gradient).flatten()).view(3, 5)
        found = solve(problem, "exact")
        moved = [
            found["weight"] - own.start["weight"],
            (found["bias"] - own.start["bias"])[:, None],
        ]
        torch.testing.assert_close(torch.cat(moved, 1), expected)


@pytest.mark.parametrize("members", [1, 2])
def test_float64_where_a_member_is_too_ill_conditioned(members: int) -> None:
    """The bound is ``η ‖X‖² eps > 1e-3``, for any member."""
    eps = torch.finfo(torch.float32).eps
    x, gradient = torch.ones(members, 5, 2), torch.ones(members, 3, 2)
    for factor, dtype in ((0.99, torch.float32), (1.01, torch.float64)):
        scaled = x.clone()
        scaled[0] *= (factor * 1e-3 / eps / 0.5 / 10) ** 0.5
        found = precise_enough(gradient, scaled, 0.5)
        assert [t.dtype for t in found] == [dtype, dtype]
        torch.testing.assert_close(found[1].float(), scaled)
        rates = torch.tensor([0.5] + [1e-6] * (members - 1))
        assert precise_enough(gradient, scaled, rates)[0].dtype == dtype


def test_each_member_has_its_own_rate_in_that_bound() -> None:
    """A member with a high rate and one with long inputs are no member with both."""
    x, gradient = torch.ones(2, 5, 2), torch.ones(2, 3, 2)
    x[0] *= 100
    rates = torch.tensor([1e-3, 10.0])  # 100² · 10 · 1e-3 and 10 · 10, of 8389
    assert precise_enough(gradient, x, rates)[0].dtype == torch.float32
    assert precise_enough(gradient, x, rates.flip(0))[0].dtype == torch.float64
    limit = torch.tensor([1e-3]) / torch.finfo(torch.float32).eps
    assert precise_enough(gradient[:, :1, :1], torch.ones(1, 1), limit)[0].dtype == torch.float32
    assert precise_enough(gradient.to("meta"), x.to("meta"), 0.5)[0].dtype == torch.float32


def test_matrices_that_are_not_finite_leave_the_others_alone() -> None:
    matrices = torch.stack([torch.diag(torch.tensor([3.0, 1.0, 2.0])).double()] * 3)
    matrices[1, 0, 1] = matrices[1, 1, 0] = torch.nan
    matrices[2, 2, 2] = torch.inf
    values, vectors = eigh(matrices)
    torch.testing.assert_close(values[0], torch.tensor([1.0, 2.0, 3.0]).double())
    rebuilt = vectors[0] * values[0] @ vectors[0].mT
    torch.testing.assert_close(rebuilt, matrices[0])
    assert values[1:].isnan().all()
    assert vectors[1:].isnan().all()
    assert not values[0].isnan().any()


def test_eigenvalues_are_not_negative() -> None:
    assert (eigh(-torch.eye(3))[0] == 0).all()
    assert torch.equal(eigh(torch.full((2, 2), torch.nan))[0].isnan(), torch.tensor([True, True]))


# ---- populations and structures of C --------------------------------------------------------------


def joint(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors["weight"], tensors["bias"].unsqueeze(-1)], -1)


def dense_steps(
    x: list[Tensor], own: LocalProblem, options: dict[str, Any], bent: bool, zeros: Tensor
) -> list[Tensor]:
    """Return Δ of one layer in some steps: ``(s I + l h_j C) Δ_j = −η γ G_j`` for each output j.

    C is the running average at the last renewal, without the entries that ``zeros`` leaves out. Without
    damping, s is 1 and l is η; with it, s is λ and l is 1.
    """
    decay, every, damping = (options.get(k, v) for k, v in Exact().__dict__.items())
    gram = kept = None
    found = []
    eta, gradient = own.eta, 3.0 * joint(own.backprop)
    for step, rows in enumerate(x):
        wide = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
        c = 0.25 * wide.mT @ wide * zeros
        gram = c if gram is None else decay * gram + (1 - decay) * c
        kept = gram if step % every == 0 else kept
        assert kept is not None
        h = torch.ones(3).double()
        if bent:
            h = (1 - (wide @ joint(own.start).mT).tanh().square()).mean(0)
        shift, length = (1.0, eta) if damping is None else (damping * kept.diagonal().mean(), 1.0)
        systems = shift * torch.eye(len(kept)).double() + length * h[:, None, None] * kept
        found.append(-eta * torch.linalg.solve(systems, gradient))
    return found


RUNNING: list[dict[str, Any]] = [
    {},
    {"decay": 0.8},
    {"damping": 0.1},
    {"every": 2},
    {"decay": 0.8, "every": 2, "damping": 0.1},
]


def check_steps(
    problem: LocalProblem,
    x: list[Tensor],
    condensed: Any,
    options: dict[str, Any],
    zeros: Tensor,
    bent: bool = False,
) -> None:
    """Compare three steps of every member, and the entries of the state, with dense solves."""
    leading = x[0].shape[:-2]
    states: dict[str, dict[str, Tensor]] = {"weight": {}, "bias": {}}
    numbers = {key: Numbers(problem.eta) for key in states}
    moved = []
    for number, rows in enumerate(x):
        solver, structure = Exact(**options), problem.structure or FULL
        use = solver.use_of_rows(1, number, states["weight"], 5, structure=structure)
        assert use is not None
        # A step that needs nothing of the rows works without them; f' needs their pre-activations.
        known = condensed(rows) if bent or use.is_any else None
        now = replace(problem, x=known, number=number)
        new, states = solver.solve(now, states, numbers, 1, "constant")
        moved.append(joint(new) - joint(problem.start))
    flat = [m.reshape(-1, *m.shape[-2:]) for m in moved]
    for k in range(len(flat[0])):
        own = replace(
            problem,
            start={n: t.reshape(-1, *t.shape[len(leading) :])[k] for n, t in problem.start.items()},
            backprop={
                n: t.reshape(-1, *t.shape[len(leading) :])[k] for n, t in problem.backprop.items()
            },
        )
        rows_of = [rows.reshape(-1, *rows.shape[-2:])[k] for rows in x]
        expected = dense_steps(rows_of, own, options, bent, zeros)
        assert_close([f[k] for f in flat], expected, 1e-10)
    kept = {"gram"} if "decay" in options else set()
    if options and bent:
        kept |= {"eigenvalues", "eigenvectors"}
    elif "every" in options:
        kept.add("inverse")
    assert states["weight"].keys() == kept
    assert states["bias"] == {}


def population(leading: tuple[int, ...], bent: bool) -> LocalProblem:
    return LocalProblem(
        linear_map=Dense(),
        x=None,
        start={"weight": batch(*leading, 3, 4, seed=2), "bias": batch(*leading, 3, seed=4)},
        fixed={},
        backprop={"weight": batch(*leading, 3, 4, seed=5), "bias": batch(*leading, 3, seed=6)},
        target=MirrorDescent() if bent else GradientDescent(),
        loss=Matching() if bent else Squared(),
        transfer=transfers.Tanh() if bent else transfers.Linear(),
        gamma=3.0,
        eta=0.2,
        regularizer=L2(),
        row_weight=0.25,
    )


@pytest.mark.parametrize("form", ["rows", "products", "bent"])
@pytest.mark.parametrize("options", RUNNING, ids=str)
@pytest.mark.parametrize("leading", [(), (2,), (2, 4)], ids=str)
def test_steps_of_a_population_are_dense_solves(
    leading: tuple[int, ...], options: dict[str, Any], form: str
) -> None:
    x = [batch(*leading, 7, 4, seed=step) - 0.5 for step in range(3)]
    condensed = Gram.of if form == "products" else lambda rows: rows
    zeros = torch.ones(5, 5).double()
    check_steps(population(leading, form == "bent"), x, condensed, options, zeros, form == "bent")


@pytest.mark.parametrize("structure", [Structure("block", 3), Structure("diagonal")])
@pytest.mark.parametrize("options", RUNNING, ids=str)
@pytest.mark.parametrize("leading", [(), (2,)], ids=str)
def test_steps_with_parts_of_c_are_dense_solves_with_zeros(
    leading: tuple[int, ...], options: dict[str, Any], structure: Structure
) -> None:
    """Five columns make blocks of three and two, of which the second is padded."""
    x = [batch(*leading, 7, 4, seed=step) - 0.5 for step in range(3)]
    size = 3 if structure.kind == "block" else 1
    blocks = torch.arange(5) // size
    zeros = (blocks[:, None] == blocks).double()
    problem = replace(population(leading, False), structure=structure)
    check_steps(problem, x, lambda rows: ReducedGram.reduced(rows, structure), options, zeros)


@pytest.mark.parametrize("kind", ["full", "block"])
def test_all_columns_decide_whether_c_needs_float64(kind: str) -> None:
    """λ is relative to the mean diagonal of all columns, of which here two alone are not zero.

    It is then too small for the block of these two, which float32 cannot factor. It would not be with
    one column, or with as many as there are outputs or members.
    """
    eps, n = torch.finfo(torch.float32).eps, 1000
    damping = 150 * eps
    assert is_well_posed(1, damping, torch.float32)
    assert not is_well_posed(n, damping, torch.float32)

    def block_of(k: int) -> Tensor:
        a, b = 1 + torch.tensor([k * eps, (k * 7 % 300) * eps])
        least = (b.double() ** 2 / a.double()).float()
        c = least if least.double() * a.double() > b.double() ** 2 else torch.nextafter(
            least, torch.tensor(2.0)
        )  # fmt: skip
        block = torch.stack([torch.stack([a, b]), torch.stack([b, c])])
        return block + damping * (a + c) / n * torch.eye(2)

    block = next(b for b in map(block_of, range(3000)) if torch.linalg.cholesky_ex(b)[1] != 0)
    assert torch.linalg.cholesky_ex(block.double())[1] == 0
    structure, x = None, Gram(torch.zeros(1, 1, n, n), torch.empty(0), 9)
    if kind == "block":
        structure = Structure("block", 2, ones=False)
        x = ReducedGram(torch.zeros(1, 1, n // 2, 2, 2), torch.empty(0), 9, structure)
        x.square[0, 0, 0] = block
    else:
        x.square[0, 0, :2, :2] = block
    problem = LocalProblem(
        linear_map=Dense(),
        x=x,
        start={"weight": torch.zeros(1, 1, 1, n)},
        fixed={},
        backprop={"weight": torch.ones(1, 1, 1, n)},
        target=GradientDescent(),
        loss=Squared(),
        transfer=transfers.Linear(),
        gamma=1.0,
        eta=1.0,
        regularizer=L2(),
        structure=structure,
    )
    for every in (1, 2):
        new, _ = Exact(damping=damping, every=every).solve(
            problem, {"weight": {}}, {"weight": Numbers(1.0)}, 1, "constant"
        )
        assert new["weight"].isfinite().all()


@pytest.mark.parametrize("matching", [False, True])
@pytest.mark.parametrize("columns", ["weight", "bias", "both"])
@pytest.mark.parametrize(
    ("options", "number", "has_state", "expected"),
    [
        ({}, 7, False, True),  # of each batch
        ({"decay": 0.5, "every": 4, "damping": 0.1}, 8, True, True),
        ({"decay": 0.5, "every": 4, "damping": 0.1}, 9, True, False),
        ({"decay": 0.5, "every": 4, "damping": 0.1}, 9, False, True),
    ],
)
def test_which_steps_factorize(
    options: dict[str, Any],
    number: int,
    has_state: bool,
    expected: bool,
    columns: str,
    matching: bool,
) -> None:
    """Those of each batch, those that renew C, and those without a factorization that fits."""
    problem = squared_problem(9)
    changes: dict[str, Any] = {"loss": Matching()} if matching else {}
    if columns != "both":
        changes["start"] = {columns: problem.start[columns]}
    problem = replace(problem, number=number, **changes)
    solver, owner = Exact(**options), "bias" if columns == "bias" else "weight"
    states = solver.empty_states(problem.start, matching)
    if not has_state:
        states = {**states, owner: {}}
    assert solver.factorizes(problem, states) == expected
    other = {"gram": states[owner].get("gram", torch.eye(2)), "inverse": torch.eye(2)}
    other |= {"eigenvectors": torch.eye(2)}
    if expected or "gram" not in states[owner]:
        return
    assert solver.factorizes(problem, {**states, owner: other}), "one of them has another size"


def test_operations_of_a_closed_form() -> None:
    """A Cholesky factor and two triangular solves for d rows, or eigenvectors and two products."""
    d, n = 5, 12
    factor, triangular, product = n**3 / 3, 2 * d * n**2 / 2, 2 * d * n**2
    assert operations(d, n, False) == factor + 2 * triangular
    assert operations(d, n, True) == 9 * n**3 + 2 * product
    assert operations(d, n, False, Structure("diagonal")) == d * n
    of_one = operations(d, 4, True)
    assert operations(d, n, True, Structure("block", 4)) == 3 * of_one
