"""The sampled Fisher matrix, the natural target, and the Fisher regularizer."""

from __future__ import annotations

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp, Variant
from torch_locoprop.paper import fisher, transfers
from torch_locoprop.paper.fisher import (
    cholesky,
    cholesky_inverse,
    cholesky_solve,
    damped,
    damped_solve,
    sampled_output_gradient,
    second_moment,
)
from torch_locoprop.paper.losses import Squared
from torch_locoprop.paper.targets import NaturalGradient
from torch_locoprop.recording import row_gradients


@pytest.mark.parametrize("name", ["sigmoid", "softmax", "linear"])
def test_sampled_gradients_have_the_fisher_of_the_predictive_distribution(name: str) -> None:
    """Eq. 12: the second moment of sampled gradients is ∇²F: y(1−y), diag(y) − yyᵀ, and I."""
    transfer = transfers.get(name)
    a = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64)
    rows = a.expand(200_000, 3)
    g = sampled_output_gradient(transfer, rows, torch.Generator().manual_seed(0))
    expected = transfer.derivative(a)
    expected = torch.diag(expected) if transfer.elementwise else expected
    torch.testing.assert_close(second_moment(g), expected, rtol=0, atol=1e-2)
    torch.testing.assert_close(g.mean(0), torch.zeros(3).double(), rtol=0, atol=1e-2)


def test_sampling_does_not_touch_gradients_and_is_undone_by_no_grad() -> None:
    model = network()
    LocoProp(model, variant="natural-s", output_transfer="sigmoid")
    model(batch(5, 6))
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        model(batch(5, 6))


@pytest.mark.parametrize("name", ["sigmoid", "softmax", "linear"])
def test_labels_of_sequences_are_those_of_their_rows(name: str) -> None:
    a = 3 * torch.randn(4, 5, 6, dtype=torch.float64)
    of_sequences, of_rows = (
        sampled_output_gradient(transfers.get(name), each, torch.Generator().manual_seed(0))
        for each in (a, a.flatten(0, 1))
    )
    assert torch.equal(of_sequences.flatten(0, 1), of_rows)


def test_running_fisher_and_refresh() -> None:
    """The Fisher matrix is sampled in steps 0 and 2 only and averaged with weight ½."""
    model = network()
    variant = Variant("natural", NaturalGradient(decay=0.5, every=2), Squared())
    opt = LocoProp(model, lr=1e-4, variant=variant, output_transfer="sigmoid")
    expected = None
    for step in range(4):
        x = batch(7, 6, seed=step)
        cross_entropy(model(x), x[:, :3]).backward()
        sampled = row_gradients.sampled(opt._layers[1])
        assert (sampled is not None) == (step % 2 == 0)
        if sampled is not None:
            fresh = sampled.mT @ sampled / 7
            expected = fresh if expected is None else 0.5 * expected + 0.5 * fresh
        opt.step()
        opt.zero_grad()
        assert_close([opt.state[model[2].weight]["fisher"]], [expected])


def test_one_iteration_is_the_preconditioned_gradient() -> None:
    """Weight and bias become ``W − ηγ D⁻¹ G``, with D from the recorded samples."""
    model = network()
    opt = LocoProp(
        model, lr=0.1, gamma=2.0, variant="natural-s", solver="sgd", local_steps=1,
        output_transfer="sigmoid",
    )  # fmt: skip
    before = weights(model)
    x = batch(7, 6)
    cross_entropy(model(x), x[:, :3]).backward()
    g = row_gradients.sampled(opt._layers[0])
    fisher = g.mT @ g / len(g)
    fisher += 1e-2 * fisher.diagonal().mean() * torch.eye(len(fisher)).double()
    inverse = torch.linalg.inv(fisher)
    opt.step()
    assert_close(
        weights(model)[:2],
        [
            before[0] - 0.2 * inverse @ model[0].weight.grad,
            before[1] - 0.2 * inverse @ model[0].bias.grad,
        ],
        1e-9,
    )


