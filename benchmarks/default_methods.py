"""The methods that `defaults` compares, and the rows of its table.

`ours` is `LocoProp(model)` with no settings, made in `build_ours` alone. Other methods are as people
use them: torch's Adam and AdamW, Muon for hidden matrices with AdamW for the rest, and SOAP.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from benchmarks.default_tasks import Loss, Task
from benchmarks.plain_soap import SOAP
from torch_locoprop import LocoProp

Settings = Mapping[str, Any]

OURS = "ours"


@dataclass(frozen=True)
class Row:
    """A row of the table: the best of some settings of a method.

    Args:
        key: name on the command line.
        label: name in the table.
        method: name in `BUILDERS`, or `ours`.
        candidates: the settings, each a run; the best by training loss is the row's result.
    """

    key: str
    label: str
    method: str
    candidates: tuple[Settings, ...]


def _rates(*rates: float) -> tuple[Settings, ...]:
    return tuple({"lr": rate} for rate in rates)


BASELINES = {
    row.key: row
    for row in (
        Row("adam()", "Adam()", "adam", _rates(1e-3)),
        Row("adamw()", "AdamW()", "adamw", _rates(1e-3)),
        Row("adam", "best Adam", "adam", _rates(1e-3, 2e-3, 5e-3, 1e-2)),
        Row("adamw", "best AdamW", "adamw", _rates(1e-3, 2e-3, 5e-3, 1e-2)),
        Row("muon", "best Muon", "muon", _rates(2.5e-3, 5e-3, 1e-2, 2e-2)),
        Row("soap", "best SOAP", "soap", _rates(2.5e-3, 5e-3, 1e-2, 2e-2)),
    )
}
"""The methods that ours is compared with. Adam() and AdamW() are one of the four rates of the next."""

WIDE = {
    row.key: row
    for row in (
        Row(
            "adam-wide",
            "Adam, 9 rates",
            "adam",
            _rates(5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2),
        ),
        Row(
            "muon-wide",
            "Muon, 9 rates",
            "muon",
            _rates(6.25e-4, 1.25e-3, 2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2, 8e-2, 0.16),
        ),
    )
}
"""Methods at more rates, for tasks whose best rates lie far apart; `run` takes them by name only."""


def ours(settings: Settings) -> Row:
    """Return the row of LocoProp with these settings."""
    shown = ", ".join(f"{name}={value}" for name, value in settings.items())
    key = f"{OURS}({shown})" if shown else OURS
    return Row(key, f"LocoProp(model{', ' if shown else ''}{shown})", OURS, (settings,))


def parse_settings(text: str) -> dict[str, Any]:
    """Return the settings in a text such as `preset=spectral,lr=0.02`.

    Raises:
        ValueError: If a part has no `=`.
    """
    settings: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"Invalid setting {part!r}. Must be NAME=VALUE, as in lr=0.02.")
        settings[name.strip()] = _value(value.strip())
    return settings


def _value(text: str) -> Any:
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def build_ours(model: nn.Module, loss: Loss, settings: Settings) -> Optimizer:
    """Return LocoProp for the model; the setting `loss_fn=true` hands it the loss of the task."""
    settings = dict(settings)
    if settings.get("loss_fn") is True:
        settings["loss_fn"] = loss
    return LocoProp(model, **settings)


def _adam(model: nn.Module, task: Task, settings: Settings) -> Optimizer:
    return torch.optim.Adam(model.parameters(), **settings)


def _adamw(model: nn.Module, task: Task, settings: Settings) -> Optimizer:
    return AdamW(model.parameters(), **settings)


def _soap(model: nn.Module, task: Task, settings: Settings) -> Optimizer:
    return SOAP(model.parameters(), **settings)


class MuonAndAdamW(Optimizer):
    """`torch.optim.Muon` for matrices and filters, AdamW for all other parameters, at one rate.

    A filter `[out, in, height, width]` is the matrix `[out, in · height · width]` for Muon. Its steps
    have the size of AdamW's (`match_rms_adamw`), and both decay weights as AdamW does by default.
    """

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter], lr: float) -> None:
        super().__init__([*matrices, *others], {"lr": lr})
        # Views of the same numbers, since torch's Muon takes parameters of two dimensions only.
        self._views = [(p, nn.Parameter(p.detach().flatten(1))) for p in matrices]
        self._parts: list[Optimizer] = []
        if matrices:
            self._parts.append(
                torch.optim.Muon(
                    [view for _, view in self._views],
                    lr=lr,
                    weight_decay=0.01,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if others:
            self._parts.append(AdamW(others, lr=lr))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p, view in self._views:
            view.grad = None if p.grad is None else p.grad.flatten(1)
        for part in self._parts:
            part.step()


def _muon(model: nn.Module, task: Task, settings: Settings) -> Optimizer:
    """Return Muon for all matrices and filters but embeddings and the layer of the classes."""
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.dim() >= 2 and id(p) not in tables]
    if isinstance(task.loss, nn.CrossEntropyLoss) and len(matrices) > 1:
        last = [part.weight for part in model.modules() if isinstance(part, nn.Linear)][-1]
        matrices = [p for p in matrices if p is not last]
    own = set(map(id, matrices))
    return MuonAndAdamW(matrices, [p for p in model.parameters() if id(p) not in own], **settings)


BUILDERS: dict[str, Callable[[nn.Module, Task, Settings], Optimizer]] = {
    "adam": _adam,
    "adamw": _adamw,
    "muon": _muon,
    "soap": _soap,
    OURS: lambda model, task, settings: build_ours(model, task.loss, settings),
}


def build(method: str, model: nn.Module, task: Task, settings: Settings) -> Optimizer:
    """Return the optimizer of a method for the model of a task."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what ours warns of is read in its summary
        return BUILDERS[method](model, task, settings)
