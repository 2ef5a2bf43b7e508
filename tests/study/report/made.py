"""Run folders with given losses, so that results on the page can be computed by hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.models import architectures
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.run_folder import Checkpoint, Metrics, RunFolder

MACHINE = {"torch_locoprop": "0.1", "torch": "2.9", "python": "3.11", "machine": "m1", "threads": 1}


def data() -> Dataset:
    """Images of 4 x 4 pixels."""
    draw = torch.rand(30, 16, generator=torch.Generator().manual_seed(3))
    return Dataset("curves", draw[:20], draw[20:], "made for tests")


def made(
    folder: Path,
    losses: Sequence[float],
    method: str = "adam",
    *,
    diverged: bool = False,
    environment: dict[str, Any] | None = None,
    fields: dict[str, Any] | None = None,
    checkpoint: bool = False,
    seconds: float = 0.1,
    **config: Any,
) -> RunFolder:
    """A run with these train losses, test losses one above, and so many seconds an epoch.

    `fields` go into the file as they are; `config` has to be one that the study knows.
    """
    task = {"model": "16-6-2", "epochs": len(losses) - 1, "batch_size": 5, **config}
    chosen = RunConfig(method, **task)
    files = RunFolder(folder)
    folder.mkdir(parents=True)
    files.begin(
        {
            "config": {**chosen.to_dict(), **(fields or {})},
            "data": data().metadata,
            "environment": environment or MACHINE,
        }
    )
    last = len(losses) - 1
    rows = [
        Metrics(epoch, loss, loss + 1, epoch * seconds, 50.0 + epoch, diverged and epoch == last)
        for epoch, loss in enumerate(losses)
    ]
    files.write_metrics(rows)
    if checkpoint:
        model = architectures.build(chosen.model, chosen.transfer, chosen.seed)
        files.write_checkpoint(Checkpoint(model.state_dict(), {}, tuple(rows)))
    return files
