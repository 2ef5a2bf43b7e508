"""The README's example learns without changes, and its table matches the committed runs."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    accuracy, *summary = capsys.readouterr().out.splitlines()
    (number,) = re.findall(r"tensor\(([\d.]+)\)", accuracy)
    assert float(number) > 0.97
    assert [line.split()[3] for line in summary[2:5]] == ["tanh", "tanh", "softmax"]


def test_the_example_has_the_constructors_defaults() -> None:
    made = re.findall(r"LocoProp\(model.*\)$", README, re.MULTILINE)
    assert made == ["LocoProp(model, loss_fn=criterion)"]


@pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="a source distribution has no runs")
def test_the_table_is_made_of_the_runs() -> None:
    spec = importlib.util.spec_from_file_location(
        "results_table_of_the_readme", ROOT / "benchmarks" / "results_table.py"
    )
    assert spec is not None
    assert spec.loader is not None
    results_table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(results_table)
    whole = results_table.table(ROOT / "results" / "mnist-tanh-standard").splitlines()
    shown = [line for line in README.splitlines() if line.startswith("|")]
    assert shown == [line for line in whole if line in shown]
    assert f"all {len(whole) - 2} rows" in README
