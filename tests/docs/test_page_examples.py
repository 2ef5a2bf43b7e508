"""The Python blocks of the documentation run as they are, and print what the pages say."""

import contextlib
import io
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
PAGES = sorted(page.name for page in DOCS.glob("*.md") if BLOCK.search(page.read_text()))


def given() -> dict[str, object]:
    """Return what a reader of a page has: a model, its loss and its data."""
    inputs, targets = torch.rand(64, 20), torch.randint(0, 4, (64,))
    return {
        "__name__": "page",
        "model": nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4)),
        "criterion": nn.CrossEntropyLoss(),
        "loader": list(zip(inputs.split(16), targets.split(16), strict=True)),
    }


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run_in_order(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page == "training-loops.md":
        for name in ("lightning", "transformers", "accelerate"):
            pytest.importorskip(name, reason="the extra frameworks is not installed")
    monkeypatch.chdir(tmp_path)
    names = given()
    for code, said in BLOCK.findall((DOCS / page).read_text()):
        printed = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
            warnings.simplefilter("ignore")  # those of frameworks
            warnings.filterwarnings("error", message=".*(local problem|LocoProp|drift)")
            exec(compile(code, page, "exec"), names)
        if said:
            assert printed.getvalue() == said


def test_there_are_pages_with_examples() -> None:
    assert {"getting-started.md", "choosing-settings.md", "training-loops.md"} <= set(PAGES)
