"""Every figure of the catalog has valid configurations and distinct lines."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import Optimizer

from torch_locoprop.study import methods
from torch_locoprop.study.figures import catalog
from torch_locoprop.study.figures.catalog import Scale
from torch_locoprop.study.figures.protocol import PROTOCOL
from torch_locoprop.study.figures.quick import QUICK
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.run_result import result_of

RESULTS = Path(__file__).parents[3] / "results"
LOSSES = catalog.LOSS_FIGURES
SCALES = {"paper": PROTOCOL, "quick": QUICK}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("scale", SCALES)
def test_lines_of_a_panel_differ_in_label_run_and_look(name: str, scale: str) -> None:
    figure = catalog.loss_figure(name, SCALES[scale])
    assert figure.panels
    for panel in figure.panels:
        runs = [json.dumps(each.config.to_dict(), sort_keys=True) for each in panel.series]
        labels = [each.label for each in panel.series]
        looks = [(each.painted_as, each.variant) for each in panel.series]
        for distinct in (runs, labels, looks):
            assert len(set(distinct)) == len(panel.series)


def test_the_names_are_those_of_the_study() -> None:
    assert len(set(catalog.NAMES)) == len(catalog.NAMES)
    for name in ("first-order", "s-vs-m", "inner-solvers", "standard", "wide", "deep", "costs"):
        assert catalog.entry_of(name).title
    with pytest.raises(ValueError, match="Did you mean 'standard'"):
        catalog.entry_of("standart")


PAPER = {  # data set, model, transfer, batch size
    "standard": ("mnist", "standard", "tanh", 1000),
    "wide": ("mnist", "wide", "tanh", 1000),
    "deep": ("mnist", "deep", "tanh", 1000),
    "relu": ("mnist", "standard", "relu", 1000),
    "fashion-mnist": ("fashion-mnist", "standard", "tanh", 1000),
    "curves": ("curves", "standard", "tanh", 1000),
    "batch-100": ("mnist", "standard", "tanh", 100),
}


def assert_protocol(task: str, configs: Iterable[RunConfig]) -> None:
    """The task, epochs, schedule and weight decay of each run are those that the paper states."""
    for config in configs:
        own = (config.dataset, config.model, config.transfer, config.batch_size)
        assert own == PAPER[task]
        assert (config.epochs, config.warmup_epochs, config.weight_decay) == (100, 5, 1e-5)
        assert config.schedule == "paper"


@pytest.mark.parametrize("name", PAPER)
def test_the_protocol_is_the_papers(name: str) -> None:
    figure = catalog.loss_figure(name, PROTOCOL)
    one, other = figure.panels
    assert one.series == other.series
    if name in ("standard", "wide", "deep"):
        assert [(panel.loss, panel.by) for panel in figure.panels] == [
            ("train_loss", "epoch"),
            ("train_loss", "seconds"),
        ]
        assert len(figure.timed) == len(figure.configs)
    else:
        assert [(panel.loss, panel.by) for panel in figure.panels] == [
            ("train_loss", "epoch"),
            ("test_loss", "epoch"),
        ]
    assert_protocol(name, figure.configs)
    drawn = {config.method.partition("@")[0] for config in figure.configs}
    assert {"adam", "rmsprop", "kfac", "shampoo", "locoprop-s", "locoprop-m"} <= drawn


def test_first_order_methods_are_the_papers() -> None:
    (panel,) = catalog.loss_figure("first-order", PROTOCOL).panels
    assert [each.config.method for each in panel.series] == [
        *("sgd", "momentum", "nesterov", "adagrad", "adam", "rmsprop"),
    ]
    assert_protocol("standard", [each.config for each in panel.series])


def test_s_against_m_at_four_numbers_of_iterations() -> None:
    (panel,) = catalog.loss_figure("s-vs-m", PROTOCOL).panels
    found = {(s.config.method, s.config.settings["local_steps"]) for s in panel.series}
    assert found == {(m, t) for m in ("locoprop-s", "locoprop-m") for t in (1, 5, 10, 50)}


def test_inner_solvers_are_locoprop_m_with_each() -> None:
    (panel,) = catalog.loss_figure("inner-solvers", QUICK).panels
    assert {s.config.method for s in panel.series} == {"locoprop-m"}
    assert [s.config.settings["solver"] for s in panel.series] == list(QUICK.solvers)


def test_test_losses_have_a_panel_for_each_task() -> None:
    figure = catalog.loss_figure("test-losses", QUICK)
    assert [panel.task for panel in figure.panels] == list(catalog.TEST_LOSSES)
    assert {panel.loss for panel in figure.panels} == {"test_loss"}


@pytest.mark.parametrize("name", LOSSES)
def test_quick_is_embedded_data_on_small_models(name: str) -> None:
    figure = catalog.loss_figure(name, QUICK)
    assert "quick" in figure.note
    for config in figure.configs:
        assert config.dataset == "curves"
        assert config.epochs <= 20
        assert max(int(width) for width in config.model.split("-")[1:]) <= 400


def test_every_method_of_a_quick_figure_has_settings_for_it() -> None:
    """The settings of the paper's protocol do not train small models on few images."""
    for name in LOSSES:
        for config in catalog.loss_figure(name, QUICK).configs:
            assert methods.get(config.method).quick


