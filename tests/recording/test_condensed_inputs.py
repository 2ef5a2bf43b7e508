"""Layers keep XᵀX in place of their inputs, or neither, if a step needs no more.

The steps equal those of layers that keep all rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import FIRST_ORDER, VARIANTS, assert_close, batch, cross_entropy, network, weights
from torch import Tensor, nn

from torch_locoprop import LocoProp, Variant
from torch_locoprop.paper.gram import Gram
from torch_locoprop.paper.losses import Squared
from torch_locoprop.paper.targets import Target
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.solvers import Exact
from torch_locoprop.stepping.method import Plan

X, Y = batch(40, 6), batch(40, 3, seed=2)
CLOSED_FORMS = {
    "plain": Exact(),
    "average": Exact(decay=0.9),
    "all": Exact(decay=0.9, every=2, damping=1e-2),
    "now and then": Exact(every=3),
}

Train = Callable[..., list[Tensor]]


def normed() -> nn.Sequential:
    """Return a model with norms after its layers: they have no transfer and take LocoProp-S."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)
    ).double()


def images_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2), nn.Tanh(),
        nn.ConvTranspose2d(4, 2, 2), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3),
    ).double()  # fmt: skip


MODELS = {"linear": network, "norm": normed, "convolutions": images_net}


def loco(model: nn.Module, **options: Any) -> LocoProp:
    given = {"lr": 1e-3, "gamma": 10.0, "variant": "locoprop-s", "local_steps": 5, **options}
    fallback = lambda params: torch.optim.SGD(params, lr=1e-3)  # noqa: E731
    return LocoProp(model, output_transfer="sigmoid", fallback=fallback, **given)


def steps(
    opt: LocoProp, model: nn.Module, count: int = 4, parts: int = 1, clip: bool = False
) -> list[Tensor]:
    for _ in range(count):
        opt.zero_grad()
        for x, y in zip(X.chunk(parts), Y.chunk(parts), strict=True):
            (cross_entropy(model(x), y) / parts).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        opt.step()
    return weights(model)


def made(name: str) -> nn.Sequential:
    model = MODELS[name]()
    model(X)  # lazy ones get their shapes
    return model


def held(opt: LocoProp, size: Callable[[Tensor], int] = Tensor.numel) -> list[int]:
    """Return the number of entries that each layer keeps of its rows."""
    found = []
    for layer in opt._layers:
        kept = [t for call in layer.calls for t in (call.x, call.g, call.v) if t is not None]
        grams = [call.gram for call in layer.calls if call.gram is not None]
        kept += [t for gram in grams for t in (gram.square, gram.total)]
        found.append(sum(map(size, kept)))
    return found


def keep_rows(opt: LocoProp) -> None:
    """Make all layers keep their rows in the next step."""
    for layer in opt._layers:
        layer.use_of_rows = None


def condensed(opt: LocoProp) -> list[bool]:
    return [all(call.gram is not None for call in layer.calls) for layer in opt._layers]


