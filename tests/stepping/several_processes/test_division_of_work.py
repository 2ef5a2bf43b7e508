"""Which layers processes divide, and how they exchange rows: the way that sends less."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torch_locoprop.distributed.ddp import Exchange, SharedFacts
from torch_locoprop.distributed.fully_shard import SharedShardFacts
from torch_locoprop.layers.bilinear import BilinearMap
from torch_locoprop.layers.conv import ConvMap, convolution
from torch_locoprop.paper.gram import Gram, RowUse, Structure
from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.paper.regularizers import REGULARIZERS
from torch_locoprop.paper.spectral import polar_operations
from torch_locoprop.paper.transfers import TRANSFERS
from torch_locoprop.paper.variants import VARIANTS
from torch_locoprop.recording import row_reduction
from torch_locoprop.solvers import SOLVERS, Exact, FirstOrder, Spectral
from torch_locoprop.stepping.several_processes import (
    divided_closed_forms,
    divided_outputs,
    divided_polar,
    layer_part,
)
from torch_locoprop.stepping.several_processes.layer_part import Part

NUMBER = 8  # bytes of a float64


class Facts(SharedFacts):
    """Facts of processes that there are not."""

    processes = 3


def facts(processes: int = 3, rows: int = 24, **changed: Any) -> SharedFacts:
    given = Facts(None, rows, True, False, 3, 3, False, True)
    found: Any = replace(given, **changed)
    object.__setattr__(found, "processes", processes) if processes != 3 else None
    return found


def posed(
    d: int = 12, n: int = 8, local_steps: int = 4, bias: bool = True, variant: str = "locoprop-m",
    transfer: str = "tanh", solver: Any = "rmsprop", regularizer: str = "none",
    linear_map: Any = None, x: Any = None, shared: Any = "facts", exchanges: bool = True,
    only_bias: bool = False, structure: Structure | None = None, **of_facts: Any,
) -> Any:  # fmt: skip
    """Return a problem of a layer of ``[d, n]`` whose rows three processes have."""
    known = facts(**of_facts)
    used = SOLVERS[solver] if isinstance(solver, str) else solver
    start = {"weight": torch.zeros(d, n, dtype=torch.float64)}
    start |= {"bias": torch.zeros(d, dtype=torch.float64)} if bias else {}
    if only_bias:
        start = {"bias": start["bias"]}
    own = VARIANTS[variant]
    problem = SimpleNamespace(
        others=Exchange(known, False) if exchanges else None,
        linear_map=Dense() if linear_map is None else linear_map,
        target=own.target,
        loss=own.loss,
        transfer=TRANSFERS[transfer],
        regularizer=REGULARIZERS[regularizer],
        start=start,
        x=x,
        g=None,
        v=torch.zeros(8, d) if "v" in own.target.needs else None,
        outputs=None,
        structure=structure,
        number=0,
    )
    method = SimpleNamespace(
        variant=own, regularizer=problem.regularizer, solver=used, local_steps=local_steps
    )
    like = torch.zeros(d, n, dtype=torch.float64)
    layer = SimpleNamespace(
        shared_facts=known if shared == "facts" else shared, like=like, transfer=TRANSFERS[transfer]
    )
    states: dict[str, Any] = {name: {} for name in start}
    return SimpleNamespace(problem=problem, method=method, layer=layer, states=states)


def images(size: int, module: nn.Module | None = None) -> dict[str, Any]:
    """Return the map of a convolution of 12 outputs and 8 inputs, and images of four channels."""
    made = convolution(nn.Conv1d(4, 12, 2) if module is None else module)  # type: ignore[arg-type]
    x = made.collect([torch.zeros(2, 4, size)], [(2, 12, size - 1)], torch.zeros(1))
    return {"linear_map": made.linear_map, "x": x}


FEW = RowUse(gradients=1)
MANY = 50  # iterations, so that rows are less to send


@pytest.mark.parametrize(
    ("given", "divided"),
    [
        ({}, True),
        ({"exchanges": False}, False),
        ({"shared": None}, False),
        ({"local_steps": 1}, False),
        ({"solver": Exact()}, False),
        ({"solver": Exact(), "local_steps": 1}, False),
        ({"all_have_rows": False}, False),
        ({"active": 2}, False),
        (images(6), True),
        ({**images(6), "local_steps": 2}, False),
        (images(600), False),
        ({**images(6), "equal_rows": False}, False),
        (images(6, nn.ConvTranspose1d(4, 12, 2)), False),  # which has no map of some outputs
        ({"linear_map": object.__new__(BilinearMap), "x": torch.zeros(8, 8)}, False),
        ({"solver": "preconditioned"}, True),
        ({"solver": "preconditioned", "local_steps": 1}, False),
        ({"solver": "preconditioned", "transfer": "softmax"}, False),
        ({"solver": "preconditioned", "equal_rows": False}, False),
        ({"solver": "preconditioned", "variant": "locoprop-s", "n": 200}, True),
        ({"variant": "pocoprop-m"}, True),
        ({"regularizer": "fisher"}, False),
        ({"only_bias": True}, False),
        ({"transfer": "softmax"}, False),
        ({"d": 3}, True),  # an output for each process
        ({"d": 2}, False),
        ({"equal_rows": False}, False),
        ({"some_have_gram": True}, False),
        ({"bias": False}, True),
    ],
    ids=range(28),
)
def test_iterations_with_rows_are_divided_if_all_processes_can(
    given: dict[str, Any], divided: bool
) -> None:
    assert divided_outputs.is_divided(posed(**{"local_steps": MANY, **given})) is divided


@pytest.mark.parametrize(
    ("given", "divided"),
    [
        ({"n": 128}, True),
        ({"n": 127}, False),
        ({"n": 128, "local_steps": 2}, True),
        ({"n": 128, "equal_rows": False}, True),
        ({"n": 127, "rows": 10000, "transfer": "linear", "variant": "locoprop-m"}, False),
        ({"n": 128, "rows": 10000, "transfer": "linear", "variant": "locoprop-m"}, True),
        ({"n": 128, "rows": 3, "some_have_gram": True, "equal_rows": False}, True),
        ({"n": 128, "rows": 3, "equal_rows": False}, False),
        ({"n": 128, "rows": 3, "equal_rows": False, "x": "gram"}, True),
    ],
    ids=range(9),
)
def test_iterations_with_products_of_rows_are_divided_from_a_width_on(
    given: dict[str, Any], divided: bool
) -> None:
    """It is that width from which on sending the solution takes less time than the iterations."""
    if given.get("x") == "gram":
        given = {**given, "x": Gram(torch.ones(1, 1), torch.ones(1), 1)}
    own = {"variant": "locoprop-s", "rows": 10000, "d": 200, **given}
    assert divided_outputs.is_divided(posed(**own)) is divided


def test_products_of_rows_are_used_where_they_are_less_work() -> None:
    """r n² + (T − 1) d n² multiplications, and 2 (T − 1) r d n with rows."""
    seen = set()
    for rows, d, n, steps in product((30, 60, 90), (10, 60), (8, 40, 80), (2, 3, 5)):
        less = rows * n * n + (steps - 1) * d * n * n < 2 * (steps - 1) * rows * d * n
        own = posed(d, n, steps, variant="locoprop-s", rows=rows)
        found = divided_outputs._goes_through_gram(own.problem, own.layer.shared_facts, steps)
        assert found is less, (rows, d, n, steps)
        seen.add(less)
    assert seen == {True, False}


def test_outputs_are_divided_where_that_sends_less_than_all_gradients() -> None:
    """In rings, of P − 1 of P parts: rows and solutions once, gradients twice in each iteration."""
    seen = set()
    for rows, d, n, bias, steps in product(
        (24, 48, 96), (12, 13, 36), (8, 30), (False, True), (2, 3, 4, 5, 8)
    ):
        columns = n + bias
        gathered = rows * n + 3 * math.ceil(d / 3) * columns * 3  # the state has two tensors
        added = (steps - 1) * 2 * d * columns
        own = posed(d, n, steps, bias, rows=rows, solver="rmsprop")
        assert len(own.method.solver.row_state) == 2
        found = divided_outputs._gathers_less(own, own.layer.shared_facts, d, n)
        assert found is (gathered < added), (rows, d, n, bias, steps)
        seen.add((gathered > added) - (gathered < added))
    assert {1, -1} <= seen
    for rows, less in ((9, True), (12, False), (15, False)):  # 12 · 9 + 12 · 9 · 3 = 2 · 2 · 12 · 9
        own = posed(12, 9, 3, False, rows=rows)
        assert divided_outputs._gathers_less(own, own.layer.shared_facts, 12, 9) is less


def test_preconditioned_outputs_are_divided_where_that_sends_less_than_all_sums() -> None:
    """Sums: gradients, and 1 + 3 slopes of each output in an iteration, and the transfer's slopes."""
    seen = set()
    for rows, d, n, bias, steps, transfer in product(
        (24, 48, 96), (12, 13), (8, 30), (False, True), (2, 3, 5), ("tanh", "linear")
    ):
        columns = n + bias
        gathered = rows * n + 3 * math.ceil(d / 3) * columns
        added = 2 * d * ((steps - 1) * columns + 4 * steps + (transfer == "tanh"))
        variant = "locoprop-m" if transfer == "tanh" else "locoprop-s"
        own = posed(
            d, n, steps, bias, variant, transfer=transfer, rows=rows, solver="preconditioned"
        )
        found = divided_outputs._gathers_less(own, own.layer.shared_facts, d, n)
        assert found is (gathered < added), (rows, d, n, bias, steps, transfer)
        seen.add(found)
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("block_size", "d", "divided"),
    [(None, 64, True), (512, 64, True), (256, 64, False), (1024, 64, True), (1, 64, False)],
)
def test_closed_forms_are_divided_where_they_are_much_work_for_their_size(
    block_size: int | None, d: int, divided: bool
) -> None:
    """b³/3 + 2 d b² operations for each block of b columns, and 1,920 for each of d n numbers."""
    structure = None if block_size is None else Structure("block", block_size)
    if block_size == 1:
        structure = Structure("diagonal")
    own = posed(d, 2047, variant="locoprop-s", solver=Exact(), structure=structure)
    assert divided_closed_forms.is_divided(own) is divided
    if block_size not in (None, 1):
        work = 2048 // block_size * (block_size**3 // 3 + 2 * d * block_size**2)
        assert divided_closed_forms._work(own) == work
        assert (work >= 1920 * d * 2048) is divided


