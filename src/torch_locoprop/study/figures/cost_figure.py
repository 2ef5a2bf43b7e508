"""Make the figure of costs: measurements from a file, or measured now."""

from __future__ import annotations

from typing import Any

from torch_locoprop.study.config import RunConfig
from torch_locoprop.study.figures import cost_table, costs, style
from torch_locoprop.study.figures.catalog import entry_of
from torch_locoprop.study.figures.order import Made, Order, Say
from torch_locoprop.study.figures.timings import threads_told
from torch_locoprop.study.machine import environment

NAME = "costs"


def make_costs(order: Order, say: Say) -> Made:
    """Write the table as PNG, PDF and Markdown."""
    configs = [_config(order, method) for method in costs.METHODS if method not in order.without]
    first = configs[0]
    about = _about(configs)
    path = order.folders[0] / NAME / f"{first.model}-{first.batch_size}-{first.device}.json"
    table = cost_table.stored(path, about)
    if table is None and order.only_existing:
        say(f"costs: nothing was measured for it in {path}, so it is not drawn.")
        return Made(NAME, (), (), ("all measurements (not made)",))
    if table is None:
        table = []
        for number, config in enumerate(configs, 1):
            say(f"Measuring {config.method} ({number} of {len(configs)}).")
            table.append(costs.measured(config))
        cost_table.store(path, table, about)
    notes = _notes(first, order.command_for(NAME))
    entry = entry_of(NAME)
    subtitle = f"{first.model} autoencoder, b = {first.batch_size}, T = 10"
    if order.scale.note:
        subtitle = f"quick version: {subtitle}"
    picture = cost_table.draw(table, entry.title, subtitle, notes)
    files = style.save(picture, order.out, NAME)
    text = cost_table.markdown(table, notes)
    files.append(style.write(order.out / f"{NAME}.md", text.encode()))
    return Made(NAME, tuple(files), text=text)


def _config(order: Order, method: str) -> RunConfig:
    return order.place.on(order.scale.series("standard", method).config)


def _about(configs: list[RunConfig]) -> dict[str, Any]:
    return {
        "configs": [config.to_dict() for config in configs],
        "environment": environment(configs[0].device),
    }


def _notes(config: RunConfig, command: str) -> list[str]:
    where = environment(config.device)
    counted = "of live tensors" if config.device == "cpu" else "allocated on the device"
    threads = f", {threads_told(where)}" if config.device == "cpu" else ""
    torch = str(where["torch"]).partition("+")[0]
    return [
        "Formulas of the paper's Table 1, summed over the layers, every constant one: MiB of "
        "float32 numbers, Gflop at two a multiply-add, k the interval of @k.",
        f"Measured, beyond BackProp's own step: the most bytes {counted} at a time during a "
        "step, and milliseconds; the last column is the whole step.",
        f"{where['machine']}{threads}, {config.precision}, torch {torch}. Made by: {command}",
    ]
