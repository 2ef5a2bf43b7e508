"""Seconds an epoch takes, from short runs that had the machine to themselves.

`locoprop figure` makes such runs, in subfolders for timings, and draws by their seconds alone. So does
the page, for a task that has some.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch_locoprop.study.figures.run_library import Found, Place, timing_key
from torch_locoprop.study.figures.timings import Clock, of_one_machine
from torch_locoprop.study.report.runs import Run
from torch_locoprop.study.report.series import Series
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.run_result import RunResult


def clock_of(series: Iterable[Series], timings: Sequence[Run]) -> Clock:
    """Return the seconds of the series, by their position, from the machine that timed most."""
    known = [found for run in timings if (found := _found(run)) and found.result.finished]
    return of_one_machine([_like(each, known) for each in series])


def _like(series: Series, timings: Iterable[Found]) -> list[Found]:
    """Those that timed the series."""
    own = _found(series.runs[0])
    return [] if own is None else [each for each in timings if _key(each) == _key(own)]


def _found(run: Run) -> Found | None:
    """The run as the figures know it; None where its method is not known here."""
    try:
        config = RunConfig.from_dict(run.config)
    except ValueError:
        return None
    return Found(RunResult(run.folder, config, run.metrics), run.data, run.environment)


def _key(found: Found) -> str:
    """How many epochs a timing has follows from all the rest, so they need not agree."""
    config = replace(found.config, epochs=1)
    return timing_key(config, Place()) + json.dumps(found.data.get("fingerprint"))
