"""local_reduction="mean" divides a summed loss by the number of its terms, which the loss tells.

Every test trains with a summed loss and with the mean of the same terms: the weights must be equal.
"""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import assert_close, batch, network, weights
from promises.loops.plain import distance
from promises.loops.test_several_losses import TwoHeads
from torch import Tensor, nn

from torch_locoprop import LocoProp

Loss = Callable[[Tensor, Tensor], Tensor]


def ends(
    model: nn.Module,
    loss: Loss,
    x: Tensor,
    y: Tensor,
    closure: bool = False,
    given: Any = None,
    backward: Callable[[nn.Module, Loss, Tensor, Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """Return the weights after two steps.

    Args:
        model: the model.
        loss: the loss that is trained.
        x: inputs.
        y: labels.
        closure: pass the loss to ``step()`` in a closure.
        given: what is passed as ``loss_fn=``; without a closure, the loss by default.
        backward: computes the gradients; by default, one backward pass of the loss.
    """
    opt = LocoProp(
        model,
        variant="locoprop-s",
        solver="sgd",
        momentum=0.0,
        lr=0.3,
        gamma=4.0,
        local_reduction="mean",
        loss_fn=given if closure or given is not None else loss,
        fallback=lambda ps: torch.optim.SGD(ps, lr=0.0),
    )

    def passes() -> Tensor:
        opt.zero_grad()
        if backward is not None:
            return backward(model, loss, x, y)
        found = loss(model(x), y)
        found.backward()
        return found

    for _ in range(2):
        if closure:
            opt.step(passes)
        else:
            passes()
            opt.step()
    return weights(model)


class Cosine(nn.Module):
    """A classifier whose weight is normalized: no layer with a local problem is the output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 8).double()
        self.w = nn.Parameter(torch.randn(5, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.fc(x).tanh(), F.normalize(self.w))


class Pooled(nn.Module):
    """A model whose output has fewer features than its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).mean(1, keepdim=True)


def segmentation() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 1))
    return model.double()


CLASSES = torch.tensor([0, 3, -100, 1, -100, 2, 4, -100, 0, 1, 1, 2])
PRIORS = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25], dtype=torch.float64)
SOFT = torch.softmax(5 * batch(12, 5, seed=4), -1)
PIXELS = (10 * batch(2, 6, 6)).long() % 4
PARTLY = PIXELS.masked_fill(PIXELS == 3, -100)
ROWS, IMAGES = batch(12, 6), batch(2, 3, 6, 6)

# A model, its inputs, its labels, and a loss that takes ``reduction=``.
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, Tensor, Callable[..., Loss]]] = {
    "cosine": (Cosine, ROWS, CLASSES.clamp_min(0), nn.CrossEntropyLoss),
    "cosine, squares": (Cosine, ROWS, batch(12, 5), nn.MSELoss),
    "pooled": (Pooled, ROWS, batch(12, 1), nn.MSELoss),
    "pixels": (segmentation, IMAGES, PIXELS, nn.CrossEntropyLoss),
    "pixels, squares": (segmentation, IMAGES, batch(2, 4, 6, 6), nn.MSELoss),
    "squares of a softmax": (
        *(lambda: nn.Sequential(*network(), nn.Softmax(-1)), ROWS),
        *(batch(12, 3, seed=2), nn.MSELoss),
    ),
}

# Losses whose mean is not over all rows, which only the labels tell.
BY_LABELS: dict[str, tuple[Callable[[], nn.Module], Tensor, Tensor, Callable[..., Loss]]] = {
    "ignored": (Cosine, ROWS, CLASSES, nn.CrossEntropyLoss),
    "ignored pixels": (segmentation, IMAGES, PARTLY, nn.CrossEntropyLoss),
    "other index": (
        Cosine,
        ROWS,
        CLASSES.clamp_min(0),
        partial(nn.CrossEntropyLoss, ignore_index=0),
    ),
    "weighted": (Cosine, ROWS, CLASSES, partial(nn.CrossEntropyLoss, weight=PRIORS)),
    "smoothed": (Cosine, ROWS, CLASSES, partial(nn.CrossEntropyLoss, label_smoothing=0.1)),
    "soft labels": (Cosine, ROWS, SOFT, nn.CrossEntropyLoss),
    "weighted soft labels": (Cosine, ROWS, SOFT, partial(nn.CrossEntropyLoss, weight=PRIORS)),
    "log-probabilities": (
        lambda: nn.Sequential(Cosine(), nn.LogSoftmax(-1)),
        ROWS,
        CLASSES,
        nn.NLLLoss,
    ),
    "weighted elements": (Cosine, ROWS, SOFT, partial(nn.BCEWithLogitsLoss, weight=PRIORS)),
}