@pytest.fixture
def by_rows(monkeypatch: pytest.MonkeyPatch) -> Train:
    """Return a function that trains with layers that keep all rows."""

    def train(name: str = "linear", how: dict[str, Any] | None = None, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(Plan, "use_of_rows", lambda *_: None)
            model = made(name)
            opt = loco(model, **options)
            found = steps(opt, model, **(how or {}))
            assert not any(layer.has_gram for layer in opt._layers)
            return found

    return train


def both(by_rows: Train, name: str = "linear", how: Any = None, **options: Any) -> None:
    """Check that the steps equal those of layers that keep all rows."""
    model = made(name)
    assert_close(
        steps(loco(model, **options), model, **(how or {})), by_rows(name, how, **options), 1e-11
    )


# ---- several iterations ------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["sgd", "rmsprop", "adam"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m", "natural-s"])
def test_the_steps_are_the_same(
    by_rows: Train, name: str, variant: str, solver: str, reduction: str, parts: int
) -> None:
    own = {"solver": solver, "local_reduction": reduction, "variant": variant}
    both(by_rows, name, {"parts": parts}, **own)


@pytest.mark.parametrize("guard", [{"gate": True}, {"cap": 0.01}, {"diagnose": True}])
@pytest.mark.parametrize("local_steps", [1, 5])
@pytest.mark.parametrize("solver", ["sgd", *CLOSED_FORMS])
def test_guards_and_diagnostics_need_no_rows(
    by_rows: Train, guard: dict[str, Any], local_steps: int, solver: str
) -> None:
    own = {"solver": CLOSED_FORMS.get(solver, solver), "local_steps": local_steps}
    both(by_rows, **own, **guard)
    model = network()
    opt = loco(model, **own, **guard)
    cross_entropy(model(X), Y).backward()
    assert condensed(opt)[0]


@pytest.mark.parametrize("solver", ["sgd", Exact(), Exact(decay=0.9)])
def test_the_local_loss_is_the_same_by_rows(monkeypatch: Any, solver: Any) -> None:
    found = []
    for patched in (False, True):
        with monkeypatch.context() as patch:
            if patched:
                patch.setattr(Plan, "use_of_rows", lambda *_: None)
            model = network()
            opt = loco(model, solver=solver, diagnose=True)
            steps(opt, model, count=1)
            found.append([row.local_loss for row in opt.diagnostics()])
    assert found[0] == pytest.approx(found[1], rel=1e-10)


def test_only_the_summary_is_held_between_backward_and_step() -> None:
    model = network()
    opt = loco(model)
    cross_entropy(model(X), Y).backward()
    assert condensed(opt) == [True, True, True]
    for layer in opt._layers:
        (call,) = layer.calls
        n = layer.tensors["weight"].shape[1]
        assert call.x.numel() == 0
        assert call.gram is not None
        assert call.gram.square.shape == (n, n)
        assert isinstance(layer.inputs(), Gram)


@pytest.mark.parametrize(
    "options",
    [
        {"variant": "locoprop-m"},
        {"variant": "locoprop-m", "solver": Exact(decay=0.9)},
        {"variant": "pocoprop-s"},
        {"variant": "locoprop-m", "max_rows": 30},
        {"variant": "locoprop-m", "local_steps": 1, "gate": True},
        {"variant": "natural-s", "regularizer": "fisher"},
    ],
)
def test_inputs_are_kept_where_they_are_needed(options: dict[str, Any]) -> None:
    model = network()
    opt = loco(model, **options)
    for _ in range(2):
        opt.zero_grad()
        cross_entropy(model(X), Y).backward()
        assert not any(condensed(opt))
        opt.step()


def test_few_rows_are_smaller_than_their_products() -> None:
    model = network()
    opt = loco(model)
    cross_entropy(model(X[:5]), Y[:5]).backward()
    assert not any(condensed(opt))
    opt.step()


@pytest.mark.parametrize("solver", ["sgd", *CLOSED_FORMS])
@pytest.mark.parametrize("name", MODELS)
def test_a_mixture_is_one_problem(name: str, solver: str) -> None:
    """One call has many rows and keeps XᵀX; another has few and keeps them."""
    results = []
    for patched in (False, True):
        model = made(name)
        opt = loco(model, solver=CLOSED_FORMS.get(solver, solver))
        if patched:
            keep_rows(opt)
        for rows in (slice(0, 38), slice(38, 40)):
            cross_entropy(model(X[rows]), Y[rows]).backward()
        assert [call.gram is not None for call in opt._layers[0].calls] == [not patched, False]
        opt.step()
        results.append(weights(model))
    assert_close(results[0], results[1], 1e-11)


# ---- closed forms ------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", CLOSED_FORMS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m"])
def test_closed_forms_are_the_same(
    by_rows: Train, name: str, variant: str, solver: str, reduction: str, parts: int
) -> None:
    own = {"solver": CLOSED_FORMS[solver], "local_reduction": reduction, "variant": variant}
    both(by_rows, name, {"parts": parts, "count": 7}, lr=0.1, gamma=1.0, **own)


def test_what_closed_forms_keep() -> None:
    """A closed form keeps XᵀX, and nothing in steps that renew neither average nor inverse."""
    small = [n * n + n for n in (6, 5, 4)]
    for name, kept in {"plain": [small] * 4, "all": [small] * 4, "now and then": None}.items():
        model = network()
        opt, found = loco(model, solver=CLOSED_FORMS[name]), []
        for _ in range(4):
            opt.zero_grad()
            cross_entropy(model(X), Y).backward()
            found.append(held(opt))
            opt.step()
        assert found == (kept or [small, [0, 0, 0], [0, 0, 0], small])


def test_a_closed_form_in_single_precision_has_products_in_double() -> None:
    """For large inputs XᵀX in float32 would be too inaccurate for the closed form."""
    results = []
    for patched in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        x, y = 30 + 0.01 * torch.randn(400, 6), torch.rand(400, 3)
        opt = loco(model, solver=Exact(), lr=1e3, gamma=1.0)
        if patched:
            keep_rows(opt)
        cross_entropy(model(x), y).backward()
        assert condensed(opt) == [not patched]
        opt.step()
        results.append(weights(model))
    assert_close(results[0], results[1], 1e-5)


def test_the_rows_of_a_mixture_have_products_in_double_too() -> None:
    model, x = nn.Linear(6, 3), 30 + 0.01 * torch.randn(400, 6)
    opt = loco(model, solver=Exact())
    for rows in (slice(0, 398), slice(398, 400)):
        model(x[rows]).sum().backward()
    [layer] = opt._layers
    assert [call.gram is not None for call in layer.calls] == [True, False]
    exact = x.double()
    assert_close([layer.inputs().square], [exact.mT @ exact], 1e-13)


@pytest.mark.parametrize("solver", CLOSED_FORMS)
@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m"])
def test_a_bias_that_is_frozen_and_thawed(solver: str, variant: str) -> None:
    results = []
    for patched in (False, True):
        model = normed()
        opt = loco(model, solver=CLOSED_FORMS[solver], lr=0.1, gamma=1.0, variant=variant)
        for trained in (True, True, False, False, True, True, True):
            model[0].bias.requires_grad_(trained)
            if patched:
                keep_rows(opt)
            steps(opt, model, count=1)
        results.append(weights(model))
    assert_close(results[0], results[1], 1e-11)


# ---- some of the rows --------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["sgd", "rmsprop", *CLOSED_FORMS])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_of_drawn_rows_the_steps_are_the_same(
    by_rows: Train, name: str, solver: str, reduction: str, parts: int
) -> None:
    own = {"solver": CLOSED_FORMS.get(solver, solver), "local_reduction": reduction, "lr": 0.01}
    some = {"max_rows": 32 if name == "convolutions" else 9, "gate": True, **own}
    both(by_rows, name, {"parts": parts}, **some)
    model = made(name)
    opt = loco(model, **some)
    cross_entropy(model(X), Y).backward()
    calls = [call for layer in opt._layers for call in layer.calls]
    assert any(call.kept is not None and call.gram is not None for call in calls)


