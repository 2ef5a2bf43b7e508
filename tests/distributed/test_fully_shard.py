"""A model under ``fully_shard`` on 2, 3 and 4 processes equals one process with the whole batch."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import processes
import pytest
import torch
import torch.distributed.checkpoint as dcp
from sharded_cases import (
    CASES,
    Case,
    M,
    S,
    batch_bounds,
    loss_of,
    make_optimizer,
    network,
    sharded,
    train,
    whole_tensors,
)
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from traffic import check_counts, check_images

from torch_locoprop import LocoProp
from torch_locoprop.distributed import communication
from torch_locoprop.solvers import Spectral
from torch_locoprop.stepping.several_processes import divided_polar
from torch_locoprop.stepping.several_processes.layer_part import EXCHANGES_WEIGHTS, WHOLE

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

# Cases on a mesh that replicates the shards (HSDP).
REPLICATED = (
    *("M", "S", "closed form", "default", "spectral", "outer", "softmax", "gate and cap"),
    *("uneven", "uneven, convolution"),
)

# Cases in which dense layers exchange weights in each iteration, whatever that costs.
EXCHANGED = (
    "M",
    "momentum",
    "mean",
    "outer",
    "uneven",
    "accumulated",
    "frozen bias of M",
    "softmax",
)

# ---- equal to one process ----------------------------------------------------------------------


def _train_all(rank: int, folder: Path, world: int) -> None:
    found = {}
    runs: list[tuple[str, dict[str, Any]]] = [
        (name, {}) for name in CASES if world in CASES[name].worlds
    ]
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicated", "sharded"))
        runs += [(name, {"mesh": mesh}) for name in REPLICATED]
        runs += [(name, {"mesh": mesh, "exchanged": True}) for name in EXCHANGED]
    if world == 3:
        runs += [(name, {"exchanged": True}) for name in EXCHANGED]
    for name, options in runs:
        case, on_mesh = CASES[name], {key: options[key] for key in options if key == "mesh"}
        model = sharded(case, network(case.model), **on_mesh)
        with _exchanging_weights() if "exchanged" in options else nullcontext():
            opt = train(case, model, batch_bounds(case, rank, world), world)
            assert (EXCHANGES_WEIGHTS in opt.summary()) or "exchanged" not in options
        own = [entry for state in opt.state.values() for entry in state.values()]
        replicated = [entry for entry in own if not isinstance(entry, DTensor)]
        found[name, *options] = (whole_tensors(model), replicated, opt.summary())
    torch.save(found, folder / f"{rank}.pt")
    if world == 2:
        _check_steps_that_are_no_ordinary_ones(rank)
    if world == 3:
        check_counts(rank, world)
        check_images(rank, world)
        _matrices_without_inputs(rank, world, folder)


class Attention(nn.Module):
    """Attention whose matrices the default fallback moves by spectral steps."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.attention(x, x, x, need_weights=False)[0]))
        return out


def _matrices_without_inputs(rank: int, world: int, folder: Path) -> None:
    """The default fallback does in several processes, and after a checkpoint, what it does in one."""
    names = ("attention.in_proj_weight", "attention.out_proj.weight", "head.weight", "head.bias")
    found: dict[str, dict[str, Tensor]] = {}
    for kind in ("alone", "sharded", "resumed"):
        torch.manual_seed(0)
        model: nn.Module = Attention().double()
        if kind != "alone":
            fully_shard(model.attention)
            fully_shard(model)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*no local problem")
            opt = LocoProp(model, output_transfer="linear", solver=Spectral(agreement=0.5))
        assert "SpectralAdamW" in opt.summary()
        numbers = torch.Generator().manual_seed(1)
        share = slice(None) if kind == "alone" else slice(2 * rank, 2 * rank + 2)
        for step in range(4):
            x = torch.rand(2 * world, 5, 8, generator=numbers).double()[share]
            if step == 2 and kind != "alone":
                state = dict(zip(("model", "opt"), get_state_dict(model, opt), strict=True))
                if kind == "sharded":
                    dcp.save(state, checkpoint_id=folder / "attention")
                else:
                    dcp.load(state, checkpoint_id=folder / "attention")
                    loaded = {"model_state_dict": state["model"], "optim_state_dict": state["opt"]}
                    set_state_dict(model, opt, **loaded)
            if step < 2 and kind == "resumed":
                continue
            (model(x) - x).square().mean().backward()
            opt.step()
            opt.zero_grad()
        found[kind] = dict(zip(dict(model.named_parameters()), whole_tensors(model), strict=True))
    for name in names:  # the bias of the keys has gradients of rounding errors alone
        for kind in ("sharded", "resumed"):
            one = found["alone"][name]
            torch.testing.assert_close(found[kind][name], one, rtol=0, atol=1e-10)


