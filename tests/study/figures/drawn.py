"""Lines of figures with given losses, and the pictures of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import small
from matplotlib.figure import Figure

from torch_locoprop.study.figures import catalog, loss_plot
from torch_locoprop.study.figures.loss_lines import Drawn
from torch_locoprop.study.figures.run_library import Found
from torch_locoprop.study.training.run_folder import Metrics
from torch_locoprop.study.training.run_result import RunResult

ENVIRONMENT = {"machine": "NVIDIA H200", "torch": "2.11.0+cu130", "threads": 1}
DATA = {"name": "curves", "source": "made for tests", "fingerprint": "0"}


def found(method: str, losses: Sequence[float], *, diverged: bool = False, seed: int = 0) -> Found:
    config = small.SCALE.series("standard", method).config
    config = replace(config, epochs=len(losses) - 1, seed=seed)
    rows = [Metrics(n, x, x + 10, n, 1.0, False) for n, x in enumerate(losses)]
    rows[-1] = replace(rows[-1], diverged=diverged)
    return Found(RunResult(Path(f"{method}-{seed}"), config, tuple(rows)), DATA, ENVIRONMENT)


def line(method: str, *runs: Found, seconds: float | None = None) -> Drawn:
    return Drawn(small.SCALE.series("standard", method), runs, seconds)


def picture(lines: list[Drawn], name: str = "standard") -> Figure:
    figure = catalog.loss_figure(name, small.SCALE)
    return loss_plot.draw(figure, [lines] * len(figure.panels), "title", "subtitle", ["footer"])


def legend(figure: Figure) -> list[str]:
    (found,) = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    return [text.get_text() for text in found.get_texts()]


FALLING = [100.0, 60.0, 50.0, 45.0, 42.0, 41.0, 40.5, 40.2, 40.1, 40.0, 40.0]