def test_iterations_on_drawn_rows_by_hand() -> None:
    """The first gradient uses all rows; its changes use the drawn rows, each counted four times."""
    torch.manual_seed(0)
    model, lr, gamma = nn.Linear(6, 3).double(), 1e-2, 10.0
    opt = loco(model, solver="sgd", lr=lr, local_steps=3, local_decay="constant", max_rows=10)
    cross_entropy(model(X), Y).backward()
    (call,) = opt._layers[0].calls
    assert call.gram is not None
    assert call.kept is not None
    assert call.gram.rows == len(X)
    drawn = torch.cat([X, torch.ones_like(X[:, :1])], 1)[call.kept]
    gradients = [p.grad for p in (model.weight, model.bias)]
    first = gamma * torch.cat([gradients[0], gradients[1][:, None]], 1)  # type: ignore[index, list-item]
    start = torch.cat([model.weight, model.bias[:, None]], 1).detach()
    moved = torch.zeros_like(first)
    for _ in range(3):
        moved = moved - lr * (first + 4 * moved @ drawn.T @ drawn)
    opt.step()
    found = torch.cat([model.weight, model.bias[:, None]], 1).detach()
    torch.testing.assert_close(found, start + moved, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("solver", ["sgd", *CLOSED_FORMS])
@pytest.mark.parametrize("name", MODELS)
def test_calls_of_several_sizes_are_one_problem(name: str, solver: str) -> None:
    """Calls that keep XᵀX of some rows, some rows, and all rows make one problem."""
    results = []
    for patched in (False, True):
        model = made(name)
        opt = loco(
            model,
            solver=CLOSED_FORMS.get(solver, solver),
            max_rows=96 if name == "convolutions" else 9,
        )
        uses = [layer.use_of_rows for layer in opt._layers]
        for i, rows in enumerate((slice(0, 21), slice(21, 38), slice(38, 40))):
            for layer, use in zip(opt._layers, uses, strict=True):
                layer.use_of_rows = None if patched or i == 1 else use
            cross_entropy(model(X[rows]), Y[rows]).backward()
        calls = opt._layers[0].calls
        assert [call.kept is not None for call in calls] == [True, True, False]
        assert [call.gram is not None for call in calls] == [not patched, False, False]
        opt.step()
        results.append(weights(model))
    assert_close(results[0], results[1], 1e-11)


@pytest.mark.parametrize("max_rows", [1, 25, 40, 100, 200, 2000])
@pytest.mark.parametrize("options", [{}, {"local_steps": 2}, {"solver": Exact()}])
def test_of_some_rows_never_more_is_held_than_of_all(
    max_rows: int, options: dict[str, Any]
) -> None:
    """With max_rows= a layer never keeps more memory than without.

    With two iterations, 200 rows of the last layer are cheaper than XᵀX, but all 1000 are not.
    """
    found = []
    for most in (None, max_rows):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 100), nn.Tanh(), nn.Linear(100, 60)
        )
        opt = loco(model, max_rows=most, **options)
        model(torch.randn(1000, 20)).square().mean().backward()
        found.append(held(opt, lambda t: t.nbytes))
    all_rows, some_rows = found
    assert all(some <= whole for some, whole in zip(some_rows, all_rows, strict=True))
    if max_rows >= 1000:
        assert some_rows == all_rows


