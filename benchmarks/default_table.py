"""Tables of `defaults`: losses at equal steps and at equal time, and how often ours is ahead.

A row of `default_methods` has several settings; its result in a task is that of the settings whose
training loss, averaged over the seeds, is the lowest. For the losses at equal time the settings are
chosen by the loss at that time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.default_methods import BASELINES, OURS, Row, Settings
from benchmarks.default_runs import Result

MEASURES = {
    "steps": "Training loss at equal steps",
    "test": "Test loss at equal steps",
    "time": "Training loss at the time at which Adam() ends",
}

ADAM = BASELINES["adam()"].candidates[0]


@dataclass(frozen=True)
class Cell:
    """The result of a row in a task.

    Args:
        loss: mean over the seeds; infinite if a run diverged, NaN if there is no result.
        settings: the best settings.
        seconds: mean time of the runs of these settings, or NaN.
    """

    loss: float
    settings: Settings
    seconds: float


class Comparison:
    """Results of some rows in some tasks.

    Args:
        tasks: names of the tasks.
        rows: the rows, ours first; rows that lack a result in all tasks are left out.
        seeds: the seeds.
        results: results of these rows, and of others.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        rows: Sequence[Row],
        seeds: Sequence[int],
        results: Iterable[Result],
    ) -> None:
        self.tasks, self.seeds = list(tasks), list(seeds)
        self._results = {
            (job["task"], job["method"], _frozen(job["settings"]), job["seed"]): result
            for result in results
            for job in [result.job]
        }
        self.rows = [row for row in rows if any(self._is_known(task, row) for task in tasks)]

    def _is_known(self, task: str, row: Row) -> bool:
        return all(self._get(task, row.method, settings) for settings in row.candidates)

    @property
    def results(self) -> list[Result]:
        """The results that the tables are made of."""
        return [
            result
            for task in self.tasks
            for method, settings in {
                (row.method, _frozen(settings)): (row.method, settings)
                for row in self.rows
                for settings in row.candidates
            }.values()
            for result in self._get(task, method, settings)
        ]

    @property
    def timed(self) -> bool:
        """True if all times were measured on an idle machine."""
        return all(result.timed for result in self.results)

    @property
    def has_adam(self) -> bool:
        """True if there are results of Adam(), whose end is the time at which losses are compared."""
        return any(self._get(task, "adam", ADAM) for task in self.tasks)

    def measures(self) -> list[str]:
        """Return the keys of `MEASURES` that there are numbers for."""
        return ["steps", "test", "time"] if self.has_adam else ["steps", "test"]

    def cell(self, task: str, row: Row, measure: str) -> Cell:
        """Return the result of a row in a task."""
        if not self._is_known(task, row):
            return Cell(math.nan, {}, math.nan)
        cells = []
        for settings in row.candidates:
            results = self._get(task, row.method, settings)
            seconds = fmean(r.seconds[-1] if r.seconds else math.nan for r in results)
            train = fmean(result.final for result in results)
            chosen = shown = train
            if measure == "test":
                shown = fmean(math.inf if r.test is None else r.test for r in results)
            elif measure == "time":
                adam = self._get(task, "adam", ADAM)
                if not adam:
                    return Cell(math.nan, {}, math.nan)
                chosen = shown = fmean(
                    own.at(other.seconds[-1]) for own, other in zip(results, adam, strict=True)
                )
            cells.append((chosen, Cell(shown, settings, seconds)))
        return min(cells, key=lambda pair: pair[0])[1]

    def _get(self, task: str, method: str, settings: Settings) -> list[Result]:
        """Return the results of all seeds, or an empty list if one is missing."""
        keys = [(task, method, _frozen(settings), seed) for seed in self.seeds]
        found = [self._results[key] for key in keys if key in self._results]
        return found if len(found) == len(keys) else []

    def losses(self, measure: str) -> list[list[float]]:
        """Return the losses, a list for each task with one number for each row."""
        return [[self.cell(task, row, measure).loss for row in self.rows] for task in self.tasks]

    def errors(self) -> list[str]:
        """Return a line for each run that ended with an error."""
        return [
            f"{result.job['task']} {result.job['settings']} seed {result.job['seed']}: {result.error}"
            for result in self.results
            if result.error is not None
        ]


