"""Replace settings of a figure by those that a search found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch_locoprop.study.figures.catalog import LossFigure, Panel, Series
from torch_locoprop.study.training.config import RunConfig

TASK = ("dataset", "model", "transfer", "batch_size")
"""The fields that must be equal for tuned settings to be used."""

KINDS = ("solver", "grafting")
"""Settings that must be equal too: numbers tuned for one solver do not fit another."""


def with_tuned(figure: LossFigure, tuned: Sequence[RunConfig]) -> LossFigure:
    """Return the figure with tuned settings in all lines of the same method and task."""
    panels = []
    for panel in figure.panels:
        series = tuple(_series(each, tuned) for each in panel.series)
        panels.append(replace(panel, series=series))
    return replace(figure, panels=tuple(panels))


def is_used(config: RunConfig, panels: Sequence[Panel]) -> bool:
    """Return True if a line uses the settings of this configuration."""
    return any(_fits(config, each) for panel in panels for each in panel.series)


def _series(series: Series, tuned: Sequence[RunConfig]) -> Series:
    fitting = [config for config in tuned if _fits(config, series)]
    if not fitting:
        return series
    best = max(fitting, key=lambda config: _agreement(config, series))
    settings = {**best.settings, **_own(series)}
    return replace(series, config=replace(series.config, settings=settings), origin="")


def _fits(config: RunConfig, series: Series) -> bool:
    one, other = config, series.config
    same_method = _base(one) == _base(other)
    same_task = all(getattr(one, name) == getattr(other, name) for name in TASK)
    same_kind = all(one.settings.get(name) == other.settings.get(name) for name in KINDS)
    return same_method and same_task and same_kind


def _agreement(config: RunConfig, series: Series) -> int:
    """Return how many of the line's own settings are equal in the search."""
    return sum(config.settings.get(name) == value for name, value in _own(series).items())


def _own(series: Series) -> dict[str, object]:
    """Return the settings that the line keeps: its @k, and those that distinguish it from others."""
    settings = series.config.settings
    names = [*series.fixed, *(["every"] if "@" in series.config.method else [])]
    return {name: settings[name] for name in names}


def _base(config: RunConfig) -> str:
    return config.method.partition("@")[0]
