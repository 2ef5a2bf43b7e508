"""Shampoo equals a computation with SciPy's matrix powers in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from baselines.checks import check_learns, check_resumes, saved_and_loaded, train
from cases import assert_close, batch, cross_entropy, network, weights
from torch import Tensor, nn
from torch.optim import lr_scheduler

from torch_locoprop.baselines import Shampoo
from torch_locoprop.baselines.shampoo import average, inverse_root

EPS = 1e-3


def signed(*shape: int, seed: int) -> Tensor:
    return batch(*shape, seed=seed) - 0.5


def power(matrix: Tensor, exponent: float, eps: float = EPS) -> Tensor:
    """Return ``(M + eps λ_max I)^exponent``."""
    ridge = eps * torch.linalg.matrix_norm(matrix, 2) * torch.eye(len(matrix)).double()
    found = scipy.linalg.fractional_matrix_power((matrix + ridge).numpy(), exponent)
    assert np.abs(np.imag(found)).max() < 1e-12  # some processors leave a rounding error there
    return torch.from_numpy(np.real(found).copy())


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.1), (torch.float16, 0.01)])
@pytest.mark.parametrize("resumed", [False, True])
def test_half_precision(dtype: torch.dtype, error: float, resumed: bool) -> None:
    """The statistics of half-precision gradients are float32, also after a resumption."""
    moved = []
    for kind in (torch.float64, dtype):
        model = network().to(kind)
        before = weights(model)
        opt = Shampoo(model.parameters(), lr=0.02)
        for step in range(10):
            x = batch(7, 6).to(kind)
            nn.functional.binary_cross_entropy_with_logits(model(x), x[:, :3]).backward()
            opt.step()
            opt.zero_grad()
            if resumed and step == 5:
                other = Shampoo(model.parameters())
                other.load_state_dict(saved_and_loaded(model, opt)["opt"])
                for parameter, state in opt.state.items():
                    assert state.keys() == other.state[parameter].keys()
                    for name, value in state.items():
                        assert other.state[parameter][name].dtype == value.dtype
                        assert torch.equal(other.state[parameter][name], value)
                opt = other
        wide = torch.float64 if kind == torch.float64 else torch.float32
        assert all(state["left"].dtype == wide for state in opt.state.values() if "left" in state)
        moved.append([w.double() - b.double() for w, b in zip(weights(model), before, strict=True)])
    for exact, found in zip(*moved, strict=True):
        assert (found - exact).norm() < error * exact.norm()


def weighted(values: list[Tensor], decay: float | None) -> Tensor:
    """Return the sum, or the average with weights βᵗ⁻ˢ."""
    if decay is None or decay == 1:
        return torch.stack(values).sum(0)
    factors = [decay ** (len(values) - 1 - s) for s in range(len(values))]
    return sum(f * v for f, v in zip(factors, values, strict=True)) / sum(factors)


def simpler(gradients: list[Tensor], grafting: str | None, decay: float | None) -> Tensor:
    g = gradients[-1]
    if grafting == "sgd":
        return g
    squares = [past.square() for past in gradients]
    v = weighted(squares, None if grafting == "adagrad" else decay)
    return g / (v.sqrt() + EPS)


def run(w: nn.Parameter, opt: Shampoo, gradients: list[Tensor]) -> list[Tensor]:
    """Return the displacement of each step."""
    moves = []
    for g in gradients:
        before = w.detach().clone()
        w.grad = g.clone()
        opt.step()
        moves.append(before - w.detach())
    return moves


# ---- the update ------------------------------------------------------------------------------------


@pytest.mark.parametrize("grafting", ["rmsprop", "adagrad", "sgd", None])
@pytest.mark.parametrize("decay", [0.8, 1.0, None])
@pytest.mark.parametrize(("every", "early"), [(1, 0), (3, 0), (3, 2), (4, 4)])
def test_steps_are_dense_inverse_fourth_roots(
    grafting: str | None, decay: float | None, every: int, early: int
) -> None:
    gradients = [signed(4, 6, seed=s) for s in range(5)]
    w = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    settings: dict[str, Any] = {"decay": decay, "every": every, "early": early}
    opt = Shampoo([w], lr=0.1, momentum=0.5, eps=EPS, grafting=grafting, **settings)
    moves = run(w, opt, gradients)
    velocity = torch.zeros(4, 6).double()
    roots: tuple[Tensor, Tensor] | None = None
    for t, g in enumerate(gradients):
        seen = gradients[: t + 1]
        if t % every == 0 or t < early:
            roots = (
                power(weighted([x @ x.mT for x in seen], decay), -0.25),
                power(weighted([x.mT @ x for x in seen], decay), -0.25),
            )
        assert roots is not None
        # vec stacks columns: vec(L^(−1/4) G R^(−1/4)) = (R^(−1/4) ⊗ L^(−1/4)) vec(G)
        direction = torch.kron(roots[1].mT.contiguous(), roots[0]) @ g.mT.reshape(-1)
        direction = direction.reshape(6, 4).mT
        if grafting is not None:
            direction = direction * simpler(seen, grafting, decay).norm() / direction.norm()
        velocity = 0.5 * velocity + direction
        assert_close([moves[t]], [0.1 * velocity], 1e-8)


@pytest.mark.parametrize("grafting", ["rmsprop", "adagrad", "sgd", None])
@pytest.mark.parametrize("decay", [0.8, None])
def test_vectors_take_the_simpler_step_itself(grafting: str | None, decay: float | None) -> None:
    gradients = [signed(5, seed=s) for s in range(4)]
    w = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    opt = Shampoo([w], lr=0.1, momentum=0.0, decay=decay, eps=EPS, grafting=grafting)
    moves = run(w, opt, gradients)
    expected = [0.1 * simpler(gradients[: t + 1], grafting, decay) for t in range(4)]
    assert_close(moves, expected)


def test_tensors_of_more_dimensions_are_matrices_by_their_first() -> None:
    gradients = [signed(4, 2, 3, seed=s) for s in range(3)]
    tensor = nn.Parameter(torch.zeros(4, 2, 3, dtype=torch.float64))
    matrix = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    run(tensor, Shampoo([tensor]), gradients)
    run(matrix, Shampoo([matrix]), [g.reshape(4, 6) for g in gradients])
    assert_close([tensor.detach().reshape(4, 6)], [matrix.detach()], 0.0)


def test_large_sides_have_no_preconditioner() -> None:
    g = signed(4, 6, seed=1)
    moves = {}
    for size in (5, 4, 3):
        w = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
        opt = Shampoo([w], lr=1.0, eps=EPS, grafting=None, max_size=size)
        moves[size] = run(w, opt, [g])[0]
        assert ("left" in opt.state[w]) == (size >= 4)
        assert "right" not in opt.state[w]
    for size in (5, 4):
        assert_close([moves[size]], [power(g @ g.mT, -0.5) @ g], 1e-8)
    assert_close([moves[3]], [g / (g.abs() + EPS)])


@pytest.mark.parametrize(("before", "after"), [(3, 8), (8, 3)])
def test_a_change_of_the_largest_side_renews_the_roots(before: int, after: int) -> None:
    """With another number of sides the roots have other exponents."""
    gradients = [signed(5, 3, seed=seed) for seed in range(3)]
    w = nn.Parameter(torch.zeros(5, 3, dtype=torch.float64))
    settings: dict[str, Any] = {"momentum": 0.0, "decay": 1, "eps": EPS, "every": 10, "early": 0}
    opt = Shampoo([w], lr=1.0, grafting=None, max_size=before, **settings)
    for number, gradient in enumerate(gradients):
        opt.param_groups[0]["max_size"] = before if number < 2 else after
        start, w.grad = w.detach().clone(), gradient
        opt.step()
    right = sum((g.mT @ g for g in gradients), torch.zeros(3, 3, dtype=torch.float64))
    if after == 3:
        expected = gradients[2] @ power(right, -1 / 2)
    else:
        left = power(gradients[2] @ gradients[2].mT, -1 / 4)
        expected = left @ gradients[2] @ power(right, -1 / 4)
    assert_close([start - w.detach()], [expected], 1e-6)


def test_whitening() -> None:
    """For one gradient and a tiny eps, ``L^(−1/4) G R^(−1/4)`` is U Vᵀ of its SVD."""
    g = signed(4, 4, seed=1)
    w = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    move = run(w, Shampoo([w], lr=1.0, eps=1e-14, grafting=None), [g])[0]
    u, _, vt = torch.linalg.svd(g)
    assert_close([move], [u @ vt], 1e-6)


@pytest.mark.parametrize("root", [2, 4])
def test_inverse_root_is_batched_and_survives_rank_deficiency(root: int) -> None:
    factor = signed(3, 5, 2, seed=1)
    matrix = factor @ factor.mT
    found = inverse_root(matrix, root, EPS)
    assert_close(list(found), [power(m, -1 / root) for m in matrix], 1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [1e-3, 1e-6, 1e-8, 1e-10])
@pytest.mark.parametrize("rank", [2, 7, 20])
def test_inverse_roots_are_those_of_float64(dtype: torch.dtype, eps: float, rank: int) -> None:
    """For the same matrix, the root in a smaller dtype is the rounded root of float64."""
    factor = signed(20, rank, seed=1).to(dtype)
    matrix = factor @ factor.mT
    values, vectors = np.linalg.eigh(matrix.double().numpy())
    powers = (values.clip(0) + eps * values.max()) ** -0.25
    expected = torch.from_numpy(vectors * powers @ vectors.T)
    found = inverse_root(matrix, 4, eps)
    assert found.dtype == dtype
    assert (found.double() - expected).norm() < torch.finfo(dtype).eps * expected.norm()


def test_a_matrix_of_one_entry_is_divided_by_its_length() -> None:
    """``L^(−1/4) g R^(−1/4)`` is ``g / |g|``, up to eps; the step of a vector is another one."""
    w = nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))
    opt = Shampoo([w], lr=1.0, eps=EPS, grafting=None)
    gradient = torch.tensor([[-0.1]]).double()
    assert_close(run(w, opt, [gradient]), [gradient / (0.1 * (1 + EPS) ** 0.5)], 1e-7)


def test_zero_gradients_move_nothing_and_do_no_harm() -> None:
    """A layer of dead units has zero statistics, whose inverse roots are the identity."""
    assert_close([inverse_root(torch.zeros(3, 3), 4, EPS)], [torch.eye(3)])
    for grafting in ("rmsprop", "adagrad", "sgd", None):
        w = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
        opt = Shampoo([w], every=5, early=0, momentum=0.0, grafting=grafting)
        moves = run(w, opt, [torch.zeros(3, 2).double(), signed(3, 2, seed=1)])
        assert_close([moves[0]], [torch.zeros(3, 2).double()])
        assert torch.isfinite(w).all()
        assert 0 < moves[1].norm() < 1


def test_average() -> None:
    """The average equals Adam's: a running average from zero, divided by 1 − βᵗ."""
    values = [signed(2, seed=s) for s in range(4)]
    running, raw = None, torch.zeros(2).double()
    for t, value in enumerate(values, start=1):
        running = average(running, value, 0.9, t)
        raw = 0.9 * raw + 0.1 * value
        assert_close([running], [raw / (1 - 0.9**t)])


