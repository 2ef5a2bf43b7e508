"""Growth: one number is varied at a time, formulas equal the base, figures come from a file."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import growth, growth_figure
from benchmarks.growth import Size
from torch_locoprop.study.figures import costs
from torch_locoprop.study.training.config import RunConfig

BASE = Size(batch=10, width=4, depth=4, T=2)
RANGES = {"batch": (5, 10, 20), "width": (4, 8), "depth": (4, 8), "T": (1, 2)}


def by_table_1(config: RunConfig) -> costs.Cost:
    """Return the cost on an imaginary machine: that of Table 1, plus a constant for BackProp."""
    layers, b = costs.layers_of(config.model), config.batch_size
    T = int(config.settings.get("local_steps", 10))
    operations = costs.computation_formula(config.method, layers, b, T)
    numbers = costs.memory_formula(config.method, layers, b)
    return costs.Cost(config.method, numbers, operations, 1 + operations / 1e3, 1 + numbers)


@pytest.fixture
def content(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(costs, "measured", by_table_1)
    points = growth.measured(BASE, RANGES, "cpu", "fp32", max_seconds=60)
    where = {"machine": "a machine", "threads": 1}
    about = {"base": asdict(BASE), "ranges": RANGES, "precision": "fp32", "environment": where}
    return {**about, "points": [asdict(point) for point in points]}


def test_one_thing_is_varied_at_a_time() -> None:
    found = growth.sizes(BASE, RANGES)
    assert found[0] == BASE
    assert len(found) == len(set(found)) == 1 + 2 + 1 + 1 + 1
    for size in found:
        assert sum(a != b for a, b in zip(vars(size).values(), vars(BASE).values())) <= 1  # noqa: B905


def test_a_size_has_as_many_layers_as_it_says() -> None:
    config = Size(batch=3, width=5, depth=6, T=7).config("locoprop-m", "cpu", "fp32")
    assert costs.layers_of(config.model) == [(5, 5)] * 6
    assert (config.batch_size, config.settings["local_steps"]) == (3, 7)


@pytest.mark.parametrize("varied", growth_figure.VARIED)
@pytest.mark.parametrize("measure", growth_figure.MEASURES)
def test_formulas_are_scaled_to_the_base_and_grow_by_themselves(
    content: dict[str, Any], varied: str, measure: str
) -> None:
    for value in growth_figure.values(content, "locoprop-m", varied, measure):
        assert value.measured == pytest.approx(value.formula)


def test_what_takes_too_long_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "measured", by_table_1)
    base = by_table_1(BASE.config("locoprop-m", "cpu", "fp32")).step_ms / 1e3 * growth.STEPS
    points = growth.measured(BASE, RANGES, "cpu", "fp32", max_seconds=1.5 * base)
    left_out = {p.size for p in points if p.method == "locoprop-m" and p.step_ms is None}
    assert left_out == {Size(20, 4, 4, 2), Size(10, 8, 4, 2), Size(10, 4, 8, 2)}
    assert all(p.operations > 0 for p in points if p.method == "locoprop-m")


def test_figure_and_table_come_from_a_file(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    content["points"][-1]["step_ms"] = None
    path = tmp_path / "growth.json"
    path.write_text(json.dumps(content))
    monkeypatch.setattr(growth, "measured", None)
    growth.main(["--show", str(path), "--figure", str(tmp_path / "growth.png")])
    assert {each.name for each in tmp_path.iterdir()} == {"growth.json", "growth.png", "growth.pdf"}
    printed = capsys.readouterr().out
    assert "| batch = 20 |" in printed
    assert "| T = 1 |" in printed


def test_lines_that_coincide_are_both_seen(content: dict[str, Any]) -> None:
    for axes in growth_figure.draw(content).axes:
        measured = [line for line in axes.lines if line.get_linestyle() == "-"]
        first, second = measured
        assert first.get_linewidth() > 2 * second.get_linewidth()
        assert first.get_markersize() > second.get_markersize()
        assert first.get_marker() != second.get_marker()
