"""How the kernels' work is divided: what can be told without a GPU."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks import parts
from torch_locoprop.kernels import local
from torch_locoprop.kernels.local import Parts

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_parts_are_read_as_they_are_shown() -> None:
    assert parts.parts("128x64x32x8x3") == Parts(128, 64, 32, 8, 3)
    assert parts.shown(Parts(128, 64, 32, 8, 3)) == "128x64x32x8x3"


@pytest.mark.parametrize("text", ["128x64", "128x64x32x8xb", ""])
def test_what_is_no_parts(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="tallxbroadxdeepxwarpsxstages"):
        parts.parts(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(SystemExit, match="no GPU"):
        parts.main([])


@pytest.mark.parametrize(("precision", "key"), [("tf32", "tf32"), ("fp32", "tf32x3")])
def test_the_library_has_the_fastest_on_the_standard_model(precision: str, key: str) -> None:
    content = json.loads((RESULTS / f"parts-h200-{precision}.json").read_text())
    best = min(content["rows"], key=lambda row: row["ms"]["standard"])
    assert parts.parts(best["residual"]) == local.RESIDUAL[key]
    assert parts.parts(best["step"]) == local.STEP[key]
    assert f"| {best['residual']} | {best['step']} |" in parts.markdown(content)


def test_what_was_measured_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    parts.main(["--show", *map(str, sorted(RESULTS.glob("parts-*.json")))])
    out = capsys.readouterr().out
    assert "tf32, NVIDIA H200" in out
    assert "fp32, NVIDIA H200" in out
