"""max_rows=: the curvature uses some rows, the first gradient uses all."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.recording.row_reduction import row_weight
from torch_locoprop.solvers import Exact

VARIANTS = ("locoprop-s", "locoprop-m", "pocoprop-s", "pocoprop-m")


def loco(model: nn.Module, **options: Any) -> LocoProp:
    given = {"lr": 1e-3, "gamma": 10.0, "solver": "sgd", "local_steps": 5, **options}
    return LocoProp(model, output_transfer="sigmoid", **given)


def after_a_step(x: Tensor, y: Tensor, model: nn.Module | None = None, **options: Any) -> list[Any]:
    model = network() if model is None else model
    opt = loco(model, **options)
    cross_entropy(model(x), y).backward()
    opt.step()
    return weights(model)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_copies_of_the_same_rows_may_be_left_out(variant: str, reduction: str) -> None:
    """All eight rows are equal, so any of them can replace the others."""
    x, y = batch(1, 6).repeat(8, 1), batch(1, 3, seed=2).repeat(8, 1)
    own = {"variant": variant, "local_reduction": reduction}
    assert_close(after_a_step(x, y, max_rows=2, **own), after_a_step(x, y, **own))


@pytest.mark.parametrize("solver", [Exact(), Exact(decay=0.5, damping=0.1), "rmsprop"])
@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m"])
def test_with_every_solver(variant: str, solver: Any) -> None:
    x, y = batch(1, 6).repeat(8, 1), batch(1, 3, seed=2).repeat(8, 1)
    own = {"variant": variant, "solver": solver}
    assert_close(after_a_step(x, y, max_rows=3, **own), after_a_step(x, y, **own))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_first_iteration_has_all_rows(variant: str) -> None:
    x, y = batch(20, 6), batch(20, 3, seed=2)
    own = {"variant": variant, "local_steps": 1}
    assert_close(after_a_step(x, y, max_rows=3, **own), after_a_step(x, y, **own))


@pytest.mark.parametrize("variant", VARIANTS)
def test_later_ones_have_the_drawn_rows_alone(variant: str) -> None:
    x, y = batch(20, 6), batch(20, 3, seed=2)
    full, thin = (
        after_a_step(x, y, variant=variant),
        after_a_step(x, y, variant=variant, max_rows=3),
    )
    assert any(not torch.equal(a, b) for a, b in zip(full, thin, strict=True))


def test_the_curvature_is_right_on_average() -> None:
    """The exact step's Gram matrix over many draws approaches that of all rows."""
    model, x, y = network(), batch(20, 6), batch(20, 3, seed=2)
    opt = loco(model, lr=0.0, max_rows=5, solver=Exact(decay=0.999, every=1, damping=0.1))
    total = torch.zeros(7, 7, dtype=torch.float64)
    for _ in range(400):
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        layer = opt._layers[0]
        rows = layer.kind.linear_map.inputs(layer.inputs(), True, True)
        assert len(rows) == 5
        total += (row_weight(layer, 1.0) * rows).mT @ rows / 400
        opt.step()
    ones = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    expected = ones.mT @ ones
    assert (total - expected).norm() / expected.norm() < 0.05


def test_uneven_calls_count_by_their_size() -> None:
    model = network()
    opt = loco(model, max_rows=4)
    for rows in (12, 3):
        cross_entropy(model(batch(rows, 6)), batch(rows, 3, seed=2)).backward()
    layer = opt._layers[0]
    assert layer.row_count == 15
    assert row_weight(layer, 1.0).flatten().tolist() == [3.0] * 4 + [1.0] * 3  # type: ignore[union-attr]


def test_two_backward_passes_through_one_call_keep_the_same_rows() -> None:
    """PocoProp adds the gradients of rows of both passes, which must be the same rows."""
    x, y = batch(9, 6), batch(9, 3, seed=2)
    results = []
    for halves in (False, True):
        model = network()
        opt = loco(model, max_rows=4, variant="pocoprop-s")
        loss = cross_entropy(model(x), y)
        if halves:
            (0.25 * loss).backward(retain_graph=True)
            (0.75 * loss).backward()
        else:
            loss.backward()
        opt.step()
        results.append(weights(model))
    assert_close(results[1], results[0])


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2)).double()


def test_images_are_drawn_whole() -> None:
    x, y = torch.randn(6, 2, 5, 5, dtype=torch.float64), torch.zeros(6, 2, dtype=torch.float64)
    model = convolutional()
    opt = loco(model, max_rows=20)
    cross_entropy(model(x), y).backward()
    layer = opt._layers[0]
    assert sum(images.rows for images in layer.inputs()) == 2 * 9  # two images of nine positions
    assert row_weight(layer, 1.0).flatten().tolist() == [3.0] * 18  # type: ignore[union-attr]
    same = x[:1].repeat(6, 1, 1, 1)
    thin = after_a_step(same, y, convolutional(), max_rows=20)
    assert_close(thin, after_a_step(same, y, convolutional()))


def test_less_is_held_between_backward_and_step() -> None:
    model = network()
    opt = loco(model, max_rows=4)
    cross_entropy(model(batch(100, 6)), batch(100, 3, seed=2)).backward()
    assert [call.x.untyped_storage().nbytes() for call in opt._layers[0].calls] == [4 * 6 * 8]


def test_resume_draws_the_same_rows() -> None:
    x, y = batch(20, 6), batch(20, 3, seed=2)

    def run(steps: int, saved: Any = None) -> tuple[nn.Module, LocoProp]:
        model = network()
        opt = loco(model, max_rows=5)
        if saved is not None:
            model.load_state_dict(saved["model"])
            opt.load_state_dict(saved["opt"])
        for _ in range(steps):
            opt.zero_grad()
            cross_entropy(model(x), y).backward()
            opt.step()
        return model, opt

    straight, _ = run(4)
    model, opt = run(2)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    resumed, _ = run(2, torch.load(file, weights_only=True))
    for ours, theirs in zip(weights(resumed), weights(straight), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rows", [0, 1.5, True])
def test_bad_input(rows: Any) -> None:
    with pytest.raises(ValueError, match=f"Invalid max_rows={rows}"):
        loco(network(), max_rows=rows)