def _exchanging_weights() -> AbstractContextManager[object]:
    """Let layers exchange weights in each iteration, as if that cost nothing."""
    return patch.object(communication, "by_iterations", lambda *args: communication.Traffic())


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(2, marks=pytest.mark.distributed),
        3,
        pytest.param(4, marks=pytest.mark.distributed),
    ],
)
def test_processes_with_shards_are_one_process_with_the_whole_batch(
    world: int, tmp_path: Path
) -> None:
    processes.run(_train_all, world, tmp_path, world)
    found: list[Any] = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)]
    assert len(found[0]) >= 10
    wrong = {}
    for run in found[0]:
        try:
            _check(CASES[run[0]], [of_rank[run] for of_rank in found])
        except AssertionError as error:
            wrong[run] = str(error)
    assert not wrong


def _check(case: Case, found: list[tuple[list[Tensor], list[Tensor], str]]) -> None:
    """Compare what the processes have with one process."""
    model = network(case.model)
    start = [p.detach().clone() for p in model.parameters()]
    opt = train(case, model)
    tensors, replicated, summary = found[0]
    # PyTorch 2.9 rounds the factor of sharded gradients to float32.
    close = 1e-6 if case.order == "clipped" and VERSION < (2, 10) else 1e-10
    for p, several, before in zip(model.parameters(), tensors, start, strict=True):
        torch.testing.assert_close(several, p.detach(), rtol=0, atol=close)
        assert not p.requires_grad or not torch.equal(p, before)
    assert summary.count("locoprop") == opt.summary().count("locoprop") > 0
    for of_others in found[1:]:
        for one, other in zip(replicated, of_others[1], strict=True):
            assert torch.equal(one, other)


# ---- steps that are no ordinary ones, on two processes --------------------------------------------


def _check_steps_that_are_no_ordinary_ones(rank: int) -> None:
    _no_rows_in_one_process(rank)
    _gradients_without_sync()
    _one_row_that_is_not_finite(rank)
    _a_gradient_in_one_process_only(rank)
    _mixed_precision(rank)
    _the_state_of_one_process(rank)
    _a_layer_that_is_not_sharded()
    _rows_that_stand_for_others(rank)
    with _exchanging_weights():
        _rows_that_stand_for_others(rank)
    _polar_factors_in_several_rounds(rank)
    _compiled_blocks(rank)


def _no_rows_in_one_process(rank: int) -> None:
    """All take a BackProp step, and none waits for the other."""
    model = sharded(Case(), network("dense"))
    opt = make_optimizer(Case(M), model)
    x = torch.rand(5 if rank == 0 else 0, 6).double()
    model(x).sum().backward()
    before = [p.detach().full_tensor().clone() for p in model.parameters()]
    gradient = model[0].weight.grad.full_tensor()
    opt.step()
    expected = before[0] - _first_rmsprop_step(gradient)
    torch.testing.assert_close(model[0].weight.full_tensor(), expected, rtol=1e-10, atol=0)


def _polar_factors_in_several_rounds(rank: int) -> None:
    """Two layers take their spectral steps together, then the third one."""
    case, one = CASES["spectral"], network("dense")
    train(case, one)
    with patch.object(divided_polar, "MATRICES", 1):
        several = sharded(case, network("dense"))
        train(case, several, batch_bounds(case, rank, 2), 2)
    for p, q in zip(one.parameters(), whole_tensors(several), strict=True):
        torch.testing.assert_close(q, p.detach(), rtol=0, atol=1e-10)


