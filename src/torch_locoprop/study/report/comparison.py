"""Runs grouped into tasks, the series of each task by rank, and a summary.

Runs are compared only with runs on equal images, with the same model, transfer, batch size and epochs.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch_locoprop.study import methods
from torch_locoprop.study.figures.timings import Clock
from torch_locoprop.study.report.clock import clock_of
from torch_locoprop.study.report.runs import DIVERGED, FINISHED, INTERRUPTED, Run
from torch_locoprop.study.report.series import LOSSES, TASK, Series, Spread

CLOCK = ("machine", "threads", "torch")
"""The entries of an environment that must be equal for seconds to be comparable."""

MAIN = 3
"""The first fields of a task name it: data set, model and transfer."""

FAR_APART = 1.5
"""A ratio of final losses at different seeds above which one of the runs probably failed."""


@dataclass(frozen=True)
class Task:
    """A task: series that can be compared, the best first, and their timings."""

    series: tuple[Series, ...]
    clock: Clock

    def alone(self, series: Series) -> float | None:
        """Return the seconds per epoch of the series from its timing, or None if it was not timed."""
        return self.clock.seconds.get(self.series.index(series))

    @property
    def runs(self) -> list[Run]:
        """The runs of all series."""
        return [run for series in self.series for run in series.runs]

    @property
    def about(self) -> dict[str, Any]:
        """The fields that all runs share: data set, model, transfer, batch size and epochs."""
        run = self.runs[0]
        return {**{name: run.config[name] for name in TASK}, "data": run.data}

    @property
    def title(self) -> str:
        """A short title of the task."""
        about = self.about
        source = about["data"].get("source")
        # The name curves has two sources: the published images, and generated ones.
        of = f" ({source})" if about["dataset"] == "curves" and source else ""
        return f"{about['dataset']}{of} · {about['model']} · {about['transfer']}"

    @property
    def details(self) -> str:
        """The rest of the task: epochs, batch size and data."""
        about = self.about
        source = about["data"].get("source", "of unknown origin")
        return (
            f"{about['epochs']} epochs of batches of {about['batch_size']} · "
            f"data: {source}, {about['data'].get('fingerprint', 'without a fingerprint')}"
        )

    @cached_property
    def placed(self) -> tuple[Series, ...]:
        """The ranked series: those with a finished run and none that diverged."""
        return tuple(series for series in self.series if series.state == FINISHED)

    @cached_property
    def same(self) -> dict[str, Any]:
        """The hyper-parameters that are equal in all series, with their values."""
        first, *others = (series.hyper_parameters for series in self.series)
        return {
            name: value
            for name, value in first.items()
            if all(name in other and other[name] == value for other in others)
        }

    @cached_property
    def varied(self) -> tuple[str, ...]:
        """The names of the hyper-parameters that differ between series."""
        names = dict.fromkeys(name for series in self.series for name in series.hyper_parameters)
        return tuple(name for name in names if name not in self.same)


def tasks(runs: Iterable[Run], timings: Sequence[Run] = ()) -> list[Task]:
    """Return the tasks of some runs, that with the most runs first.

    Args:
        runs: The runs.
        timings: Timings of the methods.
    """
    groups = [_series(group) for group in _grouped(runs, _task_key)]
    found = [Task(series, clock_of(series, timings)) for series in groups]
    return sorted(found, key=lambda task: -len(task.runs))


def tabs(found: Sequence[Task]) -> list[str]:
    """Return a short name of each task: what differs from the usual task, or the usual task itself.

    The usual value of a field is that of most tasks. The source and the fingerprint of the data are
    in a name only if it is not unique without them.
    """
    fields = [_fields(task) for task in found]
    for number in range(len(TASK), len(fields[0]) + 1 if fields else 0):
        names = _names([each[:number] for each in fields])
        if len(set(names)) == len(names):
            return names
    return [f"{task.title} · {task.details}" for task in found]


def _fields(task: Task) -> list[str]:
    """Return the fields that distinguish tasks, as text."""
    about = task.about
    epochs = about["epochs"]
    return [
        *(str(about[name]) for name in ("dataset", "model", "transfer")),
        f"batches of {about['batch_size']}",
        "1 epoch" if epochs == 1 else f"{epochs} epochs",
        str(about["data"].get("source", "of unknown origin")),
        str(about["data"].get("fingerprint", "without a fingerprint")),
    ]


def _names(tasks: Sequence[Sequence[str]]) -> list[str]:
    """Return what differs from the usual in each task; a task that is as usual has its main fields."""
    columns = list(zip(*tasks, strict=True))
    usual = [max(column, key=column.count) for column in columns]
    varied = [len(set(column)) > 1 for column in columns]
    names = []
    for task in tasks:
        own = [value for value, common in zip(task, usual, strict=True) if value != common]
        some = [value for value, differs in zip(task, varied, strict=True) if differs]
        main = [value for value, differs in zip(task[:MAIN], varied, strict=False) if differs]
        names.append(" · ".join(own or main or some or task[:MAIN]))
    return names


def _task_key(run: Run) -> str:
    return json.dumps([*(run.config[name] for name in TASK), run.data.get("fingerprint")])


def _series_key(run: Run) -> str:
    whole = {name: value for name, value in run.config.items() if name != "seed"}
    return json.dumps(whole, sort_keys=True)


def _grouped(runs: Iterable[Run], key: Callable[[Run], str]) -> list[list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.values())


def _series(runs: Iterable[Run]) -> tuple[Series, ...]:
    groups = [
        tuple(sorted(group, key=lambda run: (run.config["seed"], str(run.folder))))
        for group in _grouped(runs, _series_key)
    ]
    ranked = sorted((Series("", 0, group) for group in groups), key=_rank)
    named = zip(_labels(ranked), _dashes(ranked), ranked, strict=True)
    return tuple(Series(label, dash, series.runs) for label, dash, series in named)


def _rank(series: Series) -> tuple[int, float, str]:
    order = (FINISHED, INTERRUPTED, DIVERGED)
    return order.index(series.state), series.final, series.method


def _labels(ranked: Sequence[Series]) -> list[str]:
    """Return unique labels, with common values and more than four digits only where needed."""
    labels: list[str] = []
    for whole, digits in ((False, ".4g"), (False, ""), (True, "")):
        labels = [_label(series, ranked, whole, digits) for series in ranked]
        if len(set(labels)) == len(labels):
            break
    return labels


def _dashes(ranked: Sequence[Series]) -> list[int]:
    """Return the index of each series among those of its colour, the shortest label first."""
    said = [len(_telling(series, ranked, False)) for series in ranked]
    used: Counter[str] = Counter()
    dashes = [0] * len(ranked)
    for index in sorted(range(len(ranked)), key=said.__getitem__):
        dashes[index] = used[ranked[index].colour]
        used[ranked[index].colour] += 1
    return dashes


def _label(series: Series, others: Sequence[Series], whole: bool, digits: str) -> str:
    """Return the method's name and the values that distinguish the series from others of it."""
    differing = [
        f"{name}={format(value, digits) if isinstance(value, float) else value}"
        for name, value in _telling(series, others, whole).items()
    ]
    return " ".join([series.method, *differing])


