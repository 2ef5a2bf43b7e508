"""Steps of several processes by replay equal those of one process with the whole batch.

The processes are threads, and the CUDA graphs those of ``emulated_graphs.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import threads
import torch
from emulated_graphs import emulate, is_recording
from sharded_cases import (
    AVERAGED,
    EXACT,
    ROWS,
    Case,
    M,
    OwnSgd,
    S,
    loss_of,
    make_optimizer,
    network,
    sharded,
    whole_tensors,
)
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from torch_locoprop import LocoProp
from torch_locoprop.distributed import collectives
from torch_locoprop.fast import cuda_graph as graphs
from torch_locoprop.solvers import Exact, Spectral
from torch_locoprop.stepping.several_processes import (
    divided_closed_forms,
    divided_outputs,
    divided_polar,
)
from torch_locoprop.stepping.several_processes.layer_part import Part

# Threads of one process: not beside the other tests of a process.
pytestmark = pytest.mark.distributed

NINE = 9  # equal steps: one makes states, three run eagerly, the next is recorded, all then replay
RENEWED = 19  # spectral steps: ten that renew XᵀX, and nine others
OUTER: dict[str, Any] = {"apply": "gradient", "outer": lambda params: SGD(params, lr=0.1)}
MANY = {**M, "local_steps": 20}  # under DDP, gathers rows
DAMPED = {**EXACT, "solver": Exact(every=2, damping=0.1)}
BLOCKS = {"gram": "block", "block_size": 4}
STEEP: dict[str, Any] = {"solver": "preconditioned", "lr": 0.5}
CASES = {
    "M": Case(M),
    "M, rows": Case(MANY),
    "M, means": Case({**M, "local_reduction": "mean", "weight_decay": 0.1}),
    "M, Adam": Case({**M, "solver": "adam", "regularizer": "l2"}),
    "M, guards": Case({**M, "lr": 0.5, "gate": True, "cap": 0.01}),
    "M, every second step": Case({**M, "every": 2}),
    "M, outer": Case({**M, **OUTER}),
    "M, nothing applied": Case({**M, "apply": "nothing"}),
    "M, softmax": Case({**M, "output_transfer": "softmax"}),
    "S": Case(S),
    "S, means": Case({**S, "local_reduction": "mean"}),
    "S, blocks": Case({**S, **BLOCKS}),
    "S, outer": Case({**S, **OUTER, "cap": 1e-3}),
    "closed form": Case(DAMPED),
    "closed form, running": Case({**EXACT, "solver": Exact(0.9, 7, 0.1)}),
    "preconditioned": Case(STEEP),
    "averaged": Case(AVERAGED),
    "spectral": Case({"preset": "spectral", "weight_decay": 0.1}),
    "default": Case(),
    "spectral, agreement": Case({"solver": Spectral(agreement=0.5)}),
    "spectral, blocks": Case({"preset": "spectral", **BLOCKS}),
    "convolution, S": Case(S, "convolution"),
    "convolution, spectral": Case({"preset": "spectral"}, "convolution"),
}
UNDER_DDP = {**CASES, "convolution, M": Case(MANY, "convolution")}
SHARDED = {**CASES, "M, weights exchanged": Case(M)}
Called = list[tuple[str, int]]
Meddle = Callable[[int, int, nn.Module, LocoProp], None]


@pytest.fixture(autouse=True)
def called(monkeypatch: pytest.MonkeyPatch) -> dict[int, Called]:
    """Return the collectives that each process has called, with the bytes that each leaves."""
    found: dict[int, Called] = {}

    def noted(collective: Any) -> Any:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            # Of an all-to-all, each process may have another part.
            size = 0 if "all_to_all" in collective.__name__ else tensor.nbytes
            found.setdefault(distributed.get_rank(), []).append((collective.__name__, size))
            return collective(tensor, *args, **kwargs)

        return call

    for name in ("all_reduce", "all_to_all_single"):
        monkeypatch.setattr(distributed, name, noted(getattr(distributed, name)))
    for name in ("_all_gather", "_reduce_scatter"):
        monkeypatch.setattr(collectives, name, noted(getattr(collectives, name)))
    return found


@dataclass(frozen=True)
class Loop:
    """What is special about the steps of a run."""

    steps: int = NINE
    rows: Callable[[int], int] = lambda step: ROWS
    share: int | None = None  # of the rows that each process has, but for the last one
    parts: Callable[[int, int], float] = lambda step, rank: 0.5  # the first pass's share of rows
    passes: int = 1
    meddle: Meddle = lambda step, rank, model, opt: None
    cuda_graph: Callable[[int], bool] = lambda rank: True


@dataclass
class Run:
    """What a process has at the end."""

    weights: list[Tensor]
    states: dict[Any, Any]
    replays: int
    failure: str | None


def steps_of(
    case: Case, loop: Loop, model: Any, opt: LocoProp, rank: int, world: int, first: int = 0
) -> None:
    """Take the steps of a loop on this process's rows."""
    for step in range(first, first + loop.steps):
        batch = torch.rand(loop.rows(step), 6, generator=torch.Generator().manual_seed(step))
        share = (loop.share if world > 1 else None) or loop.rows(step) // world
        own = batch.double().to(next(model.parameters()).device)[rank * share : (rank + 1) * share]
        cut = round(loop.parts(step, rank) * share)
        for x in (own,) if loop.passes == 1 else (own[:cut], own[cut:]):
            (world * loss_of(case, model(x), x)).backward()  # type: ignore[no-untyped-call]
        loop.meddle(step, rank, model, opt)
        for group in opt.param_groups:  # a schedule
            group["lr"] = group.setdefault("initial_lr", group["lr"]) / (1 + step)
        opt.step()
        opt.zero_grad()


