"""The list of figures: the name, the corresponding figure of the paper, and the lines of each.

A `Scale` has the images and models: the protocol of the paper (`protocol.py`), or small ones for a
quick look (`quick.py`). The settings of methods at both scales are in their records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch_locoprop.paper.names import unknown
from torch_locoprop.study import methods
from torch_locoprop.study.methods import Method, TaskSettings, iterations, label
from torch_locoprop.study.training.config import RunConfig

Settings = Mapping[str, Any]
Loss = Literal["train_loss", "test_loss"]
Axis = Literal["epoch", "seconds"]

SettingsOf = Callable[[Method, str, int | None], TaskSettings]
"""Takes a method, a task and a number of local iterations (None for the method's own); returns the
settings that differ from the method's defaults, and where they come from."""


@dataclass(frozen=True)
class Entry:
    """An entry of the list.

    Args:
        name: The name of the figure.
        title: What it shows.
        paper: The corresponding figures of the paper.
        task: The title in pictures, which name the data set themselves; by default `title`.
    """

    name: str
    title: str
    paper: str
    task: str = ""

    @property
    def heading(self) -> str:
        """The title in pictures, without the data set."""
        return self.task or self.title


ENTRIES = (
    Entry("matching-loss", "Matching losses of tanh and ReLU", "Figures 1 and 2"),
    Entry("first-order", "First-order methods", "Figure 3 (a)"),
    Entry("s-vs-m", "LocoProp-S and LocoProp-M by local iterations", "Figure 3 (b)"),
    Entry("inner-solvers", "Solvers of LocoProp-M's local problems", "Figure 3 (c)"),
    Entry("standard", "Standard autoencoder", "Figures 4 (a) and 5 (a)"),
    Entry("wide", "Wide autoencoder", "Figures 4 (b) and 5 (b)"),
    Entry("deep", "Deep autoencoder", "Figures 4 (c) and 5 (c)"),
    Entry("relu", "ReLU instead of tanh", "Figure 6 (a) and (d)"),
    Entry("fashion-mnist", "Fashion-MNIST", "Figure 6 (b) and (e)", "Standard autoencoder"),
    Entry("curves", "CURVES", "Figure 6 (c) and (f)", "Standard autoencoder"),
    Entry("batch-100", "Batches of 100", "Figure 7"),
    Entry("test-losses", "Test losses", "Figures 6 (d) to (f) and 8"),
    Entry("time-to-loss", "Time to a train loss", "not in the paper, see Figure 5"),
    Entry("profile", "Share of tasks within a factor of the best", "not in the paper"),
    Entry("costs", "Memory and time of a step beside the formulas", "Table 1"),
)
NAMES = tuple(entry.name for entry in ENTRIES)
_OTHERS = ("matching-loss", "time-to-loss", "profile", "costs")
LOSS_FIGURES = tuple(name for name in NAMES if name not in _OTHERS)
"""The figures that draw losses by epoch or by seconds."""

TIMED = ("standard", "deep", "wide")
"""The tasks on which methods are timed."""

COMPARISONS = tuple(name for name in LOSS_FIGURES if name not in ("s-vs-m", "inner-solvers"))
"""The figures that compare methods, to which others can be added."""


@dataclass(frozen=True)
class Series:
    """A line of a figure: one configuration at any seed.

    Args:
        label: The label in the legend.
        config: The configuration.
        painted_as: The method or solver whose colour and marker the line has, or `iterations` where
            numbers of local iterations are compared.
        fixed: The settings that distinguish the line from others of its method. Tuned settings do
            not replace them.
        origin: Where settings come from that are not the method's own.
    """

    label: str
    config: RunConfig
    painted_as: str
    fixed: Settings = field(default_factory=dict)
    origin: str = ""

    @property
    def variant(self) -> int:
        """The index of the line among those of its colour, the same in every figure."""
        every = self.config.method.partition("@")[2]
        if every:
            return sum(int(every) > least for least in (1, 10, 100))
        return BY_LOCAL_STEPS.index(self.config.method) if "local_steps" in self.fixed else 0


@dataclass(frozen=True)
class Panel:
    """A panel of a figure: losses of some runs, by epoch or by seconds."""

    title: str
    task: str
    series: tuple[Series, ...]
    loss: Loss = "train_loss"
    by: Axis = "epoch"


@dataclass(frozen=True)
class LossFigure:
    """A figure of losses: panels side by side."""

    entry: Entry
    panels: tuple[Panel, ...]
    note: str = ""

    @property
    def configs(self) -> tuple[RunConfig, ...]:
        """The configurations to run, each once."""
        return _unique(each.config for panel in self.panels for each in panel.series)

    @property
    def timed(self) -> tuple[RunConfig, ...]:
        """The configurations to time, each once."""
        panels = [panel for panel in self.panels if panel.by == "seconds"]
        return _unique(each.config for panel in panels for each in panel.series)


@dataclass(frozen=True)
class Scale:
    """The tasks of the figures, and how methods are run on them.

    Args:
        tasks: The fields of a `RunConfig` for each task.
        renewed: For each task, the methods `name@k` that renew a preconditioner.
        settings_of: Reads the settings on a task from the record of a method.
        solvers: Settings of LocoProp-M with each solver.
        targets: Train losses to which times are compared on the `TIMED` tasks, the highest first.
        images: The numbers of generated training and test images; None for the whole data set.
        threads: Threads of each process; None gives all cores to one run or divides them among runs.
        note: A remark for the subtitle.
    """

    tasks: Mapping[str, Settings]
    renewed: Mapping[str, tuple[str, ...]]
    settings_of: SettingsOf
    solvers: Mapping[str, TaskSettings]
    targets: tuple[float, ...] = (53.0, 52.0, 51.0)
    images: tuple[int, int] | None = None
    threads: int | None = None
    note: str = ""

    def series(self, task: str, method: str, local_steps: int | None = None) -> Series:
        """Return the line of a method on a task, at this or its own number of local iterations."""
        own = self.settings_of(methods.get(method), task, local_steps)
        at = [] if local_steps is None else [iterations(local_steps)]
        fixed = {} if local_steps is None else {"local_steps": local_steps}
        config = RunConfig(method, {**own.settings, **fixed}, **self.tasks[task])
        base = method.partition("@")[0]
        return Series(", ".join([label(method), *at]), config, base, fixed, own.source)

    def lines(self, task: str, names: Sequence[str]) -> tuple[Series, ...]:
        """Return the line of each of these methods on a task, once."""
        return tuple(self.series(task, name) for name in dict.fromkeys(names))


FIRST_ORDER = ("sgd", "momentum", "nesterov", "adagrad", "adam", "rmsprop")
LOCAL_STEPS = (1, 5, 10, 50)
BY_LOCAL_STEPS = ("locoprop-s", "locoprop-m")
"""The methods of which several numbers of local iterations are drawn, in the order of their dashes."""

COMPARED = ("rmsprop", "adam", "locoprop-s", "locoprop-m")
TEST_LOSSES = ("standard", "wide", "deep", "relu", "fashion-mnist", "curves")


def newer_methods() -> tuple[str, ...]:
    """Return the methods that are newer than the paper and compared with its own, by label."""
    return tuple(
        sorted((name for name in methods.names() if methods.get(name).compared), key=label)
    )


def entry_of(name: str) -> Entry:
    """Return the entry of a figure.

    Raises:
        ValueError: If there is no figure of this name.
    """
    if name not in NAMES:
        raise ValueError(unknown("figure", name, NAMES))
    return ENTRIES[NAMES.index(name)]


def loss_figure(name: str, scale: Scale, added: Sequence[str] = ()) -> LossFigure:
    """Return the figure of losses of that name.

    Args:
        name: One of ``NAMES`` that draws losses.
        scale: The tasks and settings.
        added: Methods to draw beside those of the figure, if it is one of ``COMPARISONS``.
    """
    entry = entry_of(name)
    if name == "first-order":
        lines = scale.lines("standard", (*FIRST_ORDER, *added))
        panels = [Panel("Train loss", "standard", lines)]
    elif name == "s-vs-m":
        panels = [Panel("Train loss", "standard", _by_local_steps(scale))]
    elif name == "inner-solvers":
        panels = [Panel("Train loss", "standard", _by_solver(scale))]
    elif name in ("standard", "wide", "deep"):
        lines = _compared(scale, name, added)
        panels = [
            Panel("By epoch", name, lines),
            Panel("By seconds of training", name, lines, by="seconds"),
        ]
    elif name == "test-losses":
        panels = [
            Panel(entry_of(task).heading, task, _compared(scale, task, added), "test_loss")
            for task in TEST_LOSSES
        ]
    else:
        lines = _compared(scale, name, added)
        panels = [
            Panel("Train loss", name, lines),
            Panel("Test loss", name, lines, "test_loss"),
        ]
    return LossFigure(entry, tuple(panels), scale.note)


def _compared(scale: Scale, task: str, added: Sequence[str]) -> tuple[Series, ...]:
    return scale.lines(task, (*COMPARED, *scale.renewed[task], *newer_methods(), *added))


def _by_local_steps(scale: Scale) -> tuple[Series, ...]:
    return tuple(
        replace(scale.series("standard", method, steps), painted_as=iterations(steps))
        for method in BY_LOCAL_STEPS
        for steps in LOCAL_STEPS
    )


def _by_solver(scale: Scale) -> tuple[Series, ...]:
    usual = scale.series("standard", "locoprop-m").config
    lines = []
    for solver, own in scale.solvers.items():
        fixed = {"solver": solver}
        config = replace(usual, settings={**usual.settings, **own.settings, **fixed})
        lines.append(Series(f"local {label(solver)}", config, solver, fixed, own.source))
    return tuple(lines)


def _unique(configs: Iterable[RunConfig]) -> tuple[RunConfig, ...]:
    found: list[RunConfig] = []
    for config in configs:
        if config not in found:
            found.append(config)
    return tuple(found)
