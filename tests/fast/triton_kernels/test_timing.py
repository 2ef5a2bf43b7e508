"""`benchmarks.kernels` times the library's own iteration, and its table shows the rates."""

from dataclasses import replace

import pytest
import torch

from benchmarks import kernels
from torch_locoprop.solvers.first_order import RmsProp


def test_an_iteration_is_a_residual_and_a_step(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, rate = kernels.Shape(2, 5, 6, rows=9), 1e-3
    monkeypatch.setattr(kernels, "NUMBERS", replace(kernels.NUMBERS, lr=rate))
    problem, at = kernels.iteration(shape, device)
    states = {
        name: {"square": moving.square.clone(), "momentum": moving.momentum.clone()}
        for name, moving in at.items()
    }
    rows = kernels.ByRows(problem, at)
    moved = {name: problem.start[name] + moving.tensor for name, moving in at.items()}
    gradient = problem.gradient(moved)
    rows.residual()
    rows.step(kernels.NUMBERS, kernels.Step(1.0, None))
    for name, moving in at.items():
        change, _ = RmsProp().step(gradient[name], states[name], kernels.NUMBERS)
        expected = moved[name] - change - problem.start[name]
        torch.testing.assert_close(moving.tensor, expected, rtol=1e-4, atol=1e-6)
    works = kernels.works(shape, device)
    assert list(works) == ["residual", "its product by cuBLAS", "step", "as many reads and writes"]
    assert works["its product by cuBLAS"]().shape == (2, 5, 9)
    works["as many reads and writes"]()


def test_the_table() -> None:
    content = {
        "layers": {"one": {"gflop": 2.0, "us": {"residual": 20.0, "as many reads": 4.0}}},
        "precision": "tf32",
        "environment": {"machine": "some GPU"},
    }
    text = kernels.markdown(content)
    assert "| one | 20.0 (100) | 4.0 |" in text
    assert "some GPU" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(SystemExit, match="no GPU"):
        kernels.main([])
