"""The table of costs: formulas by hand, memory of known work, and reused measurements."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from torch import nn

from torch_locoprop.study.figures import cost_figure, cost_table, costs
from torch_locoprop.study.figures.costs import Cost
from torch_locoprop.study.figures.memory import peak_bytes
from torch_locoprop.study.figures.protocol import PROTOCOL
from torch_locoprop.study.methods import TaskSettings
from torch_locoprop.study.training.config import RunConfig

LAYER = [(3, 5)]


@pytest.mark.parametrize(
    ("method", "memory", "computation"),
    [
        ("sgd", 0, 0),
        ("adam", 15, 15),
        ("rmsprop", 15, 15),
        ("locoprop-m", 15 + 7 * 8, 7 * 10 * 15),
        ("locoprop-s", 15 + 7 * 8, 7 * 10 * 15),
        ("shampoo", 9 + 25, 27 + 125),
        ("shampoo@4", 9 + 25, (27 + 125) / 4),
        ("kfac", 9 + 25, 7 * (9 + 25) + (27 + 125) + 7 * 15),
        ("kfac@4", 9 + 25, 7 * (9 + 25) + (27 + 125) / 4 + 7 * 15),
    ],
)
def test_the_formulas_for_a_layer_of_three_inputs_and_five_outputs(
    method: str, memory: float, computation: float
) -> None:
    """Batch size 7, ten local iterations; the numbers are the paper's Table 1 by hand."""
    assert costs.memory_formula(method, LAYER, 7) == memory
    assert costs.computation_formula(method, LAYER, 7, 10) == pytest.approx(computation)
    twice = costs.computation_formula(method, LAYER * 2, 7, 10)
    assert twice == pytest.approx(2 * computation)


def test_layers_of_the_autoencoder() -> None:
    assert costs.layers_of("784-20-5") == [(784, 20), (20, 5), (5, 20), (20, 784)]
    weights = sum(a * b for a, b in costs.layers_of("standard"))
    assert weights == 2 * (784_000 + 500_000 + 125_000 + 7_500)


def test_every_method_of_the_table_has_its_formulas() -> None:
    for method in costs.method_names():
        assert "Σ" in costs.row_of(method).memory or method == costs.BASELINE
    with pytest.raises(ValueError, match="nesterov has no row"):
        costs.row_of("nesterov")


def test_memory_is_what_is_alive_at_a_time() -> None:
    kept: list[torch.Tensor] = []
    before = torch.ones(1000)

    def work() -> None:
        kept.append(torch.zeros(1000))  # 4000 bytes that stay
        for _ in range(5):
            torch.ones(500).add_(1)  # 2000 bytes at a time
        before.view(10, 100).mul_(2)  # nothing new
        kept[0][10:].add_(1)

    assert peak_bytes(work, "cpu") == 6000


def test_memory_sees_the_backward_pass() -> None:
    layer = nn.Linear(100, 50, bias=False)
    x = torch.ones(10, 100)
    held = peak_bytes(lambda: layer(x).sum().backward(), "cpu")
    gradient = 100 * 50 * 4
    assert gradient <= held < 1.5 * gradient


def test_adam_keeps_two_numbers_a_weight_that_sgd_does_not() -> None:
    def peak(method: str) -> float:
        return costs.measured(RunConfig(method, model="784-30-5", batch_size=10)).peak_mib

    weights = sum(a * b for a, b in costs.layers_of("784-30-5")) * 4 / 2**20
    # Two averages that stay, and what a step computes on the way.
    assert 2 * weights <= peak("adam") - peak("sgd") < 6 * weights


def test_the_table_shows_what_is_beyond_backprop() -> None:
    rows = cost_table.rows(
        [Cost("sgd", 0, 0, 10.0, 5.0), Cost("kfac@10", 2**20, 1.5e9, 32.0, 25.5)]
    )
    assert rows[0][0] == "BackProp (SGD)"
    assert rows[0][2:4] == ["–", "–"]
    assert rows[1][0] == "K-FAC@10"
    assert rows[1][2:4] == ["4.0", "20.5"]
    assert rows[1][5:] == ["3", "22", "32"]
    faster = cost_table.rows([Cost("sgd", 0, 0, 10.0, 5.0), Cost("adam", 1, 1, 9.8, 6.0)])
    assert faster[1][6:] == ["≈ 0", "9.8"]


def test_headers_are_aligned_with_their_columns() -> None:
    table = [Cost("sgd", 0, 0, 10.0, 5.0), Cost("kfac@10", 2**20, 1.5e9, 32.0, 25.5)]
    figure = cost_table.draw(table, "title", "subtitle", ["note"])
    figure.draw_without_rendering()
    cells = figure.axes[0].tables[0].get_celld()
    for column, name in enumerate(cost_table.HEAD):
        boxes = [cells[row, column].get_text().get_window_extent() for row in range(3)]
        left = name == "method" or "formula" in name
        edges = [box.x0 if left else box.x1 for box in boxes]
        assert max(edges) - min(edges) < 1, name  # pixels


