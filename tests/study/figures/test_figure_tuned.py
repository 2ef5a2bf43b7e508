"""Settings of a search replace those of the matching lines of a figure."""

from dataclasses import replace
from typing import Any

import small

from torch_locoprop.study.figures import catalog
from torch_locoprop.study.figures.tuned import is_used, with_tuned
from torch_locoprop.study.training.config import RunConfig


def tuned(method: str, task: dict[str, Any] | None = None, **settings: Any) -> RunConfig:
    return RunConfig(method, settings, **{**small.TASK, **(task or {}), "epochs": 7, "seed": 5})


def settings(name: str, *configs: RunConfig) -> dict[str, dict[str, Any]]:
    """The settings of the figure's lines, by label; nothing else of the configuration changes."""
    figure = catalog.loss_figure(name, small.SCALE)
    after = with_tuned(figure, configs)
    for old, new in zip(figure.configs, after.configs, strict=True):
        assert replace(new, settings=old.settings) == old
    return {each.label: each.config.settings for each in after.panels[0].series}


def test_settings_are_taken_where_method_and_task_agree() -> None:
    found = settings("curves", tuned("adam", lr=0.25))
    assert found["Adam"]["lr"] == 0.25
    before = settings("curves")
    assert {**found, "Adam": before["Adam"]} == before
    for other in ({"transfer": "relu"}, {"model": "784-7-3"}, {"batch_size": 21}):
        assert settings("curves", tuned("adam", other, lr=0.25)) == before
        assert not is_used(tuned("adam", other), catalog.loss_figure("curves", small.SCALE).panels)


def test_another_interval_keeps_its_own_but_the_same_one_goes_first() -> None:
    one = tuned("kfac@9", lr=0.5)
    found = settings("curves", one)["K-FAC@2"]
    assert (found["lr"], found["every"]) == (0.5, 2)
    for order in ((one, tuned("kfac@2", lr=0.75)), (tuned("kfac@2", lr=0.75), one)):
        assert settings("curves", *order)["K-FAC@2"]["lr"] == 0.75


def test_local_iterations_stay_and_solvers_do_not_mix() -> None:
    found = settings("s-vs-m", tuned("locoprop-m", gamma=3.0))
    assert [found[f"LocoProp-M, T = {t}"]["local_steps"] for t in (1, 5, 50)] == [1, 5, 50]
    assert found["LocoProp-M, T = 50"]["gamma"] == 3.0
    assert found["LocoProp-S, T = 50"]["gamma"] != 3.0
    found = settings("inner-solvers", tuned("locoprop-m", solver="adam", gamma=3.0))
    assert [label for label, each in found.items() if each["gamma"] == 3.0] == ["local Adam"]
