"""What was asked for, and what came of it."""

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
    """What was asked for; `command` is how to ask again, with NAME for the figure's."""

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

    def command_for(self, name: str) -> str:
        """Return the command that makes this figure."""
        return self.command.replace("NAME", name)


@dataclass(frozen=True)
class MadeFigure:
    """A figure's files, the runs in it, and what is not in it, with the reason."""

    name: str
    files: tuple[Path, ...]
    runs: tuple[Path, ...] = ()
    missing: tuple[str, ...] = ()
    text: str = ""