def test_where_costs_were_measured_is_in_the_picture_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "measured", lambda config: Cost(config.method, 1.0, 2.0, 3.0, 4.0))
    shown: list[str] = []
    draw = cost_table.draw
    monkeypatch.setattr(cost_table, "draw", lambda *args: shown.extend(args[-1]) or draw(*args))
    cost_figure.make_costs(small.order(tmp_path), str)
    assert not any("Made by" in line for line in shown)
    assert any("beyond BackProp" in line for line in shown)
    cost_figure.make_costs(small.order(tmp_path, provenance=True), str)
    assert any("Made by" in line for line in shown)


def test_costs_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def measured(config: RunConfig) -> Cost:
        calls.append(config.method)
        return Cost(config.method, 1.0, 2.0, 3.0, 4.0)

    monkeypatch.setattr(costs, "measured", measured)
    said: list[str] = []

    def make(**values: Any) -> Any:
        return cost_figure.make_costs(small.order(tmp_path, **values), said.append)

    nothing = make(only_existing=True)
    assert nothing.files == ()
    assert "there are no measurements" in said[-1]
    made = make()
    assert calls == list(costs.method_names())
    assert [path.name for path in made.files] == ["costs.png", "costs.pdf", "costs.md"]
    assert made.files[2].read_text() == made.text
    assert "| LocoProp-M |" in made.text
    assert all(path.stat().st_size > 400 for path in made.files)
    assert make().text == made.text
    assert make(only_existing=True).text == made.text
    assert len(calls) == len(costs.method_names())
    make(without=("shampoo@1",))  # another table
    assert len(calls) == 2 * len(costs.method_names()) - 1
    assert "with other methods or settings. It is kept" in "\n".join(said)


def test_a_measurement_of_another_environment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"machine": "m1", "threads": 2, "torch": "2.9"}
    calls: list[str] = []

    def measured(config: RunConfig) -> Cost:
        calls.append(config.method)
        return Cost(config.method, 1.0, 2.0, here["threads"], 4.0)

    monkeypatch.setattr(costs, "measured", measured)
    monkeypatch.setattr(cost_figure, "environment", lambda device: dict(here))
    said: list[str] = []

    def make(**values: Any) -> Any:
        return cost_figure.make_costs(small.order(tmp_path, **values), said.append)

    make()
    (committed,) = (tmp_path / "runs" / "costs").iterdir()
    before = committed.read_bytes()
    here["threads"] = 1
    assert "m1, 2 threads, fp32, torch 2.9." in make(only_existing=True).text
    assert not said[len(costs.method_names()) :]
    difference = "was measured in another environment (threads is 2 there and 1 here)"
    said.clear()
    made = make()
    assert said[0].startswith(f"costs: {committed} {difference}. It is kept; new measurements")
    assert committed.read_bytes() == before
    (new,) = set(committed.parent.iterdir()) - {committed}
    assert said[0].endswith(f"go to {new}.")
    assert make(only_existing=True).text == made.text

    def at_other_rates(*of: Any) -> TaskSettings:
        return TaskSettings({**small.SCALE.settings_of(*of).settings, "lr": 0.5})

    other_rates = replace(small.SCALE, settings_of=at_other_rates)
    assert make(scale=other_rates).text == made.text
    assert len(calls) == 2 * len(costs.method_names())


def test_no_cost_depends_on_a_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = lambda config: Cost(config.method, 1.0, 2.0, 3.0, 4.0)  # noqa: E731
    monkeypatch.setattr(costs, "measured", measured)
    made = cost_figure.make_costs(small.order(tmp_path), str)
    (path,) = (tmp_path / "runs" / "costs").iterdir()
    stored = json.loads(path.read_text())
    for config in stored["configs"]:
        config["settings"]["lr"] *= 2
    path.write_text(json.dumps({**stored, "remark": "Twice the rates."}))
    monkeypatch.setattr(costs, "measured", None)
    again = cost_figure.make_costs(small.order(tmp_path), str)
    assert again.text == made.text.replace("whole step.\n", "whole step.\nTwice the rates.\n")
    for other in ({"environment": None}, {"configs": stored["configs"][1:]}):
        changed = {name: value for name, value in {**stored, **other}.items() if value}
        path.write_text(json.dumps(changed))
        assert cost_figure.make_costs(small.order(tmp_path, only_existing=True), str).files == ()


RESULTS = Path(__file__).parents[3] / "results"


@pytest.mark.skipif(not RESULTS.is_dir(), reason="a source distribution has no runs")
def test_the_committed_table_can_be_drawn(tmp_path: Path) -> None:
    committed = {"scale": PROTOCOL, "folders": (RESULTS,), "without": (), "only_existing": True}
    text = cost_figure.make_costs(small.order(tmp_path, **committed), str).text
    table, _, _ = text.partition("Made by")
    assert table
    assert table == (RESULTS / "figures" / "costs.md").read_text().partition("Made by")[0]