def _compiled_blocks(rank: int) -> None:
    """Blocks under ``fully_shard``, each compiled apart from the others."""
    for name in ("M", "S", "closed form", "default"):
        given = {"transfers": {"0.0": "tanh", "1.0": "sigmoid"}} if name == "M" else {}
        case = Case({**CASES[name].settings, **given})
        one, several = _blocks(), _blocks()
        train(case, one)
        for block in several:
            block.compile(backend="aot_eager")  # type: ignore[no-untyped-call]
        opt = train(case, sharded(case, several), batch_bounds(case, rank, 2), 2)
        assert "BackProp" not in opt.summary()
        for p, q in zip(one.parameters(), whole_tensors(several), strict=True):
            torch.testing.assert_close(q, p.detach(), rtol=0, atol=1e-10)


def _blocks() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
    return nn.Sequential(first, nn.Sequential(nn.Linear(8, 6), nn.Identity())).double()


def _first_rmsprop_step(gradient: Tensor) -> Tensor:
    """The first of M's iterations alone: RMSProp from v = 1 with ε = 1e-5 and ρ = 0.9."""
    local = M["gamma"] * gradient
    return M["lr"] * local / (0.9 + 0.1 * local.square() + 1e-5).sqrt()


def _gradients_without_sync() -> None:
    model = sharded(Case(), network("dense"))
    opt = make_optimizer(Case(M), model)
    model.set_requires_gradient_sync(False)
    model(torch.rand(5, 6).double()).sum().backward()
    with pytest.raises(RuntimeError, match=r"Call set_requires_gradient_sync\(True\)"):
        opt.step()
    opt.zero_grad()
    model.set_requires_gradient_sync(True)
    model(torch.rand(5, 6).double()).sum().backward()
    model.zero_grad(set_to_none=False)
    model.set_requires_gradient_sync(False)
    model(torch.rand(5, 6).double()).sum().backward()
    with pytest.raises(RuntimeError, match=r"Call set_requires_gradient_sync\(True\)"):
        opt.step()


def _one_row_that_is_not_finite(rank: int) -> None:
    """The layer stays in all processes, as it does in one."""
    model = sharded(Case(), network("dense"))
    opt = make_optimizer(Case(S), model)
    model(torch.rand(5, 6).double()).sum().backward()
    before = whole_tensors(model)
    if rank == 1:
        model[0].weight.grad.to_local()[0, 0] = torch.inf
    with pytest.warns(UserWarning, match="not finite"):
        opt.step()
    assert opt.skipped_updates["0"] == 1
    after = whole_tensors(model)
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[2], after[2])


def _a_gradient_in_one_process_only(rank: int) -> None:
    model = sharded(Case(), network("dense"))
    opt = make_optimizer(Case(S), model)
    model(torch.rand(5, 6).double()).sum().backward()
    if rank == 1:
        model[0].weight.grad = model[0].bias.grad = None
    with pytest.raises(RuntimeError, match="Layer '0' has a gradient in some processes"):
        opt.step()


