"""A reader who follows one step of the optimizer meets few files."""

import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import torch_locoprop
from torch_locoprop import LocoProp

ROOT = Path(torch_locoprop.__file__).parent


class Walk(NamedTuple):
    """A step of an optimizer on the CPU, and the number of files that it may pass through."""

    settings: dict[str, Any]
    step: int = 4  # an ordinary one: the first steps search for transfers
    most: int = 19
    sizes: tuple[int, ...] = (6, 5, 4)  # with tanh between layers, but for a code of 2


WALKS = {
    "LocoProp-M": Walk({"variant": "locoprop-m", "output_transfer": "sigmoid"}),
    "LocoProp-S": Walk({"variant": "locoprop-s", "output_transfer": "sigmoid"}),
    "LocoProp-M of the paper's autoencoder": Walk(
        {"variant": "locoprop-m", "output_transfer": "sigmoid"},
        most=21,  # XᵀX replaces the rows of the linear code layer
        sizes=(6, 5, 2, 5, 4),
    ),
    "default": Walk({}, step=14),
    "default, which renews C": Walk({}, step=21, most=20),  # every tenth step
}
EACH = pytest.mark.parametrize("walk", WALKS.values(), ids=list(WALKS))


def walked(walk: Walk) -> dict[str, set[str]]:
    """Return the files that one step of a small MLP passes through, with their functions."""
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for n, d in pairwise(walk.sizes):
        modules += [nn.Linear(n, d), nn.Identity() if d == 2 else nn.Tanh()]
    model = nn.Sequential(*modules[:-1])
    opt = LocoProp(model, **walk.settings)
    x, y = torch.rand(32, 6), torch.rand(32, 4)
    loss_fn = nn.BCEWithLogitsLoss(reduction="sum")
    seen: dict[str, set[str]] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            seen.setdefault(str(path.relative_to(ROOT)), set()).add(frame.f_code.co_name)

    for step in range(1, walk.step + 1):
        before = sys.getprofile()
        if step == walk.step:
            sys.setprofile(note)
        try:
            loss_fn(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        finally:
            sys.setprofile(before)
    return seen


@EACH
def test_a_step_passes_through_few_files(walk: Walk) -> None:
    seen = walked(walk)
    listed = "\n".join(f"{file}: {', '.join(sorted(seen[file]))}" for file in sorted(seen))
    assert "optimizer.py" in seen, listed
    assert len(seen) <= walk.most, f"{len(seen)} files:\n{listed}"


def test_the_walks_of_the_default_are_of_the_two_kinds_of_its_steps() -> None:
    renewed = {name: "row_reduction.py" in str(walked(walk)) for name, walk in WALKS.items()}
    assert not renewed["default"]
    assert renewed["default, which renews C"]


@EACH
def test_the_documentation_lists_these_files(walk: Walk) -> None:
    page = (ROOT.parents[1] / "docs/architecture.md").read_text(encoding="utf-8")
    section = page.partition("## One step")[2].partition("\n## ")[0]
    missing = [file for file in sorted(walked(walk)) if f"`{file}`" not in section]
    assert not missing, f"docs/architecture.md, One step: {', '.join(missing)}"
