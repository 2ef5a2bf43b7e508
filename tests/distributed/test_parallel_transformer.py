"""A transformer under tensor and sequence parallelism, alone and under ``fully_shard``.

Four processes are a mesh of 2 × 2, or of 2 × 1 × 2 with replicas. With tensor parallelism alone both
rows of the mesh do the same.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import processes
import pytest
import torch
import torch.distributed.checkpoint as dcp
from parallel_transformer import (
    BATCH,
    Transformer,
    make_optimizer,
    parallel,
    sharded,
    train,
    transformer,
    whole_tensors,
)
from sharded_cases import DEFAULT, EXACT, SPECTRAL, M, S, outer
from torch import Tensor, distributed
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from torch_locoprop import LocoProp
from torch_locoprop.distributed import communication
from torch_locoprop.distributed.communication import Traffic
from torch_locoprop.stepping.several_processes.layer_part import EXCHANGES_WEIGHTS

SETTINGS: dict[str, dict[str, Any]] = {
    "default": DEFAULT,
    "M": M,
    "S": S,
    "closed form": EXACT,
    "spectral": SPECTRAL,
    "mean": {**M, "local_reduction": "mean"},
    "gate": {**S, "lr": 0.5, "gate": True},
    "cap": {**M, "cap": 0.01},
    "outer": {**M, "apply": "gradient", "outer": outer},
    "outer and cap": {**S, "apply": "gradient", "outer": outer, "cap": 1e-3},
    "preconditioned": {"solver": "preconditioned", "lr": 0.5},
}
KINDS = [
    *("sequence", "sequence and sharded", "tensor", "tensor and sharded"),
    "sequence, compiled",
    *("sequence and sharded, replicated", "sequence and sharded, exchanging weights"),
]
REPLICATE = "torch.distributed._composable.replicate_with_fsdp"  # not in all versions of PyTorch
if find_spec(REPLICATE) is not None:  # each process has all that it would have alone
    KINDS.append("sequence and sharded by replicate()")
SOME = ("default", "M", "S", "closed form"), KINDS[:2]  # settings and kinds of a short run
SAVED = ("default", "M")  # settings of the checkpoints
BEFORE, AFTER = 2, 2  # steps before and after a checkpoint


def _mesh(kind: str) -> DeviceMesh:
    sizes = (2, 1, 2) if "replicated" in kind else (1, 2, 2)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "data", "tensor"))


def _divided(kind: str, mesh: DeviceMesh) -> Transformer:
    """Return the model, divided among the processes of a mesh."""
    model = parallel(transformer(), mesh["tensor"], sequence="sequence" in kind)
    if "compiled" in kind:
        torch.compiler.reset()
        model.compile(backend="aot_eager")  # type: ignore[no-untyped-call]
    if "sharded" not in kind:
        return model
    if "replicate()" in kind:
        for module in (model.block, model):
            import_module(REPLICATE).replicate(module, mesh=mesh["data"])
        return model
    return sharded(model, mesh["replicas", "data"] if "replicated" in kind else mesh["data"])


def _train(kind: str, mesh: DeviceMesh, model: Transformer, opt: LocoProp, **steps: int) -> None:
    """Take some steps, with ``fully_shard`` on a half of each batch."""
    half = mesh.get_local_rank("replicas") + mesh.get_local_rank("data")
    if "sharded" in kind:
        train(model, opt, _half(half), 2, **steps)
        return
    with warnings.catch_warnings():  # the other row of the mesh may have other sequences
        warnings.filterwarnings("ignore", message=".*drift apart.*")
        train(model, opt, **steps)


def _half(number: int) -> slice:
    return slice(number * BATCH // 2, (number + 1) * BATCH // 2)


def _many_rows() -> AbstractContextManager[object]:
    """Return a context in which it seems to take longer to gather input rows than weights."""
    return patch.object(communication, "by_rows", return_value=Traffic(gathered_bytes=10**6))


def _in_a_process(rank: int, folder: Path, names: tuple[str, ...], kinds: list[str]) -> None:
    found = {}
    warnings.filterwarnings("error", message=".*drift apart.*")
    for kind in kinds:
        mesh = _mesh(kind)
        for name in names:
            model = _divided(kind, mesh)
            opt = make_optimizer(model, SETTINGS[name])
            with _many_rows() if "exchanging" in kind else nullcontext():
                _train(kind, mesh, model, opt, steps=BEFORE + AFTER)
                summary = opt.summary()
            assert summary.count("locoprop") == 7  # all linear layers
            if name == "M":
                assert (EXCHANGES_WEIGHTS in summary) == ("exchanging" in kind)
            found[f"{name}: {kind}"] = whole_tensors(model)
        for name in _saved(names):
            found |= _saved_and_loaded(kind, name, folder)
    if rank == 0:
        torch.save(found, folder / "found.pt")
    _check_layers_without_a_local_problem(rank)
    _check_replicas_that_drift(rank)


def _check_layers_without_a_local_problem(rank: int) -> None:
    """Let ``fully_shard`` divide columns: the fallback trains all layers but the head."""
    mesh = _mesh("sharded")
    model = parallel(transformer(), mesh["tensor"], sequence=True)
    fully_shard(
        model.block, mesh=mesh["data"], shard_placement_fn=lambda p: Shard(int(p.dim() == 2))
    )
    fully_shard(model, mesh=mesh["data"])
    opt, one = make_optimizer(model, M), transformer()
    assert opt.summary().count("which has no local problem") == 6
    _train("sharded", mesh, model, opt, steps=3)
    _train("alone", mesh, one, make_optimizer(one, {**M, "layers": ["head"]}), steps=3)
    found = whole_tensors(model)
    for name, p in one.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), rtol=0, atol=1e-10)


def _check_replicas_that_drift(rank: int) -> None:
    """Average gradients over the other dimension of the mesh by hand, and compare the replicas."""
    mesh = _mesh("tensor")
    model = parallel(transformer(), mesh["tensor"], sequence=False)
    opt = make_optimizer(model, S)

    def average(*_: object) -> None:
        for p in model.parameters():
            part: Any = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            distributed.all_reduce(part, group=mesh.get_group("data"))
            part /= 2

    opt.register_step_pre_hook(average)
    with pytest.warns(UserWarning, match="drift apart"):
        train(model, opt, _half(mesh.get_local_rank("data")), 2, steps=2)
    weight = model.block.mlp[2].weight.full_tensor()  # type: ignore[operator]
    replicas = [torch.empty_like(weight) for _ in range(4)]
    distributed.all_gather(replicas, weight)
    for one, other, equal in ((0, 1, True), (2, 3, True), (0, 2, False)):
        assert torch.equal(replicas[one], replicas[other]) == equal


# ---- checkpoints ---------------------------------------------------------------------------------


def _saved(names: tuple[str, ...]) -> list[str]:
    return [name for name in SAVED if name in names]


def _state(model: Transformer, opt: LocoProp) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)}


def _loaded(model: Transformer, name: str, folder: Path, **options: Any) -> LocoProp:
    """Load a checkpoint into a model that was changed since, and return a new optimizer."""
    with torch.no_grad():
        for p in model.parameters():
            p += 1.0
    opt = make_optimizer(model, SETTINGS[name])
    state = _state(model, opt)
    dcp.load(state, checkpoint_id=folder, **options)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, opt, state["opt"])
    return opt


def _saved_and_loaded(kind: str, name: str, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Save, and go on from this checkpoint and from one that a single process has saved."""
    mesh, found = _mesh(kind), {}
    model = _divided(kind, mesh)
    opt = make_optimizer(model, SETTINGS[name])
    _train(kind, mesh, model, opt, steps=BEFORE)
    dcp.save(_state(model, opt), checkpoint_id=folder / name / kind)
    for saved in (kind, "one"):
        again = _divided(kind, mesh)
        opt = _loaded(again, name, folder / name / saved)
        _train(kind, mesh, again, opt, steps=AFTER, skip=BEFORE)
        found[f"{name}: {saved} on {kind}"] = whole_tensors(again)
    return found


