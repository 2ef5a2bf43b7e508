"""Seconds per epoch for the report, from the timings that `locoprop figure` made.

Timings are short runs without other work on the machine, in subfolders of their own. If a task has
timings, the page uses their seconds and not those of the runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from torch_locoprop.study.figures.run_library import Found, Place, timing_key
from torch_locoprop.study.figures.timings import Clock, of_one_machine
from torch_locoprop.study.report.runs import Run
from torch_locoprop.study.report.series import Series
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.run_result import RunResult


def clock_of(series: Iterable[Series], timings: Sequence[Run]) -> Clock:
    """Return the seconds per epoch of the series, from the machine that timed most of them."""
    known = [found for run in timings if (found := _found(run)) and found.result.finished]
    return of_one_machine([_like(each, known) for each in series])


def _like(series: Series, timings: Iterable[Found]) -> list[Found]:
    """Return the timings of a series."""
    own = _found(series.runs[0])
    return [] if own is None else [each for each in timings if _key(each) == _key(own)]


def _found(run: Run) -> Found | None:
    """Return the run in the form that figures use; None if its method is not registered."""
    try:
        config = RunConfig.from_dict(run.config)
    except ValueError:
        return None
    return Found(RunResult(run.folder, config, run.metrics), run.data, run.environment)


def _key(found: Found) -> str:
    """Return a key that is equal for a run and its timing."""
    return timing_key(found.config, Place()) + json.dumps(found.data.get("fingerprint"))
