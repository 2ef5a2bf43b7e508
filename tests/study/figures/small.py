"""Requests for figures that take a second: fifty images, a tiny model, two epochs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_locoprop.study.data.datasets import Dataset
from torch_locoprop.study.figures.catalog import Scale
from torch_locoprop.study.figures.figure_request import FigureRequest
from torch_locoprop.study.figures.images import Images
from torch_locoprop.study.figures.loss_figures import Maker
from torch_locoprop.study.figures.quick import QUICK
from torch_locoprop.study.figures.run_library import Place
from torch_locoprop.study.training.run_folder import Metrics

TASK = {"dataset": "curves", "model": "784-6-3", "batch_size": 20, "epochs": 2}

SCALE: Scale = replace(
    QUICK,
    tasks={**dict.fromkeys(QUICK.tasks, TASK), "relu": {**TASK, "transfer": "relu"}},
    renewed=dict.fromkeys(QUICK.renewed, ("kfac@2",)),
    images=(40, 10),
    note="small",
)
IMAGES = Images(counts=(40, 10))
NEWER = ("soap", "muon", "exact-s-muon", "locoprop-spectral")


class Deadly(Images):
    """Images whose loading kills the process, as a lack of memory may do."""

    def load(self, name: str) -> Dataset:
        os._exit(9)


def order(folder: Path, **values: Any) -> FigureRequest:
    fields: dict[str, Any] = {
        "scale": SCALE,
        "images": IMAGES,
        "place": Place(),
        "folders": (folder / "runs",),
        "out": folder / "figures",
        "without": NEWER,
    }
    return FigureRequest(**{**fields, **values})


@contextmanager
def unwatched(name: str, epochs: int) -> Iterator[Any]:
    def watch(row: Metrics) -> None:
        pass

    yield watch


class Making:
    """A maker and its messages."""

    def __init__(self, asked: FigureRequest) -> None:
        self.said: list[str] = []
        self.maker = Maker(asked, unwatched, self.said.append)

    def __call__(self, *names: str) -> Any:
        return self.maker.loss_figures(names)
