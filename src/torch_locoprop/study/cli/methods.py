"""`locoprop methods`: the methods of the study and their settings."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from torch_locoprop.study import methods
from torch_locoprop.study.cli import completion, options
from torch_locoprop.study.methods import Choices, Method
from torch_locoprop.study.tuning import spaces


def methods_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHOD",
            autocompletion=completion.method_names,
            help="Methods whose settings are shown.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List the methods, or show the settings of some.

    [bold]locoprop methods[/bold]
        all methods, where their settings come from, and what they need

    [bold]locoprop methods adam kfac@10[/bold]
        the settings of two methods: the defaults, their origin, and where a search looks

    [bold]locoprop methods adam --json[/bold]
        the same as JSON; without a name, of all methods
    """
    chosen = [methods.get(name) for name in names or methods.names()]
    if as_json:
        typer.echo(json.dumps([_as_json(method) for method in chosen]))
        return
    console = Console()
    if not names:
        console.print(_overview(chosen))
        return
    for method in chosen:
        console.print(_settings(method))


def _as_json(method: Method) -> dict[str, Any]:
    space = spaces.known(method, method.settings.get("solver"))
    return {
        "name": method.name,
        "label": methods.label(method.name),
        "settings": method.settings,
        "settings_from": method.source,
        "space": {name: domain.to_dict() for name, domain in space.items()},
        "missing": method.missing_package or None,
    }


def _overview(chosen: list[Method]) -> Table:
    table = Table("method", "in figures", "settings from", "ready")
    for method in chosen:
        ready = method.missing_package or "yes"
        table.add_row(method.name, methods.label(method.name), method.source, ready)
    return table


def _settings(method: Method) -> Table:
    label, needs = methods.label(method.name), method.missing_package
    table = Table(
        "setting",
        "default",
        "searched in",
        title=method.name if label == method.name else f"{method.name} ({label})",
        title_justify="left",
        caption=f"Defaults: {method.source}." + (f" The method {needs}." if needs else ""),
        caption_justify="left",
    )
    space = spaces.known(method, method.settings.get("solver"))
    for name, value in method.settings.items():
        table.add_row(name, str(value), _range(space[name]) if name in space else "")
    return table


def _range(domain: methods.Span | Choices) -> str:
    """Return the range as `--range` takes it."""
    if isinstance(domain, Choices):
        return ",".join(_short(value) for value in domain.values)
    return ":".join(_short(end) for end in sorted(domain.ends))


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