def in_threads(case: Case, loop: Loop, world: int, *, is_sharded: bool) -> list[Run]:
    """Return how each of several processes ends."""
    models = [network(case.model) for _ in range(world)]

    def trained(rank: int) -> Run:
        model: Any = models[rank]
        called = sharded(case, model) if is_sharded else DistributedDataParallel(model)
        settings = {**case.settings, "cuda_graph": loop.cuda_graph(rank)}
        opt = make_optimizer(Case(settings), model)
        steps_of(case, loop, called, opt, rank, world)
        states = {
            i: {key: _whole(entry) for key, entry in opt.state[p].items()}
            for i, p in enumerate(model.parameters())
        }
        return Run(whole_tensors(model), states, replays(opt), opt._graphs.failure)

    with nullcontext() if is_sharded else threads.averaged():
        return threads.run(trained, world)


def replays(opt: LocoProp) -> int:
    recordings: list[Any] = [kind.recording for kind in opt._graphs._kinds]
    return sum(0 if each is None else each.replays for each in recordings)


def _whole(entry: Any) -> Tensor:
    found: Tensor = entry.full_tensor() if hasattr(entry, "full_tensor") else entry
    return found


def alone(case: Case, loop: Loop) -> tuple[list[Tensor], dict[Any, Any]]:
    """Return weights and states of one process with the whole batch, without CUDA graphs."""
    model = network(case.model)
    opt = make_optimizer(Case({**case.settings, "cuda_graph": False}), model)
    loop = Loop(loop.steps, loop.rows)
    steps_of(case, loop, model, opt, 0, 1)
    return whole_tensors(model), {i: opt.state[p] for i, p in enumerate(model.parameters())}


def same(run: Run, expected: tuple[list[Tensor], dict[Any, Any]]) -> None:
    for found, p in zip(run.weights, expected[0], strict=True):
        torch.testing.assert_close(found, p, rtol=0, atol=1e-10)
    for i, state in expected[1].items():
        assert run.states[i].keys() == state.keys()
        for key, entry in state.items():
            torch.testing.assert_close(run.states[i][key], entry, rtol=0, atol=1e-9)


@pytest.fixture(autouse=True)
def _replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(graphs, "MAX_RECORDINGS_IN_PLACE", 0)
    emulate(monkeypatch)
    monkeypatch.setattr(divided_outputs, "PAYS_FROM", 6)
    monkeypatch.setattr(divided_polar, "PAYS_FROM", 2)
    monkeypatch.setattr(divided_closed_forms, "PAYS_FROM", 0)
    yield
    assert not is_recording()