@pytest.mark.parametrize(("columns", "divided"), [(480, True), (479, False)])
def test_closed_forms_are_divided_from_1920_operations_for_each_number_on(
    columns: int, divided: bool
) -> None:
    """n³/3 + 2 d n² for d n numbers: n²/3d + 2n, which is 1920 for d = 80 and n = 480."""
    own = posed(80, columns - 1, variant="locoprop-s", solver=Exact())
    assert (columns**2 / 240 + 2 * columns >= 1920) is divided
    assert divided_closed_forms.is_divided(own) is divided


def test_closed_forms_that_cannot_be_divided_are_not() -> None:
    def of_wide_layer(d: int = 64, n: int = 2047, **given: Any) -> Any:
        return posed(d, n, **{"variant": "locoprop-s", "solver": Exact(), **given})

    own = of_wide_layer()
    assert divided_closed_forms.is_divided(own)
    assert divided_closed_forms.round_size(own) == 12  # four for each process
    assert not divided_closed_forms.is_divided(of_wide_layer(solver="rmsprop"))
    assert not divided_closed_forms.is_divided(of_wide_layer(exchanges=False))
    assert not divided_closed_forms.is_divided(of_wide_layer(all_have_rows=False))
    own.problem.start = {"weight": torch.zeros(2, 64, 2048)}  # of two groups
    assert not divided_closed_forms.is_divided(own)
    kept = of_wide_layer(2100, 1499, solver=Exact(decay=0.5, every=2))
    kept.states["weight"] = {"inverse": torch.zeros(()).expand(1500, 1500)}
    for number in range(4):  # every second step uses the factorization of the step before
        kept.problem.number = number
        assert divided_closed_forms.is_divided(kept) is (number % 2 == 0)


