"""``GradScaler``: the same weights as without scaling, and no trace of a skipped step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import assert_close, cross_entropy, network, weights
from promises.loops.plain import PRESETS, STEPS, data, distance, each_model, loco, make
from torch import Tensor, nn
from torch.amp import GradScaler

from torch_locoprop import LocoProp, Variant
from torch_locoprop.paper.losses import Matching
from torch_locoprop.paper.targets import Target
from torch_locoprop.recording import row_gradients


class OwnTarget(Target):
    """The target of LocoProp-M, computed from gradients of rows."""

    def __call__(self, a, transfer, g, v, gamma):  # type: ignore[no-untyped-def]
        return transfer.f(a) - gamma * g


VARIANTS = {
    **{name: name for name in ("locoprop-s", "locoprop-m", "pocoprop-s", "pocoprop-m", *PRESETS)},
    "own": Variant("own", OwnTarget(), Matching()),
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def loop(
    model: nn.Module,
    opt: LocoProp,
    scaler: GradScaler,
    kind: str = "linear",
    unscale: bool = False,
    clip: float | None = None,
    parts: int = 1,
) -> None:
    """Train with the loop of PyTorch's documentation."""
    for seed in range(STEPS):
        x, y = data(kind, seed)
        for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            scaler.scale(cross_entropy(model(x_part), y_part) / parts).backward()
        if unscale:
            scaler.unscale_(opt)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()


def run(variant: str, kind: str = "linear", scale: float | None = None, **how: Any) -> list[Tensor]:
    model = make(kind)
    opt = loco(model, VARIANTS[variant], **how.pop("options", {}))  # type: ignore[arg-type]
    scaler = GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    loop(model, opt, scaler, kind, **how)
    return weights(model)


@each_variant
@each_model
@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaled_loss_gives_the_same_weights(variant: str, kind: str, unscale: bool) -> None:
    """Scaling by a power of two is exact, so the weights are equal."""
    assert_close(run(variant, kind, 2.0**16, unscale=unscale), run(variant, kind), 1e-12)


@each_variant
def test_a_scale_that_is_no_power_of_two(variant: str) -> None:
    assert_close(run(variant, scale=1000.0), run(variant), 1e-7)  # the inverse scale is float32


@each_variant
@each_model
def test_with_clipping(variant: str, kind: str) -> None:
    how = {"unscale": True, "clip": 0.05}
    found = run(variant, kind, 2.0**16, **how)
    assert_close(found, run(variant, kind, **how), 1e-10)
    assert distance(found, run(variant, kind)) > 1e-5


@each_variant
def test_with_accumulation(variant: str) -> None:
    assert_close(run(variant, scale=2.0**10, parts=4), run(variant), 1e-10)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in PRESETS])
def test_with_the_mean_over_rows(variant: str) -> None:
    how = {"options": {"local_reduction": "mean"}}
    found = run(variant, scale=2.0**10, options={"local_reduction": "mean"})
    assert_close(found, run(variant, **how), 1e-12)


@each_variant
def test_growing_scales(variant: str) -> None:
    model = make()
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    loop(model, loco(model, VARIANTS[variant]), scaler)  # type: ignore[arg-type]
    assert scaler.get_scale() == 4.0 * 2**STEPS
    assert_close(weights(model), run(variant), 1e-12)


def test_a_scale_does_change_what_is_recorded() -> None:
    """Gradients of rows are scaled until they follow ``p.grad``: the tests above can fail."""
    model = make()
    opt = loco(model, "pocoprop-s")
    cross_entropy(model(data()[0]), data()[1]).backward()
    expected = row_gradients.gradients(opt._layers[0])
    opt.zero_grad()
    scaler = GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(cross_entropy(model(data()[0]), data()[1])).backward()
    scaler.unscale_(opt)
    layer = opt._layers[0]
    assert_close([row_gradients.gradients(layer)], [2.0**16 * expected])  # type: ignore[list-item, operator]
    layer.rescale_row_gradients()
    assert_close([row_gradients.gradients(layer)], [expected])  # type: ignore[list-item]


@each_variant
@pytest.mark.parametrize("clear", ["optimizer", "model"])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_skipped_step_leaves_nothing(variant: str, clear: str, unscale: bool) -> None:
    """With an overflow in the second of four batches, the run equals one of the other three."""

    def trained(overflow: bool) -> tuple[list[Tensor], LocoProp, GradScaler]:
        model = make()
        opt = loco(model, VARIANTS[variant])  # type: ignore[arg-type]
        scaler = GradScaler("cpu", init_scale=2.0**8)
        for seed in range(4):
            if seed == 1 and not overflow:
                continue
            x, y = data(seed=seed)
            factor = float("inf") if seed == 1 else 1.0
            scaler.scale(factor * cross_entropy(model(x), y)).backward()
            before = weights(model)
            if unscale:
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            if seed == 1:
                assert_close(weights(model), before, 0.0)
            (opt if clear == "optimizer" else model).zero_grad()
        return weights(model), opt, scaler

    (found, opt, scaler), (expected, other, _) = trained(True), trained(False)
    assert_close(found, expected, 1e-12)
    assert scaler.get_scale() == 2.0**7  # it did skip
    assert opt.param_groups[0]["steps"] == other.param_groups[0]["steps"] == 3
    assert not any(opt.skipped_updates.values())  # the scaler's, not ours


def test_an_outer_optimizer_and_a_fallback() -> None:
    def trained(scale: float | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()
        opt = loco(
            model,
            "pocoprop-s",
            apply="gradient",
            outer=lambda ps: torch.optim.AdamW(ps, lr=1e-2),
            fallback=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        )
        loop(model, opt, GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None))
        return weights(model)

    assert_close(trained(2.0**16), trained(None), 1e-12)


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m", "pocoprop-s"])
@each_model
def test_autocast_in_half_precision_needs_the_scale(variant: str, kind: str) -> None:
    """Gradients that vanish in float16 train as in float32 when the loss is scaled."""

    def trained(dtype: torch.dtype | None, scale: float | None) -> list[Tensor]:
        model = make(kind).float()
        opt = loco(model, variant, gamma=2.0**21)
        scaler = GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for seed in range(STEPS):
            x, y = (t.float() for t in data(kind, seed))
            with torch.autocast("cpu", torch.float16, enabled=dtype is not None):
                loss = 2.0**-20 * cross_entropy(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        assert scaler.get_scale() == (scale or 1.0)  # no step was skipped
        return weights(model)

    expected = trained(None, None)
    moved = distance(expected, weights(make(kind).float()))
    assert distance(trained(torch.float16, 2.0**20), expected) < 0.02 * moved
    assert distance(trained(torch.float16, None), expected) > 0.1 * moved


def test_a_disabled_scaler_and_none_are_one() -> None:
    model = network()
    opt = loco(model)
    for seed in range(STEPS):
        x, y = data(seed=seed)
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    assert_close(run("locoprop-m"), weights(model), 0.0)
