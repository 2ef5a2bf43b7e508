"""The HTML page of the report: a single file that loads nothing from elsewhere.

Text from run files is embedded as JSON and shown in text nodes, never as markup. The content security
policy allows only the scripts of the page, by their hashes, and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from torch_locoprop import __version__
from torch_locoprop.study.report import comparison
from torch_locoprop.study.report.comparison import Task
from torch_locoprop.study.report.gallery import Gallery
from torch_locoprop.study.report.runs import Run, Skipped
from torch_locoprop.study.report.series import LOSSES, Number, Series, Spread

SCRIPTS = ("curves.js", "ranking.js", "address.js", "page.js")


def plotly() -> str:
    """Return the source of plotly.js.

    Raises:
        ImportError: If plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            "The report needs the package plotly, which is not installed. "
            'Install it with: pip install "torch-locoprop[report]".'
        ) from error
    return str(get_plotlyjs())


def page(
    title: str, tasks: Sequence[Task], galleries: Sequence[Gallery], skipped: Sequence[Skipped]
) -> str:
    """Return the HTML of the report.

    Args:
        title: The title of the page.
        tasks: The tasks.
        galleries: The gallery of each task.
        skipped: Folders that could not be read.
    """
    content = {
        "version": __version__,
        "tasks": [
            {**_task(task), "tab": tab, "gallery": pictures.to_dict()}
            for task, tab, pictures in zip(tasks, comparison.tabs(tasks), galleries, strict=True)
        ],
        "skipped": [{"folder": str(folder), "reason": why} for folder, why in skipped],
    }
    scripts = [plotly(), "\n".join(map(_file, SCRIPTS))]
    parts = {
        "title": html.escape(title),
        "policy": _policy(scripts),
        "style": _file("page.css"),
        "data": _embedded(content),
        "plotly": scripts[0],
        "script": scripts[1],
    }
    return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], _file("template.html"))


def ranking(task: Task) -> list[dict[str, Any]]:
    """Return the ranking of a task as a list that JSON can store."""
    return [_series(series, task) for series in task.series]


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _embedded(content: Any) -> str:
    """Return JSON for a script element; no text in it can end the element."""
    text = json.dumps(finite(content), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def finite(content: Any) -> Any:
    """Return the content with None for numbers that are not finite, which JSON lacks."""
    if isinstance(content, dict):
        return {str(name): finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _policy(scripts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()) for each in scripts)
    hashes = " ".join(f"'sha256-{digest.decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _task(task: Task) -> dict[str, Any]:
    environments = _environments(task)
    curves = []
    for series in task.series:
        seconds = _drawn(series, task)
        runs = [_run(run, environments, seconds) for run in series.runs]
        curves.append({**_curves(series, seconds), "runs": runs})
    return {
        "title": task.title,
        "details": task.details,
        "about": task.about,
        "summary": comparison.summary(task),
        "cautions": comparison.cautions(task),
        "clock": {
            "alone": bool(task.clock.seconds),
            "text": comparison.clock_text(task),
            "warning": bool(comparison.clock_notes(task)) and not task.clock.seconds,
        },
        "same": task.same,
        "varied": task.varied,
        "view": {loss: comparison.view(task, loss) for loss in LOSSES},
        "environments": environments,
        "series": [{**row, **more} for row, more in zip(ranking(task), curves, strict=True)],
    }


def _series(series: Series, task: Task) -> dict[str, Any]:
    """Return one row of the ranking."""
    placed = series in task.placed
    alone = task.alone(series)
    return {
        "place": task.placed.index(series) + 1 if placed else None,
        "label": series.label,
        "method": series.method,
        "colour": series.colour,
        "dash": series.dash,
        "state": series.state,
        "remark": series.remark,
        "train": _point(series.last(LOSSES["train"])),
        "test": _point(series.last(LOSSES["test"])),
        "seconds": _point(series.last(_seconds(alone))),
        "alone": alone is not None,
        "memory": _memory(series),
        "epoch": max(run.last.epoch for run in series.runs),
        "seeds": list(series.seeds),
        "origin": series.runs[0].origin,
        "hyper_parameters": series.hyper_parameters,
    }


def _memory(series: Series) -> dict[str, Any] | None:
    """Return the peak memory of the GPU; None on a CPU, where only the whole process is measured."""
    if any(run.config.get("device") != "cuda" for run in series.runs):
        return None
    return _point(series.last(lambda row: row.memory_mib))


def _point(spread: Spread | None) -> dict[str, Any] | None:
    return None if spread is None else spread._asdict()


def _seconds(alone: float | None) -> Number:
    """Return the seconds up to an epoch: by the timing if there is one, or those of the run."""
    return lambda row: row.seconds if alone is None else alone * row.epoch


def _drawn(series: Series, task: Task) -> Number:
    """Return the seconds for curves: NaN for a series without timing where others have one."""
    alone = task.alone(series)
    if alone is None and task.clock.seconds:
        return lambda row: math.nan
    return _seconds(alone)


def _curves(series: Series, seconds: Number) -> dict[str, Any]:
    """Return the curves of a series, with one entry per epoch and None if it is not finite."""
    return {
        "curve": {loss: _columns(series.curve(number)) for loss, number in LOSSES.items()},
        "curve_seconds": _columns(series.curve(seconds))["mean"],
    }


def _columns(curve: list[Spread | None]) -> dict[str, list[Any]]:
    return {
        name: [None if point is None else point[column] for point in curve]
        for column, name in enumerate(Spread._fields)
    }


def _run(run: Run, environments: list[dict[str, Any]], seconds: Number) -> dict[str, Any]:
    return {
        "folder": str(run.folder),
        "seed": run.config["seed"],
        "state": run.state,
        "epoch": run.last.epoch,
        "environment": next(
            each["name"] for each in environments if each["is"] == _environment(run)
        ),
        "command": run.command,
        "own_seconds": run.last.seconds,
        "seconds": [seconds(row) for row in run.metrics],
        **{loss: [number(row) for row in run.metrics] for loss, number in LOSSES.items()},
    }


def _environment(run: Run) -> dict[str, Any]:
    own = {name: run.config.get(name, "unknown") for name in ("device", "precision")}
    return {**own, **run.environment}


def _environments(task: Task) -> list[dict[str, Any]]:
    """Return the distinct environments with a letter and the number of runs of each."""
    found: list[dict[str, Any]] = []
    for run in task.runs:
        here = _environment(run)
        known = next((each for each in found if each["is"] == here), None)
        if known is None:
            known = {"name": _letters(len(found)), "is": here, "runs": 0}
            found.append(known)
        known["runs"] += 1
    return found


def _letters(index: int) -> str:
    """Return A, B, ..., Z, AA, AB, ... for 0, 1, ..."""
    before = _letters(index // 26 - 1) if index >= 26 else ""
    return before + chr(ord("A") + index % 26)
