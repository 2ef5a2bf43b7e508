"""Gradients of weight and bias as one matrix equal the plain ones, and are as accurate in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.fast import cpu_onednn, dispatch
from torch_locoprop.paper.gram import Gram
from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.losses import Matching, PostSquared, Squared
from torch_locoprop.paper.regularizers import REGULARIZERS
from torch_locoprop.paper.targets import GradientDescent, MirrorDescent
from torch_locoprop.paper.transfers import get
from torch_locoprop.solvers import SOLVERS, FirstOrder, Numbers

NUMBERS = Numbers(1e-3, 0.9, 0.99, 1e-5)
FIRST_ORDER = [name for name, solver in SOLVERS.items() if isinstance(solver, FirstOrder)]

each_kind = pytest.mark.parametrize("kind", ["tanh", "sigmoid", "relu", "linear", "squared"])


@pytest.fixture(params=["oneDNN", "torch.mm"])
def _whose_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch.mm":
        monkeypatch.setattr(cpu_onednn, "onednn_supports", lambda _: False)


with_and_without_onednn = pytest.mark.usefixtures("_whose_products")


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_onednn, "LARGE", 0)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def problem(
    kind: str = "tanh", rows: int = 40, d: int = 5, n: int = 4, bias: bool = True, **fields: Any
) -> LocalProblem:
    start = {"weight": 0.3 * drawn(d, n, seed=1)} | ({"bias": drawn(d, seed=2)} if bias else {})
    squared = kind == "squared"
    own = {
        "linear_map": Dense(),
        "x": drawn(rows, n, seed=3),
        "start": start,
        "fixed": {},
        "backprop": {name: drawn(*t.shape, seed=4) for name, t in start.items()},
        "target": GradientDescent() if squared else MirrorDescent(),
        "loss": Squared() if squared else Matching(),
        "transfer": get("tanh" if squared else kind),
        "gamma": 10.0,
        "eta": 1e-3,
        "regularizer": REGULARIZERS["none"],
    }
    return LocalProblem(**{**own, **fields})


def in_dtype(of: LocalProblem, dtype: torch.dtype) -> LocalProblem:
    start, backprop = ({k: t.to(dtype) for k, t in d.items()} for d in (of.start, of.backprop))
    return replace(of, x=of.x.to(dtype), start=start, backprop=backprop)


def solved(of: LocalProblem, solver: str = "rmsprop", numbers: Numbers = NUMBERS) -> list[Tensor]:
    """Return tensors and states after two steps in a row, which must not change their inputs."""
    states: dict[str, dict[str, Tensor]] = {name: {} for name in of.start}
    outcome = []
    for _ in range(2):
        given = [*of.start.values(), *(e for state in states.values() for e in state.values())]
        before = [t.clone() for t in given]
        new, states = dispatch.solve(
            SOLVERS[solver], of, states, dict.fromkeys(of.start, numbers), 4, "linear"
        )
        assert all(map(torch.equal, given, before))
        entries = [entry for state in states.values() for entry in state.values()]
        assert all(entry.is_contiguous() for entry in entries)
        of = replace(of, start={name: t.clone() for name, t in new.items()})
        outcome += [*of.start.values(), *entries]
    return outcome


def both_ways(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[], list[Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    plain: list[Tensor] = []
    with monkeypatch.context() as patched:
        patched.setattr(cpu_onednn, "SWITCHED_OFF", True)
        plain += work()
    return plain, work()


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@each_kind
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("row_weight", [1.0, 0.1])
def test_equals_the_plain_version(
    kind: str, rows: int, bias: bool, row_weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = problem(kind, rows, bias=bias, row_weight=row_weight)
    assert cpu_onednn.fits(of)
    assert_equal(*both_ways(monkeypatch, lambda: solved(of)))


@pytest.mark.parametrize("solver", FIRST_ORDER)
@pytest.mark.parametrize("kind", ["tanh", "squared"])
def test_serves_every_first_order_solver(
    solver: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = problem(kind)
    assert_equal(*both_ways(monkeypatch, lambda: solved(of, solver)))


def test_takes_xtx_for_x(monkeypatch: pytest.MonkeyPatch) -> None:
    of = problem("squared")
    of = replace(of, x=Gram.of(of.x))
    assert cpu_onednn.fits(of)
    assert_equal(*both_ways(monkeypatch, lambda: solved(of)))


@each_kind
@with_and_without_onednn
def test_is_as_exact_in_float32_as_the_plain_version(kind: str) -> None:
    """The error of the gradient's change against float64 is that of matrix products.

    Small inputs, for which tanh is nearly linear, are tested too.
    """
    for scale in (1.0, 1e-3):
        of = problem(kind, rows=200, d=30, n=100)
        nothing = {name: 0 * g for name, g in of.backprop.items()}
        rough = in_dtype(replace(of, x=scale * of.x, backprop=nothing), torch.float32)
        exact, gram = in_dtype(rough, torch.float64), rough.through_gram(4)
        joint = cpu_onednn.Joined(rough, gram)
        for tensor in joint.at.values():
            tensor += 1e-2 * drawn(*tensor.shape, seed=5, dtype=torch.float32)
        moved = {
            k: t.double() - (exact.start[k] if gram is None else 0) for k, t in joint.at.items()
        }
        true = exact.gradient({name: exact.start[name] + t for name, t in moved.items()})
        at = {name: rough.start[name] + t.float() for name, t in moved.items()}
        plain, ours = (
            max(float((found[k] - t).norm() / t.norm()) for k, t in true.items())
            for found in (rough.gradient(at, gram), joint.gradient())
        )
        assert ours <= 2 * plain + 1e-7


@with_and_without_onednn
def test_what_is_not_a_number_stays_so() -> None:
    rows = torch.tensor([[1.0, torch.nan], [1.0, 1.0]])
    for kind, (_, name) in cpu_onednn.TRANSFERS.items():
        y = cpu_onednn.product(rows, torch.ones(3, 2), kind)
        assert y[0].isnan().all(), name
        assert y[1].isfinite().all(), name


PLAIN = {
    "a frozen bias": lambda of: replace(
        of, start={"weight": of.start["weight"]}, fixed={"bias": of.start["bias"]}
    ),
    "a bias alone": lambda of: replace(
        of, start={"bias": of.start["bias"]}, fixed={"weight": of.start["weight"]}
    ),
    "an outer optimizer": lambda of: replace(of, base=of.start),
    "weights of rows": lambda of: replace(of, row_weight=torch.ones(len(of.x), 1)),
    "a regularizer": lambda of: replace(of, regularizer=REGULARIZERS["l2"]),
    "a proximal step": lambda of: replace(of, regularizer=REGULARIZERS["l1"]),
    "another loss": lambda of: replace(of, loss=PostSquared()),
    "another transfer": lambda of: replace(of, transfer=get("softmax")),
    "half precision": lambda of: in_dtype(of, torch.bfloat16),
    "gradients of rows": lambda of: replace(of, g=torch.ones(len(of.x), 5)),
    "a population": lambda of: replace(of, start={k: t[None] for k, t in of.start.items()}),
}


@pytest.mark.parametrize("case", PLAIN)
def test_leaves_to_the_plain_version(case: str) -> None:
    assert not cpu_onednn.fits(PLAIN[case](problem()))


def test_leaves_small_problems_to_the_plain_version(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noted(cpu_onednn.Joined):
        def __init__(self, problem: LocalProblem, gram: Gram | None) -> None:
            joined.append(len(problem.x))
            super().__init__(problem, gram)

    joined: list[int] = []
    monkeypatch.setattr(cpu_onednn, "Joined", Noted)
    monkeypatch.setattr(cpu_onednn, "LARGE", 40 * 5 * 4 + 1)
    solved(problem(rows=40))
    assert not joined
    solved(problem(rows=41))
    assert joined == [41, 41]


@pytest.mark.parametrize("variant", ["locoprop-m", "locoprop-s"])
def test_an_optimizer_takes_the_same_steps(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        parts = [nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 2)]
        model = nn.Sequential(*parts).double()
        opt = LocoProp(model, 1e-3, variant=variant, weight_decay=0.1, output_transfer="sigmoid")
        for seed in range(3):
            x, y = drawn(20, 6, seed=seed), drawn(20, 2, seed=seed + 9).sigmoid()
            nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        state = [entry for each in opt.state.values() for entry in each.values()]
        return [p.detach() for p in model.parameters()] + state

    assert_equal(*both_ways(monkeypatch, trained))


def test_a_users_own_step_gets_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's solver gets weights, not displacements: it may measure them."""

    class Trusting(FirstOrder):
        name = "trusting"

        def advance_(
            self, tensor: Tensor, gradient: Tensor, state: Any, numbers: Numbers, rate: float
        ) -> None:
            tensor.sub_(1e-3 * rate * tensor.norm() * gradient / gradient.norm())

    monkeypatch.setitem(SOLVERS, "trusting", Trusting())
    of = problem("squared")
    ours = solved(of, "trusting")
    monkeypatch.setattr(cpu_onednn, "SWITCHED_OFF", True)
    assert_equal(ours, solved(of, "trusting"))
