"""Two processes under DistributedDataParallel equal one process with the whole batch."""

import math
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import processes
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint
from traffic import Counted

from torch_locoprop import LocoProp
from torch_locoprop.distributed import communication
from torch_locoprop.paper.gram import FULL, Structure
from torch_locoprop.solvers import Exact, Spectral
from torch_locoprop.stepping.several_processes import (
    divided_closed_forms,
    divided_outputs,
    divided_polar,
)

STEPS, ROWS = 3, 24


@dataclass(frozen=True)
class Case:
    """How the network is trained, and the number of backward passes of each step."""

    settings: dict[str, Any] = field(default_factory=dict)
    convolution: bool = False
    passes: int = 1
    order: str = ""  # of what is done
    matrices: int = 0  # of each process in a round of spectral steps; 0 divides no small layers


def outer(params: list[nn.Parameter]) -> Optimizer:
    return SGD(params, lr=0.1)


AVERAGED: dict[str, Any] = {
    "solver": "preconditioned-averaged",
    **{"lr": 0.03, "local_steps": 1, "gamma": 10.0},  # a gamma that is not given, without a warning
}
UNEVEN = "19 rows and 5"
ALONE = "step() inside no_sync()"
LOCAL = {
    variant: Case({"variant": variant, "solver": "sgd"}, order=ALONE)
    for variant in ("locoprop-s", "locoprop-m", "pocoprop-m")
}
SUMS = nn.BCEWithLogitsLoss(reduction="sum")
TRANSFERS = {"0": "tanh", "2": "tanh", "4": "sigmoid"}

