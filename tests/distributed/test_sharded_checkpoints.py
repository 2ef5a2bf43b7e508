"""Checkpoints by ``torch.distributed.checkpoint``: other numbers of processes go on from them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed.checkpoint as dcp
from sharded_cases import CASES, Case, batch_bounds, network, sharded, train, whole_tensors
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

from torch_locoprop import LocoProp
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.solvers.base import Solver, States

FLAT = ", flattened"  # a case with flatten_optimizer_state_dict=True
NAMES = (
    *("default", "M", "spectral in blocks", "outer", "softmax", "grouped convolution"),
    f"outer{FLAT}",
)
MORE = (
    "momentum",
    "running closed form",
    "running closed form of M",
    "convolution, M",
    "frozen bias",
    f"default{FLAT}",
    f"running closed form{FLAT}",
    f"frozen bias{FLAT}",
)
PLAIN = [name for name in (*NAMES, *MORE) if not name.endswith(FLAT)]
BEFORE, AFTER = 2, 2  # steps before and after the checkpoint


def _case(name: str) -> Case:
    return CASES[name.removesuffix(FLAT)]


def _options(name: str) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=name.endswith(FLAT))


def _state(model: nn.Module, opt: LocoProp, name: str = "") -> dict[str, Any]:
    of_opt = get_optimizer_state_dict(model, opt, options=_options(name))
    return {"model": get_model_state_dict(model), "opt": of_opt}


def _loaded(
    case: Case, model: nn.Sequential, folder: Path, name: str = "", **options: Any
) -> LocoProp:
    """Load a checkpoint into a model that was changed since, and return the new optimizer."""
    with torch.no_grad():
        for p in model.parameters():
            p += 1.0
    opt = train(case, model, steps=0)
    state = _state(model, opt, name)
    dcp.load(state, checkpoint_id=folder, **options)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, opt, state["opt"], options=_options(name))
    return opt


def _save_and_load(rank: int, folder: Path, names: tuple[str, ...]) -> None:
    """Save on 4 processes, load on 4, 2 and 3; save on 2, load on 4; load what one has saved."""
    meshes = {n: DeviceMesh("cpu", torch.arange(n)) for n in (2, 3, 4)}
    found: dict[str, dict[str, list[Tensor]]] = {name: {} for name in names}

    def trained(name: str, world: int, saved: Path) -> None:
        if rank >= world:
            return
        case, mesh = _case(name), meshes[world]
        model = sharded(case, network(case.model), mesh=mesh)
        part = batch_bounds(case, rank, world)
        opt = train(case, model, part, world, BEFORE)
        state = _state(model, opt, name)
        dcp.save(state, checkpoint_id=saved, process_group=mesh.get_group())

    def goes_on(name: str, world: int, saved: Path) -> None:
        if rank >= world:
            return
        case, mesh = _case(name), meshes[world]
        model = sharded(case, network(case.model), mesh=mesh)
        opt = _loaded(case, model, saved, name, process_group=mesh.get_group())
        train(case, model, batch_bounds(case, rank, world), world, AFTER, opt, skip=BEFORE)
        found[name][f"{saved.name} on {world}"] = whole_tensors(model)

    for number, name in enumerate(names):
        at = folder / str(number)
        trained(name, 4, at / "saved by 4")
        trained(name, 2, at / "saved by 2")
        distributed.barrier()
        for world in (2, 3, 4):
            goes_on(name, world, at / "saved by 4")
        goes_on(name, 4, at / "saved by 2")
        goes_on(name, 3, at / "saved by 1")
    if rank == 0:
        torch.save(found, folder / "found.pt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # by PyTorch 2.9 itself
@pytest.mark.parametrize(
    "names", [NAMES, pytest.param(MORE, marks=pytest.mark.distributed)], ids=["some", "more"]
)
def test_any_number_of_processes_goes_on_as_if_nothing_had_happened(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    for number, name in enumerate(names):
        model = network(_case(name).model)
        opt = train(_case(name), model, steps=BEFORE)
        saved = tmp_path / str(number) / "saved by 1"
        dcp.save(_state(model, opt, name), checkpoint_id=saved, no_dist=True)
    processes.run(_save_and_load, 4, tmp_path, names)
    found = torch.load(tmp_path / "found.pt")
    wrong = {}
    for number, name in enumerate(names):
        case = _case(name)
        model = network(case.model)
        train(case, model, steps=BEFORE + AFTER)
        alone = network(case.model)
        opt = _loaded(case, alone, tmp_path / str(number) / "saved by 4", name, no_dist=True)
        train(case, alone, steps=AFTER, opt=opt, skip=BEFORE)
        runs = {**found[name], "saved by 4 on 1": whole_tensors(alone)}
        assert len(runs) == 6
        for run, tensors in runs.items():
            for p, tensor in zip(model.parameters(), tensors, strict=True):
                if not torch.allclose(p, tensor, rtol=0, atol=1e-10):
                    wrong[name, run] = float((p - tensor).abs().max())
    assert not wrong


@pytest.mark.parametrize("name", PLAIN)
def test_a_state_that_was_asked_for_too_early_has_no_effect(name: str) -> None:
    case = CASES[name]
    asked, plain = network(case.model), network(case.model)
    opt = train(case, asked, steps=0)
    state = get_optimizer_state_dict(asked, opt)
    assert any(state["state"].values())
    train(case, asked, steps=1, opt=opt)
    train(case, plain, steps=1)
    fallback = {p for group in opt.param_groups if group["fallback"] for p in group["params"]}
    pairs = [
        (p, q)
        for p, q in zip(asked.parameters(), plain.parameters(), strict=True)
        if p not in fallback  # PyTorch's AdamW counts the step with which its state was made
    ]
    assert len(pairs) > 4
    assert all(torch.equal(p, q) for p, q in pairs)


class Functional(nn.Sequential):
    """A model that uses its second layer by the weight alone, so that rows are never recorded."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self[0](x)) @ self[1].weight.T + self[1].bias


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # by PyTorch 2.9 itself
@pytest.mark.filterwarnings("ignore:Layer '1' has a gradient")
def test_a_layer_without_rows_needs_a_partial_load(tmp_path: Path) -> None:
    """It has fewer entries than a layer with rows; those that are missing have no effect."""
    case = CASES["default"]

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return Functional(nn.Linear(6, 8), nn.Linear(8, 6)).double()

    model, other = made(), made()
    opt = train(case, model, steps=BEFORE)
    dcp.save(_state(model, opt), checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises(CheckpointException, match="Missing key"):
        _loaded(case, made(), tmp_path / "saved", no_dist=True)
    partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
    loaded = _loaded(case, other, tmp_path / "saved", no_dist=True, planner=partial)
    train(case, model, steps=AFTER, opt=opt, skip=BEFORE)
    train(case, other, steps=AFTER, opt=loaded, skip=BEFORE)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-12)