def test_weight_decay_shrinks_matrices_and_spares_vectors() -> None:
    for shape, factor in (((3, 2), 0.95), ((3,), 1.0)):
        moved = []
        for shrink in (0.0, 0.5):
            w = nn.Parameter(torch.ones(shape, dtype=torch.float64))
            run(w, Shampoo([w], lr=0.1, weight_decay=shrink), [signed(*shape, seed=1)])
            moved.append(w.detach())
        assert_close([moved[1]], [moved[0] - 1 + factor])


def test_defaults() -> None:
    assert Shampoo([nn.Parameter(torch.zeros(2))]).defaults == {
        "lr": 1e-3,
        "momentum": 0.9,
        "decay": 0.99,
        "eps": 1e-6,
        "every": 1,
        "early": 10,
        "weight_decay": 0.0,
        "grafting": "rmsprop",
        "max_size": 8192,
    }


# ---- torch.optim's contract ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"every": 3}, {"grafting": "sgd"}, {"grafting": None, "decay": None}], ids=str
)
def test_resumed_run_is_bit_identical(options: dict[str, Any]) -> None:
    check_resumes(
        lambda model: Shampoo(model.parameters(), lr=1e-2, **options),
        lambda model: Shampoo(model.parameters()),
        before=5,
        after=5,
        set_to_none=False,
    )


