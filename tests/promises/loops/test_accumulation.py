"""k micro-batches equal one large batch: gradients add up, and the rows of all are used."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import assert_close, cross_entropy, network, weights
from promises.loops.plain import (
    data,
    distance,
    each_iterated,
    each_model,
    each_variant,
    loco,
    plain,
    train,
)
from torch import Tensor, nn

from torch_locoprop.solvers import Exact

pytestmark = pytest.mark.filterwarnings("ignore:(momentum|gamma) has no effect with solver")

PARTS = ([4, 4], [2, 2, 2, 2], [3, 3, 2], [7, 1])  # the last ones uneven


def mean(out: Tensor, y: Tensor, rows: int) -> Tensor:
    """Return a loss averaged over the micro-batch, weighted by its share of the large batch."""
    return cross_entropy(out, y) * len(y) / rows


def total(out: Tensor, y: Tensor, rows: int) -> Tensor:
    return F.binary_cross_entropy_with_logits(out, y, reduction="sum")


@each_variant
@each_model
@pytest.mark.parametrize("loss", [mean, total])
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_micro_batches_are_one_batch(variant, kind, loss, parts) -> None:  # type: ignore[no-untyped-def]
    def in_parts(model: nn.Module, x: Tensor, y: Tensor) -> None:
        for x_part, y_part in zip(x.split(parts), y.split(parts), strict=True):
            loss(model(x_part), y_part, len(x)).backward()

    def at_once(model: nn.Module, x: Tensor, y: Tensor) -> None:
        loss(model(x), y, len(x)).backward()

    assert_close(train(variant, kind, in_parts), train(variant, kind, at_once), 1e-10)


@each_iterated
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_with_the_mean_over_rows(variant: str, reduction: str) -> None:
    """local_reduction="mean" divides by the rows of all micro-batches, and by the loss's terms."""
    criterion = nn.MSELoss(reduction=reduction)

    def in_parts(model: nn.Module, x: Tensor, y: Tensor) -> None:
        for x_part, y_part in zip(x.split([5, 3]), y.split([5, 3]), strict=True):
            weight = len(x_part) / len(x) if reduction == "mean" else 1.0
            (weight * criterion(model(x_part), y_part)).backward()

    def at_once(model: nn.Module, x: Tensor, y: Tensor) -> None:
        criterion(model(x), y).backward()

    options = {"loss_fn": criterion, "output_transfer": None, "local_reduction": "mean"}
    one = train(variant, backward=in_parts, **options)
    assert_close(one, train(variant, backward=at_once, **options), 1e-11)


SOLVERS = ("exact", "preconditioned", "preconditioned-averaged", Exact(decay=0.9, damping=0.1))


@pytest.mark.parametrize("solver", SOLVERS)
@each_model
def test_closed_forms(solver: str | Exact, kind: str) -> None:
    def in_parts(model: nn.Module, x: Tensor, y: Tensor) -> None:
        for x_part, y_part in zip(x.split([5, 3]), y.split([5, 3]), strict=True):
            mean(model(x_part), y_part, len(x)).backward()

    options = {"solver": solver, "lr": 0.1}
    one, other = (train("locoprop-s", kind, b, **options) for b in (in_parts, plain))
    assert_close(one, other, 1e-10)


def test_the_loss_may_be_summed_before_backward() -> None:
    def summed(model: nn.Module, x: Tensor, y: Tensor) -> None:
        losses = [mean(model(a), b, len(x)) for a, b in zip(x.split(3), y.split(3), strict=True)]
        torch.stack(losses).sum().backward()

    assert_close(train(backward=summed), train(), 1e-11)


def test_rows_of_all_parts_count() -> None:
    """The curvature is that of all rows; with the last part's rows alone the step differs."""
    model = network()
    opt = loco(model, "locoprop-s", solver="exact", lr=1.0)
    x, y = data()
    for x_part, y_part in zip(x.split(4), y.split(4), strict=True):
        mean(model(x_part), y_part, len(x)).backward()
    gradient = torch.cat([model[0].weight.grad, model[0].bias.grad[:, None]], 1)
    start = torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach()
    opt.step()
    moved = torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach() - start
    rows = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    eye = torch.eye(7, dtype=x.dtype)
    all_rows, last = (
        -2.0 * torch.linalg.solve(eye + part.T @ part, gradient.T).T for part in (rows, rows[4:])
    )
    assert_close([moved], [all_rows], 1e-10)
    assert distance([moved], [last]) > 1e-3


def test_a_step_between_does_not_carry_rows_over() -> None:
    model, other = network(), network()
    opt, opt_other = loco(model), loco(other)
    for net, o, passes in ((model, opt, 2), (other, opt_other, 1)):
        for seed in range(2):
            x, y = data(seed=seed)
            for part in (x.split(8 // passes),):
                for x_part, y_part in zip(part, y.split(8 // passes), strict=True):
                    mean(net(x_part), y_part, 8).backward()
            o.step()
            net.zero_grad()  # the model's, not the optimizer's
    assert_close(weights(model), weights(other), 1e-11)
