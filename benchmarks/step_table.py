"""The table of `benchmarks.steps`, from the content of its JSON file; files and tables of others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.contestants import BACKPROP, FLOOR

Row = dict[str, Any]


def table(head: list[str], cells: Iterable[list[str]]) -> str:
    """Return a Markdown table; all columns but the first are right-aligned."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(content: dict[str, Any]) -> str:
    """Return the Markdown tables of all models, with the machine and the settings."""
    parts = [
        f"{model}, batch {content['batch']}, T = {content['local_steps']}\n\n{_table(rows)}"
        for model, rows in content["models"].items()
    ]
    where = content["environment"]
    notes = [f"{where['machine']}, {where['threads']} threads, PyTorch {where['torch']}"]
    notes.append(content["precision"])
    if "rounds" in content:  # older files do not contain it
        notes.append(f"{content['rounds']} rounds of {content['steps']} steps")
        notes.append(f"load of the machine before {content['load'][0]}, after {content['load'][1]}")
    missing = {
        f"{row['name']} was not measured. {row['missing']}"
        for rows in content["models"].values()
        for row in rows
        if row["missing"]
    }
    more = [content["note"]] if "note" in content else []
    return "\n\n".join([*parts, "; ".join(notes) + ".", *more, *sorted(missing)])


def _table(rows: list[Row]) -> str:
    replayed = any(row["graph_ms"] is not None for row in rows)
    head = ["", "loop, ms", "quartiles", "optimizer, ms", "× BackProp", "× products"]
    if replayed:
        head += ["CUDA graph, ms", "× BackProp", "× products"]
    head += ["needed GFLOP", "computed", "TFLOP/s" if replayed else "GFLOP/s", "peak MiB"]
    by_key = {row["key"]: row for row in rows}
    base, floor = by_key.get(BACKPROP, {}), by_key.get(FLOOR, {})
    return table(head, [_line(row, base, floor, replayed) for row in rows])


def _line(row: Row, base: Row, floor: Row, replayed: bool) -> list[str]:
    loop, best = row["loop_ms"], row["graph_ms"] or row["loop_ms"]
    name = row["name"] + (" (not installed)" if row["missing"] else "")
    spread = "–".join(map(_number, row["quartiles_ms"] or [])) or "–"
    cells = [name, _number(loop), spread, _number(row["optimizer_ms"])]
    cells += [_ratio(loop, base.get("loop_ms")), _ratio(loop, floor.get("loop_ms"))]
    if replayed:
        graph = row["graph_ms"]
        cells += [_number(graph), _ratio(graph, base.get("graph_ms"))]
        cells += [_ratio(graph, floor.get("graph_ms"))]
    needed = row["needed_gflop"]
    speed = None if needed is None or best is None else (1 if replayed else 1e3) * needed / best
    cells += [_number(needed), _number(row["counted_gflop"]), _number(speed)]
    return [*cells, _number(row["peak_mib"])]


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(value: float | None, base: float | None) -> str:
    return "–" if value is None or not base else f"{value / base:.2f}"


def write(path: Path, content: dict[str, Any]) -> None:
    """Write the content as JSON; make the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def show(paths: Iterable[Path]) -> None:
    """Print the tables of JSON files of `benchmarks.steps`."""
    for path in paths:
        display(f"## {path.stem}\n\n{markdown(json.loads(path.read_text()))}\n")


def display(text: str) -> None:
    """Print Markdown: formatted on a terminal that rich serves, unchanged elsewhere."""
    try:
        from rich.console import Console
        from rich.markdown import Markdown
    except ImportError:  # machines that measure may have torch alone
        print(text, flush=True)
        return
    console = Console()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        print(text, flush=True)