# ---- one iteration -----------------------------------------------------------------------------


ONCE: dict[str, dict[str, Any]] = {
    "plain": {},
    "l1": {"regularizer": "l1"},
    "l2": {"regularizer": "l2"},
    "mean": {"local_reduction": "mean"},
    "rows": {"max_rows": 7},
    "cap": {"cap": 0.001},
    "outer": {"apply": "gradient", "outer": lambda ps: torch.optim.AdamW(ps, lr=1e-2)},
    "decay": {"weight_decay": 0.1},
}


@pytest.mark.parametrize("options", ONCE)
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_iteration_keeps_nothing(by_rows: Train, options: str, variant: str) -> None:
    own = {"variant": variant, "local_steps": 1, **ONCE[options]}
    both(by_rows, how={"parts": 2, "clip": True}, **own)
    model = network()
    opt = loco(model, **own)
    for _ in range(2):
        opt.zero_grad()
        cross_entropy(model(X), Y).backward()
        assert held(opt) == [0, 0, 0]
        opt.step()


@pytest.mark.parametrize("solver", [*FIRST_ORDER, *CLOSED_FORMS])
@pytest.mark.parametrize("variant", ["locoprop-s", "locoprop-m"])
def test_steps_without_local_problems_keep_nothing(
    by_rows: Train, solver: str, variant: str
) -> None:
    own = {"variant": variant, "solver": CLOSED_FORMS.get(solver, solver), "every": 3}
    both(by_rows, **own)
    model = network()
    opt = loco(model, **own)
    nothing = []
    for _ in range(4):
        opt.zero_grad()
        cross_entropy(model(X), Y).backward()
        nothing.append(held(opt) == [0, 0, 0])
        opt.step()
    renewed_later = (solver, variant) == ("now and then", "locoprop-s")
    assert nothing == [False, True, True, renewed_later]


@pytest.mark.parametrize("max_rows", [None, 7])
@pytest.mark.parametrize("name", MODELS)
def test_a_closed_form_that_is_not_renewed_keeps_nothing(
    by_rows: Train, name: str, max_rows: int | None
) -> None:
    own = {"solver": Exact(every=3), "max_rows": max_rows}
    both(by_rows, name, **own)
    model = made(name)
    opt = loco(model, **own)
    nothing = []
    for _ in range(7):
        opt.zero_grad()
        cross_entropy(model(X), Y).backward()
        nothing.append(sum(held(opt)) == 0)
        opt.step()
    assert nothing == [False, True, True, False, True, True, False]


