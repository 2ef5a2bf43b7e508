"""The script that compares the spectral step with and without a step of their own for biases."""

from pathlib import Path

import pytest

from benchmarks import spectral_biases

PUBLISHED = Path("benchmarks/results/spectral-biases-h200.json")


def test_cases_are_trained_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "biases.json"
    common = ["--device", "cpu", "--dataset", "curves", "--model", "784-9-3", "--epochs", "1"]
    with pytest.MonkeyPatch.context() as context:
        few = spectral_biases.datasets.some_curves(40, 10, 0)
        context.setattr(spectral_biases.datasets, "load", lambda name: few)
        spectral_biases.main(
            [*common, "--cases", "0.1:0.8:0", "0.1:0.8:1", "0.1:0.8:1:2", "--out", str(out)]
        )
    printed = capsys.readouterr().out
    assert printed.count("784-9-3") == 3
    assert "| 784-9-3 | 0.1 | 0.8 | 1 | 2 |" in printed
    spectral_biases.main(["--show", str(out)])
    assert capsys.readouterr().out == printed


def test_the_published_table_has_both_models(capsys: pytest.CaptureFixture[str]) -> None:
    spectral_biases.main(["--show", str(PUBLISHED)])
    printed = capsys.readouterr().out
    assert "| standard | 0.015 | 0.85 | 1 | 0 | 49.96 |" in printed
    assert "| deep | 0.005 | 0.9 | 1 | 0 | 48.68 |" in printed


def test_without_cases_it_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        spectral_biases.main([])
    assert "Give --cases" in capsys.readouterr().err