def _goes_on_alone(name: str, kind: str, folder: Path) -> dict[str, Tensor]:
    """Go on with one process from what several have saved."""
    model = transformer()
    opt = _loaded(model, name, folder / name / kind, no_dist=True)
    train(model, opt, steps=AFTER, skip=BEFORE)
    return whole_tensors(model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # by PyTorch 2.9 itself
@pytest.mark.parametrize(
    ("names", "kinds"),
    [SOME, (tuple(SETTINGS), KINDS)],
    ids=["some", "all"],
)
@pytest.mark.distributed
def test_four_processes_are_one_with_the_whole_batch(
    names: tuple[str, ...], kinds: list[str], tmp_path: Path
) -> None:
    one: dict[str, dict[str, Tensor]] = {}
    saved = _saved(names)
    for name in names:
        model = transformer()
        opt = make_optimizer(model, SETTINGS[name])
        train(model, opt, steps=BEFORE)
        if name in saved:
            state = _state(model, opt)
            dcp.save(state, checkpoint_id=tmp_path / name / "one", no_dist=True)
        train(model, opt, steps=AFTER, skip=BEFORE)
        one[name] = whole_tensors(model)
    processes.run(_in_a_process, 4, tmp_path, names, kinds)
    found = torch.load(tmp_path / "found.pt")
    for name in saved:
        found |= {f"{name}: {k} on one": _goes_on_alone(name, k, tmp_path) for k in kinds}
    assert len(found) == len(kinds) * (len(names) + 3 * len(saved))
    before, wrong = whole_tensors(transformer()), {}
    for run, tensors in found.items():
        expected = one[run.split(":")[0]]
        assert tensors.keys() == expected.keys()
        for key, tensor in tensors.items():
            assert not torch.equal(tensor, before[key])
            if not torch.allclose(tensor, expected[key], rtol=0, atol=1e-10):
                wrong[run, key] = float((tensor - expected[key]).abs().max())
    assert not wrong
