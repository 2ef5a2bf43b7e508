"""The figure of costs: its measurements are read from a file, or made now."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch_locoprop.study.figures import cost_table, costs, style
from torch_locoprop.study.figures.catalog import entry_of
from torch_locoprop.study.figures.figure_request import FigureRequest, MadeFigure, Say
from torch_locoprop.study.figures.timings import threads_text
from torch_locoprop.study.machine import environment
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.population_run import without_numbers

NAME = "costs"
COLUMN_NOTES = 2
"""The first notes say what the columns are, the others where they were measured."""


def make_costs(request: FigureRequest, say: Say) -> MadeFigure:
    """Write the table of costs as PNG, PDF and Markdown."""
    configs = [
        _config(request, method) for method in costs.method_names() if method not in request.without
    ]
    first = configs[0]
    about = _about(configs)
    path = request.folders[0] / NAME / f"{first.model}-{first.batch_size}-{first.device}.json"
    own = path.with_stem(f"{path.stem}-{_digest(about)}")  # used if `path` has another measurement
    there = cost_table.stored(path)
    known = [each for each in (there, cost_table.stored(own)) if each and _same(each[1], about)]
    found = [each for each in known if each[1].get("environment") == about["environment"]]
    other = f"{path} was measured {_difference(there[1], about)}" if there else ""
    if found or (known and request.only_existing):  # the notes name the machine
        table, about = (found or known)[0]
    elif request.only_existing:
        say(f"costs: {other or f'there are no measurements in {path}'}, so it is not drawn.")
        return MadeFigure(NAME, (), (), ("all measurements (not made here)",))
    else:
        if other:
            say(f"costs: {other}. It is kept; new measurements go to {own}.")
        table = []
        for number, config in enumerate(configs, 1):
            say(f"Measuring {config.method} ({number} of {len(configs)}).")
            table.append(costs.measured(config))
        cost_table.store(own if other else path, table, about)
    notes = _notes(first, about, request.command_for(NAME))
    entry = entry_of(NAME)
    subtitle = f"{first.model} autoencoder, b = {first.batch_size}, T = 10"
    if request.scale.note:
        subtitle = f"quick version: {subtitle}"
    shown = notes if request.provenance else notes[:COLUMN_NOTES]
    picture = cost_table.draw(table, entry.title, subtitle, shown)
    files = style.save(picture, request.out, NAME)
    text = cost_table.markdown(table, notes)
    files.append(style.save_caption(text, request.out, NAME))
    return MadeFigure(NAME, tuple(files), text=text)


def _config(request: FigureRequest, method: str) -> RunConfig:
    return request.place.on(request.scale.series("standard", method).config)


def _about(configs: list[RunConfig]) -> dict[str, Any]:
    """Return what is measured and where, as a dictionary that JSON can store."""
    about = {
        "configs": [config.to_dict() for config in configs],
        "environment": environment(configs[0].device),
    }
    return dict(json.loads(json.dumps(about)))


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if both measured the same methods; costs do not depend on learning rates."""
    try:
        return "environment" in one and _methods(one) == _methods(other)
    except (KeyError, TypeError, ValueError):  # not a file of this table
        return False


def _methods(about: dict[str, Any]) -> list[dict[str, Any]]:
    return [without_numbers(RunConfig.from_dict(config)).to_dict() for config in about["configs"]]


def _digest(about: dict[str, Any]) -> str:
    of = {"methods": _methods(about), "environment": about["environment"]}
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:6]


def _difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    """Return how another measurement differs: in its environment, or else in its methods."""
    old, new = there.get("environment", {}), here["environment"]
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if not names:
        return "with other methods or settings"
    text = ", ".join(f"{name} is {old.get(name)} there and {new.get(name)} here" for name in names)
    return f"in another environment ({text})"


def _notes(config: RunConfig, about: dict[str, Any], command: str) -> list[str]:
    where = about["environment"]
    counted = "of live tensors" if config.device == "cpu" else "allocated on the device"
    threads = f", {threads_text(where)}" if config.device == "cpu" else ""
    torch = str(where["torch"]).partition("+")[0]
    return [
        "Formulas of the paper's Table 1, summed over the layers, every constant one: MiB of "
        "float32 numbers, Gflop at two a multiply-add, k the interval of @k.",
        f"Measured, beyond BackProp's own step: the most bytes {counted} at a time during a "
        "step, and milliseconds; the last column is the whole step.",
        *([about["remark"]] if "remark" in about else []),
        f"{where['machine']}{threads}, {config.precision}, torch {torch}. Made by: {command}",
    ]
