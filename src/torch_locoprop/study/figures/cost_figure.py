"""Make the figure of costs: measurements from a file, or measured now."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch_locoprop.study import atomic_files
from torch_locoprop.study.figures import cost_table, costs, style
from torch_locoprop.study.figures.catalog import entry_of
from torch_locoprop.study.figures.request import FigureRequest, MadeFigure, Say
from torch_locoprop.study.figures.timings import threads_told
from torch_locoprop.study.machine import environment
from torch_locoprop.study.training.config import RunConfig
from torch_locoprop.study.training.population_run import without_numbers

NAME = "costs"


def make_costs(order: FigureRequest, say: Say) -> MadeFigure:
    """Write the table as PNG, PDF and Markdown."""
    configs = [_config(order, method) for method in costs.METHODS if method not in order.without]
    first = configs[0]
    about = _about(configs)
    path = order.folders[0] / NAME / f"{first.model}-{first.batch_size}-{first.device}.json"
    own = path.with_stem(f"{path.stem}-{_digest(about)}")  # where the other is of something else
    there = cost_table.stored(path)
    known = [each for each in (there, cost_table.stored(own)) if each and _same(each[1], about)]
    found = [each for each in known if each[1].get("environment") == about["environment"]]
    other = f"{path} was measured {_difference(there[1], about)}" if there else ""
    if found or (known and order.only_existing):  # wherever it was measured: the notes tell
        table, about = (found or known)[0]
    elif order.only_existing:
        say(f"costs: {other or f'nothing was measured for it in {path}'}, so it is not drawn.")
        return MadeFigure(NAME, (), (), ("all measurements (not made here)",))
    else:
        if other:
            say(f"costs: {other}. It stays as it is; what is measured now goes to {own}.")
        table = []
        for number, config in enumerate(configs, 1):
            say(f"Measuring {config.method} ({number} of {len(configs)}).")
            table.append(costs.measured(config))
        cost_table.store(own if other else path, table, about)
    notes = _notes(first, about, order.command_for(NAME))
    entry = entry_of(NAME)
    subtitle = f"{first.model} autoencoder, b = {first.batch_size}, T = 10"
    if order.scale.note:
        subtitle = f"quick version: {subtitle}"
    picture = cost_table.draw(table, entry.title, subtitle, notes)
    files = style.save(picture, order.out, NAME)
    text = cost_table.markdown(table, notes)
    files.append(order.out / f"{NAME}.md")
    atomic_files.write(files[-1], text)
    return MadeFigure(NAME, tuple(files), text=text)


def _config(order: FigureRequest, method: str) -> RunConfig:
    return order.place.on(order.scale.series("standard", method).config)


def _about(configs: list[RunConfig]) -> dict[str, Any]:
    """What a measurement is of, as JSON knows it."""
    about = {
        "configs": [config.to_dict() for config in configs],
        "environment": environment(configs[0].device),
    }
    return dict(json.loads(json.dumps(about)))


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the measurements are of the same methods: no cost depends on a rate."""
    try:
        return "environment" in one and _methods(one) == _methods(other)
    except (KeyError, TypeError, ValueError):  # of an earlier version
        return False


def _methods(about: dict[str, Any]) -> list[dict[str, Any]]:
    return [without_numbers(RunConfig.from_dict(config)).to_dict() for config in about["configs"]]


def _digest(about: dict[str, Any]) -> str:
    of = {"methods": _methods(about), "environment": about["environment"]}
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:6]


def _difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    """How another measurement differs: where it was made, or else what was measured."""
    old, new = there.get("environment", {}), here["environment"]
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if not names:
        return "with other methods or settings"
    told = ", ".join(f"{name} is {old.get(name)} there and {new.get(name)} here" for name in names)
    return f"in another environment ({told})"


def _notes(config: RunConfig, about: dict[str, Any], command: str) -> list[str]:
    where = about["environment"]
    counted = "of live tensors" if config.device == "cpu" else "allocated on the device"
    threads = f", {threads_told(where)}" if config.device == "cpu" else ""
    torch = str(where["torch"]).partition("+")[0]
    return [
        "Formulas of the paper's Table 1, summed over the layers, every constant one: MiB of "
        "float32 numbers, Gflop at two a multiply-add, k the interval of @k.",
        f"Measured, beyond BackProp's own step: the most bytes {counted} at a time during a "
        "step, and milliseconds; the last column is the whole step.",
        *([about["remark"]] if "remark" in about else []),
        f"{where['machine']}{threads}, {config.precision}, torch {torch}. Made by: {command}",
    ]