def _mixed_precision(rank: int) -> None:
    """Steps of float32 weights with passes in bfloat16 are those in float32, to bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name in ("M", "S", "closed form", "default"):
        case = CASES[name]
        whole, start = network("smooth").float(), network("smooth").float()
        train(case, whole, steps=1)
        several = sharded(case, network("smooth").float(), mp_policy=policy)
        opt = train(case, several, batch_bounds(case, rank, 2), 2, steps=1)
        for p, q, before in zip(
            whole.parameters(), whole_tensors(several), start.parameters(), strict=True
        ):
            near = 0.05 if name == "default" else 0.01  # a polar factor magnifies rounding
            assert (p - q).norm() < near * (p - before).norm(), name
        entries = [each for state in opt.state.values() for each in state.values()]
        assert {each.dtype for each in entries} <= {torch.float32}


def _the_state_of_one_process(rank: int) -> None:
    """A state dict with whole tensors is divided where it is loaded."""
    case = CASES["M"]
    one = network("smooth")
    opt = train(case, one, steps=2)
    saved = copy.deepcopy((one.state_dict(), opt.state_dict()))
    train(case, one, steps=2, opt=opt, skip=2)
    start = network("smooth")
    start.load_state_dict(saved[0])
    several = sharded(case, start)
    other = make_optimizer(case, several)
    other.load_state_dict(saved[1])
    train(case, several, batch_bounds(case, rank, 2), 2, steps=2, opt=other, skip=2)
    for p, q in zip(one.parameters(), whole_tensors(several), strict=True):
        torch.testing.assert_close(q, p.detach(), rtol=0, atol=1e-10)


def _a_layer_that_is_not_sharded() -> None:
    """Nothing averages its gradients, so the processes drift apart, and a warning says so."""
    model = network("smooth")
    fully_shard(model[0])
    opt = make_optimizer(Case(M), model)
    x = torch.rand(5, 6).double()
    model(x).sum().backward()
    with pytest.warns(UserWarning, match="drift apart"):
        opt.step()


def _rows_that_stand_for_others(rank: int) -> None:
    """Of equal rows, ``max_rows`` keeps some that count for all: the problem stays the same.

    In a mean over rows, processes with unequal numbers of rows count equally. In one process, these are
    equal numbers of rows with unequal losses.
    """
    first, second = torch.rand(2, 1, 6, generator=torch.Generator().manual_seed(3)).double()
    own = first.expand(8, 6) if rank == 0 else second.expand(4, 6)
    for settings in (M, S, {**M, "local_reduction": "mean"}, {**S, "local_reduction": "mean"}):
        counts = (6, 6) if "local_reduction" in settings else (8, 4)
        both = [
            (first.expand(counts[0], 6), 8 / counts[0]),
            (second.expand(counts[1], 6), 4 / counts[1]),
        ]
        whole, several = network("smooth"), sharded(Case(), network("smooth"))
        one = make_optimizer(Case(settings), whole)
        other = make_optimizer(Case({**settings, "max_rows": 3}), several)
        for _ in range(2):
            out = whole(torch.cat([x for x, _ in both])).split(counts)
            losses = [w * loss_of(Case(), a, x) for a, (x, w) in zip(out, both, strict=True)]
            (losses[0] + losses[1]).backward()  # type: ignore[no-untyped-call]
            (2 * loss_of(Case(), several(own), own)).backward()  # type: ignore[no-untyped-call]
            for opt in (one, other):
                opt.step()
                opt.zero_grad()
        for p, q in zip(whole.parameters(), whole_tensors(several), strict=True):
            torch.testing.assert_close(q, p.detach(), rtol=0, atol=1e-10)


# ---- one process with shards: what is refused, and what is said -----------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this torch has no processes")
    processes.join_group(0, 1, tmp_path)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["M", "S", "default", "closed form", "outer", "convolution, M",
                                  "convolution, S", "softmax", "grouped convolution", "gate and cap",
                                  "accumulated", "outer, capped"])  # fmt: skip
def test_one_process_with_shards_is_one_without(name: str, alone: None) -> None:
    case = CASES[name]
    plain, several = network(case.model), sharded(case, network(case.model))
    train(case, plain)
    train(case, several)
    for p, q in zip(plain.parameters(), whole_tensors(several), strict=True):
        torch.testing.assert_close(q, p.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        {"variant": "pocoprop-m"},
        {"variant": "natural-s"},
        {"variant": "locoprop-s", "regularizer": "fisher"},
        {"variant": "locoprop-s", "diagnose": True},
    ],
)
def test_settings_that_need_gradients_of_rows_are_refused(
    settings: dict[str, Any], alone: None
) -> None:
    model = sharded(Case(), network("dense"))
    with pytest.raises(ValueError, match="which are not exchanged between processes"):
        make_optimizer(Case(settings), model)


def test_the_summary_says_which_layers_do_not_separate(alone: None) -> None:
    case = CASES["grouped convolution"]
    model = sharded(case, network(case.model))
    rows = train(case, model).summary().splitlines()
    said = [row for row in rows if row.endswith(WHOLE)]
    assert [row.split()[1] for row in said] == ["Conv1d"]


def test_weights_that_are_sharded_by_their_inputs_are_named(alone: None) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    fully_shard(model[0], shard_placement_fn=lambda p: Shard(p.dim() - 1))
    fully_shard(model)
    with pytest.warns(UserWarning, match="have no local problem"):
        opt = LocoProp(model)
    assert "its weight is sharded as (Shard(dim=1),), which has no local problem" in opt.summary()


def test_weights_away_from_their_mesh_are_named(alone: None) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    fully_shard(model)
    with pytest.raises(ValueError, match="its weight is on meta, its mesh has cpus"):
        LocoProp(model)


def test_offloaded_weights_are_named_and_trained_by_the_fallback(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that ``CPUOffloadPolicy`` keeps on the host, of a layer whose mesh has GPUs."""
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 6))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model)
    with monkeypatch.context() as pretended:  # there are no GPUs here
        mesh = model[0].weight.device_mesh
        kind = "_device_type" if hasattr(mesh, "_device_type") else "device_type"  # PyTorch 2.9
        pretended.setattr(mesh, kind, "cuda")
        opt = LocoProp(model, fallback=lambda p: torch.optim.SGD(p, lr=0.1))
    x, before = torch.rand(5, 6), whole_tensors(model)
    model(x).square().mean().backward()
    expected = before[0] - 0.1 * model[0].weight.grad.full_tensor()
    opt.step()
    torch.testing.assert_close(model[0].weight.full_tensor(), expected)
    assert not torch.equal(whole_tensors(model)[1], before[1])
    rows = {row.split()[0]: row for row in opt.summary().splitlines() if " Linear " in row}
    assert "SGD" in rows["0"]
    assert "its weight is on cpu, its mesh has cudas" in rows["0"]
    assert "locoprop" in rows["2"]


