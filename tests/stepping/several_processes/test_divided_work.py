"""Work that processes under DDP divide among them: equal to one process, and divided where it pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import threads
import torch
from sharded_cases import Case, M, S, batch_bounds, network, train, whole_tensors
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from torch_locoprop import LocoProp
from torch_locoprop.fast import dispatch
from torch_locoprop.solvers import Exact, Preconditioned, Spectral
from torch_locoprop.stepping.build_problem import Posed
from torch_locoprop.stepping.several_processes import (
    divided_closed_forms,
    divided_outputs,
    divided_polar,
)

# Threads of one process: not beside the other tests of a process.
pytestmark = pytest.mark.distributed

MANY = {**M, "local_steps": 20}  # more to send for gradients of all iterations than for rows
OUTER: dict[str, Any] = {"apply": "gradient", "outer": lambda params: SGD(params, lr=0.1)}
SCALED: dict[str, Any] = {"solver": Spectral(agreement=0.5)}
POCO = {**MANY, "variant": "pocoprop-m", "gamma": 0.5}
STEEP: dict[str, Any] = {"solver": "preconditioned", "lr": 0.5}
BLOCKS: dict[str, Any] = {"variant": "locoprop-s", "gram": "block", "block_size": 4}
IMAGES = "convolution"
CASES = {
    "S": Case(S),
    "S, means": Case({**S, "local_reduction": "mean"}),
    "S, uneven": Case(S, batches="uneven"),
    "S, guards": Case({**S, "gate": True, "cap": 1e-4}),
    "S, outer": Case({**S, **OUTER}),
    "M": Case(MANY),
    "M, means": Case({**MANY, "local_reduction": "mean"}),
    "M, momentum": Case({**MANY, "solver": "adam", "local_decay": "linear"}),
    "M, softmax": Case({**MANY, "output_transfer": "softmax"}),  # which couples the outputs
    "M, frozen bias": Case({**MANY, "weight_decay": 0.1}, order="frozen bias"),
    "PocoProp": Case(POCO),
    "images of M": Case(MANY, IMAGES),
    "images of M, means": Case({**MANY, "local_reduction": "mean"}, IMAGES),
    "images of M, accumulated": Case({**MANY, **OUTER}, IMAGES, order="accumulated"),
    "images of M, frozen bias": Case({**MANY, "solver": "adam"}, IMAGES, order="frozen bias"),
    "images of PocoProp": Case(POCO, IMAGES),
    "preconditioned": Case(STEEP),
    "preconditioned, means": Case({**STEEP, "local_reduction": "mean", "gamma": 0.05}),
    "preconditioned, S": Case({**STEEP, "variant": "locoprop-s"}),
    "preconditioned, bound": Case({"solver": Preconditioned(slope="bound"), "lr": 0.5}),
    "preconditioned, guards": Case({**STEEP, "gate": True, "cap": 1e-4}),
    "preconditioned, outer": Case({**STEEP, **OUTER}),
    "preconditioned, frozen bias": Case(STEEP, order="frozen bias"),
    "preconditioned, softmax": Case({**STEEP, "output_transfer": "softmax"}),
    "preconditioned, images": Case(STEEP, IMAGES),
    "closed form": Case({"variant": "locoprop-s", "solver": "exact"}),
    "closed form, blocks": Case({**BLOCKS, "solver": "exact"}),
    "closed form, blocks, kept": Case({**BLOCKS, "solver": Exact(0.9, 2, 0.1)}),
    "closed form, blocks, images": Case({**BLOCKS, "solver": Exact(every=2, damping=0.1)}, IMAGES),
    "closed form, diagonal": Case({**BLOCKS, "gram": "diagonal", "solver": "exact"}),
    "spectral": Case({"preset": "spectral"}),
    "spectral, uneven": Case({"preset": "spectral"}, batches="uneven"),
    "spectral, agreement": Case(SCALED),
}
NOT_DIVIDED = {
    "M with few iterations": Case({**M, "local_steps": 2}),
    "M, uneven": Case(MANY, batches="uneven"),
    "images of M, uneven": Case(MANY, IMAGES, batches="uneven"),
    "images of M with few iterations": Case({**M, "local_steps": 2}, IMAGES),
    "preconditioned, uneven": Case(
        {"solver": Preconditioned(slope="bound"), "lr": 0.5, "local_reduction": "sum"},
        batches="uneven",
    ),
    "preconditioned, one iteration": Case({**STEEP, "local_steps": 1}),
    "one iteration": Case({**S, "local_steps": 1}),
}
# Of five or six outputs, the last of four processes has none.
WORLDS = [(name, 3) for name in [*CASES, *NOT_DIVIDED]]
# Of five outputs, the first of two processes has three.
WORLDS += [(name, 2) for name in ("images of M", "images of PocoProp")]
WORLDS += [(name, 4) for name in ("S", "images of PocoProp", "preconditioned, images")]


def model_of(case: Case) -> nn.Sequential:
    """Return a model whose first layer is a convolution of six numbers, or linear."""
    if case.model != IMAGES:
        return network("smooth")
    torch.manual_seed(0)
    layers = nn.Conv1d(2, 5, 2), nn.Tanh(), nn.Flatten(), nn.Linear(10, 6)
    return Images(*layers).double()


class Images(nn.Sequential):
    """A sequence of layers whose inputs are images of two channels and three positions."""

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, super().forward(x.unflatten(1, (2, 3))))


class Called(DistributedDataParallel):
    """A sequence of layers that is called through DDP."""

    def __getitem__(self, i: int) -> Any:
        return self.module[i]


def in_threads(case: Case, world: int) -> list[tuple[list[Tensor], dict[Any, Any], list[str]]]:
    """Return weights, states, and how layers were divided, of each thread after some steps."""
    models = [model_of(case) for _ in range(world)]

    def trained(rank: int) -> tuple[list[Tensor], dict[Any, Any], list[str]]:
        opt = train(case, models[rank], steps=0)
        called: Any = Called(models[rank])
        train(case, called, batch_bounds(case, rank, world), world, opt=opt)
        divided = [layer.division for layer in opt._layers]
        return whole_tensors(models[rank]), opt.state_dict()["state"], divided

    with threads.averaged():
        return threads.run(trained, world)


@pytest.fixture(autouse=True)
def small_layers_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divided_outputs, "PAYS_FROM", 6)
    monkeypatch.setattr(divided_polar, "PAYS_FROM", 6)
    monkeypatch.setattr(divided_closed_forms, "PAYS_FROM", 0)


@pytest.mark.parametrize(("name", "rows"), [("S", 24.0), ("S, means", 1.0)])
def test_the_number_of_all_rows_is_known_to_the_host(
    name: str, rows: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused kernels take it as a number."""
    known = []
    solve = dispatch.solve

    def noted(solver: Any, problem: Any, *args: Any) -> Any:
        known.append(problem.x.rows)
        return solve(solver, problem, *args)

    monkeypatch.setattr(dispatch, "solve", noted)
    in_threads(CASES[name], 2)
    assert len(known) == 12
    assert all(type(each) is float and each == rows for each in known)


