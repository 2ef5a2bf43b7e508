"""Tile sizes of the kernels: the parts of the benchmark that need no GPU."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks import parts
from torch_locoprop.fast.triton import matrix_products
from torch_locoprop.fast.triton.matrix_products import TileSizes

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_parts_are_read_as_they_are_shown() -> None:
    assert parts.parts("128x64x32x8x3") == TileSizes(128, 64, 32, 8, 3)
    assert parts.shown(TileSizes(128, 64, 32, 8, 3)) == "128x64x32x8x3"


@pytest.mark.parametrize("text", ["128x64", "128x64x32x8xb", ""])
def test_what_is_no_parts(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="heightxwidthxdepthxwarpsxstages"):
        parts.parts(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(SystemExit, match="needs a GPU"):
        parts.main([])


def test_the_library_has_the_fastest() -> None:
    content = json.loads((RESULTS / "parts-h200-tf32.json").read_text())
    rows = content["rows"]
    least = {model: min(row["ms"][model] for row in rows) for model in rows[0]["ms"]}
    best = min(rows, key=lambda row: sum(row["ms"][model] / least[model] for model in least))
    assert parts.parts(best["residual"]) == matrix_products.RESIDUAL["tf32"]
    assert parts.parts(best["step"]) == matrix_products.STEP["tf32"]
    assert f"| {best['residual']} | {best['step']} |" in parts.markdown(content)


def test_what_was_measured_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    parts.main(["--show", *map(str, sorted(RESULTS.glob("parts-*.json")))])
    assert "tf32, NVIDIA H200" in capsys.readouterr().out