def _telling(series: Series, others: Sequence[Series], whole: bool) -> dict[str, Any]:
    """Return the hyper-parameters that differ between series of the method.

    Common values are left out unless `whole`.
    """
    rivals = [other.hyper_parameters for other in others if other.method == series.method]
    return {
        name: value
        for name, value in series.hyper_parameters.items()
        if any(other.get(name) != value for other in rivals)
        and (whole or value != _usual(series.method, name, rivals))
    }


def _usual(method: str, name: str, rivals: Sequence[dict[str, Any]]) -> Any:
    """Return the common value of a setting: the default, or else one that several series have."""
    values = [rival[name] for rival in rivals if name in rival]
    try:
        default = methods.get(method).settings.get(name)
    except ValueError:  # the method is not registered
        default = None
    if default in values:
        return default
    common = max(values, key=values.count)
    return common if values.count(common) > 1 else None


def view(task: Task, loss: str) -> tuple[float, float] | None:
    """Return the range of losses to show at first, so that final differences can be seen.

    The much higher losses of first epochs and of failed series are outside.
    """
    steady = task.placed or [series for series in task.series if series.state != DIVERGED]
    curves = [series.curve(LOSSES[loss]) for series in steady]
    means = [[point.mean for point in curve if point] for curve in curves]
    means = [curve for curve in means if curve]
    if not means:
        return None
    finals = sorted(curve[-1] for curve in means)
    low, high = min(map(min, means)), max(map(max, means))
    upper = finals[math.ceil(0.75 * (len(finals) - 1))]
    early = statistics.median(curve[2 * (len(curve) - 1) // 5] for curve in means)
    top = min(high, max(finals[0] + 2.5 * (upper - finals[0]), early))
    margin = 0.05 * (top - low) or 1.0
    return low - margin, top + margin


def summary(task: Task) -> str:
    """Return the result of the task in one or two sentences."""
    if not task.placed:
        states = {series.state for series in task.series}
        return "Every run diverged." if states == {DIVERGED} else "No run has finished yet."
    best, *others = task.placed
    epochs = "1 epoch" if task.about["epochs"] == 1 else f"{task.about['epochs']} epochs"
    if not others:
        return f"{best.label} ends at a train loss of {best.final:.2f} after {epochs}."
    second = others[0]
    below = 100 * (second.final - best.final) / second.final if second.final else 0.0
    level = not round(below, 1) or _within_seeds(best, second)
    distance = "level with" if level else f"{below:.1f} % below"
    first = (
        f"{best.label} has the lowest train loss after {epochs}: {best.final:.2f}, "
        f"{distance} {second.label} ({second.final:.2f})."
    )
    by_test = min(task.placed, key=lambda series: _last(series, "test").mean)
    on_test = _last(by_test, "test").mean
    if by_test is best:
        return f"{first} It is also the best on test images: {on_test:.2f}."
    return f"{first} On test images the best is {by_test.label}: {on_test:.2f}."


def _within_seeds(best: Series, second: Series) -> bool:
    """Return True if some seed of the best series ends no lower than one of the second."""
    ends = [_last(series, "train") for series in (best, second)]
    return max(end.number for end in ends) > 1 and ends[0].high >= ends[1].low


def _last(series: Series, loss: str) -> Spread:
    return series.last(LOSSES[loss]) or Spread(math.inf, math.inf, math.inf, 0)


def cautions(task: Task) -> list[str]:
    """Return reasons to doubt the summary, such as few seeds."""
    found = []
    if len(task.placed) > 1:
        best, second = task.placed[:2]
        if max(_last(series, "train").number for series in (best, second)) == 1:
            found.append("The best two have one seed each.")
        elif _within_seeds(best, second):
            found.append("The difference is within the range of the seeds.")
    for series in task.placed:
        end = _last(series, "train")
        if end.high > FAR_APART * end.low:
            found.append(f"Seeds of {series.label} end far apart: {end.low:.2f} to {end.high:.2f}.")
    for state in (INTERRUPTED, DIVERGED):
        number = sum(run.state == state for run in task.runs)
        if number:
            found.append(f"{number} of {len(task.runs)} runs {state}.")
    repeated = sum(series.repeated for series in task.series)
    if repeated:
        runs = "1 run repeats" if repeated == 1 else f"{repeated} runs repeat"
        found.append(f"{runs} the seed of another; the first of them counts.")
    return found


def clock_text(task: Task) -> str:
    """Return where the seconds of the task come from."""
    clock, differ = task.clock, clock_notes(task)
    if not clock.seconds:
        text = (
            "Seconds of training, without evaluation. They can be compared only between runs on the "
            "same machine that did not run at the same time."
        )
        return f"{text} These runs differ in {'; '.join(differ)}." if differ else text
    text = (
        f"Seconds of training, from short runs without other work on the machine: {clock.machine}."
    )
    labels = [series.label for series in task.series]
    others = [
        labels[index]
        for index in sorted(clock.seconds)
        if task.series[index].hyper_parameters.get("precision") != clock.precision
    ]
    if others:
        text += f" Trained in another precision: {', '.join(others)}."
    if clock.left_out:
        text += (
            f" Not timed: {', '.join(labels[index] for index in clock.left_out)}. These are not drawn "
            "by seconds. The ranking shows the seconds of their own runs, which may have shared a "
            "machine."
        )
    return text


def clock_notes(task: Task) -> list[str]:
    """Return in what the environments of the runs differ, which makes seconds incomparable."""
    found = []
    for name in CLOCK:
        values = {str(run.environment.get(name, "unknown")) for run in task.runs}
        if len(values) > 1:
            found.append(f"{name}: {', '.join(sorted(values))}")
    for name in ("device", "precision"):
        values = {str(run.config.get(name, "unknown")) for run in task.runs}
        if len(values) > 1:
            found.append(f"{name}: {', '.join(sorted(values))}")
    return found
