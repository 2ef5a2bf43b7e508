"""The local iterations of the kernels equal the plain ones: on a GPU, or by Triton's interpreter."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_locoprop import LocoProp
from torch_locoprop.fast import dispatch
from torch_locoprop.fast.triton import availability, local_iterations, matrix_products
from torch_locoprop.fast.triton.rmsprop import TensorAndState
from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.paper.local_problem import Before, LocalProblem
from torch_locoprop.paper.losses import Matching, PostSquared, Squared
from torch_locoprop.paper.regularizers import REGULARIZERS
from torch_locoprop.paper.targets import GradientDescent, MirrorDescent
from torch_locoprop.paper.transfers import Transfer, get
from torch_locoprop.solvers.base import Checked, Numbers
from torch_locoprop.solvers.first_order import RmsProp

NUMBERS = Numbers(1e-3, 0.9, 0.99, 1e-5)


def drawn(*shape: int, device: str, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def problem(
    device: str,
    transfer: str | Transfer = "tanh",
    squared: bool = False,
    members: int | None = None,
    rows: int = 40,
    size: tuple[int, int] = (3, 4),
    **fields: Any,
) -> LocalProblem:
    lead = () if members is None else (members,)
    start = {
        "weight": 0.3 * drawn(*lead, *size, device=device, seed=1),
        "bias": drawn(*lead, size[0], device=device, seed=2),
    }
    own = {
        "linear_map": Dense(),
        "x": drawn(*lead, rows, size[1], device=device, seed=3),
        "start": start,
        "fixed": {},
        "backprop": {k: drawn(*t.shape, device=device, seed=4) for k, t in start.items()},
        "target": GradientDescent() if squared else MirrorDescent(),
        "loss": Squared() if squared else Matching(),
        "transfer": get(transfer),
        "gamma": 10.0,
        "eta": 1e-3,
        "regularizer": REGULARIZERS["none"],
    }
    return LocalProblem(**{**own, **fields})


def both_ways(
    of: LocalProblem, monkeypatch: pytest.MonkeyPatch, numbers: Numbers = NUMBERS, steps: int = 3
) -> None:
    """Compare two steps in a row, so that states matter, with and without kernels."""
    each = dict.fromkeys(of.start, numbers)
    found = []
    for switched_off in (True, False):
        monkeypatch.setattr(availability, "SWITCHED_OFF", switched_off)
        assert local_iterations.fits(of, {name: {} for name in of.start}, each) is not switched_off
        states: dict[str, dict[str, Tensor]] = {name: {} for name in of.start}
        now, outcome = of, []
        for _ in range(2):
            before = {name: tensor.clone() for name, tensor in now.start.items()}
            new, states = dispatch.solve(RmsProp(), now, states, each, steps, "linear")
            for name, tensor in before.items():
                assert torch.equal(now.start[name], tensor)
            now = replace(now, start=new)
            outcome += [*new.values(), *(e for state in states.values() for e in state.values())]
        found.append(outcome)
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("transfer", ["tanh", "sigmoid", "relu", "linear"])
@pytest.mark.parametrize("rows", [5, 40])
def test_matching_loss(
    device: str, transfer: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_ways(problem(device, transfer, rows=rows), monkeypatch)


@pytest.mark.parametrize(
    ("transfer", "members", "tensors", "has_bias"),
    [
        ("tanh", None, False, True),
        ("tanh", 2, True, False),
        ("sigmoid", None, True, True),
        ("relu", 2, True, True),
        ("linear", None, False, False),
    ],
)
def test_preactivations_known_from_the_forward_pass(
    device: str,
    transfer: str,
    members: int | None,
    tensors: bool,
    has_bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The steps equal those that compute the pre-activations after weight decay by a product."""
    monkeypatch.setattr(matrix_products, "TRANSPOSE_TILE", 8)  # so that there are several parts
    plain = problem(device, transfer, members=members, rows=12, size=(10, 5))
    if not has_bias:
        start = {"weight": plain.start["weight"]}
        plain = replace(plain, start=start, backprop={"weight": plain.backprop["weight"]})
    lr, decay = (torch.tensor([own] * (members or 1), device=device) for own in (0.1, 2.0))
    numbers = (lr, decay) if tensors else (0.1, 2.0)
    weight = plain.start["weight"] / 0.8
    a = plain.x @ weight.mT
    a = a + plain.start["bias"].unsqueeze(-2) if has_bias else a
    known = replace(plain, before=Before(a, *numbers))
    torch.testing.assert_close(known.a0, plain.a0)
    each = dict.fromkeys(plain.start, NUMBERS)
    found = []
    for of in (plain, known):
        states: dict[str, dict[str, Tensor]] = {name: {} for name in of.start}
        assert local_iterations.fits(of, states, each)
        found.append(dispatch.solve(RmsProp(), of, states, each, 3, "linear")[0])
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-5, atol=1e-6)
    other = replace(known, before=Before(a + 1, *numbers))
    moved = dispatch.solve(RmsProp(), other, {name: {} for name in of.start}, each, 3, "linear")[0]
    changed = (moved["weight"] - found[0]["weight"]).abs().max() > 1e-5
    assert bool(changed) is (transfer != "linear")  # it is what is read