def fisher_pieces(model: nn.Sequential, opt: LocoProp, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first layer's dense damped factors D and A, and its joint gradient ``[W b]``."""
    g = row_gradients.sampled(opt._layers[0])
    rows = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    factors = []
    for matrix in (g.mT @ g / len(g), rows.mT @ rows / len(x)):
        eye = torch.eye(len(matrix)).double()
        factors.append(matrix + 1e-2 * matrix.diagonal().mean() * eye)
    joint = torch.cat([model[0].weight.grad, model[0].bias.grad[:, None]], 1)
    return factors[0], factors[1], joint


def test_fisher_regularizer_takes_a_natural_gradient_step_first() -> None:
    """``w − ηγ F⁻¹ vec(G)`` with the dense Kronecker-factored Fisher (Eq. 13)."""
    model = network()
    opt = LocoProp(
        model, lr=0.1, gamma=2.0, variant="locoprop-m", solver="sgd", local_steps=1,
        regularizer="fisher", output_transfer="sigmoid",
    )  # fmt: skip
    before = weights(model)
    x = batch(9, 6)
    cross_entropy(model(x), x[:, :3]).backward()
    d, a, joint = fisher_pieces(model, opt, x)
    opt.step()
    step = torch.linalg.solve(torch.kron(a, d), joint.mT.reshape(-1)).reshape(joint.mT.shape).mT
    assert_close(
        weights(model)[:2], [before[0] - 0.2 * step[:, :-1], before[1] - 0.2 * step[:, -1]], 1e-9
    )


def test_fisher_regularized_iterations_converge_to_the_minimiser() -> None:
    """With the squared loss, Δ solves ``Δ C + D Δ A / η = −γ G``, here by a dense solve."""
    gamma = 2.0
    model = network()
    opt = LocoProp(
        model, gamma=gamma, variant="locoprop-s", solver="sgd", local_steps=200,
        local_decay="constant", regularizer="fisher", output_transfer="sigmoid",
    )  # fmt: skip
    before = weights(model)
    x = batch(9, 6)
    cross_entropy(model(x), x[:, :3]).backward()
    d, a, joint = fisher_pieces(model, opt, x)
    rows = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    curvature = torch.kron((rows.mT @ rows).contiguous(), torch.eye(5).double())
    fisher = torch.kron(a, d)
    # the iteration contracts while η times the curvature in the Fisher metric is below one
    eta = 0.5 / float(torch.linalg.eigvals(torch.linalg.solve(fisher, curvature)).abs().max())
    delta = -gamma * torch.linalg.solve(curvature + fisher / eta, joint.mT.reshape(-1))
    delta = delta.reshape(joint.mT.shape).mT
    opt.param_groups[0]["lr"] = eta
    opt.step()
    assert_close(weights(model)[:2], [before[0] + delta[:, :-1], before[1] + delta[:, -1]], 1e-9)


def test_damped_solve_is_batched() -> None:
    root = batch(2, 3, 3)
    matrix, right = root @ root.mT, batch(2, 3, 4, seed=3)
    for k in range(2):
        assert_close(
            [damped_solve(matrix, right, 0.1)[k]], [damped_solve(matrix[k], right[k], 0.1)]
        )


def test_every_step_and_every_pass_draws_other_labels() -> None:
    model = network()
    opt = LocoProp(model, lr=0.0, variant="natural-s", output_transfer="sigmoid")
    x = batch(7, 6)
    seen = []
    for _ in range(2):
        model(x)
        cross_entropy(model(x), x[:, :3]).backward()
        cross_entropy(model(x), x[:, :3]).backward()
        seen += [call.sampled for call in opt._layers[-1].calls]
        opt.step()
        opt.zero_grad()
    assert len(seen) == 4
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_a_diverged_model_draws_without_a_crash() -> None:
    model = network()
    opt = LocoProp(model, variant="natural-s", output_transfer="softmax")
    nn.init.constant_(model[4].bias, torch.nan)
    before = weights(model)
    model(batch(7, 6)).sum().backward()
    with pytest.warns(UserWarning, match="not finite"):
        opt.step()
    assert torch.equal(weights(model)[0], before[0])


def test_a_frozen_model_draws_nothing() -> None:
    model = network().requires_grad_(False)
    with pytest.warns(UserWarning, match="All parameters of the model are frozen"):
        opt = LocoProp(model, variant="natural-s", output_transfer="sigmoid")
    model(batch(7, 6).requires_grad_()).sum().backward()
    assert all(row_gradients.sampled(layer) is None for layer in opt._layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rare_labels_are_drawn_as_rarely_in_half_precision(dtype: torch.dtype) -> None:
    """Random numbers of bfloat16 are multiples of 1/256, too coarse for a probability of 0.0009."""
    a = torch.full((200_000, 1), -7.0, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    found = sampled_output_gradient(transfers.get("sigmoid"), a, generator)
    assert found.dtype == dtype
    drawn = (found < 0).float().mean()  # f(a) − 1 where the label is one
    assert 0.0007 < float(drawn) < 0.0012  # of 0.0009, give or take 0.00007


def test_labels_at_the_ends_of_the_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw of 0 makes no label of probability zero, and one above all sums makes the last label."""
    a = torch.full((2, 3), -1000.0)
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.zeros(shape))
    found = sampled_output_gradient(transfers.get("sigmoid"), a, torch.Generator())
    assert torch.equal(found, torch.zeros(2, 3))
    a = torch.tensor([[-1000.0, 0.0, 0.0]])
    found = sampled_output_gradient(transfers.get("softmax"), a, torch.Generator())
    assert found.tolist() == [[0.0, -0.5, 0.5]]
    almost_one = 1 - 2.0**-24  # the largest number that torch.rand returns in float32
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, almost_one))
    logits = torch.randn(4000, 1, 5)
    sums = logits.softmax(-1).cumsum(-1)[..., -1:]
    a = logits[(sums < almost_one)[:, 0, 0]][:1, 0]  # where rounding leaves something above the sum
    found = sampled_output_gradient(transfers.get("softmax"), a, torch.Generator())
    assert torch.equal(found, a.softmax(-1) - torch.tensor([[0.0, 0, 0, 0, 1]]))


@pytest.mark.parametrize("leading", [(), (2,), (2, 4)], ids=str)
def test_each_matrix_is_damped_by_its_own_diagonal(leading: tuple[int, ...]) -> None:
    root = batch(*leading, 3, 3)
    matrix = root @ root.mT
    found = damped(matrix, 0.3)
    off = ~torch.eye(3, dtype=torch.bool)
    assert torch.equal(found[..., off], matrix[..., off])
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    expected = diagonal + 0.3 * diagonal.mean(-1, keepdim=True)
    torch.testing.assert_close(found.diagonal(dim1=-2, dim2=-1), expected)


def test_where_one_factorization_fails_all_are_those_of_float64() -> None:
    matrix = (batch(4, 4) @ batch(4, 4).mT + torch.eye(4)).float()
    exact = torch.linalg.cholesky(matrix.double()).float()
    assert not torch.equal(torch.linalg.cholesky(matrix), exact)
    infinite = torch.diag(torch.tensor([1.0, torch.inf, 2.0, 1.0]))
    for other in (infinite, -torch.eye(4)):
        found = cholesky(torch.stack([other, matrix]))
        assert torch.equal(found[1], exact)
        assert not found[0].isfinite().all()


def test_the_mean_of_more_rows_than_the_largest_float16() -> None:
    rows = torch.randn(70_000, 3, generator=torch.Generator().manual_seed(0)).half()
    found = second_moment(rows)
    assert found.dtype == torch.float16
    expected = rows.double().mT @ rows.double() / 70_000
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("largest", [1, 2, 512])
def test_solutions_by_a_cholesky_factor(
    leading: tuple[int, ...], dtype: torch.dtype, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fisher, "LARGEST", largest)
    torch.manual_seed(0)
    root = torch.randn(*leading, 5, 9, dtype=torch.float64)
    factor = torch.linalg.cholesky(root @ root.mT + torch.eye(5).double()).to(dtype)
    right = torch.randn(*leading, 5, 4, dtype=torch.float64).to(dtype)
    matrix = factor.double() @ factor.double().mT
    rough = 30 * torch.finfo(dtype).eps
    for found, expected in (
        (cholesky_solve(factor, right), torch.linalg.solve(matrix, right.double())),
        (cholesky_inverse(factor), torch.linalg.inv(matrix)),
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=rough, atol=rough)