def loop_of(name: str) -> Loop:
    spectral = "spectral" in name or name in ("default", "averaged")
    twofold = "second" in name or "closed" in name
    return Loop(RENEWED if spectral else 2 * NINE if twofold else NINE)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", UNDER_DDP)
def test_replays_under_ddp_are_the_steps_of_one_process(name: str, world: int) -> None:
    case, loop = UNDER_DDP[name], loop_of(name)
    expected = alone(case, loop)
    for run in in_threads(case, loop, world, is_sharded=False):
        assert run.failure is None
        assert run.replays >= (5 if loop.steps == NINE else 11)
        same(run, expected)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", SHARDED)
def test_replays_of_shards_are_the_steps_of_one_process(
    name: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, loop = SHARDED[name], loop_of(name)
    if "exchanged" in name:
        exchange = lambda part, layer, method, gate: True  # noqa: E731
        monkeypatch.setattr(Part, "exchanges_weights", exchange)
    expected = alone(case, loop)
    for run in in_threads(case, loop, world, is_sharded=True):
        assert run.failure is None
        assert run.replays >= (5 if loop.steps == NINE else 11)
        same(run, expected)


# ---- processes that do not all replay ----------------------------------------------------------


def forgotten(step: int, rank: int, model: nn.Module, opt: LocoProp) -> None:
    if rank == 1 and step == 6:
        opt._graphs.forget()


def moved(step: int, rank: int, model: nn.Module, opt: LocoProp) -> None:
    if rank == 1 and step == 6:  # a state at another address
        for layer in opt._layers:
            for p in layer.given:
                opt.state[p].update({k: e.clone() for k, e in opt.state[p].items()})


LOOPS = {
    "one never records": Loop(14, cuda_graph=lambda rank: rank == 1),
    "one records later": Loop(14, meddle=forgotten),
    "one has other addresses": Loop(14, meddle=moved),
    "one has other shapes": Loop(
        14, passes=2, parts=lambda step, rank: 0.25 if rank == 1 and step in (7, 9, 13) else 0.5
    ),
    "fewer rows in another": Loop(
        14, rows=lambda step: 18 if step in (7, 9, 13) else ROWS, share=ROWS // 2
    ),
    "uneven last batches": Loop(14, rows=lambda step: 12 if step % 5 == 4 else ROWS),
    "all replay": Loop(14),
}


@pytest.mark.parametrize("is_sharded", [False, True], ids=["DDP", "fully_shard"])
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("case", ["M, rows", "S, outer", "default"])
def test_each_process_calls_the_same_collectives(
    case: str, name: str, is_sharded: bool, called: dict[int, Called]
) -> None:
    """Also if others replay a step that it runs eagerly: otherwise the processes would hang."""
    loop = LOOPS[name]
    wanted = alone(CASES[case], loop)
    runs = in_threads(CASES[case], loop, 2, is_sharded=is_sharded)
    for rank, run in enumerate(runs):
        assert run.failure is None
        assert (run.replays > 0) == loop.cuda_graph(rank)
        same(run, wanted)
    assert called[0] == called[1]
    if not is_sharded:
        assert all(map(torch.equal, runs[0].weights, runs[1].weights))
    assert len(called[0]) > 2 * loop.steps
    # For the other cases the shapes of one process decide what all of them keep.
    if name.startswith("one") and ("shapes" not in name or case == "M, rows"):
        assert runs[0].replays != runs[1].replays


def test_random_rows_are_those_of_eager_steps(called: dict[int, Called]) -> None:
    case = Case({**M, "max_rows": 6})
    for is_sharded in (False, True):
        eager = in_threads(
            case, Loop(NINE, cuda_graph=lambda rank: False), 2, is_sharded=is_sharded
        )
        found = in_threads(case, Loop(NINE), 2, is_sharded=is_sharded)
        for run, plain in zip(found, eager, strict=True):
            assert run.replays >= 5
            same(run, (plain.weights, plain.states))


@pytest.mark.parametrize("is_sharded", [False, True], ids=["DDP", "fully_shard"])
@pytest.mark.parametrize("name", ["M, rows", "default"])
def test_inputs_may_be_read_in_place(
    name: str, is_sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_RECORDINGS_IN_PLACE", 4)
    loop = Loop(RENEWED if name == "default" else 2 * NINE)
    wanted = alone(CASES[name], loop)
    for run in in_threads(CASES[name], loop, 2, is_sharded=is_sharded):
        assert run.failure is None
        assert run.replays > 0
        same(run, wanted)


def partial(step: int, rank: int, model: nn.Module, opt: LocoProp) -> None:
    """Give the first layer a gradient that the processes have not added up."""
    for p in opt._layers[0].given:
        gradient: Any = p.grad
        part = gradient.full_tensor() / distributed.get_world_size()
        p.grad = DTensor.from_local(part, gradient.device_mesh, [Partial()])


NOT_RECORDED = {
    "closed form": (Case(EXACT), False, Loop(NINE)),
    "closed form, sharded": (Case(EXACT), True, Loop(NINE)),
    "images, sharded": (Case(M, "convolution"), True, Loop(NINE)),
    "PocoProp": (Case({**MANY, "variant": "pocoprop-m", "gamma": 0.5}), False, Loop(NINE)),
    "measured": (Case({**M, "diagnose": True}), False, Loop(NINE)),
    "solver of the user's": (Case({**S, "solver": OwnSgd()}), True, Loop(NINE)),
    "partial gradients": (Case(S), True, Loop(NINE, meddle=partial)),
}


@pytest.mark.parametrize("name", NOT_RECORDED)
def test_steps_that_the_documentation_names_run_eagerly(name: str) -> None:
    case, is_sharded, loop = NOT_RECORDED[name]
    expected = alone(case, loop)
    for run in in_threads(case, loop, 2, is_sharded=is_sharded):
        assert (run.replays, run.failure) == (0, None)
        same(run, expected)


# ---- failures and resumption -------------------------------------------------------------------


@pytest.mark.parametrize("is_sharded", [False, True], ids=["DDP", "fully_shard"])
@pytest.mark.parametrize("name", ["M, rows", "S", "default"])
def test_a_failed_recording_changes_nothing(
    name: str, is_sharded: bool, called: dict[int, Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process fails between collectives, takes the step eagerly, and records nothing any more."""
    outside, passed = graphs.outside, [0]

    def fail(work: Any) -> None:
        passed[0] += is_recording() and distributed.get_rank() == 1
        if passed[0] == 4:
            passed[0] = 5
            raise RuntimeError("too little memory")
        outside(work)

    monkeypatch.setattr(graphs, "outside", fail)
    loop = loop_of(name)
    wanted = alone(CASES[name], loop)
    with pytest.warns(UserWarning, match="too little memory") as told:
        runs = in_threads(CASES[name], loop, 2, is_sharded=is_sharded)
    assert len(told) == 1
    assert [run.failure for run in runs] == [None, "too little memory"]
    assert [run.replays > 0 for run in runs] == [True, False]
    assert called[0] == called[1]
    for run in runs:
        same(run, wanted)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["DDP", "fully_shard"])
@pytest.mark.parametrize("name", ["M, rows", "S", "default"])
def test_resumed_runs_have_the_same_bits(name: str, is_sharded: bool) -> None:
    """The resumed run takes eager steps where the other one replays."""
    case = CASES[name]
    models = [[network(case.model) for _ in range(2)] for _ in range(2)]

    def trained(rank: int) -> None:
        called: list[Any] = [
            sharded(case, model) if is_sharded else DistributedDataParallel(model)
            for model in models[rank]
        ]
        opt, new = (make_optimizer(case, model) for model in models[rank])
        steps_of(case, Loop(NINE), called[0], opt, rank, 2)
        with torch.no_grad():
            for p, old in zip(called[1].parameters(), called[0].parameters(), strict=True):
                p.copy_(old)
        new.load_state_dict(copy.deepcopy(opt.state_dict()))
        steps_of(case, Loop(6), called[0], opt, rank, 2, first=NINE)
        steps_of(case, Loop(6), called[1], new, rank, 2, first=NINE)
        assert replays(opt) > replays(new)
        for p, old in zip(models[rank][1].parameters(), models[rank][0].parameters(), strict=True):
            assert torch.equal(_whole(p), _whole(old))
            for key, entry in opt.state[old].items():
                assert torch.equal(_whole(new.state[p][key]), _whole(entry)), key

    with nullcontext() if is_sharded else threads.averaged():
        threads.run(trained, 2)
