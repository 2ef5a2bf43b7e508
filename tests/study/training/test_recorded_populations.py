"""Replayed steps of a population of matrices equal eager ones, by emulated CUDA graphs on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import emulated_graphs
import pytest
import torch

from torch_locoprop.fast import cuda_graph
from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.matrix_population import Training, train_together
from torch_locoprop.study.training.recorded_steps import EAGER, RecordedSteps
from torch_locoprop.study.training.run_folder import Metrics

EPOCHS, STEPS = 8, 3  # in an epoch: two of 16 images and one of the 8 that remain
SETTINGS = {
    "muon": {},
    "exact-s-muon@3": {"damping": 0.3},
    "locoprop-spectral@3": {"fall": 2.0, "damping": 0.1, "bias_rate": 0.5},
    "soap@3": {"lr": 1e-2},
    "shampoo@3": {"early": 5},
    "kfac@7": {"lr": 0.1},
}
WILD = {"lr": 1e20, "clip": 1e30}  # diverges in the first steps that move
Curves = list[list[tuple[float, float, bool]]]


def configs(method: str, seeds: tuple[int, int, int]) -> list[RunConfig]:
    """Three members, the second of which diverges; the schedule changes the rate in every step."""
    usual = SETTINGS[method]
    small = RunConfig(method, usual).settings["lr"] / 3
    wild = {name: value for name, value in WILD.items() if name == "lr" or method == "kfac@7"}
    return [
        RunConfig(
            method,
            {**usual, **own},
            model="12-8-3",
            batch_size=16,
            epochs=EPOCHS,
            schedule="linear",
            seed=seed,
        )
        for own, seed in zip(({}, wild, {"lr": small}), seeds, strict=True)
    ]


def curves(given: list[RunConfig]) -> Curves:
    images = torch.rand(50, 12, generator=torch.Generator().manual_seed(7))
    data = Dataset("curves", images[:40], images[40:], "made for tests")
    found: list[tuple[Metrics, ...]] = train_together(given, data)
    return [[(row.train_loss, row.test_loss, row.diverged) for row in rows] for rows in found]


@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("seeds", [(0, 0, 0), (0, 1, 2), (0, 1, 0)])
def test_replayed_steps_are_the_eager_ones(
    method: str, seeds: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit; when a member has diverged, the others get a recording of their own."""
    given = configs(method, seeds)
    eager = curves(given)
    emulated_graphs.emulate(monkeypatch)
    assert str(curves(given)) == str(eager)  # of strings: one NaN equals another
    (first, wild, third) = eager
    assert wild[-1][2]
    assert len(wild) < len(first) == len(third) == EPOCHS + 1
    of_all, after = len(wild) - 1, EPOCHS + 1 - len(wild)  # epochs
    phases = [2 * epochs - EAGER for epochs in (of_all, after) if 2 * epochs > EAGER]
    recording = emulated_graphs.Emulated
    assert recording.made == len(phases) >= 1
    assert recording.replayed == sum(phases) - len(phases)


def failing(message: str) -> Callable[..., None]:
    def record(work: Callable[[], None], priority: int = 0) -> None:
        raise RuntimeError(message)

    return record


@pytest.mark.parametrize("method", SETTINGS)
def test_steps_run_eagerly_where_a_recording_fails(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = configs(method, (0, 1, 2))
    eager = curves(given)
    emulated_graphs.emulate(monkeypatch)
    monkeypatch.setattr(cuda_graph, "Recording", failing("out of memory"))
    with pytest.warns(RuntimeWarning, match="was not recorded: out of memory"):
        found = curves(given)
    assert str(found) == str(eager)


def test_an_error_of_the_step_itself_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_graphs.emulate(monkeypatch)
    recorded = RecordedSteps(torch.device("cpu"))
    number = torch.zeros(())
    for _ in range(EAGER):
        with pytest.raises(RuntimeError, match="of the step"):
            recorded(lambda: failing("of the step")(lambda: None))
    recorded(lambda: cuda_graph.outside(lambda: number.add_(1)))
    assert number == 1
    assert recorded.failure is None


def test_members_that_stay_get_a_recording_of_their_own() -> None:
    training = Training(configs("muon", (0, 0, 0)), Dataset("curves", *torch.rand(2, 40, 12), ""))
    before = training.recorded
    training.keep([0, 2])
    assert training.recorded is not before
    assert [len(layer["weight"]) for layer in training.layers] == [2] * len(training.layers)
