"""All trials of equal budgets on one task as a table in Markdown, one row for each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from torch_locoprop.study.equal_budgets.trials import best_of, is_search, position, space_of
from torch_locoprop.study.methods.search_space import Span

EDGE = 0.05
"""A setting in this part of its space, at either end, counts as one at the edge."""

HEAD = (
    "method",
    "trials",
    "diverged",
    "train, best",
    "test of it",
    "train, median",
    "train, seeds",
    "best settings",
    "at an edge",
)


def table(content: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for every method with a trial that came to its end, the best first."""
    ended = {line["method"] for line in results if is_search(line) and not line["diverged"]}
    methods = [method for method in content["spaces"] if method in ended]
    methods.sort(key=lambda method: best_of(results, method)["train_loss"])
    rows = [_row(content, results, method) for method in methods]
    rule = ["---", *["---:"] * 6, "---", "---"]
    return "\n".join("| " + " | ".join(row) + " |" for row in [list(HEAD), rule, *rows])


def edges(content: Mapping[str, Any], settings: Mapping[str, Any], method: str) -> list[str]:
    """Return the settings that are at an end of the method's space, or outside of it."""
    found = []
    for name, domain in space_of(content, method).items():
        place = position(settings[name], domain)
        if not EDGE < place < 1 - EDGE:
            reversed_ends = isinstance(domain, Span) and domain.of_rest
            found.append(f"{name} ({'high' if (place > 0.5) != reversed_ends else 'low'})")
    return found


def _row(
    content: Mapping[str, Any], results: Sequence[Mapping[str, Any]], method: str
) -> list[str]:
    best = best_of(results, method)
    own = [line for line in results if line["method"] == method]
    own.sort(key=lambda line: line["seed"])
    search = [line for line in own if is_search(line)]
    losses = [float("inf") if line["diverged"] else line["train_loss"] for line in search]
    middle = median(losses)
    seeds = [line["train_loss"] for line in own if line["trial"] == best["trial"]]
    settings = ", ".join(f"{name} {value:.4g}" for name, value in best["settings"].items())
    return [
        method,
        f"{len(search)}",
        f"{sum(line['diverged'] for line in search)}",
        f"{best['train_loss']:.2f}",
        f"{best['test_loss']:.1f}",
        "diverged" if middle == float("inf") else f"{middle:.2f}",
        ", ".join("diverged" if loss is None else f"{loss:.2f}" for loss in seeds),
        settings,
        ", ".join(edges(content, best["settings"], method)) or "none",
    ]
