"""Put settings that a search found in the place of a figure's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch_locoprop.study.figures.catalog import LossFigure, Panel, Series
from torch_locoprop.study.training.config import RunConfig

TASK = ("dataset", "model", "transfer", "batch_size")
"""What has to agree for settings to carry over."""

KINDS = ("solver", "grafting")
"""Settings that are words: numbers tuned for one of them mean nothing for another."""


def with_tuned(figure: LossFigure, tuned: Sequence[RunConfig]) -> LossFigure:
    """Return the figure with the tuned settings wherever method and task agree."""
    panels = []
    for panel in figure.panels:
        series = tuple(_series(each, tuned) for each in panel.series)
        panels.append(replace(panel, series=series))
    return replace(figure, panels=tuple(panels))


def is_used(config: RunConfig, panels: Sequence[Panel]) -> bool:
    """Whether some line takes its settings from this configuration."""
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
    """How many of the settings that make the line what it is the search had too."""
    return sum(config.settings.get(name) == value for name, value in _own(series).items())


def _own(series: Series) -> dict[str, object]:
    """What the line keeps: its @k, and what sets it apart from its neighbours."""
    settings = series.config.settings
    names = [*series.fixed, *(["every"] if "@" in series.config.method else [])]
    return {name: settings[name] for name in names}


def _base(config: RunConfig) -> str:
    return config.method.partition("@")[0]
