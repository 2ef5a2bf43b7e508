"""State dicts of earlier versions, kept as files, are loaded and trained on as in that version.

A version that cannot do so has to refuse them with a sentence; the test then expects that sentence.
``tests/data/make_state_dicts.py`` has written the files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import assert_close, batch, cross_entropy, network, weights
from promises.optimizer_cases import ALL, Case

FILES = sorted((Path(__file__).parents[1] / "data").glob("state_dicts_*.pt"))


def saved(file: Path) -> dict[str, Any]:
    """Return the states in a file, read as users read theirs."""
    states: dict[str, Any] = torch.load(file, weights_only=True)
    return states


def test_every_version_has_a_file() -> None:
    versions = [re.sub(r"state_dicts_(.*)\.pt", r"\1", file.name) for file in FILES]
    assert "0.1.0" in versions
    for file in FILES:
        assert saved(file).keys() == {case.name for case in ALL}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_training_goes_on_from_an_earlier_version(case: Case, file: Path) -> None:
    states = saved(file)[case.name]
    model = network(seed=5)
    opt = case.make(model)
    model.load_state_dict(states["model"])
    opt.load_state_dict(states["optimizer"])
    for seed in range(3, 5):
        x = batch(8, 6, seed=seed)
        opt.zero_grad()
        cross_entropy(model(x), x[:, :3]).backward()
        opt.step()
    assert_close(weights(model), states["weights after two more steps"], 1e-9)
