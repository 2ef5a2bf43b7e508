"""local_reduction="mean": the same settings work for all batch sizes and reductions of the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from promises.loops.plain import data, distance, each_iterated, loco, make
from torch import Tensor, nn

from torch_locoprop import LocoProp

LOSSES = [nn.BCEWithLogitsLoss, nn.MSELoss, nn.CrossEntropyLoss]


def trained(
    variant: str,
    criterion: Any,
    x: Tensor,
    y: Tensor,
    kind: str = "linear",
    reduction: str = "mean",
    **options: Any,
) -> list[Tensor]:
    model = make(kind)
    options = {"lr": 1e-2, "gamma": 2.0, "momentum": 0.9, **options}
    opt = LocoProp(model, variant=variant, local_reduction=reduction, loss_fn=criterion, **options)
    for _ in range(3):
        criterion(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return weights(model)


@each_iterated
@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("loss", LOSSES)
def test_neither_batch_size_nor_reduction_matter(variant: str, kind: str, loss: Any) -> None:
    x, y = data(kind, rows=6)
    large = torch.cat([x, x, x]), torch.cat([y, y, y])
    expected = trained(variant, loss(), x, y, kind)
    for reduction in ("mean", "sum"):
        found = trained(variant, loss(reduction=reduction), *large, kind)
        assert_close(found, expected, 1e-10)


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m", "pocoprop-s", "pocoprop-m"])
def test_with_transfers_by_name(variant: str) -> None:
    """∂L/∂y is then computed from ∂L/∂a, and is scaled in the same way."""
    x, y = data()
    named = {"transfers": {"0": "tanh", "2": "tanh"}}
    results = [trained(variant, nn.MSELoss(reduction=r), x, y, **named) for r in ("mean", "sum")]
    assert_close(*results, 1e-11)


@pytest.mark.parametrize("solver", ["exact", "adam", "sgd"])
def test_for_other_solvers(solver: str) -> None:
    x, y = data()
    large = torch.cat([x, x]), torch.cat([y, y])
    options = {"solver": solver, "lr": 0.1 if solver == "exact" else 1e-2}
    one = trained("locoprop-m", nn.MSELoss(), x, y, **options)
    two = trained("locoprop-m", nn.MSELoss(reduction="sum"), *large, **options)
    assert_close(one, two, 1e-9)


@each_iterated
def test_the_sum_does_depend_on_the_batch_size(variant: str) -> None:
    """As in the paper; it shows that the tests above can fail."""
    x, y = data()
    one = trained(variant, nn.MSELoss(), x, y, reduction="sum")
    two = trained(variant, nn.MSELoss(), torch.cat([x, x]), torch.cat([y, y]), reduction="sum")
    assert distance(one, two) > 1e-4


def test_without_a_loss_the_batch_size_does_not_matter() -> None:
    results = []
    for times in (1, 3):
        model = network()
        opt = loco(model, local_reduction="mean")
        for seed in range(3):
            x, y = batch(6, 6, seed=seed), batch(6, 3, seed=seed + 9)
            cross_entropy(model(x.repeat(times, 1)), y.repeat(times, 1)).backward()
            opt.step()
            opt.zero_grad()
        results.append(weights(model))
    assert_close(*results, 1e-11)


@each_iterated
@pytest.mark.parametrize(
    ("loss", "transfer"),
    [
        (nn.functional.binary_cross_entropy_with_logits, "sigmoid"),
        (nn.functional.mse_loss, "linear"),
        (nn.functional.cross_entropy, "softmax"),
    ],
)
def test_a_closure_tells_the_reduction(variant: str, loss: Any, transfer: str) -> None:
    x, y = data()
    y = y.argmax(-1) if transfer == "softmax" else y
    results = []
    for reduction in ("mean", "sum"):
        model = make()
        opt = LocoProp(
            model,
            variant=variant,
            lr=1e-2,
            gamma=2.0,
            local_reduction="mean",
            output_transfer=transfer,
        )

        def closure(
            model: nn.Module = model, opt: LocoProp = opt, reduction: str = reduction
        ) -> Any:
            opt.zero_grad()
            found = loss(model(x), y, reduction=reduction)
            found.backward()
            return found

        for _ in range(3):
            opt.step(closure)
        results.append(weights(model))
    assert_close(*results, 1e-10)


@pytest.mark.parametrize("loss", [nn.BCELoss, nn.NLLLoss])
def test_losses_of_models_that_end_in_their_transfer(loss: Any) -> None:
    x, y = data()
    if loss is nn.NLLLoss:
        y = y.argmax(-1)
    results = []
    for reduction in ("mean", "sum"):
        end = nn.Sigmoid() if loss is nn.BCELoss else nn.LogSoftmax(-1)
        model, criterion = nn.Sequential(make(), end), loss(reduction=reduction)
        opt = LocoProp(model, lr=1e-2, local_reduction="mean", loss_fn=criterion)
        for _ in range(3):
            opt.zero_grad()
            criterion(model(x), y).backward()
            opt.step()
        results.append(weights(model))
    assert_close(*results, 1e-10)


@pytest.mark.parametrize("first", ["with", "without"])
def test_what_is_done_to_a_sum_is_seen(first: str) -> None:
    """A sum divided by the number of terms is a mean; closures may follow steps without them."""
    x, y = data()
    results = []
    for reduction in ("mean", "sum", "divided"):
        model = make()
        numbers = {"lr": 1e-2, "gamma": 2.0, "local_reduction": "mean"}
        opt = LocoProp(model, variant="locoprop-s", output_transfer="linear", **numbers)

        def closure(model: nn.Module = model, opt: LocoProp = opt, of: str = reduction) -> Any:
            opt.zero_grad()
            a = model(x)
            found = nn.functional.mse_loss(a, y, reduction="mean" if of == "mean" else "sum")
            found = found / a.numel() if of == "divided" else found
            found.backward()
            return found

        if first == "without":
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
        for _ in range(2):
            opt.step(closure)
        results.append(weights(model))
    assert_close(results[1], results[0], 1e-10)
    assert_close(results[2], results[0], 1e-10)
