"""A request for figures, and a figure that was made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch_locoprop.study.figures.catalog import Scale
from torch_locoprop.study.figures.images import Images
from torch_locoprop.study.figures.run_library import Place
from torch_locoprop.study.training.config import RunConfig

Say = Callable[[str], None]


@dataclass(frozen=True)
class FigureRequest:
    """A request for figures.

    Args:
        scale: The tasks and settings.
        images: The images of the tasks.
        place: The device and precision.
        folders: Folders with runs; new runs go into the first.
        out: The folder for pictures.
        command: The command that makes a figure, with NAME for the name of the figure.
        epochs: Epochs of all runs; None for those of the scale.
        seeds: The seeds of every line.
        tuned: Configurations whose settings replace those of matching lines.
        added: Methods to add to figures that compare methods.
        without: Methods to leave out.
        jobs: The number of runs at the same time.
        only_existing: Train and measure nothing.
        provenance: Write below each picture how and where it was made, as its caption file does.
    """

    scale: Scale
    images: Images
    place: Place
    folders: tuple[Path, ...]
    out: Path
    command: str = "locoprop figure NAME"
    epochs: int | None = None
    seeds: tuple[int, ...] = (0,)
    tuned: tuple[RunConfig, ...] = ()
    added: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    jobs: int = 1
    only_existing: bool = False
    provenance: bool = False

    def command_for(self, name: str) -> str:
        """Return the command that makes the figure of this name."""
        return self.command.replace("NAME", name)


@dataclass(frozen=True)
class MadeFigure:
    """A figure that was made.

    Args:
        name: The name of the figure.
        files: Its pictures and its caption; empty if it could not be drawn.
        runs: The folders of its runs.
        missing: What is missing, one phrase per reason.
        text: A table as text, if the figure is a table.
    """

    name: str
    files: tuple[Path, ...]
    runs: tuple[Path, ...] = ()
    missing: tuple[str, ...] = ()
    text: str = ""
