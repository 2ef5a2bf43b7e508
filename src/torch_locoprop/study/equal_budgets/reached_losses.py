"""How soon winners reach losses near the lowest one, and on which share of the tasks they end there.

Both compare methods that have used up their budget, at the seeds of their winners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from torch_locoprop.study.equal_budgets.task_study import TaskStudy
from torch_locoprop.study.equal_budgets.trials import Line

FACTORS = (1.2, 1.1, 1.05, 1.02)
"""The targets, as multiples of the lowest mean of the final train losses."""

WITHIN = (1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0)
"""The factors of the profile."""


def reach_table(study: TaskStudy, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the epochs and seconds to the targets as Markdown; empty without a finished method.

    Args:
        study: The study on one task.
        rows: Its outcome, `summary.summary`.
    """
    means = _means(rows, "train", "train")
    if not means:
        return ""
    targets = [min(means.values()) * factor for factor in FACTORS]
    results = study.results()
    winners = {method: study.winners(method, results)["train"] for method in means}
    head = ["method", *(f"train loss {target:.2f}" for target in targets)]
    table = [head, ["---", *["---:"] * len(targets)]]
    for method, winner in winners.items():
        finals = study.finals(winner, results)
        table.append([method, *(_cell(finals, target) for target in targets)])
    shares = ", ".join(f"{factor:g}" for factor in FACTORS)
    return (
        f"{_markdown(table)}\n\nThe epoch after which the train loss was first this low, and the "
        "seconds until then, mean ± standard deviation over the seeds. The losses are "
        f"{shares} times the lowest mean at the end. Compare seconds only if nothing else ran beside "
        "the trials.\n"
    )


def profile_table(outcomes: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return on which share of the tasks each method ends within a factor of the lowest loss.

    Methods are compared by the winner of the train loss, and by the test loss of the winner on held-out
    images. Methods that have not finished on all tasks are left out, and one task has no profile.

    Args:
        outcomes: The outcome of each task, `summary.summary`.
    """
    parts = []
    for loss, by, title in (
        ("train", "train", "Train loss"),
        ("test", "held-out", "Test loss, by held-out"),
    ):
        means = [_means(rows, loss, by) for rows in outcomes.values()]
        shared = [name for name in means[0] if all(name in each for each in means)] if means else []
        if len(means) < 2 or len(shared) < 2:
            return ""
        ratios = {name: [each[name] / min(each.values()) for each in means] for name in shared}
        head = [title, *(f"within {100 * factor - 100:.0f} %" for factor in WITHIN)]
        table = [head, ["---", *["---:"] * len(WITHIN)]]
        for name in sorted(shared, key=lambda name: mean(ratios[name])):
            found = (sum(ratio <= factor for ratio in ratios[name]) for factor in WITHIN)
            table.append([name, *(f"{count} of {len(means)}" for count in found)])
        parts.append(_markdown(table))
    parts.append(f"Tasks: {', '.join(outcomes)}. Means over the seeds, divided by the lowest mean.")
    return "\n\n".join(parts) + "\n"


def _means(rows: Sequence[Mapping[str, Any]], loss: str, by: str) -> dict[str, float]:
    """Return the mean final loss of each method whose winner has one at every seed."""
    found = {row["method"]: row["winners"][by][loss] for row in rows if row["winners"]}
    return {method: mean(each) for method, each in found.items() if None not in each}


def _cell(finals: Sequence[Line], target: float) -> str:
    """Return the epochs and seconds to a target, or a dash if some seed did not get there."""
    epochs, seconds = [], []
    for line in finals:
        losses = enumerate(line["train"])
        epoch = next((at for at, loss in losses if loss is not None and loss <= target), None)
        if epoch is None:
            return "–"
        epochs.append(epoch)
        seconds.append(epoch * line["seconds"] / line["epoch"])
    return f"{_spread(epochs)}: {_spread(seconds)} s"


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def _markdown(table: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in table)
