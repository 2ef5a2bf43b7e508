"""Steps: whole cycles are timed, tables come from files, missing packages are named."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text

from benchmarks import contestants, step_table, steps, steps_figure

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TINY = ["--models", "6-4-2", "--batch", "5", "--rounds", "1", "--steps", "1", "--device", "cpu"]


@pytest.mark.parametrize(
    ("cycle", "rounds", "steps_given", "expected"),
    [(1, 5, 4, 4), (10, 5, 4, 4), (100, 5, 4, 20), (10, 1, 1, 10), (10, 4, 3, 5), (3, 2, 7, 9)],
    ids=str,
)
def test_all_rounds_together_are_whole_cycles(
    cycle: int, rounds: int, steps_given: int, expected: int
) -> None:
    taken = steps.steps_in_a_round(cycle, rounds, steps_given)
    assert taken == expected
    assert taken >= steps_given
    assert rounds * taken % cycle == 0


def test_a_renewal_counts_by_its_share_and_not_by_chance() -> None:
    def typical(cycle: int) -> float | None:
        contestant = contestants.Contestant("x", lambda *_: contestants.Ready(print), cycle=cycle)
        row = steps.Row("x", "x")
        turns = steps.Turns(row, contestant, "cpu", contestants.Ready(print), None)
        return turns.typical([1.0] * 9 + [91.0])

    assert (typical(1), typical(10)) == (1.0, 10.0)


def test_a_run_writes_what_its_table_is_made_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deeper" / "steps.json"
    keys = ["products", "sgd", "locoprop-m", "locoprop-m-eager", "locoprop-s", "per-layer"]
    steps.main([*TINY, "--methods", *keys, "adamw", "rmsprop", "--out", str(path)])
    printed = capsys.readouterr().out
    rows = {row["key"]: row for row in json.loads(path.read_text())["models"]["6-4-2"]}
    assert "locoprop-m-eager" not in rows  # a row for GPUs only
    assert rows["products"]["counted_gflop"] == pytest.approx(rows["products"]["needed_gflop"])
    assert rows["sgd"]["counted_gflop"] == pytest.approx(rows["sgd"]["needed_gflop"])
    for key in ("sgd", "locoprop-m", "locoprop-s", "per-layer", "adamw", "rmsprop"):
        row = rows[key]
        assert row["loop_ms"] >= row["optimizer_ms"] > 0
        assert row["graph_ms"] is None
        assert row["peak_mib"] > 0
    # The table of a file must not measure anything.
    monkeypatch.setattr(steps, "measured", None)
    steps.main(["--show", str(path)])
    assert capsys.readouterr().out.strip().endswith(printed.strip())


@pytest.mark.parametrize(
    ("key", "package", "advice"),
    [
        ("pypi", "locoprop", "pip install locoprop==0.1.0"),
        ("soap", "pytorch_optimizer", 'pip install "torch-locoprop[peers]"'),
    ],
)
def test_what_is_not_installed_says_how_to_be(
    key: str, package: str, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    steps.main([*TINY, "--methods", "sgd", key])
    printed = capsys.readouterr().out
    assert f"{contestants.get(key).name} (not installed) | – |" in printed
    assert advice in printed


def row(key: str, **known: Any) -> dict[str, Any]:
    empty = vars(steps.Row(key, key)).copy()
    return {**empty, **known}


def content(*rows: dict[str, Any]) -> dict[str, Any]:
    about = {"batch": 7, "local_steps": 10, "precision": "tf32"}
    where = {"machine": "a machine", "threads": 2, "torch": "2"}
    return {"models": {"standard": list(rows)}, **about, "environment": where}


def test_ratios_are_to_backprop_and_to_the_products() -> None:
    text = step_table.markdown(
        content(
            row("products", loop_ms=100.0),
            row("sgd", loop_ms=50.0),
            row(
                "locoprop-m",
                loop_ms=125.0,
                quartiles_ms=[120.1, 130.9],
                optimizer_ms=75.0,
                needed_gflop=25.0,
                peak_mib=3.0,
            ),
        )
    )
    assert "| locoprop-m | 125 | 120–131 | 75 | 2.50 | 1.25 | 25 | – | 200 | 3 |" in text
    assert "graph, ms" not in text


def test_a_gpu_has_columns_for_graphs_and_its_speed_is_by_the_graph() -> None:
    text = step_table.markdown(
        content(
            row("products", loop_ms=9.0, graph_ms=1.0),
            row("sgd", loop_ms=6.0, graph_ms=0.5),
            row("locoprop-m", loop_ms=12.0, graph_ms=2.0, needed_gflop=100.0),
            row("soap", loop_ms=18.0),
        )
    )
    assert "| locoprop-m | 12 | – | – | 2.00 | 1.33 | 2 | 4.00 | 2.00 | 100 | – | 50 | – |" in text
    assert "| soap | 18 | – | – | 3.00 | 2.00 | – | – | – | – | – | – | – |" in text


@pytest.mark.skipif(not RESULTS.is_dir(), reason="no results in this checkout")
@pytest.mark.parametrize("path", sorted(RESULTS.glob("steps-*.json")), ids=lambda path: path.stem)
def test_committed_results_have_their_tables(path: Path, capsys: Any) -> None:
    steps.main(["--show", str(path)])
    assert "| LocoProp-M" in capsys.readouterr().out


def test_the_committed_results_are_drawn(tmp_path: Path) -> None:
    for path in sorted(RESULTS.glob("steps-*.json")):
        steps.main(["--show", str(path), "--figure", str(tmp_path / f"{path.stem}.png")])
        content = json.loads(path.read_text())
        texts = [text.get_text() for text in steps_figure.draw(content).findobj(Text)]
        for row in (row for rows in content["models"].values() for row in rows):
            assert row["name"] in texts
            for ms in (row["loop_ms"], row["graph_ms"]):
                assert ms is None or f"{ms:.3g}" in texts
    assert len(list(tmp_path.iterdir())) == 2 * len(list(RESULTS.glob("steps-*.json"))) > 0


def test_a_figure_is_of_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        steps.main(["--show", "one.json", "other.json", "--figure", "both.png"])
    assert "one file" in capsys.readouterr().err
