"""What a layer's local problem contains, against autograd and the definitions of the settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from cases import batch, network
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from torch_locoprop import LocoProp
from torch_locoprop.distributed.ddp import SharedFacts
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.stepping.build_problem import Posed, count_loss_terms, decayed, row_factor

ROWS = 8
X, Y = batch(ROWS, 6), batch(ROWS, 3, seed=2)
FIRST, LAST = "0", "4"
MEAN = {"local_reduction": "mean"}


def posed(model: nn.Module, opt: LocoProp) -> dict[str, Posed]:
    """Return the problems that the next step would solve."""
    trained = opt._layers_with_gradient()
    with torch.no_grad():
        steps = opt._pose_problems(trained)
        return {layer.name: steps._posed(layer, own) for layer, own in trained.items()}


def made(model: nn.Module, **options: Any) -> LocoProp:
    given = {"variant": "locoprop-m", "lr": 0.1, "gamma": 3.0, "local_steps": 4, **options}
    return LocoProp(model, output_transfer="sigmoid", **given)


def loss_of(out: Tensor, reduction: str = "mean") -> Tensor:
    return binary_cross_entropy_with_logits(out, Y[: len(out)], reduction=reduction)


def one_problem(reduction: str = "mean", rows: int = ROWS, **options: Any) -> tuple[Posed, Any]:
    """Return the problem of the first layer, and its model."""
    model = network()
    opt = made(model, loss_fn=nn.BCEWithLogitsLoss(reduction=reduction), **options)
    loss_of(model(X[:rows]), reduction).backward()
    return posed(model, opt)[FIRST], model


@pytest.mark.parametrize("rows", [1, 2, ROWS])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("settings", "reduction", "terms"),
    [({}, "mean", 1), ({}, "sum", 1), (MEAN, "mean", 1), (MEAN, "sum", 3)],
)
def test_rows_and_gradients_have_the_weights_of_the_reduction(
    settings: dict[str, Any], reduction: str, terms: int, sign: int, rows: int
) -> None:
    """A mean divides a summed loss by its terms, rows times outputs, and gives each row 1/rows."""
    options = {**settings, "variant": "pocoprop-m", "maximize": sign == -1}
    mean, terms = bool(settings), terms * rows if terms > 1 else 1
    found, model = one_problem(reduction, rows, **options)
    assert found.problem.row_weight == (1 / rows if mean else 1.0)
    gradient = sign / terms * model[0].weight.grad
    torch.testing.assert_close(found.problem.backprop["weight"], gradient, rtol=1e-14, atol=0)
    # The gradient of y in one row's loss: of rows that make up a mean, rows times as much.
    y = model[1](model[0](X[:rows]))
    (v,) = torch.autograd.grad(loss_of(model[2:](y), reduction), y)
    expected = sign * v * (rows / terms if mean else 1)
    torch.testing.assert_close(found.problem.v, expected, rtol=1e-12, atol=0)
    assert found.problem.g is None
    (g,) = torch.autograd.grad(loss_of(model[1:](a := model[0](X[:rows])), reduction), a)
    recorded = found.problem.recorded() if found.problem.recorded else None
    if recorded is not None:
        expected = sign * g * (rows / terms if mean else 1)
        torch.testing.assert_close(recorded, expected, rtol=1e-12, atol=0)


def test_gradients_of_rows_are_scaled_as_those_of_the_weight() -> None:
    """By a clip or a scaler, between the backward pass and the step."""
    for variant, name in (("natural-s", "g"), ("pocoprop-s", "v")):
        plain, model = one_problem(variant=variant)[0], network()
        opt = made(model, variant=variant)
        (1024 * loss_of(model(X))).backward()
        for p in model.parameters():
            cast(Tensor, p.grad).div_(1024)
        found, expected = (
            getattr(posed(model, opt)[FIRST].problem, name),
            getattr(plain.problem, name),
        )
        if name == "v":
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_numbers_are_those_of_the_weights_group() -> None:
    model = network()
    weights = [m.weight for m in model if isinstance(m, nn.Linear)]
    biases = [m.bias for m in model if isinstance(m, nn.Linear)]
    groups = [{"params": biases, "lr": 0.5}, {"params": weights, "lr": 0.25}]
    opt = made(model, param_groups=groups)
    loss_of(model(X)).backward()
    found = posed(model, opt)[FIRST]
    assert found.problem.eta == 0.25
    assert {name: own.lr for name, own in found.numbers.items()} == {"weight": 0.25, "bias": 0.5}
    layer = opt._layers[0]
    assert opt._plan.group(layer)["lr"] == 0.25


def keep_outputs(model: Any, opt: LocoProp) -> Tensor:
    """Keep the outputs of the first layer, as overlapped backward passes on a GPU do."""
    (call,) = opt._layers[0].calls
    a: Tensor = model[0](X).detach()
    opt._layers[0].calls[:] = [call._replace(a=a, a_version=a._version)]
    return a


def test_displacements_start_at_zero() -> None:
    """Weight and bias are the base of the problem, and no recorded pre-activations are used."""
    outer: dict[str, Any] = {"apply": "gradient", "outer": lambda ps: torch.optim.SGD(ps, lr=0.1)}
    model = network()
    opt = made(model, **outer)
    loss_of(model(X)).backward()
    keep_outputs(model, opt)
    problem = posed(model, opt)[FIRST].problem
    assert problem.before is None
    assert not any(start.any() for start in problem.start.values())
    assert torch.equal(problem.base["weight"], model[0].weight)
    assert torch.equal(problem.base["bias"], model[0].bias)
    assert problem.eta == 0.1
    found, model = one_problem()
    assert found.problem.base == {}
    assert torch.equal(found.problem.start["weight"], model[0].weight)


def test_the_pre_activations_of_the_forward_pass_are_used_again() -> None:
    model = network()
    opt = made(model, weight_decay=0.5)
    loss_of(model(X)).backward()
    a = keep_outputs(model, opt)
    found = posed(model, opt)[FIRST]
    before = found.problem.before
    assert before is not None
    assert before.a is a
    assert (before.lr, before.weight_decay) == (0.1, 0.5)
    torch.testing.assert_close(found.problem.start["weight"], 0.95 * model[0].weight)
    start = nn.functional.linear(X, 0.95 * model[0].weight, model[0].bias)
    torch.testing.assert_close(found.problem.a0, start)
    model = network()
    model[0].weight.requires_grad_(False)
    opt = made(model)
    loss_of(model(X)).backward()
    keep_outputs(model, opt)
    frozen = posed(model, opt)[FIRST].problem
    assert frozen.before is None
    assert torch.equal(frozen.fixed["weight"], model[0].weight)
    assert frozen.start.keys() == {"bias"}


@pytest.mark.parametrize("rows", [(8,), (8, 1), (6, 8)])
def test_rows_that_were_kept_count_for_those_that_were_not(rows: tuple[int, ...]) -> None:
    """Each call keeps two rows at most; a backward pass reaches the last call first."""
    model = network()
    opt = made(model, max_rows=2)
    sum(loss_of(model(X[:count])) for count in rows).backward()  # type: ignore[union-attr]
    weight = posed(model, opt)[FIRST].problem.row_weight
    counts = [[1.0]] if rows[-1] == 1 else [[rows[-1] / 2.0]] * 2
    counts += [[rows[0] / 2.0]] * 2 if len(rows) > 1 else []
    torch.testing.assert_close(weight, torch.tensor(counts, dtype=torch.float64))


def facts(divisor: int) -> SharedFacts:
    return SharedFacts(None, 5, True, False, 2, divisor, False, False)


@pytest.mark.parametrize(
    ("group", "terms", "divisor", "expected"),
    [
        (MEAN, 4.0, None, 2.5),  # 10 rows / 4 terms
        (MEAN, 4.0, 3, 2.5),
        ({**MEAN, "maximize": True}, 4.0, None, -2.5),
        ({"local_reduction": "sum"}, 4.0, None, 1.0),
        ({"local_reduction": "sum"}, 4.0, 4, 0.25),
        ({"local_reduction": "sum", "maximize": True}, 4.0, 4, -0.25),
    ],
)
def test_the_factor_of_a_rows_gradient(
    group: dict[str, Any], terms: float, divisor: int | None, expected: float
) -> None:
    layer: Any = SimpleNamespace(row_count=10, shared_facts=divisor and facts(divisor))
    assert row_factor(layer, {"maximize": False, **group}, terms) == expected


def test_the_factor_of_a_layer_without_rows_is_finite() -> None:
    """One row is counted, so that it may be divided by."""
    layer: Any = SimpleNamespace(row_count=0, shared_facts=None)
    assert row_factor(layer, {"maximize": False, **MEAN}, 4.0) == 0.25


class OnDevice(Tensor):
    """A number that is not in the memory of the host."""

    is_cpu = False


def test_weight_decay_multiplies_weights_and_no_biases() -> None:
    w = batch(4, 3) / 3
    for lr in (0.3, torch.tensor(0.3, dtype=torch.float64)):
        group: Any = {"lr": lr, "weight_decay": 0.7}
        assert torch.equal(decayed("weight", w, group), w * (1 - lr * 0.7))
        assert decayed("bias", w, group) is w
        assert torch.equal(decayed("weight", w, {**group, "weight_decay": 1.0}), w * (1 - lr))
        assert decayed("weight", w, {**group, "weight_decay": 0}) is w
    group["lr"] = torch.tensor(0.3, dtype=torch.float64).as_subclass(OnDevice)
    torch.testing.assert_close(decayed("weight", w, group).as_subclass(Tensor), w * (1 - 0.21))


def layer_of(rows: int, width: int, *, is_output: bool = True, called: bool = True) -> LayerRecord:
    fake: Any = SimpleNamespace(
        calls=[1] if called else [], is_output=is_output, width=width, row_count=rows
    )
    return cast(LayerRecord, fake)


def test_the_terms_of_a_loss_are_rows_or_entries_of_the_output() -> None:
    hidden, unused = layer_of(7, 4, is_output=False), layer_of(7, 4, called=False)
    layers = [hidden, layer_of(5, 3), unused]
    assert count_loss_terms(layers, True) == 5
    assert count_loss_terms(layers, False) == 15
    assert count_loss_terms(layers, None) is None
    assert count_loss_terms([*layers, layer_of(2, 3)], True) is None
    assert count_loss_terms([hidden], True) is None


def test_a_mean_over_no_rows_is_a_backprop_step() -> None:
    """The layer's bias is used without the layer, so that it has a gradient and no rows."""
    model = network()
    model.add_module("unused", nn.Linear(3, 3).double())
    opt = made(
        model, **MEAN, layers=["0", "unused"], fallback=lambda ps: torch.optim.SGD(ps, lr=0.1)
    )
    (model[:5](X) + model.unused.bias).square().mean().backward()  # type: ignore[operator]
    with pytest.warns(UserWarning, match="'unused' has a gradient, but its forward was not called"):
        opt.step()
    assert torch.isfinite(model.unused.bias).all()  # type: ignore[arg-type]