@pytest.mark.parametrize("closure", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_the_loss_tells_its_number_of_terms(closure: bool, case: str) -> None:
    make, x, y, loss = CASES[case]
    expected = ends(make(), loss(reduction="mean"), x, y, closure)
    assert_close(ends(make(), loss(reduction="sum"), x, y, closure), expected)
    assert distance(expected, weights(make())) > 1e-6


@pytest.mark.parametrize("closure", [True, False])
@pytest.mark.parametrize("case", BY_LABELS)
def test_the_labels_tell_the_number_of_terms(closure: bool, case: str) -> None:
    make, x, y, loss = BY_LABELS[case]
    expected = ends(make(), loss(reduction="mean"), x, y, closure)
    summed = loss(reduction="sum")
    assert_close(ends(make(), summed, x, y, closure, given=summed), expected)


@pytest.mark.parametrize("closure", [True, False])
def test_rows_that_the_loop_leaves_out_are_no_terms(closure: bool) -> None:
    kept = CLASSES >= 0

    def backward(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
        found = loss(model(x)[kept], y[kept])
        found.backward()
        return found

    results = []
    for reduction in ("mean", "sum"):
        loss = nn.CrossEntropyLoss(reduction=reduction)
        model = network(sizes=(6, 7, 5))
        results.append(ends(model, loss, ROWS, CLASSES, closure, given=loss, backward=backward))
    assert_close(*results)


@pytest.mark.parametrize("make", [Cosine, lambda: network(sizes=(6, 7, 5))])
def test_micro_batches_add_their_terms(make: Callable[[], nn.Module]) -> None:
    """A sum over micro-batches has all their terms; passes that no step uses have none."""

    def backward(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> Tensor:
        loss(model(x[:5]), y[:5]).backward()
        model.zero_grad()
        torch.autograd.grad(loss(model(x[:7]), y[:7]), list(model.parameters()))
        with torch.no_grad():
            loss(model(x[:3]), y[:3])
        total = torch.zeros(())
        for part in (slice(0, 4), slice(4, 12)):
            whole = 12 if loss.reduction == "mean" else len(y[part])
            found = loss(model(x[part]), y[part]) * (len(y[part]) / whole)
            found.backward()
            total = total + found.detach()
        return total

    y, results = CLASSES.clamp_min(0), []
    for reduction in ("mean", "sum"):
        loss = nn.CrossEntropyLoss(reduction=reduction)
        results.append(ends(make(), loss, ROWS, y, given=loss, backward=backward))
    assert_close(*results)


def by_hand(output: Tensor, y: Tensor, reduction: str) -> Tensor:
    return getattr((output - y).square(), reduction)()


def rows_by_hand(output: Tensor, y: Tensor, reduction: str) -> Tensor:
    return getattr((output - y).square().sum(-1), reduction)()


def penalized(output: Tensor, y: Tensor, reduction: str) -> Tensor:
    """Return a loss with a penalty on a parameter, which is no term of the loss."""
    penalty = nn.Parameter(torch.ones(3, dtype=torch.float64)).square().sum()
    return by_hand(output, y, reduction) + 0.1 * penalty


@pytest.mark.parametrize("closure", [True, False])
@pytest.mark.parametrize("loss", [by_hand, rows_by_hand, penalized])
@pytest.mark.parametrize("make", [Cosine, lambda: network(sizes=(6, 7, 5))])
def test_a_sum_written_by_hand(make: Callable[[], nn.Module], loss: Any, closure: bool) -> None:
    if make is Cosine and not closure:
        pytest.skip("told, as the next test shows")
    results = []
    for reduction in ("mean", "sum"):
        own = partial(loss, reduction=reduction)
        results.append(ends(make(), own, ROWS, batch(12, 5), closure))
    assert_close(*results)


def reduced_later(output: Tensor, y: Tensor, reduction: str) -> Tensor:
    return getattr(F.cross_entropy(output, y, reduction="none"), reduction)()


def picked(output: Tensor, y: Tensor, reduction: str) -> Tensor:
    chosen = F.log_softmax(output, -1).gather(-1, y[..., None])
    return -getattr(chosen, reduction)()


def with_soft_labels(output: Tensor, y: Tensor, reduction: str) -> Tensor:
    """Return the cross-entropy written out: a term for each row, although all classes are summed."""
    terms = F.one_hot(y, 5) * F.log_softmax(output, -1)
    return -terms.sum() if reduction == "sum" else -terms.sum(-1).mean()


def soft_labels(output: Tensor, y: Tensor, reduction: str) -> Tensor:
    labels = 0.9 * F.one_hot(y, 5).to(output.dtype) + 0.02
    return F.cross_entropy(output, labels, reduction=reduction)


WRITTEN_OUT = [
    *(reduced_later, picked, with_soft_labels, soft_labels),
    partial(F.cross_entropy, label_smoothing=0.1),
]


@pytest.mark.parametrize("closure", [True, False])
@pytest.mark.parametrize("loss", WRITTEN_OUT)
def test_forms_of_the_cross_entropy(loss: Any, closure: bool) -> None:
    results = []
    for reduction in ("mean", "sum"):
        own = partial(loss, reduction=reduction)
        model = network(sizes=(6, 7, 5))
        results.append(ends(model, own, ROWS, CLASSES.clamp_min(0), closure))
    assert_close(*results)


@pytest.mark.parametrize("closure", [True, False])
def test_a_sum_that_is_multiplied_is_told(closure: bool) -> None:
    """The factor may be one over the number of terms."""

    def halved(output: Tensor, y: Tensor) -> Tensor:
        return 0.5 * F.mse_loss(output, y, reduction="sum")

    with pytest.warns(UserWarning, match="That number is not known"):
        ends(network(sizes=(6, 7, 5)), halved, ROWS, batch(12, 5), closure)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("closure", [True, False])
def test_class_weights_that_only_the_autograd_graph_has_are_told(
    closure: bool, smoothing: float
) -> None:
    """The labels, which tell the sum of the weights, are gone after the backward pass."""
    options = {"weight": PRIORS, "label_smoothing": smoothing, "reduction": "sum"}
    loss = partial(F.cross_entropy, **options)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="or classes have weights"):
        ends(network(sizes=(6, 7, 5)), loss, ROWS, CLASSES.clamp_min(0), closure)


def test_sums_of_different_terms_are_told() -> None:
    def mixed(output: Tensor, y: Tensor) -> Tensor:
        squares = F.mse_loss(output, batch(12, 5), reduction="sum")
        return F.cross_entropy(output, y, reduction="sum") + squares

    with pytest.warns(UserWarning, match="That number is not known"):
        ends(network(sizes=(6, 7, 5)), mixed, ROWS, CLASSES.clamp_min(0), closure=True)


@pytest.mark.parametrize("given", ["mean", "sum", "none"])
@pytest.mark.parametrize("divided", [False, True])
def test_the_loss_that_a_closure_trains_comes_before_the_given_one(
    given: str, divided: bool
) -> None:
    """A loss may be given for its transfer, while the loop reduces it in another way."""

    def summed(output: Tensor, y: Tensor) -> Tensor:
        terms = F.cross_entropy(output, y, reduction="none").sum()
        return terms / len(y) if divided else terms

    y = CLASSES.clamp_min(0)
    expected = ends(network(sizes=(6, 7, 5)), nn.CrossEntropyLoss(), ROWS, y)
    loss_fn = nn.CrossEntropyLoss(reduction=given)
    found = ends(network(sizes=(6, 7, 5)), summed, ROWS, y, closure=True, given=loss_fn)
    assert_close(found, expected)


@pytest.mark.parametrize(
    "loss", [partial(F.cross_entropy, reduction="sum"), partial(by_hand, reduction="sum")]
)
def test_a_function_does_not_tell_its_terms_behind_a_cosine_head(loss: Loss) -> None:
    """No layer is the output, and a function has no calls that could be seen."""
    y = batch(12, 5) if loss.func is by_hand else CLASSES.clamp_min(0)  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="That number is not known"):
        ends(Cosine(), loss, ROWS, y)


@pytest.mark.parametrize("separate", [True, False])
def test_terms_of_two_heads_are_not_known(separate: bool) -> None:
    """Two sums may be one loss or two."""

    def backward(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
        one, two = model(x)
        losses = loss(one, y), loss(two, y)
        if separate:
            losses[0].backward(retain_graph=True)
            losses[1].backward()
        else:
            (losses[0] + losses[1]).backward()
        return losses[0]

    x, y = batch(8, 6), batch(8, 3, seed=2)
    with pytest.warns(UserWarning, match="That number is not known"):
        ends(TwoHeads(), nn.MSELoss(reduction="sum"), x, y, backward=backward)
    ends(TwoHeads(), nn.MSELoss(), x, y, backward=backward)  # no warning


def test_the_optimizer_leaves_nothing_on_the_loss() -> None:
    """Copies of the loss and of the optimizer work, and a deleted optimizer takes its hook along."""
    loss, model = nn.CrossEntropyLoss(reduction="sum"), Cosine()
    own = {"lr": 1e-3, "gamma": 1.0, "fallback": torch.optim.SGD}
    opt = LocoProp(model, local_reduction="mean", loss_fn=loss, **own)
    assert len(loss._forward_hooks) == 2  # of the terms, and of the inputs
    assert not copy.deepcopy(loss)._forward_hooks
    loaded = pickle.loads(pickle.dumps((loss, model, opt)))
    for own_loss, own_model, own in ((loss, model, opt), loaded, copy.deepcopy((loss, model, opt))):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            own_loss(own_model(ROWS), CLASSES).backward()
            own.step()
        assert any("number of its terms" in str(w.message) for w in told) == (own is not opt)
    del opt, own, loaded
    gc.collect()
    assert not loss._forward_hooks


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_loss_that_is_compiled() -> None:
    """Calls in a compiled graph are not seen: the rows of the output layer are counted instead."""
    results = []
    for reduction in ("mean", "sum"):
        loss = nn.CrossEntropyLoss(reduction=reduction)
        called = torch.compile(loss, fullgraph=True, backend="eager")
        model = network(sizes=(6, 7, 5))
        results.append(ends(model, called, ROWS, CLASSES.clamp_min(0), given=loss))
    assert_close(*results)
