"""A reader who follows one step of the optimizer meets few files."""

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import torch_locoprop
from torch_locoprop import LocoProp

ROOT = Path(torch_locoprop.__file__).parent
MOST = 19  # files of the package that a step on the CPU passes through


def walked(variant: str) -> dict[str, set[str]]:
    """Return the files that the fourth step of a small MLP passes through, with their functions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    opt = LocoProp(model, variant=variant, output_transfer="sigmoid")
    x, y = torch.rand(7, 6), torch.rand(7, 4)
    loss_fn = nn.BCEWithLogitsLoss(reduction="sum")
    seen: dict[str, set[str]] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            seen.setdefault(str(path.relative_to(ROOT)), set()).add(frame.f_code.co_name)

    for step in range(4):
        before = sys.getprofile()
        if step == 3:
            sys.setprofile(note)
        try:
            loss_fn(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        finally:
            sys.setprofile(before)
    return seen


@pytest.mark.parametrize("variant", ["locoprop-m", "locoprop-s"])
def test_a_step_passes_through_few_files(variant: str) -> None:
    seen = walked(variant)
    listed = "\n".join(f"{file}: {', '.join(sorted(seen[file]))}" for file in sorted(seen))
    assert "optimizer.py" in seen, listed
    assert len(seen) <= MOST, f"{len(seen)} files:\n{listed}"


@pytest.mark.parametrize("variant", ["locoprop-m", "locoprop-s"])
def test_the_documentation_lists_these_files(variant: str) -> None:
    page = (ROOT.parents[1] / "docs/architecture.md").read_text(encoding="utf-8")
    section = page.partition("## One step")[2].partition("\n## ")[0]
    missing = [file for file in sorted(walked(variant)) if f"`{file}`" not in section]
    assert not missing, f"docs/architecture.md, One step: {', '.join(missing)}"