CASES = {
    "locoprop-m": Case(),
    "locoprop-s": Case({"variant": "locoprop-s"}),
    "pocoprop-m": Case({"variant": "pocoprop-m", "gamma": 0.5}),
    "pocoprop-s": Case({"variant": "pocoprop-s", "gamma": 0.5}),
    "proxprop": Case({"variant": "proxprop"}),
    "natural-s": Case({"variant": "natural-s", "gamma": 0.1}),
    "means": Case({"local_reduction": "mean"}),
    "means of S": Case({"local_reduction": "mean", "variant": "locoprop-s"}),
    "means of PocoProp": Case({"local_reduction": "mean", "variant": "pocoprop-s"}),
    "gate": Case({"gate": True, "lr": 0.5}),
    "closed form of S": Case({"variant": "locoprop-s", "solver": "exact"}),
    "closed form of M": Case({"solver": "exact"}),
    "running closed form": Case({"variant": "locoprop-s", "solver": Exact(0.9, 2, 0.1)}),
    "S in blocks": Case({"variant": "locoprop-s", "gram": "block", "block_size": 4}),
    "preconditioned": Case({"solver": "preconditioned", "lr": 0.5}),
    "preconditioned, means": Case(
        {"solver": "preconditioned", "lr": 0.5, "local_reduction": "mean", "gamma": 0.05}
    ),
    "averaged": Case(AVERAGED),
    "averaged, S": Case({**AVERAGED, "variant": "locoprop-s"}),
    "averaged, softmax": Case({**AVERAGED, "output_transfer": "softmax"}),
    "averaged, convolution": Case(AVERAGED, convolution=True),
    "averaged, measured": Case({**AVERAGED, "diagnose": True, "weight_decay": 0.1}),
    "general": Case({"preset": "general"}),
    "general, diagonal": Case({"preset": "general", "gram": "diagonal"}),
    "general, convolution": Case({"preset": "general"}, convolution=True),
    "general, divided": Case({"preset": "general"}, matrices=4),
    "general, divided, convolution": Case({"preset": "general"}, convolution=True, matrices=4),
    "general, divided, in rounds": Case(
        {"preset": "general", "solver": Spectral(agreement=0.5)}, matrices=1
    ),
    "S, divided": Case({"variant": "locoprop-s"}, matrices=4),
    "S, divided, means": Case({"variant": "locoprop-s", "local_reduction": "mean"}, matrices=4),
    "S, divided, guards": Case(
        {"variant": "locoprop-s", "gate": True, "cap": 1e-4, "regularizer": "l2"}, matrices=4
    ),
    "M, divided": Case({"local_steps": 20}),
    "M, divided, means": Case({"local_steps": 20, "local_reduction": "mean", "momentum": 0.0}),
    "M, divided, guards": Case({"local_steps": 20, "gate": True, "cap": 1e-4}),
    "M, divided, outer": Case({"local_steps": 20, "apply": "gradient", "outer": outer}),
    "M, divided, measured": Case({"local_steps": 20, "diagnose": True, "weight_decay": 0.1}),
    "PocoProp-M, divided": Case(
        {"variant": "pocoprop-m", "gamma": 0.5, "local_steps": 20}, matrices=4
    ),
    "PocoProp-S, divided, means": Case(
        {"variant": "pocoprop-s", "gamma": 0.5, "local_steps": 20, "local_reduction": "mean"},
        matrices=4,
    ),
    "convolution of S, divided": Case(
        {"variant": "locoprop-s", "local_steps": 20}, convolution=True, matrices=4
    ),
    "closed form of S, divided": Case({"variant": "locoprop-s", "solver": "exact"}, matrices=4),
    "closed form of M, divided": Case({"solver": "exact"}, matrices=4),
    "closed form, divided, softmax": Case(
        {"solver": "exact", "output_transfer": "softmax"}, matrices=4
    ),
    "closed form, divided, in rounds": Case(
        {"variant": "locoprop-s", "solver": Exact(0.9, 2, 0.1)}, matrices=1
    ),
    "closed form of M, divided, in rounds": Case({"solver": Exact(0.5, 2)}, matrices=1),
    "closed form, divided, every third": Case(
        {"variant": "locoprop-s", "solver": Exact(every=3, damping=0.1)}, matrices=4
    ),
    "closed form, divided, convolution": Case(
        {"variant": "locoprop-s", "solver": "exact"}, convolution=True, matrices=4
    ),
    "closed form, divided, outer": Case(
        {
            "variant": "locoprop-s",
            "solver": "exact",
            "lr": 10.0,
            "apply": "gradient",
            "outer": outer,
            "cap": 1e-2,
        },
        matrices=4,
    ),
    "closed form in blocks, divided": Case(
        {
            "variant": "locoprop-s",
            "solver": Exact(0.9, 2, 0.1),
            "gram": "block",
            "block_size": 4,
        },
        matrices=4,
    ),
    "images of M, divided": Case({"local_steps": 20}, convolution=True),
    "images of PocoProp, divided": Case(
        {"variant": "pocoprop-m", "gamma": 0.5, "local_steps": 20}, convolution=True
    ),
    "one iteration": Case({"local_steps": 1}),
    "l2": Case({"regularizer": "l2"}),
    "outer optimizer": Case({"apply": "gradient", "outer": outer}),
    "convolution": Case(convolution=True),
    "convolution, S": Case({"variant": "locoprop-s"}, convolution=True),
    "accumulated": Case(passes=3),
    "the wrapper itself": Case(order="LocoProp(wrapper)"),
    "gradients set to zero late": Case(order="zero_grad() before backward()"),
    "checkpointed": Case(order="checkpoint()"),
    "checkpointed, reentrant": Case({"transfers": TRANSFERS}, order="reentrant checkpoint()"),
    "scaled": Case({"variant": "pocoprop-s", "gamma": 0.5}, order="GradScaler()"),
    "clipped": Case({"variant": "pocoprop-m", "gamma": 0.5}, order="clip_grad_norm_()"),
    "float32, closed form": Case(
        {"variant": "locoprop-s", "solver": "exact", "lr": 1e4}, order="float()"
    ),
    "uneven": Case(order=UNEVEN),
    "uneven, S": Case({"variant": "locoprop-s"}, order=UNEVEN),
    "uneven, S, divided": Case({"variant": "locoprop-s"}, order=UNEVEN, matrices=4),
    "uneven, convolution of S": Case({"variant": "locoprop-s"}, convolution=True, order=UNEVEN),
    "uneven, closed form": Case({"variant": "locoprop-s", "solver": "exact"}, order=UNEVEN),
    "uneven, running closed form": Case(
        {"variant": "locoprop-s", "solver": Exact(0.9, 2, 0.1)}, order=UNEVEN
    ),
    "uneven, closed form, divided": Case(
        {"variant": "locoprop-s", "solver": "exact"}, order=UNEVEN, matrices=4
    ),
    "uneven, preconditioned": Case({"solver": "preconditioned", "lr": 0.5}, order=UNEVEN),
    "uneven, averaged": Case(AVERAGED, order=UNEVEN),
    "uneven, general": Case({"preset": "general"}, order=UNEVEN),
    "uneven, general, divided": Case({"preset": "general"}, order=UNEVEN, matrices=4),
    "uneven, means": Case({"local_reduction": "mean", "loss_fn": SUMS}, order=UNEVEN),
    "uneven, PocoProp": Case({"variant": "pocoprop-m", "gamma": 0.5}, order=UNEVEN),
    "uneven, some rows": Case({"max_rows": 6}, order=UNEVEN),
    "uneven, some rows of S": Case(
        {"variant": "locoprop-s", "max_rows": 12, "gate": True}, order=UNEVEN
    ),
    "uneven, some rows of S, divided": Case(
        {"variant": "locoprop-s", "max_rows": 12, "gate": True}, order=UNEVEN, matrices=4
    ),
    "no rows in one": Case(order="nothing"),
    "a layer of one": Case(order="branch"),
    "measured": Case({"diagnose": True}),
    "measured, S": Case({"diagnose": True, "variant": "locoprop-s"}),
    "measured, PocoProp": Case({"diagnose": True, "variant": "pocoprop-m", "gamma": 0.5}),
    "measured, means": Case({"diagnose": True, "local_reduction": "mean"}),
    "measured, uneven": Case({"diagnose": True, "variant": "locoprop-s"}, order=UNEVEN),
    "measured, no rows in one": Case({"diagnose": True}, order="nothing"),
    "measured, a layer of one": Case({"diagnose": True}, order="branch"),
}


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(super().forward, x, use_reentrant=False))


