"""Figures of losses: reuse existing runs, train missing ones, time methods drawn by seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch_locoprop.study import methods
from torch_locoprop.study.figures import captions, catalog, loss_plot, run_jobs, style, timings
from torch_locoprop.study.figures.catalog import LossFigure, Panel, Series
from torch_locoprop.study.figures.figure_request import FigureRequest, MadeFigure, Say
from torch_locoprop.study.figures.loss_lines import Drawn
from torch_locoprop.study.figures.missing_lines import Missing
from torch_locoprop.study.figures.run_library import (
    Found,
    Library,
    clock_key,
    environment_key,
)
from torch_locoprop.study.figures.tuned import is_used, with_tuned
from torch_locoprop.study.machine import environment
from torch_locoprop.study.training.config import RunConfig


@dataclass(frozen=True)
class TimedTasks:
    """The lines of some tasks with their seconds.

    Args:
        lines: The lines of each task.
        machine: The machine of the timings.
        missing: What is missing, one phrase per reason.
    """

    lines: Mapping[str, Sequence[Drawn]]
    machine: str
    missing: tuple[str, ...]


@dataclass
class Maker:
    """Makes the figures of one request.

    Args:
        request: The request.
        watching: Shows the progress of a run.
        say: Called with messages for the user.
        reasons: Why a run is missing, by its configuration.
        failures: Messages about runs that failed.
    """

    request: FigureRequest
    watching: run_jobs.Watching
    say: Say
    reasons: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.library = Library(self.request.folders, self.request.images, self.request.place)

    def loss_figures(self, names: Sequence[str]) -> list[MadeFigure]:
        """Make these figures: train all missing runs, then time, then draw."""
        scale, added = self.request.scale, self.request.added
        figures = [self._asked(catalog.loss_figure(name, scale, added)) for name in names]
        panels = [panel for figure in figures for panel in figure.panels]
        for config in self.request.tuned:
            if panels and not is_used(config, panels):
                self.say(f"No line uses the settings of {config.method} for {config.dataset}.")
        self._run([config for figure in figures for config in figure.configs])
        self._time([config for figure in figures for config in figure.timed])
        return [self._draw(figure) for figure in figures]

    def tasks(self) -> dict[str, list[Drawn]]:
        """Return the lines of every task that compares methods; train missing runs first.

        Tasks that have the same runs, as in quick figures, are one task.
        """
        scale, added = self.request.scale, self.request.added
        figures = {
            task: self._asked(catalog.loss_figure(task, scale, added)) for task in scale.tasks
        }
        self._run([config for figure in figures.values() for config in figure.configs])
        found: dict[str, list[Drawn]] = {}
        seen: list[tuple[RunConfig, ...]] = []
        for task, figure in figures.items():
            if figure.configs not in seen:
                seen.append(figure.configs)
                lines = ((each, self._found(each)) for each in figure.panels[0].series)
                found[task] = [Drawn(each, runs) for each, runs in lines if runs]
        return found

    def timed(self, tasks: Sequence[str]) -> TimedTasks:
        """Return the lines of these tasks with their seconds; train and time missing runs first."""
        figures = [self._asked(self._with_other_timed(task)) for task in tasks]
        self._run([config for figure in figures for config in figure.configs])
        self._time([config for figure in figures for config in figure.timed])
        missing, machine = Missing(), ""
        lines: dict[str, list[Drawn]] = {}
        for task, figure in zip(tasks, figures, strict=True):
            (panel,) = [panel for panel in figure.panels if panel.by == "seconds"]
            clock = self._clock(panel)
            machine = clock.machine or machine
            lines[task] = self._lines(panel, clock, missing)
        return TimedTasks(lines, machine, missing.phrases(set(tasks)))

    def _with_other_timed(self, task: str) -> LossFigure:
        """Return the figure of a task with all other methods that have runs and timings."""
        scale, seeds = self.request.scale, self.request.seeds
        figure = catalog.loss_figure(task, scale, self.request.added)
        drawn = {each.painted_as for each in figure.panels[0].series}
        others = [scale.series(task, name) for name in methods.names() if name not in drawn]
        known = tuple(
            each
            for each in others
            if any(self.library.find(self._at(each.config, seed)) for seed in seeds)
            and self.library.timings(self._timing(each.config))
        )
        panels = (replace(panel, series=(*panel.series, *known)) for panel in figure.panels)
        return replace(figure, panels=tuple(panels))

    def _asked(self, figure: LossFigure) -> LossFigure:
        """Return the figure with the settings, epochs and methods of the request."""
        figure = with_tuned(figure, self.request.tuned)
        panels = tuple(self._panel(panel) for panel in figure.panels)
        return replace(figure, panels=panels)

    def _panel(self, panel: Panel) -> Panel:
        kept = [each for each in panel.series if not self._left_out(each.config.method)]
        epochs = self.request.epochs
        if epochs is not None:
            kept = [replace(each, config=replace(each.config, epochs=epochs)) for each in kept]
        return replace(panel, series=tuple(kept))

    def _left_out(self, method: str) -> bool:
        """Return True if the request excludes the method, or all `name@k` by their name."""
        return not {method, method.partition("@")[0]}.isdisjoint(self.request.without)

    # Runs -------------------------------------------------------------------------------------

    def _run(self, configs: Sequence[RunConfig]) -> None:
        seeded = [self._at(config, seed) for config in configs for seed in self.request.seeds]
        jobs = self._jobs([config for config in seeded if self.library.find(config) is None])
        if not jobs:
            return
        self.say(f"{len(jobs)} runs are missing; they are made in {self.request.folders[0]}.")
        if self.request.jobs > 1:
            done, threads = self._counting(len(jobs)), self.request.scale.threads
            run_jobs.together(jobs, self.request.images, self.request.jobs, done, threads)
        else:
            run_jobs.one_by_one(jobs, self.request.images, self.watching, self._done)

    def _time(self, configs: Sequence[RunConfig]) -> None:
        """Time methods on this machine, unless one machine has timed all of them."""
        wanted = [self._timing(self._at(config, self.request.seeds[0])) for config in configs]
        wanted = [config for config in wanted if not self._unavailable(config)]
        here = self._here()
        if self.request.only_existing or not timings.timed(self.library, wanted, here).left_out:
            return
        missing = [
            config
            for config in wanted
            if here not in map(environment_key, self.library.timings(config))
        ]
        self.say(
            f"Timing {len(missing)} methods, one at a time. Keep the machine free of other work."
        )
        jobs = self._jobs(missing, timing=True)
        run_jobs.one_by_one(jobs, self.request.images, self.watching, self._done)

    def _jobs(self, configs: Sequence[RunConfig], *, timing: bool = False) -> list[run_jobs.Job]:
        """Return the jobs for these runs, and store why others cannot be run."""
        jobs: dict[str, run_jobs.Job] = {}
        for config in configs:
            reason = (
                self._absent(config) if self.request.only_existing else self._unavailable(config)
            )
            if reason:
                self.reasons.setdefault(_key(config), reason)
                continue
            folder = (
                self.library.timing_folder(config, self._here())
                if timing
                else self.library.folder_for(config)
            )
            name = f"{'timing ' if timing else ''}{config.dataset} {config.model} {config.method}"
            jobs.setdefault(_key(config), run_jobs.Job(self.request.place.on(config), folder, name))
        return list(jobs.values())

    def _done(self, outcome: run_jobs.Outcome) -> None:
        self.library.add(outcome.job.folder)
        if outcome.result is None:
            self.reasons[_key(outcome.job.config)] = f"failed: {outcome.failure}"
            self.failures.append(f"{outcome.job.name} failed: {outcome.failure}")
            self.say(self.failures[-1])

    def _counting(self, total: int) -> run_jobs.Done:
        """Return a callback that reports how many jobs have ended."""
        ended = 0

        def done(outcome: run_jobs.Outcome) -> None:
            nonlocal ended
            ended += 1
            self._done(outcome)
            if outcome.result is not None:
                self.say(f"{ended} of {total} runs: {outcome.result.summary}")

        return done

    def _absent(self, config: RunConfig) -> str:
        """Return why an existing run is not drawn."""
        return "not finished" if self.library.begun(config) else "not run"

    def _unavailable(self, config: RunConfig) -> str:
        """Return why the method cannot be run here, or an empty string."""
        return methods.get(config.method).missing_package

    # Pictures ---------------------------------------------------------------------------------

    def _draw(self, figure: LossFigure) -> MadeFigure:
        name, machine = figure.entry.name, ""
        lines: list[list[Drawn]] = []
        missing = Missing()
        for panel in figure.panels:
            clock = self._clock(panel) if panel.by == "seconds" else None
            machine = clock.machine if clock else machine
            lines.append(self._lines(panel, clock, missing))
        absent = missing.phrases({panel.task for panel in figure.panels})
        for each in absent:
            self.say(f"Missing in {name}: {each}.")
        used = {run.result.folder: run for drawn in lines for line in drawn for run in line.runs}
        if not used:
            self.say(f"{name}: none of its runs exists, so it is not drawn.")
            return MadeFigure(name, (), (), absent)
        runs = list(used.values())
        title = captions.title_of(figure, runs)
        if len(figure.panels) > 2:
            named = zip(figure.panels, lines, strict=True)
            panels = tuple(captions.with_data(panel, drawn) for panel, drawn in named)
            figure = replace(figure, panels=panels)
        command = self.request.command_for(name)
        drawn_lines = [line for drawn in lines for line in drawn]
        timed = captions.how_timed(drawn_lines, machine) if machine else ""
        footer = captions.footer_of(figure, runs, timed, absent, command)
        shown = footer if self.request.provenance else ()
        picture = loss_plot.draw(figure, lines, title, captions.subtitle_of(figure), shown)
        files = style.save(picture, self.request.out, name)
        text = captions.caption(figure, lines, title, footer)
        files.append(style.save_caption(text, self.request.out, name))
        return MadeFigure(name, tuple(files), tuple(used), absent)

    def _lines(self, panel: Panel, clock: timings.Clock | None, missing: Missing) -> list[Drawn]:
        """Return the lines of a panel, and store what is missing."""
        drawn = []
        for position, series in enumerate(panel.series):
            runs = self._found(series)
            seconds = clock.seconds.get(position) if clock else None
            if not runs:
                missing.note(panel.task, series.label, self._reason(series))
            elif len(runs) < len(self.request.seeds):
                drawn_seeds = [run.config.seed for run in runs]
                others = [str(seed) for seed in self.request.seeds if seed not in drawn_seeds]
                seeds = f"seed{'s' if len(others) > 1 else ''} {', '.join(others)}"
                missing.note(panel.task, series.label, f"{seeds}: {self._reason(series)}")
            elif clock and seconds is None:
                missing.note(panel.task, series.label, "not timed")
            if runs:
                drawn.append(Drawn(series, runs, seconds))
        return drawn

    def _clock(self, panel: Panel) -> timings.Clock:
        seed = self.request.seeds[0]
        wanted = [self._timing(self._at(each.config, seed)) for each in panel.series]
        return timings.timed(self.library, wanted, self._here())

    def _found(self, series: Series) -> tuple[Found, ...]:
        found = (self.library.find(self._at(series.config, seed)) for seed in self.request.seeds)
        return tuple(each for each in found if each is not None)

    def _reason(self, series: Series) -> str:
        for seed in self.request.seeds:
            reason = self.reasons.get(_key(self._at(series.config, seed)))
            if reason:
                return reason
        return "not run"

    # Configurations ---------------------------------------------------------------------------

    def _at(self, config: RunConfig, seed: int) -> RunConfig:
        return self.request.place.on(replace(config, seed=seed))

    def _timing(self, config: RunConfig) -> RunConfig:
        return timings.timing_config(config, self.request.images.count(config.dataset))

    def _here(self) -> str:
        """Return the key of this machine for timings."""
        place = self.request.place
        device, precision = place.device or place.default_device, place.precision or "fp32"
        return clock_key(environment(device), device, precision)


def _key(config: RunConfig) -> str:
    return json.dumps(config.to_dict(), sort_keys=True)
