"""Checkpoints that are written while training goes on, and those that are cut off half way."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed.checkpoint as dcp
from sharded_cases import CASES, batch_bounds, network, sharded, train, whole_tensors
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.multiprocessing.spawn import ProcessExitedException

from torch_locoprop.distributed.checkpoint import check_complete

BEFORE, AFTER = 2, 2  # steps before and after the checkpoint


def _state(model: Any, opt: Any) -> dict[str, Any]:
    return dict(zip(("model", "opt"), get_state_dict(model, opt), strict=True))


def _load(model: Any, opt: Any, folder: Path, **options: Any) -> None:
    check_complete(folder)
    state = _state(model, opt)
    dcp.load(state, checkpoint_id=folder, **options)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])


# ---- training goes on ----------------------------------------------------------------------------


class Waiting(dcp.FileSystemWriter):
    """Writes when training is over."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, overwrite=False)
        self.go = threading.Event()

    def write_data(self, plan: Any, planner: Any) -> Any:
        assert self.go.wait(60)
        return super().write_data(plan, planner)


def _save_and_go_on(rank: int, folder: Path) -> None:
    group = distributed.new_group(backend="gloo")  # its collectives run beside those of training
    for name in ("default", "outer"):
        case, part = CASES[name], batch_bounds(CASES[name], rank, 2)
        model = sharded(case, network(case.model))
        opt = train(case, model, part, 2, BEFORE)
        writer = Waiting(folder / name)
        saved: Any = dcp.async_save(_state(model, opt), storage_writer=writer, process_group=group)
        train(case, model, part, 2, AFTER, opt, skip=BEFORE)
        writer.go.set()
        saved.result()
        torch.save(whole_tensors(model), folder / f"{name} {rank}.pt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    processes.run(_save_and_go_on, 2, tmp_path)
    for name in ("default", "outer"):
        case = CASES[name]
        model, resumed = network(case.model), network(case.model)
        train(case, model, steps=BEFORE + AFTER)
        opt = train(case, resumed, steps=0)
        _load(resumed, opt, tmp_path / name, no_dist=True)
        train(case, resumed, steps=AFTER, opt=opt, skip=BEFORE)
        several = torch.load(tmp_path / f"{name} 0.pt")
        for p, other, loaded in zip(model.parameters(), several, resumed.parameters(), strict=True):
            torch.testing.assert_close(other, p.detach(), rtol=0, atol=1e-10)
            torch.testing.assert_close(loaded, p, rtol=0, atol=1e-10)


# ---- cut off half way ----------------------------------------------------------------------------


class Dying(dcp.FileSystemWriter):
    """Writes half of its file, and then its process is killed."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        written.wait()
        (file,) = Path(self.path).glob("__1_*.distcp")
        os.truncate(file, file.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
        return written


def _save_twice(rank: int, folder: Path) -> None:
    case = CASES["default"]
    model = sharded(case, network(case.model))
    part = batch_bounds(case, rank, 2)
    opt = train(case, model, part, 2, BEFORE)
    dcp.save(_state(model, opt), storage_writer=dcp.FileSystemWriter(folder / "first"))
    train(case, model, part, 2, 1, opt, skip=BEFORE)
    writer = Dying if rank == 1 else dcp.FileSystemWriter
    dcp.save(_state(model, opt), storage_writer=writer(folder / "second"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a complete checkpoint and one whose second process was killed while saving."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        processes.run(_save_twice, 2, folder)
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_after_a_process_was_killed_the_checkpoint_before_loads(saved: Path) -> None:
    assert len(list((saved / "second").glob("*.distcp"))) > 0
    with pytest.raises(RuntimeError, match=r"second is not complete: it has no file \.metadata"):
        check_complete(saved / "second")
    case = CASES["default"]
    model, resumed = network(case.model), network(case.model)
    train(case, model, steps=BEFORE + AFTER)
    opt = train(case, resumed, steps=0)
    _load(resumed, opt, saved / "first", no_dist=True)
    train(case, resumed, steps=AFTER, opt=opt, skip=BEFORE)
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-10)


def test_every_file_that_is_missing_or_cut_is_noticed(saved: Path, tmp_path: Path) -> None:
    files = sorted(file.name for file in (saved / "first").iterdir())
    assert len(files) == 3  # of two processes, and .metadata
    for name in files:
        size = (saved / "first" / name).stat().st_size
        for kept in (None, 0, 1, size // 2, size - 1):
            cut = tmp_path / f"{name} {kept}"
            shutil.copytree(saved / "first", cut)
            check_complete(cut)
            if kept is None:
                (cut / name).unlink()
            else:
                os.truncate(cut / name, kept)
            with pytest.raises(RuntimeError, match=f"is not complete: .*{name}.*Load an earlier"):
                check_complete(cut)
