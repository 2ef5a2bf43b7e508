"""Fixtures that load the framework examples: the tests run the scripts that users read."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from torch_locoprop import LocoProp

UNDER_ADAMW = partial(
    LocoProp, apply="gradient", outer=lambda params: torch.optim.AdamW(params, lr=1e-3)
)
FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A function that loads an example by name, as a new module each time."""
    monkeypatch.syspath_prepend(FOLDER)  # examples import modules of their folder

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(params=["replace", "gradient"])
def apply(
    request: pytest.FixtureRequest, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the example unchanged, and with `apply="gradient"` and AdamW as the outer optimizer."""
    if request.param == "gradient":
        monkeypatch.setattr(module, "LocoProp", UNDER_ADAMW)
