"""The README's example runs as it stands."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_locoprop import LocoProp

README = Path(__file__).parents[2] / "README.md"


class Writer:
    """What the README uses of TensorBoard's."""

    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.steps.setdefault(name, []).append(step)


def run_block(
    number: int, *imports: str
) -> tuple[nn.Module, list[torch.Tensor], dict[str, object]]:
    """Run a block with what a reader has already: a model, its data, its loss, and imports."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    images, labels = torch.rand(64, 20), torch.randint(0, 4, (64,))
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    names: dict[str, object] = {
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "loader": list(zip(images.split(16), labels.split(16), strict=True)),
        "writer": Writer(),
    }
    exec("\n".join(imports), names)
    exec(compile(blocks[number], str(README), "exec"), names)
    return model, before, names


def test_the_example_trains_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    model, before, _ = run_block(0)
    for old, new in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, new)
    printed = capsys.readouterr().out
    assert "tanh" in printed
    assert "softmax" in printed


def test_the_example_of_another_optimizer_trains_a_model() -> None:
    model, before, names = run_block(
        1,
        "import torch",
        "from torch_locoprop import LocoProp",
        "from torch_locoprop.solvers import Exact",
    )
    opt = names["opt"]
    assert isinstance(opt, LocoProp)
    nn.functional.cross_entropy(model(torch.rand(8, 20)), torch.zeros(8).long()).backward()
    opt.step()
    for old, new in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, new)


def test_the_example_of_diagnostics_prints_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    *_, names = run_block(2, "from torch_locoprop import LocoProp")
    writer = names["writer"]
    assert isinstance(writer, Writer)
    assert writer.steps["cosine/0"] == writer.steps["cosine/2"] == [0, 1, 2, 3]
    said = re.findall(r"^    ((?:layer|\d) .*)$", README.read_text(), re.MULTILINE)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == said[0].split()
    assert [line.split()[0] for line in printed] == [line.split()[0] for line in said]
