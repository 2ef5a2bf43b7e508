"""opt.diagnostics(): its numbers, its table and scalars, and no cost without diagnose=True."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import batch, cross_entropy, network, weights
from rich.console import Console
from torch import Tensor, nn

from torch_locoprop import LocoProp, Variant
from torch_locoprop.paper.losses import Squared
from torch_locoprop.paper.targets import NaturalGradient, Target
from torch_locoprop.reporting.diagnostics import HEADINGS, Diagnostics
from torch_locoprop.solvers import Exact
from torch_locoprop.solvers.first_order import Sgd
from torch_locoprop.stepping import measurements

X, Y = batch(8, 6), batch(8, 3, seed=2)
LR, GAMMA = 0.05, 4.0


def stepped(**options: Any) -> tuple[nn.Sequential, LocoProp, list[Tensor], list[Tensor]]:
    """Return model and optimizer after a step, the weights before it, and their gradients."""
    model = network()
    given = {"solver": "sgd", "local_steps": 6, "variant": "locoprop-s", **options}
    opt = LocoProp(model, lr=LR, gamma=GAMMA, output_transfer="sigmoid", diagnose=True, **given)
    before = weights(model)
    cross_entropy(model(X), Y).backward()
    opt.step()
    return model, opt, before, [p.grad for p in model.parameters()]  # type: ignore[misc]


@pytest.mark.parametrize("apply", ["replace", "gradient"])
def test_displacement_cosine_and_length(apply: str) -> None:
    outer = {"outer": lambda ps: torch.optim.SGD(ps, lr=LR * GAMMA)} if apply == "gradient" else {}
    model, opt, before, gradients = stepped(apply=apply, **outer)
    rows = opt.diagnostics()
    assert [row.layer for row in rows] == ["0", "2", "4"]
    for i, row in enumerate(rows):
        own = slice(2 * i, 2 * i + 2)  # weight and bias
        moved = [b - a for a, b in zip(before[own], weights(model)[own], strict=True)]
        delta, plain = (
            torch.cat([t.flatten() for t in ts])
            for ts in (moved, [-LR * GAMMA * g for g in gradients[own]])
        )
        assert row.displacement == pytest.approx(float(delta.norm() / before[2 * i].norm()))
        assert row.length == pytest.approx(float(delta.norm() / plain.norm()))
        cosine = torch.nn.functional.cosine_similarity(delta, plain, dim=0)
        assert row.cosine == pytest.approx(float(cosine))
        assert row.milliseconds > 0


def test_a_time_on_a_gpu_waits_for_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    measurements._now(torch.device("cpu"))
    assert not waited
    device = torch.device("cuda", 1)
    measurements._now(device)
    assert waited == [device]


def test_milliseconds_are_those_of_the_solution_without_the_measuring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def slow(which: Any, name: str, seconds: float) -> None:
        own = getattr(which, name)

        def later(*given: Any) -> Any:
            nonlocal now
            now += seconds
            return own(*given)

        monkeypatch.setattr(which, name, later)

    monkeypatch.setattr(measurements.time, "perf_counter", lambda: now)
    slow(Sgd, "solve", 0.25)
    slow(measurements, "objective", 8.0)
    _, opt, *_ = stepped()
    assert [row.milliseconds for row in opt.diagnostics()] == [250.0] * 3


def test_a_layer_that_is_frozen_since_is_not_listed() -> None:
    model, opt, *_ = stepped()
    model[0].requires_grad_(False)
    opt.zero_grad()
    cross_entropy(model(X), Y).backward()
    opt.step()
    assert [row.layer for row in opt.diagnostics()] == ["2", "4"]


def test_local_losses_are_those_of_the_layer_by_hand() -> None:
    """The change of ½‖a − a*‖² is computed with the layer's forward and ∂L/∂a from autograd."""
    model, opt, before, _ = stepped()
    fresh = network()
    a0 = fresh[0](X)
    g = torch.autograd.grad(cross_entropy(fresh[1:](a0), Y), a0)[0]
    target = (a0 - GAMMA * g).detach()

    def loss(weight: Tensor, bias: Tensor) -> float:
        return float(0.5 * (X @ weight.T + bias - target).square().sum())

    start, after = loss(*before[:2]), loss(*weights(model)[:2])
    row = opt.diagnostics()[0]
    assert row.local_loss == pytest.approx(after - start)
    assert row.local_loss < row.backprop_loss < 0  # further iterations improve on BackProp
    gradient = torch.autograd.grad(cross_entropy(fresh(X), Y), list(fresh[0].parameters()))
    backprop = [p - LR * GAMMA * d for p, d in zip(before[:2], gradient, strict=True)]
    assert row.backprop_loss == pytest.approx(loss(*backprop) - start)