def test_a_weight_that_is_sharded_without_its_bias_is_named(alone: None) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    mesh = distributed.init_device_mesh("cpu", (1,))
    weight = distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)])
    model[0].weight = nn.Parameter(weight)
    with pytest.warns(UserWarning, match="have no local problem"):
        opt = LocoProp(model)
    assert "only one of its weight and bias is sharded" in opt.summary()


def test_placements_without_a_local_problem_are_named(alone: None) -> None:
    one, two = (distributed.init_device_mesh("cpu", sizes) for sizes in ((1,), (1, 1)))
    layers: list[nn.Module] = [nn.Conv1d(2, 4, 3), nn.Linear(6, 8, bias=False), nn.Linear(6, 8)]
    model = nn.Sequential(*layers, nn.Linear(8, 6))
    placed: list[tuple[Any, str, Any, list[Any]]] = [
        (model[0], "weight", one, [Shard(1)]),
        (model[0], "bias", one, [Replicate()]),
        (model[1], "weight", two, [Shard(0), Replicate()]),
        (model[2], "weight", one, [Shard(1)]),
        (model[2], "bias", one, [Shard(0)]),
    ]
    for module, name, mesh, placements in placed:
        tensor = distribute_tensor(getattr(module, name).detach(), mesh, placements)
        setattr(module, name, nn.Parameter(tensor))
    with pytest.warns(UserWarning, match="have no local problem"):
        summary = LocoProp(model).summary()
    assert "its weight is sharded as (Shard(dim=1),), which has no local problem" in summary
    assert "its weight is a DTensor on a mesh of several dimensions, without fully_shard" in summary
    assert "its weight and bias are sharded in different ways" in summary


def test_a_mesh_whose_data_dimensions_are_named_is_refused(alone: None) -> None:
    if "dp_mesh_dims" not in inspect.signature(fully_shard).parameters:
        pytest.skip("this torch has no dp_mesh_dims=")
    from torch.distributed.fsdp import DataParallelMeshDims

    mesh = distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("tensor", "data"))
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh())
    weight = distribute_tensor(model[0].weight.detach(), mesh, [Shard(0), Replicate()])
    model[0].weight = nn.Parameter(weight)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="data"))
    with pytest.raises(ValueError, match="fully_shard was applied to it with dp_mesh_dims="):
        LocoProp(model)


def test_inputs_that_are_divided_make_backprop_steps(alone: None) -> None:
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 6))
    mesh = distributed.init_device_mesh("cpu", (1,))
    weight = distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)])
    model[0].weight = nn.Parameter(weight)
    opt = LocoProp(model, layers=["0"], fallback=lambda p: torch.optim.SGD(p, 0.1))
    x = distribute_tensor(torch.rand(5, 6), mesh, [Shard(0)])
    model[0](x).sum().to_local().backward()
    opt.step()
    assert "its inputs are divided among processes: it takes BackProp steps" in opt.summary()
