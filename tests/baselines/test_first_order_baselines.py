"""The first-order baselines as optimizers; ``solvers/test_against_tensorflow.py`` has their numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from baselines.checks import backward, check_resumes, train
from cases import assert_close, batch, cross_entropy, network, weights
from torch import Tensor, nn
from torch.optim import lr_scheduler

from torch_locoprop import LocoProp
from torch_locoprop.baselines import SGD, Adagrad, Adam, Momentum, Nesterov, RMSProp

# The optimizer, the name of the solver, and settings that all differ from the defaults.
CASES: list[tuple[Any, str, dict[str, float]]] = [
    (SGD, "sgd", {"lr": 0.1}),
    (Momentum, "momentum", {"lr": 0.1, "momentum": 0.8}),
    (Nesterov, "nesterov", {"lr": 0.1, "momentum": 0.8}),
    (Adagrad, "adagrad", {"lr": 0.1, "eps": 0.3}),
    (RMSProp, "rmsprop", {"lr": 0.01, "momentum": 0.8, "decay": 0.7, "eps": 0.3}),
    (Adam, "adam", {"lr": 0.05, "momentum": 0.8, "decay": 0.7, "eps": 0.3}),
]
EACH = pytest.mark.parametrize(("cls", "name", "options"), CASES, ids=[c[1] for c in CASES])


@EACH
def test_equal_to_one_local_iteration(cls: Any, name: str, options: dict[str, float]) -> None:
    """``LocoProp(local_steps=1, gamma=1)`` is BackProp with that solver, including weight decay."""
    model, other = network(), network()
    opt = cls(model.parameters(), weight_decay=0.1, **options)
    local = LocoProp(
        other, variant="locoprop-s", solver=name, local_steps=1, gamma=1.0,
        output_transfer="sigmoid", weight_decay=0.1, **options,
    )  # fmt: skip
    train(model, opt, range(6))
    train(other, local, range(6))
    assert_close(weights(model), weights(other))


@EACH
def test_resumed_run_is_bit_identical(cls: Any, name: str, options: dict[str, float]) -> None:
    check_resumes(
        lambda model: cls(model.parameters(), **options),
        lambda model: cls(model.parameters(), lr=0.5),
        before=4,
        after=4,
    )


def test_defaults() -> None:
    """Those of TensorFlow, and a learning rate where it has none."""
    expected = {
        SGD: {"lr": 1e-3},
        Momentum: {"lr": 1e-3, "momentum": 0.9},
        Nesterov: {"lr": 1e-3, "momentum": 0.9},
        Adagrad: {"lr": 1e-2, "eps": 0.1},
        RMSProp: {"lr": 1e-3, "momentum": 0.0, "decay": 0.9, "eps": 1e-10},
        Adam: {"lr": 1e-3, "momentum": 0.9, "decay": 0.999, "eps": 1e-8},
    }
    for cls, options in expected.items():
        assert cls([nn.Parameter(torch.zeros(2))]).defaults == {**options, "weight_decay": 0.0}


def test_weight_decay_shrinks_matrices_before_the_step_and_spares_biases() -> None:
    model = network()
    opt = SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    before = weights(model)
    x = batch(8, 6)
    cross_entropy(model(x), x[:, :3]).backward()
    opt.step()
    expected = [
        w * (0.95 if w.dim() > 1 else 1.0) - 0.1 * p.grad
        for w, p in zip(before, model.parameters(), strict=True)
    ]
    assert_close(weights(model), expected)


def test_groups_schedulers_and_tensors_without_a_gradient() -> None:
    model = network()
    opt = Momentum([{"params": model[0].parameters()}, {"params": model[2].weight, "lr": 0.5}])
    scheduler = lr_scheduler.ExponentialLR(opt, 0.5)
    model[2].requires_grad_(False)
    before = weights(model)
    train(model, opt, range(1))
    scheduler.step()
    assert [group["lr"] for group in opt.param_groups] == [5e-4, 0.25]
    moved = [not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)]
    assert moved == [True, True, False, False, False, False]


def test_cyclic_schedules_move_momentum_too() -> None:
    model = network()
    opt = RMSProp(model.parameters(), momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=10)
    before = opt.param_groups[0]["momentum"]
    train(model, opt, range(1))
    scheduler.step()
    assert opt.param_groups[0]["momentum"] != before


def test_closure_is_evaluated_with_gradients() -> None:
    model, other = network(), network()
    opt = Adam(model.parameters())

    def closure() -> Tensor:
        opt.zero_grad()
        return backward(model, seed=0)

    with torch.no_grad():
        loss = opt.step(closure)
    expected = train(other, Adam(other.parameters()), range(1))
    assert_close([loss], expected)
    assert_close(weights(model), weights(other))


def test_zeroing_gradients_in_place_leaves_the_state_alone() -> None:
    model, other = network(), network()
    opt, reference = Momentum(model.parameters()), Momentum(other.parameters())
    train(model, opt, range(3), set_to_none=False)
    train(other, reference, range(3))
    assert_close(weights(model), weights(other), 0.0)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (SGD, {"lr": -1.0}, r"Invalid lr=-1.0. Must be finite and >= 0"),
        (SGD, {"lr": None}, r"Invalid lr=None"),
        (Momentum, {"momentum": 1.0}, r"Invalid momentum=1.0. Must be finite and >= 0 and < 1"),
        (RMSProp, {"decay": 1.5}, r"Invalid decay=1.5"),
        (Adam, {"eps": float("nan")}, r"Invalid eps=nan"),
        (Adam, {"weight_decay": -0.1}, r"Invalid weight_decay=-0.1"),
        (Adagrad, {"eps": 0.0}, r"Invalid eps=0.0. Must be finite and > 0"),
    ],
)
def test_invalid_settings(cls: Any, options: dict[str, Any], message: str) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=message):
        cls([parameter], **options)
    with pytest.raises(ValueError, match=message):
        cls([{"params": [parameter], **options}])


def test_complex_parameters_are_refused_and_leave_no_group() -> None:
    first, second, third = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    opt = SGD([{"params": [first]}, {"params": [second]}])
    complex_one = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="SGD has no formula for complex parameters"):
        opt.add_param_group({"params": [third, complex_one]})
    assert [group["params"] for group in opt.param_groups] == [[first], [second]]
    opt.add_param_group({"params": [third]})


@EACH
def test_sparse_gradients(cls: Any, name: str, options: dict[str, float]) -> None:
    """SGD and momentum take the steps of dense gradients; the others have no formula for zeros."""
    ends = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(4, 2, sparse=sparse)
        opt = cls(table.parameters(), **options)
        for rows in ([1, 2], [2, 3]):
            opt.zero_grad()
            table(torch.tensor(rows)).sum().backward()
            if sparse and name not in ("sgd", "momentum"):
                with pytest.raises(RuntimeError, match=f"{cls.__name__} does not support sparse"):
                    opt.step()
                return
            opt.step()
        ends.append(table.weight.detach())
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("optimizer", [SGD, Momentum, Nesterov, Adagrad, RMSProp, Adam])
def test_all_of_them_can_be_replayed_as_cuda_graphs(optimizer: Any) -> None:
    assert optimizer(nn.Linear(2, 2).parameters(), lr=0.1).capturable