@pytest.mark.parametrize(("name", "world"), WORLDS)
def test_divided_work_is_that_of_one_process(name: str, world: int) -> None:
    case = {**CASES, **NOT_DIVIDED}[name]
    one = model_of(case)
    opt = train(case, one)
    for weights, states, divided in in_threads(case, world):
        of_outputs = name in CASES and not name.startswith(("spectral", "closed form"))
        expected = [of_outputs, of_outputs and not name.endswith("softmax")]
        assert divided == [divided_outputs.DIVIDED if each else "" for each in expected]
        for several, p in zip(weights, one.parameters(), strict=True):
            torch.testing.assert_close(several, p.detach(), rtol=0, atol=1e-10)
        for i, state in opt.state_dict()["state"].items():
            assert states[i].keys() == state.keys()
            for key, entry in state.items():
                torch.testing.assert_close(states[i][key], entry, rtol=0, atol=1e-9)
                assert states[i][key].is_contiguous()  # as fused kernels need it


@pytest.mark.parametrize("settings", [MANY, STEEP], ids=["M", "preconditioned"])
def test_images_of_other_shapes_with_as_many_rows_and_numbers_stay(
    settings: dict[str, Any],
) -> None:
    """They cannot be gathered as the images of this process."""
    images = [torch.rand(2, 1, *shape).double() for shape in ((4, 6), (6, 4))]

    def made() -> tuple[nn.Sequential, LocoProp]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 5, 2), nn.Tanh()).double()
        return model, LocoProp(model, **settings)

    (one, whole), several = made(), [made() for _ in range(2)]
    for x in images:
        (one(x).square().mean() / 2).backward()
    whole.step()

    def trained(rank: int) -> list[Tensor]:
        model, opt = several[rank]
        called = Called(model)
        called(images[rank]).square().mean().backward()
        opt.step()
        assert [layer.division for layer in opt._layers] == [""]
        return whole_tensors(model)

    with threads.averaged():
        for tensors in threads.run(trained, 2):
            for found, p in zip(tensors, one.parameters(), strict=True):
                torch.testing.assert_close(found, p.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("divided", "settings"),
    [
        (divided_polar, {"preset": "spectral"}),
        (divided_closed_forms, {"variant": "locoprop-s", "solver": "exact"}),
    ],
    ids=["polar factors", "closed forms"],
)
def test_layers_are_solved_in_rounds(
    divided: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a round has one layer for each of two processes; the last one has the rest."""
    found: list[list[str]] = []

    def noted(layers: Sequence[Posed]) -> Any:
        found.append([posed.layer.name for posed in layers])
        return solved(layers)

    solved = divided.solved
    monkeypatch.setattr(divided, "solved", noted)
    monkeypatch.setattr(divided, "MATRICES", 1)

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(5))).double()

    case, one, models = Case(settings), made(), [made() for _ in range(2)]
    train(case, one, steps=1)

    def trained(rank: int) -> list[Tensor]:
        opt = train(case, models[rank], steps=0)
        train(case, Called(models[rank]), batch_bounds(case, rank, 2), 2, steps=1, opt=opt)
        return whole_tensors(models[rank])

    with threads.averaged():
        for tensors in threads.run(trained, 2):
            for several, p in zip(tensors, one.parameters(), strict=True):
                torch.testing.assert_close(several, p.detach(), rtol=0, atol=1e-10)
    assert sorted(found) == sorted(2 * [["4", "3"], ["2", "1"], ["0"]])