class Reentrant(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()  # without which such a checkpoint has no gradients
        return cast(Tensor, checkpoint(super().forward, x, use_reentrant=True))


class Branched(nn.Sequential):
    """A model with one more layer, which only one process uses."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.used = True
        self.branch = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in list(self)[:-1]:
            y = layer(y)
        return y + self.branch(x) if self.used else y


def network(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    first: list[nn.Module] = [nn.Linear(6, 8)]
    if case.convolution:
        # Of a kernel of 5, XᵀX is smaller than 19 rows and not than 5.
        shape = (4, 5) if case.order == UNEVEN else (2, 3)
        first = [nn.Unflatten(1, (1, 6)), nn.Conv1d(1, *shape), nn.Tanh(), nn.Flatten()]
    rest = [nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 6)]
    kinds = {"checkpoint()": Checkpointed, "reentrant checkpoint()": Reentrant, "branch": Branched}
    model = kinds.get(case.order, nn.Sequential)(*first, *rest)
    return model if case.order == "float()" else model.double()


def summary_of_a_branch(rank: int) -> str:
    """Return the summary after one step of a model whose branch the first process alone calls."""
    model = network(Case(order="branch"))
    cast(Branched, model).used = rank == 0
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    opt = LocoProp(model, variant="locoprop-m", lr=1e-3, output_transfer="sigmoid")
    wrapped(torch.rand(5, 6).double()).square().sum().backward()
    opt.step()
    return opt.summary()


def trained(case: Case, called: nn.Module, model: nn.Module, part: slice) -> list[Tensor]:
    """Return the weights after some steps on a part of every batch, and measured local losses."""
    own: dict[str, Any] = {"output_transfer": "sigmoid"}
    if "preset" not in case.settings:
        own |= {"lr": 1e-3, "gamma": 2.0}
        solver = case.settings.get("solver")
        own |= {} if solver == "exact" or isinstance(solver, Exact) else {"local_steps": 4}
    whole = called if case.order == "LocoProp(wrapper)" else model
    opt = LocoProp(whole, **{**own, **case.settings})
    numbers = torch.Generator().manual_seed(1)
    scaler = torch.amp.GradScaler("cpu", enabled=case.order == "GradScaler()")
    for _ in range(STEPS):
        x = torch.rand(ROWS, 6, generator=numbers).to(next(model.parameters()))[part]
        for i, some in enumerate(x.chunk(case.passes)):
            if isinstance(called, DistributedDataParallel):
                last = i == case.passes - 1 and case.order != ALONE
                called.require_backward_grad_sync = last  # what no_sync() sets
            loss = binary_cross_entropy_with_logits(called(some), some)
            if case.order == "zero_grad() before backward()":
                opt.zero_grad()
            if "loss_fn" in case.settings:
                loss = SUMS(called(some), some)
            scaler.scale(loss / case.passes).backward()  # type: ignore[no-untyped-call]
        if case.order == "clip_grad_norm_()":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()
        if not case.order.startswith("zero"):
            opt.zero_grad()
    measured = []
    if case.settings.get("diagnose"):
        losses = [[row.loss_before, row.loss_after] for row in opt.diagnostics()]
        measured = [torch.tensor(losses).double().nan_to_num(-1.0)]
    states: list[Tensor] = []
    if case.matrices or case.settings.get("local_steps") == 20:  # of divided work, in every process
        entries = opt.state_dict()["state"].values()
        states = [own[key].double() for own in entries for key in sorted(own)]
    return [*(p.detach().clone() for p in model.parameters()), *states, *measured]


def _train_all(rank: int, folder: Path) -> None:
    found = {}
    for name, case in CASES.items():
        model = network(case)
        bounds = {UNEVEN: (0, 19, ROWS), "nothing": (0, ROWS, ROWS)}
        part = slice(*bounds.get(case.order, (0, ROWS // 2, ROWS))[rank : rank + 2])
        if isinstance(model, Branched):
            model.used = rank == 0
        sizes = {"MATRICES": case.matrices or 4, "PAYS_FROM": 1 if case.matrices else 64}
        of_iterations = patch.object(divided_outputs, "PAYS_FROM", sizes["PAYS_FROM"])
        given = sizes if case.matrices else {"MATRICES": 4}
        of_closed_forms = patch.multiple(divided_closed_forms, **given)
        with (
            warnings.catch_warnings(),
            patch.multiple(divided_polar, **sizes),
            of_iterations,
            of_closed_forms,
        ):
            warnings.filterwarnings("error", message=".*drift apart.*")
            wrapped = DistributedDataParallel(model, find_unused_parameters=case.order == "branch")
            found[name] = trained(case, wrapped, model, part)
    half = slice(*(0, ROWS // 2, ROWS)[rank : rank + 2])
    for name, case in LOCAL.items():
        model = network(case)
        wrapped = DistributedDataParallel(model)
        found[f"alone {name}"] = trained(case, wrapped, model, half)
    torch.save(found, folder / f"{rank}.pt")
    (folder / f"{rank}.txt").write_text(summary_of_a_branch(rank))
    count_collectives()


def count_collectives() -> None:
    """Compare the collectives of spectral steps with the formulas, with C renewed and without."""
    model = network(Case())
    wrapped, opt = DistributedDataParallel(model), LocoProp(model)
    shapes = [(6, 6), (5, 9), (8, 7)]  # of [W b], from the last layer to the first
    for step in range(12):
        wrapped(torch.rand(5, 6).double()).square().sum().backward()
        with patch.object(divided_polar, "PAYS_FROM", 1), Counted() as counted:
            opt.step()
        opt.zero_grad()
        expected = communication.of_all_layers_in_ddp(3)
        expected = expected.plus(communication.polar_factors_in_ddp(shapes, 2, 8))
        for _, columns in shapes if step < 11 else []:
            expected = expected.plus(communication.square_in_ddp(columns, 8))
        assert counted.traffic() == expected, step
    _count_of_closed_forms(shapes)
    dense, images = [(6, 5), (5, 8), (8, 6)], [(6, 5), (5, 8), (2, 3)]
    counted: dict[tuple[str, int, bool], list[tuple[int, int]]] = {
        ("locoprop-s", 4, False): dense,
        ("locoprop-m", 2, False): dense,
        ("locoprop-m", 20, False): dense,
        ("pocoprop-m", 20, False): dense,
        ("locoprop-s", 4, True): images,
        ("locoprop-m", 20, True): images,
        ("pocoprop-m", 20, True): images,
    }
    for (variant, local_steps, convolution), shapes in counted.items():
        expected = communication.of_all_layers_in_ddp(3)
        for d, n in shapes:
            is_image = (d, n) == (2, 3)  # images of six numbers, which have four patches
            inputs = communication.rows_in_ddp(*(1, 5 * 6) if is_image else (5, n), 2, 8)
            whole = communication.outputs_in_ddp(d, n + 1, 2, 2, 8)
            if variant == "locoprop-s":
                expected = expected.plus(communication.gram_in_ddp(n, 8)).plus(whole)
            elif local_steps == 20:
                expected = expected.plus(inputs).plus(whole)
                if variant == "pocoprop-m":  # the gradient of each row
                    rows = 5 * 4 if is_image else 5
                    expected = expected.plus(communication.rows_in_ddp(rows, d, 2, 8))
            else:
                expected = expected.plus(communication.by_iterations_in_ddp(d, n, True, 2, 8))
        found = _counted(convolution, variant=variant, local_steps=local_steps)
        assert found == expected, (variant, local_steps, convolution)
    _count_of_preconditioned_iterations()
    _count_of_averaged_iterations(network(Case()))


def _count_of_closed_forms(shapes: list[tuple[int, int]]) -> None:
    """Compare the collectives of closed forms with the formulas: in steps that factorize C, or not."""
    for variant, solver, kept, block_size in (
        ("locoprop-s", Exact(), 0, None),
        ("locoprop-s", Exact(every=3, damping=0.1), 1, None),
        ("locoprop-s", Exact(0.5), 0, None),
        ("locoprop-s", Exact(), 0, 4),
        ("locoprop-s", Exact(0.5, 2, 0.1), 1, 4),
        ("locoprop-m", Exact(), 0, None),
        ("locoprop-m", Exact(0.5, 2), 1, None),
    ):
        model = network(Case())
        wrapped = DistributedDataParallel(model)
        blocks = {} if block_size is None else {"gram": "block", "block_size": block_size}
        structure = FULL if block_size is None else Structure("block", block_size)
        given: dict[str, Any] = {"variant": variant, "solver": solver, **blocks}
        opt = LocoProp(model, output_transfer="sigmoid", **given)
        bent = variant == "locoprop-m"
        for step in range(4):
            wrapped(torch.rand(5, 6).double()).square().sum().backward()
            with patch.object(divided_closed_forms, "PAYS_FROM", 0), Counted() as counted:
                opt.step()
            opt.zero_grad()
            expected = communication.of_all_layers_in_ddp(3)
            if step % solver.every == 0:
                found = communication.closed_forms_in_ddp(shapes, kept, bent, 2, 8, structure)
                expected = expected.plus(found)
            elif bent:  # mean slopes
                size = 8 * sum(d for d, _ in shapes)
                expected = expected.plus(communication.Traffic(3, size))
            if step % solver.every == 0 or solver.decay > 0:
                for _, columns in shapes:
                    found = communication.square_in_ddp(columns, 8, structure)
                    expected = expected.plus(found)
            assert counted.traffic() == expected, (variant, solver, structure, step)


def _count_of_preconditioned_iterations() -> None:
    """Compare the collectives of preconditioned iterations with the formulas: divided, or not."""
    for rows, convolution in ((5, False), (40, False), (3, True)):
        expected = communication.of_all_layers_in_ddp(3)
        for d, n in [(6, 5), (5, 8), (2, 3) if convolution else (8, 6)]:
            if rows == 40:
                found = communication.preconditioned_in_ddp(d, n, True, 3, 8, slopes=True)
            else:
                of_inputs = (1, 3 * 6) if (d, n) == (2, 3) else (rows, n)
                found = communication.rows_in_ddp(*of_inputs, 2, 8)
                found = found.plus(communication.outputs_in_ddp(d, n + 1, 0, 2, 8))
                found = found.plus(communication.square_in_ddp(n + 1, 8))
            expected = expected.plus(found)
        found = _counted(convolution, rows, divided=rows < 40, solver="preconditioned")
        assert found == expected, (rows, convolution)


def _count_of_averaged_iterations(model: nn.Module) -> None:
    """C and the mean slopes of the transfer, in steps that renew them; nothing in the others."""
    wrapped = DistributedDataParallel(model)
    opt = LocoProp(model, output_transfer="sigmoid", solver="preconditioned-averaged")
    for step in range(13):
        opt.zero_grad()
        wrapped(torch.rand(5, 6).double()).square().sum().backward()
        with Counted() as counted:
            opt.step()
        expected = communication.of_all_layers_in_ddp(3)
        for d, columns in [(6, 6), (5, 9), (8, 7)] if step < 11 else []:
            expected = expected.plus(communication.square_in_ddp(columns, 8))
            expected = expected.plus(communication.Traffic(reductions=1, reduced_bytes=8 * d))
        assert counted.traffic() == expected, step


def _counted(
    convolution: bool, rows: int = 5, divided: bool | None = None, **settings: Any
) -> communication.Traffic:
    """Return the collectives of a step in which the outputs of all layers are divided, or none."""
    model = network(Case(convolution=convolution))
    wrapped = DistributedDataParallel(model)
    opt = LocoProp(model, output_transfer="sigmoid", **settings)
    for _ in range(2):
        opt.zero_grad()
        wrapped(torch.rand(rows, 6).double()).square().sum().backward()
        with patch.object(divided_outputs, "PAYS_FROM", 1), Counted() as counted:
            opt.step()
    if divided is None:
        divided = settings["local_steps"] > 2
    found = opt.summary().count("solves some of its outputs")
    assert found == (3 if divided else 0), opt.summary()
    return counted.traffic()


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Tensor]]]:
    folder = tmp_path_factory.mktemp("ddp")
    processes.run(_train_all, 2, folder)
    found = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for rank, one in enumerate(found):
        one["summary"] = (folder / f"{rank}.txt").read_text()
    return found


@pytest.mark.parametrize("name", CASES)
def test_both_have_the_same_bits(name: str, in_two: list[dict[str, list[Tensor]]]) -> None:
    for first, second in zip(*(found[name] for found in in_two), strict=True):
        assert torch.equal(first, second)


def test_local_losses_that_one_does_not_know_are_unknown_to_both(
    in_two: list[dict[str, list[Tensor]]],
) -> None:
    for found in in_two:
        assert found["measured, a layer of one"][-1][-1].tolist() == [-1.0, -1.0]
        assert (found["measured, a layer of one"][-1][:-1] != -1).all()


NOT_THE_WHOLE = ["natural-s"]
NOT_THE_WHOLE += [
    name for name, case in CASES.items() if case.order in (UNEVEN, "nothing", "branch")
]


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_THE_WHOLE])
def test_they_are_one_process_with_the_whole_batch(
    name: str, in_two: list[dict[str, list[Tensor]]]
) -> None:
    """Except for natural targets, with random labels, and for means over unequal numbers of rows."""
    model = network(CASES[name])
    before = [p.detach().clone() for p in model.parameters()]
    one = trained(replace(CASES[name], passes=1), model, model, slice(None))
    before += [torch.zeros_like(t) for t in one[len(before) :]]
    for whole, half, start in zip(one, in_two[0][name], before, strict=True):
        near = (
            {"rtol": 1e-8, "atol": 1e-12}
            if half.dtype == torch.float64
            else {"rtol": 1e-3, "atol": 1e-5}
        )
        torch.testing.assert_close(half - start, whole - start, **near)
        # The gate sets momentum to zero.
        assert "gate" in CASES[name].settings or not torch.equal(whole, start)
    assert not torch.equal(one[0], before[0])


@pytest.mark.parametrize(
    "name", ["uneven, S", "uneven, some rows of S", "uneven, general", "uneven, closed form"]
)
def test_divided_work_is_the_same_for_uneven_rows(
    name: str, in_two: list[dict[str, list[Tensor]]]
) -> None:
    weights = in_two[0][name]
    for one, other in zip(weights, in_two[0][f"{name}, divided"][: len(weights)], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


OF_THREE = (
    "S, divided",
    "S, divided, means",
    "M, divided",
    "M, divided, means",
    "general, divided",
)


def _in_three(rank: int, folder: Path) -> None:
    found = {}
    for name in OF_THREE:
        model = network(CASES[name])
        part = slice(rank * ROWS // 3, (rank + 1) * ROWS // 3)
        with (
            patch.object(divided_polar, "PAYS_FROM", 1),
            patch.object(divided_outputs, "PAYS_FROM", 1),
        ):
            found[name] = trained(CASES[name], DistributedDataParallel(model), model, part)
    torch.save(found, folder / f"{rank}.pt")


def test_a_process_without_outputs_has_no_rows_to_send() -> None:
    """Of four outputs, three processes have two, two and none."""
    for shape in ((0, 5), (0,), (0, 2, 3)):
        assert divided_outputs._matrix(torch.empty(shape)).shape == (0, math.prod(shape[1:]))


@pytest.mark.distributed
def test_three_processes_divide_outputs_unevenly(tmp_path: Path) -> None:
    """Eight, five and six outputs, of which the last process has fewer."""
    processes.run(_in_three, 3, tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(3)]
    for name in OF_THREE:
        model = network(CASES[name])
        one = trained(CASES[name], model, model, slice(None))
        for whole, *parts in zip(one, *(each[name] for each in found), strict=True):
            torch.testing.assert_close(parts[0], whole, rtol=0, atol=1e-10)
            assert torch.equal(parts[0], parts[1])
            assert torch.equal(parts[0], parts[2])


@pytest.mark.parametrize("name", LOCAL)
def test_steps_inside_no_sync_are_those_of_each_process_alone(
    name: str, in_two: list[dict[str, list[Tensor]]]
) -> None:
    for rank, found in enumerate(in_two):
        model = network(LOCAL[name])
        part = slice(*(0, ROWS // 2, ROWS)[rank : rank + 2])
        expected = trained(LOCAL[name], model, model, part)
        for one, other in zip(found[f"alone {name}"], expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert not torch.equal(in_two[0][f"alone {name}"][0], in_two[1][f"alone {name}"][0])


def test_a_layer_that_another_process_alone_has_rows_for(in_two: list[dict[str, Any]]) -> None:
    rows = [
        next(row for row in found["summary"].splitlines() if row.startswith("branch"))
        for found in in_two
    ]
    assert "other processes" not in rows[0]
    assert "only rows of other processes have reached it: it takes BackProp steps" in rows[1]
