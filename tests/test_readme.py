"""The README's example runs as it stands."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

README = Path(__file__).parents[1] / "README.md"


def test_the_example_trains_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The block is run with what a reader has already: a model, its data and its loss."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    images, labels = torch.rand(64, 20), torch.randint(0, 4, (64,))
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4))
    criterion = nn.CrossEntropyLoss()
    before = [parameter.clone() for parameter in model.parameters()]
    names = {
        "model": model,
        "criterion": criterion,
        "loader": list(zip(images.split(16), labels.split(16), strict=True)),
    }
    exec(compile(blocks[0], str(README), "exec"), names)
    for old, new in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, new)
    printed = capsys.readouterr().out
    assert "tanh" in printed
    assert "softmax" in printed