@pytest.mark.parametrize("max_rows", [None, 7])
def test_another_closed_form_begins_with_rows_of_its_own(max_rows: int | None) -> None:
    """The solver is changed before a step in which the old one would have kept nothing."""
    model = network()
    first, second = (Exact(every=3, damping=damping) for damping in (1.0, 2.0))
    groups = [
        {"params": model[0].parameters()},
        {"params": model[2].parameters(), "solver": second},
    ]
    opt = loco(model, solver=first, max_rows=max_rows, param_groups=groups)
    steps(opt, model, count=4)
    opt.param_groups[0]["solver"] = opt.param_groups[1]["solver"]
    steps(opt, model, count=1)
    assert opt.state[model[0].weight].keys() == opt.state[model[2].weight].keys()


@pytest.mark.parametrize(
    "options",
    [
        {"variant": "pocoprop-m", "local_steps": 1},
        {"variant": "locoprop-s"},
        {"variant": "locoprop-s", "solver": Exact(decay=0.9)},
    ],
)
def test_two_passes_through_one_graph(options: dict[str, Any]) -> None:
    results = []
    for patched in (False, True):
        model = network()
        opt = loco(model, **options)
        if patched:
            keep_rows(opt)
        loss = cross_entropy(model(X), Y)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        assert condensed(opt) == [not patched] * 3
        opt.step()
        results.append(weights(model))
    assert_close(results[0], results[1])


# ---- what changes between steps ----------------------------------------------------------------


def test_a_layer_is_condensed_once_its_transfer_is_known_to_be_missing() -> None:
    model = normed()
    opt = loco(model, variant="locoprop-m")
    for expected in ([False] * 3, [True, False, False]):
        opt.zero_grad()
        cross_entropy(model(X), Y).backward()
        assert condensed(opt) == expected
        opt.step()


@pytest.mark.parametrize("max_rows", [None, 9])
@pytest.mark.parametrize("solver", ["rmsprop", *CLOSED_FORMS])
def test_a_resumed_run_rounds_as_the_one_that_went_on(solver: str, max_rows: int | None) -> None:
    """A resumed run knows no transfers before its first step, and keeps all rows until then."""
    own = {"variant": "locoprop-m", "solver": CLOSED_FORMS.get(solver, solver)}
    own |= {"max_rows": max_rows}
    model = normed()
    opt = loco(model, **own)
    steps(opt, model, parts=3)
    resumed = normed()
    resumed.load_state_dict(copy.deepcopy(model.state_dict()))
    other = loco(resumed, **own)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for one, two in zip(steps(opt, model, parts=3), steps(other, resumed, parts=3), strict=True):
        assert torch.equal(one, two)


def test_a_transfer_that_is_found_late() -> None:
    """In the first step the layer's weight is used without its forward."""
    results = []
    for patched in (False, True):
        model = network()
        opt = loco(model, variant="locoprop-m")
        if patched:
            keep_rows(opt)
        hidden = torch.tanh(nn.functional.linear(X, model[0].weight, model[0].bias))
        cross_entropy(model[2:](hidden), Y).backward()
        with pytest.warns(UserWarning, match="forward was not called"):
            opt.step()
        if patched:
            keep_rows(opt)
        results.append(steps(opt, model, count=1))
    assert_close(results[0], results[1])


CHANGES = [
    ({}, {"variant": "locoprop-m"}),
    ({}, {"variant": "pocoprop-s", "local_steps": 1}),
    ({"local_steps": 1}, {"local_steps": 5}),
    ({"local_steps": 5}, {"local_steps": 1}),
    ({"variant": "locoprop-m"}, {"variant": "locoprop-s"}),
    ({}, {"max_rows": 20}),
    ({"every": 2}, {"every": 1}),
    ({}, {"solver": "exact"}),
    ({"solver": "exact"}, {"solver": "sgd"}),
]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_settings_that_change_between_steps(before: Any, after: Any) -> None:
    results = []
    for patched in (False, True):
        model = network()
        opt = loco(model, **{"solver": "sgd", **before})
        for own in ({}, after):
            opt.param_groups[0].update(own)
            if patched:
                keep_rows(opt)
            steps(opt, model, count=1)
        results.append(weights(model))
    assert_close(results[0], results[1], 1e-11)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"variant": "locoprop-m"}),
        ({"local_steps": 1}, {"local_steps": 5}),
        ({"every": 2, "steps": 1}, {"every": 1}),
        ({"local_steps": 1}, {"gate": True}),
    ],
)
@pytest.mark.parametrize("max_rows", [None, 9])
def test_settings_that_change_after_the_backward_pass(
    before: Any, after: Any, max_rows: int | None
) -> None:
    model = network()
    opt = loco(model, max_rows=max_rows)
    opt.param_groups[0].update(before)
    cross_entropy(model(X), Y).backward()
    start = weights(model)
    opt.param_groups[0].update(after)
    with pytest.raises(RuntimeError, match="changed between backward"):
        opt.step()
    assert_close(weights(model), start, 0.0)