def test_a_method_at_k_looks_the_same_in_every_figure() -> None:
    def looks(scale: Scale) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for task in scale.tasks:
            for each in catalog.loss_figure(task, scale).panels[0].series:
                found.setdefault(each.config.method, set()).add(each.variant)
        return found

    for variants in (looks(PROTOCOL), looks(QUICK)):
        assert all(len(same) == 1 for same in variants.values())
    assert looks(PROTOCOL)["kfac@1"] == {0}
    assert looks(PROTOCOL)["kfac@10"] == {1}


def own_method(**given: Any) -> None:
    """Register a method that is never built, with three numbers and local iterations."""

    def build(model: nn.Module, settings: methods.Settings) -> Optimizer:
        raise NotImplementedError

    settings = {"lr": 1.0, "gamma": 1.0, "eps": 1.0, "local_steps": 10}
    methods.register(methods.Method("mine", build, settings, "untuned", **given))


@pytest.mark.usefixtures("own_methods")
def test_settings_for_a_number_of_iterations_override_those_of_a_task() -> None:
    own_method(
        tasks={
            "deep": methods.TaskSettings({"lr": 2.0, "gamma": 2.0}, "two"),
            methods.iterations(3): methods.TaskSettings({"lr": 3.0}, "three"),
        }
    )
    for steps, lr, origin in ((3, 3.0, "three"), (4, 2.0, "two")):
        series = PROTOCOL.series("deep", "mine", steps)
        found = {name: series.config.settings[name] for name in ("lr", "gamma", "eps")}
        assert found == {"lr": lr, "gamma": 2.0, "eps": 1.0}
        assert series.config.settings["local_steps"] == steps
        assert series.label == f"mine, T = {steps}"
        assert (series.origin, series.fixed) == (origin, {"local_steps": steps})
    usual = PROTOCOL.series("standard", "mine")
    assert usual.config.settings == methods.get("mine").settings
    assert usual.origin == ""


@pytest.mark.usefixtures("own_methods")
def test_quick_settings_of_one_task_override_those_of_all() -> None:
    own_method(quick={"lr": 2.0, "eps": 2.0}, quick_tasks={"relu": {"lr": 3.0}})
    rates = {task: QUICK.series(task, "mine").config.settings for task in QUICK.tasks}
    assert {task for task, own in rates.items() if own["lr"] == 3.0} == {"relu"}
    assert {own["lr"] for own in rates.values()} == {2.0, 3.0}
    assert {(own["gamma"], own["eps"]) for own in rates.values()} == {(1.0, 2.0)}
    assert "at this scale" in QUICK.series("deep", "mine").origin
    assert PROTOCOL.series("deep", "mine").config.settings["lr"] == 1.0


def test_one_iteration_of_s_and_of_m_is_one_method_with_one_setting() -> None:
    s, m = (PROTOCOL.series("standard", method, 1) for method in ("locoprop-s", "locoprop-m"))
    assert s.config.settings == m.config.settings
    assert s.origin == m.origin != ""


@pytest.mark.skipif(not RESULTS.is_dir(), reason="a source distribution has no runs")
@pytest.mark.parametrize("name", LOSSES)
def test_the_committed_runs_of_locoprop_are_those_of_the_protocol(name: str) -> None:
    """A change of settings without a new run would remove a line from a figure."""

    def anywhere(config: RunConfig) -> RunConfig:
        return replace(config, device="cpu", precision="fp32")

    committed = [
        anywhere(result_of(path.parent).config) for path in RESULTS.glob("*/locoprop*/config.json")
    ]
    planned = catalog.loss_figure(name, PROTOCOL).configs
    for config in planned:
        if config.method.startswith("locoprop"):
            assert anywhere(config) in committed
