"""Reconstructions of test images by each series, as PNG images inside the page."""

from __future__ import annotations

import base64
import io
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_locoprop.study.data import datasets
from torch_locoprop.study.data.datasets import Dataset, DatasetError
from torch_locoprop.study.models import architectures
from torch_locoprop.study.report.comparison import Task
from torch_locoprop.study.report.runs import DIVERGED, Run
from torch_locoprop.study.report.series import Series
from torch_locoprop.study.training.description import RunError
from torch_locoprop.study.training.run_folder import RunFolder

MANY = 5
"""From this number on, series without images for the same reason are counted and not named."""


@dataclass(frozen=True)
class Gallery:
    """Rows of images for one task.

    Args:
        rows: The label, colour, note and images (PNG data URIs) of each row. A diverged run has no
            images, and its note says so.
        missing: Why other rows are missing.
    """

    rows: tuple[tuple[str, str, str, list[str]], ...]
    missing: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the gallery in the format of the page."""
        names = ("label", "colour", "note", "images")
        rows = [dict(zip(names, row, strict=True)) for row in self.rows]
        return {"rows": rows, "missing": list(self.missing)}


def gallery(task: Task, images: int, data_dir: Path | None) -> Gallery:
    """Return test images and their reconstructions by each series that has a checkpoint.

    Args:
        task: The task.
        images: The number of images; 0 for an empty gallery.
        data_dir: A folder with data sets.
    """
    if not images:
        return Gallery((), ())
    chosen = [_with_checkpoint(series) for series in task.series]
    if not any(chosen):
        return Gallery((), ("None of these runs has its checkpoint.pt.",))
    try:
        originals = _originals(task.about["dataset"], task.about["data"], images, data_dir)
    except (DatasetError, ValueError, OSError) as error:
        return Gallery((), (str(error),))
    rows = [("original", "", "", _tiles(originals))]
    missing: dict[str, list[str]] = defaultdict(list)  # the series of each reason
    for series, run in zip(task.series, chosen, strict=True):
        try:
            if series.state == DIVERGED and not series.counted:
                last = max(each.last.epoch for each in series.runs)
                rows.append((series.label, series.colour, f"diverged in epoch {last}", []))
                continue
            if run is None:
                raise RunError("no checkpoint.pt.")
            pictures, epoch = _reconstructed(run, originals)
        except (RunError, ValueError, RuntimeError) as error:
            missing[str(error)].append(series.label)
        else:
            note = f"seed {run.seed}, epoch {epoch}"
            rows.append((series.label, series.colour, note, _tiles(pictures)))
    lines = [
        f"{name}: {reason}"
        for reason, labels in missing.items()
        for name in (labels if len(labels) < MANY else [f"{len(labels)} of {len(chosen)} series"])
    ]
    return Gallery(tuple(rows), tuple(lines))


def _with_checkpoint(series: Series) -> Run | None:
    """Return the first run with a checkpoint that did not diverge; those that count come first."""
    runs = (*series.counted, *(run for run in series.runs if run.state != DIVERGED))
    return next((run for run in runs if (run.folder / "checkpoint.pt").is_file()), None)


def _originals(
    name: str, recorded: Mapping[str, Any], number: int, data_dir: Path | None
) -> Tensor:
    """Return `[number, pixels]` test images of the data set of the runs."""
    data = datasets.load(name, data_dir, download=False)
    if data.fingerprint != recorded.get("fingerprint"):
        if "generated" in (source := str(recorded.get("source"))):
            raise DatasetError(f"The runs used generated images ({source}), which are not stored.")
        raise DatasetError(
            f"{name} has the fingerprint {data.fingerprint} here, and the runs have "
            f"{recorded.get('fingerprint')}. Give the folder with their images with --data-dir."
        )
    if math.isqrt(data.test.shape[1]) ** 2 != data.test.shape[1]:
        raise DatasetError(f"Images of {data.test.shape[1]} pixels are not square.")
    return data.test[_choice(data, number)]


def _choice(data: Dataset, number: int) -> list[int]:
    """Return the positions of test images: the first of each label, then the second, and so on.

    Without labels, the positions are evenly spaced.
    """
    total = len(data.test)
    number = min(number, total)
    if data.test_labels is None:
        return [index * total // number for index in range(number)]
    seen: dict[int, int] = {}
    order = []
    for index, label in enumerate(data.test_labels.tolist()):
        order.append((seen.get(label, 0), label, index))
        seen[label] = seen.get(label, 0) + 1
    return [index for *_, index in sorted(order)[:number]]


@torch.no_grad()
def _reconstructed(run: Run, originals: Tensor) -> tuple[Tensor, int]:
    """Return the reconstructions by the last checkpoint of a run, and its epoch."""
    checkpoint = RunFolder(run.folder).checkpoint()
    if checkpoint is None:
        raise RunError("checkpoint.pt was removed.")
    model = architectures.build(run.config["model"], run.config["transfer"])
    model.load_state_dict(checkpoint.model)
    pictures = torch.sigmoid(model(originals))
    if not pictures.isfinite().all():
        raise RunError("its reconstructions are not finite.")
    return pictures, len(checkpoint.metrics) - 1


def _tiles(images: Tensor) -> list[str]:
    """Return each image `[pixels]` in [0, 1] as the data URI of a PNG, dark on white."""
    from matplotlib.image import imsave  # slow to import

    side = math.isqrt(images.shape[1])
    tiles = []
    grey = (255 * (1 - images)).round().to(torch.uint8).reshape(-1, side, side, 1)
    for image in grey.expand(-1, -1, -1, 3).numpy():
        file = io.BytesIO()
        imsave(file, image, format="png")
        tiles.append("data:image/png;base64," + base64.b64encode(file.getvalue()).decode())
    return tiles