def test_outputs_of_groups_are_not_divided() -> None:
    own = posed(n=200, variant="locoprop-s", rows=10000, d=200)
    assert divided_outputs.is_divided(own)
    own.problem.start = {"weight": torch.zeros(2, 100, 200)}
    assert not divided_outputs.is_divided(own)


@pytest.mark.parametrize(
    ("given", "divided"),
    [
        ({"d": 64, "n": 63, "bias": True}, True),  # [W b] is 64 × 64
        ({"d": 63, "n": 200}, False),
        ({"d": 200, "n": 63, "bias": False}, False),
        ({"d": 64, "n": 200}, True),
        ({"d": 64, "n": 64, "exchanges": False}, False),
        ({"d": 64, "n": 64, "solver": "rmsprop"}, False),
    ],
    ids=range(6),
)
def test_polar_factors_of_large_matrices_are_divided(given: dict[str, Any], divided: bool) -> None:
    assert divided_polar.is_divided(posed(**{"solver": Spectral(), **given})) is divided


def test_polar_factors_of_sharded_matrices_are_always_divided() -> None:
    """In rounds of four matrices for each process."""
    own = posed(4, 4, solver=Spectral(), exchanges=False)
    own.problem.outputs = SimpleNamespace(processes=5)
    assert divided_polar.is_divided(own)
    assert divided_polar.round_size(own) == 20
    assert divided_polar.round_size(posed(4, 4, solver=Spectral())) == 12


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_polar_factors_are_assigned_by_the_work_of_whole_matrices(
    is_sharded: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes must assign alike, whichever rows of a sharded matrix they have."""
    monkeypatch.setattr(divided_polar, "computed", lambda factor, given, group, work: work)
    monkeypatch.setattr(divided_polar, "applied", lambda factor, given, shards, work: work)
    shapes = [(12, 8), (5, 9)][-number:]
    layers = [posed(d, n, solver=Spectral(), exchanges=not is_sharded) for d, n in shapes]
    for layer, (d, _) in zip(layers, shapes, strict=True):
        layer.problem.outputs = SimpleNamespace(d=d) if is_sharded else None
    # Two rows of a sharded matrix, or the matrices of two groups of a convolution.
    own = [(2, n) if is_sharded else (2, d, n) for d, n in shapes]
    directions: Any = [SimpleNamespace(matrix=torch.zeros(shape), products=None) for shape in own]
    expected = [polar_operations(d, n) for d, n in shapes]
    assert divided_polar._polar_factors(directions, layers) == expected


# ---- sharded layers ---------------------------------------------------------------------------------


def exchanges(
    d: int, n: int, steps: int, kept: tuple[int, ...], bias: bool = False, gate: bool = False,
    solver: Any = None, linear_map: Any = None, is_whole: bool = False, same: bool = False,
) -> bool:  # fmt: skip
    """Return True if weights are exchanged, of a layer of ``[d, n]`` with some rows in each process."""
    shards: Any = SimpleNamespace(same_inputs=same, processes=len(kept))
    like = torch.zeros(d, n, dtype=torch.float64)
    kind: Any = SimpleNamespace(
        matrix=lambda name, tensor: tensor, linear_map=Dense() if linear_map is None else linear_map
    )
    known = SharedShardFacts(tuple((rows, rows) for rows in kept), True, False, (0,) * len(kept))
    tensors = {"weight": like} | ({"bias": like[:, 0]} if bias else {})
    layer: Any = SimpleNamespace(shared_facts=known, kind=kind, like=like, tensors=tensors)
    method: Any = SimpleNamespace(
        solver=SOLVERS["rmsprop"] if solver is None else solver, local_steps=steps
    )
    part = Part(shards, kind, True, is_whole, frozenset())
    return part.exchanges_weights(layer, method, gate=gate)


def test_weights_are_exchanged_where_that_sends_less_than_all_rows() -> None:
    """Rows: P − 1 times those of a process. Weights: in each iteration but the first there and back."""
    seen = set()
    for d, n, bias, steps, processes in product((6, 7, 20), (4, 9), (False, True), (2, 5), (2, 3)):
        own = math.ceil(d / processes) * (n + bias)
        weights = (processes - 1) * own * (2 * steps - 1)
        for rows in (1, 5, 20, 21, 50, 51, 300):
            less = weights < (processes - 1) * rows * n
            kept = (rows, *[0] * (processes - 1))
            assert exchanges(d, n, steps, kept, bias) is less, (d, n, bias, steps, kept)
            seen.add(less)
    assert seen == {True, False}
    # d = 2 in two processes sends as much as 2 T − 1 rows.
    assert [exchanges(2, 4, 3, (rows, 0)) for rows in (4, 5, 6)] == [False, False, True]


def test_weights_are_exchanged_for_iterations_of_dense_layers_alone() -> None:
    many = (4, 4, 2, (1000, 1000))
    assert exchanges(*many)
    assert not exchanges(*many, gate=True)
    assert not exchanges(*many, solver=Exact())
    assert not exchanges(*many, linear_map=object.__new__(ConvMap))
    assert not exchanges(*many, is_whole=True)
    assert not exchanges(*many, same=True)


@pytest.mark.parametrize(
    ("use", "given", "through_gram"),
    [
        (None, {}, False),
        (None, {"some_have_gram": True}, True),
        (FEW, {}, False),
        (FEW, {"some_have_gram": True}, True),
        (FEW, {"shape": (2, 1, 100)}, False),  # of two groups
        (FEW, {"holds_rows": False}, True),  # as of a convolution
        (RowUse(square=True), {}, True),
        (RowUse(gradients=1, structure=Structure("diagonal")), {}, True),
        # 1000 · 2² + 5 · 100 · 2² multiplications, and 2 · 5 · 1000 · 100 · 2 with rows.
        (RowUse(gradients=5), {"rows": 1000, "shape": (100, 2)}, True),
    ],
    ids=range(9),
)
def test_products_of_the_rows_of_all_processes_are_used_where_rows_are_not(
    use: RowUse | None, given: dict[str, Any], through_gram: bool
) -> None:
    like = torch.zeros(given.get("shape", (1, 100)))
    linear_map = SimpleNamespace(holds_rows=given.get("holds_rows", True))
    kind = SimpleNamespace(matrix=lambda name, tensor: tensor, linear_map=linear_map)
    layer: Any = SimpleNamespace(kind=kind, like=like)
    rows = given.get("rows", 1)
    known = SharedShardFacts(((rows, rows),), True, given.get("some_have_gram", False), (0,))
    assert layer_part._goes_through_gram(layer, known, use) is through_gram


@pytest.mark.parametrize(
    ("use", "dtype"),
    [
        (None, torch.float32),
        (RowUse(square=True), torch.float32),
        (RowUse(square=True, precise=True), torch.float64),
    ],
)
def test_products_of_rows_have_the_digits_that_the_step_needs(
    use: RowUse | None, dtype: torch.dtype
) -> None:
    shards: Any = SimpleNamespace(sum_over_inputs=lambda of_rows: 2 * of_rows)
    known = SharedShardFacts(((3, 3), (3, 3)), True, True, (0, 0))
    layer: Any = SimpleNamespace(like=torch.zeros(1, 2), shared_facts=known, row_count=3)
    part = Part(shards, layer, True, False, frozenset())
    x = Gram(torch.eye(2), torch.ones(2), 3)
    found = part._gram(layer, (), x, use, mean=False)
    assert found.square.dtype == dtype
    assert torch.equal(found.square, 2 * torch.eye(2, dtype=dtype))
    assert found.rows == 6


@pytest.mark.parametrize("structure", [None, Structure("diagonal")])
def test_products_of_rows_have_the_structure_that_the_step_needs(
    structure: Structure | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has kept rows computes their products, as others have kept products."""
    asked: list[RowUse] = []

    def gram_of_calls(layer: Any, calls: Any, use: RowUse) -> Gram:
        asked.append(use)
        return Gram(torch.eye(2), torch.ones(2), 3)

    monkeypatch.setattr(row_reduction, "gram_of_calls", gram_of_calls)
    shards: Any = SimpleNamespace(sum_over_inputs=lambda of_rows: of_rows)
    known = SharedShardFacts(((3, 3),), True, True, (0,))
    layer: Any = SimpleNamespace(like=torch.zeros(1, 2), shared_facts=known, row_count=3)
    use = None if structure is None else RowUse(square=True, structure=structure, coarse=True)
    Part(shards, layer, True, False, frozenset())._gram(layer, (), torch.ones(3, 2), use, True)
    assert asked == [RowUse() if use is None else use]


def test_no_rows_are_exchanged_where_none_are_used() -> None:
    shards: Any = SimpleNamespace(divides_features=False, same_inputs=False)
    like = torch.zeros(1, 100)
    kind: Any = SimpleNamespace(matrix=lambda name, tensor: tensor, linear_map=Dense())
    known = SharedShardFacts(((1, 1), (1, 1)), True, False, (0, 0))
    layer: Any = SimpleNamespace(
        kind=kind, like=like, shared_facts=known, calls=[], row_use=lambda moved: RowUse()
    )
    method: Any = SimpleNamespace(solver=Exact(), local_steps=1)
    part, x = Part(shards, kind, True, False, frozenset()), torch.ones(1, 100)
    group = {"gate": False, "local_reduction": "sum"}
    found = part.inputs(layer, method, group, x, ("weight",))
    assert found.x is x
    assert found.linear_map is kind.linear_map


class OwnSgd(FirstOrder):
    """A solver of the user's, of which nothing is known."""

    name = "own"
    step = SOLVERS["sgd"].step  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "coupled"),
    [
        ({}, False),
        ({"transfer": "softmax"}, True),
        ({"transfer": "softmax", "variant": "locoprop-s"}, False),  # which has no transfer
        ({"transfer": "softmax", "variant": "pocoprop-s"}, True),  # whose target has one
        ({"variant": "locoprop-s", "solver": OwnSgd()}, True),  # perhaps
    ],
    ids=range(5),
)
def test_softmax_and_parts_of_the_user_couple_outputs(given: dict[str, Any], coupled: bool) -> None:
    own = posed(**given)
    assert layer_part.couples_outputs(own.layer, own.method) is coupled


