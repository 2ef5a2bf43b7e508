"""AdamW is one file of the package: everything else of the study reads its record."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torch_locoprop import study
from torch_locoprop.study import methods
from torch_locoprop.study.figures import catalog, costs, style
from torch_locoprop.study.figures.quick import QUICK
from torch_locoprop.study.models import architectures
from torch_locoprop.study.models.autoencoder import reconstruction_loss
from torch_locoprop.study.tuning import spaces

IMAGES = torch.rand(20, 12, generator=torch.Generator().manual_seed(3))


def test_no_other_file_of_the_study_names_it() -> None:
    (folder,) = study.__path__
    naming = [path.name for path in Path(folder).rglob("*.py") if '"adamw"' in path.read_text()]
    assert naming == ["adamw.py"]


def test_its_first_step_is_that_of_the_published_algorithm() -> None:
    """After bias correction the first step is lr · sign(gradient), up to eps."""
    model = architectures.build("12-8-3")
    settings = methods.get("adamw").resolve({"lr": 1e-2})
    optimizer = methods.get("adamw").build(model, {**settings, "weight_decay": 0.1})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    reconstruction_loss(model(IMAGES), IMAGES).backward()
    optimizer.step()
    for name, p in model.named_parameters():
        assert p.grad is not None
        kept = before[name] * (1 - 1e-2 * 0.1 * name.endswith("weight"))
        clear = p.grad.abs() > 1e-4  # eps matters for smaller ones
        step = torch.where(clear, 1e-2 * p.grad.sign(), kept - p)
        torch.testing.assert_close(p.detach(), kept - step)
        assert clear.any()


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="Invalid momentum=2"):
        methods.get("adamw").build(
            nn.Linear(2, 2), {**methods.get("adamw").resolve({"momentum": 2.0}), "weight_decay": 0}
        )


def test_it_has_a_space_a_look_and_a_row_of_costs() -> None:
    assert spaces.of(methods.get("adamw")) == spaces.of(methods.get("adam"))
    others = [methods.colour(name) for name in methods.names() if name != "adamw"]
    assert methods.colour("adamw") not in others
    assert style.line_look("adamw", 0)["color"] == methods.colour("adamw")
    assert costs.memory_formula("adamw", [(3, 5)], 7) == 15


@pytest.mark.parametrize("name", catalog.COMPARISONS)
def test_it_can_be_added_to_every_comparison(name: str) -> None:
    usual = catalog.loss_figure(name, QUICK)
    figure = catalog.loss_figure(name, QUICK, ("adamw",))
    for before, panel in zip(usual.panels, figure.panels, strict=True):
        *lines, last = panel.series
        assert tuple(lines) == before.series
        assert (last.label, last.painted_as) == ("AdamW", "adamw")
        assert last.config.settings == methods.get("adamw").settings


@pytest.mark.parametrize("command", ["train", "compare", "tune"])
def test_the_help_lists_it(run: Any, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "adamw" in out


def test_the_command_shows_its_record(run: Any) -> None:
    (listed,) = json.loads(run("methods", "adamw", "--json")[1])
    assert listed["settings_from"] == "untuned, torch's defaults"
    assert listed["settings"] == methods.get("adamw").settings
