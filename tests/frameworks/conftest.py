"""The examples are the documentation of each framework, and what its tests run."""

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
def example() -> Callable[[str], ModuleType]:
    """Loads an example by its name, anew each time."""

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
    """Runs the example as it is, and with its local solutions as gradients for AdamW."""
    if request.param == "gradient":
        monkeypatch.setattr(module, "LocoProp", UNDER_ADAMW)