def test_gradients_are_not_kept_in_the_state() -> None:
    """Gradients zeroed in place or set to None give the same weights: no state is a gradient."""
    paths = []
    for set_to_none in (True, False):
        model = network()
        opt = Shampoo(model.parameters(), lr=1e-2, grafting="sgd")
        for step in range(3):
            x = batch(8, 6, seed=step)
            cross_entropy(model(x), x[:, :3]).backward()
            opt.step()
            opt.zero_grad(set_to_none=set_to_none)
        paths.append(weights(model))
    assert_close(*paths, 0.0)


def test_schedulers_move_lr_and_momentum_and_groups_differ() -> None:
    model = network()
    opt = Shampoo(
        [
            {"params": model[0].parameters(), "grafting": "sgd", "every": 2},
            {"params": model[2].parameters()},
        ],
        lr=1e-2,
    )
    scheduler = lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=10)
    before = [(group["lr"], group["momentum"]) for group in opt.param_groups]
    train(model, opt, range(1))
    scheduler.step()
    after = [(group["lr"], group["momentum"]) for group in opt.param_groups]
    assert all(a != b and c != d for (a, c), (b, d) in zip(before, after, strict=True))
    assert "square" not in opt.state[model[0].weight]
    assert "square" in opt.state[model[2].weight]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"every": 5},
        {"grafting": "adagrad", "lr": 3e-2},
        {"grafting": "sgd", "lr": 1e-1},
        {"grafting": None, "lr": 1e-2},
        {"grafting": None, "lr": 1e-1, "decay": 1.0},
    ],
    ids=str,
)
def test_an_autoencoder_learns_faster_than_with_sgd(options: dict[str, Any]) -> None:
    check_learns(lambda model: Shampoo(model.parameters(), **{"lr": 3e-3, **options}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "Invalid lr=-1.0"),
        ({"momentum": 1.0}, "Invalid momentum=1.0"),
        ({"decay": 1.5}, "Invalid decay=1.5"),
        ({"eps": 0.0}, r"Invalid eps=0.0. Must be finite and > 0"),
        ({"every": 1.5}, r"Invalid every=1.5. Must be an integer >= 1"),
        ({"early": -1}, r"Invalid early=-1. Must be an integer >= 0"),
        ({"max_size": 0}, "Invalid max_size=0"),
        ({"weight_decay": -1.0}, "Invalid weight_decay=-1.0"),
        ({"grafting": "rmspropp"}, r"Unknown grafting 'rmspropp'. Did you mean 'rmsprop'\?"),
    ],
)
def test_invalid_settings(options: dict[str, Any], message: str) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=message):
        Shampoo([parameter], **options)
    with pytest.raises(ValueError, match=message):
        Shampoo([{"params": [parameter], **options}])


def test_a_cuda_graph_cannot_replay_its_steps() -> None:
    """The number of the step is a number of the host, which each step computes with."""
    opt = Shampoo([nn.Parameter(torch.zeros(2, 2))])
    assert not opt.capturable