def _frozen(settings: Settings) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(settings.items()))


# ---- how often ours is ahead --------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """How one row does against another.

    Args:
        ahead: number of tasks in which its loss is lower.
        of: number of tasks in which both have a result.
        ratio: geometric mean of its loss relative to the other's, where both are positive;
            infinite if it diverged.
        behind: names of the tasks in which its loss is not lower.
    """

    ahead: int
    of: int
    ratio: float
    behind: list[str]


def score(comparison: Comparison, mine: Row, other: Row, measure: str) -> Score:
    """Return how `mine` does against `other`."""
    ahead, count, ratios, behind = 0, 0, [], []
    for task in comparison.tasks:
        own = comparison.cell(task, mine, measure).loss
        its = comparison.cell(task, other, measure).loss
        if math.isnan(own) or math.isnan(its):
            continue
        if own < its:
            ahead += 1
        else:
            behind.append(task)
        count += 1
        if min(own, its) > 0:  # a quotient of negative losses says nothing
            ratios.append(own / its if math.isfinite(its) else (1.0 if math.isinf(own) else 0.0))
    logs = [math.log(ratio) for ratio in ratios if ratio > 0]
    mean = math.exp(fmean(logs)) if logs else math.nan
    return Score(ahead, count, mean, behind)


# ---- text ---------------------------------------------------------------------------------------


def tables(comparison: Comparison, measures: Sequence[str] | None = None) -> str:
    """Return the tables and the counts as Markdown."""
    blocks = []
    for measure in measures or comparison.measures():
        title = MEASURES[measure]
        if measure == "time" and not comparison.timed:
            title += " (NOT RELIABLE: the machine was busy, measure again with --timed)"
        blocks += [f"{title}:", _losses(comparison, measure)]
    if any(row.method == OURS for row in comparison.rows):
        blocks += ["Ours ahead, and the geometric mean of its loss relative to theirs:"]
        blocks += [_scores(comparison, measures or comparison.measures())]
        blocks += [line for line in [_behind(comparison)] if line]
    errors = comparison.errors()
    return "\n\n".join(blocks + (["\n".join(["Errors:", *errors])] if errors else []))


def _losses(comparison: Comparison, measure: str) -> str:
    lines = []
    for task in comparison.tasks:
        cells = [comparison.cell(task, row, measure) for row in comparison.rows]
        best = min((cell.loss for cell in cells if not math.isnan(cell.loss)), default=math.nan)
        shown = [
            _shown(cell, best, len(row.candidates) > 1)
            for row, cell in zip(comparison.rows, cells, strict=True)
        ]
        lines.append([task, *shown])
    return _markdown(["task", *(row.label for row in comparison.rows)], lines)


def _shown(cell: Cell, best: float, with_rate: bool) -> str:
    if math.isnan(cell.loss):
        return "–"
    if math.isinf(cell.loss):
        return "diverged"
    text = f"{cell.loss:.4g}"
    text = f"**{text}**" if cell.loss == best else text
    return f"{text} ({cell.settings['lr']:g})" if with_rate else text


def _scores(comparison: Comparison, measures: Sequence[str]) -> str:
    lines = []
    others = [row for row in comparison.rows if row.method != OURS]
    for mine in (row for row in comparison.rows if row.method == OURS):
        for measure in measures:
            shown = []
            for other in others:
                result = score(comparison, mine, other, measure)
                shown.append(f"{result.ahead} of {result.of}, {result.ratio:.3g}")
            lines.append([mine.label, measure, *shown])
    return _markdown(["", "measure", *(row.label for row in others)], lines)


def _behind(comparison: Comparison) -> str:
    """Return a line for each pair of rows: the tasks in which ours is behind at equal steps."""
    lines = []
    for mine in (row for row in comparison.rows if row.method == OURS):
        for other in (row for row in comparison.rows if row.method != OURS):
            names = score(comparison, mine, other, "steps").behind
            if names:
                lines.append(f"- {mine.label} behind {other.label}: {', '.join(names)}")
    return "\n".join(lines)


def _markdown(head: list[str], lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]

    def padded(cells: Sequence[str]) -> str:
        sized = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return f"| {' | '.join(sized)} |"

    rule = padded(["-" * width for width in widths])
    return "\n".join([padded(head), rule, *map(padded, lines)])
