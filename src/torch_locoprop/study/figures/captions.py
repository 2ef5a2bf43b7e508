"""The titles and the caption of a figure: its task, its numbers, and how its runs were made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch_locoprop.study import methods
from torch_locoprop.study.figures import images, timings
from torch_locoprop.study.figures.catalog import LossFigure, Panel, Series
from torch_locoprop.study.figures.final_table import final_table
from torch_locoprop.study.figures.loss_lines import Drawn
from torch_locoprop.study.figures.run_library import Found, where_made
from torch_locoprop.study.methods import label
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.run_result import RunResult

CUT = (
    "All lines come from above the frame, which leaves out the first epochs. A caret at its upper edge "
    "marks a line that is above it later."
)


def on_data(heading: str, runs: Iterable[Found]) -> str:
    """Return a heading with the data sets of some runs."""
    return f"{heading} on {_listed(_unique(images.title_of(run.data) for run in runs))}"


def title_of(figure: LossFigure, runs: Iterable[Found]) -> str:
    """Return the title of the picture, with the data sets of its runs."""
    return on_data(figure.entry.heading, runs)


def with_data(panel: Panel, lines: Iterable[Drawn]) -> Panel:
    """Return a panel whose title names its data set."""
    runs = [run for line in lines for run in line.runs]
    return replace(panel, title=on_data(panel.title, runs)) if runs else panel


def subtitle_of(figure: LossFigure) -> str:
    """Return the task in one line, after the note of a quick figure."""
    tasks = _unique(_task(config) for config in figure.configs)
    task = tasks[0] if len(tasks) == 1 else ""
    return "; ".join(part for part in (figure.note, task) if part)


def caption(
    figure: LossFigure, lines: Sequence[Sequence[Drawn]], title: str, footer: Sequence[str]
) -> str:
    """Return the caption file in Markdown: what the figure shows, its numbers, its provenance.

    Args:
        figure: The figure.
        lines: The lines of each panel.
        title: The title of the picture.
        footer: How and where it was made.
    """
    note = f" ({figure.note})" if figure.note else ""
    parts = [f"# {title}", f"Answers to the paper's {figure.entry.paper}{note}. {CUT}"]
    tasks: dict[str, tuple[Panel, Sequence[Drawn]]] = {}
    for panel, drawn in zip(figure.panels, lines, strict=True):
        if drawn and (
            panel.task not in tasks or panel.by == "seconds"
        ):  # the seconds are in its lines
            tasks[panel.task] = (panel, drawn)
    for panel, drawn in tasks.values():
        parts += [f"## {panel.title}" if len(tasks) > 1 else "", final_table(drawn)]
    if any("±" in part for part in parts):
        parts.append("±: the standard deviation over the seeds.")
    return "\n\n".join(filter(None, [*parts, *footer])) + "\n"


def footer_of(
    figure: LossFigure,
    runs: Sequence[Found],
    timed: str,
    missing: Sequence[str],
    command: str,
) -> list[str]:
    """Return how and where a figure was made, in lines.

    Args:
        figure: The figure.
        runs: The runs of the figure.
        timed: How seconds were measured (`how_timed`); empty if nothing is drawn by seconds.
        missing: What is missing, one phrase per reason.
        command: The command that makes the figure.
    """
    configs = [run.config for run in runs]
    # A quick figure says in its note which images it has.
    data = [] if figure.note else _unique(_data(run.data) for run in runs)
    tasks = _unique(_task(config) for config in configs)
    seeds = _unique(str(config.seed) for config in configs)
    facts = [
        *data,
        *(tasks if len(tasks) <= 3 else []),
        f"{_unique(str(c.epochs) for c in configs)[0]} epochs",
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}"
        + (": mean, lowest and highest" if len(seeds) > 1 else ""),
        where_made(runs),
    ]
    lines = [" · ".join(facts), _origins(figure, runs)]
    if timed:
        lines.append(timed)
    if missing:
        lines.append(f"Missing: {'; '.join(missing)}.")
    return [*lines, f"Made by: `{command}`"]


def how_timed(lines: Iterable[Drawn], timed_on: str) -> str:
    """Return how the seconds of some lines were measured, and which are those of CUDA graphs.

    Args:
        lines: The lines; those without seconds are left out.
        timed_on: The machine of the timings.
    """
    timed = {line.series.label: line.runs[0].config for line in lines if line.seconds is not None}
    text = f"Seconds: each method alone for some epochs on {timed_on}."
    if not any(config.device == "cuda" for config in timed.values()):
        return text
    graphs = [name for name, config in timed.items() if timings.replays_cuda_graphs(config)]
    eager = [name for name in timed if name not in graphs]
    ways = {"Replayed as CUDA graphs": graphs, "Run eagerly": eager}
    return " ".join(
        [text, *(f"{way}: {', '.join(names)}." for way, names in ways.items() if names)]
    )


def _origins(figure: LossFigure, runs: Sequence[Found]) -> str:
    """Return where the settings of each method come from."""
    by_origin: dict[str, list[str]] = {}
    for run in runs:
        origin, name = _origin(figure, run.result)
        by_origin.setdefault(origin, []).append(name)
    text = [f"{', '.join(_unique(names))}: {origin}" for origin, names in by_origin.items()]
    settings = next(iter(by_origin)) if len(text) == 1 else "; ".join(text)
    return f"Settings: {settings}.{_tuned_elsewhere(by_origin, runs)}"


def _tuned_elsewhere(origins: Iterable[str], runs: Sequence[Found]) -> str:
    """Return the task of the searches if the figure has runs of another task."""
    tasks = {(run.config.model, run.config.transfer, run.config.batch_size) for run in runs}
    if tasks <= {("standard", "tanh", 1000)} or not any(methods.TUNED in o for o in origins):
        return ""
    return f" {methods.TUNED.capitalize()}: with the standard model, tanh, batches of 1000."


def _origin(figure: LossFigure, result: RunResult) -> tuple[str, str]:
    """Return where the settings of a run come from, and its name among runs of the same origin."""
    method, settings = methods.get(result.config.method), result.config.settings
    changed = {name for name, value in method.settings.items() if settings[name] != value}
    name = label(method.name)
    if "local_steps" in changed:
        name += f" with T = {settings['local_steps']}"
    planned = _planned(figure, result.config)
    if planned:
        panel, series = planned
        if "solver" in series.fixed:
            return series.origin or result.origin, series.label
        if series.origin:
            several = len({each.task for each in figure.panels}) > 1
            return series.origin, name + (f" ({panel.task})" if several else "")
    if changed == {"local_steps"}:
        return f"{method.source}, at T = {method.settings['local_steps']}", name
    return result.origin, name


def _planned(figure: LossFigure, made: RunConfig) -> tuple[Panel, Series] | None:
    """Return the panel and line of a run, at any seed, device and precision."""
    for panel in figure.panels:
        for series in panel.series:
            planned = replace(
                series.config, seed=made.seed, device=made.device, precision=made.precision
            )
            if planned == made:
                return panel, series
    return None


def _task(config: RunConfig) -> str:
    return f"{config.model}, {config.transfer}, batches of {config.batch_size}"


def _data(metadata: dict[str, str]) -> str:
    name = images.TITLES.get(metadata["name"], metadata["name"])
    return f"{name} ({metadata['source']})"


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