def test_an_error_comes_before_any_layer_is_written() -> None:
    """The last layers are solved first; here only the first layer lacks its rows."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 3))
    opt = LocoProp(model.double(), variant="locoprop-s", local_steps=4, output_transfer="softmax")
    start = weights(model)
    model(batch(60, 4)).square().sum().backward()
    assert any(call.gram is not None for call in opt._layers[0].calls)
    opt.param_groups[0]["variant"] = "locoprop-m"
    with pytest.raises(RuntimeError, match="changed between backward"):
        opt.step()
    assert_close(weights(model), start, 0.0)


def test_products_in_single_precision_do_for_no_closed_form() -> None:
    model = nn.Linear(6, 3)
    opt = loco(model)
    cross_entropy(model(X.float()), Y.float()).backward()
    opt.param_groups[0]["solver"] = "exact"
    with pytest.raises(RuntimeError, match="changed between backward"):
        opt.step()


# ---- what else may be asked of rows ------------------------------------------------------------


class Shrink(Target):
    """The target ``a* = 0.9 a``, which needs no gradient."""

    needs = frozenset()

    def __call__(
        self, a: Tensor, transfer: Transfer, g: Tensor | None, v: Tensor | None, gamma: Any
    ) -> Tensor:
        return 0.9 * a


@pytest.mark.parametrize("local_steps", [1, 5])
def test_a_target_that_starts_from_its_rows_keeps_them(by_rows: Train, local_steps: int) -> None:
    shrink = Variant("shrink", Shrink(), Squared())
    both(by_rows, variant=shrink, local_steps=local_steps, solver="sgd")


class Rewritten(Exact):
    """A closed form that reads its rows."""

    def solve(self, problem: Any, *rest: Any) -> Any:
        assert problem.inputs.shape[-2] == len(X)
        return super().solve(problem, *rest)


def test_a_solver_with_a_solution_of_its_own_gets_the_rows() -> None:
    model = network()
    steps(loco(model, solver=Rewritten()), model, count=1)


@pytest.mark.parametrize("solver", ["sgd", Exact(decay=0.9)])
def test_a_backward_pass_inside_autocast_rounds_no_products(solver: Any) -> None:
    model = network().float()
    opt = loco(model, solver=solver)
    x = X.float()
    loss = cross_entropy(model(x), Y.float())
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    gram = opt._layers[0].calls[0].gram
    assert gram is not None
    torch.testing.assert_close(gram.square, x.T @ x)


SPARSE = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]
OPTIMIZERS = {
    "spectral": LocoProp,
    "locoprop-s": loco,
    "one step": partial(loco, local_steps=1),
    "locoprop-m": partial(loco, variant="locoprop-m"),
    "exact": partial(loco, solver="exact"),
    "preconditioned": partial(loco, solver="preconditioned"),
    "averaged": partial(loco, solver="preconditioned-averaged", local_steps=1),
}


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@pytest.mark.parametrize("layout", SPARSE, ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_sparse_inputs_are_the_same_rows(make: Any, layout: torch.layout) -> None:
    results = []
    for form in (lambda t: t.to_sparse(layout=layout), lambda t: t):
        model = network()
        opt = make(model)
        for _ in range(2):
            cross_entropy(model(form(X * (X > 0.5))), Y).backward()
            opt.step()
            opt.zero_grad()
        results.append(weights(model))
    assert_close(results[0], results[1])
