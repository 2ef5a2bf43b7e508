"""local_reduction="mean": the same settings work for all batch sizes and reductions of the loss."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from promises.loops.plain import data, distance, each_variant, loco, make
from promises.loops.test_several_losses import TwoHeads
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


@each_variant
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


@each_variant
def test_the_sum_does_depend_on_the_batch_size(variant: str) -> None:
    """As in the paper; it shows that the tests above can fail."""
    x, y = data()
    one = trained(variant, nn.MSELoss(), x, y, reduction="sum")
    two = trained(variant, nn.MSELoss(), torch.cat([x, x]), torch.cat([y, y]), reduction="sum")
    assert distance(one, two) > 1e-4


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).mean(1, keepdim=True)


@pytest.mark.parametrize("make_model", [Pooled, TwoHeads])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_terms_that_cannot_be_counted_are_told(reduction: str, make_model: type[nn.Module]) -> None:
    """After an operation the number of terms may differ; two outputs may have one loss or two."""
    model, criterion = make_model(), nn.MSELoss(reduction=reduction)
    opt = LocoProp(model, local_reduction="mean", loss_fn=criterion)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            outputs = model(batch(8, 6))
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            sum(criterion(each, torch.zeros_like(each)) for each in outputs).backward()
            opt.step()
            opt.zero_grad()
    assert sum("number of its terms" in str(w.message) for w in told) == (reduction == "sum")


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


@each_variant
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


def ends(model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor, closure: bool) -> list[Tensor]:
    """Return the weights after two steps, with the loss given or returned by a closure."""
    opt = LocoProp(
        model,
        variant="locoprop-s",
        solver="sgd",
        momentum=0.0,
        lr=0.3,
        gamma=4.0,
        local_reduction="mean",
        loss_fn=None if closure else loss,
        fallback=lambda ps: torch.optim.SGD(ps, lr=0.0),
    )

    def backward() -> Tensor:
        opt.zero_grad()
        found = loss(model(x), y)
        found.backward()
        return found

    for _ in range(2):
        if closure:
            opt.step(backward)
        else:
            backward()
            opt.step()
    return weights(model)


@pytest.mark.parametrize("closure", [True, False])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, nn.MSELoss])
def test_the_loss_tells_its_number_of_terms(closure: bool, loss: Any) -> None:
    """Classes of pixels have a softmax over the channels, which is no transfer of the layer."""
    x = batch(2, 3, 6, 6)
    y = (10 * batch(2, 6, 6)).long() % 4 if loss is nn.CrossEntropyLoss else batch(2, 4, 6, 6)
    results = []
    for reduction in ("mean", "sum"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 1))
        results.append(ends(model.double(), loss(reduction=reduction), x, y, closure))
    assert_close(*results, 1e-12)


@pytest.mark.parametrize("closure", [True, False])
def test_a_squared_error_of_a_softmax_has_a_term_for_each_class(closure: bool) -> None:
    results = []
    for reduction in ("mean", "sum"):
        model = nn.Sequential(*network(), nn.Softmax(-1))
        loss = nn.MSELoss(reduction=reduction)
        results.append(ends(model, loss, batch(8, 6), batch(8, 3, seed=2), closure))
    assert_close(*results, 1e-12)


class Cosine(nn.Module):
    """A classifier whose weight is normalized: no layer with a local problem is the output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 8).double()
        self.w = nn.Parameter(torch.randn(5, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.fc(x).tanh(), nn.functional.normalize(self.w))


@pytest.mark.parametrize("closure", [True, False])
def test_terms_behind_a_cosine_head_are_not_known(closure: bool) -> None:
    x, y = batch(12, 6), torch.arange(12) % 5
    with pytest.warns(UserWarning, match="That number is not known"):
        ends(Cosine(), nn.CrossEntropyLoss(reduction="sum"), x, y, closure)
    ends(Cosine(), nn.CrossEntropyLoss(), x, y, closure)  # no warning
