"""The table of final losses in a caption: mean and spread over seeds, train and test."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

from torch_locoprop.study.figures.catalog import Loss
from torch_locoprop.study.figures.loss_lines import Drawn

HEAD = ("method", "train loss", "test loss", "seeds", "seconds an epoch")


def final_table(lines: Sequence[Drawn]) -> str:
    """Return the final losses of some lines as Markdown, the lowest train loss first.

    The spread is the standard deviation over seeds, where a line has several.
    """
    timed = any(line.seconds is not None for line in lines)
    ranked = sorted(lines, key=lambda line: line.final("train_loss"))
    columns = len(HEAD) if timed else len(HEAD) - 1
    table = [HEAD, ("---", *["---:"] * 4), *(_row(line) for line in ranked)]
    return "\n".join("| " + " | ".join(cells[:columns]) + " |" for cells in table)


def _row(line: Drawn) -> tuple[str, ...]:
    lost = len(line.runs) - len(line.settled)
    seeds = ", ".join(str(run.config.seed) for run in line.settled)
    ends = [_ends(line, "train_loss"), _ends(line, "test_loss")]
    return (
        line.series.label.replace("\n", " "),
        *(["diverged"] * 2 if line.diverged else map(_spread, ends)),
        f"{seeds} ({lost} diverged)" if lost and not line.diverged else seeds,
        "not timed" if line.seconds is None else f"{line.seconds:.3f}",
    )


def _ends(line: Drawn, loss: Loss) -> list[float]:
    return [float(value) for value in line.losses(loss)[:, -1]]


def _spread(values: Sequence[float]) -> str:
    """Return the mean, and the standard deviation of several values."""
    text = f"{mean(values):.2f}"
    return f"{text} ± {stdev(values):.2f}" if len(values) > 1 else text