@pytest.mark.parametrize(
    ("facts_", "use", "same", "said"),
    [
        (True, FEW, False, layer_part.GATHERS_ROWS),
        (True, None, False, layer_part.GATHERS_ROWS),
        (True, RowUse(), False, ""),  # needs nothing of the rows
        (True, FEW, True, ""),  # all processes have the same rows
        (True, RowUse(square=True), False, ""),  # adds up products of rows
        (False, FEW, False, ""),  # a process has no rows
        (None, FEW, False, ""),  # before the first step
    ],
    ids=range(7),
)
def test_the_summary_says_that_rows_are_gathered(
    facts_: bool | None, use: RowUse | None, same: bool, said: str
) -> None:
    like = torch.zeros(1, 100)
    kind: Any = SimpleNamespace(matrix=lambda name, tensor: tensor, linear_map=Dense())
    known = None if facts_ is None else SharedShardFacts(((1, 1), (1, 1)), facts_, False, (0, 0))
    layer: Any = SimpleNamespace(
        kind=kind, like=like, shared_facts=known, tensors={}, row_use=lambda moved: use
    )
    method: Any = SimpleNamespace(solver=Exact(), local_steps=1)
    part = Part(SimpleNamespace(same_inputs=same, processes=2), kind, True, False, frozenset())  # type: ignore[arg-type]
    assert part.note(layer, method, {"gate": False}) == said