def test_one_iteration_is_the_backprop_step() -> None:
    for row in stepped(local_steps=1)[1].diagnostics():
        assert row.cosine == pytest.approx(1)
        assert row.length == pytest.approx(1)
        assert row.local_loss == pytest.approx(row.backprop_loss)


def test_guards_are_counted() -> None:
    rows = stepped(cap=1e-3, gate=True)[1].diagnostics()
    assert all(row.capped == 1 and row.gated == 0 and row.skipped == 0 for row in rows)


def test_as_text_as_a_rich_table_and_for_tensorboard() -> None:
    rows = stepped()[1].diagnostics()
    lines = str(rows).splitlines()
    assert len(lines) == 4
    assert all(heading in lines[0] for heading in HEADINGS.values())
    assert len({len(line) for line in lines}) == 1
    assert printed(rows).split()[: len(HEADINGS) + 1] == lines[0].split()

    written: dict[str, float] = {}

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            assert step == 7
            written[name] = value

    rows.write(Writer(), 7)
    assert written["cosine/2"] == rows[1].cosine
    assert written["loss_before/4"] == rows[2].loss_before
    assert len(written) == 3 * 11  # all but the layers' names


def test_before_the_first_step_there_are_no_rows() -> None:
    assert len(LocoProp(network(), output_transfer="sigmoid", diagnose=True).diagnostics()) == 0


def printed(rows: Diagnostics, width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(rows)
    return console.export_text()


def test_the_table_fits_into_80_columns() -> None:
    """No number is cut, even with the longest numbers and a long layer name."""
    row = stepped()[1].diagnostics()[0]
    wide = dict.fromkeys(HEADINGS, -1.234567e-05)
    wide |= {"gated": 1234, "capped": 123, "skipped": 1234, "milliseconds": 1234.5}
    wide |= {"displacement": 0.00123456, "cosine": -0.123456}
    lines = printed(Diagnostics([replace(row, layer="encoder.layers.11.linear1", **wide)]))
    assert max(map(len, lines.splitlines())) <= 80
    numbers = ["-1.23e-5"] * 4 + ["0.00123", "-0.123", "1234", "123", "1234", "1.23e3"]
    assert lines.splitlines()[2].split()[-len(HEADINGS) :] == numbers


# ---- local losses before and after ---------------------------------------------------------------

ROWS = batch(40, 6), batch(40, 3, seed=2)
INTEGRALS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": lambda a: a.cosh().log(),
    "sigmoid": F.softplus,
}


class Seen:
    """Input, pre-activation, output and gradients of a layer of ``network()``, by autograd."""

    def __init__(
        self, model: nn.Sequential, index: int, x: Tensor, y: Tensor, share: float
    ) -> None:
        self.x = model[:index](x).detach()
        a = model[index](self.x).detach().requires_grad_()
        last = index == len(model) - 1
        self.name = "sigmoid" if last else "tanh"
        f = torch.sigmoid(a) if last else torch.tanh(a)
        if last:
            loss = -(y * f.log() + (1 - y) * (1 - f).log()).sum() / len(y)
        else:
            loss = cross_entropy(model[index + 2 :](f), y)
        self.g, self.v = (t * share for t in torch.autograd.grad(loss, [a, f]))
        self.a, self.f = a.detach(), f.detach()


