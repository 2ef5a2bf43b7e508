"""Names: a type checker knows them, an error suggests the closest one, ``repr`` shows settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, get_args, get_type_hints

import pytest
import torch
from cases import batch, network
from torch import nn

from torch_locoprop import Guards, LocoProp
from torch_locoprop.config.presets import PRESETS, PresetName
from torch_locoprop.config.settings import (
    SETTINGS,
    CapBy,
    LocalDecay,
    RegularizerName,
    Settings,
    SolverName,
    VariantName,
)
from torch_locoprop.paper.fisher import PREDICTIVE
from torch_locoprop.paper.regularizers import REGULARIZERS
from torch_locoprop.paper.variants import VARIANTS
from torch_locoprop.recording.loss_inspection import OutputTransfer
from torch_locoprop.reporting.diagnostics import Diagnostics, LayerDiagnostics
from torch_locoprop.solvers import LOCAL_DECAYS, SOLVERS


@pytest.mark.parametrize(
    ("literal", "known"),
    [
        (VariantName, VARIANTS),
        (SolverName, SOLVERS),
        (RegularizerName, REGULARIZERS),
        (PresetName, PRESETS),
        (LocalDecay, LOCAL_DECAYS),
        (OutputTransfer, PREDICTIVE),
    ],
    ids=["variant", "solver", "regularizer", "preset", "local_decay", "output_transfer"],
)
def test_type_checkers_know_the_names_that_there_are(literal: Any, known: Iterable[str]) -> None:
    assert sorted(get_args(literal)) == sorted(known)


def test_names_in_the_signature_are_literals() -> None:
    hints = get_type_hints(Settings)
    shown = inspect.signature(LocoProp).parameters
    for name in SETTINGS:
        if name != "lr":
            assert shown[name].annotation == hints[name]
        assert hints.get(name) is not str
    assert VariantName in get_args(hints["variant"])
    assert SolverName in get_args(hints["solver"])
    assert get_type_hints(Guards)["cap_by"] == CapBy
    assert "PresetName" in str(shown["preset"].annotation)
    assert "Apply" in str(shown["apply"].annotation)


def test_diagnostics_are_typed() -> None:
    assert get_type_hints(LocoProp.diagnostics)["return"] is Diagnostics
    hints = get_type_hints(Diagnostics.__getitem__)
    assert hints["return"] == LayerDiagnostics | tuple[LayerDiagnostics, ...]
    model = network()
    opt = LocoProp(model, diagnose=True)
    model(batch(8, 6)).square().mean().backward()
    opt.step()
    found = opt.diagnostics()
    assert isinstance(found[0], LayerDiagnostics)
    assert found[:2] == (found[0], found[1])


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))


def test_repr_shows_settings_and_nothing_else() -> None:
    opt = LocoProp(layer(), fallback=lambda params: torch.optim.SGD(params, lr=0.5))
    torch.optim.lr_scheduler.StepLR(opt, 1)  # adds initial_lr to the groups
    local, _, fallback = repr(opt).partition("Parameter Group 1 (SGD)\n")
    lines = [line.strip() for line in local.splitlines()]
    assert lines[:2] == ["LocoProp (", "Parameter Group 0"]
    shown = dict(line.split(": ") for line in lines[2:])
    assert shown["lr"] == "0.04"
    assert shown["solver"] == "general"
    assert shown.keys() < SETTINGS.keys()
    assert "gamma" not in shown, "the spectral step has none"
    assert "lr: 0.5" in fallback
    for internal in ("fallback:", "state_of", "steps:", "local_lr", "initial_lr", "params"):
        assert internal not in repr(opt)
    iterated = repr(LocoProp(nn.Linear(2, 2), variant="locoprop-m", output_transfer="linear"))
    assert "gamma: 10.0" in iterated


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"preset": "spectrall"}, "spectral"),
        ({"variant": "locoprop_m"}, "locoprop-m"),
        ({"solver": "rmsprob"}, "rmsprop"),
        ({"regularizer": "fischer"}, "fisher"),
        ({"local_decay": "linar"}, "linear"),
        ({"local_reduction": "meen"}, "mean"),
        ({"local_products": "bf61"}, "bf16"),
        ({"cap_by": "wieght"}, "weight"),
        ({"apply": "replce"}, "replace"),
        ({"output_transfer": "sigmoyd"}, "sigmoid"),
        ({"transfers": {"0": "tahn"}}, "tanh"),
        ({"transfers": {"encodr": "tanh"}}, "encoder"),
        ({"layers": ["encodr"]}, "encoder"),
        ({"gama": 1.0}, "gamma"),
        ({"param_groups": [{"params": [], "gama": 1.0}]}, "gamma"),
    ],
    ids=str,
)
def test_an_unknown_name_has_a_suggestion(given: dict[str, Any], meant: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    model: Callable[[], nn.Module] = Model if "encoder" in meant else network
    with pytest.raises((ValueError, TypeError), match=f"Did you mean '{meant}'"):
        LocoProp(model(), **given)
