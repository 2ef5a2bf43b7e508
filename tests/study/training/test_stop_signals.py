"""Ctrl-C and SIGTERM: a checkpoint between two steps, from which a run continues bit for bit."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from torch_locoprop.study import methods
from torch_locoprop.study.training import runner
from torch_locoprop.study.training.run_folder import Checkpoint, NoCheckpointError, RunFolder
from torch_locoprop.study.training.run_result import result_of
from torch_locoprop.study.training.runner import run
from torch_locoprop.study.training.stop_signals import (
    Terminated,
    deferred_signals,
    terminations_raised,
)

DATA = tiny.data()
STEPS = 3
"""Steps of an epoch of the tiny task."""


@pytest.fixture(autouse=True)
def _usual_handlers() -> Iterator[None]:
    """A shell may start background jobs, and so these tests, with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_in_step(
    monkeypatch: pytest.MonkeyPatch, number: int, kind: signal.Signals = signal.SIGINT
) -> None:
    """Send a signal within the step of this number, counted from the start of the process."""
    own, count = runner._Training._step, 0

    def step(training: Any, rows: Any, rate: float) -> None:
        nonlocal count
        count += 1
        if count == number:
            signal.raise_signal(kind)
        own(training, rows, rate)

    monkeypatch.setattr(runner._Training, "_step", step)


def check_same_bits(one: Path, other: Path) -> None:
    first, second = (result_of(path).metrics for path in (one, other))
    assert [(r.train_loss, r.test_loss) for r in first] == [
        (r.train_loss, r.test_loss) for r in second
    ]
    models = [RunFolder(path).trained_model().state_dict() for path in (one, other)]
    for name, value in models[0].items():
        assert torch.equal(value, models[1][name]), name


@pytest.mark.parametrize("name", methods.names())
def test_every_method_continues_within_an_epoch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in ("soap", "psgd"):
        pytest.importorskip("pytorch_optimizer")
        pytest.importorskip("opt_einsum")
    config = tiny.config(name, schedule="linear", warmup_epochs=1)
    run(config, tmp_path / "whole", data=DATA)
    places: list[Checkpoint] = []
    for last in (1, STEPS + 1, 2):  # in epochs 1, 2 and, after the rest of 2, in 3
        with monkeypatch.context() as patch:
            interrupt_in_step(patch, last)
            with pytest.raises(KeyboardInterrupt):
                run(config, tmp_path / "parts", data=DATA, resume=True, on_resume=places.append)
    run(config, tmp_path / "parts", data=DATA, resume=True, on_resume=places.append)
    check_same_bits(tmp_path / "whole", tmp_path / "parts")
    found = [(each.metrics[-1].epoch, each.part and each.part.steps) for each in places]
    assert found == [(0, 1), (1, 2), (2, 1)]
    assert places[0].place == "epoch 0 and step 1 of the next epoch"


@pytest.mark.usefixtures("own_methods")
def test_random_numbers_go_on_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noisy(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.grad += torch.randn_like(parameter) * np.random.normal()
            super().step()

    methods.register(
        methods.Method("noisy", lambda m, s: Noisy(m.parameters(), **s), {"lr": 1e-3}, "untuned")
    )
    config = tiny.config("noisy")
    run(config, tmp_path / "whole", data=DATA)
    with monkeypatch.context() as patch:
        interrupt_in_step(patch, STEPS + 2)
        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "parts", data=DATA)
    run(config, tmp_path / "parts", data=DATA, resume=True)
    check_same_bits(tmp_path / "whole", tmp_path / "parts")


def test_a_signal_after_the_last_step_saves_the_epoch(tmp_path: Path) -> None:
    def on_epoch(row: Any) -> None:
        if row.epoch == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tiny.config(), tmp_path, data=DATA, on_epoch=on_epoch)
    checkpoint = RunFolder(tmp_path).checkpoint()
    assert checkpoint is not None
    assert checkpoint.metrics[-1].epoch == 2, "though the last checkpoint is not ten seconds old"


def test_sigterm_saves_too_and_then_does_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_in_step(monkeypatch, 2, signal.SIGTERM)
    with pytest.raises(Terminated), terminations_raised():
        run(tiny.config(), tmp_path / "raised", data=DATA)
    assert RunFolder(tmp_path / "raised").checkpoint().part.steps == 2  # type: ignore[union-attr]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_sigterm_ends_a_process_that_does_not_handle_it(tmp_path: Path) -> None:
    """As in processes of `locoprop figure --jobs`, which must not start another run."""
    child = os.fork()
    if child == 0:
        with pytest.MonkeyPatch.context() as patch:
            interrupt_in_step(patch, 2, signal.SIGTERM)
            run(tiny.config(), tmp_path, data=DATA)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert RunFolder(tmp_path).checkpoint().part.steps == 2  # type: ignore[union-attr]


def test_a_second_signal_stops_at_once() -> None:
    reached = []

    def twice() -> None:
        with deferred_signals():
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
                reached.append("after a signal")

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert len(reached) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_ignored_stays_ignored_and_other_threads_change_nothing() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred_signals() as stop:
        signal.raise_signal(signal.SIGINT)
    assert not stop.is_set
    seen = []

    def inside() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with deferred_signals(), terminations_raised():
            seen.append(signal.getsignal(signal.SIGTERM) == before)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [True]


# What is left after a crash -------------------------------------------------------------------


def stopped_after(epoch: int, folder: Path) -> None:
    def on_epoch(row: Any) -> None:
        if row.epoch == epoch:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tiny.config(), folder, data=DATA, on_epoch=on_epoch, checkpoint_seconds=0.0)


def test_metrics_without_a_checkpoint_never_start_from_zero_unasked(tmp_path: Path) -> None:
    stopped_after(2, tmp_path)
    (tmp_path / "checkpoint.pt").unlink()
    lines = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(NoCheckpointError, match=r"epochs 0 to 2, but checkpoint\.pt, .*--restart"):
        run(tiny.config(), tmp_path, data=DATA, resume=True)
    assert (tmp_path / "metrics.jsonl").read_text() == lines
    result = run(tiny.config(), tmp_path, data=DATA, resume=True, restart=True)
    assert result.finished
    assert (tmp_path / "metrics.jsonl.old").read_text() == lines, "nothing is lost"


def test_a_broken_checkpoint_can_be_restarted_from_zero(tmp_path: Path) -> None:
    stopped_after(2, tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes(b"nonsense")
    with pytest.raises(NoCheckpointError, match="--restart"):
        run(tiny.config(), tmp_path, data=DATA, resume=True)
    assert run(tiny.config(), tmp_path, data=DATA, resume=True, restart=True).finished
    assert (tmp_path / "checkpoint.pt.old").read_bytes() == b"nonsense"


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_half_written_last_line_is_written_again(tmp_path: Path, kept: int) -> None:
    run(tiny.config(), tmp_path / "whole", data=DATA)
    stopped_after(2, tmp_path / "cut")
    path = tmp_path / "cut" / "metrics.jsonl"
    *first, last = path.read_text().splitlines(keepends=True)
    path.write_text("".join(first) + last[:-1][:kept])
    assert len(RunFolder(tmp_path / "cut").metrics()) == 2
    run(tiny.config(), tmp_path / "cut", data=DATA, resume=True)
    check_same_bits(tmp_path / "whole", tmp_path / "cut")


def test_a_whole_last_line_without_its_end_is_an_epoch(tmp_path: Path) -> None:
    run(tiny.config(), tmp_path, data=DATA)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    assert result_of(tmp_path).finished