def local_loss(variant: str, seen: Seen, times: float, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the paper's local loss of each row, with the recorded gradient times ``times``."""
    step, integral = GAMMA * times, INTEGRALS[seen.name]
    a = seen.x @ weight.T + bias
    f = torch.sigmoid(a) if seen.name == "sigmoid" else torch.tanh(a)
    if variant in ("locoprop-s", "proxprop"):
        return 0.5 * (a - (seen.a - step * seen.g)).square().sum(-1)
    if variant == "locoprop-m":
        return (integral(a) - (seen.f - step * seen.g) * a).sum(-1)
    if variant == "pocoprop-s":
        return 0.5 * (f - (seen.f - step * seen.v)).square().sum(-1)
    target = seen.a - step * seen.v
    return (integral(target) - integral(a) - f * (target - a)).sum(-1)


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("parts", [1, 2], ids=["", "accumulated"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(
    "variant", ["locoprop-s", "locoprop-m", "pocoprop-s", "pocoprop-m", "proxprop"]
)
def test_losses_before_and_after(variant: str, reduction: str, parts: int, clip: bool) -> None:
    """The second step is checked too, in which layers keep no more than they need."""
    model = network()
    opt = LocoProp(
        model, lr=1e-3, gamma=GAMMA, output_transfer="sigmoid", solver="sgd", local_steps=6,
        variant=variant, local_reduction=reduction, diagnose=True,
    )  # fmt: skip
    for _ in range(2):
        old = copy.deepcopy(model)
        batches = list(zip(*(t.chunk(parts) for t in ROWS), strict=True))
        opt.zero_grad()
        for x, y in batches:
            (cross_entropy(model(x), y) / parts).backward()
        factor = 1.0
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            factor = 0.05 / (float(norm) + 1e-6)
            assert factor < 1
        if variant == "locoprop-s":
            assert opt._layers[0].calls[0].gram is not None
        opt.step()
        rows = len(ROWS[0]) if reduction == "mean" else 1
        for row in opt.diagnostics():
            index = int(row.layer)
            seen = [Seen(old, index, x, y, 1 / parts) for x, y in batches]
            for measured, which in ((row.loss_before, old), (row.loss_after, model)):
                at = [p.detach() for p in which[index].parameters()]
                by_hand = sum(float(local_loss(variant, s, factor * rows, *at).sum()) for s in seen)
                assert measured == pytest.approx(by_hand / rows, rel=1e-9)
            assert row.local_loss == pytest.approx(row.loss_after - row.loss_before)


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m"])
def test_losses_of_some_rows(variant: str) -> None:
    """With max_rows= each kept row counts for several."""
    model = network()
    opt = LocoProp(
        model, lr=1e-3, gamma=GAMMA, output_transfer="sigmoid", solver="sgd", local_steps=6,
        variant=variant, max_rows=10, diagnose=True,
    )  # fmt: skip
    old = copy.deepcopy(model)
    cross_entropy(model(ROWS[0]), ROWS[1]).backward()
    kept = opt._layers[0].calls[0].kept
    assert kept is not None
    opt.step()
    at = [p.detach() for p in old[0].parameters()]
    by_hand = 4 * local_loss(variant, Seen(old, 0, *ROWS, 1.0), 1.0, *at)[kept].sum()
    assert opt.diagnostics()[0].loss_before == pytest.approx(float(by_hand))


@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m"])
def test_losses_where_a_bias_is_frozen(variant: str) -> None:
    model = network()
    model[0].bias.requires_grad_(False)
    opt = LocoProp(
        model, lr=1e-3, gamma=GAMMA, output_transfer="sigmoid", solver="sgd", local_steps=6,
        variant=variant, diagnose=True,
    )  # fmt: skip
    old = copy.deepcopy(model)
    cross_entropy(model(ROWS[0]), ROWS[1]).backward()
    opt.step()
    seen = Seen(old, 0, *ROWS, 1.0)
    before, after = (
        float(local_loss(variant, seen, 1.0, *(p.detach() for p in each[0].parameters())).sum())
        for each in (old, model)
    )
    found = opt.diagnostics()[0]
    assert found.loss_before == pytest.approx(before)
    assert found.local_loss == pytest.approx(after - before)


def test_losses_behind_a_linear_transfer_leave_nothing_out() -> None:
    """The matching loss of a linear transfer is the squared loss, from rows and from XᵀX."""
    for rows in (3, 40):
        model = network("linear", sizes=(6, 3))
        opt = LocoProp(model, lr=LR, gamma=GAMMA, output_transfer="linear", diagnose=True)
        for step in range(2):
            opt.zero_grad()
            a = model(ROWS[0][:rows])
            loss = 0.5 * (a - ROWS[1][:rows]).square().sum()
            g = torch.autograd.grad(loss, a, retain_graph=True)[0]
            loss.backward()
            if step:  # when the transfer is known
                assert (opt._layers[0].calls[0].gram is not None) == (rows == 40)
            opt.step()
        by_hand = float(0.5 * (GAMMA * g).square().sum())
        assert opt.diagnostics()[0].loss_before == pytest.approx(by_hand)


def test_losses_of_a_natural_target() -> None:
    damping = 0.1
    variant = Variant("natural", NaturalGradient(damping=damping), Squared())
    model, opt, _, _ = stepped(variant=variant)
    fisher = opt.state[model[0].weight]["fisher"]
    g = Seen(network(), 0, X, Y, 1.0).g
    system = fisher + damping * fisher.diagonal().mean() * torch.eye(len(fisher))
    by_hand = 0.5 * (GAMMA * torch.linalg.solve(system, g.T)).square().sum()
    assert opt.diagnostics()[0].loss_before == pytest.approx(float(by_hand))


def test_losses_of_a_convolution() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))
    model = model.double()
    opt = LocoProp(model, lr=1e-3, gamma=GAMMA, output_transfer="sigmoid", diagnose=True)
    old, x = copy.deepcopy(model), X.reshape(8, 2, 3)
    a0 = old[0](x)
    g = torch.autograd.grad(cross_entropy(old[1:](a0), Y), a0)[0]
    cross_entropy(model(x), Y).backward()
    opt.step()
    y = a0.tanh() - GAMMA * g
    row = opt.diagnostics()[0]
    for measured, a in ((row.loss_before, a0), (row.loss_after, model[0](x))):
        assert measured == pytest.approx((a.cosh().log() - y * a).sum().item())


def test_between_the_steps_of_every_the_losses_are_those_of_s() -> None:
    model, opt, *_ = stepped(variant="locoprop-m", every=2)
    g = Seen(copy.deepcopy(model), 0, X, Y, 1.0).g
    opt.zero_grad()
    cross_entropy(model(X), Y).backward()
    opt.step()
    by_hand = float(0.5 * (GAMMA * g).square().sum())
    assert opt.diagnostics()[0].loss_before == pytest.approx(by_hand)


class Tied(nn.Module):
    """A model that uses the first layer's weight also outside of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) @ self.first.weight)  # type: ignore[no-any-return]


def test_losses_that_are_not_known_are_left_out() -> None:
    model = Tied()
    opt = LocoProp(model, lr=LR, gamma=GAMMA, output_transfer="sigmoid", diagnose=True)
    for _ in range(2):
        opt.zero_grad()
        cross_entropy(model(X), Y).backward()
        opt.step()
        rows = opt.diagnostics()
        first, second = rows
        assert math.isnan(first.loss_before)
        assert math.isnan(first.loss_after)
        assert second.loss_before > 0
        assert str(rows).splitlines()[1].split()[:3] == ["first", "–", "–"]
        assert printed(rows).splitlines()[2].split()[:3] == ["first", "–", "–"]
        names: list[str] = []

        class Writer:
            def add_scalar(self, name: str, value: float, step: int) -> None:
                assert not math.isnan(value)
                names.append(name)  # noqa: B023

        rows.write(Writer(), 0)
        assert "loss_before/first" not in names
        assert "loss_after/first" not in names
        assert {"loss_before/second", "loss_after/second", "local_loss/first"} <= {*names}


# ---- no influence, and no cost -------------------------------------------------------------------


class Mine(Target):
    """A target that needs gradients of rows."""

    def __call__(self, a: Tensor, transfer: Any, g: Any, v: Any, gamma: Any) -> Tensor:
        return a - gamma * g  # type: ignore[no-any-return]


SETTINGS: dict[str, dict[str, Any]] = {
    "s": {"variant": "locoprop-s"},
    "m": {"variant": "locoprop-m"},
    "pocoprop-s": {"variant": "pocoprop-s"},
    "pocoprop-m": {"variant": "pocoprop-m"},
    "proxprop": {"variant": "proxprop"},
    "natural-s": {"variant": "natural-s"},
    "a target of one's own": {"variant": Variant("mine", Mine(), Squared())},
    "exact": {"variant": "locoprop-s", "solver": "exact"},
    "exact, m": {"variant": "locoprop-m", "solver": "exact"},
    "exact, now and then": {"variant": "locoprop-s", "solver": Exact(every=2)},
    "some rows": {"max_rows": 10},
    "some rows of one iteration": {"max_rows": 10, "local_steps": 1},
    "gate": {"gate": True, "lr": 0.5},
    "gate of s": {"gate": True, "lr": 0.5, "variant": "locoprop-s"},
    "every other step": {"every": 2},
    "means": {"local_reduction": "mean"},
    "two iterations": {"local_steps": 2, "variant": "locoprop-s"},
}


@pytest.mark.parametrize("parts", [1, 2], ids=["", "accumulated"])
@pytest.mark.parametrize("name", SETTINGS)
def test_measuring_changes_no_bit(name: str, parts: int) -> None:
    """Also for the last setting, where measuring must not change the choice between rows and XᵀX."""
    ends = []
    for diagnose in (True, False):
        model = network(sizes=(6, 2, 4, 3))
        given = {"lr": 1e-3, "local_steps": 5, "momentum": 0.9, **SETTINGS[name]}
        opt = LocoProp(model, gamma=GAMMA, output_transfer="sigmoid", diagnose=diagnose, **given)
        for _ in range(4):
            opt.zero_grad()
            for x, y in zip(*(t.chunk(parts) for t in ROWS), strict=True):
                (cross_entropy(model(x), y) / parts).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            opt.step()
        ends.append(weights(model))
    assert all(map(torch.equal, *ends))


def test_nothing_is_recorded_when_off() -> None:
    for diagnose in (True, False):
        model = network()
        opt = LocoProp(model, output_transfer="sigmoid", diagnose=diagnose)
        for _ in range(2):
            opt.zero_grad()
            cross_entropy(model(X), Y).backward()
            recorded = [call.g is not None for layer in opt._layers for call in layer.calls]
            assert recorded == [diagnose] * 3
            opt.step()
        assert not opt._hooks.search.is_on
    with pytest.raises(RuntimeError, match="diagnose=True"):
        opt.diagnostics()


# ---- counts ---------------------------------------------------------------------------------------


def counts(opt: LocoProp) -> list[tuple[int, int, int]]:
    return [(row.gated, row.capped, row.skipped) for row in opt.diagnostics()]


def ruined(model: nn.Sequential, opt: LocoProp) -> None:
    """Take a step whose gradients are not finite."""
    opt.zero_grad()
    cross_entropy(model(X), Y).backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.fill_(torch.inf)
    opt.step()


@pytest.mark.filterwarnings("ignore:The local solution")
def test_counts_outlive_a_resumption() -> None:
    model, opt, *_ = stepped(cap=1e-3)
    ruined(model, opt)
    assert counts(opt) == [(0, 1, 1)] * 3
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, resumed, *_ = stepped(cap=1e-3)
    resumed.load_state_dict(saved)
    other.load_state_dict(model.state_dict())
    assert counts(resumed) == [(0, 1, 1)] * 3
    assert resumed.skipped_updates == opt.skipped_updates == {"0": 1, "2": 1, "4": 1}
    ruined(other, resumed)
    assert counts(resumed) == [(0, 1, 2)] * 3
    del saved["counts"]  # as in a state dict of an earlier version
    resumed.load_state_dict(saved)
    assert counts(resumed) == [(0, 0, 0)] * 3


def test_a_resumed_run_does_not_warn_of_what_was_skipped_before(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model, opt, *_ = stepped()
    with pytest.warns(UserWarning, match="was not finite"):
        ruined(model, opt)
    other, resumed, *_ = stepped()
    resumed.load_state_dict(opt.state_dict())
    resumed.zero_grad()
    cross_entropy(other(X), Y).backward()
    resumed.step()
    assert resumed.skipped_updates["0"] == 1
    assert not recwarn.list
    with pytest.warns(UserWarning, match="was not finite"):
        ruined(other, resumed)


@pytest.mark.filterwarnings("ignore:The local solution")
def test_counts_outlive_copies_and_new_groups() -> None:
    model, opt, *_ = stepped(cap=1e-3)
    ruined(model, opt)
    _, copied = copy.deepcopy((model, opt))
    assert counts(copied) == [(0, 1, 1)] * 3
    copied.zero_grad()
    more = nn.Linear(2, 2)
    copied._model.add_module("more", more)
    copied.add_param_group({"params": list(more.parameters())})
    assert counts(copied) == [(0, 1, 1)] * 3
    assert copied.skipped_updates == {"0": 1, "2": 1, "4": 1, "more": 0}