def skip_without_bfloat16(device: str) -> None:
    if device == "cuda" and not availability.has_bf16():
        pytest.skip("this GPU has no products in bfloat16")


def plainly_and_in_bfloat16(
    exact: LocalProblem, steps: int, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Tensor]]:
    """Return the solutions without kernels, and with kernels that round to bfloat16."""
    skip_without_bfloat16(exact.x.device.type)
    each = dict.fromkeys(exact.start, replace(NUMBERS, lr=1e-2))
    found = []
    for switched_off, products_of in ((True, "full"), (False, "bf16")):
        monkeypatch.setattr(availability, "SWITCHED_OFF", switched_off)
        states: dict[str, dict[str, Tensor]] = {name: {} for name in exact.start}
        of = replace(exact, products=products_of)
        found.append(dispatch.solve(RmsProp(), of, states, each, steps, "linear")[0])
    return found


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("members", [None, 2])
def test_products_in_bfloat16(
    device: str, squared: bool, members: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Displacements are rounded by 2⁻⁹, and so is the displacement of the solution."""
    exact = problem(device, squared=squared, members=members, size=(20, 24))
    theirs, ours = plainly_and_in_bfloat16(exact, 5, monkeypatch)
    for name, start in exact.start.items():
        moved = (theirs[name] - start).norm()
        error = (ours[name] - theirs[name]).norm() / moved
        assert 1e-6 < error < 0.01


@pytest.mark.parametrize("members", [None, 2])
def test_the_bias_has_all_digits_where_products_have_few(
    device: str, members: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With XᵀX the bias gradient is a small difference of ``W Xᵀ1`` and the bias's own term."""
    exact = problem(device, squared=True, members=members, size=(20, 24))
    theirs, ours = plainly_and_in_bfloat16(exact, 2, monkeypatch)
    errors = {name: float((ours[name] - theirs[name]).norm()) for name in exact.start}
    assert errors["bias"] < 1e-6 < 1e-5 < errors["weight"]


@pytest.mark.parametrize("members", [None, 2])
def test_the_mean_of_the_rows_takes_no_digits_from_the_weights(
    device: str, members: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of XᵀX comes from the mean of the rows, which is not rounded."""
    found = problem(device, squared=True, members=members, size=(20, 24))
    far = replace(found, x=found.x + 30)
    errors = []
    for of in (found, far):
        theirs, ours = plainly_and_in_bfloat16(of, 2, monkeypatch)
        errors.append(float((ours["weight"] - theirs["weight"]).norm()))
    assert errors[1] < 2 * errors[0]


@pytest.mark.parametrize("members", [None, 2])
def test_a_step_leaves_the_new_sums_with_all_digits(device: str, members: int | None) -> None:
    skip_without_bfloat16(device)
    of = problem(device, squared=True, members=members, size=(20, 24), products="bf16")
    gram = of.through_gram(3)
    assert gram is not None
    states = {name: torch.ones_like(tensor) for name, tensor in of.start.items()}
    at = {
        name: TensorAndState(t.clone(), states[name], states[name].clone())
        for name, t in of.start.items()
    }
    sums = local_iterations._partial_sums(
        at["weight"].tensor, gram.total, matrix_products.STEP["bf16"].width
    )
    terms = local_iterations._GramTerms(
        gram.total.contiguous(), 40.0, sums, torch.full_like(sums, float("nan"))
    )
    left, right = (
        t.to(local_iterations.ROUNDED) for t in (at["weight"].tensor, gram.square.contiguous())
    )
    new = local_iterations._take_step(
        of,
        left,
        right,
        at,
        torch.empty_like(left),
        NUMBERS,
        local_iterations.Step(1.0, None),
        terms,
    )
    moved = new["weight"].tensor
    assert not torch.equal(moved, of.start["weight"])
    expected = (moved.double() @ gram.total.double().unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(
        terms.new_partial_sums.sum(-2).double(), expected, rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("rows", [5, 40], ids=["by rows", "by the Gram matrix"])
def test_squared_loss(device: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    both_ways(problem(device, squared=True, rows=rows), monkeypatch)


def test_means_over_rows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both_ways(problem(device, row_weight=1 / 40), monkeypatch)


@pytest.mark.parametrize("squared", [True, False])
def test_a_frozen_bias(device: str, squared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = problem(device, squared=squared)
    only, backprop = ({"weight": of["weight"]} for of in (whole.start, whole.backprop))
    fixed = {"bias": whole.start["bias"]}
    both_ways(replace(whole, start=only, backprop=backprop, fixed=fixed), monkeypatch)


@pytest.mark.parametrize("squared", [True, False])
def test_a_problem_of_displacements(
    device: str, squared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = problem(device, squared=squared)
    zero = {name: torch.zeros_like(tensor) for name, tensor in plain.start.items()}
    both_ways(replace(plain, start=zero, base=plain.start), monkeypatch)


def test_one_iteration(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both_ways(problem(device), monkeypatch, steps=1)


@pytest.mark.parametrize("own", [True, False], ids=["numbers of its own", "the same numbers"])
@pytest.mark.parametrize("squared", [True, False])
def test_a_population(
    device: str, own: bool, squared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = torch.tensor([1e-3, 2e-3], device=device) if own else 1e-3
    of = problem(device, members=2, squared=squared)
    both_ways(of, monkeypatch, replace(NUMBERS, lr=rates))


def test_a_population_with_the_same_rows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = problem(device, members=2)
    both_ways(replace(of, x=of.x[:1].expand(2, -1, -1)), monkeypatch)


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize(
    ("size", "members"), [((17, 18, 35), None), ((20, 33, 17), 2), ((32, 16, 32), None)]
)
def test_products_in_parts(
    device: str,
    squared: bool,
    members: int | None,
    size: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Products of several tiles, with sizes that the tile sizes divide or do not divide."""
    parts = (16, 16, 16, 4, 3) if device == "cpu" else (64, 32, 32, 4, 3)
    small = matrix_products.TileSizes(*parts)
    monkeypatch.setattr(matrix_products, "RESIDUAL", dict.fromkeys(matrix_products.RESIDUAL, small))
    monkeypatch.setattr(matrix_products, "STEP", dict.fromkeys(matrix_products.STEP, small))
    of = problem(device, members=members, squared=squared, size=size[:2], rows=size[2])
    both_ways(of, monkeypatch)


@pytest.mark.parametrize(
    "change",
    [
        {"regularizer": REGULARIZERS["l2"]},
        {"regularizer": REGULARIZERS["l1"]},
        {"loss": PostSquared()},
        {"transfer": get("softplus")},
        {"row_weight": torch.ones(40, 1)},
        {"g": torch.ones(40, 3)},
        {"x": torch.zeros(40, 4, dtype=torch.float64)},
    ],
    ids=["l2", "l1", "loss", "transfer", "rows count more than once", "g", "dtype"],
)
def test_what_they_do_not_do_is_left_to_the_plain_way(device: str, change: dict[str, Any]) -> None:
    each = {"weight": NUMBERS, "bias": NUMBERS}
    states: dict[str, dict[str, Tensor]] = {"weight": {}, "bias": {}}
    assert local_iterations.fits(problem(device), states, each)
    assert not local_iterations.fits(replace(problem(device), **change), states, each)


def test_other_numbers_for_the_bias(device: str) -> None:
    """One kernel updates weight and bias with the same numbers."""
    each = {"weight": NUMBERS, "bias": replace(NUMBERS, decay=0.9)}
    states: dict[str, dict[str, Tensor]] = {"weight": {}, "bias": {}}
    assert not local_iterations.fits(problem(device), states, each)
    assert not local_iterations.fits(problem(device, squared=True), states, each)


def test_states_that_another_solver_left(device: str) -> None:
    each = {"weight": NUMBERS, "bias": NUMBERS}
    left = {"step": torch.zeros(()), "square": torch.ones(3, 4), "momentum": torch.ones(3, 4)}
    assert not local_iterations.fits(problem(device), {"weight": left, "bias": {}}, each)


def test_what_is_not_finite_stays_so(device: str) -> None:
    """A ReLU that turned NaN into zero would hide it from the optimizer."""
    broken = problem(device, "relu")
    broken.x[0, 0] = torch.nan
    states: dict[str, dict[str, Tensor]] = {"weight": {}, "bias": {}}
    new, _ = dispatch.solve(
        RmsProp(), broken, states, {"weight": NUMBERS, "bias": NUMBERS}, 2, "linear"
    )
    assert not new["weight"].isfinite().all()
    assert not new["bias"].isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's NumPy
@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("broken", ["weight", "bias", "square", "momentum"])
def test_the_last_iteration_looks_whether_all_is_finite(
    device: str, squared: bool, broken: str
) -> None:
    """Each member is checked alone, and the padding of tiles is not checked."""
    of = problem(device, members=3, squared=squared, rows=40 if squared else 5)
    numbers = dict.fromkeys(of.start, NUMBERS)
    states = {k: RmsProp().init(t, NUMBERS) for k, t in of.start.items()}
    new, _ = dispatch.solve(RmsProp(), of, states, numbers, 3, "linear")
    assert isinstance(new, Checked)
    assert new.finite.tolist() == [True, True, True]
    place = of.backprop if broken in of.backprop else states["weight"]
    place[broken][1].view(-1)[-1] = torch.inf
    new, after = dispatch.solve(RmsProp(), of, states, numbers, 3, "linear")
    assert isinstance(new, Checked)
    assert new.finite.tolist() == [True, False, True]
    left = [*new.values(), *(entry for state in after.values() for entry in state.values())]
    finite = torch.stack([t.isfinite().flatten(1).all(1) for t in left]).all(0)
    assert finite.tolist() == [True, False, True]


def test_one_output_whose_weight_is_a_part_of_a_wider_matrix(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix of one row is contiguous for any stride."""
    own = problem(device, size=(1, 16))
    wide = drawn(3, 17, device=device, seed=7)
    start = {**own.start, "weight": wide[:1, :16]}
    both_ways(replace(own, start=start), monkeypatch)


@pytest.mark.parametrize(("d", "n", "rows"), [(4, 4, 2**29), (10, 2**22, 40), (2**22, 10, 40)])
def test_what_is_too_large_to_be_counted_is_left_to_others(d: int, n: int, rows: int) -> None:
    assert not matrix_products.is_countable(1, d, n, rows)
    assert matrix_products.is_countable(1, min(d, 4000), min(n, 4000), 1000)


def test_a_step_that_is_not_finite_is_skipped(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer uses the flags of the last iteration."""
    solutions: list[object] = []
    solve = local_iterations.solve
    monkeypatch.setattr(
        local_iterations, "solve", lambda *of: solutions.append(solve(*of)) or solutions[-1]
    )
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(device)
    optimizer = LocoProp(model, lr=1e-3, gamma=10.0, local_steps=3, cuda_graph=False)
    x = drawn(20, 4, device=device)
    for scale in (1.0, torch.inf):
        before = {name: p.clone() for name, p in model.named_parameters()}
        model(x).square().sum().backward()
        for p in model[0].parameters():
            p.grad *= scale
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the step that is not finite
            optimizer.step()
        optimizer.zero_grad()
        moved = {name: not torch.equal(p, before[name]) for name, p in model.named_parameters()}
        assert moved == {name: scale == 1 or name[0] == "2" for name in before}
    assert len(solutions) == 4
    assert optimizer.skipped_updates == {"0": 1, "2": 0}