class Averaging(Solver):
    """A solver of the user's that moves along an average of the gradients."""

    name = "averaging"

    def solve(
        self, problem: LocalProblem, states: States, numbers: Any, *iterations: Any
    ) -> tuple[Tensors, States]:
        averages = {
            name: gradient + 0.9 * states[name].get("average", torch.zeros_like(gradient))
            for name, gradient in problem.first_gradient.items()
        }
        new = {name: tensor - 0.1 * averages[name] for name, tensor in problem.start.items()}
        return new, {name: {"average": average} for name, average in averages.items()}


class Named(Averaging):
    """The same, and it names the entries of its state."""

    def empty_states(self, start: Tensors, bent: bool, **structure: Any) -> States:
        return {name: {"average": torch.zeros_like(tensor)} for name, tensor in start.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # by PyTorch 2.9 itself
def test_a_state_that_tools_cannot_know_is_told(tmp_path: Path) -> None:
    for solver in (Averaging(), Named()):
        case = Case({"variant": "locoprop-s", "solver": solver}, "smooth")
        model, other = network(case.model), network(case.model)
        opt = train(case, model, steps=BEFORE)
        at = tmp_path / type(solver).__name__
        dcp.save(_state(model, opt), checkpoint_id=at, no_dist=True)
        told = "will not load any of a checkpoint" if type(solver) is Averaging else None
        with pytest.warns(UserWarning, match=told) if told else nullcontext():
            loaded = _loaded(case, other, at, no_dist=True)
        assert any(map(bool, loaded.state.values())) == (told is None)
        train(case, model, steps=AFTER, opt=opt, skip=BEFORE)
        train(case, other, steps=AFTER, opt=loaded, skip=BEFORE)
        same = all(map(torch.equal, model.parameters(), other.parameters()))
        assert same == (told is None)


@pytest.mark.parametrize("name", PLAIN)
def test_an_empty_state_has_the_entries_and_shapes_of_a_used_one(name: str) -> None:
    case = CASES[name]
    empty, used = network(case.model), network(case.model)
    opt = train(case, empty, steps=0)
    get_optimizer_state_dict(empty, opt)
    other = train(case, used)
    states = [each.state_dict()["state"] for each in (opt, other)]
    assert states[0].keys() == states[1].keys()
    for i in states[0]:
        shapes = [{k: (v.shape, v.dtype) for k, v in s[i].items()} for s in states]
        assert shapes[0] == shapes[1]
