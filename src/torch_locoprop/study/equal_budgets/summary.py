"""The outcome of a study on one task: both winners of every method, as mean and spread over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from torch_locoprop.study.equal_budgets import reached_losses
from torch_locoprop.study.equal_budgets.task_study import WINNERS, TaskStudy
from torch_locoprop.study.equal_budgets.trial_table import edges
from torch_locoprop.study.equal_budgets.trials import Line

HEAD = (
    "method",
    "train",
    "test",
    "train, by held-out",
    "test, by held-out",
    "seconds",
    "settings",
    "at an edge",
)


def summary(study: TaskStudy) -> list[dict[str, Any]]:
    """Return what is known of every method, the lowest train loss first.

    Methods that have not used up their budget come last, without losses: they cannot be compared
    with the others yet.
    """
    results = study.results()
    rows = [_row(study, method, results) for method in study.methods]
    return sorted(rows, key=lambda row: (not row["finished"], _first_mean(row)))


def _row(study: TaskStudy, method: str, results: Sequence[Line]) -> dict[str, Any]:
    finished = study.left(method, results) == 0
    winners = study.winners(method, results) if finished else {}
    return {
        "method": method,
        "finished": finished,
        "trials": sum(line["method"] == method for line in results),
        "winners": {
            name: _winner(study, line, study.finals(line, results))
            for name, line in winners.items()
        },
    }


def _winner(study: TaskStudy, winner: Line, finals: Sequence[Line]) -> dict[str, Any]:
    """Return a winner with its losses at all seeds; None for losses of runs that diverged."""
    return {
        "trial": winner["trial"],
        "settings": winner["settings"],
        "at_an_edge": edges(study.content, winner["settings"], winner["method"]),
        "train": [None if line["diverged"] else line["train_loss"] for line in finals],
        "test": [None if line["diverged"] else line["test_loss"] for line in finals],
        "seconds": mean(line["seconds"] for line in finals),
    }


def _first_mean(row: dict[str, Any]) -> float:
    train = row["winners"].get("train", {}).get("train", [None])
    return float("inf") if None in train else mean(train)


def rows(study: TaskStudy) -> list[list[str]]:
    """Return a row of text for every method, with the columns of `HEAD`."""
    found = []
    for row in summary(study):
        if row["winners"]:
            found.append(_cells(row["method"], *(row["winners"][name] for name in WINNERS)))
        else:
            text = "all diverged" if row["finished"] else f"{row['trials']} trials so far"
            found.append([row["method"], text, *[""] * (len(HEAD) - 2)])
    return found


def table(study: TaskStudy) -> str:
    """Return the outcome as Markdown: a table of losses, and one of epochs to low losses."""
    rule = ["---", *["---:"] * 5, "---", "---"]
    text = "\n".join("| " + " | ".join(row) + " |" for row in (HEAD, rule, *rows(study)))
    budget, reached = study.budget, reached_losses.reach_table(study, summary(study))
    return (
        f"{text}\n\n{budget.trials} trials of each method. Mean ± standard deviation of "
        f"{len(budget.seeds)} seeds of the trial with the lowest train loss, trained on all training "
        "images; the columns by held-out are of the trial with the lowest loss on the held-out "
        "images.\n" + (f"\n{reached}" if reached else "")
    )


def _cells(method: str, by_train: dict[str, Any], by_held_out: dict[str, Any]) -> list[str]:
    same = by_train["trial"] == by_held_out["trial"]
    winners = [by_train] if same else [by_train, by_held_out]
    return [
        method,
        with_spread(by_train["train"]),
        with_spread(by_train["test"]),
        with_spread(by_held_out["train"]),
        with_spread(by_held_out["test"]),
        f"{by_train['seconds']:.1f}",
        *(
            "; by held-out: ".join(text(winner) for winner in winners)
            for text in (_settings, lambda winner: ", ".join(winner["at_an_edge"]) or "none")
        ),
    ]


def _settings(winner: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in winner["settings"].items())


def with_spread(losses: Sequence[float | None]) -> str:
    """Return mean and standard deviation; for diverged runs how many there are."""
    finite = [loss for loss in losses if loss is not None]
    if len(finite) < len(losses):
        return f"{len(losses) - len(finite)} of {len(losses)} diverged"
    return f"{mean(finite):.2f}" + (f" ± {stdev(finite):.2f}" if len(finite) > 1 else "")
